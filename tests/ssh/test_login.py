"""Logging in as OpenSSH would: the same keys in the same order, and never a question."""

import shutil
import subprocess

import pytest

from orchestrator.errors import InputError
from tests.ssh.machines import make_key


def hello(client):
    with client.open() as channel:
        return channel.hello()["hostname"]


def refusal(client):
    with pytest.raises(InputError) as error, client.open():
        pass
    return str(error.value)


def public(key):
    return key.with_name(f"{key.name}.pub").read_text()


def only_public(key):
    """The key's private file goes; what the agent has, it keeps."""
    key.unlink()
    return key


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_key_file(host, client, tmp_path, kind):
    key = make_key(tmp_path / "id", kind=kind)
    host.authorize(public(key))
    client.add("gpu8", host, IdentityFile=str(key))
    assert hello(client) == "gpu8.test"


def test_an_encrypted_key_without_an_agent(host, client, tmp_path):
    key = make_key(tmp_path / "id locked", passphrase="secret")
    host.authorize(public(key))
    client.add("gpu8", host, IdentityFile=f'"{key}"')
    message = refusal(client)
    assert "it needs a passphrase" in message
    assert message.endswith(f"add it to your agent: ssh-add '{key}'")
    assert client.ssh("gpu8", "true").returncode == 255


def test_an_encrypted_key_in_the_old_format(host, client, tmp_path):
    key = tmp_path / "id"
    command = ["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "secret", "-f", str(key)]
    subprocess.run(command, check=True)
    client.add("gpu8", host, IdentityFile=str(key))
    assert f"ssh-add {key}" in refusal(client)


def test_a_wrong_key(host, client, tmp_path):
    key = make_key(tmp_path / "id")
    client.add("gpu8", host, IdentityFile=str(key))
    message = refusal(client)
    assert message.startswith(f"gpu8: gpu@127.0.0.1:{host.port} accepts none of the keys offered")
    assert f"offered: {key}" in message
    assert "authorized_keys" in message


def test_no_key_at_all(host, client, tmp_path):
    client.add("gpu8", host, IdentityFile=str(tmp_path / "nothing"))
    assert "offered: nothing" in refusal(client)


def test_a_key_that_others_can_read(host, client, tmp_path):
    key = make_key(tmp_path / "id")
    host.authorize(public(key))
    key.chmod(0o644)
    client.add("gpu8", host, IdentityFile=str(key))
    assert f"{key} (others can read it: chmod 600 it)" in refusal(client)
    assert "UNPROTECTED PRIVATE KEY" in client.ssh("gpu8", "true").stderr


@pytest.mark.parametrize("named", ["key", "public key"])
def test_an_agents_key_of_which_only_the_public_part_is_here(
    host, client, agent, tmp_path, monkeypatch, named
):
    key = make_key(tmp_path / "id")
    host.authorize(public(key))
    agent.add(key)
    only_public(key)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    client.add("gpu8", host, IdentityFile=str(key) + (".pub" if named == "public key" else ""))
    assert hello(client) == "gpu8.test"
    assert client.ssh("gpu8", "true").returncode == 0


def test_an_encrypted_key_with_an_agent(host, client, agent, tmp_path, monkeypatch):
    """Its public part stands in the file in clear, with no .pub beside it."""
    key = make_key(tmp_path / "id")
    agent.add(key)
    host.authorize(public(key))
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(key)], check=True)
    key.with_name("id.pub").unlink()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    client.add("gpu8", host, IdentityFile=str(key))
    assert hello(client) == "gpu8.test"


@pytest.fixture
def strict_host(make_host):
    host = make_host(options={"MaxAuthTries": "2"})
    yield host
    host.tidy()


def test_many_agent_keys(strict_host, client, agent, tmp_path, monkeypatch):
    """A host that allows two tries: with IdentitiesOnly the right key is the first."""
    keys = [make_key(tmp_path / f"id_{n}") for n in range(5)]
    agent.add(*keys)
    strict_host.authorize(public(keys[-1]))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    client.add("gpu8", strict_host, IdentityFile=str(keys[-1]))
    assert hello(client) == "gpu8.test"
    assert client.ssh("gpu8", "true").returncode == 0

    client.config.unlink()
    client.add("gpu8", strict_host, IdentityFile=str(tmp_path / "none"), IdentitiesOnly="no")
    message = refusal(client)
    assert "IdentitiesOnly yes" in message
    assert "Too many authentication failures" in client.ssh("gpu8", "true").stderr


def test_agent_keys_that_no_file_names(host, client, agent, tmp_path, monkeypatch):
    key = make_key(tmp_path / "id")
    agent.add(key)
    host.authorize(public(key))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    client.add("gpu8", host, IdentityFile=str(tmp_path / "none"), IdentitiesOnly="no")
    assert hello(client) == "gpu8.test"


def test_which_agent(host, client, agent, tmp_path, monkeypatch):
    key = make_key(tmp_path / "id")
    agent.add(key)
    host.authorize(public(key))
    only_public(key)
    client.add("named", host, IdentityFile=str(key), IdentityAgent=str(agent.socket))
    client.add("none", host, IdentityFile=str(key), IdentityAgent="none")
    client.add("gone", host, IdentityFile=str(key), IdentityAgent=str(tmp_path / "gone"))
    with client.open("named") as channel:
        assert channel.hello()["hostname"] == "gpu8.test"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.socket))
    with pytest.raises(InputError, match="the agent does not have it"), client.open("none"):
        pass
    with pytest.raises(InputError, match=r"the agent at .*gone"), client.open("gone"):
        pass


@pytest.fixture
def certified(host, tmp_path):
    """A key that the host lets in by its certificate alone."""
    authority, key = make_key(tmp_path / "authority"), make_key(tmp_path / "id")
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", "gpu", f"{key}.pub"]
    subprocess.run(command, check=True)
    host.authorize(f"cert-authority {public(authority)}")
    return key


def test_a_certificate_beside_its_key(host, client, certified):
    client.add("gpu8", host, IdentityFile=str(certified))
    assert hello(client) == "gpu8.test"


def test_a_certificate_elsewhere(host, client, certified, tmp_path):
    certificate = shutil.move(f"{certified}-cert.pub", tmp_path / "elsewhere.pub")
    client.add("gpu8", host, IdentityFile=str(certified), CertificateFile=str(certificate))
    assert hello(client) == "gpu8.test"


@pytest.mark.parametrize("key_in_agent", ["with its certificate", "alone"])
def test_a_certificate_and_an_agent(host, client, certified, agent, key_in_agent):
    aside = certified.with_name("aside")
    if key_in_agent == "alone":
        shutil.move(f"{certified}-cert.pub", aside)
    agent.add(certified)
    if key_in_agent == "alone":
        shutil.move(aside, f"{certified}-cert.pub")
    only_public(certified)
    client.add("gpu8", host, IdentityFile=str(certified), IdentityAgent=str(agent.socket))
    assert hello(client) == "gpu8.test"


def test_a_key_that_the_agent_will_not_use(host, client, agent, tmp_path, user_key):
    """`ssh-add -c` asks somebody who is not there; the next key is taken."""
    key = make_key(tmp_path / "id")
    host.authorize(public(key))
    subprocess.run(
        ["ssh-add", "-q", "-c", str(key)], env={"SSH_AUTH_SOCK": str(agent.socket)}, check=True
    )
    client.add("gpu8", host, IdentityAgent=str(agent.socket))
    with client.config.open("a") as file:
        file.write(f"  IdentityFile {key}\n")
    lines = client.config.read_text().splitlines()
    ordered = [line for line in lines if str(key) in line] + [f"  IdentityFile {user_key}"]
    others = [line for line in lines if "IdentityFile" not in line]
    client.config.write_text("\n".join([*others, *ordered]) + "\n")
    assert hello(client) == "gpu8.test"


def test_include_and_match(host, client, tmp_path):
    client.add("gpu8", host)
    included = tmp_path / "included"
    client.config.rename(included)
    client.config.write_text(
        f"Include {included}\nMatch originalhost eight exec true\n  HostName 127.0.0.1\n"
        f"  Port {host.port}\n  User gpu\n  IdentityFile {client.key}\n"
        f"  UserKnownHostsFile {client.known_hosts}\n"
    )
    for alias in ("gpu8", "eight"):
        with client.open(alias) as channel:
            assert channel.hello()["hostname"] == "gpu8.test"


def test_what_is_not_honoured_is_named(host, client, tmp_path):
    client.add("gpu8", host, IdentityFile=str(tmp_path / "none"), PKCS11Provider="/usr/lib/p.so")
    assert "not used here: PKCS11Provider" in refusal(client)


def test_a_user_who_is_not_let_in(host, client):
    client.add("gpu8", host, User="stranger")
    assert "stranger@127.0.0.1" in refusal(client)

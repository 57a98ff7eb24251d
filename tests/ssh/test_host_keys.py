"""Host keys: unknown, changed and revoked ones are refused, and one command pins them."""

import os
import pty
import re
import shlex
import sys

import pytest

from orchestrator import hosts
from orchestrator.errors import InputError
from orchestrator.ssh_settings import find_route

OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


def refusal(client, alias="gpu8"):
    with pytest.raises(InputError) as error, client.open(alias):
        pass
    return str(error.value)


def run_advice(message):
    """Runs the command that a message ends with; its exit code."""
    words = shlex.split(re.search(r"run: (python -m orchestrator hosts .*)$", message)[1])
    return hosts.run(words[4:])


def assert_trusted(client):
    with client.open() as channel:
        assert channel.hello()["hostname"] == "gpu8.test"
    agreed = client.ssh("gpu8", "hostname")
    assert agreed.stdout == "gpu8.test\n", agreed.stderr


@pytest.mark.parametrize("settings", [{}, {"StrictHostKeyChecking": "no"}])
def test_an_unknown_key(host, client, settings):
    client.add("gpu8", host, pin=False, **settings)
    client.known_hosts.unlink()
    message = refusal(client)
    assert message.startswith("gpu8: the host's key is not known: it shows the ed25519 key ")
    assert host.fingerprint() in message
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in message
    assert not client.known_hosts.exists()
    assert run_advice(message) == 0
    assert client.known_hosts.stat().st_mode & 0o777 == 0o600
    assert_trusted(client)


def test_a_changed_key(host, client):
    client.add("gpu8", host, pin=False)
    others = f"# mine\n@revoked * {OTHER}x\nelsewhere {OTHER}\n"
    client.known_hosts.write_text(others)
    client.pin("127.0.0.1", host.port, OTHER)
    client.known_hosts.chmod(0o640)
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in client.ssh("gpu8", "true").stderr
    message = refusal(client)
    assert "the host's key has changed" in message
    assert host.fingerprint() in message
    assert f"{client.known_hosts}:4" in message
    assert len(set(re.findall(r"SHA256:[\w+/]{43}", message))) == 2
    assert "address" in message

    before = client.known_hosts.read_bytes()
    arguments = ["trust", "gpu8", f"ssh_config={client.config}"]
    with pytest.raises(InputError, match="only with its fingerprint"):
        hosts.run(arguments)
    with pytest.raises(InputError, match="nothing was pinned"):
        hosts.run([*arguments, "SHA256:" + "A" * 43])
    assert client.known_hosts.read_bytes() == before

    assert run_advice(message) == 0
    assert client.known_hosts.read_text().startswith(others)
    assert len(client.known_hosts.read_text().splitlines()) == 4
    assert client.known_hosts.stat().st_mode & 0o777 == 0o640
    assert_trusted(client)


def test_a_revoked_key(host, client):
    client.add("gpu8", host)
    with client.known_hosts.open("a") as file:
        file.write(f"@revoked * {host.public_key()}\n")
    assert client.ssh("gpu8", "true").returncode == 255
    assert f"marked as revoked ({client.known_hosts}:2)" in refusal(client)
    with pytest.raises(InputError, match="cannot be trusted"):
        hosts.run(["trust", "gpu8", host.fingerprint(), f"ssh_config={client.config}"])


def test_a_list_of_revoked_keys(host, client, tmp_path):
    revoked = tmp_path / "revoked keys"
    client.add("gpu8", host, RevokedHostKeys=f'"{revoked}"')
    assert "no host key can be trusted" in refusal(client)
    revoked.write_text(f"{host.public_key()} old\n")
    assert "marked as revoked" in refusal(client)
    revoked.write_text(f"{OTHER}\n")
    assert_trusted(client)


def test_an_authority_is_told_to_be_unusable(host, client):
    client.add("gpu8", host, pin=False)
    client.known_hosts.write_text(f"@cert-authority *,[127.0.0.1]:* {OTHER}\n")
    message = refusal(client)
    assert f"the @cert-authority line {client.known_hosts}:1 covers it" in message
    assert "cannot be checked here" in message


@pytest.mark.parametrize(
    "settings", [{"HashKnownHosts": "yes"}, {"HostKeyAlias": "Rented-8"}, {"Compression": "yes"}]
)
def test_pinned_as_openssh_would(host, client, settings):
    client.add("gpu8", host, pin=False, **settings)
    client.known_hosts.write_text("# no end of line")
    assert run_advice(refusal(client)) == 0
    first, line = client.known_hosts.read_text().splitlines()
    assert first == "# no end of line"
    name = line.split()[0]
    if "HashKnownHosts" in settings:
        assert name.startswith("|1|")
    else:
        assert name == ("rented-8" if "HostKeyAlias" in settings else f"[127.0.0.1]:{host.port}")
    assert_trusted(client)
    assert hosts.run(["trust", "gpu8", f"ssh_config={client.config}"]) == 0
    assert client.known_hosts.read_text().splitlines() == [first, line]


def test_the_kind_of_key_that_is_pinned_is_asked_for(host, client):
    client.add("gpu8", host, pin=False)
    client.pin("127.0.0.1", host.port, host.public_key("rsa"))
    assert_trusted(client)


def test_a_key_of_another_kind_is_a_change(host, client):
    client.add("gpu8", host, pin=False)
    client.pin("127.0.0.1", host.port, host.public_key("rsa").replace("AAAAB3", "AAAAB4"))
    assert "the host's key has changed" in refusal(client)


def test_a_key_known_without_a_port(host, client):
    client.add("gpu8", host, pin=False)
    client.known_hosts.write_text(f"127.0.0.1 {host.public_key()}\n")
    assert_trusted(client)


def test_another_hosts_name_is_not_in_the_way(host, client):
    """Lines that name more hosts stay, and do not count against the key that is pinned."""
    client.add("gpu8", host, pin=False)
    shared = f"other,[127.0.0.1]:{host.port} {OTHER}\n"
    client.known_hosts.write_text(shared)
    assert run_advice(refusal(client)) == 0
    assert client.known_hosts.read_text().startswith(shared)
    assert_trusted(client)


def test_without_a_terminal_a_first_key_is_pinned_aloud(host, client, capsys):
    client.add("gpu8", host, pin=False)
    assert hosts.run(["trust", "gpu8", f"ssh_config={client.config}"]) == 0
    said = capsys.readouterr().out
    assert host.fingerprint() in said
    assert "pinned unasked" in said
    assert_trusted(client)


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1), ("", 1)])
def test_at_a_terminal_a_person_is_asked(host, client, monkeypatch, answer, code):
    client.add("gpu8", host, pin=False)
    client.pin("127.0.0.1", host.port, OTHER)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        os.write(ours, f"{answer}\n".encode())
        assert hosts.run(["trust", "gpu8", f"ssh_config={client.config}"]) == code
    os.close(ours)
    assert (OTHER in client.known_hosts.read_text()) == (code == 1)


def test_trust_makes_no_login(host, client):
    client.add("gpu8", host, pin=False)
    before = host.log.count("Accepted publickey")
    hosts.run(["trust", "gpu8", f"ssh_config={client.config}"])
    assert host.log.count("Accepted publickey") == before


def test_a_jump_host_that_is_not_known(host, make_host, client):
    inner = make_host(name="inner.test")
    client.add("b1", host, pin=False)
    client.add("inner", inner, ProxyJump="b1")
    message = refusal(client, "inner")
    assert message.startswith("jump host b1 (on the way to inner): the host's key is not known")
    assert f"hosts trust b1 {host.fingerprint()}" in message
    assert run_advice(message) == 0
    with client.open("inner") as channel:
        assert channel.hello()["hostname"] == "inner.test"


def test_trust_goes_through_jump_hosts(host, make_host, client):
    inner = make_host(name="inner.test")
    client.add("b1", host, pin=False)
    client.add("inner", inner, pin=False, ProxyJump="b1")
    arguments = ["trust", "inner", f"ssh_config={client.config}"]
    assert hosts.run(arguments) == 0  # the first that is not trusted
    assert f":{inner.port} " not in client.known_hosts.read_text()
    assert hosts.run([*arguments, inner.fingerprint()]) == 0
    with client.open("inner") as channel:
        assert channel.hello()["hostname"] == "inner.test"


def test_no_file_to_pin_in(host, client):
    client.add("gpu8", host, pin=False, UserKnownHostsFile="none")
    with pytest.raises(InputError, match="no file to pin"):
        hosts.run(["trust", "gpu8", f"ssh_config={client.config}"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["forget", "gpu8"], "hosts knows no 'forget'"),
        (["trust"], "one ssh alias"),
        (["trust", "a", "b"], "one ssh alias"),
        (["trust", "a", "SHA256:short"], "no SHA256 fingerprint"),
        (["trust", "a", "MD5:00:11"], "no SHA256 fingerprint"),
        (["trust", "-oProxyCommand=true"], "no ssh alias"),
    ],
)
def test_what_cannot_be_asked(arguments, reason):
    with pytest.raises(InputError, match=reason):
        hosts.run(arguments)


def test_help(capsys):
    assert hosts.run(["-h"]) == 0
    assert "hosts trust NAME" in capsys.readouterr().out


def test_names_in_the_advice_are_quoted(tmp_path, client, host):
    odd = tmp_path / "it's mine"
    client.add("gpu8", host, pin=False)
    client.config.rename(odd)
    client.config = odd
    assert run_advice(refusal(client)) == 0
    assert find_route("gpu8", str(odd))[0].settings.config == str(odd)

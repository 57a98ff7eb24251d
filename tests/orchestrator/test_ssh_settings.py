"""Settings as OpenSSH has them, with its ssh and without it."""

import os
import shutil
import socket
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.ssh_settings import find_route, parse_jump, ssh_settings

with_ssh = pytest.mark.skipif(not shutil.which("ssh"), reason="OpenSSH's ssh is missing")

CONFIG = """
Host gpu8
  HostName 10.0.0.8
  User gpu
  Port 2222
  IdentityFile ~/.ssh/id_%r_%h
  IdentityFile "{folder}/a key"
  CertificateFile {folder}/%n-cert.pub
  IdentitiesOnly yes
  IdentityAgent {folder}/agent
  UserKnownHostsFile {folder}/known {folder}/known2
  GlobalKnownHostsFile none
  HostKeyAlias rented
  HashKnownHosts yes
  ConnectTimeout 7
  ServerAliveInterval 3
  ServerAliveCountMax 5
  ProxyJump b1,b2
"""


@pytest.fixture(params=[pytest.param("ssh", marks=with_ssh), "no ssh"])
def reader(request, monkeypatch, tmp_path):
    """With OpenSSH's ssh on PATH, and without."""
    if request.param == "no ssh":
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return request.param


@pytest.fixture
def write(tmp_path):
    def write(text, name="config"):
        file = tmp_path / name
        file.write_text(text.replace("{folder}", str(tmp_path)))
        return str(file)

    return write


def test_everything_that_counts(reader, write, tmp_path):
    found = ssh_settings("gpu8", write(CONFIG))
    assert (found.hostname, found.user, found.port) == ("10.0.0.8", "gpu", 2222)
    home = Path.home()
    assert found.identity_files == (f"{home}/.ssh/id_gpu_10.0.0.8", f"{tmp_path}/a key")
    if reader == "ssh":  # paramiko leaves this one's tokens alone
        assert found.certificate_files == (f"{tmp_path}/gpu8-cert.pub",)
    assert found.identities_only
    assert found.identity_agent == f"{tmp_path}/agent"
    assert found.user_known_hosts == (f"{tmp_path}/known", f"{tmp_path}/known2")
    assert found.global_known_hosts == ()
    assert found.host_key_alias == "rented"
    assert found.hash_known_hosts
    assert found.connect_timeout_s == 7
    assert (found.alive_interval_s, found.alive_count) == (3, 5)
    assert found.proxy_jump == "b1,b2"
    assert found.proxy_command is None
    assert found.not_honoured == ()
    assert ("not on PATH" in found.note) is (reader == "no ssh")


def test_defaults(reader, write, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    found = ssh_settings("gpu9", write("# nothing\n"))
    assert (found.hostname, found.port) == ("gpu9", 22)
    assert f"{Path.home()}/.ssh/id_ed25519" in found.identity_files
    assert found.user_known_hosts[0] == f"{Path.home()}/.ssh/known_hosts"
    assert found.identity_agent == "/run/agent"
    assert not found.identities_only
    assert (found.connect_timeout_s, found.alive_interval_s, found.alive_count) == (15, 10, 3)
    assert found.proxy_jump is None
    assert found.address.endswith("@gpu9")


def test_none_everywhere(reader, write, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    found = ssh_settings(
        "gpu8",
        write(
            "Host gpu8\n  ProxyJump none\n  IdentityAgent none\n  UserKnownHostsFile none\n"
            "  IdentityFile none\nHost *\n  ProxyJump b1\n"
        ),
    )
    assert found.proxy_jump is None
    assert found.identity_agent is None
    assert found.user_known_hosts == ()
    assert found.identity_files == ()


def test_user_and_port_come_first(reader, write):
    found = ssh_settings("gpu8", write(CONFIG), user="me", port=99)
    assert (found.user, found.port, found.hostname) == ("me", 99, "10.0.0.8")


@pytest.mark.parametrize("alias", ["ssh://me@gpu8:99", "me@gpu8"])
def test_an_alias_with_a_user(reader, write, alias):
    found = ssh_settings(alias, write(CONFIG))
    assert (found.user, found.hostname) == ("me", "10.0.0.8")


def test_a_proxy_commands_tokens(reader, write):
    found = ssh_settings(
        "gpu8",
        write("Host gpu8\n HostName far\n User me\n Port 7\n ProxyCommand nc %h %p %r\n"),
    )
    assert found.proxy_command == "nc far 7 me"


@with_ssh
def test_all_tokens(write):
    config = write("Host gpu8\n HostName far\n ProxyCommand x %n %k %l %L %i %d %%h\n")
    found = ssh_settings("gpu8", config)
    machine = socket.gethostname()
    short = machine.split(".")[0]
    assert found.proxy_command == f"x gpu8 gpu8 {machine} {short} {os.getuid()} {Path.home()} %h"


@with_ssh
def test_the_agent_may_be_a_variable(write, monkeypatch):
    monkeypatch.setenv("MY_AGENT", "/run/mine")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    config = write("Host a\n IdentityAgent $MY_AGENT\nHost b\n IdentityAgent SSH_AUTH_SOCK\n")
    assert ssh_settings("a", config).identity_agent == "/run/mine"
    assert ssh_settings("b", config).identity_agent == "/run/agent"


@with_ssh
def test_include_and_match(write, tmp_path):
    write("Host gpu8\n  HostName 10.1.1.1\n", "included")
    config = write("Include {folder}/included\nMatch originalhost gpu8 exec true\n  User matched\n")
    found = ssh_settings("gpu8", config)
    assert (found.hostname, found.user) == ("10.1.1.1", "matched")


@with_ssh
def test_known_hosts_files_with_spaces(write, tmp_path):
    config = write('Host *\n UserKnownHostsFile "{folder}/a b/known" {folder}/c "{folder}/d e"\n')
    found = ssh_settings("gpu8", config).user_known_hosts
    assert found == (f"{tmp_path}/a b/known", f"{tmp_path}/c", f"{tmp_path}/d e")


def test_include_needs_ssh(write, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"has an Include, which needs OpenSSH's ssh"):
        ssh_settings("gpu8", write("Host a\n\tinclude other\n"))


@with_ssh
def test_what_is_not_honoured_is_named(write):
    config = write(
        "Host gpu8\n PKCS11Provider /x.so\n BindInterface eth0\n GSSAPIAuthentication yes\n"
        " PubkeyAuthentication no\n KnownHostsCommand /bin/x\n"
    )
    assert set(ssh_settings("gpu8", config).not_honoured) == {
        "PKCS11Provider",
        "BindInterface",
        "GSSAPIAuthentication",
        "PubkeyAuthentication no",
        "KnownHostsCommand",
    }
    with pytest.raises(InputError, match="ProxyUseFdpass"):
        ssh_settings("gpu8", write("Host *\n ProxyUseFdpass yes\n ProxyCommand x\n"))


@pytest.mark.parametrize(
    "alias", ["", "-oProxyCommand=touch pwned", "-G", "a\nb", "a\0b", "a\rHost b"]
)
def test_no_alias(reader, write, alias, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"is no ssh alias; set host\.alias"):
        ssh_settings(alias, write(CONFIG))
    assert not (tmp_path / "pwned").exists()


@with_ssh
@pytest.mark.parametrize(
    "alias", ["$(touch pwned)", "`touch pwned`", "a b; touch pwned", "x" * 2000]
)
def test_odd_aliases_reach_no_shell(write, alias, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        assert ssh_settings(alias, write("Host *\n User me\n")).user == "me"
    except InputError as error:
        assert "ssh refuses this alias" in str(error)  # noqa: PT017 -- either is right
    assert not (tmp_path / "pwned").exists()


def test_a_config_that_is_wrong(reader, write, tmp_path):
    with pytest.raises(InputError, match="gpu8"):
        ssh_settings("gpu8", str(tmp_path / "missing"))
    if reader == "ssh":
        with pytest.raises(InputError, match="Bad configuration option"):
            ssh_settings("gpu8", write("Host a\n  NoSuchOption yes\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b1", (None, "b1", None)),
        ("me@b1:2200", ("me", "b1", 2200)),
        ("ssh://me@b1:2200/", ("me", "b1", 2200)),
        ("[fe80::1]:22", (None, "fe80::1", 22)),
        ("me@[fe80::1]", ("me", "fe80::1", None)),
        ("fe80::1", (None, "fe80::1", None)),
        ("a@b@c", ("a@b", "c", None)),
    ],
)
def test_jump_specs(text, expected):
    assert parse_jump(text) == expected


@pytest.mark.parametrize("text", ["", "@b1", "b1:", "b1:x", "[fe80::1", "me@"])
def test_jump_specs_that_are_none(text):
    with pytest.raises(InputError, match="ProxyJump"):
        parse_jump(text)


def names(route):
    return [hop.settings.alias for hop in route]


@with_ssh
def test_routes(write):
    config = write(
        "Host target\n ProxyJump b1,me@b2:2200\nHost b1\n ProxyJump b0\nHost b2\n ProxyJump wrong\n"
        " User not-me\nHost beside\n ProxyJump b1\nHost direct\n"
    )
    route = find_route("target", config)
    assert names(route) == ["b0", "b1", "b2", "target"]
    assert (route[2].settings.user, route[2].settings.port) == ("me", 2200)
    assert route[2].settings.proxy_command is None
    assert [hop.trust for hop in route] == ["b0", "b1", "target", "target"]
    assert route[1].name == "jump host b1 (on the way to target)"
    assert names(find_route("beside", config)) == ["b0", "b1", "beside"]
    assert names(find_route("direct", config)) == ["direct"]


@with_ssh
def test_a_hop_named_with_its_user_is_reached_by_a_url(write):
    config = write("Host target\n ProxyJump me@b1:2200\nHost six\n ProxyJump me@[::1]:2200\n")
    hop = find_route("target", config)[0]
    assert hop.trust == "ssh://me@b1:2200"
    again = ssh_settings(hop.trust, config)
    assert (again.user, again.hostname, again.port) == ("me", "b1", 2200)
    hop = find_route("six", config)[0]
    assert (hop.settings.hostname, hop.trust) == ("::1", "six")


@pytest.mark.parametrize(
    "text",
    [
        "Host a\n ProxyJump b\nHost b\n ProxyJump a\n",
        "Host a\n ProxyJump b,c,b\n",
        "Host *\n ProxyJump b\n",
    ],
)
def test_loops(reader, write, text):
    with pytest.raises(InputError, match=r"reached through itself|jumphost loop"):
        find_route("a", write(text))

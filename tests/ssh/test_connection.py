"""The host's program over one SSH connection: sent once, started by any shell, gone afterwards."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.delay_line import DelayLine
from orchestrator.channel import PROGRAM, Request
from orchestrator.errors import HostError, HostUnreachable, InputError
from orchestrator.paths import CLONE
from tests.ssh.machines import BASE, PYTHONS

ODD_NAMES = [
    "sp ace",
    "qu'o\"te",
    "$(touch pwned)",
    "`touch pwned`; touch pwned & #",
    "new\nline",
    "tab\tand \\ and \\n",
    "-rf",
    "*",
    "A=b",
    "!x",
    "~",
    "ünïcødé-模型-🚀",
    "a" * 150 + "/" + "b" * 150,
]


def programs(host):
    return sorted((host.home / "work/programs").iterdir())


def test_the_program_answers_from_the_host(host, client):
    client.add("gpu8", host)
    with client.open() as channel:
        hello = channel.hello()
        assert channel.name == "gpu8"
    assert hello["hostname"] == "gpu8.test"
    assert hello["root"] == "/home/gpu/work"
    assert hello["executable"] == "/mnt/venv/bin/python"
    assert "Accepted publickey for gpu" in host.log
    clone = Path(f"{host.root}{CLONE}")
    assert not clone.is_dir() or not list(clone.iterdir()), "the clone can be seen from the host"
    assert not Path(f"{host.root}{client.folder}").exists()


def test_the_program_goes_over_once(host, client):
    with DelayLine(host.port) as line:
        client.add("gpu8", host, port=line.port)
        with client.open() as channel:
            channel.hello()
        first, (stored,) = line.sent, programs(host)
        line.reset_counts()
        with client.open() as channel:
            channel.hello()
    assert line.connections == 1
    assert first - line.sent > 0.95 * PROGRAM.stat().st_size
    assert stored.read_bytes() == PROGRAM.read_bytes()
    assert stored.stat().st_mode & 0o777 == 0o600
    assert programs(host) == [stored]


def test_a_damaged_program_is_replaced(host, client):
    client.add("gpu8", host)
    with client.open():
        pass
    (stored,) = programs(host)
    stored.write_bytes(b"print('not me')")
    with client.open() as channel:
        assert channel.hello()["hostname"] == "gpu8.test"
    assert stored.read_bytes() == PROGRAM.read_bytes()


def test_programs_of_long_ago_are_removed(host, client):
    client.add("gpu8", host)
    with client.open():
        pass
    (stored,) = programs(host)
    old, young = stored.with_name("0" * 64 + ".py"), stored.with_name("1" * 64 + ".py")
    for other in (old, young):
        other.write_bytes(b"")
        os.chown(other, stored.stat().st_uid, stored.stat().st_gid)
    os.utime(old, (0, 0))
    os.utime(stored, (0, 0))  # in use, however old
    with client.open() as channel:
        channel.hello()
    assert programs(host) == sorted([stored, young])


def test_commands_that_start_at_once_all_get_it(host, client):
    client.add("gpu8", host)

    def hello(_):
        with client.open() as channel:
            return channel.hello()["pid"]

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(hello, range(4)))) == 4
    assert len(programs(host)) == 1


def test_one_session_is_enough(host, client):
    client.add("gpu8", host)
    sessions = host.log.count("Starting session")
    with client.open() as channel:
        channel.hello()
        replies = channel.pipeline([Request(op="list") for _ in range(50)])
    assert all(reply.ok for reply in replies)
    assert host.log.count("Starting session") == sessions + 1
    assert "on pts" not in host.log


@pytest.mark.parametrize("noise", ["printf 'no newline'", "seq 2000", "echo oops >&2"])
def test_what_login_files_print_is_skipped(host, client, noise):
    client.add("gpu8", host)
    (host.home / ".bashrc").write_text(f"{noise}\n")
    with client.open() as channel:
        assert channel.hello()["hostname"] == "gpu8.test"


def test_endless_noise_is_an_error(host, client):
    client.add("gpu8", host)
    (host.home / ".bashrc").write_text("seq 200000\n")
    with pytest.raises(HostError, match=r"gpu8: the login shell did not start"), client.open():
        pass


def test_a_login_that_only_talks_is_an_error(host, client):
    client.add("gpu8", host)
    (host.home / ".bashrc").write_text("echo This account is closed.; exit 1\n")
    with pytest.raises(HostError, match=r"gpu8: .*This account is closed\."), client.open():
        pass


@pytest.mark.parametrize("python", ["/nowhere/python", "nosuchpython", "~/python", "/etc/passwd"])
def test_an_interpreter_that_is_not_there(host, client, python):
    client.add("gpu8", host)
    with (
        pytest.raises(InputError, match=r"gpu8: .* cannot be run there .*set host\.python"),
        client.open(python=python),
    ):
        pass


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_an_interpreter_that_is_too_old(host, client, version):
    client.add("gpu8", host)
    found = sorted(PYTHONS.glob(f"{version}.*/bin/python{version}"))
    if not found:
        pytest.skip(f"there is no Python {version} beside this one")
    with (
        pytest.raises(InputError, match=rf"is Python {version}\.\d+ there, and 3\.10 or newer"),
        client.open(python=str(found[0])),
    ):
        pass
    assert not (host.home / "work").exists()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_name_is_read_by_a_shell(host, client, name):
    client.add("gpu8", host)
    folder = host.home / name
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(BASE / "bin/python3")
    with client.open(python=f"~/{name}/python", work=f"~/there/{name}") as channel:
        assert channel.hello()["root"] == f"/home/gpu/there/{name}"
    assert not list(host.home.rglob("pwned"))
    os.chown(folder, host.home.stat().st_uid, host.home.stat().st_gid)


@pytest.mark.parametrize("field", ["python", "work"])
@pytest.mark.parametrize("value", ["", "a\0b"])
def test_values_that_are_no_path(client, host, field, value):
    client.add("gpu8", host)
    with pytest.raises(InputError, match=rf"host\.{field}"), client.open(**{field: value}):
        pass


@pytest.mark.parametrize("work", ["/mnt/venv/work", "/proc/work", "/etc/passwd/work"])
def test_a_work_folder_that_cannot_be_written(host, client, work):
    client.add("gpu8", host)
    with pytest.raises(InputError, match=r"gpu8: .*set host\.work to"), client.open(work=work):
        pass


def test_a_work_folder_of_nobody(host, client):
    client.add("gpu8", host)
    with (
        pytest.raises(InputError, match=r"no home folder for ~nobody-here"),
        client.open(work="~nobody-here/work"),
    ):
        pass


def test_a_full_disk(host, client):
    client.add("gpu8", host)
    small = host.home / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=777", "tmpfs", "/home/gpu/small"]
    subprocess.run(host.inside(*mount), check=True)
    try:
        with (
            pytest.raises(HostError, match=r"No space left.*free some space there"),
            client.open(work="~/small"),
        ):
            pass
        assert not list((small / "programs").iterdir())
    finally:
        subprocess.run(host.inside("umount", "/home/gpu/small"), check=True)


def test_without_openssh_on_this_side(host, client, monkeypatch, capsys, tmp_path):
    client.add("gpu8", host)
    monkeypatch.setenv("PATH", str(tmp_path))
    with client.open() as channel:
        assert channel.hello()["hostname"] == "gpu8.test"
    assert capsys.readouterr().err.startswith("note: OpenSSH's ssh is not on PATH")


def test_a_program_that_is_killed(host, client):
    client.add("gpu8", host)
    with client.open() as channel:
        channel.hello()
        for pid in host.user_processes():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(HostUnreachable, match=r"gpu8: .*a run there may well go on"):
            channel.request("list")


def test_an_error_in_the_block_ends_the_program_too(host, client):
    client.add("gpu8", host)
    block = client.open()
    block.__enter__().hello()
    error = KeyError("in the block")
    assert not block.__exit__(KeyError, error, None)

"""Hosts and lines that go away: never a hang, and never the same as a failed run."""

import hashlib
import json
import signal
import subprocess
import sys
import time

import pytest

from bench.delay_line import DelayLine
from orchestrator.errors import HostUnreachable
from orchestrator.paths import CLONE
from tests.ssh.machines import wait_for


@pytest.fixture
def line(host):
    with DelayLine(host.port) as line:
        yield line


def test_a_frozen_line_is_noticed(host, client, line):
    client.add("gpu8", host, port=line.port, ServerAliveInterval="1")
    with client.open() as channel:
        channel.hello()
        line.freeze()
        with pytest.raises(HostUnreachable, match=r"nothing was heard from the host for 3 s"):
            channel.request("list")


def test_a_line_that_freezes_under_a_push(host, client, line):
    """The buffers are full, and every send waits."""
    client.add("gpu8", host, port=line.port, ServerAliveInterval="1")
    data = bytes(32 << 20)
    with client.open() as channel:
        channel.hello()
        line.freeze()
        with pytest.raises(HostUnreachable, match=r"nothing was heard from the host for 3 s"):
            channel.request("put", hash=hashlib.sha256(data).hexdigest(), payload=data)


def test_silence_is_not_death(host, client, line):
    client.add("gpu8", host, port=line.port, ServerAliveInterval="1")
    with client.open() as channel:
        channel.hello()
        for _ in range(4):  # answers to the keepalive, longer than the host may be silent
            before = line.received
            wait_for(lambda before=before: line.received > before, "a sign of life")
        assert channel.request("list").ok


WAITING = """
import json, sys
from orchestrator.ssh import open_ssh
with open_ssh(json.loads(sys.argv[1])) as channel:
    print("open", flush=True)
    sys.stdin.readline()
    print(channel.request("list").ok, flush=True)
"""


def test_a_command_that_was_stopped_goes_on(host, client):
    """Ctrl-Z and later fg: it has heard nothing meanwhile, and the host is there."""
    client.add("gpu8", host, ServerAliveInterval="1")
    command = subprocess.Popen(
        [sys.executable, "-c", WAITING, json.dumps(client.section())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=CLONE,
    )
    with command:
        assert command.stdout.readline() == b"open\n"
        command.send_signal(signal.SIGSTOP)
        time.sleep(3.5)  # longer than a host may be silent
        command.send_signal(signal.SIGCONT)
        answer, _ = command.communicate(b"\n", timeout=30)
    assert answer == b"True\n"
    assert command.returncode == 0


def test_a_cut_line(host, client, line):
    client.add("gpu8", host, port=line.port)
    with client.open() as channel:
        channel.hello()
        line.cut()
        with pytest.raises(HostUnreachable, match=r"gpu8: .*a run there may well go on"):
            channel.request("list")


def test_a_stopped_sshd(make_host, client):
    host = make_host()
    client.add("gpu8", host)
    with client.open() as channel:
        channel.hello()
        host.stop()
        with pytest.raises(HostUnreachable, match=r"gpu8"):
            channel.request("list")
    with (
        pytest.raises(HostUnreachable, match=r"cannot be reached: Connection refused"),
        client.open(),
    ):
        pass
    host.start()
    with client.open() as channel:
        assert channel.hello()["hostname"] == "gpu8.test"


def test_a_host_that_takes_the_connection_and_says_nothing(host, client, line):
    client.add("gpu8", host, port=line.port, ConnectTimeout="1")
    line.freeze()
    with pytest.raises(HostUnreachable, match=r"gpu8: .*no SSH answer within 1 s"), client.open():
        pass


def test_a_line_that_resets(host, client, line):
    client.add("gpu8", host, port=line.port)
    line.refuse()
    with pytest.raises(HostUnreachable, match=r"gpu8: "), client.open():
        pass


def test_a_name_that_cannot_be_resolved(client):
    client.add("gpu8", hostname="nosuch.invalid")
    with (
        pytest.raises(HostUnreachable, match=r"gpu8: the name 'nosuch\.invalid' cannot"),
        client.open(),
    ):
        pass

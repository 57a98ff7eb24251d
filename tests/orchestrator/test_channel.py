"""Requests reach the host's program and come back, or the reason does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.channel import PROGRAM, Channel, RefusedError, Request, open_local
from orchestrator.errors import HostError, HostUnreachable, InputError


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    with open_local(tmp_path / "root", sys.executable, name="gpu1") as opened:
        yield opened


def put(data: bytes) -> Request:
    return Request(op="put", fields={"hash": hashlib.sha256(data).hexdigest()}, payload=data)


@contextlib.contextmanager
def through_shell(script: str) -> Iterator[Channel]:
    shell = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert shell.stdin is not None
    assert shell.stdout is not None
    channel = Channel(shell.stdout, shell.stdin, name="gpu1")
    yield channel
    assert channel.stop_sending()
    with contextlib.suppress(BrokenPipeError):
        shell.stdin.close()
    assert channel.wait_closed()
    shell.stdout.close()
    shell.wait()


def test_replies_come_in_the_order_of_their_requests(channel: Channel) -> None:
    data = [os.urandom(size) for size in (0, 1, 70_000, 3_000_000)]
    replies = channel.pipeline([put(part) for part in data])
    assert [reply.header["stored"] for reply in replies] == [True] * 4
    hashes = [[put(part).fields["hash"], "0" * 64] for part in data]
    asked = channel.pipeline([Request(op="missing", fields={"hashes": h}) for h in hashes])
    assert [reply.header["missing"] for reply in asked] == [["0" * 64]] * 4


def test_full_pipes_both_ways_do_not_block(channel: Channel, tmp_path: Path) -> None:
    (tmp_path / "root/runs/run-1").mkdir(parents=True)
    big = os.urandom(4 << 20)
    (tmp_path / "root/runs/run-1/log").write_bytes(big)
    read = Request(op="read", fields={"run_id": "run-1", "path": "log", "limit": len(big)})
    sent = [os.urandom(1 << 20) for _ in range(8)]
    replies = channel.pipeline([request for part in sent for request in (read, put(part))])
    assert [reply.payload == big for reply in replies] == [True, False] * 8
    assert all(reply.ok for reply in replies)


def test_a_refusal_is_the_hosts_sentence_and_the_channel_goes_on(channel: Channel) -> None:
    with pytest.raises(RefusedError, match=r"^gpu1: there is no run x below") as caught:
        channel.request("read", run_id="x", path="log")
    assert isinstance(caught.value, HostError)
    assert caught.value.kind == "missing"
    replies = channel.pipeline([Request(op="no"), Request(op="list"), put(b"x")], check=False)
    assert [reply.ok for reply in replies] == [False, True, True]
    with pytest.raises(RefusedError, match="knows no op 'no'"):
        channel.pipeline([Request(op="list"), Request(op="no"), put(b"y")])
    assert channel.request("list").header["runs"] == []


def test_a_file_is_streamed_as_it_is(channel: Channel, tmp_path: Path) -> None:
    data = os.urandom(2_500_000)
    (tmp_path / "file").write_bytes(data)
    name = hashlib.sha256(data).hexdigest()
    assert channel.request("put", hash=name, payload=tmp_path / "file").header["stored"] is True


def test_what_a_shell_prints_first_is_skipped(tmp_path: Path) -> None:
    noise = "echo Welcome; printf '{}\\n[1]\\n{\"ok\": true}\\n'; "
    script = f"{noise} exec '{sys.executable}' -I -u '{PROGRAM}' --root '{tmp_path}'"
    with through_shell(script) as channel:
        assert channel.hello()["root"] == str(tmp_path)
        assert channel.request("list").ok


def test_a_shell_that_prints_for_ever_is_told_apart() -> None:
    script = "yes 'no such command' | head -c 200000; cat >/dev/null"
    with (
        through_shell(script) as channel,
        pytest.raises(HostError, match="no reply of the host's program: no such command"),
    ):
        channel.hello()


def test_what_is_written_is_no_longer_said_to_be_on_its_way() -> None:
    """A reader that waits fills the pipe: the last bytes of a long payload stay here until it reads."""
    (ours, theirs), (host_in, host_out) = os.pipe(), os.pipe()
    with (
        os.fdopen(ours, "rb") as answers,
        os.fdopen(theirs, "wb") as host_answers,
        os.fdopen(host_in, "rb") as asked,
        os.fdopen(host_out, "wb") as requests,
    ):
        channel = Channel(answers, requests, name="gpu1")
        assert not channel.writing
        sender = threading.Thread(target=channel.pipeline, args=([put(bytes(1 << 20))],))
        sender.start()
        asked.readline()
        assert channel.writing
        asked.read(1 << 20)
        deadline = time.monotonic() + 30
        while channel.writing:  # and yet nothing has been answered
            assert time.monotonic() < deadline
            time.sleep(0.001)
        host_answers.write(b'{"ok": true, "payload": 0}\n')
        host_answers.flush()
        sender.join()
        channel.stop_sending()


def test_a_shell_that_cannot_start_the_program_is_quoted() -> None:
    script = "echo 'bash: python3.10: command not found'"
    with (
        through_shell(script) as channel,
        pytest.raises(HostUnreachable, match="the last line there: bash: python3"),
    ):
        channel.hello()
    with through_shell(script) as channel:
        with pytest.raises(HostError, match="command not found"):
            channel.request("list")
        with pytest.raises(HostUnreachable, match="open a new one"):
            channel.request("list")


def test_a_program_that_dies_is_unreachable_and_not_a_refusal(channel: Channel) -> None:
    pid = channel.hello()["pid"]
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()

    def send_for_ever() -> None:
        while True:
            channel.pipeline([put(os.urandom(1 << 20)), Request(op="list")])

    with pytest.raises(HostUnreachable, match="gpu1: the connection ended"):
        send_for_ever()
    killer.join()
    with pytest.raises(HostUnreachable, match="open a new one"):
        channel.hello()


def test_half_a_reply_is_unreachable() -> None:
    with (
        through_shell('read line; printf \'{"ok": true, "payload": 10}\\nabc\'') as channel,
        pytest.raises(HostUnreachable, match="before 'list' was answered"),
    ):
        channel.request("list")


def test_ctrl_c_in_a_waiting_request_leaves_the_channel_usable(
    channel: Channel, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's & ignores it
    (tmp_path / "root/runs/run-1").mkdir(parents=True)
    pid = channel.hello()["pid"]
    assert os.getsid(pid) != os.getsid(0), "Ctrl-C in a terminal would end the program, too"
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        channel.request("follow", run_id="run-1", wait_s=60, seen=["queued"])
    timer.join()
    signal.signal(signal.SIGINT, before)
    # The abandoned reply is read and dropped, and the host does not sit out its minute.
    assert channel.request("follow", run_id="run-1").header["state"]["state"] == "queued"
    assert channel.hello()["pid"] == pid


def test_leaving_does_not_wait_for_a_follow(tmp_path: Path) -> None:
    (tmp_path / "runs/run-1").mkdir(parents=True)
    with open_local(tmp_path, sys.executable) as channel:
        pid = channel.hello()["pid"]
        fields = {"run_id": "run-1", "wait_s": 60, "seen": ["queued"]}
        waiting = threading.Thread(
            target=channel.pipeline, args=([Request(op="follow", fields=fields)],)
        )
        waiting.start()
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    assert not Path(f"/proc/{pid}").exists()


def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"/no/python cannot be run \(No such file"),
        open_local(tmp_path, "/no/python"),
    ):
        pass


def test_a_root_that_cannot_be_made_is_told_by_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        open_local(tmp_path / "file" / "root", sys.executable) as channel,
        pytest.raises(HostUnreachable, match="cannot be made: Not a directory"),
    ):
        channel.hello()


def test_threads_share_a_channel(channel: Channel) -> None:
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(20):
            name = f"{number:064x}"
            if channel.request("missing", hashes=[name]).header["missing"] != [name]:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

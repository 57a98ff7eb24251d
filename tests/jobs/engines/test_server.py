"""A server's end is known by its reason, and nothing of it is left: real processes, that will not go."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.engines.server import Server, ended, reason, tail
from jobs.engines.talk import ServerError

AMPLE_S = 30.0
GRACE_S = 0.3
# Says who it is by a file of its name, whole at once; then sleeps, and does not heed SIGTERM.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
def stay(name):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = pathlib.Path(name + ".part")
    part.write_text(str(os.getpid()))
    part.rename(name + ".pid")
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def start(program, **how):
    return subprocess.Popen([sys.executable, "-c", SHARED + program], **how)
"""
SHARED = (
    f"SHARED = {STUBBORN!r}\nexec(SHARED)\nSHARED = 'SHARED = ' + repr(SHARED) + chr(10) + SHARED\n"
)
CHILD = "stay('child'); time.sleep(600)"
DAEMON = "stay('daemon'); time.sleep(600)"
# Goes as soon as it is told to, and leaves a daemon behind.
PARENT = f"start({DAEMON!r}, start_new_session=True); wait_for('seen')"
LEADER = (
    f"start({CHILD!r}); parent = start({PARENT!r}); stay('leader'); parent.wait(); stay('bereaved')"
)

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program as a server; whatever it does, it ends with the test."""
    begun: list[Server] = []

    def begin(program: str, **environment: str) -> Server:
        command = [sys.executable, "-c", program]
        begun.append(Server(command, environment, tmp_path / "server.log", tmp_path))
        return begun[-1]

    yield begin
    for server in begun:
        server.stop(0)
    for file in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def pid_of(folder: Path, name: str, eventually: Callable[..., Any]) -> int:
    eventually((folder / f"{name}.pid").exists, AMPLE_S)
    return int((folder / f"{name}.pid").read_text())


def test_a_whole_family_that_will_not_go_is_gone(
    start: Start,
    tmp_path: Path,
    eventually: Callable[..., Any],
    is_running: Callable[[int], bool],
) -> None:
    server = start(SHARED + LEADER + "; time.sleep(600)")
    leader, child, daemon = (
        pid_of(tmp_path, name, eventually) for name in ("leader", "child", "daemon")
    )
    assert os.getsid(daemon) == daemon
    server.look()
    (tmp_path / "seen").touch()
    pid_of(tmp_path, "bereaved", eventually)  # the daemon's parent is gone, and its chain to us
    assert {leader, child, daemon} <= set(server.family())
    stopped = server.stop(GRACE_S)
    assert [pid for pid in (leader, child, daemon) if is_running(pid)] == []
    assert (stopped.killed, stopped.left) == (3, ())
    assert server.family() == []


def test_those_who_outlive_their_leader_are_found_all_the_same(
    start: Start,
    tmp_path: Path,
    eventually: Callable[..., Any],
    is_running: Callable[[int], bool],
) -> None:
    server = start(SHARED + LEADER)
    child, daemon = (pid_of(tmp_path, name, eventually) for name in ("child", "daemon"))
    server.look()
    (tmp_path / "seen").touch()
    server.process.wait()
    with pytest.raises(ServerError, match="ended with exit code 0"):
        server.look()
    stopped = server.stop(GRACE_S)
    assert not is_running(child)
    assert not is_running(daemon)
    assert (stopped.asked, stopped.killed, stopped.left) == (2, 2, ())


def test_a_child_of_a_stray_that_was_born_behind_the_leaders_end_goes_too(
    start: Start,
    tmp_path: Path,
    eventually: Callable[..., Any],
    is_running: Callable[[int], bool],
) -> None:
    # The daemon is known; what it starts when nobody leads to it any more hangs on it alone.
    late = "stay('daemon'); wait_for('alone'); "
    late += "start(\"stay('late'); time.sleep(600)\", start_new_session=True); time.sleep(600)"
    leader = f"start({late!r}, start_new_session=True); wait_for('seen')"
    server = start(SHARED + leader)
    pid_of(tmp_path, "daemon", eventually)
    server.look()
    (tmp_path / "seen").touch()
    server.process.wait()
    (tmp_path / "alone").touch()
    born = pid_of(tmp_path, "late", eventually)
    assert server.stop(GRACE_S).left == ()
    assert not is_running(born)


def test_one_that_goes_when_it_is_asked_is_not_killed(
    start: Start, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    server = start("open('up', 'w'); import time; time.sleep(600)")
    eventually((tmp_path / "up").exists, AMPLE_S)
    stopped = server.stop()
    assert (stopped.asked, stopped.killed, stopped.left) == (1, 0, ())
    again = server.stop()
    assert (again.asked, again.killed, again.left) == (0, 0, ())


def test_a_foreign_process_of_the_same_name_is_left_alone(
    start: Start, is_running: Callable[[int], bool]
) -> None:
    program = "import time; time.sleep(600)"
    server = start(program)
    foreign = Server(server.command, {}, server.log, server.log.parent)
    try:
        server.stop(GRACE_S)
        assert is_running(foreign.process.pid)
    finally:
        foreign.stop(GRACE_S)


def test_one_that_dies_at_its_start_is_not_waited_for_and_says_why(start: Start) -> None:
    server = start("import time; print('loading', flush=True); raise ValueError('no such layer')")
    with pytest.raises(ServerError) as caught:
        server.wait_until(lambda: "not yet", AMPLE_S)
    assert str(caught.value).startswith("the server ended with exit code 1 after ")
    assert str(caught.value).endswith(" s: ValueError: no such layer")


def test_one_that_is_killed_is_said_to_be(start: Start) -> None:
    server = start("import os; print('loading', flush=True); os.kill(os.getpid(), 9)")
    with pytest.raises(ServerError, match=r"the server was ended by SIGKILL after \d+ s: loading"):
        server.wait_until(lambda: "not yet", AMPLE_S)


def test_one_that_is_never_ready_says_what_lacked_and_how_its_log_ends(start: Start) -> None:
    server = start("import time; print('loading weights', flush=True); time.sleep(600)")
    while "loading" not in tail(server.log):
        time.sleep(0.01)
    with pytest.raises(ServerError) as caught:
        server.wait_until(lambda: "/health answered 503", 0.5)
    assert str(caught.value) == (
        "the server was not ready after 0.5 s: /health answered 503; its log ends: loading weights"
    )


def test_readiness_is_asked_until_nothing_lacks(start: Start) -> None:
    server = start("import time; time.sleep(600)")
    lacking = iter(["the models", "its health", None])
    server.wait_until(lambda: next(lacking), AMPLE_S)
    assert next(lacking, "all were asked") == "all were asked"


def test_what_cannot_be_started_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"^/no/python cannot be started: No such file"):
        Server(["/no/python", "-m", "x"], {}, tmp_path / "log", tmp_path)


def test_it_runs_in_its_folder_with_its_environment_and_logs_both_streams(
    start: Start, tmp_path: Path
) -> None:
    server = start(
        "import os, sys\nprint(os.getcwd(), os.environ['MINE'], sys.stdin.read(), flush=True)\n"
        "sys.stderr.write('said aloud\\n')",
        MINE="set",
    )
    server.process.wait()
    assert tail(server.log).splitlines() == [f"{tmp_path} set ", "said aloud"]


def test_an_end_is_a_code_or_a_signal() -> None:
    assert ended(1) == "ended with exit code 1"
    assert ended(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert ended(-signal.SIGRTMIN - 1) == f"was ended by signal {signal.SIGRTMIN + 1}"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            # As vLLM's parent and child write it.
            "(EngineCore_0 pid=12) ERROR 11-30 [core.py:700] Traceback (most recent call last):\n"
            "(EngineCore_0 pid=12) ERROR 11-30 [core.py:700] ValueError: d2t needs fewer ids\n"
            "Traceback (most recent call last):\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
            "proc(s): {'EngineCore_0': 1}\n",
            "ValueError: d2t needs fewer ids",
        ),
        (
            # A harmless error early, the real one late, a client's complaint last.
            "ImportError: no module named flash_attn, going on without\n"
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            "requests.exceptions.ConnectionError: HTTPConnectionPool: Max retries exceeded\n",
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ),
        (
            "INFO loading\nlaunch_server.py: error: unrecognized arguments: --foo\n\n  \n",
            "launch_server.py: error: unrecognized arguments: --foo",
        ),
        ("Exception: Capture cuda graph failed: no room", "Exception: Capture cuda graph failed"),
        ("the word Error: is no name of one", "the word Error: is no name of one"),
        ("KeyError\nlast words", "last words"),
        ("ValueError: " + 1000 * "x", "ValueError: xxx"),
        ("", "it said nothing"),
        ("\n \n", "it said nothing"),
    ],
)
def test_the_reason_is_the_last_error_that_follows_from_no_other(log: str, why: str) -> None:
    found = reason(log)
    assert found.startswith(why)
    assert len(found) <= 600


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: long ago\n" + 30_000 * "all is well\n" + "RuntimeError: now\n")
    assert "long ago" not in tail(log)
    assert reason(tail(log)) == "RuntimeError: now"

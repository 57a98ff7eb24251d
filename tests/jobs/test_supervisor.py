"""However a job ends, its run says so, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.host import derive_state, is_alive
from jobs.supervisor import exit_record, oom_counter, out_of_memory, read_oom_kills

Supervise = Callable[..., Any]


def pids_of(run: Any) -> list[int]:
    return [int(run.text(f"{name}.pid")) for name in ("grandchild", "daemon")]


def test_a_job_that_ends_well_is_finished_with_zero(supervise: Supervise) -> None:
    run = supervise({"do": "ok"})
    ending = run.ended()
    assert (ending["state"], ending["rc"], ending["signal"]) == ("finished", 0, None)
    assert ending["out_of_memory"] is None
    assert ending["started"] <= ending["ended"]
    record = run.json("supervisor.json")
    assert record["pid"] == run.process.pid
    assert record["pgid"] != record["pid"]
    assert derive_state(run.dir) == ending
    assert run.said() == ""


@pytest.mark.parametrize(
    ("do", "state", "rc", "name"),
    [
        ("error", "finished", 1, None),
        ("sys_exit", "finished", 1, None),
        ("os_exit", "finished", 9, None),
        ("kill", "killed", None, "SIGKILL"),
        ("segfault", "killed", None, "SIGSEGV"),
    ],
)
def test_each_way_to_end_is_told_from_the_others(
    supervise: Supervise, do: str, state: str, rc: int | None, name: str | None
) -> None:
    run = supervise({"do": do})
    ending = run.ended()
    assert (ending["state"], ending["rc"], ending["signal_name"]) == (state, rc, name)
    assert ending["out_of_memory"] is None
    if name == "SIGSEGV":
        assert "Segmentation fault" in run.text("log")


def test_a_killed_supervisor_leaves_a_vanished_run_and_no_worker(
    supervise: Supervise, eventually: Callable[..., Any], is_running: Callable[[int], bool]
) -> None:
    run = supervise({"do": "gate"})
    run.at_the_gate()
    record = run.json("supervisor.json")
    assert derive_state(run.dir)["state"] == "running"
    run.process.kill()
    # Not reaped yet: a zombie supervisor is as gone as one whose pid is free.
    eventually(lambda: derive_state(run.dir)["state"] == "vanished")
    assert "exit.json" in derive_state(run.dir)["reason"]
    eventually(lambda: not is_running(record["pgid"]))
    run.process.wait()
    assert not is_alive(record)
    assert derive_state(run.dir)["state"] == "vanished"


def test_the_time_limit_ends_a_family_that_ignores_sigterm(
    supervise: Supervise, is_running: Callable[[int], bool]
) -> None:
    for timeout_s in (1, 4, 16):
        run = supervise({"do": "gate", "family": True}, timeout_s=timeout_s, grace_s=0.2)
        ending = run.ended()
        assert (ending["state"], ending["signal_name"]) == ("timed_out", "SIGTERM")
        if all(run.text(f"{name}.pid") for name in ("grandchild", "daemon")):
            break  # else the machine was too busy for the family to come up in time
    assert [pid for pid in pids_of(run) if is_running(pid)] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancel_leaves_no_grandchild_behind(
    supervise: Supervise, is_running: Callable[[int], bool], number: int
) -> None:
    run = supervise({"do": "gate", "family": True}, grace_s=0.2)
    run.at_the_gate()
    family = [run.json("supervisor.json")["pgid"], *pids_of(run)]
    assert all(is_running(pid) for pid in family)
    run.process.send_signal(number)
    assert run.ended()["state"] == "cancelled"
    assert [pid for pid in family if is_running(pid)] == []


def test_what_a_finished_job_leaves_behind_is_ended_before_the_run_counts_as_over(
    supervise: Supervise, is_running: Callable[[int], bool]
) -> None:
    run = supervise({"do": "gate", "family": True, "leave": True}, grace_s=0.2)
    ending = run.ended()
    assert (ending["state"], ending["rc"]) == ("finished", 0)
    assert [pid for pid in pids_of(run) if is_running(pid)] == []
    assert "left processes behind" in run.said()


def test_a_hang_up_changes_nothing(supervise: Supervise) -> None:
    run = supervise({"do": "gate"})
    run.at_the_gate()
    run.process.send_signal(signal.SIGHUP)
    (run.dir / "go").touch()
    assert run.ended()["state"] == "finished"


def test_a_request_that_cannot_be_read_ends_with_two(supervise: Supervise) -> None:
    run = supervise(raw='{"run_id": ')
    assert run.ended()["rc"] == 2
    assert "request.json cannot be read" in run.text("log")


def test_a_full_disk_at_the_end_is_said_and_the_run_vanishes(
    supervise: Supervise, tiny_disk: Callable[[str, str], Path]
) -> None:
    run = supervise({"do": "fill"}, into=tiny_disk("full", "128k"))
    assert run.process.wait(timeout=20) == 1
    assert "exit.json cannot be written" in run.said()
    assert "No space left" in run.said()
    assert derive_state(run.dir)["state"] == "vanished"
    assert not [path for path in run.dir.iterdir() if path.name.startswith(".")]


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group (v1 or v2) of 64 MiB."""
    counter = oom_counter()
    if counter is None:
        pytest.skip("this machine counts no out-of-memory kills in a control group of ours")
    group = counter.parent / f"orchestrator-test-{os.getpid()}"
    old = counter.name == "memory.oom_control"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"a memory control group cannot be made here: {error}")
    try:
        limit = "memory.limit_in_bytes" if old else "memory.max"
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"a memory control group cannot be limited here: {error}")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    group.rmdir()


def test_out_of_memory_is_claimed_from_the_control_group(
    supervise: Supervise, small_group: Path
) -> None:
    join = ("sh", "-c", f'echo $$ > "{small_group}/cgroup.procs" && exec "$@"', "sh")
    run = supervise({"do": "eat"}, command=join)
    ending = run.ended()
    assert (ending["state"], ending["signal_name"]) == ("killed", "SIGKILL")
    assert ending["out_of_memory"] == "cgroup counter and SIGKILL"


@pytest.mark.parametrize(
    ("before", "after", "code", "claim"),
    [
        (None, None, -9, None),
        (3, 3, -9, None),
        (3, 4, 0, None),
        (3, 4, 1, "cgroup counter"),
        (3, 4, -9, "cgroup counter and SIGKILL"),
    ],
)
def test_out_of_memory_is_never_guessed(
    before: int | None, after: int | None, code: int, claim: str | None
) -> None:
    assert out_of_memory(before, after, code) == claim


def test_the_counter_is_read_from_either_version(tmp_path: Path) -> None:
    for text in ("low 0\noom 2\noom_kill 1\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"):
        (tmp_path / "counter").write_text(text)
        assert read_oom_kills(tmp_path / "counter") == 1
    assert read_oom_kills(tmp_path / "none") is None


def test_an_unnamed_signal_is_kept_by_number() -> None:
    ending = exit_record(-60, None)
    assert (ending["state"], ending["signal"], ending["signal_name"]) == ("killed", 60, None)


def test_what_runs_on_a_host_needs_the_standard_library_only(snapshot: Path) -> None:
    code = "import sys; sys.path.insert(0, '.'); import " + ", ".join(
        f"jobs.{part}" for part in ("supervisor", "worker", "host", "gpus", "script", "environment")
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, cwd=snapshot, capture_output=True, check=False)
    assert done.stderr == b""

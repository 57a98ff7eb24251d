"""Runs one job, ends it when it must end, and writes down how it ended.

    python -m jobs.supervisor RUN_DIR

The worker and all it starts live below this process: in one process group, in this session, and,
where the kernel has child-subreapers, as its descendants even when their parents die. exit.json is
written when none of them is left. Before the worker starts its GPUs are chosen, and where it wants a
lease on them that is waited for; the lease lasts until none of the run's processes is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs import gpus
from jobs.files import read_request, write_json_atomic
from jobs.host import identity, members, send_signal

GRACE_S = 5.0
LEASE_POLL_S = 0.2
UNKILLABLE_S = 10.0
PR_SET_PDEATHSIG = 1
SUPERVISOR = "JOBS_SUPERVISOR_PID"  # tells a worker whose child it must be
PR_SET_CHILD_SUBREAPER = 36
CANCEL = {signal.SIGTERM, signal.SIGINT}
WAITED_FOR = {signal.SIGCHLD, *CANCEL}


def prctl(option: int, value: int) -> bool:
    """Linux's prctl; False where the kernel or the C library does not know it."""
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def say(sentence: str) -> None:
    """One line on supervisor.log; a full disk is no reason to stop supervising."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")
        sys.stderr.flush()


def oom_counter(root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The file that counts out-of-memory kills in this process's control group, if there is one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                places = [root / path.lstrip("/") / "memory.events"]
            elif "memory" in controllers.split(","):
                name = "memory.oom_control"
                # In a container the path may be the machine's while the mount is the container's.
                places = [root / "memory" / path.lstrip("/") / name, root / "memory" / name]
            else:
                continue
            for place in places:
                if read_oom_kills(place) is not None:
                    return place
    return None


def read_oom_kills(counter: Path | None) -> int | None:
    """The `oom_kill` line of memory.events (v2) or memory.oom_control (v1)."""
    if counter is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def out_of_memory(before: int | None, after: int | None, code: int) -> str | None:
    """What says that the job ran out of memory, if anything does; `code` is negative for a signal.

    The counter belongs to the whole control group, so a job that ended well is never blamed.
    """
    if before is None or after is None or after <= before or code == 0:
        return None
    return "cgroup counter and SIGKILL" if code == -signal.SIGKILL else "cgroup counter"


class CancelledError(Exception):
    """The run was cancelled before its worker had started."""


class Supervisor:
    """One worker and everything below it."""

    def __init__(self, worker: int, *, timeout_s: float | None, grace_s: float) -> None:
        self.worker = worker
        self.cause: str | None = None  # what we ended it for: timed_out or cancelled
        self._me = identity(os.getpid())
        self._timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._grace_s = grace_s
        self._kill_at: float | None = None
        self._status: int | None = None

    def wait(self) -> int:
        """Waits for the worker; its wait status."""
        self._until(lambda: self._status is not None)
        assert self._status is not None
        return self._status

    def clear(self) -> None:
        """Ends what the worker left behind."""
        left = members(self._me)
        if not left:
            return
        say(f"the job ended and left processes behind, which are ended now: {left}")
        if self._kill_at is None and self.cause is None:
            self._end()
        self._timeout_at = None
        give_up_at = time.monotonic() + self._grace_s + UNKILLABLE_S
        self._until(lambda: not members(self._me) or time.monotonic() > give_up_at, pause=0.05)
        if left := members(self._me):
            say(f"these processes could not be killed: {left}")

    def _until(self, done: Callable[[], bool], pause: float = 3600.0) -> None:
        while True:
            self._reap()
            if done():
                return
            now = time.monotonic()
            if self._timeout_at is not None and now >= self._timeout_at and self.cause is None:
                self.cause = "timed_out"
                self._end()
            if self._kill_at is not None and now >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                self._kill_at = now + 0.05  # again: one may have forked between look and kill
            times = [t for t in (self._kill_at, self._timeout_at if not self.cause else None) if t]
            wait_s = max(0.0, min([*(t - now for t in times), pause]))
            info = signal.sigtimedwait(WAITED_FOR, wait_s)
            if info is None or info.si_signo not in CANCEL:
                continue
            if self._status is not None:
                self._kill_at = now  # the job has ended; somebody wants its remains gone
            elif self.cause is None:
                self.cause = "cancelled"
                self._end()

    def _end(self) -> None:
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace_s

    def _signal_all(self, number: int) -> None:
        if self._status is None:
            # In one step for the group, which cannot be another's while its leader is not reaped.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.worker, number)
            send_signal((p for p in members(self._me) if self._group(p) != self.worker), number)
        else:
            send_signal(members(self._me), number)

    @staticmethod
    def _group(pid: int) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid)
        return None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.worker:
                    self._status = status


def start_worker(run_dir: Path, variables: Mapping[str, str]) -> int:
    """Starts the worker in a process group of its own, its output on `log`; the pid."""
    arguments = [sys.executable, "-u", "-X", "faulthandler", "-m", "jobs.worker", str(run_dir)]
    append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return os.posix_spawn(
        sys.executable,
        arguments,
        {**os.environ, **variables, SUPERVISOR: str(os.getpid())},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(run_dir / "log"), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGHUP, signal.SIGPIPE, *CANCEL],
    )


def request_of(run_dir: Path) -> dict[str, Any]:
    """The request; empty where it cannot be read, which is the worker's to report."""
    try:
        return read_request(run_dir)
    except BadInput as error:
        say(str(error))
        return {}


def settle_gpus(run_dir: Path, request: Mapping[str, Any], leases: gpus.Leases) -> dict[str, str]:
    """Chooses the run's GPUs, leases them if asked, and writes gpus.json; the job's variables.

    A choice that cannot be made stands in gpus.json as `error`, for the worker to fail its cases
    with. Raises CancelledError, and OSError where gpus.json cannot be written.
    """
    asked = request.get("gpus")
    if asked is None:
        return {}
    device = request["device"]
    try:
        choice = choose_gpus(run_dir, device, asked, leases)
    except BadInput as error:
        nothing: dict[str, Any] = {"device": device, "visible": "", "chosen": [], "foreign": []}
        record = {**nothing, "notes": [], "leased": [], "error": str(error)}
        write_json_atomic(run_dir / "gpus.json", record)
        return {gpus.VISIBLE: ""}
    leased = [lock.label for lock in choice.locks if lock.name in leases.held]
    write_json_atomic(run_dir / "gpus.json", {**choice.plain(), "leased": leased})
    if signal.sigtimedwait(CANCEL, 0):
        raise CancelledError
    return choice.variables


def choose_gpus(
    run_dir: Path, device: str, asked: Mapping[str, Any], leases: gpus.Leases
) -> gpus.Choice:
    """The choice; the run is `queued` while it waits for a lease."""
    seen, trouble = (None, None) if device == "cpu" else gpus.look()
    possible = gpus.choose(
        device,
        asked["wanted"],
        seen,
        inherited=os.environ.get(gpus.VISIBLE),
        order=os.environ.get(gpus.ORDER),
        trouble=trouble,
    )
    if not asked["lease"]:
        return gpus.pass_by_leased(leases, possible)
    queue = Queue(run_dir / "queue.json")
    try:
        choice, waited = gpus.wait_for(leases, possible, queue.wait)
    finally:
        queue.leave()
    return gpus.seen_again(choice) if waited else choice


class Queue:
    """The record of a run that waits for a lease."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since = time.time()
        self._told: str | None = None

    def wait(self, waiting_for: str) -> None:
        """Writes down what is waited for and pauses; raises CancelledError."""
        if waiting_for != self._told:
            self._told = waiting_for
            record = {**identity(os.getpid()), "waiting_for": waiting_for, "since": self._since}
            try:
                write_json_atomic(self._path, record)
            except OSError as error:  # it waits all the same
                say(f"queue.json cannot be written: {error}; waiting for {waiting_for}")
        if signal.sigtimedwait(CANCEL, LEASE_POLL_S):
            raise CancelledError

    def leave(self) -> None:
        """Removes the record."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def exit_record(code: int, cause: str | None, **more: Any) -> dict[str, Any]:
    """exit.json; `code` is the worker's exit code, negative for the signal that killed it."""
    number = -code if code < 0 else None
    name = None
    if number is not None:
        with contextlib.suppress(ValueError):
            name = signal.Signals(number).name
    return {
        "state": cause or ("finished" if number is None else "killed"),
        "rc": code if number is None else None,
        "signal": number,
        "signal_name": name,
        **more,
    }


def write_ending(run_dir: Path, ending: Mapping[str, Any]) -> int:
    """Writes exit.json; the supervisor's exit code."""
    try:
        write_json_atomic(run_dir / "exit.json", ending)
    except OSError as error:
        say(
            f"exit.json cannot be written: {error}; the run will count as vanished; it was {ending}"
        )
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Supervises the run; 0 once exit.json is written."""
    (folder,) = arguments
    run_dir = Path(folder).absolute()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    with contextlib.suppress(PermissionError):  # the host's program has made us a leader already
        os.setsid()
    if not prctl(PR_SET_CHILD_SUBREAPER, 1):
        say("this kernel has no child-subreaper: processes that leave the session may be left over")
    counter = oom_counter()
    kills_before = read_oom_kills(counter)
    request = request_of(run_dir)
    leases = gpus.Leases(str(request.get("run_id")))  # held until this process ends
    try:
        variables = settle_gpus(run_dir, request, leases)
    except CancelledError:
        ending = {**exit_record(0, "cancelled"), "rc": None, "out_of_memory": None}
        return write_ending(run_dir, {**ending, "started": None, "ended": time.time()})
    except OSError as error:
        say(f"gpus.json cannot be written, so the job is not started: {error}")
        return 1
    started = time.time()
    try:
        worker = start_worker(run_dir, variables)
    except OSError as error:
        say(f"the worker cannot be started: {error}")
        return 1
    supervisor = Supervisor(
        worker, timeout_s=request.get("timeout_s"), grace_s=request.get("grace_s", GRACE_S)
    )
    record = {**identity(os.getpid()), "pgid": worker, "started": started}
    try:
        write_json_atomic(run_dir / "supervisor.json", record)
    except OSError as error:
        say(f"supervisor.json cannot be written, so the job is stopped: {error}")
        os.killpg(worker, signal.SIGKILL)
        supervisor.wait()
        supervisor.clear()
        return 1
    code = os.waitstatus_to_exitcode(supervisor.wait())
    ended = time.time()
    cause = supervisor.cause
    supervisor.clear()
    memory = out_of_memory(kills_before, read_oom_kills(counter), code)
    ending = exit_record(code, cause, out_of_memory=memory, started=started, ended=ended)
    return write_ending(run_dir, ending)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

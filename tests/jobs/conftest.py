"""A snapshot with the real programs and a job that can end in every way, and runs of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.host import members

JOBS = Path(__file__).resolve().parents[2] / "jobs"
PARTS = (
    "__init__",
    "environment",
    "events",
    "files",
    "gpus",
    "host",
    "script",
    "supervisor",
    "worker",
)
DEADLINE_S = 20.0

CRASHING_JOB = '''
import ctypes, os, resource, signal, sys, time
from pathlib import Path
from eagle3.errors import BadInput

def open_job(request, events):
    if request.get("refuse"):
        raise BadInput("the drafter has no d2t")
    return Job(request, events)

class Job:
    def __init__(self, request, events):
        self.request, self.events = request, events
        self.run_dir = events.path.parent

    def run_case(self, case):
        return getattr(self, case["do"])(case)

    def ok(self, case):
        self.events.progress("score", 1, 1)
        return {"metrics": {"accuracy": {"value": 0.5}}, "notes": ["fine"]}

    def env(self, case):
        return {"wiring": {name: os.environ.get(name) for name in case["names"]}}

    def say(self, case):
        print(case["text"], flush=True)
        return {}

    def error(self, case):
        raise RuntimeError("first line\\n  second line")

    def input_error(self, case):
        raise BadInput("layer 99 is not there")

    def sys_exit(self, case):
        sys.exit(7)

    def os_exit(self, case):
        os._exit(9)

    def kill(self, case):
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self, case):
        ctypes.string_at(0)

    def memory(self, case):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        return {"notes": [len(bytes(1 << 30))]}

    def eat(self, case):
        eaten = [bytearray(os.urandom(1 << 20)) for _ in range(512)]
        return {"notes": [len(eaten)]}

    def give(self, case):
        value = {"nan": float("nan"), "set": {1}, "big": "x" * (1 << 20)}[case["what"]]
        return {"metrics": {"accuracy": {"value": value}}}

    def give_status(self, case):
        return {"status": "ok"}

    def give_none(self, case):
        return None

    def fill(self, case):
        with (self.run_dir / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1024)):
                    pass
            except OSError:
                return {}

    def gate(self, case):
        """Waits for the gate to open; its orphans ignore SIGTERM."""
        if case.get("family"):
            self.orphan("grandchild", own_session=False)
            self.orphan("daemon", own_session=True)
        self.events.note("at the gate")
        if not case.get("leave"):
            while not (self.run_dir / "go").exists():
                time.sleep(0.01)
        return {}

    def orphan(self, name, own_session):
        path = self.run_dir / f"{name}.pid"
        if child := os.fork():
            os.waitpid(child, 0)
        elif os.fork():
            os._exit(0)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if own_session:
                os.setsid()
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").rename(path)
            time.sleep(600)
            os._exit(0)
        while not path.exists():
            time.sleep(0.01)
'''


def eventually(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `what`."""
    deadline = time.monotonic() + deadline_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    """Whether the process lives (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


@pytest.fixture(name="is_running")
def is_running_fixture() -> Callable[[int], bool]:
    return is_running


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The real programs and `jobs/crashing_job.py`, as they lie on a host."""
    folder = tmp_path / "snapshot with spaces"
    (folder / "jobs").mkdir(parents=True)
    for part in PARTS:
        shutil.copy(JOBS / f"{part}.py", folder / "jobs")
    (folder / "jobs" / "crashing_job.py").write_text(CRASHING_JOB)
    (folder / "eagle3").mkdir()
    for part in ("__init__", "errors"):
        shutil.copy(JOBS.parent / "eagle3" / f"{part}.py", folder / "eagle3")
    return folder


@pytest.fixture
def request_of() -> Callable[..., dict[str, Any]]:
    def build(*cases: dict[str, Any], run_id: str = "run-1", **more: Any) -> dict[str, Any]:
        numbered = [{"case_id": f"case-{i}", **case} for i, case in enumerate(cases)]
        request = {"run_id": run_id, "job": "crashing_job", "threads": 1, "device": "cpu"}
        return {**request, "timeout_s": None, "grace_s": 0.3, "cases": numbered, **more}

    return build


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a file system of a given size at a path below tmp_path."""
    mounted: list[Path] = []

    def mount(name: str, size: str) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a full disk needs the right to mount a small tmpfs: {error}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Supervised:
    """A run whose supervisor the test has started itself."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes], said: Path) -> None:
        self.dir = run_dir
        self.process = process
        self._said = said

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.dir / name).read_text())

    def text(self, name: str) -> str:
        path = self.dir / name
        return path.read_text() if path.exists() else ""

    def said(self) -> str:
        return self._said.read_text()

    def ended(self) -> dict[str, Any]:
        assert self.process.wait(timeout=DEADLINE_S) == 0, self.said()
        return self.json("exit.json")

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.text("events.jsonl").splitlines())
        return [event for event in lines if event["type"] == kind]

    def result(self, case: int = 0) -> dict[str, Any]:
        return self.json(f"results/case-{case}.json")

    def at_the_gate(self) -> None:
        eventually(lambda: "at the gate" in self.text("events.jsonl"))


FAKE_SMI = """#!/bin/sh
echo called >> "$FAKE_SMI/calls"
if [ -e "$FAKE_SMI/broken" ]; then cat "$FAKE_SMI/broken"; exit 9; fi
case "$1" in
  --query-gpu=*) cat "$FAKE_SMI/gpus" ;;
  --query-compute-apps=*) cat "$FAKE_SMI/apps" ;;
esac
"""


class Machine:
    """GPUs that do not exist: a program `nvidia-smi` that says what it is told, and a lease folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leases = folder / "leases"
        smi = folder / "bin" / "nvidia-smi"
        smi.parent.mkdir(parents=True)
        smi.write_text(FAKE_SMI)
        smi.chmod(0o755)
        self.has("0, GPU-aaaa, NVIDIA Fake 9000, 81559, 4, 0")

    def has(self, *gpus: str, apps: tuple[str, ...] = ()) -> None:
        """Lines as nvidia-smi prints them."""
        for name, lines in (("gpus", gpus), ("apps", apps)):
            (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def breaks(self, says: str) -> None:
        (self.folder / "broken").write_text(says)

    def was_asked(self) -> bool:
        return (self.folder / "calls").exists()

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_SMI": str(self.folder),
            "ORCHESTRATOR_GPU_LEASES": str(self.leases),
        }


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def supervise(
    snapshot: Path, tmp_path: Path, request_of: Callable[..., dict[str, Any]]
) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(
        *cases: dict[str, Any],
        into: Path | None = None,
        raw: str | None = None,
        command: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        **more: Any,
    ) -> Supervised:
        run_dir = into or tmp_path / f"run-{len(started)}"
        run_dir.mkdir(exist_ok=True)
        (run_dir / "request.json").write_text(raw or json.dumps(request_of(*cases, **more)))
        said = tmp_path / f"supervisor-{len(started)}.log"
        with said.open("wb") as log:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", "jobs.supervisor", str(run_dir)],
                cwd=snapshot,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(Supervised(run_dir, process, said))
        return started[-1]

    yield start
    for run in started:
        record = run.dir / "supervisor.json"
        left = members(json.loads(record.read_text())) if record.exists() else []
        run.process.kill()
        run.process.wait()
        for pid in left:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

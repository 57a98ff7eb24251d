"""Runs outlive their commands: found again, followed, cancelled, collected and filed once."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from mlflow import MlflowClient

from jobs.host import marked
from orchestrator.__main__ import main
from orchestrator.paths import CLONE

pytestmark = [
    pytest.mark.runs,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]
T = TypeVar("T")
DEADLINE_S = 60.0

# Says that it runs, waits for its gate, and says how it went.
SCRIPT = r"""
import os, signal, sys, time
from pathlib import Path

sys.stdout.buffer.write(b"caf\xe9 \xff\n")
print("metric answer=41 step=1", flush=True)
if "family" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(1)
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
print("metric answer=42 step=2", flush=True)
"""


def eventually(found: Callable[[], T]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE_S:.0f} s")


class Place:
    """A results folder, a script with a gate, and commands that run it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = root / "results"
        self.gate = root / "open sesame"
        self.script = root / "my test.py"
        self.script.write_text(SCRIPT)
        self.commands: list[subprocess.Popen[str]] = []

    def arguments(self, *more: str) -> list[str]:
        args = ",".join(f'"{word}"' for word in (str(self.gate), *more))
        quoted = str(self.script).replace("'", "\\'")
        return [
            "job=script",
            f"job.path='{quoted}'",
            f"job.args=[{args}]",
            "job.device=cpu",
            "job.threads=1",
            f"results='{self.results}'",
        ]

    def start(self, *more: str) -> Path:
        """Starts a command in the background; its run's folder here, once its script is ready."""
        known = set(self.runs())
        command = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *self.arguments(*more)],
            cwd=CLONE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return eventually(lambda: self.ready(known))

    def ready(self, known: set[Path]) -> Path | None:
        for folder in set(self.runs()) - known:
            log = self.on_host(folder) / "log"
            if log.is_file() and b"ready" in log.read_bytes():
                return folder
        return None

    def runs(self) -> list[Path]:
        return sorted((self.results / "runs").glob("*"))

    def on_host(self, folder: Path) -> Path:
        return self.results / "host" / "runs" / folder.name

    def end(self, command: subprocess.Popen[str], number: int = signal.SIGKILL) -> str:
        command.send_signal(number)
        out, _ = command.communicate(timeout=DEADLINE_S)
        return out

    def verb(self, *arguments: str) -> int:
        return main([*arguments, f"results={self.results}"])

    def open_gate(self, folder: Path) -> None:
        """Lets the script end, and waits until the host has written down that it did."""
        self.gate.touch()
        eventually((self.on_host(folder) / "exit.json").exists)

    def filed(self, folder: Path) -> Any:
        """The one run in MLflow."""
        client = MlflowClient(f"sqlite:///{self.results}/mlflow.db")
        experiment = client.get_experiment_by_name("drafters")
        assert experiment is not None
        query = f"tags.`orchestrator.run_id` = '{folder.name}'"
        (run,) = client.search_runs([experiment.experiment_id], query)
        return run


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "a place ü"
    folder.mkdir()
    made = Place(folder)
    yield made
    made.gate.touch()
    for command in made.commands:
        if command.poll() is None:
            command.kill()
        command.communicate()
    for folder in made.runs():
        for pid in marked(made.on_host(folder)):
            os.kill(pid, signal.SIGKILL)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def assert_answered(place: Place, folder: Path) -> None:
    assert read(folder, "verdict.json")["verdict"] == "measured"
    assert read(folder, "result.json")["metrics"]["answer"]["value"] == 42
    assert (folder / "log").read_bytes() == (place.on_host(folder) / "log").read_bytes()
    run = place.filed(folder)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["answer"] == 42


def test_the_next_command_collects_and_files_what_ended_meanwhile(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start()
    place.end(place.commands[0])
    place.open_gate(folder)
    assert main(place.arguments()) == 0
    out = capfd.readouterr().out
    assert f"meanwhile  {folder.name} has ended: measured" in out
    assert len(place.runs()) == 2
    for run in place.runs():
        assert_answered(place, run)
    assert main(place.arguments()) == 0
    assert "meanwhile" not in capfd.readouterr().out


def test_what_goes_on_is_named_and_left_alone(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start()
    place.end(place.commands[0])
    assert place.verb("collect") == 0
    out = capfd.readouterr().out
    assert f"{folder.name} is running; follow it with" in out
    assert place.verb("runs") == 0
    assert re.search(rf"{folder.name} +local +running", capfd.readouterr().out)
    place.open_gate(folder)
    assert place.verb("runs") == 0
    assert re.search(rf"{folder.name} +local +finished\(0\) +collect it", capfd.readouterr().out)
    assert place.verb("collect") == 0
    assert_answered(place, folder)
    assert place.verb("runs") == 0
    assert re.search(rf"{folder.name} +local +finished\(0\) +measured", capfd.readouterr().out)


def test_attach_follows_to_the_end_and_one_command_at_a_time(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start()
    assert place.verb("attach", folder.name) == 2
    assert "another command follows" in capfd.readouterr().err
    place.end(place.commands[0])
    attached = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator",
            "attach",
            folder.name[-6:],
            f"results={place.results}",
        ],
        cwd=CLONE,
        stdout=subprocess.PIPE,
        text=True,
    )
    place.commands.append(attached)
    place.open_gate(folder)
    out, _ = attached.communicate(timeout=DEADLINE_S)
    assert attached.returncode == 0, out
    assert "answer  42 " in out
    assert_answered(place, folder)
    capfd.readouterr()
    assert place.verb("attach", folder.name) == 0  # shows the answer again
    assert "answer  42 " in capfd.readouterr().out


def test_logs_are_bytes_from_the_host_and_then_from_here(
    place: Place, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = place.start()
    place.end(place.commands[0])
    capfdbinary.readouterr()
    assert place.verb("logs", folder.name) == 0
    first = capfdbinary.readouterr().out
    assert first.startswith(b"caf\xe9 \xff\nmetric answer=41 step=1\nready\n")
    follower = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "orchestrator",
            "logs",
            folder.name,
            "-f",
            f"results={place.results}",
        ],
        cwd=CLONE,
        stdout=subprocess.PIPE,
    )
    assert follower.stdout is not None
    assert follower.stdout.read(len(first)) == first
    place.open_gate(folder)
    rest = follower.communicate(timeout=DEADLINE_S)[0]
    whole = (place.on_host(folder) / "log").read_bytes()
    assert first + rest == whole
    assert place.verb("collect") == 0
    capfdbinary.readouterr()
    assert place.verb("logs", folder.name) == 0
    assert capfdbinary.readouterr().out == whole


def test_cancel_leaves_no_process_of_the_run(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start("family")
    eventually(lambda: len(marked(place.on_host(folder))) >= 4)  # with script and daemon
    assert place.verb("cancel", folder.name) == 0
    assert f"{folder.name}  cancelled; no process of it is left" in capfd.readouterr().out
    assert marked(place.on_host(folder)) == []
    # The command that followed it saw its end, and filed it.
    out, _ = place.commands[0].communicate(timeout=DEADLINE_S)
    assert place.commands[0].returncode == 1
    assert "the run was cancelled" in out
    assert place.filed(folder).info.status == "KILLED"


def left_before_its_start(place: Place, like: Path, run_id: str) -> Path:
    """A run's folder as it is when its command dies before it has asked its host for anything."""
    folder = like.with_name(run_id)
    folder.mkdir()
    (folder / "config.yaml").write_bytes((like / "config.yaml").read_bytes())
    for name in ("log", "owner", "snapshot.diff"):
        (folder / name).touch()
    (folder / "run.json").write_text(json.dumps({**read(like, "run.json"), "run_id": run_id}))
    return folder


def test_a_run_whose_command_died_before_the_start_is_closed(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    place.gate.touch()
    assert main(place.arguments()) == 0
    (answered,) = place.runs()
    first, second = (left_before_its_start(place, answered, f"20990101-{n}") for n in "ab")
    (second / "request.json").write_text("{}")  # its start may be on the way
    capfd.readouterr()
    assert place.verb("runs") == 0
    out = capfd.readouterr().out
    for folder in (first, second):
        assert re.search(rf"{folder.name} +local +never started +attach starts it", out)
    assert place.verb("attach", first.name) == 0  # the same code: it is started now
    assert_answered(place, first)
    assert place.verb("collect") == 0
    assert "ended before the job was started" in capfd.readouterr().out
    assert read(second, "verdict.json")["verdict"] == "not_answered"
    assert place.filed(second).info.status == "FAILED"
    # What the dead command might still have sent finds the run forgone.
    assert read(place.on_host(second), "exit.json")["state"] == "never_started"


def test_a_run_that_its_host_does_not_know_any_more_is_not_judged(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start()
    away = place.results / "host" / "not mounted"
    (place.results / "host" / "runs").rename(away)
    # The command that follows it cannot tell what became of it, and says no more than that.
    out, _ = place.commands[0].communicate(timeout=DEADLINE_S)
    assert place.commands[0].returncode == 1
    assert "unknown  " in out
    assert "attach" in out
    for verb in (["collect"], ["attach", folder.name], ["cancel", folder.name]):
        assert place.verb(*verb) == 1
        captured = capfd.readouterr()
        assert "although it was started there; is host.work mounted" in captured.err + captured.out
    assert not (folder / "verdict.json").exists()
    assert not (folder / "filed.json").exists()
    (place.results / "host" / "runs").rmdir() if (
        place.results / "host" / "runs"
    ).exists() else None
    away.rename(place.results / "host" / "runs")
    place.open_gate(folder)
    assert place.verb("collect") == 0
    assert_answered(place, folder)


def test_a_sweep_whose_command_died_is_closed(place: Place) -> None:
    gates = ",".join(f'["{place.gate}","{n}"]' for n in (1, 2))
    arguments = [a for a in place.arguments() if not a.startswith("job.args")]
    command = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "-m", *arguments, f"job.args={gates}"],
        cwd=CLONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    place.commands.append(command)
    folder = eventually(lambda: place.ready(set()))
    place.end(command)
    place.open_gate(folder)
    assert place.verb("collect") == 0
    assert_answered(place, folder)
    parent = place.filed(folder).data.tags["mlflow.parentRunId"]
    client = MlflowClient(f"sqlite:///{place.results}/mlflow.db")
    assert client.get_run(parent).info.status == "FINISHED"


def test_a_run_that_cannot_be_read_stops_no_other(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = place.start()
    place.end(place.commands[0])
    place.open_gate(folder)
    for name, config in (("old", "host: {name: local}\n"), ("torn", "host: {name: [\n")):
        broken = place.results / "runs" / name
        broken.mkdir()
        (broken / "run.json").write_bytes((folder / "run.json").read_bytes())
        (broken / "config.yaml").write_text(config)
    assert place.verb("collect") == 1
    captured = capfd.readouterr()
    assert "another version of the orchestrator" in captured.err
    assert "torn/config.yaml cannot be read" in captured.err
    assert_answered(place, folder)
    assert place.verb("runs") == 0
    assert main(place.arguments()) == 0


def test_a_run_that_cannot_be_filed_keeps_no_other_from_it(place: Place) -> None:
    folder = place.start()
    place.end(place.commands[0])
    place.open_gate(folder)
    poison = place.results / "runs" / "20200101-poison"  # the oldest comes first
    shutil.copytree(folder, poison)
    (poison / "run.json").write_text(
        json.dumps({**read(folder, "run.json"), "run_id": poison.name})
    )
    (poison / "verdict.json").write_text('{"verdict": "measured", "reason": ""}')
    figures = {"answer": {"value": "no number"}}
    result = {"case_id": "case", "status": "ok", "ended": 1.0, "metrics": figures, "curves": {}}
    (poison / "result.json").write_text(json.dumps(result))
    place.verb("collect")
    assert not (poison / "filed.json").exists()
    assert_answered(place, folder)


def test_a_sweep_can_be_started_and_left(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    gates = ",".join(f'["{place.gate}","{n}"]' for n in (1, 2))
    arguments = [a for a in place.arguments() if not a.startswith("job.args")]
    assert main(["-m", *arguments, f"job.args={gates}", "detach=true"]) == 0
    out = capfd.readouterr().out
    assert "0 answered, 0 not answered, 2 started" in out
    first, second = place.runs()
    (sweep,) = (place.results / "sweeps").iterdir()
    assert read(sweep, "sweep.json")["ended"] is None
    place.gate.touch()
    eventually(lambda: all((place.on_host(f) / "exit.json").exists() for f in (first, second)))
    assert place.verb("attach", first.name) == 0
    parent = place.filed(first).data.tags["mlflow.parentRunId"]
    client = MlflowClient(f"sqlite:///{place.results}/mlflow.db")
    assert client.get_run(parent).info.status == "RUNNING"
    assert place.verb("attach", second.name) == 0
    for folder in (first, second):
        assert_answered(place, folder)
    assert client.get_run(parent).info.status == "FINISHED"
    assert read(sweep, "sweep.json")["ended"] is not None


def test_a_run_can_be_started_and_left(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*place.arguments(), "detach=true"]) == 0
    assert "was started and goes on" in capfd.readouterr().out
    (folder,) = place.runs()
    assert not (folder / "verdict.json").exists()
    eventually(lambda: place.ready(set()))
    place.open_gate(folder)
    assert place.verb("attach", "last") == 0
    assert_answered(place, folder)


def test_a_host_that_was_never_reached_has_started_nothing(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    alias = ["host=ssh", "host.alias=no-such-host.invalid"]
    assert main([*place.arguments(), *alias]) == 1
    assert "nothing was started" in capfd.readouterr().out
    (folder,) = place.runs()
    assert read(folder, "verdict.json")["verdict"] == "not_answered"
    assert place.filed(folder).info.status == "FAILED"
    # One whose command died on the way there is closed without asking that host.
    left = left_before_its_start(place, folder, "20990101-left")
    assert place.verb("runs") == 0
    assert re.search(r"20990101-left .* never started", capfd.readouterr().out)
    assert place.verb("cancel", left.name) == 0
    assert read(left, "verdict.json")["verdict"] == "not_answered"


def test_verbs_take_results_as_runs_do(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.gate.touch()
    assert main(place.arguments()) == 0
    capfd.readouterr()
    for spelt in (f"results={place.results}", f"results='{place.results}'"):
        assert main(["runs", spelt]) == 0
        assert place.runs()[0].name in capfd.readouterr().out
    assert main(["runs", "results=/nowhere"]) == 2
    assert "no runs are kept in results=/nowhere" in capfd.readouterr().err


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, arguments: list[str]) -> None:
        self.said = b""
        self.pid, self.fd = pty.fork()
        if not self.pid:
            os.chdir(CLONE)
            os.execv(sys.executable, [sys.executable, "-m", "orchestrator", *arguments])

    def wait_for(self, words: bytes) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while words not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self.fd], [], [], 0.1)[0]:
                self.said += os.read(self.fd, 4096)

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def end(self) -> int:
        """What is left to be read, and the exit code."""
        deadline = time.monotonic() + DEADLINE_S
        try:
            while time.monotonic() < deadline:
                if select.select([self.fd], [], [], 0.1)[0]:
                    self.said += os.read(self.fd, 4096)
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            pass  # the terminal's other side is closed
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize(
    ("keys", "ending"), [(b"d\r", "detached"), (b"\x03", "detached"), (b"c\r", "cancelled")]
)
def test_ctrl_c_on_a_terminal_asks(place: Place, keys: bytes, ending: str) -> None:
    terminal = Terminal(place.arguments())
    folder = eventually(lambda: place.ready(set()))
    terminal.type(b"\x03")
    terminal.wait_for(b"cancel it? [d/c]")
    assert not (place.on_host(folder) / "exit.json").exists()
    terminal.type(keys)
    assert terminal.end() == 1
    assert ending.encode() in terminal.said
    if ending == "cancelled":
        assert read(folder, "exit.json")["state"] == "cancelled"
        assert marked(place.on_host(folder)) == []
        return
    assert f"attach '{folder}'".encode() in terminal.said.replace(b"\r\n", b"")
    assert not (folder / "verdict.json").exists()
    place.open_gate(folder)
    assert place.verb("attach", folder.name) == 0
    assert_answered(place, folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["attach"], "attach takes one run"),
        (["attach", "nothing"], "there is no run nothing"),
        (["logs", "x", "-x"], "logs takes no '-x'"),
        (["cancel", "results"], "there is no run"),
        (["runs", "extra"], "runs takes no run"),
        (["collect", "colour=red"], "collect takes no 'colour=red'"),
        (["attch", "x"], "did you mean 'attach'"),
        (["runs", "host=nope"], "no run here was made on a host named nope"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    place: Place, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (place.results / "runs").mkdir(parents=True)
    assert place.verb(*arguments) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1

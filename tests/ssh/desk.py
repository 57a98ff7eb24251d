"""A person's desk: commands against a host, the line to it, and what must stand when all is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from bench.delay_line import DelayLine
from orchestrator.paths import CLONE, RunPaths
from orchestrator.push import Load, deliver, lay_out, tree_of
from orchestrator.snapshot import take_snapshot
from tests.ssh.machines import PYTHON, USER, Client, SshHost, wait_for

DEADLINE_S = 90.0
ALIAS = "gpu8"
HOME = f"/home/{USER}"

# Asked what is installed there, it waits while there is a file `hold`: until then nothing has been
# sent. Everything else, the host's program (-E) and jobs (-m), is as with the interpreter itself.
INTERPRETER = f"""#!/bin/sh
case "$1" in -E|-m) ;; *) while [ -e {HOME}/hold ]; do sleep 0.02; done ;; esac
exec {PYTHON} "$@"
"""

# Tells that it has begun, talks until its gate is open, and measures.
SCRIPT = r"""
import os, sys, time
from pathlib import Path

with open(Path.home() / "begun", "a") as file:
    file.write(Path(os.environ["RUN_DIR"]).name + "\n")
sys.stdout.buffer.write(b"caf\xe9 \xff\n")
print("metric answer=41 step=1", flush=True)
count = 0
while not Path(sys.argv[1]).exists():
    count += 1
    print("still here", count, flush=True)
    time.sleep(0.02)
print("metric answer=42 step=2", flush=True)
"""


class Command:
    """One command, as its own process; what it says goes to a file."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", *arguments],
                cwd=CLONE,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    @property
    def said(self) -> str:
        return self._output.read_text()

    def kill(self) -> None:
        """As the out-of-memory killer, a crash or a closed laptop would have it."""
        assert self.process.poll() is None, self.said
        self.process.kill()
        self.process.wait()

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=DEADLINE_S)


class Desk:
    """A results folder and a script on this side, and a host."""

    def __init__(self, folder: Path, host: SshHost, client: Client) -> None:
        self.folder = folder
        self.host = host
        self.client = client
        self.results = folder / "results"
        self.script = folder / "my test.py"
        self.script.write_text(SCRIPT)
        self.commands: list[Command] = []
        self.lines: list[DelayLine] = []
        interpreter = host.home / "python"
        interpreter.write_text(INTERPRETER)
        interpreter.chmod(0o755)

    def line(self, alias: str = ALIAS, **settings: str) -> DelayLine:
        """A line of its own to the host, and the alias that leads over it."""
        line = DelayLine(self.host.port)
        self.lines.append(line)
        self.client.add(alias, self.host, port=line.port, **settings)
        return line

    # what lies on the host

    @property
    def work(self) -> Path:
        return self.host.home / "drafter-orchestrator"

    def there(self, folder: Path) -> Path:
        """The run's folder on the host."""
        return self.work / "runs" / folder.name

    def hold(self) -> None:
        """From here on a command stops when it has looked over the host, before it sends anything."""
        (self.host.home / "hold").touch()

    def is_held(self) -> bool:
        """Whether a command has come so far."""
        # Not yet exec'd: nothing but the question stays so.
        said = [c.partition(f"{HOME}/python ") for c in self.host.user_processes().values()]
        return any(own and not rest.startswith(("-E", "-m")) for _, own, rest in said)

    def go_on(self) -> None:
        (self.host.home / "hold").unlink()

    def open_gate(self, name: str = "gate") -> None:
        """Lets the scripts that wait for it end."""
        (self.host.home / name).touch()

    def begun(self) -> list[str]:
        """The ids of the runs whose scripts have begun, once for every time that they did."""
        path = self.host.home / "begun"
        return path.read_text().split() if path.exists() else []

    def programs(self) -> list[int]:
        """The host's programs that serve a command now."""
        return [p for p, said in self.host.user_processes().items() if "/programs/" in said]

    def sent_part(self) -> int:
        """How much there is of large content that was cut off."""
        (part,) = (self.work / "tmp").glob("*.part")
        return part.stat().st_size

    # commands

    def overrides(self, *more: str, alias: str = ALIAS, gate: str = "gate") -> list[str]:
        """What runs the script on the host, but for the settings that `more` sets."""
        ours = [
            "host=ssh",
            f"host.alias={alias}",
            f"host.ssh_config={self.client.config}",
            f"host.python={HOME}/python",
            "job=script",
            f"job.path='{self.script}'",
            f"job.args=[{HOME}/{gate}]",
            "job.device=cpu",
            "job.threads=1",
            f"results={self.results}",
        ]
        set_here = {override.split("=")[0] for override in more}
        return [o for o in ours if o.split("=")[0] not in set_here] + list(more)

    def start(self, *arguments: str) -> Command:
        """A command with just these arguments, in the background."""
        command = Command(
            arguments=list(arguments), output=self.folder / f"{len(self.commands)}.out"
        )
        self.commands.append(command)
        return command

    def begin(self, *more: str, alias: str = ALIAS, gate: str = "gate") -> tuple[Command, Path]:
        """A command that runs the script, and the folder of its run."""
        known = set(self.runs())
        command = self.start(*self.overrides(*more, alias=alias, gate=gate))

        def made() -> Path | None:
            assert command.process.poll() is None or set(self.runs()) - known, command.said
            return next(iter(set(self.runs()) - known), None)

        return command, wait_for(made, "the run's folder", DEADLINE_S)

    def verb(self, *arguments: str, code: int = 0) -> str:
        """What a verb says; it must end with this code."""
        return self.ended(self.start(*arguments, f"results={self.results}"), code)

    def ended(self, command: Command, code: int = 0) -> str:
        """What the command has said; it must end with this code."""
        assert command.wait() == code, command.said
        return command.said

    def follows(self, folder: Path) -> None:
        """Waits until the run's log comes in here."""
        log = RunPaths(folder).log
        size = log.stat().st_size

        def grown() -> bool:
            assert not RunPaths(folder).verdict.exists(), self.verdict(folder)
            return log.stat().st_size > size + 100

        wait_for(grown, "the log to come in", DEADLINE_S)

    def push_all(self) -> None:
        """The host has code and script then, and a command needs to send nothing but the start."""
        script = tree_of({self.script.name: self.script})
        loads = [
            Load(kind="snapshots", tree=take_snapshot(CLONE).tree),
            Load(kind="inputs", tree=script),
        ]
        with self.client.open(ALIAS, work=f"{HOME}/{self.work.name}") as channel:
            deliver(channel, loads, channel.pipeline([*map(lay_out, loads)], check=False), [])

    # what must stand at the end

    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.results.glob("runs/*/run.json"))

    def verdict(self, folder: Path) -> Any:
        return json.loads(RunPaths(folder).verdict.read_bytes())

    def filed(self) -> dict[str, Any]:
        """MLflow's runs by run id: every run that has a verdict, once, and none is left open."""
        store = MlflowClient(f"sqlite:///{self.results}/mlflow.db")
        experiment = store.get_experiment_by_name("drafters")
        found: dict[str, Any] = {}
        for run in store.search_runs([experiment.experiment_id]):
            assert run.info.status != "RUNNING"
            assert run.info.end_time is not None
            if "orchestrator.sweep_id" not in run.data.tags:
                run_id = run.data.tags["orchestrator.run_id"]
                assert run_id not in found
                found[run_id] = run
        judged = {f.name for f in self.runs() if RunPaths(f).verdict.is_file()}
        assert set(found) == judged
        return found

    def assert_answered(self, *folders: Path) -> None:
        """Each of these runs has its whole answer here, and once in MLflow."""
        filed = self.filed()
        for folder in folders:
            assert self.verdict(folder)["verdict"] == "measured"
            assert json.loads((folder / "result.json").read_bytes())["metrics"]["answer"] == {
                "value": 42.0
            }
            for name in ("log", "events.jsonl", "exit.json", "environment.json", "gpus.json"):
                assert (folder / name).read_bytes() == (self.there(folder) / name).read_bytes()
            log = (folder / "log").read_bytes()
            assert log.startswith(b"caf\xe9 \xff\n")
            assert log.endswith(b"metric answer=42 step=2\n")
            run = filed[folder.name]
            assert run.info.status == "FINISHED"
            assert run.data.metrics["answer"] == 42
            files = Path(run.info.artifact_uri.removeprefix("file://"))
            assert (files / "log").read_bytes() == log
            assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
            assert self.begun().count(folder.name) == 1

    def assert_closed(self, folder: Path, reason: str) -> None:
        """The run has no answer, for this reason, and is filed as such."""
        verdict = self.verdict(folder)
        assert verdict["verdict"] == "not_answered"
        assert reason in verdict["reason"]
        assert self.filed()[folder.name].info.status == "FAILED"

    def assert_open(self, folder: Path) -> None:
        """The run is neither judged nor filed, and never failed."""
        assert not RunPaths(folder).verdict.exists()
        assert not RunPaths(folder).result.exists()

    def close(self) -> None:
        """Ends what is left of it, on both sides."""
        for command in self.commands:
            if command.process.poll() is None:
                command.process.kill()
            command.process.wait()
        for line in self.lines:
            line.close()
        for pid in self.host.user_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def opened(folder: Path, host: SshHost, client: Client) -> Iterator[Desk]:
    """A desk that is left as it was found."""
    desk = Desk(folder, host, client)
    try:
        yield desk
    finally:
        desk.close()

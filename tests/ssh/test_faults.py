"""Commands that are killed and lines that are cut, in every phase: the answer is filed once, whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.delay_line import DelayLine
from orchestrator.paths import RunPaths
from tests.ssh.desk import DEADLINE_S, Command, Desk, opened
from tests.ssh.machines import Client, SshHost, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
MIB = 1 << 20
LARGE = 32 * MIB
BESIDE = 2 * MIB  # more than all that a command sends beside one large input

# At 0.2 s a server's window of 2 MiB lets 10 MiB/s pass: time enough to act in the middle of a push.
# At 2 s a reply is on its way long enough to be held back.
PUSH_S, REPLY_S = 0.2, 2.0


@pytest.fixture
def desk(tmp_path: Path, host: SshHost, client: Client) -> Iterator[Desk]:
    with opened(tmp_path, host, client) as desk:
        yield desk


@pytest.fixture
def line(desk: Desk) -> DelayLine:
    return desk.line()


def large_input(desk: Desk, name: str = "large") -> str:
    """An override: a file that goes over with the script, and that the host has never seen."""
    path = desk.folder / name
    path.write_bytes(os.urandom(LARGE))
    return f"job.files=[{path}]"


def go_on_slowly(desk: Desk, line: DelayLine, folder: Path, round_trip_s: float) -> None:
    """Lets a held command go on, once it has come so far, over a longer line."""
    wait_for(lambda: RunPaths(folder).run.exists(), "the run's folder", DEADLINE_S)
    wait_for(lambda: probing(desk), "the command to look over the host", DEADLINE_S)
    line.round_trip_s = round_trip_s
    desk.go_on()


def probing(desk: Desk) -> bool:
    return any("/home/gpu/python -" in c for c in desk.host.user_processes().values())


def until_pushing(desk: Desk, line: DelayLine, *more: str, alias: str = "gpu8") -> tuple[Command, Path]:
    """A command in the middle of its push."""
    desk.hold()
    command, folder = desk.begin(large_input(desk, f"large {alias}"), *more, alias=alias)
    go_on_slowly(desk, line, folder, PUSH_S)
    before = line.sent
    wait_for(lambda: line.sent > before + 10 * MIB, "a third of the push", DEADLINE_S)
    return command, folder


def until_started(desk: Desk, line: DelayLine, folder: Path) -> None:
    """The job has been started; the reply that says so is on its way for a second."""
    go_on_slowly(desk, line, folder, REPLY_S)
    wait_for((desk.there(folder) / "spawn.json").exists, "the start", DEADLINE_S)


def lose(line: DelayLine) -> None:
    """What is on its way is lost, for both sides; the line is as in the beginning."""
    line.cut()
    line.round_trip_s = 0.0
    line.thaw()


def test_killed_while_pushing(desk: Desk, line: DelayLine) -> None:
    command, folder = until_pushing(desk, line)
    line.freeze()
    command.kill()
    lose(line)
    part = desk.sent_part()
    assert 4 * MIB < part < LARGE
    line.reset_counts()
    desk.open_gate()
    desk.verb("attach", folder.name)  # it was never started, and the code is the same
    assert LARGE - part < line.sent < LARGE - part + BESIDE
    desk.assert_answered(folder)

    command, folder = until_pushing(desk, line)
    arguments = command.process.args[3:]
    line.freeze()
    command.kill()
    lose(line)
    part = desk.sent_part()
    line.reset_counts()
    said = desk.ended(desk.start(*arguments))  # the same once more
    assert f"meanwhile  {folder.name} has ended: not answered" in said
    assert LARGE - part < line.sent < LARGE - part + BESIDE
    desk.assert_closed(folder, "the command ended before the job was started")
    desk.assert_answered(*(run for run in desk.runs() if run != folder))
    assert len(desk.runs()) == 3
    assert not list((desk.work / "tmp").iterdir())

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
    wait_for(desk.is_held, "the command to look over the host", DEADLINE_S)
    line.round_trip_s = round_trip_s
    desk.go_on()


def until_pushing(
    desk: Desk, line: DelayLine, *more: str, alias: str = "gpu8"
) -> tuple[Command, Path]:
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


def test_killed_before_and_while_pushing(desk: Desk, line: DelayLine) -> None:
    desk.open_gate()
    desk.hold()
    command, before = desk.begin()
    wait_for(desk.is_held, "the command to look over the host", DEADLINE_S)
    command.kill()
    desk.go_on()
    desk.verb("attach", before.name)  # it was never started, and all is as it was
    desk.assert_answered(before)

    command, folder = until_pushing(desk, line)
    arguments = command.process.args[3:]
    line.freeze()
    command.kill()
    lose(line)
    part = desk.sent_part()
    assert 4 * MIB < part < LARGE
    line.reset_counts()
    said = desk.ended(desk.start(*arguments))  # the same once more
    assert LARGE - part < line.sent < LARGE - part + BESIDE
    assert f"meanwhile  {folder.name} has ended: not answered" in said
    desk.assert_closed(folder, "ended before the job was started")
    desk.assert_answered(*(run for run in desk.runs() if run != folder))
    assert len(desk.runs()) == 3
    assert not list((desk.work / "tmp").iterdir())


def test_killed_while_starting_following_collecting_and_filing(desk: Desk, line: DelayLine) -> None:
    desk.hold()
    command, starting = desk.begin(gate="starting")
    until_started(desk, line, starting)
    line.freeze()
    command.kill()
    lose(line)
    assert not RunPaths(starting).log.read_bytes()

    command, following = desk.begin(gate="following")
    desk.follows(following)
    command.kill()
    assert f"meanwhile  {starting.name} is running" in command.said

    command, collecting = desk.begin(gate="collecting")
    desk.follows(collecting)
    line.freeze()
    desk.open_gate("collecting")
    wait_for((desk.there(collecting) / "exit.json").exists, "the job's end", DEADLINE_S)
    command.kill()
    lose(line)

    desk.open_gate()
    command, filing = desk.begin()
    wait_for(RunPaths(filing).verdict.exists, "the verdict", DEADLINE_S)
    command.kill()
    assert f"meanwhile  {collecting.name} has ended: measured" in command.said

    for gate, folder in (("starting", starting), ("following", following)):
        desk.open_gate(gate)
        wait_for((desk.there(folder) / "exit.json").exists, "the job's end", DEADLINE_S)
    said = desk.ended(desk.start(*desk.overrides()))
    for folder in (starting, following):
        assert f"meanwhile  {folder.name} has ended: measured" in said
    assert len(desk.runs()) == 5
    desk.assert_answered(*desk.runs())
    assert desk.verb("collect").strip() == "every run has ended and was judged"


@pytest.mark.parametrize("successor", ["collect", "attach"])
def test_a_start_that_is_read_late_comes_to_nothing(
    desk: Desk, line: DelayLine, successor: str
) -> None:
    """What a dead command has sent can lie on the host, unread, when its run is closed."""
    desk.push_all()
    desk.hold()
    command, folder = desk.begin()
    go_on_slowly(desk, line, folder, REPLY_S)
    wait_for(RunPaths(folder).request.exists, "the request, which is a second on its way")
    before = line.sent
    (program,) = desk.programs()
    os.kill(program, signal.SIGSTOP)
    wait_for(lambda: line.sent > before, "the request to come to the host")
    command.kill()
    lose(line)
    assert not desk.there(folder).exists()
    if successor == "collect":
        desk.verb("collect")
        desk.assert_closed(folder, "ended before the job was started")
    else:
        desk.script.write_text("print('metric answer=43')\n")
        desk.verb("attach", folder.name, code=1)
        desk.assert_closed(folder, "what it reads has changed since")
    os.kill(program, signal.SIGCONT)
    wait_for(lambda: not desk.host.user_processes(), "all that was sent to come to nothing")
    assert desk.begun() == []


def test_a_command_that_loses_its_host_in_every_phase_and_way(desk: Desk, line: DelayLine) -> None:
    command, folder = until_pushing(desk, line)
    desk.hold()
    lose(line)
    go_on_slowly(desk, line, folder, PUSH_S)
    wait_for(lambda: line.sent > LARGE - 2 * MIB, "nearly all of the push", DEADLINE_S)
    line.round_trip_s = REPLY_S
    wait_for((desk.there(folder) / "spawn.json").exists, "the start", DEADLINE_S)
    lose(line)
    desk.follows(folder)
    lose(line)
    desk.follows(folder)
    (program,) = desk.programs()
    os.kill(program, signal.SIGKILL)
    desk.follows(folder)
    desk.host.stop()
    desk.host.start()
    desk.follows(folder)
    line.freeze()
    desk.open_gate()
    wait_for((desk.there(folder) / "exit.json").exists, "the job's end", DEADLINE_S)
    lose(line)
    assert desk.ended(command).count("trying again for") >= 6
    assert line.sent < LARGE + 4 * MIB
    assert len(desk.runs()) == 1
    desk.assert_answered(folder)


def test_a_host_that_stays_away_is_unreachable_and_nothing_is_judged(desk: Desk) -> None:
    short = "host.patience_s=2"
    lines = {
        name: desk.line(name, ServerAliveInterval="1", ConnectTimeout="2")
        for name in ("pushing", "starting", "following", "collecting", "frozen")
    }

    def lose_for_good(name: str) -> None:
        lines[name].refuse()
        lose(lines[name])

    commands: dict[str, tuple[Command, Path]] = {}
    commands["pushing"] = until_pushing(desk, lines["pushing"], short, alias="pushing")
    lose_for_good("pushing")

    desk.hold()
    commands["starting"] = desk.begin(short, alias="starting")
    until_started(desk, lines["starting"], commands["starting"][1])
    lose_for_good("starting")

    for name in ("following", "collecting", "frozen"):
        commands[name] = desk.begin(short, alias=name, gate=name)
        desk.follows(commands[name][1])
        lines[name].freeze()
        if name == "collecting":
            desk.open_gate(name)
            exit_file = desk.there(commands[name][1]) / "exit.json"
            wait_for(exit_file.exists, "the job's end", DEADLINE_S)
        if name != "frozen":
            lose_for_good(name)

    for name, (command, folder) in commands.items():
        said = desk.ended(command, code=1)
        assert re.search(rf"^unreachable  {name}: ", said, re.M), said
        assert f"attach '{folder}'" in said or f"attach {folder}" in said
        desk.assert_open(folder)
    assert "nothing was heard from the host for 3 s" in commands["frozen"][0].said

    for line in lines.values():
        line.refuse(False)
        line.thaw()
    for name in ("gate", "following", "frozen"):
        desk.open_gate(name)
    started = [folder for name, (_, folder) in commands.items() if name != "pushing"]
    for folder in started:
        wait_for((desk.there(folder) / "exit.json").exists, "the job's end", DEADLINE_S)
    desk.verb("collect")
    desk.assert_answered(*started)
    desk.assert_closed(commands["pushing"][1], "ended before the job was started")


def test_a_host_that_lets_nobody_in_for_a_while_is_unreachable(desk: Desk, line: DelayLine) -> None:
    """As while it boots, or when the agent is locked: says nothing about the run."""
    keys = desk.host.home / ".ssh" / "authorized_keys"
    command, folder = desk.begin("host.patience_s=2")
    desk.follows(folder)
    known = keys.read_bytes()
    keys.write_bytes(b"")
    line.cut()
    assert "unreachable  gpu8: " in desk.ended(command, code=1)
    desk.assert_open(folder)
    assert "unreachable  gpu8: " in desk.verb("attach", folder.name, code=1)
    desk.assert_open(folder)
    keys.write_bytes(known)
    desk.open_gate()
    desk.verb("attach", folder.name)
    desk.assert_answered(folder)


def test_a_damaged_run_of_an_earlier_command_stops_nothing(desk: Desk, line: DelayLine) -> None:
    command, folder = desk.begin()
    desk.follows(folder)
    command.kill()
    desk.open_gate()
    record = desk.there(folder) / "exit.json"
    wait_for(record.exists, "the job's end", DEADLINE_S)
    whole = record.read_bytes()
    record.write_bytes(whole[:20])
    said = desk.ended(desk.start(*desk.overrides()))
    assert re.search(rf"meanwhile  {folder.name} cannot be taken in: .*record is damaged", said)
    desk.assert_open(folder)
    record.write_bytes(whole)
    desk.verb("collect")
    desk.assert_answered(*desk.runs())
    assert len(desk.runs()) == 2

"""With a connection open, two round trips lead from changed files to the first output of the job."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.delay_line import DelayLine
from orchestrator import loop
from orchestrator.channel import Channel, Reply, Request
from orchestrator.config import Resolved
from orchestrator.paths import CLONE
from orchestrator.push import hash_file
from orchestrator.session import Session
from orchestrator.show import Show
from orchestrator.snapshot import Snapshot
from tests.orchestrator.test_config import resolved
from tests.ssh.machines import PYTHON, Client, SshHost

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
ROUND_TRIP_S = 1.0  # long beside what either end needs to say all that it has to say


class Turns(DelayLine):
    """Counts how often the client sent something after the host had said something.

    Whatever passes on the TCP connection is counted, SSH's own messages too. The way is so long that
    bytes which did not wait for an answer pass before it.
    """

    def __init__(self, target_port: int) -> None:
        self.turns = 0
        self._host_spoke = True
        super().__init__(target_port)

    def _count_sent(self, size: int) -> None:
        super()._count_sent(size)
        self.turns += self._host_spoke
        self._host_spoke = False

    def _count_received(self, size: int) -> None:
        super()._count_received(size)
        self._host_spoke = True


class Newest(Session):
    """A command that takes each run's code as it then is."""

    def snapshot(self) -> Snapshot:
        self._snapshot = None
        return super().snapshot()


@dataclass(kw_only=True)
class Person:
    """Somebody with 400 files beside the jobs' code, a script, and a long way to the host."""

    code: Path
    line: Turns
    config: Resolved
    session: Session
    asked: list[Request] = field(default_factory=list)
    turns: int | None = None  # when the first line of the script's output had come

    def change(self, count: int) -> set[str]:
        """Writes 3 KB of new text to each of the first files; its hashes."""
        files = [self.code / "jobs" / "data" / f"{number:03}.txt" for number in range(count)]
        for file in files:
            file.write_text(secrets.token_hex(1500))
        return {hash_file(file) for file in files}

    def run(self) -> list[Request]:
        """What is asked of the host until the first output of the script, over the long way."""
        self.asked.clear()
        self.line.round_trip_s = ROUND_TRIP_S
        self.line.turns, self.turns = 0, None
        loop.run(self.session, self.config)
        assert self.turns is not None
        return self.asked

    def watch(self, requests: Sequence[Request], replies: Sequence[Reply]) -> None:
        """Notes what goes through the channel up to the first output."""
        if self.turns is not None:
            return
        self.asked += requests
        if any(reply.header.get("chunks", {}).get("log") for reply in replies):
            self.turns = self.line.turns
            self.line.round_trip_s = 0.0  # what follows need not take long


@pytest.fixture
def person(
    host: SshHost, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Person]:
    code = tmp_path / "code"
    unwanted = shutil.ignore_patterns("__pycache__")
    for folder in ("jobs", "eagle3"):
        shutil.copytree(CLONE / folder, code / folder, ignore=unwanted)
    (code / "jobs" / "data").mkdir()
    script = tmp_path / "script.py"
    script.write_text("print('the first line')\n")
    monkeypatch.setattr("orchestrator.session.CLONE", code)
    with Turns(host.port) as line:
        client.add("gpu8", host, port=line.port, ServerAliveInterval="600")
        config = resolved(
            *("host=ssh", "host.alias=gpu8", f"host.ssh_config={client.config}"),
            *(f"host.python={PYTHON}", "job=script", f"job.path={script}", "job.device=cpu"),
            f"results={tmp_path / 'results'}",
        )
        with Newest(Show()) as session:
            found = Person(code=code, line=line, config=config, session=session)
            found.change(400)
            loop.run(session, config)
            pipeline = Channel.pipeline

            def watched(
                channel: Channel, requests: Sequence[Request], *, check: bool = True
            ) -> list[Reply]:
                replies = pipeline(channel, requests, check=check)
                found.watch(requests, replies)
                return replies

            monkeypatch.setattr(Channel, "pipeline", watched)
            yield found


@pytest.mark.parametrize("count", [1, 40])
def test_changed_files_and_the_first_output_take_two_round_trips(
    person: Person, count: int
) -> None:
    hashes = person.change(count)
    asked = person.run()
    puts = [request.fields["hash"] for request in asked if request.op == "put"]
    assert sorted(puts) == sorted(hashes)
    assert person.turns == 2


def test_where_nothing_has_changed_no_content_travels(person: Person) -> None:
    asked = person.run()
    question = ["lay_out", "lay_out", "probe"]  # the code, the script; the host as it is
    assert [request.op for request in asked] == [*question, "start", "follow"]
    assert person.turns == 2

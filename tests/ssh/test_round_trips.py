"""With a connection open, two round trips lead from changed files to the first output of the job."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.delay_line import DelayLine
from orchestrator import loop
from orchestrator.config import Resolved
from orchestrator.follow import OnEvent, OnInterrupt
from orchestrator.paths import CLONE
from orchestrator.push import hash_file
from orchestrator.session import Session
from orchestrator.show import Show
from orchestrator.snapshot import Snapshot
from orchestrator.ssh_line import Session as Streams
from tests.orchestrator.test_config import resolved
from tests.ssh.machines import PYTHON, Client, SshHost

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
ROUND_TRIP_S = 1.0  # long beside what either end needs to say all it has to say


class Turns(DelayLine):
    """Counts how often the host was sent something after it had said something.

    It counts what passes on the TCP connection, whatever it is: SSH's own messages too. The way is
    so long that bytes which did not wait for an answer pass before it.
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


class Watching(Show):
    """Tells of the first that is heard of a job."""

    def __init__(self, first: Callable[[], None]) -> None:
        super().__init__()
        self._first = first

    @contextmanager
    def progress(self) -> Iterator[tuple[OnEvent, OnInterrupt]]:
        heard = False

        def on_event(event: dict[str, Any]) -> None:
            nonlocal heard
            if not heard:
                self._first()
            heard = True

        yield on_event, lambda: "cancel"


class Newest(Session):
    """One command that takes each run's code as it then is."""

    def snapshot(self) -> Snapshot:
        self._snapshot = None
        return super().snapshot()


@dataclass(frozen=True, kw_only=True)
class First:
    """What there was when the first output had come: turns taken, requests sent, the log so far."""

    turns: int
    requests: list[dict[str, Any]]
    log: str


class Person:
    """Somebody with 400 files beside the jobs' code, a script, and a long way to the host."""

    def __init__(
        self, session: Session, line: Turns, config: Resolved, code: Path, written: bytearray
    ) -> None:
        self.code = code
        self._session, self._line, self._config, self._written = session, line, config, written
        self.firsts: list[First] = []

    def change(self, count: int) -> list[str]:
        """New text of 3 KB in each of the first files; its hashes."""
        files = [self.code / "jobs" / "data" / f"{number:03}.txt" for number in range(count)]
        for file in files:
            file.write_text(secrets.token_hex(1500))
        return [hash_file(file) for file in files]

    def run(self) -> First:
        """Runs the script as a command does that is connected already."""
        self._written.clear()
        self._line.round_trip_s = ROUND_TRIP_S
        self._line.turns = 0
        loop.run(self._session, self._config)
        return self.firsts[-1]

    def heard(self) -> None:
        """The first output is here; what follows need not take long."""
        self._line.round_trip_s = 0.0
        log = self._session.folders[-1] / "log"
        sent = list(requests(bytes(self._written)))
        self.firsts.append(First(turns=self._line.turns, requests=sent, log=log.read_text()))


def requests(stream: bytes) -> Iterator[dict[str, Any]]:
    """The headers of the requests in what was written to the host's program."""
    while stream:
        line, _, stream = stream.partition(b"\n")
        header = json.loads(line)
        stream = stream[header["payload"] :]
        yield header


@pytest.fixture
def person(
    host: SshHost, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Person]:
    code = tmp_path / "code"
    for folder in ("jobs", "eagle3"):
        shutil.copytree(
            CLONE / folder, code / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (code / "jobs" / "data").mkdir()
    monkeypatch.setattr("orchestrator.session.CLONE", code)
    written, write = bytearray(), Streams.write

    def noted(self: Streams, data: bytes, /) -> None:
        written.extend(data)
        write(self, data)

    script = tmp_path / "script.py"
    script.write_text("print('the first line')\n")
    with Turns(host.port) as line:
        client.add("gpu8", host, port=line.port, ServerAliveInterval="600")
        config = resolved(
            *("host=ssh", "host.alias=gpu8", f"host.ssh_config={client.config}"),
            *(f"host.python={PYTHON}", "job=script", f"job.path={script}", "job.device=cpu"),
            f"results={tmp_path / 'results'}",
        )
        with Newest(Watching(lambda: person.heard())) as session:
            session.link(config.config["host"])  # the host's program has gone over
            monkeypatch.setattr(Streams, "write", noted)
            person = Person(session, line, config, code, written)
            person.change(400)
            loop.run(session, config)
            yield person


@pytest.mark.parametrize("count", [1, 40])
def test_changed_files_and_the_first_output_take_two_round_trips(
    person: Person, count: int
) -> None:
    hashes = person.change(count)
    first = person.run()
    assert first.log == "the first line\n"
    assert first.turns == 2
    assert [r["hash"] for r in first.requests if r["op"] == "put"] == hashes


def test_where_nothing_has_changed_no_content_travels(person: Person) -> None:
    first = person.run()
    assert first.log == "the first line\n"
    assert first.turns == 2
    question = ["lay_out", "lay_out", "probe"]  # the code, the script; the host as it is
    assert [r["op"] for r in first.requests] == [*question, "start", "follow"]

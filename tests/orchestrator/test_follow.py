"""Following a run on a host that answers oddly, or means harm."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.channel import Channel
from orchestrator.errors import Detached, StateUnknown
from orchestrator.follow import Copy, Wish, follow, read_file, read_request, whole_event

Answer = tuple[dict[str, Any], bytes]


class OddHost:
    """Answers every request with what it was told to say next; the last one for ever."""

    def __init__(self, answers: list[Answer]) -> None:
        ours, self._theirs = socket.socketpair()
        self._answers = answers
        self.asked: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.file = ours.makefile("rwb")
        self.channel = Channel(self.file, self.file, name="odd host")
        self._ours = ours

    def _serve(self) -> None:
        with self._theirs, self._theirs.makefile("rwb") as stream:
            while line := stream.readline():
                self.asked.append(json.loads(line))
                header, payload = self._answers.pop(0) if self._answers[1:] else self._answers[0]
                said = {"ok": True, **header, "payload": len(payload)}
                stream.write(json.dumps(said).encode() + b"\n" + payload)
                stream.flush()

    def close(self) -> None:
        self.channel.stop_sending()
        self._ours.shutdown(socket.SHUT_RDWR)
        self.channel.wait_closed()
        self.file.close()
        self._ours.close()
        self._thread.join(10)


@pytest.fixture
def odd() -> Iterator[Callable[..., OddHost]]:
    made: list[OddHost] = []

    def make(*answers: Answer) -> OddHost:
        made.append(OddHost(list(answers)))
        return made[-1]

    yield make
    for host in made:
        host.close()


def running(chunks: dict[str, Any], payload: bytes = b"", state: str = "running") -> Answer:
    return {"state": {"state": state}, "chunks": chunks}, payload


def follow_it(host: OddHost, folder: Path, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"on_event": lambda _: None, "on_interrupt": lambda: "detach"}
    return follow(host.channel, "run-1", folder, **{**settings, "wish": Wish(), **more})


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "result.json", "log/../../x"])
def test_no_file_is_written_that_was_not_asked_for(
    odd: Callable[..., OddHost], tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    target = folder / name
    with pytest.raises(StateUnknown, match="makes no sense"):
        follow_it(odd(running({name: 4}, b"evil")), folder)
    assert list(folder.iterdir()) == []
    assert not target.exists()


@pytest.mark.parametrize(
    "answer",
    [
        ({"state": "running", "chunks": {}}, b""),
        ({"chunks": {}}, b""),
        ({"state": {"state": 3}, "chunks": {}}, b""),
        ({"state": {"state": "running"}}, b""),
        running({"log": -1}),
        running({"log": 9}, b"few"),
        running({"log": "2"}, b"ab"),
        running({}, b"more than was announced"),
    ],
)
def test_an_answer_that_makes_no_sense_says_nothing_of_the_run(
    odd: Callable[..., OddHost], tmp_path: Path, answer: Answer
) -> None:
    with pytest.raises(StateUnknown):
        follow_it(odd(answer), tmp_path)


def test_a_file_that_never_comes_to_its_end_is_given_up(odd: Callable[..., OddHost]) -> None:
    channel = odd(({"size": 10}, b"abc"), ({"size": 10}, b"")).channel
    (answer,) = channel.pipeline([read_request("run-1", "result.json")])
    with pytest.raises(StateUnknown, match="shorter than it is said to be"):
        read_file(channel, "run-1", "result.json", answer)


def test_a_run_is_followed_from_where_its_copy_ends(
    odd: Callable[..., OddHost], tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(b"first ")
    (tmp_path / "events.jsonl").write_bytes(b'{"type": "note", "te')
    host = odd(
        running({"log": 6, "events.jsonl": 13}, b'secondxt": "hello"}'),
        running({"events.jsonl": 1}, b"\n"),
        running({}, state="finished"),
    )
    events: list[dict[str, Any]] = []
    assert follow_it(host, tmp_path, on_event=events.append)["state"] == "finished"
    assert host.asked[0]["offsets"] == {"log": 6, "events.jsonl": 20}
    assert (tmp_path / "log").read_bytes() == b"first second"
    assert [event["text"] for event in events] == ["hello"]


def test_a_cancel_is_asked_for_again_over_the_next_connection(
    odd: Callable[..., OddHost], tmp_path: Path
) -> None:
    wish = Wish(asked=True)
    ended = running({}, state="cancelled")
    first = odd(({"left": []}, b""), running({"log": -1}))
    with pytest.raises(StateUnknown):
        follow_it(first, tmp_path, wish=wish, on_interrupt=lambda: "cancel")
    assert wish.cancelled
    second = odd(({"left": []}, b""), ended, ({"left": []}, b""))
    assert follow_it(second, tmp_path, wish=wish)["state"] == "cancelled"
    assert [asked["op"] for asked in second.asked] == ["signal", "follow", "signal"]


def test_a_second_interrupt_detaches(odd: Callable[..., OddHost], tmp_path: Path) -> None:
    with pytest.raises(Detached):
        follow_it(odd(running({})), tmp_path, wish=Wish(asked=True, cancelled=True))


def test_a_copy_that_was_interrupted_goes_on_from_its_files(tmp_path: Path) -> None:
    Copy(tmp_path).add({"log": b"one ", "events.jsonl": b'{"type": "note", "text": "a"}\n{"ty'})
    again = Copy(tmp_path)
    assert again.offsets == {"log": 4, "events.jsonl": 34}
    (event,) = again.add({"events.jsonl": b'pe": "note", "text": "b"}\n'})
    assert event["text"] == "b"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"type": "progress", "what": "x"}',
        b'{"type": "progress", "what": "x", "done": "1", "total": 2}',
        b'{"type": "note", "text": {}}',
        b'{"type": ["note"]}',
        b'{"type": "metric", "name": "x"}',
    ],
)
def test_what_is_no_event_is_not_shown(line: bytes) -> None:
    assert whole_event(line) is None

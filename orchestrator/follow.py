"""Following a run on a host to its end, and collecting what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel, RefusedError, Reply, Request
from orchestrator.errors import Detached, HostError, StateUnknown
from orchestrator.paths import RunPaths

OVER = ("finished", "killed", "timed_out", "cancelled", "vanished", "never_started")
WAIT_S = 0.5  # how long the host holds a request open when nothing happens
FOLLOWED = ("log", "events.jsonl")
BLOCK = 4 << 20

OnEvent = Callable[[dict[str, Any]], None]
OnInterrupt = Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: the host's state record and the case's result, if there is one."""

    state: dict[str, Any]
    result: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result.get("status") == "ok"


@dataclass
class Wish:
    """What a person wants of a run that is followed; it outlives a lost connection.

    `asked` says that Ctrl-C came and was not talked about yet.
    """

    asked: bool = False
    cancelled: bool = False


@contextlib.contextmanager
def noting_interrupts(wish: Wish, at_once: Callable[[], bool]) -> Iterator[None]:
    """Within the block Ctrl-C is noted in `wish`, and tears nothing apart.

    It is KeyboardInterrupt, as usual, where `at_once` says that nobody looks at the wish soon, and
    when it comes again before anybody did.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as `nohup` or a script's & has it
    if ignored or threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread listen
        return

    def note(*_: object) -> None:
        if wish.asked or at_once():
            raise KeyboardInterrupt
        wish.asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def follow(
    channel: Channel,
    run_id: str,
    folder: Path,
    on_event: OnEvent,
    on_interrupt: OnInterrupt,
    wish: Wish,
    first: Reply | None = None,
) -> dict[str, Any]:
    """Copy the run's log and events into `folder` as they grow; returns the final state.

    What stands in `folder` already is not asked for again; `first` is what came of the log before.
    Where the person has asked, `on_interrupt` says what is wanted: to cancel, which ends the run and
    waits for its end, or to detach.

    Raises:
        Detached: the person chose to leave the run to itself, or asked again while it was ended.
        HostUnreachable: the host was lost; the same call goes on over another connection.
        StateUnknown: what the host says is no state of this run.
    """
    copy = Copy(folder)
    seen, told = "", False
    while True:
        if wish.asked:
            if wish.cancelled or on_interrupt() == "detach":
                raise Detached(f"run {run_id} goes on")
            wish.asked, wish.cancelled = False, True
            on_event({"type": "note", "text": "cancelling the run; Ctrl-C leaves it to itself"})
        if wish.cancelled and not told:
            channel.request("signal", run_id=run_id, signal="TERM")
            told = True
        state, parts = poll(channel, run_id, copy.offsets, seen, first)
        log_only, first = first is not None, None
        if state["state"] != seen and state.get("waiting_for"):
            on_event({"type": "note", "text": f"queued, waiting for {state['waiting_for']}"})
        seen = state["state"]
        for event in copy.add(parts):
            on_event(event)
        if seen in OVER and not any(parts.values()) and not log_only:
            if seen == "cancelled":
                prove_gone(channel, run_id)
            return state


class Copy:
    """A run's log and events on this machine, as they grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets = {name: size_of(folder / name) for name in FOLLOWED}
        self._rest = last_part(folder / "events.jsonl")

    def add(self, parts: Mapping[str, bytes]) -> list[dict[str, Any]]:
        """Append what the files have gained; the events that are complete now."""
        for name, part in parts.items():
            if part:
                with (self.folder / name).open("ab") as file:
                    file.write(part)
                self.offsets[name] += len(part)
        *lines, self._rest = (self._rest + parts.get("events.jsonl", b"")).split(b"\n")
        return [event for line in lines if (event := whole_event(line)) is not None]


def prove_gone(channel: Channel, run_id: str) -> None:
    """Ends what a cancelled run left behind; raises HostError where something cannot be ended."""
    left = channel.request("signal", run_id=run_id, signal="TERM").header["left"]
    if left:
        left = channel.request("signal", run_id=run_id, signal="KILL").header["left"]
    if left:
        raise HostError(
            f"{channel.name}: run {run_id} was cancelled, but these processes of it cannot be ended: "
            f"{left}; look at them on the host"
        )


def size_of(path: Path) -> int:
    """A file's size; 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def last_part(path: Path) -> bytes:
    """What stands behind the last line that is complete."""
    return path.read_bytes().rpartition(b"\n")[2] if path.is_file() else b""


def whole_event(line: bytes) -> dict[str, Any] | None:
    """An event to be shown, or None for a line that is none, or that a full disk has torn."""
    try:
        event = json.loads(line)
        shown: dict[str, dict[str, type]] = {
            "progress": {"what": str, "done": int, "total": int},
            "note": {"text": str},
        }
        parts = shown[event["type"]]
        return event if all(isinstance(event[name], parts[name]) for name in parts) else None
    except (ValueError, TypeError, KeyError):
        return None


def follow_request(
    run_id: str, offsets: Mapping[str, int], seen: Sequence[str] = (), wait_s: float = 0.0
) -> Request:
    """To be told the run's state and what its files have gained.

    The host waits for output, or for a state that was not `seen`, for `wait_s`.
    """
    fields = {
        "run_id": run_id,
        "offsets": dict(offsets),
        "seen": list(seen),
        "wait_s": wait_s,
        "limit": BLOCK,
    }
    return Request(op="follow", fields=fields)


def poll(
    channel: Channel,
    run_id: str,
    offsets: Mapping[str, int],
    seen: str,
    answered: Reply | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The run's state and what its files have gained, by file name.

    Raises StateUnknown where the host does not know, or its answer makes no sense.
    """
    if answered is None:
        request = follow_request(run_id, offsets, [seen] if seen else [], WAIT_S)
        (answered,) = channel.pipeline([request], check=False)
    if not answered.ok:
        raise StateUnknown(f"{channel.name}: {answered.header.get('error')}")
    state, sizes = answered.header.get("state"), answered.header.get("chunks")
    # Nothing that a host says may lead to a file that was not asked for.
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("state"), str)
        or not isinstance(sizes, dict)
        or not set(sizes) <= set(offsets)
        or not all(isinstance(size, int) and size >= 0 for size in sizes.values())
        or sum(sizes.values()) != len(answered.payload)
    ):
        raise StateUnknown(f"{channel.name}: the answer about run {run_id} makes no sense")
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = answered.payload[start : start + size]
        start += size
    return state, parts


def collect(channel: Channel, run_id: str, case_id: str, paths: RunPaths) -> dict[str, Any] | None:
    """Copy the run's exit record, environment, GPUs and result; returns the result, if there is one.

    Raises StateUnknown where what the host has is not whole.
    """
    wanted = {
        "exit.json": paths.exit,
        "environment.json": paths.environment,
        "gpus.json": paths.gpus,
        f"results/{case_id}.json": paths.result,
    }
    answers = channel.pipeline([read_request(run_id, name) for name in wanted], check=False)
    for (name, path), answer in zip(wanted.items(), answers, strict=True):
        content = read_file(channel, run_id, name, answer)
        if content is not None:
            write_atomic(path, content)
    try:
        return json.loads(paths.result.read_bytes()) if paths.result.is_file() else None
    except ValueError as error:
        raise StateUnknown(
            f"{channel.name}: the result of run {run_id} is no JSON ({error})"
        ) from error


def read_request(run_id: str, name: str, offset: int = 0) -> Request:
    """To be given a file of the run's folder, or the part of it that fits."""
    fields = {"run_id": run_id, "path": name, "offset": offset, "limit": BLOCK}
    return Request(op="read", fields=fields)


def read_file(channel: Channel, run_id: str, name: str, answer: Reply) -> bytes | None:
    """A file of the run's folder on the host, whole; None where there is none.

    `answer` is what the host said of its beginning.
    """
    content = b""
    while True:
        if not answer.ok:
            if answer.header.get("kind") == "missing":
                return None
            raise RefusedError(f"{channel.name}: {answer.header.get('error')}", answer.header)
        if not answer.payload and len(content) < answer.header["size"]:
            raise StateUnknown(
                f"{channel.name}: {name} of run {run_id} is shorter than it is said to be"
            )
        content += answer.payload
        if len(content) >= answer.header["size"]:
            return content
        (answer,) = channel.pipeline([read_request(run_id, name, len(content))], check=False)


def write_atomic(path: Path, content: bytes) -> None:
    """A file under its final name only when complete."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave an empty file under the name
    temporary.replace(path)

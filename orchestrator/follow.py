"""Following a run on a host to its end, and collecting what it left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel, RefusedError, Request
from orchestrator.errors import Detached, HostError
from orchestrator.paths import RunPaths

OVER = ("finished", "killed", "timed_out", "cancelled", "vanished", "never_started")
WAIT_S = 1.0  # how long the host holds a request open when nothing happens
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


def follow(
    channel: Channel,
    run_id: str,
    folder: Path,
    on_event: OnEvent,
    on_interrupt: OnInterrupt,
    *,
    interrupted: bool = False,
) -> dict[str, Any]:
    """Copy the run's log and events into `folder` as they grow; returns the final state.

    What stands in `folder` already is not asked for again. Ctrl-C (or `interrupted`: it came before)
    asks `on_interrupt` what is wanted: to cancel, which ends the run and waits for its end, or to
    detach.

    Raises:
        Detached: the person chose to leave the run to itself, or pressed Ctrl-C while it was ended.
        HostUnreachable: the host was lost; the same call goes on over another connection.
    """
    offsets = {name: size_of(folder / name) for name in FOLLOWED}
    seen, rest, cancelling = "", last_part(folder / "events.jsonl"), False
    while True:
        try:
            if interrupted:
                raise KeyboardInterrupt
            state, parts = poll(channel, run_id, offsets, seen)
        except KeyboardInterrupt:
            interrupted = False
            if cancelling or on_interrupt() == "detach":
                raise Detached(f"run {run_id} goes on") from None
            cancelling = True
            on_event({"type": "note", "text": "cancelling the run; Ctrl-C leaves it to itself"})
            channel.request("signal", run_id=run_id, signal="TERM")
            continue
        if state["state"] != seen and state["state"] == "queued" and state.get("waiting_for"):
            on_event({"type": "note", "text": f"queued, waiting for {state['waiting_for']}"})
        seen = state["state"]
        for name, part in parts.items():
            if part:
                with (folder / name).open("ab") as file:
                    file.write(part)
                offsets[name] += len(part)
        *lines, rest = (rest + parts["events.jsonl"]).split(b"\n")
        for line in lines:
            event = whole_event(line)
            if event is not None:
                on_event(event)
        if seen in OVER and not any(parts.values()):
            if seen == "cancelled":
                prove_gone(channel, run_id)
            return state


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
    """An event, or None for a line that a full disk has torn."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "type" in event else None


def follow_request(
    run_id: str, offsets: Mapping[str, int], seen: str = "", wait_s: float = 0.0
) -> Request:
    """To be told the run's state and what its files have gained."""
    fields = {
        "run_id": run_id,
        "offsets": dict(offsets),
        "seen": seen or None,
        "wait_s": wait_s,
        "limit": BLOCK,
    }
    return Request(op="follow", fields=fields)


def poll(
    channel: Channel, run_id: str, offsets: Mapping[str, int], seen: str
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The run's state and what its files have gained, by file name."""
    (reply,) = channel.pipeline([follow_request(run_id, offsets, seen, WAIT_S)])
    parts, start = {}, 0
    for name, size in reply.header["chunks"].items():
        parts[name] = reply.payload[start : start + size]
        start += size
    return reply.header["state"], parts


def collect(channel: Channel, run_id: str, case_id: str, paths: RunPaths) -> dict[str, Any] | None:
    """Copy the run's exit record, environment, GPUs and result; returns the result, if there is one."""
    wanted = {
        "exit.json": paths.exit,
        "environment.json": paths.environment,
        "gpus.json": paths.gpus,
        f"results/{case_id}.json": paths.result,
    }
    for name, path in wanted.items():
        content = read_file(channel, run_id, name)
        if content is not None:
            write_atomic(path, content)
    return json.loads(paths.result.read_bytes()) if paths.result.is_file() else None


def read_file(channel: Channel, run_id: str, name: str) -> bytes | None:
    """A file of the run's folder on the host, whole; None where there is none."""
    content = b""
    while True:
        try:
            reply = channel.request(
                "read", run_id=run_id, path=name, offset=len(content), limit=BLOCK
            )
        except RefusedError as error:
            if error.kind == "missing":
                return None
            raise
        content += reply.payload
        if len(content) >= reply.header["size"]:
            return content


def write_atomic(path: Path, content: bytes) -> None:
    """A file under its final name only when complete."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)

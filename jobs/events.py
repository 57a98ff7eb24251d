"""The run's events: one JSON object a line, appended to events.jsonl."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType

EVERY_S = 0.1


class Events:
    """Appends events; each line is one write, so that a reader never sees half of one.

    Every method raises OSError where the disk refuses the line.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._torn = False
        self._written_at: dict[str, float] = {}
        self._held: dict[str, dict[str, object]] = {}

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def progress(self, what: str, done: int, total: int) -> None:
        """How far `what` is. At most ten lines a second; the last one is always written."""
        event = {"t": time.time(), "type": "progress", "what": what, "done": done, "total": total}
        now = time.monotonic()
        if done < total and now - self._written_at.get(what, -math.inf) < EVERY_S:
            self._held[what] = event
            return
        self._held.pop(what, None)
        self._written_at[what] = now
        self._write(event)

    def note(self, text: str) -> None:
        """Something that a person should read."""
        self._append("note", text=text)

    def case(self, case_id: str, status: str) -> None:
        """A case was `started`, or ended as `ok` or `failed`."""
        self._append("case", case_id=case_id, status=status)

    def metric(self, case_id: str, name: str, value: float, step: int | None = None) -> None:
        """A figure of a running case. Raises ValueError where it is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"the metric {name!r} of case {case_id!r} is {value}, not a number")
        self._append("metric", case_id=case_id, name=name, value=value, step=step)

    def close(self) -> None:
        """Writes what is held back and closes the file."""
        if self._fd < 0:
            return
        try:
            self._flush()
        finally:
            os.close(self._fd)
            self._fd = -1

    def _append(self, kind: str, **fields: object) -> None:
        self._flush()
        self._write({"t": time.time(), "type": kind, **fields})

    def _flush(self) -> None:
        held, self._held = self._held, {}
        for event in held.values():
            self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        if self._torn:  # a full disk took half a line: end it, so that only that one is lost
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
            self._torn = written < len(line)
            if self._torn:
                os.write(self._fd, line[written:])  # completes the line, or raises the reason
                self._torn = False
        except OSError as error:
            error.filename = str(self.path)
            raise

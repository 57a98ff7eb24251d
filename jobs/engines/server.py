"""A server's life: started in a session of its own, watched, and gone at the end.

Engines fork schedulers and workers that outlive a parent which is only asked to end, and hold a GPU's
memory: whatever was seen to descend from the server is remembered, asked, killed, and shown to be gone.
Nothing is ever chosen by its name.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engines.talk import ServerError
from jobs.host import identity, is_alive, members, send_signal

POLL_S = 0.25
GRACE_S = 15.0  # from SIGTERM to SIGKILL
GONE_S = 15.0  # from SIGKILL to where a process counts as one that cannot be ended
TAIL = 200_000  # bytes of a log in which the reason is looked for
ERROR = re.compile(r"\b([A-Z][A-Za-z0-9_]*(?:Error|Exception|Interrupt))\b:\s*(\S.*)")
# Said by a parent whose child failed, or by a client that came too early: not the reason.
CONSEQUENCES = (
    "root cause above",
    "Engine core initialization failed",
    "Connection refused",
    "ConnectionRefusedError",
    "Max retries exceeded",
)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How a server ended."""

    seconds: float
    asked: int  # processes that got SIGTERM
    killed: int  # that did not heed it
    left: tuple[int, ...]  # pids that even SIGKILL did not end
    note: str = ""  # what else is to be said of it


class Server:
    """One started server. Use `stop` in every case; it may be called again."""

    sees_all = True  # whether all its processes are known

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        """Start it; its output goes to `log`, its current folder is `folder`. Raises ServerError."""
        self.command, self.log = tuple(command), log
        self.began = time.monotonic()
        self._seen: dict[int, dict[str, Any]] = {}
        with log.open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **environment},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(
                    f"{self.command[0]} cannot be started: {error.strerror}"
                ) from error
        self.leader = identity(self.process.pid)

    @property
    def seconds(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self.began

    def look(self) -> None:
        """Remember whoever descends from it by now. Raises ServerError where it has died."""
        self._remember()
        if (code := self.process.poll()) is not None:
            raise ServerError(f"the server {ended(code)} after {self.seconds:.0f} s: {self.why()}")

    def wait_until(self, ready: Callable[[], str | None], seconds: float) -> None:
        """Wait until `ready` gives no reason why it is not. Raises ServerError with the real reason."""
        while True:
            self.look()
            lacking = ready()
            if lacking is None:
                return
            if self.seconds > seconds:
                raise ServerError(
                    f"the server was not ready after {seconds:g} s: {lacking}; its log ends: "
                    f"{self.why()}"
                )
            time.sleep(POLL_S)

    def why(self) -> str:
        """The reason that its log gives for an end."""
        return reason(tail(self.log))

    def family(self) -> list[int]:
        """Its processes that live, the leader among them."""
        self._remember()
        own = [self.process.pid] if self.process.poll() is None else []
        return [*own, *(pid for pid, who in self._seen.items() if is_alive(who))]

    def stop(self, grace_s: float = GRACE_S) -> Stopped:
        """Ask all its processes to end, kill those that do not, and say who is left."""
        began = time.monotonic()
        asked = self.family()
        send_signal(asked, signal.SIGTERM)
        stubborn = self._wait(grace_s)
        left = self._wait(GONE_S, signal.SIGKILL) if stubborn else []
        return Stopped(
            seconds=time.monotonic() - began,
            asked=len(asked),
            killed=len(stubborn),
            left=tuple(left),
        )

    def _remember(self) -> None:
        """Take in whoever descends from it by now, or from those that were seen to."""
        living = [pid for pid, who in self._seen.items() if is_alive(who)]
        for pid in members(self.leader, living):
            # A number may come again, for another process.
            if pid not in living:
                self._seen[pid] = identity(pid)

    def _wait(self, seconds: float, number: int | None = None) -> list[int]:
        """Who lives when all are gone, or the time is over; a signal meets the newly born as well."""
        end = time.monotonic() + seconds
        while (living := self.family()) and time.monotonic() < end:
            if number is not None:
                send_signal(living, number)
            time.sleep(POLL_S)
        return living


def ended(code: int) -> str:
    """'ended with exit code 1', or by which signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"


def tail(log: Path) -> str:
    """The end of a log."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL))
        return file.read().decode("utf-8", "replace")


def reason(text: str) -> str:
    """The last error in a log that is no consequence of another, else its last line."""
    found = [m for line in text.splitlines() if (m := ERROR.search(line))]
    first_hand = [m for m in found if not any(c in m.group(0) for c in CONSEQUENCES)]
    if first_hand or found:
        match = (first_hand or found)[-1]
        return f"{match.group(1)}: {match.group(2)}"[:600]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:600] if lines else "it said nothing"

"""What else went on while a pass was measured: other processes, other requests, another clock."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.engines.records import Counters
from jobs.gpus import VISIBLE, left_visible
from jobs.gpus import look as gpus_there

FOREIGN_CORES = 0.5  # so much of the processors may go to others before that is said
SHARE = 0.1  # and no less than this share of all of them


@dataclass(frozen=True, kw_only=True)
class Look:
    """The processors' time so far, in seconds, and who is on the GPUs."""

    at: float
    busy: float  # all processes
    own: float  # the server's and ours
    gpu_pids: frozenset[int] | None = None  # others' processes there; None: no GPU was asked


def look(own: Iterable[int] | None, gpu_pids: frozenset[int] | None = None) -> Look:
    """The state now; `own` are the pids of our servers and of whoever asks them.

    None: the server is a person's own, whose pids are not known, so that nobody's work is foreign.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    busy = user + nice + system + irq + softirq + steal
    return Look(
        at=time.monotonic(),
        busy=busy / ticks,
        own=(busy if own is None else sum(used(pid) for pid in set(own))) / ticks,
        gpu_pids=gpu_pids,
    )


def on_gpus(device: str, own: Collection[int] | None) -> frozenset[int] | None:
    """Others' processes on this host's GPUs; None where none is used, or whose are ours is not known."""
    if device == "cpu" or own is None:
        return None
    gpus, _ = gpus_there()
    if gpus is None:
        return None
    seen = left_visible(gpus, os.environ.get(VISIBLE))
    there = frozenset(p["pid"] for g in seen for p in g["processes"])
    # In a container the numbers may be the host's: then nobody can be told from anybody.
    return there - frozenset(own) if there & frozenset(own) else None


def used(pid: int) -> int:
    """Clock ticks that a process has run; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text[text.rindex(")") + 1 :].split()
    return int(fields[11]) + int(fields[12])


def disturbances(before: Look, after: Look, *, asked: int, counted: Counters) -> Iterator[str]:
    """What makes a pass no fair one, in words."""
    elapsed = max(after.at - before.at, 1e-9)
    foreign = ((after.busy - before.busy) - (after.own - before.own)) / elapsed
    if foreign > max(FOREIGN_CORES, SHARE * (os.cpu_count() or 1)):
        yield f"other processes took {foreign:.1f} of {os.cpu_count()} cores"
    if before.gpu_pids is not None and after.gpu_pids is not None:
        # Who was there before only holds memory, as far as can be told.
        for pid in sorted(after.gpu_pids - before.gpu_pids):
            yield f"pid {pid} came to the GPU"
    if counted.requests is not None and counted.requests > asked:
        yield f"the server answered {counted.requests - asked} requests that are not ours"

"""Whether two servers have room beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.headers import find_weights
from jobs.environment import memory

# What a server needs on a CPU beside weights: its interpreter, its caches, its workers.
PROCESS_BYTES = 3 << 30
WIDEST = 2  # weights may be run in twice as many bytes as they are stored in
FRACTIONS = ("mem_fraction_static", "gpu_memory_utilization")
MOST = 0.95  # of a GPU that two servers may ask for


def why_no_room(device: str, target: Path, drafter: Path, flags: Mapping[str, Any]) -> str | None:
    """Why two servers may not stand at once; None: they may.

    A server takes the share of a GPU that its flags say, or most of it.
    """
    if device != "cpu":
        given = {name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}
        share = next((float(given[name]) for name in FRACTIONS if name in given), None)
        if share is None:
            return (
                f"a server takes most of a GPU unless engine.flags names {' or '.join(FRACTIONS)}"
            )
        if 2 * share > MOST:
            return f"each server takes {share:.0%} of a GPU"
        return None
    needed = 2 * (WIDEST * (weights(target) + weights(drafter)) + PROCESS_BYTES)
    free = memory()["available"]
    if needed > free:
        return f"two servers need about {needed / 2**30:.1f} GiB of the {free / 2**30:.1f} that are free"
    return None


def weights(folder: Path) -> int:
    """Bytes of a checkpoint's tensors; of one that cannot be read in part, of its files."""
    tensors = find_weights(folder).tensors
    if tensors is None:
        return sum(file.stat().st_size for file in folder.glob("*.bin"))
    return sum(info.end - info.start for info in tensors.values())

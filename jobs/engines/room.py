"""Whether two servers have room beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from eagle3.headers import find_weights
from jobs.environment import memory

# What a server needs on a CPU beside weights: its interpreter, its caches, its workers.
PROCESS_BYTES = 3 << 30
WIDEST = 2  # weights may be run in twice as many bytes as they are stored in
FRACTION = "gpu_memory_utilization"
MOST = 0.95  # of a GPU that two servers may ask for


def why_no_room(
    engine: str, device: str, target: Path, drafter: Path, flags: Mapping[str, Any]
) -> str | None:
    """Why two servers may not stand at once; None: they may. Raises BadInput for a share that is none.

    vLLM takes the share of a GPU that its flags say. SGLang takes a share of what is free, so that the
    second server would get less than the first.
    """
    if device != "cpu":
        if engine != "vllm":
            return f"{engine} takes a share of the GPU memory that is free"
        given = {name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}
        if FRACTION not in given:
            return f"a server takes most of a GPU unless engine.flags names {FRACTION}"
        try:
            share = float(given[FRACTION])
        except (TypeError, ValueError) as error:
            raise BadInput(f"engine.flags.{FRACTION} is {given[FRACTION]!r}, no number") from error
        return None if 2 * share <= MOST else f"each server takes {share:.0%} of a GPU"
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

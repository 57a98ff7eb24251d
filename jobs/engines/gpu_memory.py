"""Whether the GPU memory that servers took is given back behind them, as nvidia-smi has it.

What stays taken is missing to the next server, which then has a smaller cache than the one before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from jobs.gpus import VISIBLE, Gpu, gpu_label, left_visible, look, process_label

LIMIT_MIB = 256  # what may stay, as of a driver that keeps some for itself
WAIT_S = 10.0  # the driver gives back a while behind a process's end
POLL_S = 0.5
HIDDEN = "-1"  # as CUDA_VISIBLE_DEVICES: no GPU

Say = Callable[[str], None]


class GpuMemory:
    """What is used on the GPUs of servers: before the first one starts, and when the last one is gone.

    While two stand beside each other the growth of one is not told from what the other has left.
    """

    def __init__(self, say: Say) -> None:
        self._notes: list[str] = []
        self._say = say
        self._labels: list[str] = []  # of servers since none stood
        self._standing = 0

    @contextmanager
    def around(self, label: str, environment: Mapping[str, str]) -> Iterator[None]:
        """The life of one server with these variables, whose start and stop lie within the block."""
        if self._standing == 0:
            self._labels = []
            self._visible = {**os.environ, **environment}.get(VISIBLE)
            self._before, self._trouble = of_servers(self._visible)
        self._labels.append(label)
        self._standing += 1
        try:
            yield
        except Exception:
            self._behind()
            raise
        except BaseException:  # cancelled: whoever did it does not wait
            self._standing -= 1
            raise
        else:
            self._behind()

    def taken_notes(self) -> list[str]:
        """What was said since this was asked before."""
        notes, self._notes = self._notes, []
        return notes

    def _behind(self) -> None:
        """One server is gone; behind the last one it is said what has stayed."""
        self._standing -= 1
        if self._standing:
            return
        labels = " and ".join(dict.fromkeys(self._labels))
        for note in self._kept():
            self._notes.append(f"{labels}: {note}")
            self._say(self._notes[-1])

    def _kept(self) -> list[str]:
        """What stays taken when the driver has had its time, in words."""
        if self._before is None:
            return [] if self._trouble is None else [unknown(self._trouble)]
        end = time.monotonic() + WAIT_S
        while True:
            now, trouble = of_servers(self._visible)
            if now is None:
                return [unknown(trouble or "nvidia-smi is gone")]
            said = kept(self._before, now)
            if not said or time.monotonic() > end:
                return said
            time.sleep(POLL_S)


def of_servers(visible: str | None) -> tuple[list[Gpu] | None, str | None]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; None, and why, where they are not known: nvidia-smi is
    not there or fails, or none of its GPUs has the name, as of a MIG device.
    """
    gpus, trouble = look()
    if gpus is None:
        return None, trouble
    left = left_visible(gpus, visible)
    if gpus and not left and (visible or "").strip() not in ("", HIDDEN):
        return None, f"nvidia-smi lists no GPU that {VISIBLE}={visible} names"
    return left, trouble


def kept(before: Sequence[Gpu], now: Sequence[Gpu]) -> list[str]:
    """Of each GPU on which more is used than before, by how much and who holds it."""
    earlier = {gpu["uuid"]: gpu for gpu in before}
    said = []
    for gpu in now:
        was = earlier.get(gpu["uuid"])
        if was is None or None in (was["memory_used_mib"], gpu["memory_used_mib"]):
            continue  # as of one that shares the machine's memory
        then, there = was["memory_used_mib"], gpu["memory_used_mib"]
        if there - then > LIMIT_MIB:
            said.append(
                f"{gpu_label(gpu)} has {there - then} MiB more in use than before the start ({then} MiB "
                f"then, {there} MiB now); {holders(was, gpu)}"
            )
    return said


def holders(was: Gpu, now: Gpu) -> str:
    """The processes that came to a GPU, or hold more there than before."""
    held = {process["pid"]: process["memory_mib"] or 0 for process in was["processes"]}
    found = [
        process_label(process)
        for process in now["processes"]
        if process["pid"] not in held or (process["memory_mib"] or 0) > held[process["pid"]]
    ]
    if not found:
        return "nvidia-smi names no process that holds it"
    return f"nvidia-smi names {', '.join(found)}"


def unknown(trouble: str) -> str:
    """Where nvidia-smi cannot be asked, or not about these GPUs."""
    return f"whether GPU memory was given back is not known: {trouble}"

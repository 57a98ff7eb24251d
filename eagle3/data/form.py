"""One internal form for captured data of every layout: which slots a dump has, and who says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One stored state of every position."""

    name: str  # where it lies in a file: hidden_states[0], aux_hidden_state[0:H], target
    role: str  # "aux" or "last"; the last is what the ecosystem's trainer takes as teacher
    state: int | None  # canonical k as declared, or by the ecosystem's rule; None: nobody says
    normed: bool  # behind the target's final norm, as the ecosystem writes it
    origin: str  # who says which state it is: data.states, capture.json, rule of …, not declared


@dataclass(frozen=True, kw_only=True)
class DataForm:
    """A folder of samples, found out before any is scored."""

    layout: str
    why: str  # what the layout was recognised by
    folder: Path
    files: tuple[Path, ...]
    slots: tuple[Slot, ...]
    teacher: int  # index into slots
    notes: tuple[str, ...] = ()  # what a job should say of the folder

    def plain(self) -> dict[str, object]:
        """As plain data, for a result."""
        return {
            "layout": self.layout,
            "why": self.why,
            "files": len(self.files),
            "teacher": self.teacher,
            "slots": [vars(slot) for slot in self.slots],
        }


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """One text as its file stores it, T positions; nothing about it is checked against a target.

    Rows are not shifted: slots[i][t] was computed behind input_ids[t], and loss_mask[t] says that
    the target wrote token t.
    """

    path: Path
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [M] bool; M is T in a sound file, and so are the slots' lengths
    slots: tuple[Tensor, ...]  # each [T, H], as stored; memory-mapped where the format allows it
    target_argmax: Tensor | None  # [T] int64, the target's own choice behind each position

"""The dump of speculators' research scripts, which its 0.3 still read as format v0.

FOLDER/**/*.pt   each a dict:
    input_ids     [T]        the text
    loss_mask     [T] 0 or 1
    hidden_state  [T, A·H]   the aux states side by side, before any norm
    target        [T, H]     the last entry of transformers' hidden_states: behind the final norm
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3.data import pt_shards, side_by_side
from eagle3.data.form import DataForm, RawSample, Slot

NAME = "speculators_v0"
LAST_APART = True

AUX, LAST = "hidden_state", "target"
files = pt_shards.files
notes = pt_shards.notes


def recognise(folder: Path, files: Sequence[Path]) -> str | None:
    """Why a folder is in this layout, or None."""
    return side_by_side.recognise(folder, files, AUX, LAST)


def slots(folder: Path, files: Sequence[Path], hidden: int, num_layers: int) -> tuple[Slot, ...]:
    """The aux chunks, not declared, and the target's end behind its norm."""
    last = Slot(
        name=LAST, role="last", state=num_layers, normed=True, origin="rule of speculators v0"
    )
    return side_by_side.slots(folder, files, AUX, last, hidden)


def read(path: Path, form: DataForm) -> RawSample:
    """One sample."""
    return side_by_side.read(path, form, AUX, LAST)

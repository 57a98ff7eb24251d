"""Row-sharded `.pt` files with a list of states, which speculators calls its format v1; ours too.

    FOLDER/rows_0-2000/data_0.pt, data_1.pt, …   each a dict:
        input_ids      [T]             the text
        loss_mask      [T] 0 or 1      1 where the target wrote the token
        hidden_states  list of [T, H]  one entry a stored state, before any norm
        target_argmax  [T]             optional: the target's own choice behind each position

The last entry is the teacher of speculators' trainers up to 0.4. Which states the entries are
nothing in a file tells: several programs write this layout, and not all end with the target's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.data import look
from eagle3.data.form import DataForm, RawSample, Slot
from eagle3.errors import BadInput
from eagle3.listing import files_below

NAME = "pt_shards"
LAST_APART = False

# Files that trainers keep beside samples and that are none.
SIDE_FILES = ("token_freq.pt", "vocab_mapping.pt")


def files(folder: Path) -> tuple[Path, ...]:
    """The sample files below a folder, in numeric order."""
    return files_below(folder, (".pt",), without=SIDE_FILES)


def recognise(folder: Path, files: Sequence[Path]) -> str | None:
    """Why a folder is in this layout, or None; the first and the last readable file are looked at."""
    found = look.first_or_last(
        files, lambda raw: isinstance(raw.get("hidden_states"), list | tuple)
    )
    if found is None:
        return None
    path, raw = found
    return f"{path.relative_to(folder)} holds hidden_states, a list of {len(raw['hidden_states'])}"


def slots(folder: Path, files: Sequence[Path], hidden: int, num_layers: int) -> tuple[Slot, ...]:
    """One slot a list entry; none declared."""
    del hidden, num_layers
    _, count = look.told_by_most(
        files, lambda path: len(states_of(look.load_plain(path), path)), folder
    )
    return tuple(
        Slot(
            name=f"hidden_states[{i}]",
            role="last" if i == count - 1 else "aux",
            state=None,
            normed=False,
            origin="not declared",
        )
        for i in range(count)
    )


def notes(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Which `.pt` files were not taken for samples."""
    del files
    beside = files_below(folder, SIDE_FILES)
    names = ", ".join(str(path.relative_to(folder)) for path in beside)
    return (f"not taken for samples: {names}",) if beside else ()


def read(path: Path, form: DataForm) -> RawSample:
    """One sample."""
    raw = look.load_plain(path)
    ids, mask, _ = look.taken(raw, ("input_ids", "loss_mask", "hidden_states"), path)
    stored = states_of(raw, path)
    look.check_count(path, len(stored), len(form.slots))
    argmax = raw.get("target_argmax")
    return RawSample(
        path=path,
        input_ids=look.vector(ids, path, "input_ids"),
        loss_mask=look.mask(mask, path),
        slots=tuple(
            look.rows(h, path, slot.name) for h, slot in zip(stored, form.slots, strict=True)
        ),
        target_argmax=None if argmax is None else look.vector(argmax, path, "target_argmax"),
    )


def states_of(raw: dict[str, Any], path: Path) -> Sequence[Tensor]:
    """The list of states of a dict."""
    (stored,) = look.taken(raw, ("hidden_states",), path)
    if not (
        isinstance(stored, list | tuple) and stored and all(isinstance(h, Tensor) for h in stored)
    ):
        raise BadInput(f"{path}: hidden_states is no list of tensors")
    return stored

"""SpecForge's offline dump, as its scripts/prepare_hidden_states.py writes it.

    FOLDER/rows_0-2000/data_0.ckpt, …   (or .ckpt.gz), each a dict:
        input_ids         [T]           the text
        loss_mask         [T] 0 or 1    1 on the assistant's text, its end token included
        aux_hidden_state  [1, T, A·H]   the aux states side by side, before any norm
        hidden_state      [1, T, H]     what SGLang's model returned: behind the final norm

Its trainer renames them on load: aux_hidden_state becomes `hidden_state`, hidden_state `target`. It
also sets the mask's last position to 0; rows here are as stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3.data import side_by_side
from eagle3.data.form import DataForm, RawSample, Slot
from eagle3.errors import BadInput
from eagle3.listing import files_below

NAME = "specforge"
LAST_APART = True

AUX, LAST = "aux_hidden_state", "hidden_state"


def files(folder: Path) -> tuple[Path, ...]:
    """The sample files below a folder, in numeric order."""
    return files_below(folder, (".ckpt", ".ckpt.gz"))


def recognise(folder: Path, files: Sequence[Path]) -> str | None:
    """Why a folder is in this layout, or None."""
    return side_by_side.recognise(folder, files, AUX, LAST)


def slots(folder: Path, files: Sequence[Path], hidden: int, num_layers: int) -> tuple[Slot, ...]:
    """The aux chunks, not declared, and the target's end behind its norm."""
    names = {path.with_name(path.name.removesuffix(".gz")) for path in files}
    if len(names) < len(files):
        twice = next(path for path in files if path.with_name(path.name + ".gz") in files)
        raise BadInput(
            f"{twice} lies there plain and as {twice.name}.gz, so the sample would count twice; keep "
            "one of the two"
        )
    last = Slot(
        name=LAST, role="last", state=num_layers, normed=True, origin="rule of SpecForge's dump"
    )
    return side_by_side.slots(folder, files, AUX, last, hidden)


def notes(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Nothing is left out of this layout."""
    del folder, files
    return ()


def read(path: Path, form: DataForm) -> RawSample:
    """One sample; a `.gz` file is decompressed in memory."""
    return side_by_side.read(path, form, AUX, LAST)

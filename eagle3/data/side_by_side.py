"""Torch dicts whose aux states lie side by side and whose last state is an entry of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3.data import look
from eagle3.data.form import DataForm, RawSample, Slot


def recognise(folder: Path, files: Sequence[Path], aux: str, last: str) -> str | None:
    """Which file holds both entries, of the first and the last that can be read, or None."""
    found = look.first_or_last(files, lambda raw: {aux, last} <= raw.keys())
    return found and f"{found[0].relative_to(folder)} holds {aux} and {last}"


def slots(
    folder: Path,
    files: Sequence[Path],
    aux: str,
    last: Slot,
    hidden: int,
) -> tuple[Slot, ...]:
    """One slot a chunk of the target's hidden size, and the last."""

    def width(path: Path) -> int:
        (stored,) = look.taken(look.load_plain(path), (aux,), path)
        return look.rows(stored, path, aux).shape[1]

    path, wide = look.told_by_most(files, width, folder)
    return (
        *(
            Slot(name=name, role="aux", state=None, normed=False, origin="not declared")
            for name in look.chunk_names(wide, hidden, path, aux)
        ),
        last,
    )


def read(path: Path, form: DataForm, aux: str, last: str) -> RawSample:
    """One sample."""
    raw = look.load_plain(path)
    ids, mask, wide, end = look.taken(raw, ("input_ids", "loss_mask", aux, last), path)
    argmax = raw.get("target_argmax")
    return RawSample(
        path=path,
        input_ids=look.vector(ids, path, "input_ids"),
        loss_mask=look.mask(mask, path),
        slots=(
            *look.chunks(look.rows(wide, path, aux), len(form.slots) - 1, path, aux),
            look.rows(end, path, last),
        ),
        target_argmax=None if argmax is None else look.vector(argmax, path, "target_argmax"),
    )

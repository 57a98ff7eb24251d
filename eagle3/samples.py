"""Captured samples of any layout, checked one by one against the target they should be from.

A file that is no sound sample is damaged: truncated, with code in it, with lengths or ids that
cannot be, with NaN or infinity, with nothing to score. It is named and counted, and left out only
where the caller asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.data import CAPTURE_FILE, LAYOUTS
from eagle3.data.form import DataForm, RawSample
from eagle3.errors import BadInput
from eagle3.metrics import scored_rows

LEAST = 3  # tokens; a drafted token stands two behind the state it is drafted from


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One text with its target states; everything has T positions, rows unshifted (see RawSample)."""

    path: Path
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    states: dict[
        int, Tensor
    ]  # canonical k → [T, H] float32; slots before the norm that are declared
    target_argmax: Tensor | None  # [T] int64
    teacher: Tensor  # [T, H] float32, the slot that the trainer takes as teacher
    teacher_normed: bool = False  # whether that is behind the target's final norm
    stored: tuple[Tensor, ...] = ()  # every slot in order, [T, H] as stored, on the CPU
    padding: int = 0  # rows that were cut off the end, since all states were zero there

    def aux(self, states: Sequence[int]) -> Tensor:
        """The named canonical states side by side, [T, A·H]."""
        lacking = [k for k in states if k not in self.states]
        if lacking:
            raise BadInput(asked_in_vain(lacking, list(self.states), str(self.path)))
        return torch.cat([self.states[k] for k in states], -1)


def answer_start(mask: Tensor) -> int:
    """The first position [T] that the target wrote; T where it wrote none."""
    written = mask.nonzero()
    return int(written[0]) if len(written) else len(mask)


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    path: Path
    reason: str


@dataclass
class LeftOut:
    """What a pass over the samples left out; for a job to say aloud."""

    skipped: list[Skipped] = field(default_factory=list)
    padded_files: int = 0
    padded_rows: int = 0

    def notes(self) -> list[str]:
        """One sentence each for damaged files and for padding."""
        lines = []
        if self.skipped:
            named = "; ".join(skipped.reason for skipped in self.skipped[:3])
            more = len(self.skipped) - 3
            lines.append(
                f"{len(self.skipped)} damaged files were left out (data.damaged=skip): {named}"
                + (f"; and {more} more" if more > 0 else "")
            )
        if self.padded_files:
            lines.append(
                f"{self.padded_rows} rows of padding (zero in every state) were cut off the ends of "
                f"{self.padded_files} samples"
            )
        return lines


def check_stored(form: DataForm, states: Sequence[int]) -> None:
    """Raises BadInput where a wiring asks for states that no slot is declared to hold."""
    stored = [slot.state for slot in form.slots if slot.state is not None and not slot.normed]
    lacking = [k for k in states if k not in stored]
    normed = [slot for slot in form.slots if slot.normed and slot.state in lacking]
    if normed:
        raise BadInput(
            f"the wiring asks for state {normed[0].state}, but {form.folder} stores it behind the "
            f"target's final norm ({normed[0].name}), as no engine feeds it; capture it before the norm"
        )
    if lacking:
        raise BadInput(asked_in_vain(lacking, stored, str(form.folder)))


def asked_in_vain(lacking: Sequence[int], stored: Sequence[int], where: str) -> str:
    """The sentence for states that are asked for and not there."""
    wanted = ", ".join(map(str, lacking))
    if not stored:
        return (
            f"the wiring asks for state {wanted}, but nobody says which states {where} stores: it has "
            f"no {CAPTURE_FILE} and data.states is not set; set it to the canonical states in the "
            "files' order, such as [0,3,31,59]"
        )
    return (
        f"the wiring asks for state {wanted}, but the data stores only {', '.join(map(str, stored))} "
        f"({where}); capture the missing state or change wiring.layers"
    )


def read_samples(
    form: DataForm,
    *,
    vocab: int,
    hidden: int,
    device: str = "cpu",
    damaged: str = "fail",
    max_samples: int | None = None,
    left_out: LeftOut | None = None,
) -> Iterator[Sample]:
    """The samples one by one, checked against the target's vocabulary [V] and hidden size [H].

    `damaged` is "fail" (BadInput names the first damaged file and counts all) or "skip" (they are
    added to `left_out`, which is then needed, and the next files are read in their place).
    """
    if damaged not in ("fail", "skip") or (damaged == "skip" and left_out is None):
        raise ValueError(f"damaged={damaged!r} needs to be fail, or skip with left_out")
    files = form.files[:max_samples] if damaged == "fail" else form.files
    given = 0
    for place, path in enumerate(files):
        if given == max_samples:
            return
        try:
            sample = read_sample(path, form, vocab=vocab, hidden=hidden, device=device)
        except BadInput as error:
            if damaged == "skip":
                assert left_out is not None
                left_out.skipped.append(Skipped(path, str(error)))
                continue
            rest = files[place + 1 :]
            count = 1 + sum(is_damaged(other, form, vocab, hidden) for other in rest)
            raise BadInput(
                f"{error} ({count} of {len(files)} files cannot be used; data.damaged=skip leaves such "
                "files out and names them)"
            ) from error
        if sample.padding and left_out is not None:
            left_out.padded_files += 1
            left_out.padded_rows += sample.padding
        given += 1
        yield sample
    if not given and left_out is not None and left_out.skipped:
        raise BadInput(
            f"none of the {len(files)} files of {form.folder} can be used; the first: "
            f"{left_out.skipped[0].reason}"
        )


def is_damaged(path: Path, form: DataForm, vocab: int, hidden: int) -> bool:
    """Whether a file is no sound sample."""
    try:
        read_sample(path, form, vocab=vocab, hidden=hidden)
    except BadInput:
        return True
    return False


def read_sample(
    path: Path, form: DataForm, *, vocab: int, hidden: int, device: str = "cpu"
) -> Sample:
    """One sample; raises BadInput that names the file and what is wrong with it."""
    raw, padding = without_padding(check_lengths(LAYOUTS[form.layout].read(path, form), hidden))
    check_tokens(raw, vocab)
    for slot, h in zip(form.slots, raw.slots, strict=True):
        check_finite(h, f"{path}: {slot.name}")
    usable = [not slot.normed and slot.state is not None for slot in form.slots]
    floats = {
        i: h.to(device, torch.float32)
        for i, h in enumerate(raw.slots)
        if usable[i] or i == form.teacher
    }
    return Sample(
        path=path,
        input_ids=raw.input_ids.to(device),
        loss_mask=raw.loss_mask.to(device),
        states={
            slot.state: floats[i]
            for i, slot in enumerate(form.slots)
            if slot.state is not None and not slot.normed
        },
        target_argmax=None if raw.target_argmax is None else raw.target_argmax.to(device),
        teacher=floats[form.teacher],
        teacher_normed=form.slots[form.teacher].normed,
        stored=raw.slots,
        padding=padding,
    )


def check_lengths(raw: RawSample, hidden: int) -> RawSample:
    """The same sample; all its tensors have one length, and its states the target's width."""
    length = len(raw.input_ids)
    lengths = [len(raw.loss_mask), *map(len, raw.slots)]
    if any(other != length for other in lengths):
        raise BadInput(
            f"{raw.path}: lengths differ: input_ids {length}, loss_mask {len(raw.loss_mask)}, states "
            f"{[list(h.shape) for h in raw.slots]}"
        )
    widths = {h.shape[1] for h in raw.slots}
    if widths != {hidden}:
        raise BadInput(
            f"{raw.path}: the stored states are {', '.join(map(str, sorted(widths)))} wide, but the "
            f"target's hidden size is {hidden}; is this another model's data?"
        )
    argmax = raw.target_argmax
    if argmax is not None and len(argmax) != length:
        raise BadInput(f"{raw.path}: target_argmax has {len(argmax)} positions, not {length}")
    return raw


def without_padding(raw: RawSample) -> tuple[RawSample, int]:
    """The sample without the rows at its end that are zero in every state, and how many they were.

    A residual stream is never zero in every state: such rows were put there to fill a batch. Where
    the mask scores them, or where they stand in front, the sample is damaged.
    """
    if not len(raw.input_ids):
        raise BadInput(f"{raw.path} holds no tokens")
    if not any(h[0].any() for h in raw.slots):
        raise BadInput(
            f"{raw.path}: row 0 is zero in every state, so the text is padded in front or has no states"
        )
    if any(h[-1].any() for h in raw.slots):
        return raw, 0
    zero = torch.stack([(h == 0).all(1) for h in raw.slots]).all(0)  # [T]
    tail = int(zero.flip(0).long().cumprod(0).sum())
    length = len(zero) - tail
    if raw.loss_mask[length:].any():
        raise BadInput(
            f"{raw.path}: the last {tail} rows are zero in every state, but loss_mask scores "
            f"{int(raw.loss_mask[length:].sum())} of them; padding was stored as text"
        )
    argmax = raw.target_argmax
    return (
        replace(
            raw,
            input_ids=raw.input_ids[:length],
            loss_mask=raw.loss_mask[:length],
            slots=tuple(h[:length] for h in raw.slots),
            target_argmax=None if argmax is None else argmax[:length],
        ),
        tail,
    )


def check_tokens(raw: RawSample, vocab: int) -> None:
    """Raises BadInput where ids cannot be the target's, or where nothing can be scored."""
    if len(raw.input_ids) < LEAST:
        raise BadInput(f"{raw.path} has only {len(raw.input_ids)} tokens, so nothing can be scored")
    for name, ids in (("input_ids", raw.input_ids), ("target_argmax", raw.target_argmax)):
        if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise BadInput(
                f"{raw.path}: {name} reach from {int(ids.min())} to {int(ids.max())}, but the target's "
                f"vocabulary has {vocab} ids; is this another model's data?"
            )
    if not raw.loss_mask.any():
        raise BadInput(f"{raw.path}: loss_mask is empty, so no position can be scored")
    if not len(scored_rows(raw.loss_mask)):
        raise BadInput(
            f"{raw.path}: loss_mask has no two neighbouring positions behind the first, so nothing can "
            "be scored: a drafted token counts where the target wrote it and the one before it"
        )


def check_finite(h: Tensor, where: str) -> None:
    """Raises BadInput where a state [T, H] holds NaN or infinity once it is read as float32."""
    if torch.stack(h.aminmax()).float().isfinite().all():
        return
    bad = ~h.float().isfinite().all(1)
    hint = ""
    if h.dtype is torch.float64 and h.isfinite().all():
        hint = "; it is stored as float64, but read as float32, which ends at 3.4e38"
    if h.dtype is torch.float16 and not h.isnan().any():
        hint = "; float16 ends at 65504, which late states pass: capture them in bfloat16"
    raise BadInput(
        f"{where} holds NaN or infinity in {int(bad.sum())} of {len(bad)} rows, first in row "
        f"{int(bad.nonzero()[0])}{hint}"
    )

"""Which canonical state a slot is, by its distance to states that the target itself has made.

The states come from running the target, or its first layers, over the first positions of a few texts.
A slot is state k where its error to k is far below the distance from k to the nearest state that
differs. How large an error rounding makes is not assumed: it is measured, against that distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3.slots import SHIFTS, overlap

FAR_BELOW = 0.25  # an error counts as rounding where it is at most this share of the distance
EQUAL = 1e-6  # relative distance below which two states are one and the same
ROUNDING = 0.15  # no rounding, not even a deep target's in eight bits, errs by more than this

Errors = Mapping[int, Sequence[Tensor]]  # shift → [T, K] of each text


@dataclass(frozen=True, kw_only=True)
class Located:
    """Where a slot was found among the states 0 … computed."""

    states: tuple[int, ...]  # that it may be; empty where it is none of them
    equal: bool  # these states are all the same here, so that no measure tells them apart
    shift: int  # row t holds the state of position t + shift
    in_answer: bool = False  # over the answer alone; the prompt's rows are in their places
    nearest: int
    error: float  # median relative distance to the nearest state
    margin: float | None  # of the nearest state to the nearest one that differs; None: none does
    computed: int
    errors: tuple[float, ...]  # to each computed state, at that shift
    normed: bool = False  # the states were put through the final norm first

    @property
    def found(self) -> tuple[int, ...]:
        """The states that it is, where that is settled up to equal ones."""
        return self.states if self.equal else ()

    @property
    def open_end(self) -> bool:
        """Whether it may as well be a higher state, which was not computed."""
        return bool(self.states) and self.states[-1] == self.computed

    def plain(self) -> dict[str, Any]:
        """As plain data; of the errors only those of the states around."""
        around = range(max(0, self.nearest - 2), min(self.computed, self.nearest + 2) + 1)
        return {
            "states": list(self.states),
            "equal": self.equal,
            "shift": self.shift,
            "in_answer": self.in_answer,
            "nearest": self.nearest,
            "error": self.error,
            "margin": self.margin,
            "computed": self.computed,
            "behind_final_norm": self.normed,
            "errors": {str(k): self.errors[k] for k in around},
        }


def locate(
    slots: Sequence[Tensor], states: Sequence[Tensor], starts: Sequence[int] | None = None
) -> Located | None:
    """Find a slot among computed states; None where no row can be compared.

    `slots` are its first rows [T, H] in each text, `states` what the target made of the same
    positions, [K, T, H] with K = computed + 1. `starts` is where each text's answer begins: its rows
    may lag alone, as where a server records what it prefills and what it decodes apart.
    """
    errors = {
        shift: [relative_errors(h, made, shift) for h, made in zip(slots, states, strict=True)]
        for shift in SHIFTS
    }
    if starts is not None and (apart := located_apart(errors, states, starts)):
        return apart
    return nearest_of(errors, states)


def located_apart(
    errors: Errors, states: Sequence[Tensor], starts: Sequence[int]
) -> Located | None:
    """Where the answers' rows alone are shifted: found there to be the state that the prompts' rows are,
    in their places. None: they are not, or it does not show.
    """
    prompts, answers = {}, {}
    for shift, rows in errors.items():
        prompts[shift] = [e[:start] for e, start in zip(rows, starts, strict=True)]
        answers[shift] = [e[start:] for e, start in zip(rows, starts, strict=True)]
    prompt, answer = nearest_of(prompts, states), nearest_of(answers, states)
    if not prompt or not answer or prompt.shift != 0 or answer.shift == 0:
        return None
    # Rows that are like the ones beside them lie near those as well.
    told_apart = answer.error < FAR_BELOW * float(median(answers[0])[answer.nearest])
    same = bool(prompt.found) and prompt.found == answer.found
    return replace(answer, in_answer=True) if same and told_apart else None


def nearest_of(by_shift: Errors, states: Sequence[Tensor]) -> Located | None:
    """The state and the shift with the least errors."""
    known = {shift: median(rows) for shift, rows in by_shift.items()}  # [K]
    # Texts of one token have no row beside another position's.
    shifted = {shift: e for shift, e in known.items() if not e.isnan().any()}
    if not shifted:
        return None
    shift = min(shifted, key=lambda s: float(shifted[s].min()))
    errors = shifted[shift]
    nearest = int(errors.argmin())
    apart = torch.cat([distances(made, nearest) for made in states]).nanmedian(0).values  # [K]
    error = float(errors[nearest])
    equal = apart <= EQUAL
    near = equal | (apart * FAR_BELOW < error)
    others = apart[~equal & apart.isfinite()]
    margin = float(others.min()) if len(others) else None
    settled = error <= ROUNDING and bool((near == equal).all())
    # The state behind the last computed one may be near that one too; it is then one of several.
    chosen = near if error <= ROUNDING else torch.zeros_like(near)
    return Located(
        states=tuple(chosen.nonzero().flatten().tolist()),
        equal=settled,
        shift=shift,
        nearest=nearest,
        error=error,
        margin=margin,
        computed=len(errors) - 1,
        errors=tuple(errors.tolist()),
    )


def relative_errors(h: Tensor, made: Tensor, shift: int) -> Tensor:
    """|h - state| / |state| of rows [T, H] against states [K, T, H], each beside the row that is `shift`
    further, [T, K]; NaN where there is none, or none that is usable.
    """
    errors = torch.full((len(h), len(made)), torch.nan)
    inside = slice(max(0, -shift), len(h) - max(0, shift))
    for k, state in enumerate(made):
        ours, theirs = overlap(h.float(), state.float(), shift)
        errors[inside, k] = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).cpu()
    return errors.masked_fill(~errors.isfinite(), torch.nan)


def median(errors: Sequence[Tensor]) -> Tensor:
    """The median of all rows [T, K] a text, [K]; NaN where none is usable."""
    rows = torch.cat(tuple(errors))
    if not len(rows):
        return torch.full(rows.shape[1:], torch.nan)
    return rows.nanmedian(0).values


def distances(made: Tensor, k: int) -> Tensor:
    """|state - state k| / |state k| of states [K, T, H], [T, K]."""
    reference = made[k].float()
    size = reference.norm(dim=-1)
    return torch.stack([(state.float() - reference).norm(dim=-1) / size for state in made], -1)

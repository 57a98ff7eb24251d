"""What an engine makes of the drafter's input, held against what the drafter alone makes of it.

Recorded are fc's input over a prompt and the drafter's logits behind the prompt's last token. The same
input through the drafter in plain torch gives the same logits, up to rounding, where the engine runs it
as the wiring says; where it runs it otherwise, one change of the wiring may give them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import Connected, connect, target_rope
from eagle3.errors import BadInput
from eagle3.search.axes import STATES, axes_of, changed, changes
from eagle3.target import TargetParts
from eagle3.wiring import DecoderLayer, Wiring
from jobs.engines.probing import Rows

SAME = 0.02  # error of logits that only rounding tells apart, in float32
OF_NOISE = 3.0  # times a repeat's error that is still the same
MOST_NOISE = 0.05  # a repeat's error from which nothing is told
AHEAD = 0.5  # of the next one's error, below which a change is named
# What stands in front of fc, behind the first step, or picks no other logits.
NOT_SEEN = (STATES, "fc_input", "feedback", "positions", "d2t")


@dataclass(frozen=True, kw_only=True)
class Take:
    """One prompt: what went into fc, and the logits behind its last token."""

    ids: Tensor  # [T + 1] the prompt, and the token that was answered behind it
    fed: Tensor  # [T, A·H] fc's input, behind any norm in front of it
    logits: Tensor  # [V_d]
    again: Tensor  # [V_d] of a repeat


def takes_of(recorded: Sequence[Rows]) -> list[Take]:
    """The prompts of which the drafter's logits were recorded both times."""
    return [
        Take(
            ids=rows.text[: len(rows.prefill) + 1],
            fed=rows.prefill,
            logits=rows.logits,
            again=rows.logits_again,
        )
        for rows in recorded
        if rows.logits is not None and rows.logits_again is not None
    ]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """How a wiring's logits differ from the recorded ones."""

    changed: tuple[str, ...]  # against the hypothesis; empty: the hypothesis itself
    error: float  # ‖ours - theirs‖ / ‖theirs‖, both without their mean; infinite: of no numbers

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"changed": list(self.changed), "error": finite(self.error)}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The hypothesis and every single change of it, the closest first behind the hypothesis."""

    own: Replayed
    others: tuple[Replayed, ...]
    noise: float  # error of a repeat
    takes: int

    @property
    def told(self) -> bool:
        """Whether anything can be told: the logits are numbers, and a repeat gives them again."""
        return self.noise <= MOST_NOISE

    @property
    def same(self) -> bool:
        """Whether the engine computes what the wiring says."""
        return self.is_same(self.own)

    def is_same(self, of: Replayed) -> bool:
        """Whether no more than rounding tells these logits from the engine's."""
        return self.told and of.error <= max(SAME, OF_NOISE * self.noise)

    @property
    def named(self) -> Replayed | None:
        """The one change that gives the engine's logits, where the wiring does not."""
        if self.same or not self.others:
            return None
        best = self.others[0]
        second = self.others[1].error if len(self.others) > 1 else self.own.error
        return best if self.is_same(best) and best.error < AHEAD * second else None

    @property
    def in_words(self) -> str:
        """What it says, in one sentence."""
        if not self.told:
            return (
                "whether the engine makes of its input what the drafter alone makes is not told: the "
                "logits of a repeat are others, or no numbers"
            )
        beside = f"error {self.own.error:.3f}, a repeat {self.noise:.3f}"
        if self.same:
            return (
                f"of its input the engine makes the logits that the drafter alone makes ({beside})"
            )
        other = f"of its input the engine makes other logits than the drafter alone ({beside})"
        if (named := self.named) is not None:
            return f"{other}: those of {in_line(named)}"
        if alike := [r for r in self.others if self.is_same(r)]:
            return f"{other}: those of one of {'; '.join(map(in_line, alike))}"
        closest = f", the closest {in_line(self.others[0])}" if self.others else ""
        return f"{other}, and no single change of the wiring gives them{closest}"

    def plain(self) -> dict[str, Any]:
        """As plain data; an error of no numbers is None."""
        return {
            "told": self.told,
            "same": self.same,
            "error": finite(self.own.error),
            "noise": finite(self.noise),
            "named": None if self.named is None else list(self.named.changed),
            "others": [other.plain() for other in self.others[:5]],
            "takes": self.takes,
            "in_words": self.in_words,
        }


def finite(error: float) -> float | None:
    """An error as a result file can hold it."""
    return error if math.isfinite(error) else None


def in_line(replayed: Replayed) -> str:
    """'residual=raw (error 0.003)'."""
    return f"{', '.join(replayed.changed)} (error {replayed.error:.3f})"


@torch.no_grad()
def replay(
    checkpoint: DrafterCheckpoint, target: TargetParts, wiring: Wiring, takes: Sequence[Take]
) -> Replay:
    """The wiring and every single change of it that shows in the first step, on the same input.

    Raises BadInput where the wiring itself cannot be run, or the logits are not of this drafter.
    """
    if not takes:
        raise BadInput("no logits of the drafter were recorded, so that nothing can be replayed")
    width = checkpoint.drafter.shape.draft_vocab
    if unlike := {len(take.logits) for take in takes} - {width}:
        raise BadInput(
            f"the engine's drafter makes {min(unlike)} logits a row, but its head has {width} rows here"
        )
    wiring = wiring.resolved(checkpoint.form)
    connect(checkpoint, target, wiring)
    theirs = torch.cat([centred(take.logits) for take in takes])
    again = torch.cat([centred(take.again) for take in takes])
    found = []
    for other in (wiring, *single_changes(checkpoint, target, wiring)):
        try:
            tied = connect(checkpoint, target, other)
        except BadInput:  # a part that this checkpoint or target does not have
            continue
        ours = torch.cat([centred(logits_of(tied, take)) for take in takes])
        found.append(Replayed(changed=changes(wiring, other), error=relative_error(ours, theirs)))
    own, *others = found
    return Replay(
        own=own,
        others=tuple(sorted(others, key=lambda r: r.error)),
        noise=relative_error(again, theirs),
        takes=len(takes),
    )


def single_changes(
    checkpoint: DrafterCheckpoint, target: TargetParts, wiring: Wiring
) -> Iterator[Wiring]:
    """Every wiring one change away behind fc, in the first step."""
    form = checkpoint.form
    for axis in axes_of(
        form,
        wiring,
        wiring.states(target.num_layers),
        target_rope=target_rope(target),
        own_embedding=checkpoint.embedding is not None,
        own_head=checkpoint.drafter.shape.own_head,
        fixed=NOT_SEEN,
    ):
        for value in axis.values:
            yield changed(wiring, axis.name, value, form)


def logits_of(tied: Connected, take: Take) -> Tensor:
    """The drafter's logits behind the last row [V_d], from what went into fc."""
    drafter, length = tied.drafter, len(take.fed)
    g = drafter.fc(take.fed)[None]
    if tied.decoder_layer is DecoderLayer.skipped:
        return drafter.logits(g[0, -1], tied.head)
    shift = {"same": 0, "next": 1}.get(tied.token.value)
    if shift is None:  # the token behind the answer's first is not part of a prefill
        return torch.full_like(take.logits, float("nan"))
    embedded = tied.embedding[take.ids[shift : length + shift]].float()[None]
    y = drafter.step(embedded, g, torch.arange(length), [])
    return drafter.logits(y[0, -1], tied.head)


def centred(logits: Tensor) -> Tensor:
    """Logits without their mean: what is added to all of them changes no choice."""
    return logits.float() - logits.float().mean()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours - theirs‖ / ‖theirs‖; infinite where one is no number."""
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error

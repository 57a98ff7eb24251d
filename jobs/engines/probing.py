"""Which states an engine feeds: the rows recorded at fc, matched against the target's own states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.slot_states import EQUAL, FAR_BELOW, ROUNDING, Located, distances, locate
from jobs.engines.records import Answered

FED, UNDECIDED, NONE = "fed", "undecided", "none of these"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What an engine fed, or returned, for one prompt that was asked twice."""

    text: Tensor  # token ids [T']: the prompt, or its beginning, and what the engine said behind it
    answer: Answered  # to the whole prompt
    prefill: Tensor  # of the text's first T positions, [T, A·H]
    again: Tensor  # the same of the second time
    later: list[Tensor]  # behind them, [rows, A·H] a call
    logits: Tensor | None = None  # the drafter's behind the last of them, [V_d]; None: not recorded
    logits_again: Tensor | None = None


AT_THE_END = (
    "a chunk is nearest to state {layers}, the last that the target's layers made here, and may be one "
    "behind it ({why})"
)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One of fc's chunks."""

    index: int
    verdict: str  # FED, UNDECIDED or NONE
    states: tuple[int, ...]  # that it is, or may be
    best: int
    error: float  # median relative distance to the best state
    runner_up: int | None
    second: float | None  # to the runner-up
    noise: float | None  # of the engine's rows for the same prompt asked again; None: asked once
    shift: int  # row t holds the state of position t + shift

    @property
    def in_words(self) -> str:
        """'chunk 1 is state 31: error 0.0001, state 30 0.12 away, noise 0'."""
        close = f"error {self.error:.2g}"
        if self.runner_up is not None:
            close += f", state {self.runner_up} at {self.second:.2g}"
        if self.noise is not None:
            close += f", the engine's own noise {self.noise:.2g}"
        moved = f"; row t is of position t{self.shift:+d}" if self.shift else ""
        if self.verdict == FED:
            named = " = ".join(f"state {k}" for k in self.states)
            return f"chunk {self.index} is {named} ({close}){moved}"
        if self.verdict == UNDECIDED:
            named = ", ".join(map(str, self.states))
            return (
                f"chunk {self.index} is one of states {named}, too near to be told apart ({close})"
            )
        return f"chunk {self.index} is none of the computed states (nearest {self.best}: {close})"

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "states": list(self.states), "what": self.in_words}


def chunks_of(
    recorded: Sequence[Tensor],
    made: Sequence[Tensor],
    again: Sequence[Tensor],
    *,
    weight: Tensor | None = None,
) -> list[Chunk]:
    """Each chunk of fc's input as a canonical state.

    `recorded` are the prefills [T, A·H] of some prompts, `again` the same of a second time (or none),
    `made` the target's states of each, [K, T, H]. `weight` [A·H] is that of a norm in front of fc:
    then only directions are compared, since its size divides by all chunks together.
    """
    width = made[0].shape[-1]
    count = recorded[0].shape[1] // width
    found = []
    for j in range(count):
        part = slice(j * width, (j + 1) * width)

        def own(rows: Tensor, part: slice = part) -> Tensor:
            if weight is None:
                return rows[:, part]
            return F.normalize(rows[:, part] / weight[part], dim=-1)

        rows = [own(h) for h in recorded]
        states = list(made) if weight is None else [F.normalize(s.float(), dim=-1) for s in made]
        place = locate(rows, states)
        noise = noise_of(rows, [own(h) for h in again]) if again else None
        found.append(chunk(j, place, states, noise))
    return found


def chunk(index: int, place: Located | None, made: Sequence[Tensor], noise: float | None) -> Chunk:
    """A located chunk, held against the noise: within that no state is told from another."""
    if place is None:
        raise ValueError("no row could be compared")
    apart = torch.cat([distances(states, place.nearest) for states in made]).nanmedian(0).values
    others = [
        (error, k)
        for k, error in enumerate(place.errors)
        if k != place.nearest and float(apart[k]) > EQUAL
    ]
    second, runner_up = min(others, default=(None, None))
    floor = max(place.error, noise or 0.0)
    near = tuple(
        k
        for k in range(len(place.errors))
        if float(apart[k]) <= EQUAL or float(apart[k]) * FAR_BELOW < floor
    )
    equal = all(float(apart[k]) <= EQUAL for k in near)
    verdict = NONE if place.error > ROUNDING else FED if equal else UNDECIDED
    return Chunk(
        index=index,
        verdict=verdict,
        states=() if verdict == NONE else near,
        best=place.nearest,
        error=place.error,
        runner_up=runner_up,
        second=second,
        noise=noise,
        shift=place.shift,
    )


def noise_of(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Median relative distance of the same rows, asked twice."""
    parts = [
        (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)
        for a, b in zip(one, other, strict=True)
    ]
    return float(torch.cat(parts).median())


def later_share(calls: Sequence[Tensor], made: Tensor, states: Sequence[int]) -> tuple[int, int]:
    """Of the rows fed behind the prefill, how many are these states [K, T, H] at any one position.

    Rows at drafts that were not accepted are none of the text's, so not all need be.
    """
    wanted = torch.cat([made[k].float() for k in states], -1)  # [T, A·H]
    found = total = 0
    for call in calls:
        far = torch.cdist(call, wanted) / wanted.norm(dim=-1)
        found += int((far.min(1).values <= ROUNDING).sum())
        total += len(call)
    return found, total


def open_end(chunk: Chunk, computed: int, num_layers: int) -> bool:
    """Whether a chunk is nearest to the highest state that was computed, or may be that one, of a target
    that has more: it may as well be one behind it.
    """
    return computed < num_layers and computed in (chunk.best, *chunk.states)


def fed_states(chunks: Sequence[Chunk], expected: Sequence[int]) -> tuple[int, ...] | None:
    """The states that are fed; of equal ones the expected. None where one could not be named."""
    if any(c.verdict != FED for c in chunks):
        return None
    wanted = [*expected, *[None] * len(chunks)]
    return tuple(
        k if k is not None and k in c.states else c.states[0]
        for c, k in zip(chunks, wanted, strict=False)
    )

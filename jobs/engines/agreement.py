"""Whether two passes over the same prompts wrote the same tokens.

At temperature 0 speculation must not change a text, but a GPU's sums differ with the batch, so that a
baseline differs from itself as well: what two baselines do is the measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.engines.records import Pass


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How two passes agree."""

    prompts: int
    same: int
    first: tuple[tuple[str, int], ...]  # prompt, and at which token of the answer it goes apart

    def plain(self) -> dict[str, object]:
        """As plain data."""
        return {**vars(self), "first": [list(pair) for pair in self.first]}


def agreement(one: Pass, other: Pass) -> Agreement:
    """Compare the answers prompt by prompt, token by token."""
    theirs = {answer.prompt: answer.output for answer in other.answers}
    apart = []
    for answer in one.answers:
        at = first_difference(answer.output, theirs[answer.prompt])
        if at is not None:
            apart.append((answer.prompt, at))
    return Agreement(
        prompts=len(one.answers), same=len(one.answers) - len(apart), first=tuple(apart)
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two answers differ, one's end included; None where they do not."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))

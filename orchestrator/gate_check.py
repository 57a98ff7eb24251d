"""Holding an accept length against a stored one, over the same prompts.

The same prompts, decoded greedily, are accepted alike: equal counts are the rule. Where they are not,
the difference of the two ratios of sums has an interval from the spread between prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eagle3.student import t_quantile
from orchestrator.gate_figure import Figure

TAIL = 0.025  # to each side of the 95 % interval


@dataclass(frozen=True, kw_only=True)
class Held:
    """A figure held against the one of a stored version."""

    version: str
    figure: Figure  # the stored one
    equal: bool  # every count
    value: float  # now minus stored
    low: float
    high: float

    @property
    def lower(self) -> bool:
        """Whether it is clearly lower: the whole interval is."""
        return not self.equal and self.high < 0

    @property
    def higher(self) -> bool:
        """Whether it is clearly higher."""
        return not self.equal and self.low > 0

    @property
    def word(self) -> str:
        """What came of it, in a word or two."""
        if self.equal:
            return "as stored"
        if self.lower or self.higher:
            return f"clearly {'lower' if self.lower else 'higher'}"
        return f"not clearly {'lower' if self.value < 0 else 'higher'}"


def hold(now: Figure, stored: Mapping[str, Figure], *, most: int) -> list[Held]:
    """A figure against each stored version; accept lengths lie at most `most` apart."""
    return [against(now, version, figure, most) for version, figure in stored.items()]


def against(now: Figure, version: str, then: Figure, most: int) -> Held:
    """now - then, paired by prompt.

    As eagle3.search.bounds.rate_difference, without torch: the linear parts of both ratios by prompt,
    Student's t, and at least the error of independent rounds. Counts are those of one pass, since more
    passes of the same are no more evidence.
    """
    if now.as_counted(then):
        return Held(version=version, figure=then, equal=True, value=0.0, low=0.0, high=0.0)
    value = now.value - then.value
    # An answer that ended with its first token has no round.
    counted = sum(1 for rounds in zip(now.rounds, then.rounds, strict=True) if any(rounds))
    parts = [a - b for a, b in zip(parts_of(now), parts_of(then), strict=True)]
    spread = math.sqrt(sum(part * part for part in parts) * counted / max(1, counted - 1))
    rounds = min(now.denominator / now.passes, then.denominator / then.passes)
    share = min(1.0, abs(value) / most)
    least = math.sqrt(max(abs(value) * (1 - share), 1 / rounds) / rounds)
    reach = t_quantile(TAIL, counted - 1) * max(spread, least)
    return Held(
        version=version,
        figure=then,
        equal=False,
        value=value,
        low=max(value - reach, -most),
        high=min(value + reach, most),
    )


def parts_of(figure: Figure) -> list[float]:
    """How far each prompt moves the ratio of sums from its value."""
    return [
        (tokens - figure.value * rounds) / figure.denominator
        for tokens, rounds in zip(figure.tokens, figure.rounds, strict=True)
    ]

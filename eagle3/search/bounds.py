"""How sure a difference between two wirings is that were scored on the same texts.

Positions of one text are not independent, so texts are what is counted: differences are those of
ratios of sums, with the spread of their linear parts between texts and Student's t for how few there
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from eagle3.metrics import CONFIDENCE, Count, Difference

# How alike positions of one text are taken to be where texts are too few to show it: correlation of
# being right. In captured data 0.05 to 0.1 are usual.
ALIKE = 0.1


@lru_cache(maxsize=4096)
def t_quantile(tail: float, df: int) -> float:
    """What Student's t with df degrees of freedom exceeds with probability `tail`."""
    if df < 1:
        return math.inf
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, high * 2
        if high > 1e12:
            return math.inf
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return high


def t_tail(t: float, df: int) -> float:
    """The probability that Student's t exceeds t >= 0; Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1, df // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, (1 - within) / 2)


def ratio_difference(
    numerators: Tensor, denominators: Tensor, others: Tensor, theirs: Tensor
) -> tuple[Tensor, Tensor, int]:
    """One ratio of sums minus others, its standard error, and how many texts count.

    numerators and denominators [T] of one wiring, others and theirs [W, T] of W → each [W].
    """
    counted = int(((denominators > 0) | (theirs > 0).any(0)).sum())
    one, many = denominators.sum(), theirs.sum(1, keepdim=True)
    rate, rates = numerators.sum() / one, others.sum(1, keepdim=True) / many
    parts = (numerators - rate * denominators) / one - (others - rates * theirs) / many
    spread = parts.pow(2).sum(1) * counted / max(1, counted - 1)
    return rate - rates[:, 0], spread.sqrt(), counted


def accuracy_bounds(
    right: Tensor, others: Tensor, positions: Tensor, tail: float
) -> tuple[Tensor, Tensor]:
    """The accuracy of one wiring minus that of others [W], and how far each may be off at `tail`.

    right [T] and others [W, T] of positions [T]. Two bounds hold, and the closer one is taken: that of
    the spread between texts, and, where they are few, one that takes positions of a text as ALIKE and
    the two wirings as independent, which paired ones are not to their advantage.
    """
    value, error, texts = ratio_difference(right, positions, others, positions.expand_as(others))
    total = positions.sum()
    # If all that differs differs one way, this much is chance; texts that agree by luck show less.
    least = (value.abs() * (1 - value.abs()) / total).clamp(min=0).sqrt()
    between = t_quantile(tail / 2, texts - 1) * torch.maximum(error, least)
    if texts < 2:
        return value, torch.full_like(value, math.inf)
    effective = (positions.clamp(min=1) / (1 + (positions - 1).clamp(min=0) * ALIKE)).sum()
    a, b = right.sum() / total, others.sum(1) / total
    unpaired = ((a * (1 - a) + b * (1 - b)).clamp(min=1 / total) / effective).sqrt()
    within = NormalDist().inv_cdf(1 - tail / 2) * unpaired
    return value, torch.minimum(between, within)


def length_bounds(
    one: Sequence[Count], others: Sequence[Sequence[Count]], tail: float
) -> tuple[Tensor, Tensor]:
    """The accept length of one wiring minus that of others [W], and how far each may be off."""
    mine, theirs = count_tensors([one]), count_tensors(others)
    value, error, texts = ratio_difference(mine[0][0], mine[1][0], *theirs)
    return value, t_quantile(tail, texts - 1) * error if texts > 1 else value.abs() + math.inf


def count_tensors(counts: Sequence[Sequence[Count]]) -> tuple[Tensor, Tensor]:
    """Numerators and denominators [W, T] of W wirings."""
    return (
        torch.tensor([[c.numerator for c in texts] for texts in counts], dtype=torch.float64),
        torch.tensor([[c.denominator for c in texts] for texts in counts], dtype=torch.float64),
    )


def tail_of(comparisons: int) -> float:
    """The probability to each side that is left to one of so many comparisons."""
    return (1 - CONFIDENCE) / 2 / max(1, comparisons)


def length_difference(
    one: Sequence[Count], other: Sequence[Count], *, comparisons: int, steps: int
) -> Difference:
    """Accept length of one minus the other's, paired, Bonferroni-corrected.

    One text says nothing about the spread between texts: then it may be any that there is.
    """
    value, reach = length_bounds(one, [other], tail_of(comparisons))
    middle, far = float(value[0]), float(reach[0])
    return bounded(middle, far, float(steps))


def bounded(value: float, reach: float, limit: float) -> Difference:
    """A difference within ±limit."""
    low = value - reach if math.isfinite(reach) else -limit
    high = value + reach if math.isfinite(reach) else limit
    return Difference(value=value, low=max(low, -limit), high=min(high, limit))

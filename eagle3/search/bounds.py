"""How sure a difference between two wirings is that were scored on the same texts.

Positions of one text are not independent, so texts are what is counted: differences are those of
ratios of sums, with the spread of their linear parts between texts and Student's t for how few there
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from eagle3.metrics import CONFIDENCE, Count, Difference
from eagle3.student import t_quantile

# How alike positions of one text are taken to be where texts are too few to show it: correlation of
# being right. In captured data 0.05 to 0.1 are usual.
ALIKE = 0.1


def ratio_difference(
    numerators: Tensor, denominators: Tensor, others: Tensor, theirs: Tensor, *, most: float = 1.0
) -> tuple[Tensor, Tensor, int]:
    """One ratio of sums minus others, its standard error, and how many texts count.

    numerators and denominators [T] of one wiring, others and theirs [W, T] of W → each [W]. No ratio is
    more than `most` beside another. Where nothing was counted of one of the two, the difference is 0
    and its error infinite.
    """
    counted = int(((denominators > 0) | (theirs > 0).any(0)).sum())
    one, many = denominators.sum(), theirs.sum(1, keepdim=True)
    nothing = (one == 0) | (many[:, 0] == 0)
    one, many = one.clamp(min=1), many.clamp(min=1)
    rate, rates = numerators.sum() / one, others.sum(1, keepdim=True) / many
    parts = (numerators - rate * denominators) / one - (others - rates * theirs) / many
    spread = parts.pow(2).sum(1) * counted / max(1, counted - 1)
    value = (rate - rates[:, 0]).masked_fill(nothing, 0.0)
    least = least_error(value, torch.minimum(one, many[:, 0]), most)
    error = torch.maximum(spread.sqrt(), least)
    return value, error.masked_fill(nothing, math.inf), counted


def least_error(value: Tensor, total: Tensor, most: float) -> Tensor:
    """How far a difference may be off by chance at least; texts that agree by luck show less.

    As if all that differs differed one way, at independent positions (`total` of them): each of up to
    `most` steps with the same probability. A difference of nothing may be one of a single position.
    """
    share = (value.abs() / most).clamp(max=1)
    return torch.maximum(value.abs() * (1 - share), 1 / total).div(total).sqrt()


def accuracy_bounds(
    right: Tensor, others: Tensor, positions: Tensor, tail: float, *, alike: bool = True
) -> tuple[Tensor, Tensor]:
    """The accuracy of one wiring minus that of others [W], and how far each may be off at `tail`.

    right [T] and others [W, T] of positions [T]. One bound is that of the spread between texts.
    `alike`: both are wirings of one drafter, which a text that is hard for one is hard for. Then another
    bound holds too, and the closer one is taken: it takes positions of a text as ALIKE and the two as
    independent, which they are not to their advantage. It does not hold where one is right just where
    the other is wrong, as with two teachers that choose differently.
    """
    value, error, texts = ratio_difference(right, positions, others, positions.expand_as(others))
    if texts < 2 or not alike:
        return value, reach_of(error, texts, tail)
    between = reach_of(error, texts, tail / 2)
    total = positions.sum()
    effective = (positions.clamp(min=1) / (1 + (positions - 1).clamp(min=0) * ALIKE)).sum()
    a, b = right.sum() / total, others.sum(1) / total
    unpaired = ((a * (1 - a) + b * (1 - b)).clamp(min=1 / total) / effective).sqrt()
    within = NormalDist().inv_cdf(1 - tail / 2) * unpaired
    return value, torch.minimum(between, within)


def loss_bounds(one: Tensor, others: Tensor, rows: Tensor, tail: float) -> tuple[Tensor, Tensor]:
    """The mean loss of other wirings minus that of one [W], and how far each may be off at `tail`.

    one [T] and others [W, T] are sums over rows [T], by the spread between texts.
    """
    counted, total = int((rows > 0).sum()), rows.sum().clamp(min=1)
    parts = others - one
    value = parts.sum(1) / total
    spread = (parts - value[:, None] * rows).pow(2).sum(1) * counted / max(1, counted - 1)
    return value, reach_of(spread.sqrt() / total, counted, tail)


def reach_of(error: Tensor, texts: int, tail: float) -> Tensor:
    """How far a difference may be off; one text says nothing about the spread between texts."""
    return t_quantile(tail, texts - 1) * error if texts > 1 else torch.full_like(error, math.inf)


def length_bounds(
    one: Sequence[Count], others: Sequence[Sequence[Count]], tail: float, *, steps: int
) -> tuple[Tensor, Tensor]:
    """The accept length of one wiring minus that of others [W], and how far each may be off."""
    return count_bounds(one, others, tail, most=float(steps))


def count_bounds(
    one: Sequence[Count], others: Sequence[Sequence[Count]], tail: float, *, most: float
) -> tuple[Tensor, Tensor]:
    """A rate of one wiring minus that of others [W], by the spread between texts alone."""
    mine, theirs = count_tensors([one]), count_tensors(others)
    value, error, texts = ratio_difference(mine[0][0], mine[1][0], *theirs, most=most)
    return value, reach_of(error, texts, tail)


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
    return rate_difference(one, other, comparisons=comparisons, most=float(steps))


def rate_difference(
    one: Sequence[Count], other: Sequence[Count], *, comparisons: int, most: float = 1.0
) -> Difference:
    """A rate of one minus the other's on the same texts, paired, Bonferroni-corrected.

    `most` is the greatest difference that there can be: 1 of accuracies, the steps of accept lengths.
    The interval is that whole range where fewer than two texts count, and, around 0, where nothing was
    counted of one of the two.
    """
    value, reach = count_bounds(one, [other], tail_of(comparisons), most=most)
    return bounded(float(value[0]), float(reach[0]), most)


def bounded(value: float, reach: float, limit: float) -> Difference:
    """A difference within ±limit."""
    low = value - reach if math.isfinite(reach) else -limit
    high = value + reach if math.isfinite(reach) else limit
    return Difference(value=value, low=max(low, -limit), high=min(high, limit))

"""One text's share of a figure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """A numerator, which may be a sum of probabilities, and a number of positions."""

    numerator: float
    denominator: int


def tally(numerator: Tensor, denominator: Tensor) -> Tally:
    """From two sums; whole numbers stay whole."""
    exact = float(numerator) if numerator.is_floating_point() else int(numerator)
    return Tally(exact, int(denominator))

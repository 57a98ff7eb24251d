"""Student's t, without a library."""

from __future__ import annotations

import math
from functools import lru_cache


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

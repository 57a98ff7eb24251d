"""Right and wrong answers, counted, with exact bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.planted.cases import OUTSIDE, PAIR, SINGLE, SOUND, Case
from bench.planted.kinds import UNKNOWN

# What has to be reached: the share of right answers, by group.
BARS = {SINGLE: 0.95, PAIR: 0.80, SOUND: 149 / 150, OUTSIDE: 0.90}
SURPRISE = 0.01  # a sample fails where its result had a smaller chance than this at the bar


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was answered to a case."""

    case: Case
    verdict: str  # "cause", "sound", "unknown", or "refused"
    causes: tuple[str, ...]  # kinds, the most costly first
    said: str  # the headline, or the sentence in which it was refused
    seconds: float
    worked: float  # seconds of processor time

    @property
    def right(self) -> bool:
        """The right cause named first; both first, of a pair; silence; or 'unknown'."""
        if self.case.group == SOUND:
            return self.verdict == "sound"
        if self.case.group == OUTSIDE:
            return self.verdict == UNKNOWN and set(self.causes) <= {UNKNOWN}
        if self.verdict != "cause":
            return False
        return fits(self.causes[: len(self.case.kinds)], self.case.accepted)

    @property
    def found(self) -> bool:
        """Every planted fault is named somewhere, whatever stands before it."""
        if self.case.group in (SOUND, OUTSIDE):
            return self.right
        return all(set(accepted) & set(self.causes) for accepted in self.case.accepted)


def fits(named: Sequence[str], accepted: Sequence[Sequence[str]]) -> bool:
    """Whether the causes named are the planted ones, in any order."""
    if len(named) != len(accepted):
        return False
    if not accepted:
        return True
    return any(
        named[i] in accepted[0] and fits([*named[:i], *named[i + 1 :]], accepted[1:])
        for i in range(len(named))
    )


def below(right: int, count: int, bar: float) -> float:
    """The chance of no more right answers than these where each is right with chance `bar`."""
    return sum(math.comb(count, k) * bar**k * (1 - bar) ** (count - k) for k in range(right + 1))


def upper(wrong: int, count: int, level: float = 0.95) -> float:
    """The exact upper end of the two-sided interval of a share (Clopper and Pearson)."""
    return bisect(lambda p: below(wrong, count, p) > (1 - level) / 2) if wrong < count else 1.0


def lower(right: int, count: int, level: float = 0.95) -> float:
    """Its lower end."""
    return 1 - upper(count - right, count, level)


def bisect(holds: Callable[[float], bool]) -> float:
    """The largest share in [0, 1] for which a falling condition holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def too_low(right: int, count: int, group: str) -> bool:
    """Whether so few right answers speak against the group's bar."""
    return count > 0 and below(right, count, BARS[group]) < SURPRISE

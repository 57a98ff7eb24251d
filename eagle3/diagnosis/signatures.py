"""What the accuracy by draft step tells: which family of faults a curve looks like.

A wrong feature costs the first step most, since behind it the drafter feeds on its own state; a wrong
feedback or position spares the first step; a wrong token map or alignment leaves nothing at any step;
damaged weights carry the first step, which lives from the target's states, and nothing behind it.
The curve as served is set beside the curve as trained, so that what the text does to both drops out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3.metrics import Rate

LEAST = 30  # positions from which a step's rate counts
SAME = 0.95  # a step keeps at least this share of what it has as trained: it is spared
RECOVERS = 0.15  # by which the share grows behind the first step
NOTHING = 0.15  # a rate that is little more than chance hits and copies
LEVEL = 0.7  # of the first step's rate: no later step of a level curve has less
FALLS = 0.6  # of the first step's rate: less at the second is a collapse

DEAD = "flat and low"
FEATURES = "low first step that recovers"
DEEPER = "perfect first step, then decay"
COLLAPSE = "collapse behind the first step"
EVEN = "lower at every step alike"
FLAT = "as trained at every step"

MEANS = {
    DEAD: "nothing is accepted at any step: states, token map, alignment or the whole block",
    FEATURES: "the first step is hit and the deeper ones less: what the target feeds in",
    DEEPER: "the first step is spared and the deeper ones are hit: feedback or draft positions",
    COLLAPSE: "the first step holds and the second does not: weights, or what is fed back",
    EVEN: "every step loses alike: norms, rotary embedding, tables, or training",
    FLAT: "the wiring costs nothing",
}
# What a fault of a kind may look like; kinds that may look like anything are left out.
EXPECTED: Mapping[str, tuple[str, ...]] = {
    "states": (FEATURES, EVEN, DEAD),
    "order": (FEATURES, EVEN, DEAD),
    "d2t": (DEAD, EVEN, COLLAPSE),
    "feedback": (DEEPER,),
    "positions": (DEEPER,),
    "concat": (DEAD, EVEN, COLLAPSE),
    "token": (DEAD, EVEN, COLLAPSE, FEATURES),
}


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A curve's name, and the figures that gave it."""

    name: str
    served: tuple[float, ...]  # conditional accuracy a step, as far as it can be counted
    trained: tuple[float, ...]

    @property
    def in_words(self) -> str:
        """One sentence."""
        so = ", ".join(f"{value:.2f}" for value in self.served)
        best = ", ".join(f"{value:.2f}" for value in self.trained)
        beside = "" if self.name == FLAT or so == best else f" (as trained {best})"
        return f"{self.name}: by step {so}{beside}; {MEANS[self.name]}"


def counted(curve: Sequence[tuple[int, Rate]]) -> tuple[float, ...]:
    """The rates of the first steps, up to the first that rests on too few positions."""
    values: list[float] = []
    for _, rate in sorted(curve, key=lambda point: point[0]):
        if rate.denominator < LEAST:
            break
        values.append(rate.value)
    return tuple(values)


def signature_of(
    served: Sequence[tuple[int, Rate]], trained: Sequence[tuple[int, Rate]]
) -> Signature:
    """The signature of conditional accuracy as served beside that as trained (the same: FLAT)."""
    so, best = counted(served), counted(trained)
    return Signature(name=named(so, best), served=so, trained=best)


def named(so: Sequence[float], best: Sequence[float]) -> str:
    """The name of a pair of curves."""
    kept = [a / b if b else 1.0 for a, b in zip(so, best, strict=False)]
    if not kept:
        return DEAD
    if all(share >= SAME for share in kept):
        return COLLAPSE if collapses(so) else FLAT
    if max(so) < NOTHING:
        return DEAD
    later = kept[1:]
    if kept[0] >= SAME and later:
        return DEEPER
    if later and max(later) >= kept[0] + RECOVERS:
        return FEATURES
    return COLLAPSE if collapses(so) and not collapses(best) else EVEN


def collapses(curve: Sequence[float]) -> bool:
    """Whether the second step falls far below the first, which is more than nothing."""
    return len(curve) > 1 and curve[0] >= NOTHING and curve[1] < FALLS * curve[0]


def level(curve: Sequence[tuple[int, Rate]]) -> bool:
    """Whether no later step, given that the ones before were right, falls clearly below the first."""
    points = sorted(curve, key=lambda point: point[0])[: len(counted(curve))]
    if not points:
        return False
    first = points[0][1].value
    return all(rate.high >= LEVEL * first for _, rate in points[1:])


def curve_words(curve: Sequence[tuple[int, Rate]]) -> str:
    """'0.41, 0.44, 0.43', as far as steps can be counted."""
    return ", ".join(f"{value:.2f}" for value in counted(curve))


def speaks_against(kind: str, signature: Signature) -> bool:
    """Whether a curve is none that a fault of this kind makes."""
    return kind in EXPECTED and signature.name not in EXPECTED[kind]

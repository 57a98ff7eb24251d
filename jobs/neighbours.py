"""States one off those that a search found: made with the target's first layers, tried one at a time.

A drafter can only have been trained on what its dump holds, so a stored state gives way to its
neighbour only where that is clearly better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from eagle3.diagnosis import measure
from eagle3.diagnosis.causes import matters
from eagle3.search.score import Scorer
from eagle3.search.texts import Text, known_states, with_states
from eagle3.wiring import Wiring
from jobs.inspecting import TargetLayers


def missing_beside(found: Iterable[int], texts: Sequence[Text], layers: int) -> tuple[int, ...]:
    """The neighbours of states that no text holds and that the target's first `layers` make."""
    beside = {k + by for k in found for by in (-1, 1)} - set(known_states(texts))
    return tuple(sorted(k for k in beside if 0 < k <= layers))


def with_made(target: TargetLayers, texts: Sequence[Text], missing: Sequence[int]) -> list[Text]:
    """The texts with these states too; raises BadInput where the target cannot be run."""
    if not missing:
        return list(texts)
    made = target.states([text.ids for text in texts], max(missing), only=missing)
    return [
        with_states(text, dict(zip(missing, states, strict=True)))
        for text, states in zip(texts, made, strict=True)
    ]


def better_neighbour(
    scorer: Scorer,
    best: Wiring,
    made: Sequence[int],
    *,
    teacher: str,
    tried: int,
    seed: int,
    least: float = 0.0,
) -> Wiring | None:
    """`best` with one state replaced by its neighbour, where that is clearly better; else None.

    `tried` is how many wirings were compared before; with a first step right less often than `least`
    no neighbour is taken.
    """
    others = neighbours(best, made)
    if not others:
        return None
    counts = scorer.first(others, range(len(scorer.texts)), [teacher])
    leader = max(others, key=lambda w: sum(c.numerator for c in counts[w][teacher]))
    now, then = (measure.scored(scorer, w, teacher, seed) for w in (leader, best))
    works = now.accuracy.value >= least
    return leader if works and matters(now, then, tried + len(others)) else None


def neighbours(best: Wiring, made: Sequence[int]) -> list[Wiring]:
    """`best` with one of its states replaced by one beside it, of those that were made."""
    states = best.states()
    return [
        replace(best, layers=(*states[:j], k, *states[j + 1 :]))
        for j in range(len(states))
        for k in made
        if abs(k - states[j]) == 1
    ]

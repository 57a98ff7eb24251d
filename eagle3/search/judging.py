"""Which teacher a drafter learned from, and whether a wiring is alive at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagle3.metrics import Count, Truth, judge_chains, rate
from eagle3.search.bounds import accuracy_bounds, tail_of
from eagle3.search.results import Ranked, TeacherScore
from eagle3.search.score import Scorer
from eagle3.search.teachers import Teacher
from eagle3.wiring import Token, Wiring

# How often two teachers choose alike that are one: states kept in bfloat16 turn a near tie now and
# then, 1 or 2 in a hundred.
SAME = 0.97
# How often a drafter is right that was trained with the answer before it: it only has to repeat it.
REPEATED = 0.98


def choose_teacher(
    scorer: Scorer, wiring: Wiring, teachers: Sequence[Teacher], chosen: Sequence[int]
) -> tuple[Teacher, bool]:
    """Whom the drafter agrees with most, and whether that is clear; the first is the reference.

    The reference, unless another one is clearly ahead of it and no rounding of it. Clear: every other
    one is clearly behind, or chooses the same tokens but for near ties.
    """
    right = torch.cat([scorer.rights([wiring], chosen, t.name) for t in teachers])
    positions = scorer.positions(chosen, teachers[0].name)
    leader = int(right.sum(1).argmax())
    tail = tail_of(len(teachers) - 1)
    value, reach = accuracy_bounds(right[leader], right, positions, tail, alike=False)
    same = agreement(scorer, teachers[leader], teachers[0], chosen) >= SAME
    if value[0] <= reach[0] or same:
        leader = 0
        value, reach = accuracy_bounds(right[0], right, positions, tail, alike=False)
    unclear = [
        t
        for i, t in enumerate(teachers)
        if i != leader
        and value[i] <= reach[i]
        and agreement(scorer, t, teachers[leader], chosen) < SAME
    ]
    return teachers[leader], not unclear


def agreement(scorer: Scorer, one: Teacher, other: Teacher, chosen: Sequence[int]) -> float:
    """How often two teachers choose the same at the scored positions."""
    counts = agreements(scorer, one, other, chosen)
    return sum(c.numerator for c in counts) / max(1, sum(c.denominator for c in counts))


def agreements(scorer: Scorer, one: Teacher, other: Teacher, chosen: Sequence[int]) -> list[Count]:
    """Of the scored positions of each text, those at which two teachers choose the same."""
    counts = []
    for i in chosen:
        text = scorer.texts[i]
        a, b = (text.truths[t.name][text.rows + 2] for t in (one, other))
        counts.append(Count(int(((a == b) & (a >= 0)).sum()), int(((a >= 0) & (b >= 0)).sum())))
    return counts


def teacher_scores(
    scorer: Scorer, best: Ranked, teachers: Sequence[Teacher], seed: int
) -> tuple[TeacherScore, ...]:
    """Every teacher on all texts, the one that explains most first.

    `best` was scored on them against the first, which is the reference.
    """
    reference, *others = teachers
    everything = range(len(scorer.texts))
    counts = {reference.name: [c["accuracy"] for c in best.counts]}
    if others:
        counts |= scorer.first([best.wiring], everything, [t.name for t in others])[best.wiring]
    scores = []
    for teacher in teachers:
        accuracy = rate(counts[teacher.name], Truth.stored_teacher, limits=(0.0, 1.0), seed=seed)
        assert accuracy is not None  # every text has scored rows
        same = None
        if teacher is not reference:
            found = agreements(scorer, teacher, reference, everything)
            same = rate(found, Truth(reference.name), limits=(0.0, 1.0), seed=seed)
        scores.append(
            TeacherScore(
                teacher=teacher, accuracy=replace(accuracy, truth=teacher.name), agreement=same
            )
        )
    return tuple(sorted(scores, key=lambda s: -s.accuracy.value))


def constant_right(scorer: Scorer, teacher: str, chosen: Sequence[int]) -> Tensor:
    """How often the teacher's most frequent token is right, [chosen] float64."""
    truths = []
    for i in chosen:
        text = scorer.texts[i]
        truths.append(text.truths[teacher][text.rows + 2])
    known = torch.cat(truths)
    frequent = known[known >= 0].mode().values
    return torch.tensor([int((t == frequent).sum()) for t in truths], dtype=torch.float64)


def accuracy_of(scorer: Scorer, wiring: Wiring, teacher: str, chosen: Sequence[int]) -> float:
    """Agreement of the first step over some texts."""
    right = scorer.rights([wiring], chosen, teacher).sum()
    return float(right / scorer.positions(chosen, teacher).sum())


def is_alive(scorer: Scorer, wiring: Wiring, teacher: str, chosen: Sequence[int]) -> bool:
    """Whether the first step is clearly better than always saying the most frequent token."""
    right = scorer.rights([wiring], chosen, teacher)
    constant = constant_right(scorer, teacher, chosen)
    positions = scorer.positions(chosen, teacher)
    value, reach = accuracy_bounds(right[0], constant[None], positions, tail_of(1), alike=False)
    return bool(value[0] > reach[0])


def is_earned(scorer: Scorer, wiring: Wiring, teacher: str, chosen: Sequence[int]) -> bool:
    """Whether what the first step gets right speaks for a wiring.

    Beside x[t+2] stands the answer itself. A drafter that was trained so repeats it nearly always,
    where it has a draft id; one that was not may repeat it often, and better than it drafts.
    """
    if wiring.token is not Token.after_next:
        return True
    known = torch.cat([scorer.texts[i].truths[teacher][scorer.texts[i].rows + 2] for i in chosen])
    vocabulary = scorer.checkpoint.vocabulary(scorer.wired.to_target(wiring.d2t))
    drafted = vocabulary[known.clamp(min=0)] & (known >= 0)
    right = scorer.rights([wiring], chosen, teacher).sum()
    return bool(right >= REPEATED * int(drafted.sum()))


def has_rounds(scorer: Scorer, truth: str) -> bool:
    """Whether any chain's outcome is known for all its steps, whatever is drafted."""
    t2d = scorer.checkpoint.drafter.t2d
    for text in scorer.texts:
        nothing = torch.full((len(text.rows), scorer.steps), -1, device=text.ids.device)
        judged = judge_chains(nothing, text.rows, text.ids, text.mask, text.truths[truth], t2d)
        if bool(judged.decided.all(1).any()):
            return True
    return False

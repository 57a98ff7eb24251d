"""Which wiring and which teacher a drafter was trained with, as far as data tells.

The product of all that may differ is millions, so the search goes along one axis at a time: from a
start over all single changes, then over pairs of those that are not clearly worse, and from the best
that is clearly better over the whole list again, until nothing is. Where the start says nothing but
noise, every change is a suspect and pairs are raced from the beginning: with states and d2t both
wrong, either repair alone gives nothing.

Where axes are few and cut, so that all wirings they lead to can be listed, those are raced at once.

What shows in the first step is raced by agreement with the teacher that explains the drafter best so
far; what shows behind it only, by accept length. The teacher is chosen between races, never in one: a
wiring may look better against an easier teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from eagle3.errors import BadInput
from eagle3.form import DrafterForm
from eagle3.search.axes import STATES, Axis, changed
from eagle3.search.bounds import accuracy_bounds, bounded, length_difference, tail_of
from eagle3.search.halving import (
    LENGTH,
    Out,
    as_dropped,
    by_distance,
    impossible,
    no_rounds,
    pooled,
    race,
    rank,
)
from eagle3.search.judging import has_rounds, teacher_scores
from eagle3.search.results import Dropped, Ranked, Searched, TeacherScore
from eagle3.search.score import Scorer
from eagle3.search.settling import settle
from eagle3.search.teachers import Teacher
from eagle3.search.walk import Pairs, Progress, Walk, named
from eagle3.wiring import Wiring

__all__ = ["Dropped", "Ranked", "Searched", "TeacherScore", "search"]

MOST_LISTED = 200  # wirings that are all raced


def search(
    scorer: Scorer,
    starts: Sequence[Wiring],
    axes: Sequence[Axis],
    teachers: Sequence[Teacher],
    *,
    form: DrafterForm,
    steps: int,
    seed: int,
    finalists: int = 8,
    progress: Progress | None = None,
) -> Searched:
    """The best wiring that leads on from any of the starts, and everything that was seen on the way.

    `teachers` begins with the reference: target_argmax, or next_token. A change is only taken where
    its paired, corrected interval lies above 0, so that a sound drafter is not "repaired". Starts that
    cannot be scored are left out, and said; BadInput where none can.
    """
    if steps != scorer.steps:
        raise ValueError(f"the scorer drafts {scorer.steps} steps, not {steps}")
    lacking = [t.name for t in teachers if t.name not in scorer.teachers]
    if lacking or not teachers:
        raise BadInput(f"the texts hold no choices of {', '.join(lacking) or 'any teacher'}")
    refuse_unheld(scorer, axes)
    walk = Walk(scorer, axes, teachers, form, seed, progress)
    walk.notes += [axis.cut for axis in axes if axis.cut]
    able = list(walk.scoreable(starts))
    if not able:
        raise BadInput(f"no start of the search can be scored: {scorer.why_not(starts[0])}")
    if not has_rounds(scorer, teachers[0].name):
        raise BadInput(no_rounds(steps))
    start = able[0]
    if len(able) == 1 and (wirings := listed(start, axes, form)):
        return searched_list(walk, start, wirings, finalists)
    ends: list[Wiring] = []
    for i, begin in enumerate(able):
        if i and any(begin in path for path in walk.paths):
            continue
        if i:
            walk.say(f"from {named(start, begin)}")
        pairs = Pairs.ALL
        if i:
            pairs = Pairs.NONE if any(map(walk.works, ends)) else Pairs.SUSPECTS
        ends.append(walk.climb(begin, others=() if i else able, pairs=pairs))
    best = settle(walk, ends, start)
    teacher, clear = walk.teacher(best, whole=True)
    walk.notes += vocabulary_notes(scorer, start, best)
    ranked = ranking(walk, best, able, teacher, finalists, start)
    dropped = [as_dropped(start, out) for out in left_behind(walk, best, teacher, ranked)]
    dropped += [impossible(start, w, why) for w, why in walk.impossible.items()]
    return Searched(
        start=start,
        best=ranked[0],
        ranked=ranked,
        dropped=by_distance(dropped),
        teachers=teacher_scores(scorer, ranked[0], teachers, seed),
        teacher=teacher,
        teacher_clear=clear,
        rounds=tuple(walk.rounds),
        scored=scorer.scored,
        drafted=scorer.drafted,
        notes=tuple(walk.notes),
        axes=tuple(walk.axes),
        unclear=unclear(walk, best, teacher),
    )


def listed(start: Wiring, axes: Sequence[Axis], form: DrafterForm) -> list[Wiring]:
    """Every wiring that the axes lead to, the start first; empty where these are too many to be raced
    at once, or show behind the first step.
    """
    count = prod(len(axis.values) + 1 for axis in axes)
    if not axes or count > MOST_LISTED or any(axis.shows_from for axis in axes):
        return []
    wirings = [start]
    for axis in axes:
        wirings += [changed(w, axis.name, value, form) for w in wirings for value in axis.values]
    return list(dict.fromkeys(wirings))


def searched_list(walk: Walk, start: Wiring, wirings: Sequence[Wiring], finalists: int) -> Searched:
    """What a race of all these wirings ends with."""
    scorer, reference = walk.scorer, walk.reference
    teacher = walk.teacher(start)[0] if len(walk.teachers) > 1 else reference
    found = race(
        scorer,
        wirings,
        teacher=teacher.name,
        truth=reference.name,
        seed=walk.seed,
        start=start,
    )
    best = found.best.wiring
    ranked = (found.best, *found.ties)
    closest = [t.wiring for t in found.ties] + [d.wiring for d in found.dropped if d.texts]
    others = [w for w in dict.fromkeys((start, *closest)) if w != best][: finalists - 1]
    if others:
        ranked = tuple(
            rank(
                scorer,
                [best, *others],
                teacher=teacher.name,
                truth=reference.name,
                seed=walk.seed,
                start=start,
                comparisons=found.scored - 1,
            )
        )
    shown = {r.wiring for r in ranked}
    teacher, clear = walk.teacher(best, whole=True) if len(walk.teachers) > 1 else (reference, True)
    open_ = [r.wiring for r in ranked[1:] if r.tied]
    open_ += [d.wiring for d in found.dropped if d.behind is not None and d.behind.low <= 0]
    names = (best.differing(w) for w in open_)
    said = ", ".join(found.best.changed) or "the start"
    return Searched(
        start=start,
        best=ranked[0],
        ranked=(ranked[0], *sorted(ranked[1:], key=lambda r: -r.accept_length.value)),
        dropped=tuple(d for d in found.dropped if d.wiring not in shown),
        teachers=teacher_scores(scorer, ranked[0], walk.teachers, walk.seed),
        teacher=teacher,
        teacher_clear=clear,
        rounds=(
            f"all {len(wirings)} wirings that the axes lead to, raced against {teacher.name}: {said}",
        ),
        scored=found.scored,
        drafted=scorer.drafted,
        notes=(*walk.notes, *vocabulary_notes(scorer, start, best)),
        axes=tuple(walk.axes),
        unclear=tuple({n[0]: None for n in names if len(n) == 1}),
    )


def refuse_unheld(scorer: Scorer, axes: Sequence[Axis]) -> None:
    """Raises BadInput where a person names states that cannot be fed."""
    for axis in axes:
        if not axis.named or axis.name != STATES:
            continue
        asked = sorted({k for states in axis.values for k in states})
        if outside := [k for k in asked if not 0 <= k <= scorer.target.num_layers]:
            raise BadInput(
                f"axis 'states' names state {', '.join(map(str, outside))}, but the target has states "
                f"0 to {scorer.target.num_layers}"
            )
        if lacking := [k for k in asked if k not in scorer.known]:
            raise BadInput(
                f"axis 'states' names state {', '.join(map(str, lacking))}, but the texts hold only "
                f"{', '.join(map(str, scorer.known))}; data that stores it can be searched "
                "(job=capture_states)"
            )


def ranking(
    walk: Walk,
    best: Wiring,
    starts: Sequence[Wiring],
    teacher: Teacher,
    finalists: int,
    start: Wiring,
) -> tuple[Ranked, ...]:
    """The best, the starts, and whoever came closest, scored to the end; by accept length."""
    close = sorted(
        ((w, v) for w, v in walk.near.items() if close_to(walk, w, best, teacher)),
        key=lambda item: -item[1],
    )
    rest = sorted(walk.out.values(), key=lambda out: (-out.texts, out.behind.value))
    wanted = dict.fromkeys([start, *starts, *(w for w, _ in close), *(o.wiring for o in rest)])
    wanted.pop(best, None)
    others = list(wanted)[: max(finalists - 1, 0 if start == best else 1)]
    ranked = rank(
        walk.scorer,
        [best, *others],
        teacher=teacher.name,
        truth=walk.reference.name,
        seed=walk.seed,
        start=start,
        comparisons=walk.scorer.scored - 1,
    )
    return (ranked[0], *sorted(ranked[1:], key=lambda r: -r.accept_length.value))


def left_behind(
    walk: Walk, best: Wiring, teacher: Teacher, ranked: Sequence[Ranked]
) -> Iterator[Out]:
    """Everybody who was scored and is not in the ranked table."""
    shown = {r.wiring for r in ranked}
    for wiring in walk.scorer.everyone():
        if wiring in shown:
            continue
        yield walk.out.get(wiring) or not_shown(walk, wiring, best, teacher, len(ranked))


def not_shown(walk: Walk, wiring: Wiring, best: Wiring, teacher: Teacher, finalists: int) -> Out:
    """One who was never clearly behind a leader, beside the best on the texts that it was scored on."""
    scorer = walk.scorer
    chosen, what = sorted(scorer.rights_known(wiring)), "its first step"
    if chosen:
        positions = scorer.positions(chosen, teacher.name)
        right = scorer.rights([best, wiring], chosen, teacher.name)
        total, accuracy = int(positions.sum()), float(right[1].sum() / positions.sum().clamp(min=1))
        value, reach = accuracy_bounds(right[0], right[1:], positions, tail_of(scorer.scored - 1))
        behind = bounded(float(value[0]), float(reach[0]), 1.0)
    else:
        chosen, what = sorted(scorer.drafted_known(wiring)), "its accept length"
        ours, theirs = (scorer.chains(w, chosen, walk.reference.name) for w in (best, wiring))
        total = sum(c["accuracy"].denominator for c in theirs)
        accuracy = pooled([c["accuracy"] for c in theirs], 0.0)
        behind = length_difference(
            [c[LENGTH] for c in ours],
            [c[LENGTH] for c in theirs],
            comparisons=scorer.scored - 1,
            steps=scorer.steps,
        )
    clearly = "clearly" if behind.low > 0 else "not clearly"
    return Out(
        wiring=wiring,
        texts=len(chosen),
        positions=total,
        accuracy=accuracy,
        behind=behind,
        why=f"{what} is {clearly} behind the best's on {len(chosen)} texts, and only {finalists} are "
        "scored to the end (job.finalists)",
    )


def unclear(walk: Walk, best: Wiring, teacher: Teacher) -> tuple[str, ...]:
    """Axes of which another value alone cannot be told from the best's, on what both were scored on.

    Or of which no other value was scored at all, as of those that show behind the first step only where
    the first step is not alive.
    """
    everyone = walk.scorer.everyone()
    alone: dict[str, list[Wiring]] = {name: [] for name in walk.axes}
    tried: set[str] = set()
    for wiring in everyone:
        names = best.differing(wiring)
        tried.update(names)
        out = walk.out.get(wiring)
        clearly = out is not None and out.behind.low > 0
        if len(names) == 1 and names[0] in alone and not clearly:
            alone[names[0]].append(wiring)
    return tuple(
        name
        for name, wirings in alone.items()
        if name not in tried
        or any(close_to(walk, w, best, teacher) and as_long(walk, w, best) for w in wirings)
    )


def close_to(walk: Walk, wiring: Wiring, best: Wiring, teacher: Teacher) -> bool:
    """Whether a wiring is not clearly behind the best in the first step, as far as it was scored."""
    if wiring == best:
        return False
    common = walk.scorer.rights_known(wiring).keys() & walk.scorer.rights_known(best).keys()
    if not (chosen := sorted(common)):
        return bool(walk.scorer.drafted_known(wiring))
    right = walk.scorer.rights([best, wiring], chosen, teacher.name)
    positions = walk.scorer.positions(chosen, teacher.name)
    value, reach = accuracy_bounds(right[0], right[1:], positions, tail_of(walk.scorer.scored - 1))
    return bool(value[0] <= reach[0])


def as_long(walk: Walk, wiring: Wiring, best: Wiring) -> bool:
    """Whether its accept length is not clearly behind the best's, as far as both were drafted."""
    scorer = walk.scorer
    chosen = sorted(set(scorer.drafted_known(wiring)) & set(scorer.drafted_known(best)))
    if not chosen:
        return True
    ours, theirs = (scorer.chains(w, chosen, walk.reference.name) for w in (best, wiring))
    return (
        length_difference(
            [c[LENGTH] for c in ours],
            [c[LENGTH] for c in theirs],
            comparisons=scorer.scored - 1,
            steps=scorer.steps,
        ).low
        <= 0
    )


def vocabulary_notes(scorer: Scorer, *wirings: Wiring) -> Iterator[str]:
    """Where a reading of d2t leads outside the target's vocabulary."""
    for reading in dict.fromkeys(wiring.d2t for wiring in wirings):
        if count := scorer.wired.outside(reading):
            yield (
                f"d2t read as '{reading.value}' leads outside the target's vocabulary at {count} of "
                f"{len(scorer.wired.to_target(reading))} draft ids, which count as wrong"
            )

"""Which of the wirings that a walk ended with is answered: the simplest and likeliest of close ones."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.search.axes import STATES, changed, changes, value_of
from eagle3.search.bounds import loss_bounds, tail_of
from eagle3.search.halving import race_chains, race_first
from eagle3.search.teachers import Teacher
from eagle3.search.walk import LEAST_LOSS, Change, Walk
from eagle3.wiring import Wiring


def settle(walk: Walk, ends: Sequence[Wiring], start: Wiring) -> Wiring:
    """One of where the starts led to, without changes that nothing speaks for."""
    return settled(walk, simplified(walk, best_of(walk, ends), start), start)


def best_of(walk: Walk, ends: Sequence[Wiring]) -> Wiring:
    """The best of where the starts led to; of equals the first."""
    distinct = list(dict.fromkeys(ends))
    first = distinct[0]
    if len(distinct) == 1:
        return first
    teacher, _ = walk.teacher(first)
    taken, _ = walk.take(first, dict.fromkeys(distinct[1:], ()), teacher)
    return taken or first


def simplified(walk: Walk, best: Wiring, start: Wiring) -> Wiring:
    """Without the changes against the start that nothing speaks for any more."""
    teacher, _ = walk.teacher(best)
    for name in start.differing(best):
        if name not in walk.values:
            continue
        back = changed(best, name, value_of(start, name), walk.form)
        if back == best or walk.scorer.why_not(back):
            continue
        if len(start.differing(back)) >= len(start.differing(best)):
            continue
        if is_stored(walk, best, start) and not is_stored(walk, back, start):
            continue
        if as_good(walk, back, best, teacher):
            walk.say(f"{' and '.join(changes(back, best))} makes no clear difference, so not taken")
            best = back
    return best


def settled(walk: Walk, best: Wiring, start: Wiring) -> Wiring:
    """With the likeliest value of each axis that has left the start's.

    That something is changed there is clear by then; which of two close values it is may not be, and
    the first one that was taken is not the better guess. States that the data does not store give way
    to likely ones that it does: a trainer feeds what its dump holds.
    """
    teacher, _ = walk.teacher(best)
    made = () if is_stored(walk, best, start) else (STATES,)
    for name in dict.fromkeys((*made, *start.differing(best))):
        if name not in walk.values or walk.axes[name].shows_from:
            continue
        others: dict[Wiring, tuple[Change, ...]] = {}
        for value in walk.values[name]:
            if name in made or value != value_of(start, name):
                walk.add(others, best, (Change(name, value),))
        if not others:
            continue
        field = walk.race(best, others, teacher)
        likely = [
            w for w in field.left if (not field.ahead if w == best else walk.speaks(w, teacher))
        ]
        taken = likeliest(
            walk, [w for w in likely if is_stored(walk, w, start)] or likely or [best], teacher
        )
        if taken != best:
            likelier = " and ".join(changes(best, taken))
            walk.say(f"{likelier} is likelier than what was taken first, if not clearly")
            best = taken
    return best


def likeliest(walk: Walk, close: Sequence[Wiring], teacher: Teacher) -> Wiring:
    """Of wirings that are right about equally often, the one that gives the teacher's choices the most
    probability, which is what training worked for; of equals the first.
    """
    alike = [w for w in close if w.d2t == close[0].d2t]
    if len(alike) == 1:
        return close[0]
    losses, _ = walk.scorer.losses(alike, walk.order, teacher.name)
    return alike[int(losses.sum(1).argmin())]


def is_stored(walk: Walk, wiring: Wiring, start: Wiring) -> bool:
    """Whether the data holds all states that a wiring feeds, or the start declares the embedding there,
    for which nobody needs a dump.
    """
    made = set.union(*(set(text.computed) for text in walk.scorer.texts))
    declared = start.states()
    return not any(
        k in made and not (k == 0 and declared[place : place + 1] == (0,))
        for place, k in enumerate(wiring.states())
    )


def as_good(walk: Walk, one: Wiring, best: Wiring, teacher: Teacher) -> bool:
    """Whether neither first steps, their cross-entropy nor accept lengths show the best to be better."""
    field = race_first(walk.scorer, [best, one], walk.order, teacher=teacher.name, keep=one)
    if field.ahead:
        return False
    if one.d2t == best.d2t:
        sums, rows = walk.scorer.losses([best, one], walk.order, teacher.name)
        value, reach = loss_bounds(sums[0], sums[1:], rows, tail_of(1))
        if float(value[0]) > max(float(reach[0]), LEAST_LOSS):
            return False
    field = race_chains(walk.scorer, [best, one], walk.order, truth=walk.reference.name, keep=one)
    return not field.ahead

"""One search on its way: what may be changed, what was tried and taken, and who left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, product
from typing import Any

from eagle3.form import DrafterForm
from eagle3.metrics import Difference
from eagle3.search.axes import Axis, changed, changes, value_of
from eagle3.search.bounds import accuracy_bounds, bounded, length_bounds, loss_bounds
from eagle3.search.halving import (
    LENGTH,
    Field,
    Out,
    planned,
    planned_for,
    race_chains,
    race_first,
    text_order,
)
from eagle3.search.judging import (
    accuracy_of,
    choose_teacher,
    is_alive,
    is_earned,
)
from eagle3.search.score import Scorer
from eagle3.search.teachers import Teacher
from eagle3.wiring import Head, Wiring

MOST_ROUNDS = 12  # from one start; each takes a change that is clearly better
FAINT = 0.25  # agreement below which one change more may hide behind another fault
WORKS = 0.5  # agreement from which a drafter is no broken one
LOOK_TEXTS = 48  # that say which teacher, and whether a wiring is alive
MOST_SUSPECTS = 4  # the best values of an axis, of which pairs are tried where the drafter works
EFFORT = 3  # no round of a race costs more than so many wirings on all texts
# Less than this is no fault that anybody would look for, however clear enough data makes it: of
# agreement, and of accept length.
LEAST_GAIN, LEAST_LENGTH = 0.005, 0.01
LEAST_LOSS = 0.01  # nats of cross-entropy, likewise
MOST_LIKELY = 12  # of those who cannot be told apart, whose cross-entropy is looked at
MANY_ROUNDS = 100  # of the served walk, below which a teacher's accept length is not asked about
Progress = Callable[[int, int], None]


class Pairs(Enum):
    """Which pairs of changes a climb tries where no single one is clearly better."""

    NONE = "none"  # another start has led to a drafter that works
    SUSPECTS = "suspects"  # of single changes that are close to the best
    CLOSEST = "closest"  # of the closest of each part of the wiring
    ALL = "all"  # where the drafter is faint, too: of all, then three changes


@dataclass(frozen=True)
class Change:
    """One part of the wiring set otherwise."""

    name: str
    value: Any


class Walk:
    """One search: what was tried, what was taken, and who left."""

    def __init__(
        self,
        scorer: Scorer,
        axes: Sequence[Axis],
        teachers: Sequence[Teacher],
        form: DrafterForm,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.scorer, self.teachers, self.form, self.seed = scorer, teachers, form, seed
        self.axes = {axis.name: axis for axis in axes}
        self.reference = teachers[0]
        self.order = text_order(len(scorer.texts), seed)
        self.look = self.order[:LOOK_TEXTS]
        self.progress = progress
        self.began: Wiring | None = None  # the first start, which changes are named against
        self.values: dict[str, list[Any]] = {axis.name: list(axis.values) for axis in axes}
        self.out: dict[Wiring, Out] = {}
        self.impossible: dict[Wiring, str] = {}
        self.near: dict[Wiring, float] = {}  # not clearly behind a winner, with their values
        self.paths: list[list[Wiring]] = []
        self.rounds: list[str] = []
        self.notes: list[str] = []

    def scoreable(self, starts: Iterable[Wiring]) -> Iterator[Wiring]:
        """The starts that can be scored, resolved, each once; their values join the axes'."""
        seen = set()
        for raw in starts:
            wiring = raw.resolved(self.form)
            if wiring in seen:
                continue
            seen.add(wiring)
            if why := self.scorer.why_not(wiring):
                states = ", ".join(map(str, wiring.states()))
                self.notes.append(f"the start with states {states} is left out: {why}")
                continue
            self.began = self.began or wiring
            for name, values in self.values.items():
                if value_of(wiring, name) not in values:
                    values.append(value_of(wiring, name))
            yield wiring

    def say(self, text: str) -> None:
        """Keep a sentence on what was done."""
        self.rounds.append(text)
        if self.progress is not None:
            self.progress(self.scorer.scored, self.scorer.scored)

    # What may be changed.

    def singles(self, wiring: Wiring) -> dict[Wiring, tuple[Change, ...]]:
        """Every wiring one change away, along the axes that show in the first step."""
        found: dict[Wiring, tuple[Change, ...]] = {}
        for name, values in self.values.items():
            if not self.axes[name].shows_from:
                for value in dict.fromkeys((*values, *self.axes[name].beside(wiring))):
                    self.add(found, wiring, (Change(name, value),))
        return found

    def pairs(self, wiring: Wiring, suspects: Iterable[Change]) -> dict[Wiring, tuple[Change, ...]]:
        """Every wiring two of the suspected changes away."""
        found: dict[Wiring, tuple[Change, ...]] = {}
        for one, other in combinations(suspects, 2):
            if one.name != other.name:
                self.add(found, wiring, (one, other))
        return found

    def add(
        self, found: dict[Wiring, tuple[Change, ...]], wiring: Wiring, made: tuple[Change, ...]
    ) -> None:
        """Add the wiring with some changes, if it is another one and can be scored."""
        other = wiring
        for change in made:
            other = changed(other, change.name, change.value, self.form)
        if other == wiring or other in found or other in self.impossible:
            return
        why = self.scorer.why_not(other)
        if why is None and (other.d2t, other.head) != (wiring.d2t, wiring.head):
            why = self.why_no_table(other)
        if why is not None:
            self.impossible[other] = why
            return
        found[other] = made

    def why_no_table(self, wiring: Wiring) -> str | None:
        """Why a reading of d2t is none to be tried with the target's head; None: it is."""
        named = self.scorer.wired.named_by_t2d
        if wiring.head is not Head.target or not named or wiring.d2t in named:
            return None
        return (
            f"the target's head has rows for every reading of d2t, so only the one that names t2d's "
            f"tokens is tried with it ({', '.join(sorted(d.value for d in named))})"
        )

    # What is taken.

    def teacher(self, wiring: Wiring, *, whole: bool = False) -> tuple[Teacher, bool]:
        """Who explains the drafter best, so wired."""
        return choose_teacher(
            self.scorer, wiring, self.teachers, self.order if whole else self.look
        )

    def alive(self, wiring: Wiring, teacher: Teacher) -> bool:
        """Whether the first step says more than the most frequent token does."""
        return is_alive(self.scorer, wiring, teacher.name, self.look)

    def speaks(self, wiring: Wiring, teacher: Teacher) -> bool:
        """Whether what a wiring gets right is any evidence for it."""
        if not self.alive(wiring, teacher):
            return False
        return is_earned(self.scorer, wiring, teacher.name, self.look)

    def works(self, wiring: Wiring) -> bool:
        """Whether the first step is right as often as that of a drafter that is not broken."""
        teacher, _ = self.teacher(wiring)
        return accuracy_of(self.scorer, wiring, teacher.name, self.look) >= WORKS

    def is_faint(self, wiring: Wiring, teacher: Teacher) -> bool:
        """Whether the first step is right so rarely that one change more may hide behind a fault."""
        return accuracy_of(self.scorer, wiring, teacher.name, self.look) < FAINT

    def climb(self, start: Wiring, *, others: Sequence[Wiring], pairs: Pairs) -> Wiring:
        """From a start to where no change and no pair of changes is clearly better.

        `others` are starts that are raced along.
        """
        here, path = start, [start]
        self.paths.append(path)
        faint = pairs is Pairs.ALL and self.is_faint(start, self.teacher(start)[0])
        for turn in range(MOST_ROUNDS):
            teacher, _ = self.teacher(here)
            # Behind a start around which every pair was tried, or one change made it work, only what
            # comes close to the best may be the next.
            tried = Pairs.CLOSEST if turn and faint else pairs
            taken = self.step(here, teacher, () if turn else others, tried=tried)
            if taken is None and tried is Pairs.ALL and not self.alive(here, teacher):
                taken = self.revived(here, teacher)
            if taken is None:
                break
            here = taken
            if any(here in earlier for earlier in self.paths):
                return here
            path.append(here)
        return self.late_step(here)

    def step(
        self, here: Wiring, teacher: Teacher, others: Sequence[Wiring], *, tried: Pairs
    ) -> Wiring | None:
        """One round over single changes, then over pairs; what is taken, or None."""
        singles = self.singles(here)
        lone = [change for (change,) in singles.values()]
        contestants = {**singles, **{w: () for w in others if w != here}}
        level = accuracy_of(self.scorer, here, teacher.name, self.look)
        every = tried is Pairs.ALL and self.is_faint(here, teacher)
        if every:
            # One change that makes a drafter that works is no half of a pair.
            taken, _ = self.take(here, contestants, teacher, quiet=True, working=True)
            if taken is not None:
                return taken
            contestants |= self.pairs(here, lone)
        taken, race_ = self.take(here, contestants, teacher)
        if taken is not None or every or tried is Pairs.NONE:
            return taken
        late = sorted(race_.late, key=lambda out: (-out.texts, out.behind.value))
        close = [w for w in (*race_.left, *(out.wiring for out in late)) if w in singles]
        suspects = [change for w in close if self.shows(w, here) for change in singles[w]]
        if level >= WORKS or tried is Pairs.CLOSEST:
            suspects = first_of_each(suspects, MOST_SUSPECTS)
        pairs = {w: made for w, made in self.pairs(here, suspects).items() if w not in singles}
        return self.take(here, pairs, teacher)[0] if pairs else None

    def shows(self, wiring: Wiring, here: Wiring) -> bool:
        """Whether the texts tell two wirings apart at all, where both were scored on."""
        one, other = (self.scorer.rights_known(w) for w in (wiring, here))
        return any(one[i] != other[i] for i in one.keys() & other.keys())

    def take(
        self,
        here: Wiring,
        contestants: dict[Wiring, tuple[Change, ...]],
        teacher: Teacher,
        *,
        quiet: bool = False,
        working: bool = False,
        effort: int = EFFORT,
    ) -> tuple[Wiring | None, Field]:
        """Race them, and take the simplest of the best that is clearly better than what is here.

        `quiet`: that none is, is not said. `working`: only one with which the drafter works is taken.
        """
        field = self.race(here, contestants, teacher, effort, steep=working)
        chosen = self.order[: field.texts]
        right = self.scorer.rights([here, *field.left], chosen, teacher.name)
        positions = self.scorer.positions(chosen, teacher.name)
        value, reach = accuracy_bounds(right[0], right[1:], positions, field.tail)
        better = [
            w
            for i, w in enumerate(field.left)
            if w != here
            and -value[i] > max(float(reach[i]), LEAST_GAIN)
            and self.speaks(w, teacher)
            and (not working or self.works(w))
        ]
        better.sort(key=lambda w: len(here.differing(w)))  # stable: of equals the higher one
        taken = better[0] if better else None
        likelier = None
        if taken is None and not working:
            ahead = [w for i, w in enumerate(field.left) if w != here and value[i] <= 0]
            taken, likelier = self.take_likelier(here, ahead, teacher, field)
        tried = (
            f"{len(contestants)} wirings around {named(self.began, here)} against {teacher.name}"
        )
        if taken is None:
            if not quiet:
                self.say(f"{tried}: none is clearly better")
        elif likelier is not None:
            self.say(
                f"{tried}: took {' and '.join(changes(here, taken))}, cross-entropy of the first step "
                f"{said(likelier)} nats on {field.texts} texts"
            )
        else:
            i = field.left.index(taken)
            gain = bounded(-float(value[i]), float(reach[i]), 1.0)
            self.say(
                f"{tried}: took {' and '.join(changes(here, taken))}, first step {said(gain)} on "
                f"{field.texts} texts"
            )
        return taken, field

    def race(
        self,
        here: Wiring,
        others: Iterable[Wiring],
        teacher: Teacher,
        effort: int = EFFORT,
        *,
        steep: bool = False,
    ) -> Field:
        """Race by the first step, whoever it is beside what is here; who left is remembered."""
        contestants = [here, *others]
        field = race_first(
            self.scorer,
            contestants,
            self.order,
            teacher=teacher.name,
            keep=here,
            rounds=planned_for(len(contestants), len(self.order), effort, steep=steep),
        )
        self.keep_out(field)
        return field

    def take_likelier(
        self, here: Wiring, others: Sequence[Wiring], teacher: Teacher, field: Field
    ) -> tuple[Wiring | None, Difference | None]:
        """Of those who are right as often, the simplest that clearly gives the teacher's choices more
        probability than what is here, with by how much; None where nobody does.

        Training worked for that probability, so this tells what was trained where counts do not.
        """
        close = [w for w in others if w.d2t == here.d2t and self.speaks(w, teacher)][:MOST_LIKELY]
        if not close:
            return None, None
        sums, rows = self.scorer.losses([here, *close], self.order[: field.texts], teacher.name)
        value, reach = loss_bounds(sums[0], sums[1:], rows, field.tail)
        better = [i for i, v in enumerate(value.tolist()) if -v > max(float(reach[i]), LEAST_LOSS)]
        if not better:
            return None, None
        i = min(better, key=lambda i: (len(here.differing(close[i])), float(value[i])))
        return close[i], bounded(float(value[i]), float(reach[i]), math.inf)

    def keep_out(self, field: Field) -> None:
        """Remember who left a race, and who stayed close to its leader."""
        for out in (*field.out, *field.late):
            known = self.out.get(out.wiring)
            if known is None or known.texts <= out.texts:
                self.out[out.wiring] = out
        for wiring, value in zip(field.left, field.values, strict=True):
            self.near[wiring] = value

    def revived(self, here: Wiring, tried: Teacher) -> Wiring | None:
        """Where nothing comes to life: the other teachers, then three changes of which one is d2t.

        Readings of d2t share their logits, so that they cost next to nothing on top of the pairs.
        """
        singles = self.singles(here)
        pairs = self.pairs(here, [change for (change,) in singles.values()])
        triples: dict[Wiring, tuple[Change, ...]] = {}
        for made in pairs.values():
            if not any(change.name in ("d2t", "head") for change in made):
                for value in self.values.get("d2t", []):
                    self.add(triples, here, (*made, Change("d2t", value)))
        others = [teacher for teacher in self.teachers if teacher != tried]
        rounds: list[tuple[dict[Wiring, tuple[Change, ...]], Sequence[Teacher]]] = [
            ({**singles, **pairs}, others),
            ({w: made for w, made in triples.items() if w not in pairs}, self.teachers),
        ]
        for contestants, teachers in rounds:
            for teacher in teachers if contestants else ():
                taken, _ = self.take(here, contestants, teacher, quiet=True, effort=1)
                if taken is not None:
                    return taken
            self.say(
                f"{len(contestants)} wirings around {named(self.began, here)} against each of "
                f"{len(teachers)} teachers: none is more than noise"
            )
        return None

    def late_step(self, here: Wiring) -> Wiring:
        """What shows behind the first step only: all of it at once, by accept length.

        On the served walk, so against the reference; where that says nothing, and the drafter learned
        from another teacher, against that one too.
        """
        names = [name for name in self.values if self.axes[name].shows_from]
        contestants: dict[Wiring, tuple[Change, ...]] = {}
        for values in product(*(self.values[name] for name in names)):
            made = tuple(map(Change, names, values))
            self.add(contestants, here, made)
        teacher, _ = self.teacher(here)
        for truth in dict.fromkeys((self.reference, teacher)):
            if not contestants or not self.alive(here, truth):
                continue
            taken = self.take_length(here, list(contestants), truth.name)
            if taken is not None:
                return taken
        return here

    def take_length(self, here: Wiring, contestants: Sequence[Wiring], truth: str) -> Wiring | None:
        """Race by accept length, and take the simplest that is clearly better."""
        mine = [c[LENGTH] for c in self.scorer.chains(here, self.look, truth)]
        if sum(c.denominator for c in mine) < MANY_ROUNDS and truth != self.reference.name:
            return None
        field = race_chains(
            self.scorer,
            [here, *contestants],
            self.order,
            truth=truth,
            keep=here,
            rounds=planned(len(self.order), EFFORT),
        )
        self.keep_out(field)
        chosen = self.order[: field.texts]
        everyone = [here, *field.left]
        counts = [[c[LENGTH] for c in self.scorer.chains(w, chosen, truth)] for w in everyone]
        value, reach = length_bounds(counts[0], counts[1:], field.tail, steps=self.scorer.steps)
        better = [
            w
            for i, w in enumerate(field.left)
            if w != here and -value[i] > max(float(reach[i]), LEAST_LENGTH)
        ]
        better.sort(key=lambda w: len(here.differing(w)))
        tried = (
            f"{len(contestants)} wirings around {named(self.began, here)} by accept length against "
            f"{truth}"
        )
        if not better:
            self.say(f"{tried}: none is clearly better")
            return None
        i = field.left.index(better[0])
        gain = bounded(-float(value[i]), float(reach[i]), float(self.scorer.steps))
        self.say(
            f"{tried}: took {' and '.join(changes(here, better[0]))}, {said(gain)} on {field.texts} "
            "texts"
        )
        return better[0]


def named(start: Wiring | None, wiring: Wiring) -> str:
    """A wiring by what it has otherwise than the start."""
    different = changes(start, wiring) if start is not None else ()
    return ", ".join(different) or "the start"


def said(gain: Difference) -> str:
    """A difference with its interval."""
    return f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def first_of_each(suspects: Iterable[Change], most: int) -> list[Change]:
    """Of each part of the wiring the first few changes, in the order in which they come."""
    kept: dict[str, list[Change]] = {}
    for change in suspects:
        of_axis = kept.setdefault(change.name, [])
        if len(of_axis) < most:
            of_axis.append(change)
    return [change for of_axis in kept.values() for change in of_axis]

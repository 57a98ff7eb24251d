"""Which cases there are: every kind alone, pairs, sound controls, and damage outside what is known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.planted import (
    alike,
    block,
    captures,
    conversions,
    deployments,
    disguises,
    exports,
    handovers,
    harmless,
    outside,
    recordings,
    ruin,
    settings,
    stored,
    unserved,
    vocabularies,
    wreckage,
)
from bench.planted.draft import Draft, Engine
from bench.planted.drafters import (
    DRAFTERS,
    EARLY_DRAFTER,
    HELD_OUT,
    LAYOUTS,
    TUNING,
    fitting,
    sound,
)
from bench.planted.dumps import LAYOUTS as DUMPS
from bench.planted.kinds import ALONE, ANY, BRINGS, READS, Alike, Kind
from bench.planted.kinds import TUNING as FOR_TUNING

SINGLE, PAIR, SOUND, OUTSIDE = "single", "pair", "sound", "outside"
GROUPS = (SINGLE, PAIR, SOUND, OUTSIDE)
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *block.KINDS,
        *settings.KINDS,
        *stored.KINDS,
        *exports.KINDS,
        *handovers.KINDS,
        *captures.KINDS,
        *vocabularies.KINDS,
        *conversions.KINDS,
        *deployments.KINDS,
        *unserved.KINDS,
        *recordings.KINDS,
    )
}
OUTSIDE_KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (*outside.KINDS, *wreckage.KINDS, *ruin.KINDS)
}
ALIKE: dict[str, Alike] = {
    each.name: each for each in (*alike.ALIKE, *harmless.ALIKE, *disguises.ALIKE)
}
PAIRS, CONTROLS = 30, 150
OUTSIDE_SHARE = 5  # one case in so many is outside
TEXTS = 90  # that every target has written
SIZES = (24, 32, 48, 64, 90)  # of the subsets that sound controls are asked about
# Kinds that are no fault of what is served, and cannot stand beside one; nor can an engine that does
# not start, since nothing else shows behind it.
ALONE_ONLY = ("under-trained", "engine-state", "measurement", "not-served")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, and the right answer."""

    name: str
    group: str
    kinds: tuple[str, ...]  # planted; in a sound control the edit that changes nothing, if any
    drafter: str
    layout: str
    dump: str
    texts: int  # of the target's texts, chosen by the seed
    argmax: bool
    logged: bool  # whether the training log's accuracy is given
    seed: int
    held_out: bool

    @property
    def accepted(self) -> tuple[tuple[str, ...], ...]:
        """For each planted fault, the causes that are right answers."""
        if self.group == SOUND:
            return ()
        return tuple((KINDS | OUTSIDE_KINDS)[name].accepted for name in self.kinds)

    @property
    def kind(self) -> str:
        """What it is counted under."""
        return " + ".join(self.kinds) or "nothing"


def draft_of(case: Case) -> Draft:
    """The draft with everything planted."""
    rng = random.Random(case.seed)
    chosen = tuple(sorted(rng.sample(range(TEXTS), case.texts)))
    draft = sound(DRAFTERS[case.drafter], case.layout, case.dump, chosen, argmax=case.argmax)
    if not case.logged:
        draft.trained_accuracy = None
    if case.group == SOUND:
        each = ALIKE.get(case.kinds[0]) if case.kinds else None
        engines = each.engines(draft) if each else (None, *fitting(draft))
        draft.serve(rng.choice(list(engines)))
        if each is not None:
            each.plant(draft, rng)
        return draft
    known = KINDS | OUTSIDE_KINDS
    kinds = sorted((known[name] for name in case.kinds), key=lambda kind: kind.shows != BRINGS)
    if kinds[0].shows != BRINGS:
        draft.serve(rng.choice(list(engines_for(kinds, draft))))
    for kind in kinds:
        kind.plant(draft, rng)
    return draft


def engines_for(kinds: Sequence[Kind], draft: Draft) -> tuple[Engine | None, ...]:
    """Engines, or None for none, behind which all of these faults show."""
    if any(kind.shows == ALONE for kind in kinds):
        return (None,)
    reads = any(kind.shows == READS for kind in kinds)
    fit = tuple(e for e in fitting(draft) if not reads or e.name == "vllm")
    return (None, *fit)


def together(one: Kind, other: Kind) -> bool:
    """Whether two faults can be planted in one draft and both show."""
    if one.cause == other.cause or set(one.touches) & set(other.touches):
        return False
    if one.cause in ALONE_ONLY or other.cause in ALONE_ONLY:
        return False
    if BRINGS in (one.shows, other.shows):  # the other has to show behind whatever engine that is
        return ANY in (one.shows, other.shows)
    return True


class Maker:
    """Draws the settings of cases, each from its own name, so that cases stay as they are."""

    def __init__(self, seed: int, *, held_out: bool) -> None:
        self.seed, self.held_out = seed, held_out

    def case(
        self,
        group: str,
        kinds: tuple[str, ...],
        drafter: str,
        layout: str,
        number: int = 0,
        texts: int | None = None,
    ) -> Case:
        """One case."""
        name = "-".join(
            [group, *(k.replace("/", ".") for k in kinds), drafter, layout, str(number)]
        )
        rng = random.Random(f"{self.seed} {name}")
        return Case(
            name=name,
            group=group,
            kinds=kinds,
            drafter=drafter,
            layout=layout,
            dump=rng.choice(DUMPS),
            texts=texts or rng.choice((48, 64)),
            argmax=rng.random() < 0.75,
            logged=rng.random() < 0.5,
            seed=rng.randrange(1 << 62),
            held_out=self.held_out,
        )

    def drafters(self, use: str) -> tuple[str, ...]:
        """Kinds for tuning are reported on the third drafter; the others on all three."""
        if not self.held_out:
            return tuple(lab.name for lab in TUNING)
        labs = HELD_OUT if use == FOR_TUNING else (*TUNING, *HELD_OUT)
        return tuple(lab.name for lab in labs)

    def wanted(self, use: str) -> bool:
        """Whether kinds of this use belong to the set at all."""
        return self.held_out or use == FOR_TUNING

    def places(self, kind: Kind | Alike) -> Iterator[tuple[str, str]]:
        """Drafters and layouts in which a kind can be planted."""
        if not self.wanted(kind.use):
            return
        names = self.drafters(kind.use)
        if kind.name.startswith("under-trained"):  # the same drafter in both sets, so a kind in one
            names = (EARLY_DRAFTER.name,) if self.held_out == (kind.use != FOR_TUNING) else ()
        for drafter in names:
            for layout in LAYOUTS:
                if kind.why_not(plain(drafter, layout)) is None:
                    yield drafter, layout

    def singles(self) -> Iterator[Case]:
        """Every kind in every drafter and layout that can have it."""
        for kind in KINDS.values():
            for drafter, layout in self.places(kind):
                yield self.case(SINGLE, (kind.name,), drafter, layout)

    def pairs(self, count: int = PAIRS) -> Iterator[Case]:
        """Random pairs."""
        places = {kind: list(self.places(kind)) for kind in KINDS.values()}
        rng = random.Random(f"{self.seed} pairs {self.held_out}")
        drawn: set[tuple[str, ...]] = set()
        possible = [
            (drafter, layout, one, other)
            for one in places
            for other in places
            if one.name < other.name and together(one, other)
            for drafter, layout in places[one]
            if (drafter, layout) in places[other]
        ]
        rng.shuffle(possible)
        causes: dict[str, int] = {}
        for drafter, layout, one, other in possible:  # no cause more often than the others
            if len(drawn) == count:
                return
            if max(causes.get(one.cause, 0), causes.get(other.cause, 0)) > count // 5:
                continue
            names = (one.name, other.name)
            if names in drawn:
                continue
            drawn.add(names)
            for kind in (one, other):
                causes[kind.cause] = causes.get(kind.cause, 0) + 1
            yield self.case(PAIR, names, drafter, layout)

    def controls(self, count: int = CONTROLS) -> Iterator[Case]:
        """Sound drafters, plain and disguised, on subsets of several sizes."""
        labs = HELD_OUT if self.held_out else TUNING
        plain_ones = [
            self.case(SOUND, (), lab.name, layout, number, texts=SIZES[number % len(SIZES)])
            for number in range(count)
            for lab in labs
            for layout in LAYOUTS
        ]
        places = {each.name: list(self.places(each)) for each in ALIKE.values()}
        disguised = [
            self.case(SOUND, (name,), drafter, layout) for name, drafter, layout in around(places)
        ]
        share = disguised[: count // 2]
        yield from share
        yield from plain_ones[: count - len(share)]

    def damaged(self, others: int) -> Iterator[Case]:
        """So many cases of damage that they are one in OUTSIDE_SHARE of all, going round by kind:
        none stands there twice before each does once.
        """
        rng = random.Random(f"{self.seed} outside {self.held_out}")
        places = {kind.name: list(self.places(kind)) for kind in OUTSIDE_KINDS.values()}
        for of_kind in places.values():
            rng.shuffle(of_kind)
        once = list(around(places))
        for number in range(-(-others // (OUTSIDE_SHARE - 1))):
            name, drafter, layout = once[number % len(once)]
            yield self.case(OUTSIDE, (name,), drafter, layout, number // len(once))


def around(
    places: Mapping[str, Sequence[tuple[str, str]]],
) -> Iterator[tuple[str, str, str]]:
    """Every kind with each of its places, the first of every kind before the second of any."""
    for turn in range(max(map(len, places.values()))):
        for name, of_kind in places.items():
            if turn < len(of_kind):
                yield name, *of_kind[turn]


def all_cases(seed: int, *, held_out: bool) -> list[Case]:
    """The whole set for tuning, or the one that is reported."""
    maker = Maker(seed, held_out=held_out)
    others = [*maker.singles(), *maker.pairs(), *maker.controls()]
    return [*others, *maker.damaged(len(others))]


def sample(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """A stratified sample: every group by its share, then kinds as different as they come."""
    rng = random.Random(f"{seed} sample")
    chosen: list[Case] = []
    for group in GROUPS:
        of_group = [case for case in cases if case.group == group]
        rng.shuffle(of_group)
        seen: dict[str, int] = {}
        order = []
        for case in of_group:
            seen[case.kind] = seen.get(case.kind, 0) + 1
            order.append((seen[case.kind], case))
        order.sort(key=lambda pair: pair[0])
        share = round(count * len(of_group) / len(cases))
        chosen += [case for _, case in order[:share]]
    return chosen[:count]


def plain(drafter: str, layout: str) -> Draft:
    """A sound draft to ask what can be planted in it."""
    return sound(DRAFTERS[drafter], layout, "pt_shards", (0,))

"""Races: many wirings on few texts, and ever fewer on ever more.

After each round, whoever is clearly behind the leader leaves: the paired interval of the difference,
corrected for who is left and for all rounds, lies above 0. Where many cannot be told apart, only the
best of them go on, so that no round costs more than the first; that is no bound, and is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.metrics import Count, Difference, Rate, Truth, pooled_ratio, summarise
from eagle3.search.axes import changes
from eagle3.search.bounds import (
    accuracy_bounds,
    bounded,
    length_bounds,
    length_difference,
    tail_of,
)
from eagle3.search.results import Dropped, Raced, Ranked
from eagle3.search.score import Scorer
from eagle3.wiring import Wiring

FIRST_TEXTS = 6  # of the first round; each later one takes twice as many
# Of more contestants fewer texts tell first whom to go on with.
MANY, FEW_TEXTS, LEAST_STAY, STEEP_STAY = 200, 2, 50, 12
MANY_TEXTS = 16  # of which a part would be too few
LENGTH = "accept_length"


@dataclass(frozen=True, kw_only=True)
class Out:
    """Who left, and how far behind."""

    wiring: Wiring
    texts: int
    positions: int
    accuracy: float  # of its first step
    behind: Difference
    why: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round takes the first `texts`; at most so many wirings go on from it."""

    texts: int
    most: int | None  # None: all who are not clearly behind


@dataclass(kw_only=True)
class Field:
    """Who is left of a race, the leader first."""

    left: list[Wiring]
    values: list[float]  # of those who are left
    out: list[Out] = field(default_factory=list)  # clearly behind
    late: list[Out] = field(default_factory=list)  # not clearly behind, but no place for them
    texts: int = 0
    tail: float  # to each side of a difference, corrected for all who began and for all rounds
    ahead: bool = False  # the leader is ahead of whom was to be kept, so corrected


def text_order(count: int, seed: int) -> list[int]:
    """The order in which texts are taken, so that the first ones are spread over the data."""
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randperm(count, generator=generator)]


def growing(count: int) -> list[int]:
    """How many texts each round takes."""
    sizes, size = [], FIRST_TEXTS
    while size * 1.5 < count:
        sizes.append(size)
        size *= 2
    return [*sizes, count]


def planned(count: int, effort: int = 1) -> list[Round]:
    """The rounds of a race over so many texts, none of which costs more than `effort` wirings on all."""
    sizes = growing(count)
    cut = [max(2, effort * count // size) for size in sizes[1:]]
    return [Round(texts=size, most=most) for size, most in zip(sizes, [*cut, None], strict=True)]


def planned_for(contestants: int, count: int, effort: int, *, steep: bool = False) -> list[Round]:
    """`planned` rounds, behind one on very few texts where contestants are many.

    `steep` where only one that is far ahead is looked for: then few go on, however many begin.
    """
    rounds = planned(count, effort)
    if (steep or contestants > MANY) and rounds[0].texts > FEW_TEXTS:
        stay = STEEP_STAY if steep else max(LEAST_STAY, effort * count // FEW_TEXTS)
        rounds.insert(0, Round(texts=FEW_TEXTS, most=stay))
    return rounds


def race_first(
    scorer: Scorer,
    contestants: Sequence[Wiring],
    order: Sequence[int],
    *,
    teacher: str,
    keep: Wiring | None = None,
    rounds: Sequence[Round] | None = None,
) -> Field:
    """Race by the first step's agreement with a teacher; `keep` stays whatever it scores.

    `rounds` are `planned` ones if left out. Ends before the last one where one wiring is left, or the
    leader is clearly ahead of `keep`.
    """

    def measure(left: Sequence[Wiring], chosen: Sequence[int]) -> Measured | None:
        right = scorer.rights(left, chosen, teacher)
        positions = scorer.positions(chosen, teacher)
        total = int(positions.sum())
        if not total:
            return None
        accuracies = (right.sum(1) / total).tolist()
        return Measured(
            values=accuracies,
            accuracies=accuracies,
            positions=total,
            limit=1.0,
            lead=lambda leader, tail: accuracy_bounds(right[leader], right, positions, tail),
        )

    return run_race(
        contestants,
        order,
        measure,
        keep=keep,
        rounds=rounds or planned(len(order)),
        what="its first step",
        nothing=f"no text has a scored position at which {teacher} is known",
    )


def race_chains(
    scorer: Scorer,
    contestants: Sequence[Wiring],
    order: Sequence[int],
    *,
    truth: str,
    keep: Wiring | None = None,
    rounds: Sequence[Round] | None = None,
) -> Field:
    """Race by accept length on the served walk; as race_first otherwise.

    Whose rounds cannot be counted to their end stands at the lowest, but is not clearly behind.
    """

    def measure(left: Sequence[Wiring], chosen: Sequence[int]) -> Measured | None:
        scorer.draft(left, chosen)
        counts = [scorer.chains(wiring, chosen, truth) for wiring in left]
        lengths = [[c[LENGTH] for c in texts] for texts in counts]
        if not any(c.denominator for texts in lengths for c in texts):
            return None
        accuracies = [[c["accuracy"] for c in texts] for texts in counts]
        return Measured(
            values=[pooled(texts, 1.0) for texts in lengths],
            accuracies=[pooled(texts, 0.0) for texts in accuracies],
            positions=sum(c.denominator for c in accuracies[0]),
            limit=float(scorer.steps),
            lead=lambda leader, tail: length_bounds(
                lengths[leader], lengths, tail, steps=scorer.steps
            ),
        )

    return run_race(
        contestants,
        order,
        measure,
        keep=keep,
        rounds=rounds or planned(len(order)),
        what="its accept length",
        nothing=no_rounds(scorer.steps),
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Contestants on some texts; `lead` gives a leader's differences to all, and their reach."""

    values: Sequence[float]  # what is raced by
    accuracies: Sequence[float]
    positions: int
    limit: float  # no difference is greater
    lead: Callable[[int, float], tuple[Tensor, Tensor]]


def run_race(
    contestants: Sequence[Wiring],
    order: Sequence[int],
    measure: Callable[[Sequence[Wiring], Sequence[int]], Measured | None],
    *,
    keep: Wiring | None,
    rounds: Sequence[Round],
    what: str,
    nothing: str,
) -> Field:
    """The rounds of a race; raises BadInput where even all texts give nothing to measure."""
    left = list(dict.fromkeys(contestants))
    race = Field(left=left, values=[], tail=tail_of((len(left) - 1) * len(rounds)))
    for turn in rounds:
        size = turn.texts
        found = measure(left, order[:size])
        if found is None:
            continue
        leader = leading(found.values, left, keep)
        value, reach = found.lead(leader, tail_of((len(left) - 1) * len(rounds)))
        behind = [
            bounded(float(v), float(r), found.limit) for v, r in zip(value, reach, strict=True)
        ]
        clearly = [i != leader and d.low > 0 for i, d in enumerate(behind)]
        _, far = found.lead(leader, race.tail)
        stays = [i for i, wiring in enumerate(left) if not clearly[i] or wiring == keep]
        stays.sort(key=lambda i: (i != leader, left[i] != keep, -found.values[i]))
        race.ahead = any(
            left[i] == keep and i != leader and float(value[i]) > float(far[i]) for i in stays
        )
        most = len(left) if turn.most is None else turn.most
        reasons = {
            True: f"{what} is clearly behind the leader's on {size} texts",
            False: f"{what} is not clearly behind on {size} texts, but the {most} that go on score "
            "higher",
        }
        for i, wiring in enumerate(left):
            if i in stays[:most]:
                continue
            (race.out if clearly[i] else race.late).append(
                Out(
                    wiring=wiring,
                    texts=size,
                    positions=found.positions,
                    accuracy=found.accuracies[i],
                    behind=behind[i],
                    why=reasons[clearly[i]],
                )
            )
        stays = stays[:most]
        race.values, race.texts = [found.values[i] for i in stays], size
        left = race.left = [left[i] for i in stays]
        if len(left) == 1 or (len(left) == 2 and race.ahead):
            break
    if not race.values:
        raise BadInput(nothing)
    return race


def leading(values: Sequence[float], left: Sequence[Wiring], keep: Wiring | None) -> int:
    """Who leads; of equals the one to be kept, then the first."""
    best = max(values)
    if keep is not None and keep in left and values[left.index(keep)] == best:
        return left.index(keep)
    return values.index(best)


def pooled(texts: Sequence[Count], lowest: float) -> float:
    """A ratio of sums; the lowest that there is where nothing was counted."""
    found = pooled_ratio(texts)
    return lowest if found is None else found


def no_rounds(steps: int) -> str:
    """Why there is no accept length."""
    return (
        f"no text has a scored position with {steps} known ones behind it, so that there is no accept "
        "length; use fewer job.steps or longer texts"
    )


def race(
    scorer: Scorer,
    wirings: Sequence[Wiring],
    *,
    teacher: str,
    truth: str | None = None,
    seed: int = 0,
    start: Wiring | None = None,
) -> Raced:
    """The best of a list of resolved wirings by accept length on the served walk.

    The many are raced by their first step against `teacher` on a quarter of the texts; of the two that
    it cannot tell apart the better one there by whole chains against `truth` (`teacher`, if left out).
    The leader alone is scored on all. `changed` is against `start`, or the first of the list.
    """
    truth = truth or teacher
    start = start or wirings[0]
    order = text_order(len(scorer.texts), seed)
    dropped, able = [], []
    for wiring in dict.fromkeys(wirings):
        if why := scorer.why_not(wiring):
            dropped.append(impossible(start, wiring, why))
        else:
            able.append(wiring)
    if not able:
        raise BadInput(f"none of {len(dropped)} wirings can be scored: {dropped[0].why}")
    few = quarter(len(order))
    early = [r for r in planned(len(order)) if r.texts < few]
    fields = [
        race_first(scorer, able, order, teacher=teacher, rounds=[*early, Round(texts=few, most=2)])
    ]
    left = fields[0].left
    if len(left) > 1:
        last = [Round(texts=few, most=None)]
        fields.append(race_chains(scorer, left, order, truth=truth, rounds=last))
        left = fields[1].left
    (best,) = rank(
        scorer, left[:1], teacher=teacher, truth=truth, seed=seed, start=start, comparisons=0
    )
    ties: list[Ranked] = []
    if len(left) > 1:
        chosen = sorted(order[:few])
        against = [best.counts[i][LENGTH] for i in chosen]
        ties = rank(
            scorer,
            left[1:],
            teacher=teacher,
            truth=truth,
            seed=seed,
            start=start,
            comparisons=len(able) - 1,
            chosen=chosen,
            against=against,
        )
    dropped += [as_dropped(start, out) for f in fields for out in (*f.out, *f.late)]
    return Raced(best=best, ties=tuple(ties), dropped=by_distance(dropped), scored=len(able))


def quarter(count: int) -> int:
    """How many texts decide a race; all of them, where there are few."""
    return max(min(count, MANY_TEXTS), count // 4)


def by_distance(dropped: Sequence[Dropped]) -> tuple[Dropped, ...]:
    """The closest first, what could not be scored last."""
    return tuple(sorted(dropped, key=lambda d: d.behind.value if d.behind else float("inf")))


def impossible(start: Wiring, wiring: Wiring, why: str) -> Dropped:
    """A wiring that cannot be scored."""
    return Dropped(
        wiring=wiring,
        changed=changes(start, wiring),
        texts=0,
        positions=0,
        accuracy=None,
        behind=None,
        why=why,
    )


def as_dropped(start: Wiring, out: Out) -> Dropped:
    """What left, as results have it."""
    return Dropped(
        wiring=out.wiring,
        changed=changes(start, out.wiring),
        texts=out.texts,
        positions=out.positions,
        accuracy=out.accuracy,
        behind=out.behind,
        why=out.why,
    )


def rank(
    scorer: Scorer,
    wirings: Sequence[Wiring],
    *,
    teacher: str,
    truth: str,
    seed: int,
    start: Wiring,
    comparisons: int,
    chosen: Sequence[int] | None = None,
    against: Sequence[Count] = (),
) -> list[Ranked]:
    """Wirings scored to the end of their chains, in the order given, on all texts unless `chosen`.

    The first is the one that the others are behind, unless its accept lengths are given: `against`.
    Differences are corrected for `comparisons`: all that raced, since these were picked among them.
    Where no round of one can be counted to its end, its accept length is the lowest, and may be any;
    of the first there has to be one.
    """
    chosen = range(len(scorer.texts)) if chosen is None else sorted(chosen)
    scorer.draft(wirings, chosen)
    best = list(against)
    ranked = []
    for wiring in wirings:
        counts = scorer.chains(wiring, chosen, truth)
        metrics, curves, _ = summarise(counts, Truth(truth), scorer.steps, seed)
        lacking = [name for name in ("accuracy", "coverage", LENGTH) if name not in metrics]
        if lacking and (not best or lacking != [LENGTH]):
            raise BadInput(no_rounds(scorer.steps))
        lengths = [c[LENGTH] for c in counts]
        behind = None
        if best:
            behind = length_difference(best, lengths, comparisons=comparisons, steps=scorer.steps)
        else:
            best = lengths
        ranked.append(
            Ranked(
                wiring=wiring,
                changed=changes(start, wiring),
                teacher=teacher,
                accuracy=metrics["accuracy"],
                accept_length=metrics.get(LENGTH) or any_length(scorer.steps, truth),
                coverage=metrics["coverage"],
                curves=curves,
                counts=counts,
                behind=behind,
                tied=behind is not None and behind.low <= 0 <= behind.high,
            )
        )
    return ranked


def any_length(steps: int, truth: str) -> Rate:
    """The accept length of which nothing was counted."""
    return Rate(value=1.0, low=1.0, high=steps + 1.0, numerator=0, denominator=0, truth=truth)

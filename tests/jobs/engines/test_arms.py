"""Pairs change their order, end when they are precise, and what disturbs them is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jobs.engines.arms import (
    BASELINE,
    SPECULATIVE,
    Budget,
    Measured,
    block,
    enough,
    together,
)
from jobs.engines.figures import t975
from jobs.engines.records import Facts, Pass
from jobs.engines.started import Running
from jobs.engines.talk import Address
from tests.jobs.engines.made import answered, one_pass

LONG = 1e6  # minutes


def running(label: str, number: int = 0) -> Running:
    """A server that is only named."""
    return Running(
        label=label,
        number=number,
        address=Address(host="127.0.0.1", port=1),
        facts=Facts(engine="sglang", version=None, model=None, drafter=None, flags={}),
        ready_s=0.0,
        command=(),
        server=None,
    )


PLAIN, DRAFTED = running(BASELINE), running(SPECULATIVE)


def budget(**given: Any) -> Budget:
    made = {"pairs": 8, "least": 3, "precision": 0.0, "minutes": LONG, "repeats": 0}
    return Budget(**{**made, **given})


class Asked:
    """Answers each pass of a server as told: 8 tokens in `seconds` of them."""

    def __init__(
        self,
        seconds: Callable[[str, int, int], float] = lambda arm, level, number: 1.0,
        disturbed: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        self.seconds, self.disturbed = seconds, set(disturbed)
        self.order: list[tuple[str, int, int]] = []

    def __call__(self, server: Running, level: int, number: int) -> Pass:
        key = (server.label, level, number)
        self.order.append(key)
        return one_pass(
            answered(8),
            wall_s=self.seconds(*key),
            arm=server.label,
            server=server.number,
            number=number,
            concurrency=level,
            disturbed=("somebody else",) if key in self.disturbed else (),
        )


def measure(ask: Asked, levels: Iterable[int] = (1,), **given: Any) -> Measured:
    measured = Measured()
    together(PLAIN, DRAFTED, ask, list(levels), budget(**given), measured)
    return measured


def twice(arm: str, level: int, number: int) -> float:
    """A drafter that is exactly twice as fast."""
    return 0.5 if arm == SPECULATIVE else 1.0


def uneven(arm: str, level: int, number: int) -> float:
    """A drafter that is by turns 1.2 and 1.8 times as fast."""
    return 1 / (1.2, 1.8)[number % 2] if arm == SPECULATIVE else 1.0


def test_the_order_changes_from_pair_to_pair() -> None:
    ask = Asked()
    measure(ask, pairs=4, least=4)
    b, s = BASELINE, SPECULATIVE
    assert [(arm, number) for arm, _, number in ask.order] == [
        *[(b, 0), (s, 0), (s, 1), (b, 1), (b, 2), (s, 2), (s, 3), (b, 3)]
    ]


def test_a_speedup_that_is_precise_ends_with_the_least_pairs() -> None:
    measured = measure(Asked(twice), pairs=8, least=3, precision=0.03)
    assert len(measured.pairs(1)) == 3
    found = measured.speedup(1)
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))
    assert measured.notes == []


def test_one_pair_alone_is_never_precise() -> None:
    assert len(measure(Asked(twice), pairs=8, least=1, precision=0.5).pairs(1)) == 2
    assert len(measure(Asked(twice), pairs=1, least=1, precision=0.5).pairs(1)) == 1


def test_a_speedup_that_is_not_ends_with_the_pairs() -> None:
    assert len(measure(Asked(uneven), pairs=6, precision=0.03).pairs(1)) == 6


def test_precision_is_the_intervals_reach_beside_its_value() -> None:
    # By turns 1.2 and 1.8: of 2n pairs the logarithms deviate by d √(2n / (2n - 1)).
    d = math.log(1.8 / 1.2) / 2
    pairs = 6
    reach = math.exp(t975(pairs - 1) * d / math.sqrt(pairs - 1)) - 1
    measured = measure(Asked(uneven), pairs=pairs)
    assert enough(measured, 1, budget(pairs=pairs + 1, precision=reach + 1e-6))
    assert not enough(measured, 1, budget(pairs=pairs + 1, precision=reach - 1e-6))


def test_minutes_end_a_measurement_behind_a_whole_round_and_are_told() -> None:
    ask = Asked(uneven)
    measured = measure(ask, levels=(1, 8), minutes=0.0)
    assert [len(measured.pairs(level)) for level in (1, 8)] == [1, 1]
    (note,) = measured.notes
    assert note.startswith("ended by job.budget.minutes=0 after 1 pairs; the interval is as wide")


def test_minutes_that_end_with_the_last_pair_are_not_told() -> None:
    assert measure(Asked(), pairs=1, least=1, minutes=0.0).notes == []


def test_each_concurrency_ends_by_itself() -> None:
    def seconds(arm: str, level: int, number: int) -> float:
        return twice(arm, level, number) if level == 1 else uneven(arm, level, number)

    measured = measure(Asked(seconds), levels=(1, 8), pairs=5, least=2, precision=0.03)
    assert [len(measured.pairs(level)) for level in (1, 8)] == [2, 5]


def test_a_disturbed_pair_is_measured_again_and_left_out() -> None:
    def seconds(arm: str, level: int, number: int) -> float:
        return 100.0 if (arm, number) == (SPECULATIVE, 1) else twice(arm, level, number)

    ask = Asked(seconds, [(SPECULATIVE, 1, 1)])
    measured = measure(ask, pairs=3, least=3, repeats=2)
    assert [a.number for a, _ in measured.pairs(1)] == [0, 2, 3]
    assert len(measured.passes) == 8
    found = measured.speedup(1)
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert [p.number for p in measured.of(SPECULATIVE, 1)] == [0, 2, 3]
    assert measured.notes == [
        "pair 1 at 1 at once was disturbed (somebody else); it is measured again"
    ]


def test_when_the_repeats_are_used_up_that_is_told_and_the_measurement_ends() -> None:
    every = [(SPECULATIVE, 1, number) for number in range(20)]
    ask = Asked(uneven, every)
    measured = measure(ask, pairs=3, least=3, repeats=2)
    assert len(measured.pairs(1)) == 5  # there are no others
    assert [note.rpartition("; ")[2] for note in measured.notes] == [
        *2 * ["it is measured again"],
        *3 * ["it is not measured again (job.budget.repeats)"],
    ]


def test_a_pair_counts_as_disturbed_if_one_of_its_passes_was() -> None:
    ask = Asked(twice, [(BASELINE, 1, 0), (SPECULATIVE, 1, 1)])
    measured = measure(ask, pairs=2, least=2, repeats=2)
    assert [a.number for a, _ in measured.pairs(1)] == [2, 3]


def blocks(*baselines: tuple[float, ...], drafted: tuple[float, ...]) -> Measured:
    """Baselines and a drafter, one server after the other, by their passes' seconds."""
    measured = Measured()
    for number, seconds in enumerate(baselines):
        server = running(BASELINE, number)
        block(server, Asked(lambda a, b, n, s=seconds: s[n]), [1], len(seconds), measured)  # type: ignore[misc]
    block(DRAFTED, Asked(lambda a, b, n: drafted[n]), [1], len(drafted), measured)
    return measured


def test_two_starts_of_the_baseline_widen_the_interval_around_both() -> None:
    measured = blocks((1.0, 1.0), (1.21, 1.21), drafted=(0.5, 0.5))
    found = measured.speedup(1)
    assert found is not None
    # 2 against the first start and 2.42 against the second: their geometric mean is 2.2.
    assert found.value == pytest.approx(2.2)
    assert (found.low, found.high) == pytest.approx((2.0, 2.42))
    assert found.count == 4


def test_each_starts_own_interval_lies_within() -> None:
    wobbling = blocks((1.0, 1.1), (1.2, 1.2), drafted=(0.5, 0.5))
    alone = blocks((1.0, 1.1), drafted=(0.5, 0.5))
    found, own = wobbling.speedup(1), alone.speedup(1)
    assert found is not None
    assert own is not None
    assert found.low is not None
    assert found.low == own.low
    assert found.high == own.high


def test_a_start_with_one_pair_leaves_no_interval() -> None:
    found = blocks((1.0,), (1.2,), drafted=(0.5,)).speedup(1)
    assert found is not None
    assert found.plain() == {"value": pytest.approx(math.sqrt(2.0 * 2.4))}


def test_what_two_starts_differ_by_is_told() -> None:
    # 8 tok/s, and in the mean of 8 and 4 that is 6.
    measured = blocks((1.0, 1.0), (1.0, 2.0), drafted=(0.5, 0.5))
    assert measured.between_starts(1) == pytest.approx(8 / 6 - 1)
    assert blocks((1.0, 1.0), drafted=(0.5, 0.5)).between_starts(1) is None


def test_without_a_baseline_there_is_no_speedup() -> None:
    measured = blocks(drafted=(0.5, 0.5))
    assert measured.speedup(1) is None
    assert measured.between_starts(1) is None
    assert measured.of(BASELINE, 1) == []


def test_a_disturbed_pass_of_a_block_is_told_and_left_out_where_others_are_left() -> None:
    measured = Measured()
    block(DRAFTED, Asked(twice, [(SPECULATIVE, 1, 1)]), [1], 3, measured)
    assert [p.number for p in measured.of(SPECULATIVE, 1)] == [0, 2]
    assert measured.notes == [
        "pass 1 of speculative at 1 at once was disturbed (somebody else); where others were not, it "
        "is left out"
    ]

"""Figures by context and over time, of requests whose counters are chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from jobs.engines import figures
from jobs.engines.breakdown import Bucket, by_context, in_words, over_time, trend
from jobs.engines.records import Answered, Counters, Pass
from tests.jobs.engines.made import answered, one_pass

MOST = 4


def asked(context: int, length: float, name: str = "", *, rounds: int = 20) -> Answered:
    """A request of `rounds` rounds that gives `length` tokens a round, each round a second."""
    gained = round(rounds * length)
    return answered(
        gained + 1,
        prompt=name or f"{context}",
        prompt_tokens=context,
        accepted=gained - rounds,
        rounds=rounds,
        first_token_s=0.5,
        latency_s=0.5 + rounds,
    )


def several(context: int, length: float) -> list[Answered]:
    """Prompts of one length, all alike."""
    return [asked(context, length, f"{context}/{n}") for n in range(4)]


def buckets(*passes: Pass, plain: Sequence[Pass] = ()) -> list[Bucket]:
    return by_context(passes, plain, MOST, seed=0)


def test_each_prompt_is_in_the_bucket_between_two_powers_of_two() -> None:
    found = buckets(one_pass(*(asked(n, 2.0) for n in (8, 15, 16, 31, 32, 1))))
    assert [(b.start, b.end, b.prompts) for b in found] == [
        (1, 2, 1),
        (8, 16, 2),
        (16, 32, 2),
        (32, 64, 1),
    ]


def test_each_bucket_has_its_own_figures_by_the_same_definitions() -> None:
    found = buckets(one_pass(asked(10, 3.0), asked(100, 2.0), asked(12, 2.0, rounds=60)))
    short, long = found
    assert short.accept_length is not None
    assert long.accept_length is not None
    # 60 + 120 tokens in 80 rounds of a second; 40 in 20.
    assert (short.accept_length.numerator, short.accept_length.denominator) == (180, 80)
    assert short.decode_tok_s.value == pytest.approx(180 / 80)
    assert (long.accept_length.numerator, long.accept_length.denominator) == (40, 20)
    assert long.decode_tok_s.value == pytest.approx(2.0)


def test_buckets_together_are_the_whole() -> None:
    passes = [one_pass(*(asked(n, 1 + n % 3, f"{n}") for n in range(5, 90, 7)))] * 2
    found = buckets(*passes)
    whole = figures.accept_length(passes, MOST, seed=0)
    assert whole is not None
    lengths = [b.accept_length for b in found if b.accept_length]
    assert len(lengths) == len(found) > 3
    assert sum(r.numerator for r in lengths) == whole.numerator
    assert sum(r.denominator for r in lengths) == whole.denominator


def test_a_bucket_without_rounds_is_left_out() -> None:
    silent = answered(1, prompt_tokens=100, rounds=0, accepted=0, latency_s=0.5)
    unverified = answered(5, prompt_tokens=1000, rounds=0, accepted=0)
    found = buckets(one_pass(asked(10, 2.0), silent, unverified))
    assert [b.start for b in found] == [8]


def test_where_requests_are_not_counted_each_only_their_speed_is_known() -> None:
    quick = answered(9, prompt_tokens=10, latency_s=2.5)  # 8 tokens in 2 s behind the first
    slow = answered(9, prompt_tokens=100, latency_s=8.5)
    counted = Counters(rounds=8, accepted=8)
    found = buckets(one_pass(quick, slow, counted=counted, concurrency=2))
    assert [(b.accept_length, b.decode_tok_s.value) for b in found] == [
        (None, pytest.approx(4.0)),
        (None, pytest.approx(1.0)),
    ]
    assert in_words(found, []) == []


def test_beside_a_bucket_stands_the_baseline_on_the_same_prompts() -> None:
    plain = one_pass(
        answered(9, prompt_tokens=10, latency_s=2.5), answered(9, prompt_tokens=100, latency_s=8.5)
    )
    found = buckets(one_pass(asked(10, 3.0), asked(100, 1.0)), plain=[plain])
    assert [b.baseline.value for b in found if b.baseline] == pytest.approx([4.0, 1.0])
    assert found[0].plain()["decode_tok_s_baseline"] == {"value": pytest.approx(4.0)}


def test_a_drafter_that_works_on_short_contexts_only_is_told() -> None:
    found = buckets(one_pass(*several(10, 3.5), *several(100, 2.0), *several(1100, 1.25)))
    (line,) = in_words(found, [])
    assert line.startswith(
        "the accept length is 3.50 [3.50, 3.50] on prompts of 8 to 15 tokens, but "
    )
    assert "1.25 [1.25, 1.25] on those of 1024 to 2047 (decode tok/s 3.5 and 1.2)" in line


def test_contexts_whose_intervals_overlap_are_no_news() -> None:
    short = [asked(10, length, f"s{n}") for n, length in enumerate((1.0, 2.0, 3.0, 4.0))]
    long = [asked(100, length, f"l{n}") for n, length in enumerate((1.0, 2.0, 3.0, 3.0))]
    assert in_words(buckets(one_pass(*short, *long)), []) == []
    # One prompt alone says nothing of its like.
    assert in_words(buckets(one_pass(asked(10, 3.5), *several(100, 1.25))), []) == []
    assert in_words(buckets(one_pass(*several(10, 3.5))), []) == []


def test_passes_come_in_the_order_in_which_they_were_run() -> None:
    later = one_pass(asked(10, 2.0), began=1060.0, number=1)
    first = one_pass(asked(10, 3.0), began=1000.0, number=0)
    found = over_time([later, first], MOST, seed=0)
    assert [(m.number, m.after_s, m.decode_tok_s) for m in found] == [
        (0, 0.0, pytest.approx(3.0)),
        (1, 60.0, pytest.approx(2.0)),
    ]
    assert [m.accept_length.numerator for m in found if m.accept_length] == [60, 40]
    plain = found[1].plain()
    assert (plain["number"], plain["after_s"]) == (1, 60.0)
    assert plain["accept_length"]["value"] == 2.0


def test_a_pass_in_which_nothing_was_decoded_has_no_speed() -> None:
    (found,) = over_time([one_pass(answered(1))], MOST, seed=0)
    assert (found.decode_tok_s, found.accept_length) == (None, None)
    assert in_words([], [found]) == []


def test_a_trend_is_the_line_through_the_logarithms() -> None:
    # From 8 to 1 in equal steps: whatever the clock, an eighth, and nothing is left beside the line.
    found = trend([(10.0, 8.0), (20.0, 4.0), (30.0, 2.0), (40.0, 1.0)])
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((1 / 8, 1 / 8, 1 / 8))


def test_a_trends_interval_is_students() -> None:
    # ln y is 0, d, 0 at 0, 1, 2: no slope, the rest d·(-1, 2, -1)/3 with squares 2d²/3; one degree of
    # freedom and a spread of 2 make the slope's error d/√3, over two seconds.
    d = 0.01
    found = trend([(0.0, 1.0), (1.0, math.exp(d)), (2.0, 1.0)])
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert found.high == pytest.approx(math.exp(2 * 12.706204736 * d / math.sqrt(3)))
    assert found.low == pytest.approx(1 / found.high)


@pytest.mark.parametrize(
    "points", [[], [(0.0, 1.0)], [(0.0, 1.0), (1.0, 2.0)], [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]]
)
def test_too_few_points_have_no_trend(points: list[tuple[float, float]]) -> None:
    assert trend(points) is None


def run(*lengths: float) -> list[str]:
    """What is said of passes with these accept lengths, a minute apart."""
    passes = [
        one_pass(asked(10, length, rounds=100), began=60.0 * n, number=n)
        for n, length in enumerate(lengths)
    ]
    return in_words([], over_time(passes, MOST, seed=0))


def test_a_server_that_gets_worse_is_told() -> None:
    length, speed = run(3.2, 3.1, 3.0, 2.9, 2.8, 2.7)
    assert length.startswith("the accept length fell from 3.20 to 2.70 over 6 passes in 300 s: -15")
    assert speed.startswith("decode tok/s fell from 3.20 to 2.70 over 6 passes")


def test_one_that_is_worse_from_some_pass_on_is_told() -> None:
    assert len(run(3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0)) == 2


@pytest.mark.parametrize(
    "lengths",
    [
        (3.0, 3.0, 3.0, 3.0, 3.0),  # nothing moves
        (3.0, 2.5, 3.0, 2.5, 3.0, 2.5),  # the last is lower, but as low as others before it
        (3.0, 2.5),  # of two nothing is known
        (3.0, 2.8, 2.5),  # three are held against one degree of freedom
        (3.05, 3.04, 3.04, 3.03),  # steady, but not worth a word
    ],
)
def test_passes_that_only_differ_are_no_news(lengths: tuple[float, ...]) -> None:
    assert run(*lengths) == []

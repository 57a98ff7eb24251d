"""Every figure by its definition, worked out by hand."""

from __future__ import annotations

import math

import pytest

from jobs.engines import figures
from jobs.engines.records import Counters, Pass
from tests.jobs.engines.made import answered, one_pass

# Student's t at 97.5 % from a table (NIST's handbook, 1.3.6.7.2).
STUDENT = {
    1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 11: 2.201, 13: 2.160, 19: 2.093, 29: 2.045, 40: 2.021,
    99: 1.984, 100: 1.984,
}  # fmt: skip
NORMAL = 1.95996


def test_tokens_a_second_are_all_tokens_over_the_whole_pass() -> None:
    found = one_pass(answered(8), answered(4), wall_s=3.0)
    assert figures.tok_s(found) == 4.0
    # 8 tokens in 2.25 s and 4 in 1.25 s.
    assert figures.tok_s_by_request(found) == pytest.approx((8 / 2.25 + 4 / 1.25) / 2)


def test_a_step_is_the_time_behind_the_first_token_over_the_tokens_behind_it() -> None:
    assert figures.token_s([one_pass(answered(8)), one_pass(answered(5))]) == pytest.approx(0.25)
    assert figures.token_s([one_pass(answered(1))]) is None


def test_a_round_is_the_time_behind_the_first_token_over_the_verifications() -> None:
    # 1.75 s and 1 s behind the first tokens, in 5 verifications.
    own = [one_pass(answered(8, rounds=3), answered(5, rounds=2))]
    assert figures.round_s(own) == pytest.approx(0.55)
    counted = [one_pass(answered(8), answered(5), counted=Counters(rounds=5))]
    assert figures.round_s(counted) == pytest.approx(0.55)
    assert figures.round_s([one_pass(answered(8))]) is None
    assert figures.round_s([one_pass(answered(8, rounds=0))]) is None


def test_the_accept_length_is_accepted_and_a_bonus_each_over_rounds() -> None:
    passes = [one_pass(answered(9, accepted=6, rounds=3), answered(9, accepted=2, rounds=5))]
    found = figures.accept_length(passes, most=4, seed=0)
    assert found is not None
    assert (found.numerator, found.denominator) == (6 + 3 + 2 + 5, 8)
    assert found.value == 2.0
    assert 1.0 <= found.low <= 2.0 <= found.high <= 4.0


def test_without_accepted_ones_it_is_the_tokens_behind_the_prefills_over_rounds() -> None:
    passes = [one_pass(answered(9, rounds=4, prompt="a"), answered(5, rounds=2, prompt="b"))]
    assert [(c.numerator, c.denominator) for c in figures.accept_counts(passes)] == [(8, 4), (4, 2)]
    found = figures.accept_length(passes, most=4, seed=0)
    assert found is not None
    assert found.value == 2.0


def test_more_passes_over_the_same_prompts_are_no_more_evidence() -> None:
    one = one_pass(
        answered(13, accepted=9, rounds=3, prompt="a"),
        answered(9, accepted=4, rounds=4, prompt="b"),
    )
    alone, often = (figures.accept_length([one] * n, most=5, seed=0) for n in (1, 8))
    assert alone is not None
    assert often is not None
    assert (often.value, often.low, often.high) == (alone.value, alone.low, alone.high)
    assert (often.numerator, often.denominator) == (8 * alone.numerator, 8 * alone.denominator)


def test_of_requests_without_counters_the_servers_count_for_the_pass() -> None:
    counted = Counters(accepted=9, rounds=6)
    passes = [one_pass(answered(9), answered(9), counted=counted)]
    assert [(c.numerator, c.denominator) for c in figures.accept_counts(passes)] == [(15, 6)]
    # Without accepted ones: 18 tokens, two of them the prefills'.
    passes = [one_pass(answered(9), answered(9), counted=Counters(rounds=8))]
    assert [(c.numerator, c.denominator) for c in figures.accept_counts(passes)] == [(16, 8)]
    # A request that has some does not make up for one that has none.
    mixed = [one_pass(answered(9, accepted=6, rounds=3), answered(9), counted=counted)]
    assert [(c.numerator, c.denominator) for c in figures.accept_counts(mixed)] == [(15, 6)]


def test_what_nobody_counts_has_no_accept_length() -> None:
    assert figures.accept_length([one_pass()], most=4, seed=0) is None
    assert figures.accept_counts([]) == []


def test_positions_come_from_the_requests_histograms() -> None:
    # 10 rounds: 4 of none, 3 of one, 2 of two, 1 of three drafts.
    passes = [
        one_pass(answered(histogram=(3, 2, 1, 1)), answered(histogram=(1, 1, 1, 0))),
    ]
    assert figures.per_position(passes, 3) == pytest.approx([0.6, 0.3, 0.1])


def test_positions_come_from_the_servers_counters_where_requests_have_none() -> None:
    counted = Counters(rounds=10, per_position=(6, 3, 1))
    assert figures.per_position([one_pass(counted=counted)], 3) == pytest.approx([0.6, 0.3, 0.1])
    both = [one_pass(counted=counted), one_pass(answered(histogram=(10, 0, 0, 0)))]
    assert figures.per_position(both, 3) == pytest.approx([0.3, 0.15, 0.05])


def test_one_and_all_positions_make_the_accept_length() -> None:
    histogram = (3, 2, 1, 1)
    accepted, rounds = sum(n * j for j, n in enumerate(histogram)), sum(histogram)
    passes = [one_pass(answered(accepted=accepted, rounds=rounds, histogram=histogram))]
    stood = figures.per_position(passes, 3)
    length = figures.accept_length(passes, most=4, seed=0)
    assert stood is not None
    assert length is not None
    assert 1 + sum(stood) == pytest.approx(length.value)


def test_where_one_pass_is_not_counted_by_position_none_is() -> None:
    known = one_pass(answered(histogram=(1, 1)))
    assert figures.per_position([known, one_pass()], 1) is None
    assert figures.per_position([one_pass(counted=Counters(per_position=(1,)))], 1) is None


def test_the_first_token_has_a_median_and_a_95th_percentile() -> None:
    times = [0.1 * n for n in range(20, 0, -1)]
    passes = [one_pass(*(answered(first_token_s=t) for t in times))]
    assert figures.first_token_s(passes) == pytest.approx((1.05, 1.9))
    assert figures.first_token_s([one_pass(answered(first_token_s=0.5))]) == (0.5, 0.5)


def pair(ratio: float) -> tuple[Pass, Pass]:
    """A baseline and a drafter that is so many times as fast."""
    return one_pass(wall_s=1.0), one_pass(wall_s=1 / ratio)


def test_one_pair_gives_a_speedup_without_an_interval() -> None:
    found = figures.speedup([pair(1.5)])
    assert (found.low, found.high, found.count) == (None, None, 1)
    assert found.plain() == {"value": pytest.approx(1.5)}


def test_two_pairs_give_students_interval_of_the_logarithm() -> None:
    # log 1 and log 4: mean log 2, deviation log 4 / √2; over √2 that is log 4 / 2 = log 2.
    found = figures.speedup([pair(1.0), pair(4.0)])
    reach = 12.706204736 * math.log(2)
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2 * math.exp(-reach))
    assert found.high == pytest.approx(2 * math.exp(reach))
    assert found.count == 2


def test_three_pairs_are_held_against_two_degrees_of_freedom() -> None:
    # Logarithms -d, 0 and d around log 2: the deviation is d, the mean's error d / √3.
    d = math.log(1.1)
    found = figures.speedup([pair(2 / 1.1), pair(2.0), pair(2 * 1.1)])
    reach = 4.302652730 * d / math.sqrt(3)
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2 * math.exp(-reach))
    assert found.high == pytest.approx(2 * math.exp(reach))


def test_a_speedup_is_the_drafters_over_the_baselines() -> None:
    slower = one_pass(answered(8), wall_s=2.0)
    faster = one_pass(answered(8), wall_s=1.0)
    assert figures.speedup([(slower, faster)]).value == pytest.approx(2.0)
    assert figures.speedup([(faster, slower)]).value == pytest.approx(0.5)


def test_turning_the_pairs_around_turns_the_interval_around() -> None:
    pairs = [pair(1.3), pair(1.5), pair(1.2)]
    found = figures.speedup(pairs)
    turned = figures.speedup([(b, a) for a, b in pairs])
    assert found.low is not None
    assert found.high is not None
    assert (turned.low, turned.value, turned.high) == pytest.approx(
        (1 / found.high, 1 / found.value, 1 / found.low)
    )


def test_a_mean_of_figures_is_theirs_in_proportion() -> None:
    # 1, 2 and 4: the logarithms' mean is ln 2, and so is their deviation.
    found = figures.typical([1.0, 2.0, 4.0])
    reach = 2 ** (4.302652730 / math.sqrt(3))
    assert (found.low, found.value, found.high) == pytest.approx((2 / reach, 2.0, 2 * reach))
    assert figures.typical([7.0]).plain() == pytest.approx({"value": 7.0})
    assert figures.typical([7.0, 7.0]).plain() == pytest.approx(
        {"value": 7.0, "low": 7.0, "high": 7.0}
    )


def test_students_t_is_the_tables() -> None:
    for freedom, right in STUDENT.items():
        assert figures.t975(freedom) == pytest.approx(right, abs=5.1e-4)
    found = [figures.t975(freedom) for freedom in range(1, 1000)]
    assert found == sorted(found, reverse=True)
    assert found[-1] >= NORMAL

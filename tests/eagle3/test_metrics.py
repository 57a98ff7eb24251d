"""Metrics: closed forms, and the served walk against a loop that serves token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.metrics import (
    Chains,
    Count,
    Difference,
    Truth,
    count_chains,
    judge_chains,
    paired_difference,
    rate,
    scored_rows,
    summarise,
    truth_tokens,
)

VOCAB = 9
ALL = torch.ones(VOCAB, dtype=torch.bool)


def chains_of(correct: list[list[bool]]) -> Chains:
    table = torch.tensor(correct)
    return Chains(
        rows=torch.arange(len(correct)),
        correct=table,
        decided=torch.ones_like(table),
        in_vocab=torch.ones(len(correct), dtype=torch.bool),
    )


def test_scored_positions_are_those_an_engine_drafts() -> None:
    # Two spans of the target's text: 3,4,5 and 8,9. The first token of each is not drafted.
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert (scored_rows(mask) + 2).tolist() == [4, 5, 9]


def test_counts_of_a_hand_made_table() -> None:
    counts = count_chains(chains_of([[1, 1, 0], [1, 0, 1], [0, 1, 1]]))  # type: ignore[list-item]
    assert counts["accuracy"] == Count(2, 3)
    assert counts["step_accuracy/marginal@1"] == Count(2, 3)
    assert counts["step_accuracy/conditional@1"] == Count(1, 2)
    assert counts["step_accuracy/cumulative@1"] == Count(1, 3)
    assert counts["step_accuracy/conditional@2"] == Count(0, 1)
    assert counts["accept_length_uniform"] == Count(3 + 2 + 1, 3)
    assert counts["accept_length"] == Count(3, 1)  # the first round reaches behind the last row


@pytest.mark.parametrize(("value", "length"), [(True, 5.0), (False, 1.0)])
def test_a_perfect_and_a_dead_drafter_have_exact_accept_lengths(value: bool, length: float) -> None:
    counts = count_chains(chains_of([[value] * 4] * 40))
    for name in ("accept_length", "accept_length_uniform"):
        assert counts[name].numerator / counts[name].denominator == length


@st.composite
def texts(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, dict[int, list[int]], int]:
    """A text, its mask, the target's choices, and what a drafter would draft behind each position."""
    length = draw(st.integers(4, 30))
    steps = draw(st.integers(1, 4))
    small = st.integers(0, 2)
    ids = torch.tensor(draw(st.lists(small, min_size=length, max_size=length)))
    start = draw(st.integers(1, length - 2))
    mask = torch.zeros(length, dtype=torch.bool)
    mask[start:] = True
    argmax = torch.cat([ids[1:], torch.tensor([draw(small)])])
    for position in draw(st.sets(st.integers(0, length - 2), max_size=3)):
        argmax[position] = draw(small)
    drafts = {t: draw(st.lists(small, min_size=steps, max_size=steps)) for t in range(length - 1)}
    return ids, mask, argmax, drafts, steps


def serve(
    ids: list[int], start: int, argmax: list[int], drafts: dict[int, list[int]], steps: int
) -> tuple[int, int]:
    """Tokens and rounds, one verification at a time, as long as the recorded text says what is next.

    The text ids[..start] is known after prefill. A round drafts `steps` tokens; the target accepts
    while its own choice is the drafted token, and adds its own choice behind them.
    """
    tokens = rounds = 0
    known = start  # index of the last token that has been emitted
    while known + steps < len(ids):
        t = known - 1
        if any(argmax[known + s] != ids[known + 1 + s] for s in range(steps - 1)):
            known += 1  # the text leaves the target's choice inside the window
            continue
        accepted = 0
        while accepted < steps and drafts[t][accepted] == argmax[known + accepted]:
            accepted += 1
        tokens, rounds = tokens + accepted + 1, rounds + 1
        known += accepted + 1
    return tokens, rounds


@given(texts())
@settings(max_examples=300, deadline=None)
def test_the_served_walk_is_what_a_serving_loop_counts(
    case: tuple[Tensor, Tensor, Tensor, dict[int, list[int]], int],
) -> None:
    ids, mask, argmax, drafts, steps = case
    rows = scored_rows(mask)
    truth = truth_tokens(ids, argmax, Truth.target_argmax, "x")
    drafted = torch.tensor([drafts[int(t)] for t in rows]).reshape(len(rows), steps)
    counts = count_chains(judge_chains(drafted, rows, ids, mask, truth, ALL))
    start = int(mask.nonzero()[0])
    walked = counts["accept_length"]
    assert (walked.numerator, walked.denominator) == serve(
        ids.tolist(), start, argmax.tolist(), drafts, steps
    )


def test_a_step_behind_a_text_that_left_the_truth_is_not_decided() -> None:
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    argmax = torch.tensor([1, 2, 3, 8, 5, 6, 7])  # behind position 3 the target wants 8, not 4
    mask = torch.tensor([0, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    rows = scored_rows(mask)
    truth = truth_tokens(ids, argmax, Truth.target_argmax, "x")
    drafted = torch.stack([torch.tensor([2, 3, 8])] * len(rows))
    chains = judge_chains(drafted, rows, ids, mask, truth, ALL)
    # Row 0 drafts positions 2, 3, 4: the truths are 2, 3 and the target's own 8; all are known.
    assert chains.decided[0].tolist() == [True, True, True]
    assert chains.correct[0].tolist() == [True, True, True]
    # Row 2 drafts position 4 first, where the text left the truth: deeper truths are unknown.
    assert chains.decided[2].tolist() == [True, False, False]


def test_coverage_counts_the_truth_in_the_draft_vocabulary() -> None:
    ids = torch.tensor([0, 1, 2, 3, 4])
    t2d = torch.tensor([True, True, True, False, True, True, True, True, True])
    mask = torch.tensor([1, 1, 1, 1, 1], dtype=torch.bool)
    rows = scored_rows(mask)
    chains = judge_chains(torch.zeros(3, 1, dtype=torch.long), rows, ids, mask, ids, t2d)
    assert count_chains(chains)["coverage"] == Count(2, 3)


def test_truth_target_argmax_needs_it_in_the_data() -> None:
    with pytest.raises(BadInput, match=r"data_3\.pt has no target_argmax.*job\.truth=next_token"):
        truth_tokens(torch.arange(4), None, Truth.target_argmax, "data_3.pt")


def test_interval_of_a_rate_covers_the_true_value_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(3)
    covered = 0
    for trial in range(200):
        p = torch.rand(40, generator=generator) * 0.4 + 0.4  # texts differ; the mean is 0.6
        hits = torch.binomial(torch.full((40,), 50.0), p, generator=generator)
        found = rate(
            [Count(int(h), 50) for h in hits], Truth.next_token, limits=(0.0, 1.0), seed=trial
        )
        assert found is not None
        covered += found.low <= 0.6 <= found.high
    assert 178 <= covered <= 199  # 95 % of 200, with room for chance and for the small sample


@pytest.mark.parametrize(("hits", "low", "high"), [(0, 0.0, 0.03622), (100, 0.96378, 1.0)])
def test_a_rate_at_its_limit_has_the_exact_binomial_interval(
    hits: int, low: float, high: float
) -> None:
    counts = [Count(hits // 4, 25)] * 4
    found = rate(counts, Truth.next_token, limits=(0.0, 1.0))
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))


def test_a_dead_drafters_accept_length_has_an_interval_too() -> None:
    found = rate([Count(25, 25)] * 4, Truth.next_token, limits=(1.0, 5.0))
    assert found is not None
    assert (found.value, found.low) == (1.0, 1.0)
    assert found.high == pytest.approx(1 + 4 * 0.03622, abs=1e-4)


def test_one_text_alone_has_the_whole_range_as_interval() -> None:
    found = rate([Count(7, 10)], Truth.next_token, limits=(0.0, 1.0))
    assert found is not None
    assert (found.value, found.low, found.high) == (0.7, 0.0, 1.0)


def test_nothing_scored_is_left_out_with_a_note() -> None:
    metrics, curves, notes = summarise(
        [{"accuracy": Count(1, 2), "accept_length": Count(0, 0)}] * 2, Truth.next_token, 4
    )
    assert list(metrics) == ["accuracy"]
    assert curves == {}
    assert notes == ["accept_length has no scored position and is left out"]


def test_paired_difference_of_what_was_hardly_counted() -> None:
    some, nothing = [Count(6, 3), Count(9, 3)], [Count(0, 0)] * 2
    for a, b in ((some, nothing), (nothing, some), (nothing, nothing)):
        assert paired_difference(a, b) == Difference(value=0.0, low=-math.inf, high=math.inf)
    alone = paired_difference([Count(9, 3)], [Count(3, 3)])
    assert alone == Difference(value=2.0, low=-math.inf, high=math.inf)
    # Resamples of the empty text alone have no ratio, and are none.
    a, b = [Count(0, 0), Count(6, 3), Count(9, 3)], [Count(3, 3), Count(0, 0), Count(5, 3)]
    found = paired_difference(a, b)
    assert math.isfinite(found.low)
    assert found.value == pytest.approx(2.5 - 4 / 3)
    assert found.low <= found.value <= found.high
    with pytest.raises(ValueError, match="resamples do not reach"):
        paired_difference(a, b, comparisons=1000)


def test_paired_difference_sees_what_unpaired_intervals_hide() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(10, 90, (60,), generator=generator)
    a = [Count(int(b) + 3, 100) for b in base]
    b = [Count(int(b), 100) for b in base]
    rates = [rate(c, Truth.next_token, limits=(0.0, 1.0)) for c in (a, b)]
    assert rates[0] is not None
    assert rates[1] is not None
    assert rates[0].low < rates[1].high  # they overlap
    difference = paired_difference(a, b, comparisons=23)
    assert difference.value == pytest.approx(0.03)
    assert difference.low > 0.029
    shuffled = list(reversed(b))
    corrected, plain = (paired_difference(a, shuffled, comparisons=n) for n in (23, 1))
    assert corrected.low < plain.low < plain.high < corrected.high

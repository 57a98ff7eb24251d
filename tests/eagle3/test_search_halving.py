"""Bounds hold what they promise, and races drop those who are behind and keep ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.metrics import Count
from eagle3.search.bounds import (
    accuracy_bounds,
    length_difference,
    ratio_difference,
    t_quantile,
    tail_of,
)
from eagle3.search.halving import (
    growing,
    planned,
    planned_for,
    race,
    race_chains,
    race_first,
    text_order,
)
from eagle3.search.score import Scorer
from eagle3.wiring import Wiring
from tests.eagle3.searchable import PLAIN, STATES, STEPS, checkpoint, small_texts
from tests.eagle3.wired import target_of


def wirings(count: int) -> list[Wiring]:
    return [Wiring.of_states((i, i + 1, i + 2)) for i in range(count)]


class Table:
    """A scorer whose counts are drawn: `chances` of being right for each wiring, text by text."""

    def __init__(self, chances: Sequence[float], texts: int, rows: int = 50, spread: float = 0.1):
        generator = torch.Generator().manual_seed(len(chances) + texts)
        self.wirings, self.steps = wirings(len(chances)), STEPS
        hard = torch.randn(texts, generator=generator) * spread  # shared: paired by text
        chance = (torch.tensor(chances)[:, None] + hard).clamp(0, 1)
        drawn = torch.rand(len(chances), texts, rows, generator=generator) < chance[..., None]
        self.right = drawn.sum(-1).double()
        self.rows = rows
        self.asked: list[tuple[Wiring, int]] = []

    def rights(self, asked: Sequence[Wiring], chosen: Sequence[int], _: str) -> Tensor:
        self.asked += [(w, i) for w in asked for i in chosen]
        return self.right[[self.wirings.index(w) for w in asked]][:, list(chosen)]

    def positions(self, chosen: Sequence[int], _: str) -> Tensor:
        return torch.full((len(chosen),), float(self.rows), dtype=torch.float64)

    def draft(self, asked: Sequence[Wiring], chosen: Sequence[int]) -> None:
        self.asked += [(w, i) for w in asked for i in chosen]

    def chains(self, wiring: Wiring, chosen: Sequence[int], _: str) -> list[dict[str, Count]]:
        row = self.right[self.wirings.index(wiring)]
        return [
            {
                "accuracy": Count(int(row[i]), self.rows),
                "accept_length": Count(self.rows + int(row[i]), self.rows),
            }
            for i in chosen
        ]


def raced(table: Any, way: Callable[..., Any] = race_first, **more: Any) -> Any:
    name = {"teacher": "t"} if way is race_first else {"truth": "t"}
    return way(table, table.wirings, range(table.right.shape[1]), **name, **more)


# Student's t, two-sided 95 %: any table of it.
@pytest.mark.parametrize(
    ("df", "wanted"), [(1, 12.706), (2, 4.303), (3, 3.182), (7, 2.365), (30, 2.042), (95, 1.985)]
)
def test_students_t_as_tables_have_it(df: int, wanted: float) -> None:
    assert t_quantile(0.025, df) == pytest.approx(wanted, abs=6e-4)


def test_students_t_far_out_and_without_freedom() -> None:
    assert t_quantile(0.0005, 10) == pytest.approx(4.587, abs=1e-3)
    assert t_quantile(1e-6, 10_000) == pytest.approx(4.754, abs=0.01)
    assert t_quantile(0.025, 0) == math.inf


def test_a_ratio_of_sums_has_the_delta_methods_error() -> None:
    """Against the same by hand: two texts of unequal size."""
    a = torch.tensor([8.0, 3.0], dtype=torch.float64)
    b = torch.tensor([[4.0, 3.0]], dtype=torch.float64)
    n = torch.tensor([10.0, 5.0], dtype=torch.float64)
    value, error, texts = ratio_difference(a, n, b, n[None])
    difference = 4 / 15
    parts = [(4 - difference * 10) / 15, (0 - difference * 5) / 15]
    assert float(value[0]) == pytest.approx(difference)
    assert float(error[0]) == pytest.approx(math.sqrt(2 * sum(p * p for p in parts)))
    assert texts == 2


def test_the_bound_of_a_true_tie_holds_0_as_often_as_it_says() -> None:
    """400 pairs that are equally good, at 95 %: with few texts and with more."""
    generator = torch.Generator().manual_seed(0)
    for texts in (4, 8, 40):
        outside = 0
        for _ in range(400):
            chance = (0.6 + 0.15 * torch.randn(texts, generator=generator)).clamp(0, 1)
            drawn = torch.rand(2, texts, 40, generator=generator) < chance[:, None]
            right = drawn.sum(-1).double()
            n = torch.full((texts,), 40.0, dtype=torch.float64)
            value, reach = accuracy_bounds(right[0], right[1:], n, 0.025)
            outside += bool(abs(value[0]) > reach[0])
        assert outside <= 32, texts  # 20 are expected at most; 3 standard errors more


@pytest.mark.parametrize("texts", [2, 3, 4, 6])
def test_two_that_are_right_where_the_other_is_wrong_are_judged_by_their_texts(texts: int) -> None:
    """Two teachers of which each text follows one more, on average none: 1000 draws, 95 %."""
    generator = torch.Generator().manual_seed(texts)
    n = torch.full((texts,), 100.0, dtype=torch.float64)
    false = 0
    for _ in range(1000):
        one = (0.45 + torch.randn(texts, generator=generator) * 0.25).clamp(0, 0.9)
        drawn = torch.rand(texts, 100, generator=generator)
        right = (drawn < one[:, None]).sum(1).double()
        other = ((drawn >= one[:, None]) & (drawn < 0.9)).sum(1).double()
        value, reach = accuracy_bounds(right, other[None], n, 0.025, alike=False)
        false += bool(abs(value[0]) > reach[0])
    assert false <= 50 + 3 * math.sqrt(50 * 0.95)


@pytest.mark.parametrize("texts", [2, 3, 4, 6])
def test_accept_lengths_that_are_alike_are_hardly_ever_told_apart(texts: int) -> None:
    """1000 draws of few rounds, so that texts are often equal by luck, at 95 %."""
    generator = torch.Generator().manual_seed(texts)
    false = 0
    for _ in range(1000):
        gained = torch.randint(0, 2, (2, texts, 3), generator=generator).sum(2) + 3
        one, other = ([Count(int(g), 3) for g in side] for side in gained)
        found = length_difference(one, other, comparisons=1, steps=1)
        false += found.low > 0 or found.high < 0
    assert false <= 50 + 3 * math.sqrt(50 * 0.95)


def test_texts_with_equal_counts_have_a_reach_all_the_same() -> None:
    for texts in (2, 3):
        found = length_difference(
            [Count(6, 3)] * texts, [Count(5, 3)] * texts, comparisons=1000, steps=4
        )
        assert (found.low, found.high) == (-4.0, 4.0)
    same = length_difference([Count(60, 30)] * 9, [Count(60, 30)] * 9, comparisons=1, steps=4)
    assert same.low < same.value == 0 < same.high < 0.02


def test_what_was_not_counted_may_be_anything() -> None:
    some, nothing = [Count(6, 3)] * 4, [Count(0, 0)] * 4
    for one, other in ((some, nothing), (nothing, some), (nothing, nothing)):
        found = length_difference(one, other, comparisons=1, steps=4)
        assert (found.value, found.low, found.high) == (0.0, -4.0, 4.0)


def test_one_text_alone_bounds_nothing() -> None:
    n = torch.tensor([50.0], dtype=torch.float64)
    value, reach = accuracy_bounds(n, torch.zeros(1, 1, dtype=torch.float64), n, 0.025)
    assert (float(value[0]), float(reach[0])) == (1.0, math.inf)
    found = length_difference([Count(90, 30)], [Count(30, 30)], comparisons=1, steps=4)
    assert (found.value, found.low, found.high) == (2.0, -4.0, 4.0)


def test_rounds_double_and_end_with_all_texts() -> None:
    assert growing(96) == [6, 12, 24, 48, 96]
    assert growing(5) == [5]
    assert growing(13) == [6, 13]
    assert sorted(text_order(20, 3)) == list(range(20))
    assert text_order(20, 3) == text_order(20, 3) != text_order(20, 4)


def test_many_are_looked_at_on_very_few_texts_first() -> None:
    assert planned_for(200, 96, 3) == planned(96, 3)
    first, *rest = planned_for(201, 96, 3)
    assert (first.texts, first.most) == (2, 144)  # 144 on 2 texts are three on all
    assert rest == planned(96, 3)
    assert planned_for(1000, 12, 1)[0].most == 50
    assert planned_for(1000, 2, 1) == planned(2, 1)
    first, *rest = planned_for(20, 96, 3, steep=True)
    assert (first.texts, first.most, rest) == (2, 12, planned(96, 3))


def test_the_hopeless_leave_early_and_a_tie_stays_to_the_end() -> None:
    table = Table([0.75, 0.75, 0.4, 0.05, 0.02, 0.02], texts=96)
    field = raced(table)
    assert set(field.left) == set(table.wirings[:2])
    assert field.texts == 96
    assert not field.ahead
    out = {o.wiring: o for o in field.out}
    assert set(out) == set(table.wirings[2:])
    for wiring in table.wirings[3:]:
        assert out[wiring].texts == 6
    for left in field.out:
        assert left.behind.low > 0
        assert left.positions == 50 * left.texts
        assert f"clearly behind the leader's on {left.texts} texts" in left.why
    # Nobody who left was asked about again.
    assert max(i for w, i in table.asked if w == table.wirings[5]) < 6


def test_a_race_ends_when_one_is_left() -> None:
    table = Table([0.8, 0.1, 0.1], texts=96)
    field = raced(table)
    assert field.left == table.wirings[:1]
    assert field.texts == 6


def test_whom_to_keep_stays_and_the_leader_is_said_to_be_ahead() -> None:
    table = Table([0.1, 0.8, 0.1], texts=96)
    field = raced(table, keep=table.wirings[0])
    assert field.left == [table.wirings[1], table.wirings[0]]
    assert field.ahead
    assert field.texts == 6


def test_of_equals_the_one_to_keep_leads() -> None:
    table = Table([0.5, 0.5], texts=24)
    table.right[1] = table.right[0]
    field = raced(table, keep=table.wirings[1])
    assert field.left[0] == table.wirings[1]
    assert not field.ahead


def test_a_crowd_is_cut_and_those_cut_are_not_called_worse() -> None:
    table = Table([0.5 + i / 4000 for i in range(64)], texts=96)
    field = raced(table)
    assert len(field.left) == 2
    assert len(field.late) + len(field.out) == 62
    for late in field.late:
        assert late.behind.low <= 0 <= late.behind.high
        assert "not clearly behind" in late.why
        assert "that go on score higher" in late.why
    # No round costs more than the first: 64 wirings on 6 texts, then at most 96 pairs of the two.
    assert all(
        sum(1 for w in table.wirings if (w, i) in set(table.asked)) <= max(2, 96 // size)
        for size, i in ((12, 6), (24, 12), (48, 24), (96, 48))
    )
    wider = raced(Table([0.5 + i / 4000 for i in range(64)], texts=96), rounds=planned(96, 4))
    assert len(wider.left) > 2


def test_chains_are_raced_by_accept_length() -> None:
    table = Table([0.75, 0.74, 0.3], texts=96)
    field = raced(table, race_chains)
    assert set(field.left) == set(table.wirings[:2])
    (out,) = field.out
    assert out.wiring == table.wirings[2]
    assert "accept length is clearly behind" in out.why
    assert out.accuracy == pytest.approx(0.3, abs=0.1)


def test_corrections_grow_with_the_contestants() -> None:
    assert tail_of(0) == tail_of(1) == pytest.approx(0.025)
    assert tail_of(50) == pytest.approx(0.0005)


@pytest.fixture
def scorer(tmp_path: Any) -> Scorer:
    target = target_of(tmp_path / "target", PLAIN.hidden)
    return Scorer(checkpoint(PLAIN), target, small_texts((20, 24, 28, 32, 36, 40)), steps=STEPS)


def test_who_has_no_round_to_count_neither_ends_a_race_nor_loses_it() -> None:
    table = Table([0.75, 0.7], texts=24)
    counted = table.chains

    def chains(wiring: Wiring, chosen: Sequence[int], name: str) -> list[dict[str, Count]]:
        found = counted(wiring, chosen, name)
        if wiring == table.wirings[0]:
            return found
        return [{**text, "accept_length": Count(0, 0)} for text in found]

    table.chains = chains  # type: ignore[method-assign]
    field = raced(table, race_chains, keep=table.wirings[1])
    assert field.left == table.wirings
    assert field.values[1] == 1.0
    assert not field.ahead


def test_a_race_answers_with_the_best_its_ties_and_everybody_else(scorer: Scorer) -> None:
    form = scorer.checkpoint.form
    fed = [Wiring.of_states(s).resolved(form) for s in ((0, 2, 5), (2, 0, 5), (5, 2, 0))]
    unknown = Wiring.of_states((0, 2, 6)).resolved(form)
    # The texts' own tokens made those that the first wiring drafts.
    found = race(scorer, [*fed, unknown], teacher="target_argmax", start=fed[1])
    everybody = [found.best, *found.ties, *found.dropped]
    assert {r.wiring for r in everybody} == {*fed, unknown}
    assert found.best.behind is None
    assert len(found.best.counts) == 6
    (impossible,) = [d for d in found.dropped if d.texts == 0]
    assert impossible.wiring == unknown
    assert impossible.behind is None
    assert "stores only" in impossible.why
    assert impossible.changed == ("states=0,2,6",)
    for tie in found.ties:
        assert tie.tied
        assert tie.behind is not None
        assert tie.behind.low <= 0 <= tie.behind.high
        # Corrected for all three that raced, not for the two that went on.
        ours = [found.best.counts[i]["accept_length"] for i in range(6)]
        theirs = [counts["accept_length"] for counts in tie.counts]
        assert tie.behind == length_difference(ours, theirs, comparisons=2, steps=STEPS)
    assert found.best.accept_length.truth == "target_argmax"
    assert set(found.best.curves) == {
        f"step_accuracy/{kind}" for kind in ("cumulative", "conditional")
    }


def test_a_race_without_anybody_who_can_run_is_refused(scorer: Scorer) -> None:
    with pytest.raises(BadInput, match=r"none of 1 wirings can be scored: .*state 6"):
        race(scorer, [Wiring.of_states((0, 2, 6))], teacher="target_argmax")


def test_texts_too_short_for_a_chain_are_said_to_be(tmp_path: Any) -> None:
    target = target_of(tmp_path / "target", PLAIN.hidden)
    short = Scorer(checkpoint(PLAIN), target, small_texts((5, 6, 7)), steps=9)
    wiring = Wiring.of_states(STATES[:3]).resolved(short.checkpoint.form)
    with pytest.raises(BadInput, match=r"9 known ones behind it.*use fewer job.steps"):
        race(short, [wiring], teacher="target_argmax")

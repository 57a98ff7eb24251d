"""What the evidence settles and what it leaves open, from counts that are made so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from eagle3.diagnosis.answer import CERTAIN, LIKELY
from eagle3.diagnosis.causes import (
    by_cost,
    cost_of,
    matters,
    mended_causes,
    no_cost,
    unsettled,
    wiring_causes,
    with_part_of,
)
from eagle3.diagnosis.evidence import Scored, held_against
from eagle3.diagnosis.measure import mended, part, uncounted
from eagle3.diagnosis.verdict import diagnose
from eagle3.metrics import Count
from eagle3.served_switches import ConfigLine, Stop
from eagle3.wiring import D2T, FcInput, Residual
from tests.eagle3.diagnosed import (
    DEAD,
    GOOD,
    POOR,
    SLOT3,
    STEPS,
    S,
    T,
    evidence,
    scored,
    searched,
    served,
    wiring,
)

R = replace(T, residual=Residual.normed)


def first(of: Scored, texts: int) -> Scored:
    """The same on the first texts only."""
    return replace(of, counts=of.counts[:texts])


def counted(wired, pairs: Sequence[tuple[int, int]], rows: int, *, steps: int = STEPS) -> Scored:
    """One wiring from how many first tokens are right and how many tokens are gained, a text."""
    counts = [
        {
            "accuracy": Count(right, rows),
            "step_accuracy/conditional@0": Count(right, rows),
            "coverage": Count(rows, rows),
            "accept_length": Count(gained, rows // 2),
        }
        for right, gained in pairs
    ]
    return Scored(wiring=wired, counts=counts, truth="target_argmax", steps=steps, seed=0)


@pytest.mark.parametrize("texts", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("spread", [0.06, 0.25])
def test_two_wirings_that_are_equally_good_are_hardly_ever_told_apart(
    texts: int, spread: float
) -> None:
    """500 pairs whose difference a text is drawn around 0, opposed on each text, as nothing shares."""
    generator = torch.Generator().manual_seed(texts)
    rows, settled = 60, 0
    for _ in range(500):
        apart = torch.randn(texts, generator=generator) * spread
        sides = []
        for sign in (1, -1):
            chance = (0.55 + sign * apart / 2).clamp(0, 1)
            right = (torch.rand(texts, rows, generator=generator) < chance[:, None]).sum(1)
            longer = torch.rand(texts, rows // 2, 3, generator=generator) < chance[:, None, None]
            gained = rows // 2 + longer.sum((1, 2))
            pairs = list(zip(right.tolist(), gained.tolist(), strict=True))
            sides.append(counted(T if sign > 0 else R, pairs, rows))
        # Without correction for many, so that the rate shows: 5 % of both sides and both figures.
        one, other = sides
        settled += any(matters(a, b, 1) for a, b in ((one, other), (other, one)))
    assert settled <= 25 + 3 * (25 * 0.95) ** 0.5
    if texts == 1:
        assert settled == 0


def test_many_comparisons_widen_beyond_any_resample() -> None:
    a, b = scored(T, GOOD), scored(R, POOR)
    few, many, most = (a.minus(b, "accuracy", comparisons=n) for n in (1, 1000, 1_000_000))
    assert most.low < many.low < few.low < few.value == many.value < few.high < many.high


def test_one_text_costs_anything_between_nothing_and_all() -> None:
    a, b = first(scored(T, GOOD), 1), first(scored(S, DEAD), 1)
    cost = cost_of(a, b, 1)
    assert cost is not None
    assert cost.difference.value > 1
    assert (cost.difference.low, cost.difference.high) == (-STEPS, STEPS)
    lost = a.minus(b, "accuracy", comparisons=1)
    assert (lost.low, lost.high) == (-1.0, 1.0)
    e = evidence(a, wrong=b, alone={"states": b})
    assert wiring_causes(e) == ([], [])
    (open_,) = unsettled(e)
    assert "states" in open_
    assert "one text cannot tell" in open_


def test_texts_that_agree_by_luck_settle_nothing() -> None:
    for texts in (2, 3):
        a = counted(T, [(40, 90)] * texts, 60)
        b = counted(R, [(38, 75)] * texts, 60)
        assert not matters(a, b, 300)
        assert a.minus(b, "accept_length", comparisons=300).low == -STEPS


def test_what_cannot_be_told_is_no_harmless_difference() -> None:
    """Texts that each say something else: +1.5 for the served wiring, and not settled."""
    ours = [(20, 45), (40, 120), (20, 40), (30, 50)]
    theirs = [(50, 120), (20, 45), (50, 120), (50, 120)]
    a, b = counted(T, ours, 60), counted(R, theirs, 60)
    e = evidence(a, wrong=b, alone={"residual": b})
    assert wiring_causes(e) == ([], [])
    (open_,) = unsettled(e)
    assert "whether residual is a fault" in open_
    assert "the wiring as served scores higher" in open_
    assert "clearly" not in open_


def test_a_served_wiring_that_is_clearly_better_is_said_to_be() -> None:
    a, b = scored(T, POOR), scored(R, GOOD)
    (open_,) = unsettled(evidence(a, wrong=b, alone={"residual": b}))
    assert "scores clearly higher than the one called trained" in open_


def test_a_difference_that_is_small_for_sure_is_harmless_and_settled_ones_are_causes() -> None:
    a, b = scored(T, GOOD), scored(R, (0.74, 0.8, 0.8, 0.8))
    e = evidence(a, wrong=b, alone={"residual": b})
    causes, harmless = wiring_causes(e)
    assert causes == []
    assert harmless[0].startswith("residual (")
    assert unsettled(e) == ()
    worse = scored(R, POOR)
    e = evidence(a, wrong=worse, alone={"residual": worse})
    assert [c.kind for c in wiring_causes(e)[0]] == ["residual"]
    assert unsettled(e) == ()
    same = scored(R, GOOD)
    assert (
        unsettled(evidence(first(a, 1), wrong=first(same, 1), alone={"residual": first(same, 1)}))
        == ()
    )


def test_two_differences_that_are_better_together_are_said_to_be() -> None:
    both = replace(R, d2t=D2T.absolute)
    alone = {"residual": scored(R, POOR), "d2t": scored(replace(T, d2t=D2T.absolute), POOR)}
    e = evidence(scored(T, (0.5, 0.5, 0.5, 0.5)), wrong=scored(both, GOOD), alone=alone)
    assert "together, scores higher" in unsettled(e)[-1]


def without_rounds(of: Scored) -> Scored:
    """The same where no round can be counted to its end."""
    counts = [{**text, "accept_length": Count(0, 0)} for text in of.counts]
    return replace(of, counts=counts)


def test_where_no_round_can_be_counted_there_is_no_cost_but_a_cause() -> None:
    a, b = scored(T, GOOD), without_rounds(scored(R, POOR))
    for trained, so in ((a, b), (without_rounds(a), scored(R, POOR)), (b, b)):
        assert cost_of(trained, so, 300) is None
        assert "no round of 4 steps" in str(no_cost(trained, so))
        assert trained.minus(so, "accept_length", comparisons=1).value == 0
    assert uncounted(a, {"residual": b, "order": a}).keys() == {"residual"}
    causes, _ = wiring_causes(evidence(a, wrong=b, alone={"residual": b}))
    (cause,) = causes
    assert cause.cost is None
    assert "no cost in accept length: no round of 4 steps" in cause.evidence
    nothing = without_rounds(scored(R, (0.74, 0.8, 0.8, 0.8)))
    assert wiring_causes(evidence(a, wrong=nothing, alone={"residual": nothing}))[0] == []


def test_what_an_engine_would_run_is_told_behind_why_it_does_not_start() -> None:
    run = wiring(3, 31, 59, residual=Residual.normed)
    dead = replace(served(None, problems=("id -1 names no layer",)), run=run)
    assert held_against(dead, T, T).states() == T.states()
    a, b = scored(T, GOOD), scored(R, POOR)
    e = evidence(a, served=dead, alone={"residual": b}, alone_by_teacher={}, as_served=None)
    assert e.wrong == R
    causes, _ = wiring_causes(e)
    assert [c.kind for c in causes] == ["states", "residual"]
    assert causes[1].cost is not None
    assert causes[1].confidence == LIKELY
    assert "un-normed; served once it starts: the residual is" in causes[1].what
    # States that are known and not what stops it are a fault of their own.
    other = replace(dead, states=(3, 31, 59), stops=(Stop(why="it has no config", left="look"),))
    known = replace(e, served=other, alone={"states": scored(S, DEAD), "residual": b})
    causes, _ = wiring_causes(known)
    assert [c.kind for c in causes] == ["not-served", "states", "residual"]
    assert [c.stops for c in causes] == [True, False, False]
    told = "trained on states 0, 3 and 31; served once it starts: states 3, 31 and 59"
    assert causes[1].what == told
    few = replace(e, served=replace(dead, states=(3, 31)))
    assert [c.kind for c in wiring_causes(few)[0]] == ["states", "residual"]
    nowhere = replace(dead, run=None)
    assert [c.kind for c in wiring_causes(replace(e, served=nowhere))[0]] == ["states"]


@pytest.mark.parametrize(
    ("switch", "kind"),
    [(None, "not-served"), ("fc_input", "fc-input"), ("qk_norm", "qk-norm")],
)
def test_what_stops_an_engine_is_named_by_what_it_is(switch: str | None, kind: str) -> None:
    norm, problem = replace(R, fc_input=FcInput.whole), "whatever it is called"
    dead = served(None, problems=(problem,), switch=switch)
    dead = replace(dead, states=T.states(), run=norm)
    alone = {"residual": scored(R, POOR), "fc-input": scored(norm, POOR)}
    e = evidence(scored(T, GOOD), served=dead, as_served=None, alone=alone)
    causes, _ = wiring_causes(e)
    assert causes[0].kind == kind
    assert problem in causes[0].what
    assert sorted({c.kind for c in causes[1:]}) == sorted({"residual", "fc-input"} - {kind})
    assert by_cost([*causes[1:], causes[0]])[0] == causes[0]
    assert with_part_of(R, T, "not-served") == R


def test_several_stops_are_a_cause_a_kind_and_before_all_others() -> None:
    stops = (
        Stop(why="no class is named", config=(ConfigLine("architectures", ["A"]),)),
        Stop(why="biases are refused", switch="biases"),
        Stop(why="null is multiplied", config=(ConfigLine("width", removed=True),)),
    )
    dead = replace(served(None), stops=stops, states=T.states(), run=R)
    e = evidence(scored(T, GOOD), served=dead, as_served=None, alone={"residual": scored(R, POOR)})
    causes, _ = wiring_causes(e)
    assert [c.kind for c in causes] == ["not-served", "biases", "residual"]
    assert causes[0].served == "no class is named; null is multiplied"
    assert [c.kind for c in by_cost(causes[::-1])] == ["biases", "not-served", "residual"]
    assert causes[0].plain()["stops"]
    # Not even a teacher that limits most stands before them.
    d = diagnose(
        replace(
            e,
            searched=searched(e.trained, teacher=SLOT3, by_teacher=scored(T, (0.95,) * 4)),
            by_teacher=scored(T, (0.95,) * 4, truth=SLOT3.name),
        )
    )
    assert [c.kind for c in d.causes][:3] == ["not-served", "biases", "teacher"]
    assert json.loads(json.dumps(d.plain()))["served"]["stops"][1]["switch"] == "biases"


def certainty(**changed) -> tuple[str, str]:
    a, b = scored(T, GOOD), scored(R, POOR)
    e = replace(evidence(a, wrong=b, alone={"residual": b}), **changed)
    ((cause,), _) = wiring_causes(e)
    return cause.confidence, cause.evidence


def test_only_what_the_search_told_apart_is_certain() -> None:
    found = searched(scored(T, GOOD))
    assert certainty()[0] == CERTAIN
    confidence, why = certainty(searched=replace(found, axes=("states", "residual")))
    assert (confidence, "trained: measured;" in why) == (CERTAIN, True)
    confidence, why = certainty(searched=replace(found, axes=("states",)))
    assert confidence == LIKELY
    assert "trained: as the search started, not searched" in why
    fixed = replace(found, axes=("states",))
    assert "trained: as declared, not searched" in certainty(searched=fixed, declared=T)[1]
    confidence, why = certainty(searched=replace(found, unclear=("residual",)))
    assert confidence == LIKELY
    assert "cannot tell apart" in why


def test_against_the_text_alone_nothing_is_certain() -> None:
    a, b = (scored(w, c, truth="next_token") for w, c in ((T, GOOD), (R, POOR)))
    (cause,) = wiring_causes(evidence(a, wrong=b, alone={"residual": b}))[0]
    assert cause.confidence == LIKELY


def test_a_part_is_judged_by_the_spread_between_texts() -> None:
    whole = [Count(40, 60)] * 2
    found = part("the attention", False, whole, [Count(10, 60)] * 2, 0, 20)
    assert found.worth.value == pytest.approx(0.5)
    assert (found.worth.low, found.worth.high) == (-1.0, 1.0)
    many = part("the attention", False, whole * 20, [Count(10, 60)] * 40, 0, 20)
    assert many.worth.low > 0.4


def test_a_table_that_was_made_again_is_certain_where_its_loss_is_settled() -> None:
    for texts, confidence in ((24, CERTAIN), (1, LIKELY)):
        e = evidence(first(scored(T, GOOD), texts), mended=(mended(first(scored(T, DEAD), texts)),))
        (cause,) = mended_causes(e)
        assert cause.confidence == confidence

"""Arms beside the measurement, of passes whose counters are chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.engines.beside import (
    CEILING,
    CHAIN,
    FLOOR,
    Chain,
    Simulated,
    chain_at,
    chain_in_words,
    chain_of,
    fewer_steps,
    lengths,
    one_more,
    simulated,
    simulated_at,
    simulated_in_words,
)
from jobs.engines.engine import Draft
from jobs.engines.limits import Limits
from jobs.engines.records import Answered
from jobs.engines.simulated import simulating
from tests.jobs.engines.made import answered, one_pass, request

FOLDER = Path("/drafter")
LINE = Draft(folder=FOLDER, steps=3)
TREE = Draft(folder=FOLDER, steps=3, topk=2, draft_tokens=6)
LIMITS = Limits(concurrency=1, step_s=0.1, round_s=0.25, accept_length=2.0, steps=3)


def ended(length: int, rounds: int, cut: int = 0) -> Answered:
    """An answer of so many rounds, the last of them cut by `cut` tokens; a round is a second."""
    return answered(
        length * rounds + 1 - cut,
        accepted=(length - 1) * rounds - cut,
        rounds=rounds,
        latency_s=0.5 + rounds,
    )


def test_a_second_arm_has_one_step() -> None:
    arm = fewer_steps(LINE, [request()])
    assert (arm.draft.steps, arm.draft.topk, arm.draft.verified) == (1, 1, 2)
    assert (arm.environment, arm.requests) == ({}, [request()])


@pytest.mark.parametrize(
    ("draft", "most"),
    [(LINE, 4), (TREE, 4), (replace(TREE, draft_tokens=3), 3)],
)
def test_the_ceiling_is_all_that_a_round_can_give(draft: Draft, most: int) -> None:
    assert lengths(draft) == {FLOOR: 1, CEILING: most}


@pytest.mark.parametrize(("draft", "tokens"), [(LINE, "real-draft-token"), (TREE, "fixed")])
def test_the_engine_is_told_exactly_what_to_accept(draft: Draft, tokens: str) -> None:
    floor, ceiling = simulated(draft, [request()])
    assert (floor.label, ceiling.label) == (FLOOR, CEILING)
    assert floor.environment == {
        "SGLANG_SIMULATE_ACC_LEN": "1",
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": tokens,
    }
    assert ceiling.environment == {**floor.environment, "SGLANG_SIMULATE_ACC_LEN": "4"}
    # What is set here is what nobody else may set.
    assert simulating(floor.environment) == sorted(floor.environment)
    assert floor.draft == ceiling.draft == draft


def test_texts_that_mean_nothing_are_asked_for_in_full_length() -> None:
    asked = replace(request(), ignore_eos=False)
    assert [r.ignore_eos for arm in simulated(LINE, [asked]) for r in arm.requests] == [True] * 2


def at(length: int, *answers: Answered, limits: Limits | None = LIMITS) -> Simulated:
    found = simulated_at([one_pass(*answers, wall_s=10.0)], length, 4, limits, 0)
    assert found is not None
    return found


def test_a_simulated_arm_has_figures_beside_what_the_limits_say() -> None:
    found = at(4, ended(4, 5), ended(4, 5))
    assert (found.held, found.tok_s) == (True, pytest.approx(4.2))
    assert found.decode_tok_s == pytest.approx(4.0)
    assert found.predicted == pytest.approx(16.0)  # 4 tokens in a quarter of a second
    plain = found.plain()
    assert (plain["simulated"], plain["accept_length_set"]) == (True, 4)
    assert plain["accept_length"]["value"] == 4.0
    assert at(1, ended(1, 5), limits=None).predicted is None
    assert simulated_at([], 4, 4, LIMITS, 0) is None


@pytest.mark.parametrize(
    ("length", "answer", "held"),
    [
        (1, ended(1, 5), True),
        (4, ended(4, 5, cut=3), True),  # where an engine counts what it sent
        (4, ended(3, 5), False),
        (1, ended(2, 5), False),
        (4, answered(21), False),  # nobody counted
    ],
)
def test_what_was_not_accepted_as_told_is_found(length: int, answer: Answered, held: bool) -> None:
    assert at(length, answer).held is held


def test_bounds_are_said_as_simulated_beside_what_was_measured() -> None:
    floor, ceiling = at(1, ended(1, 20)), at(4, ended(4, 5))
    assert simulated_in_words(floor, ceiling, 3.0, 2.0) == [
        "simulated: 2.1 tok/s if no draft stood, 2.1 if all did (measured with the drafter 3.0, without "
        "2.0)",
        "simulated: decode tok/s 1.00 and 4.00; the drafter's own rounds predict 4.00 and 16.00",
    ]
    assert simulated_in_words(None, None, 3.0, 2.0) == []


def test_bounds_of_a_disturbed_pass_are_said_to_be_low() -> None:
    floor, ceiling = at(1, ended(1, 20)), at(4, ended(4, 5))
    passes = [one_pass(ended(1, 20), disturbed=("another process",))]
    slow = simulated_at(passes, 1, 4, LIMITS, 0)
    assert slow is not None
    assert (floor.disturbed, slow.disturbed, slow.plain()["disturbed"]) == (False, True, True)
    assert simulated_in_words(slow, ceiling, 3.0, 2.0)[2:] == [
        "simulated: the pass in which no draft stood was disturbed, so that its tok/s may be too low"
    ]


def test_bounds_that_did_not_hold_are_not_said_as_bounds() -> None:
    (line,) = simulated_in_words(at(1, ended(1, 20)), at(4, ended(3, 5)), 3.0, None)
    assert line == (
        "simulated: the engine was told to accept 4 tokens a round, but counted 3.00: its figures are "
        "no bound"
    )


def test_the_chain_has_the_trees_steps_and_one_branch() -> None:
    arm = chain_of(TREE, [request()])
    assert (arm.draft.steps, arm.draft.topk, arm.draft.verified) == (3, 1, 4)
    assert (arm.environment, arm.requests) == ({}, [request()])


def test_one_more_value_lies_where_student_says() -> None:
    # Logarithms -d, 0 and d around ln 2: the deviation is d; of a fourth one it is d·√(1 + 1/3).
    d = math.log(1.1)
    low, high = one_more([2 / 1.1, 2.0, 2 * 1.1])
    reach = 4.302652730 * d * math.sqrt(4 / 3)
    assert (low, high) == pytest.approx((2 * math.exp(-reach), 2 * math.exp(reach)))
    assert one_more([2.0]) == (0.0, math.inf)


def beside_tree(chain_s: float, *tree_s: float) -> Chain:
    """One pass of a chain and those of a tree, of 12 tokens in so many seconds."""
    passes = [one_pass(answered(12), wall_s=seconds) for seconds in tree_s]
    chain = one_pass(answered(12, rounds=4, accepted=6, latency_s=5.5), wall_s=chain_s, arm=CHAIN)
    found = chain_at([chain], passes, 3, 0)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("chain_s", "tree_s", "better"),
    [
        (4.0, (3.0, 3.0), "tree"),
        (2.0, (3.0, 3.0), "chain"),
        (3.1, (3.0, 3.3, 2.7), None),  # within what the tree's passes differ by
        (2.99, (3.0, 3.0), None),  # too little to choose by
        (2.0, (3.0,), None),  # of one pass nothing is known
    ],
)
def test_which_is_better_is_said_where_it_is_more_than_the_trees_spread(
    chain_s: float, tree_s: tuple[float, ...], better: str | None
) -> None:
    assert beside_tree(chain_s, *tree_s).better == better


def test_a_disturbed_chain_is_not_called_better() -> None:
    tree = [one_pass(answered(12), wall_s=4.0), one_pass(answered(12), wall_s=4.0)]
    chain = one_pass(answered(12), wall_s=2.0, arm=CHAIN)
    for disturbed, better in (((), "chain"), (("another process",), None)):
        found = chain_at([replace(chain, disturbed=disturbed)], tree, 3, 0)
        assert found is not None
        assert found.better == better


def test_the_chains_figures_stand_beside_the_trees() -> None:
    found = beside_tree(4.0, 3.0, 3.0)
    plain = found.plain()
    assert plain["steps"] == 3
    assert (plain["tok_s"], plain["decode_tok_s"]) == pytest.approx((3.0, 2.2))
    assert plain["accept_length"]["value"] == 2.5
    tree = simulated_at([one_pass(ended(3, 5))], 3, 4, None, 0)
    assert tree is not None
    assert chain_in_words(found, 4.0, tree.accept_length) == [
        "a chain of 3 steps gives 3.0 tok/s at accept length 2.50, the tree 4.0 at 3.00: the tree is "
        "better here"
    ]
    (line,) = chain_in_words(replace(found, better=None), 4.0, None)
    assert line.endswith(
        "passes of the same flags differ by as much or were disturbed, so that neither is better"
    )
    assert chain_in_words(None, 4.0, None) == []
    assert chain_at([], [one_pass()], 3, 0) is None

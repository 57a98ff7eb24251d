"""Where the time goes and what would be best, for rounds whose parts are chosen."""

from __future__ import annotations

import pytest

from jobs.engines.limits import Limits, advise, in_words, split

STEP, FIXED, DRAFT = 0.010, 0.012, 0.002


def stood(chance: float, steps: int) -> list[float]:
    """Each draft stands with the same chance if the one before it did."""
    return [chance**j for j in range(1, steps + 1)]


def limits(steps: int = 4, length: float = 2.5, **given: float) -> Limits:
    """Of a round that takes FIXED and DRAFT a step."""
    made = {"step_s": STEP, "round_s": FIXED + DRAFT * steps, **given}
    return Limits(concurrency=1, accept_length=length, steps=steps, **made)


def test_break_even_is_where_a_round_gives_what_plain_steps_give_meanwhile() -> None:
    found = limits(step_s=0.01, round_s=0.02)
    assert found.break_even == pytest.approx(2.0)
    assert found.speedup == pytest.approx(1.25)
    assert found.perfect == pytest.approx(2.5)  # 5 tokens in the time of 2
    assert limits(length=found.break_even, step_s=0.01, round_s=0.02).speedup == pytest.approx(1.0)


def test_at_another_accept_length_rounds_take_as_long() -> None:
    found = limits(step_s=0.01, round_s=0.02)
    assert found.decode_tok_s(1.0) == pytest.approx(50.0)
    assert found.decode_tok_s(5.0) == pytest.approx(found.perfect / found.step_s)


def test_what_is_derived_is_filed_with_what_was_measured() -> None:
    plain = limits(step_s=0.01, round_s=0.02).plain()
    assert plain["break_even"] == pytest.approx(2.0)
    assert (plain["steps"], plain["accept_length"], plain["draft_s"]) == (4, 2.5, None)


@pytest.mark.parametrize("other", [1, 2, 7])
def test_two_arms_tell_a_rounds_parts(other: int) -> None:
    found = split(limits(), other, FIXED + other * DRAFT)
    assert found.draft_s == pytest.approx(DRAFT)
    assert found.fixed_s == pytest.approx(FIXED)
    assert found.round_s == pytest.approx(FIXED + 4 * DRAFT)


def test_a_draft_step_takes_no_less_than_nothing() -> None:
    found = split(limits(), 1, 1.0)  # the arm with fewer steps was the slower one
    assert found.draft_s == 0.0
    assert found.fixed_s == pytest.approx(limits().round_s)


def test_two_arms_of_the_same_steps_tell_nothing() -> None:
    with pytest.raises(ValueError, match="the same steps"):
        split(limits(), 4, 0.02)


def test_without_a_rounds_parts_there_is_no_advice() -> None:
    assert advise(limits(), stood(0.5, 4)) is None


def test_every_number_of_steps_is_predicted_from_its_parts() -> None:
    found = advise(split(limits(), 1, FIXED + DRAFT), stood(0.5, 4))
    assert found is not None
    assert found.by_steps == {
        0: pytest.approx(1 / STEP),
        1: pytest.approx(1.5 / (FIXED + DRAFT)),
        2: pytest.approx(1.75 / (FIXED + 2 * DRAFT)),
        3: pytest.approx(1.875 / (FIXED + 3 * DRAFT)),
        4: pytest.approx(1.9375 / (FIXED + 4 * DRAFT)),
    }


@pytest.mark.parametrize(
    ("chance", "draft", "step", "best"),
    [
        (1.0, 0.002, 0.010, 4),  # all stand: each step more is worth it
        (0.5, 0.0, 0.010, 4),  # steps that cost nothing are always worth it
        # 1.5/14, 1.75/16 and 1.875/18 a ms: the second draft pays, the third does not.
        (0.5, 0.002, 0.010, 2),
        (0.5, 0.006, 0.012, 0),  # at best 1.5 tokens in 18 ms, against 12 ms a token without
        (0.8, 0.004, 0.100, 3),  # 1.8/16, 2.44/20, 2.952/24 and 3.3616/28
        (0.0, 0.002, 0.013, 0),  # nothing stands
        (0.3, 0.006, 0.020, 1),  # 1.3/18 and 1.39/24, against 1/20
    ],
)
def test_the_best_number_of_steps_is_found(
    chance: float, draft: float, step: float, best: int
) -> None:
    whole = limits(step_s=step, round_s=FIXED + 4 * draft)
    advice = advise(split(whole, 1, FIXED + draft), stood(chance, 4))
    assert advice is not None
    lengths = {0: FIXED / step, **{s: 1 + sum(stood(chance, s)) for s in range(1, 5)}}
    rates = {s: lengths[s] / (FIXED + s * draft) for s in lengths}
    assert max(rates, key=lambda s: rates[s]) == best  # what is chosen is what is meant
    assert advice.best == best
    assert advice.plain()["best"] == best


def test_that_no_drafter_could_pay_is_said() -> None:
    # 3 tokens in the time of 4.
    lines = in_words(limits(steps=2, length=1.5, step_s=0.01, round_s=0.04), None)
    assert lines == [
        "a round takes 40.0 ms, a plain step 10.0 ms: break-even at accept length 4.00; it is 1.50",
        "even a perfect drafter would not pay: 3 tokens a round give 0.75 times the baseline's decoding",
    ]


def test_that_the_drafter_is_what_limits_is_said() -> None:
    lines = in_words(limits(length=1.5, step_s=0.01, round_s=0.02), None)
    assert lines[1:] == [
        "the drafter is what limits: a perfect one would give 2.50 times the baseline's decoding"
    ]


def test_what_is_still_to_be_had_of_a_drafter_that_pays_is_said() -> None:
    lines = in_words(limits(length=2.2, step_s=0.01, round_s=0.02), None)
    assert lines[1:] == ["a perfect drafter would give 2.50 times the baseline's decoding"]


def test_a_rounds_parts_and_the_advice_are_said() -> None:
    whole = split(limits(), 1, FIXED + DRAFT)

    def last(step_s: float, chance: float) -> str:
        found = Limits(**{**vars(whole), "step_s": step_s})
        lines = in_words(found, advise(found, stood(chance, 4)))
        assert (
            "of a round 12.0 ms are verification and the engine's own work, 2.0 ms each"
            in (lines[2])
        )
        return lines[3]

    # 1.75/16 against 1.9375/20 a ms is 13 % more.
    assert last(0.010, 0.5) == "best: 2 steps, predicted +13% decode tok/s against 4"
    assert last(0.010, 1.0) == "best: the 4 steps that it has"
    assert last(0.001, 0.5) == "best: no drafter at this concurrency"

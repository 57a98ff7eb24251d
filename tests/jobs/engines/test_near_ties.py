"""What a gap between two likeliest tokens says."""

from __future__ import annotations

from jobs.engines.near_ties import NEAR, Tie, in_words


def tie(gap: float, at: int = 3) -> Tie:
    return Tie(prompt="a", at=at, gap=gap)


def test_near_ties_are_rounding() -> None:
    (line,) = in_words([tie(0.0), tie(NEAR / 2)])
    assert line.endswith("0.000, 0.050 nats apart: near ties, which rounding turns")
    assert tie(NEAR / 2).plain() == {"prompt": "a", "at": 3, "gap": NEAR / 2, "near": True}


def test_far_from_a_tie_something_else_is_wrong() -> None:
    (line,) = in_words([tie(0.01), tie(1.5, at=7)])
    assert "at token 7 of prompt a rounding does not explain it" in line


def test_nothing_is_said_of_nothing() -> None:
    assert in_words([]) == []

"""Differences of counters are exact, also of those that were not there before."""

from __future__ import annotations

from jobs.engines.records import Counters
from tests.jobs.engines.made import answered


def test_what_was_counted_between_two_readings_is_their_difference() -> None:
    before = Counters(rounds=10, accepted=15, proposed=30, per_position=(9, 4, 2), generated=35)
    now = Counters(rounds=14, accepted=21, proposed=42, per_position=(12, 6, 3), generated=46)
    assert now.since(before) == Counters(
        rounds=4, accepted=6, proposed=12, per_position=(3, 2, 1), generated=11
    )


def test_a_counter_that_appears_with_its_first_event_began_at_nothing() -> None:
    now = Counters(rounds=8, per_position=(5, 3), requests=1)
    assert now.since(Counters(requests=0)) == now
    assert now.since(Counters(per_position=(2,))).per_position == (3, 3)


def test_what_a_server_does_not_count_stays_unknown() -> None:
    assert Counters(generated=5).since(Counters(generated=2)) == Counters(generated=3)


def test_an_answer_is_as_long_as_its_tokens() -> None:
    assert answered(5).completion_tokens == 5
    assert answered(2).plain()["output"] == (0, 1)

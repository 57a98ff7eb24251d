"""What is kept of a benchmark so that a later one can be held against it."""

from __future__ import annotations

from jobs.engines.kept import digest, kept
from jobs.engines.records import Counters
from tests.jobs.engines.made import answered, one_pass, request


def test_counts_are_kept_by_prompt_over_all_passes_in_the_order_of_the_requests() -> None:
    requests = [request(4, tokens=8, name="b"), request(9, tokens=8, name="a")]
    passes = [
        one_pass(
            answered(prompt="b", rounds=3, accepted=4), answered(prompt="a", rounds=5, accepted=2)
        )
        for _ in range(2)
    ]
    found = kept(requests, passes)
    # Accepted drafts and a bonus a round.
    assert found["counts"] == {"passes": 2, "tokens": [14, 14], "rounds": [6, 10]}
    assert found["new_tokens"] == [8, 8]


def test_counts_of_all_requests_together_are_nobodys() -> None:
    together = one_pass(answered(), answered(prompt="1"), counted=Counters(rounds=6, accepted=8))
    assert kept([request(4), request(9)], [together])["counts"] is None


def test_without_a_drafter_nothing_is_counted() -> None:
    assert kept([request(4), request(9)], [])["counts"] is None


def test_the_digest_is_that_of_the_ids_in_their_order_whatever_they_are_called() -> None:
    one, other = [request(4, name="x"), request(9)], [request(4, name="y"), request(9)]
    assert kept(one, [])["prompts_digest"] == kept(other, [])["prompts_digest"]
    assert kept(one[::-1], [])["prompts_digest"] != kept(one, [])["prompts_digest"]
    assert digest([[1, 2], [3]]) != digest([[1], [2, 3]])

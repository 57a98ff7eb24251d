"""A pass holds what the engine answered and counted, whatever the engine does wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jobs.engines import figures
from jobs.engines.container import ended_by_sigterm
from jobs.engines.disturbance import Look, look
from jobs.engines.engine import Draft
from jobs.engines.load import run_pass, under_way
from jobs.engines.records import Pass, Request
from jobs.engines.talk import Address, ServerError
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import ENGINES, Serve
from tests.jobs.engines.made import answered, request

BOTH = pytest.mark.parametrize("name", ["sglang", "vllm"])
AT_ONCE = pytest.mark.parametrize("concurrency", [1, 3])
# Behind the prefill's token 20 more, in verifications of 4, 1, 4, 1, …: eight, of which four accept 3.
TOKENS, ROUNDS, ACCEPTED = 21, 8, 12
STILL = Look(at=0.0, busy=0.0, own=0.0)


def asked(
    name: str, address: Address, requests: Sequence[Request], concurrency: int = 1, **given: Any
) -> Pass:
    made: dict[str, Any] = {"arm": "speculative", "server": 0, "number": 0, "look": lambda: STILL}
    return run_pass(
        ENGINES[name](), address, requests, concurrency=concurrency, **{**made, **given}
    )


def several(count: int, **given: Any) -> list[Request]:
    """Prompts that end in 4, 14, 24, …"""
    return [request(4 + 10 * n, tokens=TOKENS, **given) for n in range(count)]


@BOTH
@AT_ONCE
def test_answers_come_back_whole_and_in_the_order_in_which_they_were_asked(
    name: str, concurrency: int, serve: Serve, draft: Draft
) -> None:
    requests = several(7)
    found = asked(name, serve(name, draft=draft), requests, concurrency)
    assert [a.prompt for a in found.answers] == [r.prompt.name for r in requests]
    for n, answer in enumerate(found.answers):
        assert answer.output == tuple(range(5 + 10 * n, 26 + 10 * n))
        assert answer.prompt_tokens == 3
        assert 0 <= answer.first_token_s <= answer.latency_s
        assert answer.sent_s >= 0
    assert found.disturbed == ()
    assert found.counted.requests == 7
    assert found.counted.generated == 7 * TOKENS
    assert found.counted.rounds == 7 * ROUNDS


def test_sglang_counts_each_request_also_beside_others(serve: Serve, draft: Draft) -> None:
    for concurrency in (1, 3):
        found = asked("sglang", serve(draft=draft), several(4), concurrency)
        for answer in found.answers:
            assert (answer.rounds, answer.accepted, answer.proposed) == (ROUNDS, ACCEPTED, 24)
            assert answer.histogram == (4, 0, 0, 4)
            assert answer.printed_accept_length == TOKENS / ROUNDS


def test_vllm_counts_the_request_of_one_alone_and_else_all_of_a_pass(
    serve: Serve, draft: Draft
) -> None:
    address = serve("vllm", draft=draft)
    for answer in asked("vllm", address, several(3)).answers:
        assert (answer.rounds, answer.accepted, answer.proposed) == (ROUNDS, ACCEPTED, 24)
    beside = asked("vllm", address, several(3), 3)
    assert {answer.rounds for answer in beside.answers} == {None}
    assert (beside.counted.rounds, beside.counted.accepted) == (3 * ROUNDS, 3 * ACCEPTED)
    assert beside.counted.per_position == (12, 12, 12)


@BOTH
@AT_ONCE
def test_the_accept_length_is_the_engines_whoever_counts(
    name: str, concurrency: int, serve: Serve, draft: Draft
) -> None:
    found = [asked(name, serve(name, draft=draft), several(4), concurrency)]
    length = figures.accept_length(found, most=4, seed=0)
    assert length is not None
    assert length.value == 2.5
    assert figures.per_position(found, 3) == [0.5, 0.5, 0.5]


@BOTH
def test_without_a_drafter_there_are_no_rounds(name: str, serve: Serve) -> None:
    found = asked(name, serve(name), several(2))
    assert [len(answer.output) for answer in found.answers] == [TOKENS, TOKENS]
    assert {answer.rounds for answer in found.answers} == {None}
    assert found.counted.rounds is None
    assert figures.accept_length([found], most=4, seed=0) is None


@BOTH
@AT_ONCE
def test_a_counter_that_lags_behind_is_waited_for(
    name: str, concurrency: int, serve: Serve, draft: Draft
) -> None:
    address = serve(name, draft=draft, fault="lags")
    for _ in range(2):
        found = asked(name, address, several(3), concurrency)
        assert (found.counted.rounds, found.counted.requests) == (3 * ROUNDS, 3)
        assert found.disturbed == ()


@BOTH
@AT_ONCE
def test_a_counter_that_never_comes_is_an_error(
    name: str, concurrency: int, serve: Serve, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.engines.load.COUNTED_S", 0.2)
    monkeypatch.setattr("jobs.engines.vllm.COUNTED_S", 0.2)
    address = serve(name, draft=draft, fault="never_counts")
    # SGLang has no such counter before its first request.
    with pytest.raises(ServerError, match=r"/metrics (does not count a|counts 0 of 2) request"):
        asked(name, address, several(2), concurrency)


def test_an_engine_without_counters_is_measured_all_the_same(serve: Serve, draft: Draft) -> None:
    found = asked("sglang", serve(draft=draft, fault="no_metrics"), several(2))
    assert found.counted.requests is None
    assert [answer.rounds for answer in found.answers] == [ROUNDS, ROUNDS]


def test_a_request_that_is_not_ours_disturbs_a_pass(serve: Serve, draft: Draft) -> None:
    words = "the server answered 3 requests that are not ours"
    assert asked("sglang", serve(draft=draft, fault="foreign"), several(3)).disturbed == (words,)
    vllm = serve("vllm", draft=draft, fault="foreign")
    assert asked("vllm", vllm, several(3), 3).disturbed == (words,)


def test_one_that_vllm_counted_with_ours_leaves_ours_uncounted(serve: Serve, draft: Draft) -> None:
    found = asked("vllm", serve("vllm", draft=draft, fault="foreign"), several(2))
    assert [answer.rounds for answer in found.answers] == [None, None]
    assert found.disturbed == ("the server answered 2 requests that are not ours",)


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("sglang", "miscounts", "counts 20 tokens, but its events hold 21 at the end"),
        ("vllm", "miscounts", "counts 20 tokens, but gave 21"),
        ("sglang", "no_ids", "gave no output_ids"),
        ("vllm", "no_ids", "gave no token_ids"),
        ("sglang", "refuses", "answered 400: .*the prompt is too long"),
        ("vllm", "refuses", "answered 400: .*the prompt is too long"),
        ("sglang", "aborts", "aborted: out of memory for its cache"),
        ("vllm", "no_usage", "gave no usage"),
    ],
)
@AT_ONCE
def test_an_answer_that_cannot_be_right_is_an_error(
    name: str, fault: str, words: str, concurrency: int, serve: Serve
) -> None:
    requests = [*several(2), request(4, first=fake.VICTIM), *several(2)]
    route = {"sglang": "/generate", "vllm": "/v1/completions"}[name]
    with pytest.raises(ServerError, match=rf"^http://127\.0\.0\.1:\d+{route} {words}"):
        asked(name, serve(name, fault=fault), requests, concurrency)


@BOTH
@AT_ONCE
def test_a_request_that_hangs_ends_the_pass_with_its_time(
    name: str, concurrency: int, serve: Serve, draft: Draft
) -> None:
    requests = [*several(2), request(4, first=fake.VICTIM, seconds=0.5), *several(2)]
    with pytest.raises(ServerError, match=r"did not finish within 0\.5 s"):
        asked(name, serve(name, draft=draft, fault="hangs"), requests, concurrency)


def test_events_that_hold_new_tokens_alone_are_put_together(serve: Serve, draft: Draft) -> None:
    found = asked("sglang", serve(draft=draft, FAKE_NEW_ONLY="1"), several(1))
    assert found.answers[0].output == tuple(range(5, 26))


@AT_ONCE
def test_each_answer_is_told_and_no_more_are_asked_at_once(
    concurrency: int, serve: Serve, draft: Draft
) -> None:
    lock, told = threading.Lock(), []

    def tick() -> None:
        with lock:
            told.append(threading.current_thread().name)

    asked("sglang", serve(draft=draft), several(8), concurrency, tick=tick)
    assert len(told) == 8
    assert len(set(told)) <= concurrency


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_pass_that_is_cancelled_or_fails_waits_for_no_request(
    cancelled: bool, serve: Serve, draft: Draft
) -> None:
    lock, left = threading.Lock(), threading.Event()
    told: list[None] = []
    waited_for: list[None] = []

    def tick() -> None:
        with lock:
            told.append(None)
            first = len(told) == 1
        if first and not cancelled:
            raise ServerError("failed")
        if first:
            os.kill(os.getpid(), signal.SIGTERM)
        if not left.wait(3.0):
            waited_for.append(None)

    address = serve(draft=draft)
    try:
        with pytest.raises(SystemExit if cancelled else ServerError), ended_by_sigterm():
            asked("sglang", address, several(8), 2, tick=tick)
        # Each worker is held by one; one more may begin behind the one that failed.
        assert (len(told) <= 3, waited_for) == (True, [])
    finally:
        left.set()


def test_a_pass_looks_before_and_behind(serve: Serve) -> None:
    looks = iter(
        [Look(at=0.0, busy=0.0, own=0.0), Look(at=1.0, busy=10.0 * (os.cpu_count() or 1), own=0.0)]
    )
    found = asked("sglang", serve(), several(1), look=lambda: next(looks))
    (words,) = found.disturbed
    assert words.startswith("other processes took ")
    assert asked("sglang", serve(), several(1), look=lambda: look(None)).disturbed == ()


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(0.0, 2.0)], 2.0),
        ([(0.0, 2.0), (3.0, 1.0)], 3.0),  # what lies between two requests is no serving
        ([(0.0, 2.0), (1.0, 2.0)], 3.0),
        ([(1.0, 2.0), (0.0, 4.0)], 4.0),
        ([(5.0, 1.0), (0.0, 1.0), (0.5, 1.0)], 2.5),
    ],
)
def test_a_pass_lasts_as_long_as_a_request_is_under_way(
    spans: list[tuple[float, float]], seconds: float
) -> None:
    found = [answered(sent_s=sent, latency_s=latency) for sent, latency in spans]
    assert under_way(found) == pytest.approx(seconds)

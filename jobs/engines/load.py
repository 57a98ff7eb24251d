"""Asking a server: all prompts once, so many at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from jobs.engines.disturbance import Look, disturbances
from jobs.engines.engine import Engine
from jobs.engines.records import Answered, Counters, Pass, Request
from jobs.engines.talk import Address, ServerError

COUNTED_S = 5.0  # for the counters to take in requests that have ended
PAUSE_S = 0.01


def run_pass(
    engine: Engine,
    address: Address,
    requests: Sequence[Request],
    *,
    arm: str,
    server: int,
    number: int,
    concurrency: int,
    look: Callable[[], Look],
    tick: Callable[[], None] = lambda: None,
) -> Pass:
    """Every request once, `concurrency` of them at a time, in the given order.

    `look` sees what else goes on on the machine, `tick` is called behind each answer. Raises
    ServerError, of the first request that fails.
    """
    engine.forget(address)
    alone = concurrency == 1
    seen, before = look(), engine.counters(address)
    began, started = time.time(), time.perf_counter()

    def one(request: Request) -> Answered:
        answer = engine.ask(address, request, started, alone=alone)
        tick()
        return answer

    if alone:
        answers = [one(request) for request in requests]
    else:
        pool = ThreadPoolExecutor(concurrency)
        try:
            futures = [pool.submit(one, request) for request in requests]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            answers = [future.result() for future in sorted(done, key=futures.index)]
        finally:  # all are done, or the pass has failed or is cancelled and waits for nothing
            pool.shutdown(wait=False, cancel_futures=True)
    counted = counted_since(engine, address, before, len(answers))
    return Pass(
        arm=arm,
        server=server,
        number=number,
        concurrency=concurrency,
        began=began,
        wall_s=under_way(answers),
        answers=tuple(answers),
        counted=counted,
        disturbed=tuple(disturbances(seen, look(), asked=len(answers), counted=counted)),
    )


def under_way(answers: Sequence[Answered]) -> float:
    """Seconds in which a request was under way: reading counters in between is no serving."""
    found = until = 0.0
    for answer in sorted(answers, key=lambda a: a.sent_s):
        ended = answer.sent_s + answer.latency_s
        found += max(0.0, ended - max(until, answer.sent_s))
        until = max(until, ended)
    return found


def counted_since(engine: Engine, address: Address, before: Counters, requests: int) -> Counters:
    """What a server counted; it may take in a request a moment behind its answer. Raises ServerError."""
    end = time.monotonic() + COUNTED_S
    while True:
        counted = engine.counters(address).since(before)
        if counted.requests is None or counted.requests >= requests:
            return counted
        if time.monotonic() > end:
            raise ServerError(
                f"{address.url}/metrics counts {counted.requests} of {requests} requests that have ended"
            )
        time.sleep(PAUSE_S)

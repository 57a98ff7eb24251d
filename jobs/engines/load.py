"""Asking a server: all prompts once, so many at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from jobs.engines.disturbance import Look, disturbances
from jobs.engines.engine import Engine
from jobs.engines.records import Answered, Pass, Request
from jobs.engines.talk import Address


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
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(one, request) for request in requests]
            done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
            answers = [future.result() for future in sorted(done, key=futures.index)]
    ended = max(answer.sent_s + answer.latency_s for answer in answers)
    counted = engine.counters(address).since(before)
    return Pass(
        arm=arm,
        server=server,
        number=number,
        concurrency=concurrency,
        began=began,
        wall_s=ended - min(answer.sent_s for answer in answers),
        answers=tuple(answers),
        counted=counted,
        disturbed=tuple(disturbances(seen, look(), asked=len(answers), counted=counted)),
    )

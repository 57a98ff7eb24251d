"""What else goes on while a pass is measured is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jobs.engines.disturbance import FOREIGN_CORES, SHARE, Look, disturbances, look, used
from jobs.engines.records import Counters

CORES = os.cpu_count() or 1
LIMIT = max(FOREIGN_CORES, SHARE * CORES)
NOBODY = Counters()


def after(seconds: float, *, busy: float, own: float, **given: Any) -> Look:
    return Look(at=seconds, busy=busy, own=own, **given)


START = after(0.0, busy=0.0, own=0.0)


def said(now: Look, counted: Counters = NOBODY, before: Look = START, asked: int = 8) -> list[str]:
    return list(disturbances(before, now, asked=asked, counted=counted))


def test_ones_own_work_is_no_disturbance() -> None:
    assert said(after(10.0, busy=40.0, own=40.0)) == []


def test_others_are_one_above_a_share_of_the_cores() -> None:
    below, above = 0.9 * LIMIT, 1.1 * LIMIT
    assert said(after(10.0, busy=5 + 10 * below, own=5.0)) == []
    (words,) = said(after(10.0, busy=5 + 10 * above, own=5.0))
    assert words == f"other processes took {above:.1f} of {CORES} cores"


def test_whose_server_it_is_not_cannot_tell_whose_work_is_whose() -> None:
    found = look(None)
    assert found.own == found.busy


def test_anothers_process_on_a_gpu_is_named() -> None:
    before = after(0.0, busy=0.0, own=0.0, gpu_pids=frozenset({7}))
    now = after(1.0, busy=0.0, own=0.0, gpu_pids=frozenset({7, 9}))
    assert said(now, before=before) == ["pid 9 came to the GPU"]  # the other only holds memory
    assert said(now) == []  # nobody looked before


def test_requests_that_are_not_ours_are_counted() -> None:
    still = after(1.0, busy=0.0, own=0.0)
    assert said(still, Counters(requests=8)) == []
    assert said(still, Counters(requests=10)) == [
        "the server answered 2 requests that are not ours"
    ]
    assert said(still, Counters()) == []


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps a processor busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def test_a_process_at_work_is_seen_in_the_machines_time_and_its_own(
    busy: subprocess.Popen[bytes], eventually: Callable[..., Any]
) -> None:
    before = look([busy.pid])
    eventually(lambda: look([busy.pid]).own >= before.own + 0.2)
    assert look([busy.pid]).busy >= before.busy + 0.2 - 2 / os.sysconf("SC_CLK_TCK")


def test_a_process_that_is_gone_has_used_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert used(gone.pid) == 0
    assert used(os.getpid()) > 0

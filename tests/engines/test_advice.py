"""Engines that are slow in one place: the advice says in which, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.engines import figures
from jobs.engines.disturbance import look
from jobs.engines.engine import Draft
from jobs.engines.limits import Advice, Limits, advise, in_words, split
from jobs.engines.load import run_pass
from jobs.engines.records import Pass
from tests.engines.conftest import Started, Starter, request
from tests.engines.counting import Kind, write_drafter, write_target
from tests.engines.slowed import Delays

STEPS, TOKENS = 3, 17
SLOW = 0.15  # seconds; what a small engine on a CPU needs besides is a tenth of it
WHERE = ("draft", "head", "target")
Passes = dict[str, Pass]  # by where it was slow


def slow_passes(server: Started, delays: Delays) -> Passes:
    """A pass of one prompt under each delay, behind one that is not counted."""
    passes = {}
    for where in WHERE:
        delays.set(**{where: SLOW})
        for number in (0, 1):
            passes[where] = run_pass(
                server.engine,
                server.running.address,
                [request([11, 12, 13, 14], TOKENS)],
                arm="test",
                server=0,
                number=number,
                concurrency=1,
                look=lambda: look(server.running.pids()),
            )
    delays.set()
    return passes


def advised(plain: Pass, drafted: Pass, fewer: Pass) -> tuple[Limits, Advice]:
    """What a benchmark makes of three arms."""
    step_s, round_s = figures.token_s([plain]), figures.round_s([drafted])
    other_s = figures.round_s([fewer])
    length = figures.accept_length([drafted], STEPS + 1, seed=0)
    stood = figures.per_position([drafted], STEPS)
    assert step_s
    assert round_s
    assert other_s
    assert length
    assert stood
    limits = Limits(
        concurrency=1,
        step_s=step_s,
        round_s=round_s,
        accept_length=length.value,
        steps=STEPS,
    )
    limits = split(limits, 1, other_s)
    advice = advise(limits, stood)
    assert advice is not None
    return limits, advice


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_what_is_slow_decides_the_advice(starter: Starter, tmp_path: Path, engine: str) -> None:
    target = write_target(tmp_path / "target")
    folder = write_drafter(tmp_path / "drafter", Kind.right)
    delays = Delays(tmp_path / "delays.json")
    plain, drafted, fewer = (
        slow_passes(starter.start(engine, target, draft, slowed=delays), delays)
        for draft in (None, Draft(folder=folder, steps=STEPS), Draft(folder=folder, steps=1))
    )
    for where in ("draft", "head"):
        # A round of 3 drafts and 4 tokens takes 3 delays, 4 plain steps none of them.
        limits, advice = advised(plain[where], drafted[where], fewer[where])
        assert limits.draft_s is not None
        assert limits.draft_s > SLOW / 2
        assert advice.best == 0, where
        assert "best: no drafter at this concurrency" in in_words(limits, advice)
        assert limits.perfect < 1
    # It waits once a round as it does once a plain step: every draft that stands saves one.
    limits, advice = advised(plain["target"], drafted["target"], fewer["target"])
    assert limits.fixed_s is not None
    assert limits.fixed_s > SLOW / 2
    assert limits.step_s >= SLOW
    assert advice.best == STEPS
    assert limits.break_even < 2

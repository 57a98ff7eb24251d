"""Drafters of a known accept length behind real engines: every verification as it was constructed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.engines import figures
from jobs.engines.disturbance import look
from jobs.engines.engine import Draft
from jobs.engines.load import run_pass
from jobs.engines.records import Answered, Pass
from tests.engines.conftest import REQUEST_S, Started, Starter, request
from tests.engines.counting import Kind, counted, walk, write_drafter, write_target

STEPS = 3
TOKENS = 61  # of an answer: the prefill's, and 60 of the rounds
LASTS = (14, 21, 57, 153)  # what prompts end in: four places in the circle of five


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("counting") / "target")


def asked(server: Started, concurrency: int) -> Pass:
    """Four prompts of consecutive numbers."""
    requests = [request([(last - 7 + i) % 160 for i in range(8)], TOKENS) for last in LASTS]
    return run_pass(
        server.engine,
        server.running.address,
        requests,
        arm="test",
        server=0,
        number=0,
        concurrency=concurrency,
        look=lambda: look(server.running.pids()),
    )


def rounds_of(kind: Kind, last: int, topk: int) -> int:
    """Verifications until an answer is whole: the walk that the drafter's construction gives."""
    return len(walk(kind, last, TOKENS, STEPS, topk))


def check(p: Pass, kind: Kind, topk: int) -> None:
    for answer, last in zip(sorted(p.answers, key=lambda a: int(a.prompt)), LASTS, strict=True):
        assert list(answer.output) == counted(last, TOKENS)
        if answer.rounds is not None:
            assert answer.rounds == rounds_of(kind, last, topk), answer.prompt
    assert p.counted.rounds == sum(rounds_of(kind, last, topk) for last in LASTS)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("kind", [Kind.right, Kind.fifth_wrong, Kind.reduced])
def test_rounds_are_as_constructed(
    starter: Starter, target: Path, tmp_path: Path, engine: str, kind: Kind
) -> None:
    folder = write_drafter(tmp_path / "drafter", kind)
    server = starter.start(engine, target, Draft(folder=folder, steps=STEPS))
    alone = asked(server, 1)
    check(alone, kind, 1)
    assert all(answer.rounds is not None for answer in alone.answers)
    expected = {Kind.right: 4.0}.get(kind, 2.5)
    length = figures.accept_length([alone], STEPS + 1, seed=0)
    assert length is not None
    assert length.value == pytest.approx(expected, abs=0.1)  # the last round of an answer is cut
    check(asked(server, 4), kind, 1)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_random_drafter_is_hardly_accepted(
    starter: Starter, target: Path, tmp_path: Path, engine: str
) -> None:
    folder = write_drafter(tmp_path / "drafter", Kind.random)
    server = starter.start(engine, target, Draft(folder=folder, steps=STEPS))
    p = asked(server, 1)
    answers: tuple[Answered, ...] = p.answers
    assert [list(a.output) for a in answers] == [counted(int(a.prompt), TOKENS) for a in answers]
    length = figures.accept_length([p], STEPS + 1, seed=0)
    assert length is not None
    assert length.value < 1.1
    # The target's logits: ten for the token that is right, none for any other.
    one, other = server.engine.top_two(server.running.address, [3, 4, 5, 6], REQUEST_S)
    assert one - other == pytest.approx(10.0, abs=1e-3)


def test_a_tree_of_sglang_gains_what_its_second_branch_holds(
    starter: Starter, target: Path, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", Kind.fifth_wrong)
    draft = Draft(folder=folder, steps=STEPS, topk=2, draft_tokens=6)
    check(asked(starter.start("sglang", target, draft), 1), Kind.fifth_wrong, 2)

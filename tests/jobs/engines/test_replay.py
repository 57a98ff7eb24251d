"""Recorded input through the drafter in plain torch, beside logits that are known by construction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.chain import draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import connect
from eagle3.errors import BadInput
from eagle3.target import TargetParts
from eagle3.wiring import Concat, Embedding, Residual, Rotation, Wiring
from jobs.engine_probe import with_replay
from jobs.engines.replay import Take, replay
from jobs.worker import flaw
from tests.eagle3.searchable import PLAIN, STATES, checkpoint
from tests.eagle3.wired import target_of

HYPOTHESIS = Wiring.of_states(STATES[:3])


@pytest.fixture
def target(tmp_path: Path) -> TargetParts:
    return target_of(tmp_path / "target", PLAIN.hidden, rope_theta=77.0)


def takes(
    own: DrafterCheckpoint, target: TargetParts, served: Wiring, noise: float = 0.0
) -> list[Take]:
    """What an engine that runs `served` would have recorded: its first draft from whole forwards."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (9, 14):
        ids = torch.randint(PLAIN.vocab, (length + 1,), generator=generator)
        aux = torch.randn(length, 3 * PLAIN.target_hidden, generator=generator)
        logits = drafted_logits(own, target, served, ids, aux)
        off = torch.randn(logits.shape, generator=generator) * noise
        made.append(Take(ids=ids, fed=aux, logits=logits + 7.0, again=logits + 7.0 + off))
    return made


def drafted_logits(
    own: DrafterCheckpoint, target: TargetParts, served: Wiring, ids: Tensor, aux: Tensor
) -> Tensor:
    """Logits behind the last row, by the model's own forward over all rows."""
    tied = connect(own, target, served)
    rows = torch.arange(len(aux))
    embedded = tied.embedding[ids[1 : len(aux) + 1]][None]
    y = tied.drafter.step(embedded, tied.drafter.fuse(aux)[None], rows, [])
    logits = tied.drafter.logits(y, tied.head)[0]
    drafted = tied.chains(ids, aux, rows[-1:], steps=1)
    to_target = draft_to_target_ids(own.drafter.d2t, served.d2t, PLAIN.vocab)
    assert int(to_target[logits[-1].argmax()]) == int(drafted[0, 0])
    return logits[-1]


def test_an_engine_that_runs_the_hypothesis_gives_its_logits(target: TargetParts) -> None:
    own = checkpoint(PLAIN)
    found = replay(own, target, HYPOTHESIS, takes(own, target, HYPOTHESIS, 1e-3))
    assert found.same
    assert found.own.error < 1e-5  # what is added to all logits is no error
    assert 0 < found.noise < 0.01
    assert found.named is None
    assert "makes the logits that the drafter alone makes" in found.in_words
    assert found.plain()["takes"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"residual": Residual.normed},
        {"concat": Concat.hidden_first},
        {"rotation": Rotation.interleaved},
    ],
)
def test_what_an_engine_does_otherwise_is_named(
    target: TargetParts, change: dict[str, object]
) -> None:
    own = checkpoint(PLAIN)
    served = replace(HYPOTHESIS, **change)  # type: ignore[arg-type]
    found = replay(own, target, HYPOTHESIS, takes(own, target, served))
    assert not found.same
    assert found.named is not None
    ((name, value),) = change.items()
    assert found.named.changed == (f"{name}={value.value}",)  # type: ignore[attr-defined]
    assert f"those of {name}={value.value}" in found.in_words  # type: ignore[attr-defined]


def test_two_changes_are_no_single_one(target: TargetParts) -> None:
    own = checkpoint(PLAIN)
    served = replace(HYPOTHESIS, residual=Residual.normed, concat=Concat.hidden_first)
    found = replay(own, target, HYPOTHESIS, takes(own, target, served))
    assert found.named is None
    assert "no single change of the wiring gives them, the closest" in found.in_words


def test_logits_that_are_no_numbers_are_like_nothing(target: TargetParts) -> None:
    own = checkpoint(PLAIN)
    broken = [
        replace(take, logits=torch.full_like(take.logits, float("nan")))
        for take in takes(own, target, HYPOTHESIS)
    ]
    found = replay(own, target, HYPOTHESIS, broken)
    assert not found.same
    assert found.named is None
    assert "is not told" in found.in_words
    assert flaw(found.plain(), "replay") is None  # a result file can hold it


def test_of_a_repeat_that_differs_nothing_is_told(target: TargetParts) -> None:
    own = checkpoint(PLAIN)
    served = replace(HYPOTHESIS, residual=Residual.normed)
    found = replay(own, target, HYPOTHESIS, takes(own, target, served, 1.0))
    assert found.noise > 0.1
    assert not found.same
    assert found.named is None
    assert "is not told" in found.in_words


def test_a_hypothesis_that_cannot_be_run_is_refused(target: TargetParts) -> None:
    own = replace(checkpoint(PLAIN), embedding=None)
    recorded = takes(own, target, HYPOTHESIS)
    with pytest.raises(BadInput, match="embedding"):
        replay(own, target, replace(HYPOTHESIS, embedding=Embedding.own), recorded)


def test_logits_of_another_width_are_refused(target: TargetParts) -> None:
    own = checkpoint(PLAIN)
    recorded = [
        replace(take, logits=take.logits[:-1], again=take.again[:-1])
        for take in takes(own, target, HYPOTHESIS)
    ]
    width = PLAIN.draft_vocab
    with pytest.raises(BadInput, match=f"makes {width - 1} logits a row, but its head has {width}"):
        replay(own, target, HYPOTHESIS, recorded)


@pytest.mark.parametrize("where", ["none", "head"])
def test_an_engine_that_makes_something_else_is_at_fault(target: TargetParts, where: str) -> None:
    own = checkpoint(PLAIN)
    served = replace(HYPOTHESIS, residual=Residual.normed)
    other = replay(own, target, HYPOTHESIS, takes(own, target, served))
    fault, why = with_replay(where, "it is fed as the wiring says", other)
    assert fault == "engine"
    assert "those of residual=normed" in why
    same = replay(own, target, HYPOTHESIS, takes(own, target, HYPOTHESIS))
    assert with_replay(where, "because", same) == (where, "because")
    assert with_replay("config", "because", other) == ("config", "because")
    assert with_replay("engine", "because", same)[1].startswith("because; of its input the engine")


def test_without_a_recording_there_is_no_replay(target: TargetParts) -> None:
    with pytest.raises(BadInput, match="no logits of the drafter were recorded"):
        replay(checkpoint(PLAIN), target, HYPOTHESIS, [])

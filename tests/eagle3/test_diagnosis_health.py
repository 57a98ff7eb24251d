"""Which parts of a drafter work is measured on its own tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.diagnosis import measure
from eagle3.diagnosis.evidence import Part
from eagle3.metrics import Difference, Rate
from eagle3.search.score import Scorer
from eagle3.target import TargetParts
from eagle3.wiring import Embedding, Feedback, HeadInput, Wiring
from tests.eagle3.searchable import PLAIN, STEPS, checkpoint, small_texts
from tests.eagle3.wired import target_of

W = Wiring.of_states((0, 2, 5), embedding=Embedding.own)
TEACHER = "target_argmax"


@pytest.fixture
def target(tmp_path: Path) -> TargetParts:
    return target_of(tmp_path / "target", PLAIN.target_hidden)


def with_norm(weight: torch.Tensor) -> DrafterCheckpoint:
    made = checkpoint(PLAIN)
    return measure.with_tensors(made, {**made.drafter.state_dict(), "norm.weight": weight})


def parts_of(made: DrafterCheckpoint, target: TargetParts) -> dict[str, Part]:
    texts = small_texts()
    found = measure.health(
        Scorer(made, target, texts, steps=STEPS),
        made,
        W,
        TEACHER,
        remake=lambda maimed: Scorer(maimed, target, texts, steps=STEPS),
        seed=0,
    )
    return {part.name: part for part in found.parts}


def test_every_part_is_measured_and_one_of_zeros_is_worth_nothing(target: TargetParts) -> None:
    made = checkpoint(PLAIN)
    weight = made.drafter.fc.weight.clone()
    weight[:, PLAIN.target_hidden : 2 * PLAIN.target_hidden] = 0
    parts = parts_of(
        measure.with_tensors(made, {**made.drafter.state_dict(), "fc.weight": weight}), target
    )
    assert list(parts) == [
        "what the target's states feed in",
        "the attention",
        "the MLP",
        "chunk 0 of fc",
        "chunk 1 of fc",
        "chunk 2 of fc",
    ]
    idle = parts["chunk 1 of fc"]
    assert idle.worth.value == idle.share == 0
    assert idle.loss is not None
    assert (idle.loss.low, idle.loss.value, idle.loss.high) == (0, 0, 0)


def test_the_cross_entropy_of_a_part_is_that_of_the_first_step_without_it(
    target: TargetParts,
) -> None:
    made = checkpoint(PLAIN)
    part = parts_of(made, target)["chunk 0 of fc"]
    maimed = measure.without_chunk(made, 0)

    def mean_loss(of: DrafterCheckpoint) -> float:
        scorer = Scorer(of, target, small_texts(), steps=STEPS)
        sums, rows = scorer.losses([W], range(len(scorer.texts)), TEACHER)
        return float(sums.sum() / rows.sum())

    assert part.loss is not None
    assert part.loss.value == pytest.approx(mean_loss(maimed) - mean_loss(made))


def test_a_last_norm_that_was_trained_is_not_left_out(target: TargetParts) -> None:
    raw = Wiring.of_states((0, 2, 5), head_input=HeadInput.raw)
    fed = Wiring.of_states((0, 2, 5), head_input=HeadInput.raw, feedback=Feedback.normed)
    width = PLAIN.hidden
    trained = torch.linspace(-1.5, 2.0, width)
    said = measure.left_out(with_norm(trained), target, raw)
    assert said is not None
    assert "between -1.50 and 2.00" in said
    # Run for the head or for the feedback it is trained there; as it began it never was.
    assert measure.left_out(with_norm(trained), target, W) is None
    assert measure.left_out(with_norm(trained), target, fed) is None
    assert measure.left_out(with_norm(torch.ones(width)), target, raw) is None
    begun = torch.linspace(0.5, 2.0, width)
    target.final_norm().weight.copy_(begun)
    assert measure.left_out(with_norm(begun), target, raw) is None


def test_few_texts_settle_only_what_is_clear() -> None:
    def part(low: float, single: bool) -> Part:
        without = Rate(value=0.3, low=0.3, high=0.3, numerator=3, denominator=10, truth=TEACHER)
        worth = Difference(value=0.2, low=low, high=0.4)
        return Part(name="a part", single=single, without=without, worth=worth, share=0.4)

    # Of one of several it is enough that it does no harm, of all of a sort a share of 0.5 has to go.
    for low, single, clear in (
        (0.001, True, True),
        (0.0, True, False),
        (-0.1, True, False),
        (measure.USELESS * 0.5, False, True),
        (measure.USELESS * 0.5 - 0.001, False, False),
    ):
        assert measure.clearly_works(part(low, single)) is clear


@pytest.mark.parametrize("few", [2, 16])
def test_what_is_not_clear_on_few_texts_is_measured_on_all(
    few: int, target: TargetParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "FEW_TEXTS", few)
    monkeypatch.setattr(measure, "clearly_works", lambda _: False)
    made, texts = checkpoint(PLAIN), small_texts()
    total = sum(len(text.rows) for text in texts)
    assert {part.without.denominator for part in parts_of(made, target).values()} == {total}

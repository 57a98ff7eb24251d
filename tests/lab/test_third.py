"""The third lab drafter, two layers on a sound teacher, and the same early in its training."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.lab.build import FOLDERS, THIRD_STATES, THIRD_VOCAB, speculators_plans, two_layers
from eagle3.lab.drafter import Texts
from eagle3.lab.target import TargetShape
from eagle3.metrics import Count, Truth, paired_difference
from eagle3.model import Drafter
from eagle3.samples import Sample
from eagle3.target import TargetParts
from eagle3.wiring import D2T
from orchestrator.paths import CLONE
from tests.lab.conftest import held_out_samples, interval, pooled, scores

THIRD, EARLY = CLONE / "lab" / "drafter_two_layers", CLONE / "lab" / "drafter_early"
AUX = THIRD_STATES[:-1]
STEPS = 4
Counts = dict[Truth, list[dict[str, Count]]]
Score = Callable[..., Counts]
FOUND = Truth.target_argmax


@pytest.fixture(scope="module")
def third() -> DrafterCheckpoint:
    return load_drafter(THIRD)


@pytest.fixture(scope="module")
def early() -> DrafterCheckpoint:
    return load_drafter(EARLY)


@pytest.fixture(scope="module")
def held_out() -> list[Sample]:
    return held_out_samples((0, 3, 31, *THIRD_STATES))


@pytest.fixture(scope="module")
def score(held_out: list[Sample], parts: TargetParts) -> Score:
    """Counts of every sample under each truth, over as few steps as asked for."""

    def scored(
        drafter: Drafter,
        states: tuple[int, ...] = AUX,
        steps: int = 1,
        reading: D2T = D2T.offset,
    ) -> Counts:
        return scores(drafter, held_out, parts, states, steps, reading)

    return scored


@pytest.fixture(scope="module")
def declared(score: Score, third: DrafterCheckpoint) -> Counts:
    return score(third.drafter, steps=STEPS)


def of(counts: Counts, name: str, truth: Truth = FOUND) -> list[Count]:
    return [text[name] for text in counts[truth]]


@pytest.mark.parametrize("folder", [THIRD, EARLY], ids=lambda folder: folder.name)
def test_it_is_what_speculators_wrote(folder: Path) -> None:
    checkpoint = load_drafter(folder)
    form, shape = checkpoint.form, checkpoint.drafter.shape
    assert form.layout.value == "speculators"
    assert form.layer_ids.value == AUX
    assert form.layer_convention.value == "input"
    for switch in ("norm_before_residual", "norm_before_fc", "feedback_normed"):
        assert getattr(form, switch).value is False
    assert form.fc_norm.value is True
    assert form.fc_norm.origin == "config.json: fc_norm"
    assert (shape.num_layers, shape.intermediate, shape.heads, shape.kv_heads) == (2, 256, 4, 2)
    assert (shape.hidden, shape.head_dim, shape.vocab, shape.draft_vocab) == (128, 32, 1024, 512)
    assert not any(shape.windows)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_version"] == "0.9.0"
    decoder = config["transformer_layer_config"]
    assert two_layers(TargetShape()).items() <= decoder.items()
    names = set(load_file(folder / "model.safetensors"))
    assert {f"fc_norm.{i}.weight" for i in range(3)} <= names
    assert {"layers.0.hidden_norm.weight", "layers.1.self_attn.q_proj.weight", "d2t"} <= names
    assert "layers.1.hidden_norm.weight" not in names
    assert not any(name.startswith(("midlayer.", "verifier_")) for name in names)


def test_the_early_one_is_the_same_drafter_of_other_weights(
    third: DrafterCheckpoint, early: DrafterCheckpoint
) -> None:
    assert (EARLY / "config.json").read_bytes() == (THIRD / "config.json").read_bytes()
    assert early.fingerprint != third.fingerprint
    late, soon = third.drafter.state_dict(), early.drafter.state_dict()
    assert torch.equal(late["d2t"], soon["d2t"])
    assert not torch.equal(late["fc.weight"], soon["fc.weight"])


def test_its_teacher_is_the_target_and_it_leaves_headroom(declared: Counts) -> None:
    right = interval(of(declared, "accuracy"), FOUND)
    assert right.denominator >= 4000
    assert 0.6 <= right.value < 0.9
    for truth in (Truth.stored_teacher, Truth.next_token):  # the texts are the target's, greedy
        assert pooled(of(declared, "accuracy", truth)) == pytest.approx(right.value, abs=0.002)
    assert 2 <= pooled(of(declared, "accept_length")) <= 3.5
    assert pooled(of(declared, "coverage")) > right.high


def test_the_early_one_is_undertrained_and_not_dead(
    declared: Counts, early: DrafterCheckpoint, score: Score
) -> None:
    found = score(early.drafter, steps=STEPS)
    assert 0.3 <= pooled(of(found, "accuracy")) <= 0.5
    for name in ("accuracy", "accept_length"):
        assert paired_difference(of(declared, name), of(found, name)).low > 0, name


def test_its_states_and_their_order_show(
    declared: Counts, third: DrafterCheckpoint, score: Score
) -> None:
    others = [order for order in permutations(AUX) if order != AUX]
    others += [(0, 3, 31), (3, 31, 61)]
    right = of(declared, "accuracy")
    for states in others:
        wrong = of(score(third.drafter, states), "accuracy")
        assert paired_difference(right, wrong, comparisons=len(others)).low > 0, states


@pytest.mark.parametrize(
    "switches",
    [
        {"norm_before_residual": True},
        {"head_norm": False},
        {"fc_norm": False},
        {"feedback_normed": True},
    ],
    ids=lambda switches: next(iter(switches)),
)
def test_its_norms_show(
    switches: dict[str, Any], declared: Counts, third: DrafterCheckpoint, score: Score
) -> None:
    wrong = score(third.drafter.rewired(**switches), steps=STEPS)
    name = "accept_length" if "feedback_normed" in switches else "accuracy"
    assert paired_difference(of(declared, name), of(wrong, name)).low > 0


def test_its_vocabulary_is_of_offsets(third: DrafterCheckpoint, score: Score) -> None:
    assert third.drafter.d2t.shape == (THIRD_VOCAB,)
    wrong = of(score(third.drafter, reading=D2T.absolute), "accuracy")
    assert pooled(wrong) < 0.05


def test_what_build_json_says_is_what_a_rebuild_does() -> None:
    build = json.loads((CLONE / "lab" / "build.json").read_text())
    plans = speculators_plans(Path("python"), build["seed"], epochs=3)
    assert plans.keys() == FOLDERS.keys()
    assert build["trained_by_speculators"] == {
        stage: plan.record() for stage, plan in plans.items()
    }
    for stage, folder in FOLDERS.items():
        config = json.loads((CLONE / "lab" / folder / "config.json").read_text())
        assert config["eagle_aux_hidden_state_layer_ids"] == list(plans[stage].states[:-1])
        assert config["draft_vocab_size"] == plans[stage].draft_vocab
        assert config["speculators_config"]["verifier"]["name_or_path"] == "lab-target"


def test_a_plan_takes_the_first_of_the_texts() -> None:
    texts = Texts.whole(torch.arange(12).view(4, 3))
    assert texts.head(None).ids.shape == (4, 3)
    first = texts.head(2)
    assert first.ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first.first.shape == first.last.shape == (2,)

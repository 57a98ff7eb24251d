"""The second lab drafter: speculators trained it well, but on what is not the target's end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.errors import BadInput
from eagle3.lab.build import SECOND_STATES
from eagle3.lab.drafter import Texts
from eagle3.lab.layout import load_live
from eagle3.lab.speculators_drafter import check_peers, write_dump
from eagle3.metrics import Count, Truth, paired_difference, scored_rows
from eagle3.model import Drafter
from eagle3.samples import Sample
from eagle3.target import TargetParts
from orchestrator.paths import CLONE
from tests.lab.conftest import CAPTURE, held_out_samples, interval, pooled, scores, taught

SECOND = CLONE / "lab" / "drafter_speculators"
Counts = dict[Truth, list[Count]]


@pytest.fixture(scope="module")
def second() -> DrafterCheckpoint:
    return load_drafter(SECOND)


@pytest.fixture(scope="module")
def held_out() -> list[Sample]:
    return held_out_samples(CAPTURE["states"])


@pytest.fixture(scope="module")
def score(held_out: list[Sample], parts: TargetParts) -> Callable[[Drafter], Counts]:
    """Right first-step tokens of every sample under each truth."""

    def scored(drafter: Drafter) -> Counts:
        found = scores(drafter, held_out, parts, SECOND_STATES[:-1], steps=1)
        return {truth: [text["accuracy"] for text in texts] for truth, texts in found.items()}

    return scored


@pytest.fixture(scope="module")
def declared(score: Callable[[Drafter], Counts], second: DrafterCheckpoint) -> Counts:
    return score(second.drafter)


def test_it_is_what_speculators_wrote(second: DrafterCheckpoint) -> None:
    form = second.form
    assert form.layout.value == "speculators"
    assert any("layout speculators" in note for note in second.notes)
    assert form.norm_before_residual.value is True
    assert form.norm_before_residual.origin == "config.json: norm_before_residual"
    assert form.layer_ids.value == SECOND_STATES[:-1]
    assert form.layer_convention.value == "input"
    assert {path.name for path in SECOND.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((SECOND / "config.json").read_text())
    assert config["speculators_version"] == "0.9.0"
    names = set(load_file(SECOND / "model.safetensors"))
    assert {"layers.0.hidden_norm.weight", "embed_tokens.weight", "d2t", "t2d"} <= names
    assert not any(name.startswith(("midlayer.", "verifier_")) for name in names)


def test_it_agrees_with_its_teacher_and_not_with_the_target(declared: Counts) -> None:
    teacher, text, end = (
        interval(declared[truth], truth)
        for truth in (Truth.stored_teacher, Truth.next_token, Truth.target_argmax)
    )
    assert teacher.denominator == end.denominator >= 4000
    assert teacher.value >= 0.7
    assert teacher.low > end.high + 0.25
    assert text.numerator == end.numerator  # the target wrote the texts greedily


def test_the_teacher_is_not_the_targets_end(held_out: list[Sample], parts: TargetParts) -> None:
    counts = []
    for sample in held_out:
        assert sample.target_argmax is not None
        rows = scored_rows(sample.loss_mask) + 1
        hits = taught(sample, parts)[rows] == sample.target_argmax[rows]
        counts.append(Count(int(hits.sum()), len(rows)))
    assert interval(counts, Truth.target_argmax).high < 0.5


def test_a_residual_that_is_not_normed_costs_much(
    declared: Counts, score: Callable[[Drafter], Counts], second: DrafterCheckpoint
) -> None:
    raw = score(second.drafter.rewired(norm_before_residual=False))
    for truth in (Truth.stored_teacher, Truth.target_argmax):
        assert paired_difference(declared[truth], raw[truth]).low > 0, truth
    assert pooled(raw[Truth.stored_teacher]) < pooled(declared[Truth.stored_teacher]) - 0.2


def test_its_dump_is_in_speculators_layout_and_ends_with_state_59(tmp_path: Path) -> None:
    live = load_live(CLONE / "lab" / "target")
    ids = torch.arange(60).view(3, 20)
    texts = Texts(ids=ids, first=torch.tensor([5, 8, 8]), last=torch.tensor([20, 14, 20]))
    write_dump(live, texts, SECOND_STATES, tmp_path, batch=2)
    described = load_file(tmp_path / "texts.safetensors")
    assert described["lengths"].tolist() == [20, 14, 20]
    assert described["loss_mask"].split([20, 14, 20])[1].tolist() == [False] * 8 + [True] * 6
    _, kept = live(ids, SECOND_STATES)
    for i, length in enumerate([20, 14, 20]):
        dumped = load_file(tmp_path / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(dumped["token_ids"], ids[i, :length])
        assert dumped["hidden_states"].shape == (length, 4, 128)
        for slot, k in enumerate(SECOND_STATES):
            expected = kept[k][i, :length].bfloat16()
            torch.testing.assert_close(dumped["hidden_states"][:, slot], expected)


def test_a_rebuild_without_the_peers_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"cannot be started .* `python -m tests\.peers\.setup_peers`"
    ):
        check_peers(tmp_path / "python")
    with pytest.raises(BadInput, match=r"cannot run speculators' training .*No module named"):
        check_peers(Path(sys.executable))

"""The second lab drafter: speculators trained it well, but on what is not the target's end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.errors import BadInput
from eagle3.lab.build import PROMPT
from eagle3.lab.drafter import Texts, continue_prompts, own_words
from eagle3.lab.layout import lay_out, load_live
from eagle3.lab.speculators_drafter import STATES, check_peers, write_dump
from eagle3.metrics import Count, Rate, Truth, paired_difference, rate, scored_rows, truth_tokens
from eagle3.model import Drafter
from eagle3.samples import Sample
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import D2T
from orchestrator.paths import CLONE
from tests.lab.conftest import pooled

SECOND = CLONE / "lab" / "drafter_speculators"
Counts = dict[Truth, list[Count]]


@pytest.fixture(scope="module")
def second() -> DrafterCheckpoint:
    return load_drafter(SECOND)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    return load_target_parts(lay_out(CLONE / "lab" / "target", tmp_path_factory.mktemp("t") / "t"))


@pytest.fixture(scope="module")
def held_out() -> list[Sample]:
    """The samples that conf/data/lab.yaml captures, from the trained layers alone: in seconds."""
    wanted = yaml.safe_load((CLONE / "conf" / "data" / "lab.yaml").read_text())["capture"]
    lines = (CLONE / "lab" / "prompts.jsonl").read_text().splitlines()
    live = load_live(CLONE / "lab" / "target")
    prompts = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    texts = own_words(
        continue_prompts(live, prompts, wanted["new_tokens"]),
        prompt=PROMPT,
        end=live.shape.vocab - 1,
        window=wanted["repetition_window"],
        length=PROMPT + wanted["new_tokens"],
        least=wanted["min_new_tokens"],
    )
    found = []
    with torch.no_grad():
        for i, length in enumerate(texts.last.tolist()):
            ids = texts.ids[i, :length]
            logits, kept = live(ids[None], wanted["states"])
            states = {k: h[0] for k, h in kept.items()}
            found.append(
                Sample(
                    path=Path(f"lab/{i}"),
                    input_ids=ids,
                    loss_mask=texts.scored(torch.tensor([i]))[0, :length],
                    states=states,
                    target_argmax=logits[0].argmax(-1),
                    teacher=states[wanted["states"][-1]],
                )
            )
    return found


@pytest.fixture(scope="module")
def score(held_out: list[Sample], target: TargetParts) -> Callable[[Drafter], Counts]:
    """Right first-step tokens of every sample under each truth."""
    teachers = [taught(sample, target) for sample in held_out]

    def scored(drafter: Drafter) -> Counts:
        to_target = draft_to_target_ids(drafter.d2t, D2T.offset, drafter.shape.vocab)
        counts: Counts = {truth: [] for truth in Truth}
        for sample, teacher in zip(held_out, teachers, strict=True):
            ids, rows = sample.input_ids, scored_rows(sample.loss_mask)
            aux = sample.aux(STATES[:-1])
            drafted = draft_chains(
                drafter, target.embedding, ids, aux, rows, steps=1, to_target=to_target
            )
            for truth in Truth:
                chosen = teacher if truth is Truth.stored_teacher else sample.target_argmax
                wanted = truth_tokens(ids, chosen, truth, "lab")[rows + 2]
                counts[truth].append(Count(int((drafted[:, 0] == wanted).sum()), len(rows)))
        return counts

    return scored


@pytest.fixture(scope="module")
def declared(score: Callable[[Drafter], Counts], second: DrafterCheckpoint) -> Counts:
    return score(second.drafter)


def taught(sample: Sample, target: TargetParts) -> Tensor:
    """What speculators takes for the target's choice behind every position: the last slot's."""
    assert sample.teacher is not None
    return target.logits(sample.teacher, normed=False).argmax(-1)


def interval(counts: list[Count], truth: Truth) -> Rate:
    found = rate(counts, truth, limits=(0.0, 1.0))
    assert found is not None
    return found


def test_it_is_what_speculators_wrote(second: DrafterCheckpoint) -> None:
    form = second.form
    assert form.layout.value == "speculators"
    assert any("layout speculators" in note for note in second.notes)
    assert form.norm_before_residual.value is True
    assert form.norm_before_residual.origin == "config.json: norm_before_residual"
    assert form.layer_ids.value == STATES[:-1]
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


def test_the_teacher_is_not_the_targets_end(held_out: list[Sample], target: TargetParts) -> None:
    counts = []
    for sample in held_out:
        assert sample.target_argmax is not None
        rows = scored_rows(sample.loss_mask) + 1
        hits = taught(sample, target)[rows] == sample.target_argmax[rows]
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
    write_dump(live, texts, STATES, tmp_path, batch=2)
    described = load_file(tmp_path / "texts.safetensors")
    assert described["lengths"].tolist() == [20, 14, 20]
    assert described["loss_mask"].split([20, 14, 20])[1].tolist() == [False] * 8 + [True] * 6
    _, kept = live(ids, STATES)
    for i, length in enumerate([20, 14, 20]):
        dumped = load_file(tmp_path / "hidden_states" / f"hs_{i}.safetensors")
        assert torch.equal(dumped["token_ids"], ids[i, :length])
        assert dumped["hidden_states"].shape == (length, 4, 128)
        for slot, k in enumerate(STATES):
            expected = kept[k][i, :length].bfloat16()
            torch.testing.assert_close(dumped["hidden_states"][:, slot], expected)


def test_a_rebuild_without_the_peers_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot be started .* make it with `python tests/peers/"):
        check_peers(tmp_path / "python")
    with pytest.raises(BadInput, match=r"cannot run speculators' training .*No module named"):
        check_peers(Path(sys.executable))

"""The three truths: what each is made of, and what a gap between them is taken for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.metrics import Count, Rate, Truth, scored_rows, summarise
from eagle3.samples import Sample
from eagle3.target import TargetParts, load_target_parts
from eagle3.truths import AGREEMENT, count_truths, teacher_findings, truths_of, why_no_teacher
from tests.eagle3.small import write_tensors

VOCAB, HIDDEN = 6, 8
IDS = torch.tensor([3, 1, 4, 1, 5, 2])
WEIGHT = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])  # the norm changes who wins


CONFIG = {"model_type": "llama", "num_hidden_layers": 7, "rms_norm_eps": 1e-6}
TENSORS = {
    "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
    "model.norm.weight": WEIGHT,
    "lm_head.weight": torch.eye(VOCAB, HIDDEN),  # token i is told by component i
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(folder / "model.safetensors", TENSORS)
    return load_target_parts(folder)


def sample(teacher: Tensor, normed: bool, argmax: Tensor | None) -> Sample:
    return Sample(
        path=Path("data_0.pt"),
        input_ids=IDS,
        loss_mask=torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool),
        states={},
        target_argmax=argmax,
        teacher=teacher,
        teacher_normed=normed,
    )


def states(tokens: list[int]) -> Tensor:
    """States whose largest component names the token, with a smaller one on token 5 in each row."""
    rows = torch.zeros(len(tokens), HIDDEN)
    rows[:, 5] = 0.5
    rows[torch.arange(len(tokens)), tokens] = 1.0
    return rows


EVERY = torch.arange(5)  # rows from which every position behind the first is asked for


def test_each_truth_is_of_its_own_source(target: TargetParts) -> None:
    argmax = torch.tensor([1, 4, 1, 0, 2, 3])
    one = sample(states([0, 1, 2, 3, 4, 0]), True, argmax)
    truths = truths_of(one, EVERY, teacher=target)
    assert truths[Truth.next_token].tolist() == IDS.tolist()
    # Behind position p stands the choice for p + 1; nobody chose the first token.
    assert truths[Truth.target_argmax].tolist()[1:] == [1, 4, 1, 0, 2]
    assert truths[Truth.stored_teacher].tolist()[2:] == [1, 2, 3, 4]


def test_a_teacher_stored_before_the_norm_goes_through_it(target: TargetParts) -> None:
    truths = truths_of(sample(states([0, 1, 2, 3, 4, 0]), False, None), EVERY, teacher=target)
    # The norm's weight lifts component 5 from 0.5 to 4.5 of a row's rms, above every 1.0.
    assert truths[Truth.stored_teacher].tolist()[2:] == [5] * 4
    assert Truth.target_argmax not in truths


def test_the_teacher_is_asked_only_where_a_step_is_about(target: TargetParts) -> None:
    one = sample(states([0, 1, 2, 3, 4, 0]), True, None)
    rows = torch.tensor([0, 2])
    first = truths_of(one, rows, teacher=target)[Truth.stored_teacher].tolist()
    assert first[1:] == [-1, 1, -1, 3, -1]
    both = truths_of(one, rows, teacher=target, steps=2)[Truth.stored_teacher].tolist()
    assert both[1:] == [-1, 1, 2, 3, 4]
    assert Truth.stored_teacher not in truths_of(one, rows, teacher=None)


def test_a_teacher_whose_logits_are_no_numbers_is_refused(target: TargetParts) -> None:
    one = sample(states([0, 1, 2, 3, 4, 0]) * 3e38 * 10, True, None)
    with pytest.raises(BadInput, match=r"data_0\.pt: the stored teacher's logits hold NaN"):
        truths_of(one, EVERY, teacher=target)


def test_all_truths_are_asked_at_the_same_positions(target: TargetParts) -> None:
    argmax = torch.tensor([1, 4, 1, 5, 2, 0])  # the target chooses what the text says
    one = sample(states([1, 4, 0, 5, 0, 0]), True, argmax)
    rows = scored_rows(one.loss_mask)
    truths = truths_of(one, rows, teacher=target)
    assert (rows + 2).tolist() == [3, 4, 5]
    # The text there is 1 5 2, the stored teacher says 0 5 0; the drafter says 0 5 2.
    counts = count_truths(torch.tensor([0, 5, 2]), rows, truths)
    assert counts == {
        "accuracy/next_token": Count(2, 3),
        "accuracy/target_argmax": Count(2, 3),
        "accuracy/stored_teacher": Count(2, 3),
        AGREEMENT: Count(1, 3),
    }


@pytest.mark.parametrize(
    ("tensors", "normed", "words"),
    [
        ({"lm_head.weight"}, False, "norm"),
        ({"lm_head.weight"}, True, None),
        ({"model.norm.weight"}, True, "lm_head.weight"),
    ],
)
def test_a_target_without_norm_or_head_makes_no_choices(
    tmp_path: Path, tensors: set[str], normed: bool, words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    kept = {name: tensor for name, tensor in TENSORS.items() if name in tensors}
    embedding = {"model.embed_tokens.weight": TENSORS["model.embed_tokens.weight"]}
    write_tensors(tmp_path / "model.safetensors", {**kept, **embedding})
    why = why_no_teacher(load_target_parts(tmp_path), normed)
    assert (why is None) if words is None else words in str(why)


def rates(agreement: int, truth: Truth) -> dict[str, Rate]:
    counts = {
        AGREEMENT: Count(agreement, 100),
        "accuracy/stored_teacher": Count(75, 100),
        "accuracy/target_argmax": Count(40, 100),
    }
    metrics, _, _ = summarise([counts] * 4, truth, 1)
    return metrics


def test_a_teacher_that_is_not_the_target_is_named_with_both_figures() -> None:
    (found,) = teacher_findings(
        rates(41, Truth.target_argmax), "/data", "hidden_states[3], state 59"
    )
    assert (found.name, found.severity, found.where) == ("wrong-teacher", "warning", "/data")
    for words in ("hidden_states[3], state 59", "0.410", "0.750", "0.400"):
        assert words in found.what


def test_a_sound_teacher_is_passed_in_silence() -> None:
    assert teacher_findings(rates(99, Truth.target_argmax), "/data", "x") == []


def test_few_positions_accuse_no_teacher() -> None:
    """The interval's upper end decides, not the share itself."""
    few = {AGREEMENT: Count(4, 5), "accuracy/target_argmax": Count(4, 5)}
    metrics, _, _ = summarise([few, {**few, AGREEMENT: Count(5, 5)}] * 2, Truth.target_argmax, 1)
    assert metrics[AGREEMENT].value <= 0.9 <= metrics[AGREEMENT].high
    assert teacher_findings(metrics, "/data", "x") == []


def test_without_the_targets_choice_it_is_said_to_be_open() -> None:
    (found,) = teacher_findings(rates(41, Truth.next_token), "/data", "x")
    assert (found.name, found.severity) == ("teacher-open", "note")
    assert "0.410" in found.what

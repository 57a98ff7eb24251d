"""The three truths: what each is made of, and what a gap between them is taken for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.metrics import Count, Rate, Truth, scored_rows, summarise
from eagle3.samples import Sample
from eagle3.target import TargetParts, load_target_parts
from eagle3.truths import AGREEMENT, count_truths, gap_notes, truths_of
from tests.eagle3.small import write_tensors

VOCAB, HIDDEN = 6, 8
IDS = torch.tensor([3, 1, 4, 1, 5, 2])
WEIGHT = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])  # the norm changes who wins


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    folder = tmp_path_factory.mktemp("target")
    config = {"model_type": "llama", "num_hidden_layers": 7, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "model.norm.weight": WEIGHT,
        "lm_head.weight": torch.eye(VOCAB, HIDDEN),  # token i is told by component i
    }
    write_tensors(folder / "model.safetensors", tensors)
    return load_target_parts(folder)


def sample(teacher: Tensor | None, normed: bool, argmax: Tensor | None) -> Sample:
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


def test_each_truth_is_of_its_own_source(target: TargetParts) -> None:
    argmax = torch.tensor([1, 4, 1, 0, 2, 3])
    truths = truths_of(sample(states([0, 1, 2, 3, 4, 0]), True, argmax), target)
    assert truths[Truth.next_token].tolist() == IDS.tolist()
    # Behind position p stands the choice for p + 1; nobody chose the first token.
    assert truths[Truth.target_argmax].tolist()[1:] == [1, 4, 1, 0, 2]
    assert truths[Truth.stored_teacher].tolist()[1:] == [0, 1, 2, 3, 4]


def test_a_teacher_stored_before_the_norm_goes_through_it(target: TargetParts) -> None:
    truths = truths_of(sample(states([0, 1, 2, 3, 4, 0]), False, None), target)
    # The norm's weight lifts component 5 from 0.5 to 4.5 of a row's rms, above every 1.0.
    assert truths[Truth.stored_teacher].tolist()[1:] == [5] * 5
    assert Truth.target_argmax not in truths


def test_all_truths_are_asked_at_the_same_positions(target: TargetParts) -> None:
    argmax = torch.tensor([1, 4, 1, 5, 2, 0])  # the target chooses what the text says
    one = sample(states([1, 4, 0, 5, 0, 0]), True, argmax)
    truths, rows = truths_of(one, target), scored_rows(one.loss_mask)
    assert (rows + 2).tolist() == [3, 4, 5]
    # The text there is 1 5 2, the stored teacher says 0 5 0; the drafter says 0 5 2.
    counts = count_truths(torch.tensor([0, 5, 2]), rows, one.loss_mask, truths)
    assert counts == {
        "accuracy/next_token": Count(2, 3),
        "accuracy/target_argmax": Count(2, 3),
        "accuracy/stored_teacher": Count(2, 3),
        AGREEMENT: Count(1, 3),
    }


def rates(agreement: int, truth: Truth) -> dict[str, Rate]:
    counts = {
        AGREEMENT: Count(agreement, 100),
        "accuracy/stored_teacher": Count(75, 100),
        "accuracy/target_argmax": Count(40, 100),
    }
    metrics, _, _ = summarise([counts] * 4, truth, 1)
    return metrics


def test_a_teacher_that_is_not_the_target_is_named_with_both_figures() -> None:
    (note,) = gap_notes(rates(41, Truth.target_argmax), "hidden_states[3], state 59")
    assert "hidden_states[3], state 59" in note
    assert "0.410" in note
    assert "0.750" in note
    assert "0.400" in note


def test_a_sound_teacher_is_passed_in_silence() -> None:
    assert gap_notes(rates(99, Truth.target_argmax), "x") == []


def test_without_the_targets_choice_it_is_said_to_be_open() -> None:
    (note,) = gap_notes(rates(41, Truth.next_token), "x")
    assert "stays open" in note

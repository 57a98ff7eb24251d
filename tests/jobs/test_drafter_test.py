"""The job as a whole on small random files: what it says beside its figures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.data.argmax import ABOUT, write_argmax
from eagle3.errors import BadInput
from eagle3.lab.build import save_drafter
from eagle3.target import load_target_parts
from jobs.drafter_test import open_job
from jobs.events import Events
from tests.eagle3.small import SHAPE, random_drafter, write_tensors

LENGTHS = (9, 14, 11, 12)
STATES = [0, 3, 5, 7]
LAYERS = 7
WIRING = {
    "layers": [0, 3, 5],
    "convention": "input",
    "d2t": "offset",
    "decoder_layer": "included",
    "embedding": "own",
    "head": "own",
    "residual": "declared",
    "window": "declared",
}


class Desk:
    """The files of a test, and the job on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.table = torch.randn(SHAPE.vocab, SHAPE.target_hidden)
        self.target = folder / "target"
        self.target.mkdir()
        config = {"model_type": "llama", "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-6}
        (self.target / "config.json").write_text(json.dumps(config))
        tensors = {
            "model.embed_tokens.weight": self.table,
            "model.norm.weight": torch.ones(SHAPE.target_hidden),
            "lm_head.weight": torch.randn(SHAPE.vocab, SHAPE.target_hidden),
        }
        write_tensors(self.target / "model.safetensors", tensors)
        self.drafter = folder / "drafter"
        save_drafter(random_drafter(), self.drafter)
        weights = self.drafter / "model.safetensors"
        own = {"embed_tokens.weight": torch.randn(SHAPE.vocab, SHAPE.hidden)}
        write_tensors(weights, {**load_file(weights), **own})
        self.data = folder / "data"
        self.data.mkdir()
        for i, length in enumerate(LENGTHS):
            self.write(i, length)

    def path(self, i: int) -> Path:
        return self.data / f"data_{i}.pt"

    def write(self, i: int, length: int, **changes: Any) -> None:
        """A sample whose last slot makes the target's choices, kept as target_argmax."""
        torch.manual_seed(10 + i)
        ids = torch.randint(SHAPE.vocab, (length,))
        slots = [self.table[ids], *(torch.randn(length, SHAPE.target_hidden) for _ in STATES[1:])]
        logits = load_target_parts(self.target).logits(slots[-1], normed=False)
        sample = {
            "input_ids": ids,
            "loss_mask": torch.ones(length, dtype=torch.int64),
            "hidden_states": slots,
            "target_argmax": logits.argmax(-1),
            **changes,
        }
        torch.save({k: v for k, v in sample.items() if v is not None}, self.path(i))

    def run(self, wiring: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        data = {
            "path": str(self.data),
            "states": STATES,
            "layout": None,
            "damaged": settings.pop("damaged", "fail"),
            "target_argmax": settings.pop("argmax", None),
        }
        request = {
            "device": "cpu",
            "steps": 2,
            "truth": "target_argmax",
            "metrics": ["ours"],
            "tree": None,
            "ttt_steps": None,
            "max_samples": None,
            "seed": 0,
            "inputs": {
                "target": {"path": str(self.target), "layout": "hf", "made": ""},
                "drafter": {"path": str(self.drafter), "layout": None},
                "data": data,
            },
            **settings,
        }
        with Events(self.folder / "events.jsonl") as events:
            job = open_job(request, events)
            return job.run_case({"case_id": "a", "wiring": {**WIRING, **(wiring or {})}})

    def said(self) -> str:
        return (self.folder / "events.jsonl").read_text()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


SCORED = sum(LENGTHS) - 2 * len(LENGTHS)


def test_every_truth_is_scored_at_the_same_positions(desk: Desk) -> None:
    result = desk.run()
    metrics = result["metrics"]
    for truth in ("target_argmax", "next_token", "stored_teacher"):
        found = metrics[f"accuracy/{truth}"]
        assert (found["truth"], found["denominator"]) == (truth, SCORED)
    # The last slot was made to be the target's end.
    assert metrics["accuracy/stored_teacher"]["numerator"] == metrics["accuracy"]["numerator"]
    assert metrics["teacher_agreement"]["value"] == 1.0
    assert result["findings"] == []
    assert result["drafter"]["layout"]["value"] == "specforge"
    assert [slot["state"] for slot in result["data"]["slots"]] == STATES


def test_a_trees_and_the_trainers_figures_stand_beside_ours(desk: Desk) -> None:
    result = desk.run(
        metrics=["ours", "specforge", "speculators"], tree={"topk": 2, "draft_tokens": 6}
    )
    metrics, curves = result["metrics"], result["curves"]
    assert metrics["accept_length_tree"]["value"] >= metrics["accept_length"]["value"]
    assert len(curves["specforge/acc"]) == 7
    assert len(curves["speculators/full_acc"]) == 3
    assert any(note.startswith("specforge's own figures differ") for note in result["notes"])
    alone = desk.run()
    for name, found in alone["metrics"].items():
        assert metrics[name] == found


def test_trainers_unroll_as_many_steps_as_they_are_said_to(desk: Desk) -> None:
    curves = desk.run(metrics=["ours", "specforge"], ttt_steps=2)["curves"]
    assert len(curves["specforge/acc"]) == 2


@pytest.mark.parametrize(
    "switch", [{"d2t": "identity"}, {"residual": "normed"}, {"decoder_layer": "skipped"}]
)
def test_a_trainers_figures_are_refused_for_what_no_trainer_has(
    desk: Desk, switch: dict[str, str]
) -> None:
    ((name, value),) = switch.items()
    with pytest.raises(BadInput, match=f"as it was trained.*wiring.{name}={value}"):
        desk.run(switch, metrics=["ours", "speculators"])


def test_damaged_files_are_skipped_aloud(desk: Desk) -> None:
    desk.path(1).write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"data_1\.pt.*1 of 4 files"):
        desk.run()
    result = desk.run(damaged="skip")
    assert [sample["file"] for sample in result["samples"]] == [
        f"data/data_{i}.pt" for i in (0, 2, 3)
    ]
    assert any("data_1.pt" in note for note in result["notes"])
    assert "data_1.pt" in desk.said()


def test_a_slot_that_is_not_the_embedding_it_is_declared_to_be_is_a_finding(desk: Desk) -> None:
    for i, length in enumerate(LENGTHS):
        desk.write(i, length)
        sample = torch.load(desk.path(i))
        slots = sample["hidden_states"]
        sample["hidden_states"] = [slots[1], slots[0], *slots[2:]]
        torch.save(sample, desk.path(i))
    (found,) = desk.run()["findings"]
    assert (found["name"], found["severity"]) == ("embedding-missing", "error")


def test_a_teacher_that_is_not_the_target_is_a_finding(desk: Desk) -> None:
    for i, length in enumerate(LENGTHS):
        torch.manual_seed(99 + i)
        desk.write(i, length, target_argmax=torch.randint(SHAPE.vocab, (length,)))
    (found,) = desk.run()["findings"]
    assert found["name"] == "wrong-teacher"
    assert "hidden_states[3], state 7" in found["what"]


def test_what_only_some_samples_hold_is_left_out_by_name(desk: Desk) -> None:
    desk.write(2, LENGTHS[2], target_argmax=None)
    with pytest.raises(BadInput, match=r"data_2\.pt has no target_argmax"):
        desk.run()
    result = desk.run(truth="next_token")
    assert "accuracy/target_argmax" not in result["metrics"]
    assert "teacher_agreement" not in result["metrics"]
    (note,) = [note for note in result["notes"] if note.startswith("some samples lack")]
    assert "accuracy/target_argmax" in note
    assert "teacher_agreement" in note


def test_a_target_without_a_head_costs_the_stored_teacher_only(desk: Desk) -> None:
    weights = desk.target / "model.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    result = desk.run()
    assert "accuracy/stored_teacher" not in result["metrics"]
    assert any(note.startswith("nothing is compared with") for note in result["notes"])
    for asked in ({"truth": "stored_teacher"}, {"metrics": ["ours", "specforge"]}):
        with pytest.raises(BadInput, match=r"stored teacher's choices cannot be had.*lm_head"):
            desk.run(**asked)


def test_the_stored_teacher_may_be_the_truth_of_whole_chains(desk: Desk) -> None:
    found = desk.run(truth="stored_teacher")["metrics"]
    assert found["accept_length"]["truth"] == "stored_teacher"
    assert found["accuracy"]["numerator"] == found["accuracy/stored_teacher"]["numerator"]
    # Here the stored teacher is the target, so nothing else differs either.
    other = desk.run()["metrics"]
    assert (
        found["accept_length_uniform"]["numerator"] == other["accept_length_uniform"]["numerator"]
    )


def test_choices_from_beside_the_data_take_the_place_of_its_own(desk: Desk) -> None:
    beside = desk.folder / "argmax"
    fingerprint = load_target_parts(desk.target).fingerprint
    for i in range(len(LENGTHS)):
        sample = torch.load(desk.path(i))
        ids = sample["input_ids"]
        write_argmax(beside, desk.path(i), desk.data, ids, torch.zeros_like(ids))
    (beside / ABOUT).write_text(json.dumps({"target": fingerprint}))
    assert 0 < desk.run()["metrics"]["coverage"]["numerator"] < SCORED
    found = desk.run(argmax=str(beside))["metrics"]
    assert found["coverage"]["numerator"] in (0, SCORED)  # one token, everywhere
    assert found["teacher_agreement"]["value"] < 1.0
    (beside / ABOUT).write_text(json.dumps({"target": "sha256:other"}))
    with pytest.raises(BadInput, match="choices of another target"):
        desk.run(argmax=str(beside))


def test_the_datas_fingerprint_sees_every_row_of_every_slot(desk: Desk) -> None:
    before = desk.run()["fingerprints"]["data"]
    assert desk.run()["fingerprints"]["data"] == before
    sample = torch.load(desk.path(0))
    sample["hidden_states"][3][4, 2] += 1e-3
    torch.save(sample, desk.path(0))
    assert desk.run()["fingerprints"]["data"] != before


def test_an_order_that_no_engine_feeds_and_a_shallow_tree_are_said(desk: Desk) -> None:
    result = desk.run({"layers": [5, 0, 3]}, tree={"topk": 2, "draft_tokens": 2})
    assert any("ascending" in note for note in result["notes"])
    assert any("never deeper than 1 steps" in note for note in result["notes"])

"""The job as a whole on small files: its tables, what it says beside them, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import load_drafter
from eagle3.connect import connect
from eagle3.errors import BadInput
from eagle3.lab.build import save_drafter
from eagle3.target import load_target_parts
from eagle3.wiring import Embedding, Wiring
from jobs import wiring_search
from jobs.events import Events
from tests.eagle3.searchable import PLAIN, checkpoint
from tests.eagle3.small import random_drafter, write_tensors

STATES = [0, 3, 5, 7]
LAYERS = 7
LENGTHS = [28 + i % 7 for i in range(24)]
TRAINED = Wiring.of_states((5, 0, 3), embedding=Embedding.own)


class Desk:
    """The files of a test, and the job on them.

    What the target chooses is made what the drafter drafts with the states 5, 0 and 3, as if it had
    been trained on them, and the texts follow that most of the time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "target"
        self.target.mkdir()
        self.config: dict[str, Any] = {
            "model_type": "llama",
            "num_hidden_layers": LAYERS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500.0,
        }
        torch.manual_seed(0)
        self.table = torch.randn(PLAIN.vocab, PLAIN.target_hidden)
        write_tensors(
            self.target / "model.safetensors",
            {
                "model.embed_tokens.weight": self.table,
                "model.norm.weight": torch.ones(PLAIN.target_hidden),
                "lm_head.weight": torch.randn(PLAIN.vocab, PLAIN.target_hidden),
            },
        )
        self.write_config()
        own = checkpoint(PLAIN)
        self.drafter = folder / "drafter"
        save_drafter(random_drafter(0, PLAIN), self.drafter)
        assert own.embedding is not None
        weights = self.drafter / "model.safetensors"
        tensors = {**load_file(weights), "embed_tokens.weight": own.embedding.contiguous()}
        write_tensors(weights, tensors)
        tied = connect(load_drafter(self.drafter), load_target_parts(self.target), TRAINED)
        self.data = folder / "data"
        self.data.mkdir()
        for i, length in enumerate(LENGTHS):
            torch.manual_seed(10 + i)
            ids, argmax = torch.randint(PLAIN.vocab, (2, length))
            others = [torch.randn(length, PLAIN.hidden) for _ in STATES[1:]]
            follows = torch.rand(length) < 0.8
            for t in range(length - 2):
                held = dict(zip(STATES, [self.table[ids], *others], strict=True))
                aux = torch.cat([held[k] for k in tied.states], -1)
                argmax[t + 1] = tied.chains(ids, aux, torch.tensor([t]), steps=1)[0, 0]
                if follows[t]:
                    ids[t + 2] = argmax[t + 1]
            self.write(
                i,
                input_ids=ids,
                loss_mask=torch.ones(length, dtype=torch.int64),
                hidden_states=[self.table[ids], *others],
                target_argmax=argmax,
            )

    def write_config(self, **changes: Any) -> None:
        (self.target / "config.json").write_text(json.dumps({**self.config, **changes}))

    def path(self, i: int) -> Path:
        return self.data / f"data_{i}.pt"

    def write(self, i: int, **sample: Any) -> None:
        torch.save({k: v for k, v in sample.items() if v is not None}, self.path(i))

    def change(self, i: int, **changes: Any) -> None:
        self.write(i, **{**torch.load(self.path(i)), **changes})

    def run(self, **settings: Any) -> dict[str, Any]:
        data = {
            "path": str(self.data),
            "states": settings.pop("states", STATES),
            "layout": None,
            "damaged": settings.pop("damaged", "fail"),
            "target_argmax": None,
        }
        request = {
            "job": "wiring_search",
            "device": "cpu",
            "threads": 1,
            "steps": 2,
            "max_samples": None,
            "seed": 0,
            "finalists": 4,
            "axes": {
                "fixed": [],
                "only": {},
                "states": None,
                "neighbours": False,
                **settings.pop("axes", {}),
            },
            "start": None,
            "inputs": {
                "target": {"path": str(self.target), "layout": "hf", "made": ""},
                "drafter": {"path": str(self.drafter), "layout": None},
                "data": data,
            },
            "cases": [{"case_id": "a"}],
            **settings,
        }
        with Events(self.folder / "events.jsonl") as events:
            job = wiring_search.open_job(request, events)
            result = job.run_case({"case_id": "a"})
        json.dumps(result, allow_nan=False)  # what the worker writes
        return result

    def said(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()
        ]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_wiring_that_the_targets_choices_come_from_is_found(desk: Desk) -> None:
    result = desk.run()
    best, *others = result["ranked"]
    assert best["changed"] == ["states=5,0,3"]
    assert best["states"] == result["wiring"]["states"] == [5, 0, 3]
    assert Wiring.parse(best["wiring"]).states() == (5, 0, 3)
    assert best["behind"] is None
    assert not best["tied"]
    assert best["metrics"]["accuracy"] == result["metrics"]["accuracy"]
    assert result["metrics"]["accuracy"]["value"] == 1.0
    assert {name: rate["truth"] for name, rate in result["metrics"].items()} == dict.fromkeys(
        ("accuracy", "accept_length", "coverage"), "target_argmax"
    )
    assert any(row["changed"] == [] for row in others)  # the start is shown as well
    for row in others:
        assert set(row["behind"]) == {"value", "low", "high"}
        assert row["name"] == ("; ".join(row["changed"]) or "as the search started")
        assert set(row["curves"]) == set(result["curves"])
    assert len(result["samples"]) == len(LENGTHS)
    (first, *_) = result["teachers"]
    assert first["teacher"] == "target_argmax"
    assert first["agreement"] is None
    assert result["teacher"]["name"] == "target_argmax"
    assert any("took states=5,0,3" in said for said in result["rounds"])
    # What was dropped, with why and how far behind.
    names = {tuple(row["changed"]) for row in result["dropped"]}
    assert ("d2t=identity",) in names or any("d2t=identity" in name for name in names)
    for row in result["dropped"]:
        assert set(row) == {"changed", "texts", "positions", "accuracy", "behind", "why"}
        assert row["texts"] > 0
    kinds = {event["what"] for event in desk.said() if event["type"] == "progress"}
    assert kinds == {"read", "search"}


def test_a_start_that_is_stated_is_where_the_search_begins(desk: Desk) -> None:
    result = desk.run(start={**TRAINED.plain(), "d2t": "identity"})
    assert result["ranked"][0]["changed"] == ["d2t=offset"]
    assert not any("the search starts from" in note for note in result["notes"])
    again = desk.run(start=TRAINED.plain())
    assert again["ranked"][0]["changed"] == []
    assert again["metrics"] == result["metrics"]


def test_axes_are_fixed_and_cut_by_the_request(desk: Desk) -> None:
    fixed = desk.run(axes={"fixed": ["states"]})
    assert fixed["wiring"]["states"] == [0, 3, 5]
    cut = desk.run(axes={"states": [[3, 5, 0], [5, 0, 3]], "fixed": ["rope", "head"]})
    assert cut["wiring"]["states"] == [5, 0, 3]
    named = [change for row in cut["dropped"] for change in row["changed"]]
    assert not any(change.startswith(("rope", "head=")) for change in named)


def test_the_texts_own_tokens_are_the_truth_where_there_is_no_other_and_it_is_said(
    desk: Desk,
) -> None:
    desk.change(5, target_argmax=None)
    result = desk.run()
    assert {rate["truth"] for rate in result["metrics"].values()} == {"next_token"}
    assert any("no target_argmax (or not every sample has)" in note for note in result["notes"])
    assert "target_argmax" not in {row["teacher"] for row in result["teachers"]}


def test_what_is_left_out_or_not_tried_is_said(desk: Desk) -> None:
    desk.change(3, loss_mask=torch.zeros(LENGTHS[3], dtype=torch.int64))
    desk.write_config(rope_theta=None)
    result = desk.run(damaged="skip")
    said = "\n".join(result["notes"])
    assert "1 damaged files were left out" in said
    assert "rope=target is not tried" in said
    assert "only tried where the data stores them" in said
    assert "the search starts from the order of the data's slots" in said
    events = [event["text"] for event in desk.said() if event["type"] == "note"]
    assert set(result["notes"]) <= set(events)


def test_a_slot_that_is_no_embedding_is_found(desk: Desk) -> None:
    result = desk.run(states=[3, 0, 5, 7])
    assert [finding["name"] for finding in result["findings"]] == ["embedding-missing"]


def test_states_that_nobody_declares_are_asked_for(desk: Desk) -> None:
    with pytest.raises(
        BadInput, match=r"nobody says which states .* stores.*data.states is not set"
    ):
        desk.run(states=None)


def test_a_start_with_states_that_are_not_stored_is_refused(desk: Desk) -> None:
    start = Wiring.of_states((0, 3, 6), embedding=Embedding.own).plain()
    with pytest.raises(BadInput, match="asks for state 6, but the data stores only 0, 3, 5, 7"):
        desk.run(start=start)


@pytest.mark.runs
def test_one_text_changes_nothing_and_it_is_said(desk: Desk) -> None:
    result = desk.run(max_samples=1)
    assert result["ranked"][0]["changed"] == []
    assert any("one text alone says nothing" in note for note in result["notes"])


def test_too_many_steps_for_the_texts_are_said_to_be(desk: Desk) -> None:
    with pytest.raises(BadInput, match=r"use fewer job.steps"):
        desk.run(steps=60)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"fixed": ["colour"]}, "no axis 'colour'"),
        ({"only": {"d2t": ["sideways"]}}, "'sideways'"),
        ({"states": [[0, 3]]}, "takes 3 states"),
    ],
)
def test_axes_that_there_are_not_are_refused(desk: Desk, axes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        desk.run(axes=axes)


def test_a_target_that_scales_its_embedding_keeps_state_0_out(desk: Desk) -> None:
    desk.write_config(embedding_multiplier=3.0)
    for i in range(len(LENGTHS)):
        sample = torch.load(desk.path(i))
        desk.change(i, hidden_states=sample["hidden_states"][1:])
    result = desk.run(states=STATES[1:], axes={"fixed": ["embedding"]})
    assert sorted(result["wiring"]["states"]) == [3, 5, 7]
    assert any("multiplies its embedding" in note for note in result["notes"])


def test_neighbours_are_made_by_the_targets_first_layers(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers that stand in for the target's: this target has no layers in its file."""

    class Layers:
        def __init__(self, _: object) -> None:
            self.dropped = False

        def states(
            self, texts: list[torch.Tensor], layers: int, *, only: tuple[int, ...]
        ) -> list[torch.Tensor]:
            torch.manual_seed(99)
            assert max(only) == layers
            return [torch.randn(len(only), len(ids), PLAIN.hidden) for ids in texts]

        def drop(self) -> None:
            self.dropped = True

    from jobs import question
    from jobs.first_layers import FirstLayers

    monkeypatch.setattr(question, "TargetLayers", Layers)
    monkeypatch.setattr(
        wiring_search,
        "plan_layers",
        lambda *_: FirstLayers(layers=4, why="a test says so"),
    )
    result = desk.run(axes={"neighbours": True, "fixed": ["rope"]})
    said = "\n".join(result["notes"])
    assert "state 1, 2, 4, made by the target, is not clearly better" in said
    assert (
        "state 6 is not stored and not tried: 4 of the target's first layers are run here" in said
    )
    assert result["wiring"]["states"] == [5, 0, 3]


@pytest.mark.runs
def test_a_target_that_cannot_be_run_is_said_and_what_is_stored_is_searched(desk: Desk) -> None:
    """This target's file has no layers at all."""
    result = desk.run(axes={"neighbours": True, "fixed": ["rope"]})
    assert any("not stored and not tried" in note for note in result["notes"])
    assert result["wiring"]["states"] == [5, 0, 3]

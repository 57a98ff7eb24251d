"""States captured from a running SGLang are those that transformers gives, text for text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.conventions import KEY
from eagle3.data import find_data
from eagle3.files import read_json
from eagle3.samples import Sample, read_samples
from jobs import capture_states, drafter_test
from jobs.engines.engine import Draft
from jobs.engines.folder import lay_out
from jobs.events import Events
from tests.engines.conftest import REQUEST_S, USUAL, Starter
from tests.jobs.test_diagnose import LAB

PROMPTS, STATES = 6, [0, 3, 31]
CASE: dict[str, Any] = {
    "case_id": "case",
    "prompts": str(LAB / "prompts.jsonl"),
    "states": STATES,
    "new_tokens": 48,
    "repetition_window": 24,
    "min_new_tokens": 24,
    "batch": 4,
    "max_samples": PROMPTS,
    "keep": False,
}
WIRING = {**USUAL, "head": "own", "residual": "declared", "window": "declared"}


def captured(folder: Path, out: Path, **engine: Any) -> dict[str, Any]:
    """What the job says of a capture at `out`."""
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(folder / "target")}
    request = {"device": "cpu", "dtype": "float32", "inputs": {"target": target}, **engine}
    with Events(folder / "events.jsonl") as events:
        job = capture_states.open_job(request, events)
        found = job.run_case({**CASE, "out": str(out)})
    return json.loads(json.dumps(found))


def samples_of(out: Path) -> dict[tuple[int, ...], Sample]:
    """By their tokens."""
    form = find_data(out, hidden=128, num_layers=61)
    return {tuple(s.input_ids.tolist()): s for s in read_samples(form, vocab=1024, hidden=128)}


def scored(folder: Path, data: Path) -> dict[str, Any]:
    """The drafter's figures on a dump."""
    spec = {"path": str(data), "states": None, "layout": None, "damaged": "fail"}
    request = {
        "device": "cpu",
        "steps": 4,
        "truth": "target_argmax",
        "metrics": ["ours"],
        "tree": None,
        "ttt_steps": None,
        "max_samples": None,
        "seed": 0,
        "inputs": {
            "target": {"path": str(folder / "target"), "layout": "hf", "made": ""},
            "drafter": {"path": str(LAB / "drafter"), "layout": None},
            "data": {**spec, "target_argmax": None},
        },
    }
    with Events(folder / "scored.jsonl") as events:
        wiring = {**WIRING, "layers": STATES, "convention": "hf"}
        job = drafter_test.open_job(request, events)
        metrics: dict[str, Any] = job.run_case({"case_id": "a", "wiring": wiring})["metrics"]
    return {name: metrics[name] for name in ("accuracy", "accept_length", "coverage")}


def test_a_server_gives_the_dump_that_transformers_gives(starter: Starter, tmp_path: Path) -> None:
    ours = captured(tmp_path, tmp_path / "ours")["capture"]
    source = LAB / "drafter"
    config = read_json(source / "config.json")
    config["eagle_config"] = {**config.get("eagle_config", {}), KEY: [-1, 2, 30]}
    draft = Draft(folder=lay_out(source, tmp_path / "drafter", config), steps=4)
    server = starter.start("sglang", tmp_path / "target", draft, enable_return_hidden_states=True)
    engine = {"name": "sglang", "version": None, "engine_class": None}
    engine["url"] = server.running.address.url
    out = tmp_path / "theirs"
    theirs = captured(tmp_path, out, engine=engine, request_s=REQUEST_S)["capture"]
    assert theirs["source"]["states_known_by"] == ["measured"] * 3
    for name in (
        "samples",
        "left_out",
        "positions",
        "positions_following_argmax",
        "dtype",
        "target",
    ):
        assert theirs[name] == ours[name], name
    expected, found = samples_of(tmp_path / "ours"), samples_of(out)
    assert found.keys() == expected.keys()
    for ids, sample in expected.items():
        other = found[ids]
        assert torch.equal(other.loss_mask, sample.loss_mask)
        assert torch.equal(other.target_argmax, sample.target_argmax)
        for k in STATES:
            torch.testing.assert_close(other.states[k], sample.states[k], atol=1e-4, rtol=1e-4)
    assert scored(tmp_path, out) == scored(tmp_path, tmp_path / "ours")

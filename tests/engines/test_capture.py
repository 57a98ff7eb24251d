"""States captured from a running SGLang are those that transformers gives, text for text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from eagle3.conventions import KEY
from eagle3.data import find_data
from eagle3.files import read_json
from eagle3.samples import Sample, read_samples
from jobs import capture_states, drafter_test
from jobs.engines.engine import Draft, Wanted
from jobs.engines.folder import lay_out
from jobs.engines.sglang import SGLang
from jobs.engines.started import started
from jobs.events import Events
from tests.engines import serving
from tests.engines.conftest import PATIENCE, REQUEST_S, USUAL, Starter, request
from tests.jobs.test_diagnose import LAB

PROMPTS, STATES = 6, [0, 3, 31]
CASE: dict[str, Any] = {
    "case_id": "case",
    "prompts": str(LAB / "prompts.jsonl"),
    "new_tokens": 48,
    "repetition_window": 24,
    "min_new_tokens": 24,
    "batch": 4,
    "max_samples": PROMPTS,
    "keep": False,
}
WIRING = {**USUAL, "head": "own", "residual": "declared", "window": "declared"}


def captured(folder: Path, out: Path, states: list[int] = STATES, **engine: Any) -> dict[str, Any]:
    """What the job says of a capture at `out`."""
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(folder / "target")}
    asked = {"device": "cpu", "dtype": "float32", "inputs": {"target": target}, **engine}
    with Events(folder / "events.jsonl") as events:
        job = capture_states.open_job(asked, events)
        found = job.run_case({**CASE, "states": states, "out": str(out)})
    return json.loads(json.dumps(found))


def samples_of(out: Path) -> dict[tuple[int, ...], Sample]:
    """By their tokens."""
    form = find_data(out, hidden=128, num_layers=61)
    return {tuple(s.input_ids.tolist()): s for s in read_samples(form, vocab=1024, hidden=128)}


def scored(folder: Path, data: Path) -> dict[str, Any]:
    """The drafter's figures on a dump."""
    spec = {"path": str(data), "states": None, "layout": None, "damaged": "fail"}
    asked = {
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
        job = drafter_test.open_job(asked, events)
        metrics: dict[str, Any] = job.run_case({"case_id": "a", "wiring": wiring})["metrics"]
    return {name: metrics[name] for name in ("accuracy", "accept_length", "coverage")}


def asked_of(url: str) -> dict[str, Any]:
    """What a request says of a server."""
    engine = {"name": "sglang", "url": url, "version": None, "engine_class": None}
    return {"engine": engine, "request_s": REQUEST_S}


def check_same(expected: Path, found: Path) -> None:
    """Two dumps hold the same texts, masks and choices, and all states of the second are alike."""
    theirs = samples_of(found)
    ours = samples_of(expected)
    assert theirs.keys() == ours.keys()
    for ids, sample in ours.items():
        other = theirs[ids]
        assert torch.equal(other.loss_mask, sample.loss_mask)
        assert sample.target_argmax is not None
        assert other.target_argmax is not None
        assert torch.equal(other.target_argmax, sample.target_argmax)
        for k, state in other.states.items():
            torch.testing.assert_close(state, sample.states[k], atol=1e-4, rtol=1e-4)


def test_a_server_gives_the_dump_that_transformers_gives(starter: Starter, tmp_path: Path) -> None:
    ours = captured(tmp_path, tmp_path / "ours")["capture"]
    source = LAB / "drafter"
    config = read_json(source / "config.json")
    config["eagle_config"] = {**config.get("eagle_config", {}), KEY: [-1, 2, 30]}
    draft = Draft(folder=lay_out(source, tmp_path / "drafter", config), steps=4)
    server = starter.start("sglang", tmp_path / "target", draft, enable_return_hidden_states=True)
    out, url = tmp_path / "theirs", server.running.address.url
    theirs = captured(tmp_path, out, **asked_of(url))["capture"]
    assert theirs["source"]["states_known_by"] == ["measured"] * 3
    for name in ("states", "samples", "left_out", "positions", "positions_following_argmax"):
        assert theirs[name] == ours[name], name
    assert (theirs["dtype"], theirs["target"]) == (ours["dtype"], ours["target"])
    check_same(tmp_path / "ours", out)
    assert next(iter(samples_of(out).values())).states.keys() == set(STATES)
    assert scored(tmp_path, out) == scored(tmp_path, tmp_path / "ours")


def test_a_server_without_a_drafter_gives_the_states_of_its_flag(tmp_path: Path) -> None:
    captured(tmp_path, tmp_path / "ours")
    target = tmp_path / "target"
    wanted = Wanted(
        python=str(serving.engine_python("sglang")),
        target=target,
        port=0,
        draft=None,
        flags={**serving.flags("sglang"), "enable_return_aux_hidden_states": True},
    )
    # The flag takes the name of the convention from one that the adapter keeps for drafters.
    command = [
        "{port}" if word == "0" and before == "--port" else word
        for before, word in pairwise(["", *SGLang().command(wanted)])
    ]
    command += [
        "--speculative-algorithm",
        "EAGLE3",
        "--return-aux-hidden-state-layer-ids",
        "2",
        "30",
    ]
    with started(
        SGLang(),
        replace(wanted, launch=command),
        serving.environment("sglang"),
        tmp_path,
        label="layers",
        number=0,
        first=request([1] * 4, 8),
        patience=PATIENCE,
        say=lambda _: None,
    ) as running:
        theirs = captured(
            tmp_path, tmp_path / "theirs", states=[3, 31], **asked_of(running.address.url)
        )["capture"]
    assert theirs["source"]["returned"] == [3, 31]
    assert theirs["source"]["states_known_by"] == ["measured"] * 2
    check_same(tmp_path / "ours", tmp_path / "theirs")

"""What a real engine feeds, recorded in its own process and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.engine_probe import open_job
from jobs.events import Events
from tests.engines import serving
from tests.engines.conftest import USUAL
from tests.jobs.test_diagnose import LAB, request_of

TRUE = {**USUAL, "layers": [-1, 2, 30], "convention": "output"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def probed(made: Path, out: Path, engine: str, ids: list[int] | None) -> dict[str, Any]:
    """The answer about the lab's drafter, as it is or with other ids."""
    diagnosis = request_of(made, LAB / "drafter")
    request = {
        "device": "cpu",
        "threads": 1,
        "steps": 4,
        "topk": 1,
        "draft_tokens": None,
        "max_prompts": 2,
        "new_tokens": 32,
        "ignore_eos": True,
        "start_s": 300.0,
        "first_s": 240.0,
        "request_s": 240.0,
        "seed": 0,
        "inputs": {**diagnosis["inputs"], "prompts": None},
        "engine": {
            "name": engine,
            "version": None,
            "engine_class": None,
            "flags": serving.flags(engine),
            "env": serving.environment(engine),
            "python": str(serving.engine_python(engine)),
            "ids": ids,
            "url": None,
        },
    }
    with Events(out / "events.jsonl") as events:
        found = open_job(request, events).run_case({"case_id": "case", "wiring": TRUE})
    return json.loads(json.dumps(found))  # it has to be fit for a result file


@pytest.mark.parametrize(
    ("engine", "ids", "fed", "where"),
    [
        ("sglang", [-1, 2, 30], [0, 3, 31], "none"),
        ("sglang", [2, 30, 58], [3, 31, 59], "config"),
        ("vllm", [0, 3, 31], [0, 3, 31], "none"),
        ("vllm", [3, 31, 59], [3, 31, 59], "config"),
    ],
)
def test_the_states_that_are_fed_are_named(
    made: Path, tmp_path: Path, engine: str, ids: list[int], fed: list[int], where: str
) -> None:
    result = probed(made, tmp_path, engine, ids)
    probe = result["probe"]
    assert probe["fed"] == fed
    assert probe["where"] == where
    assert [chunk["verdict"] for chunk in probe["chunks"]] == ["fed"] * 3
    assert all(chunk["error"] < 0.1 * chunk["second"] for chunk in probe["chunks"])
    names = [finding["name"] for finding in result["findings"]]
    assert ("engine-feeds-other-states" in names) == (where == "config")
    if where == "config":
        assert result["metrics"]["accept_length"]["value"] < 1.3
        (fix,) = next(f for f in result["findings"] if f["name"] == "engine-feeds-other-states")[
            "fix"
        ]
        assert str([-1, 2, 30] if engine == "sglang" else [0, 3, 31]) in fix

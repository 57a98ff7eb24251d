"""What a config asks of a host: which inputs, and which request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.plan import Placed, inputs_of, request_of
from tests.orchestrator.test_config import resolved

WIRED = ("wiring.layers=[-1,2,30]", "wiring.convention=output")
DUMP = ("data=path", "data.path=/data/states", "target=path", "target.path=/models/target")


def request(*overrides: str) -> dict[str, Any]:
    config = resolved(*overrides).config
    inputs = inputs_of(config)
    placed = {
        role: Placed(path=given.path, digest="" if given.tree is None else "0" * 64)
        for role, given in inputs.items()
    }
    return request_of(config, placed, "/root")


def test_a_dump_is_named_with_all_that_is_said_of_it() -> None:
    asked = request(*WIRED, *DUMP, "data.states=[0,3,31,59]", "data.target_argmax=/data/argmax")
    assert asked["inputs"]["data"] == {
        "path": "/data/states",
        "target_argmax": "/data/argmax",
        "states": [0, 3, 31, 59],
        "layout": None,
        "damaged": "fail",
    }
    assert asked["tree"] is None
    assert asked["metrics"] == ["ours"]


def test_choices_are_asked_for_by_capturing_a_dump() -> None:
    asked = request("job=capture_states", "job.out=/data/argmax", *DUMP, "data.damaged=skip")
    assert asked["job"] == "capture_states"
    (case,) = asked["cases"]
    assert case["data"]["path"] == "/data/states"
    assert case["data"]["damaged"] == "skip"
    assert case["out"] == "/data/argmax"
    assert asked["dtype"] == "auto"


def test_a_type_that_nothing_would_read_is_refused() -> None:
    with pytest.raises(InputError, match=r"data\.capture\.dtype"):
        request("job=capture_states", "job.out=/data/new", "job.dtype=float32")


def test_a_capture_makes_choices_and_reads_none() -> None:
    with pytest.raises(InputError, match=r"data\.target_argmax is what a capture makes"):
        request("job=capture_states", "job.out=/o", *DUMP, "data.target_argmax=/data/argmax")


def test_inspecting_captures_missing_data_as_a_test_does(tmp_path: Path) -> None:
    inspected, scored = request("job=inspect_data"), request(*WIRED)
    assert inspected["inputs"]["data"] == scored["inputs"]["data"]
    assert inspected["inputs"]["data"]["capture"]["job"] == "capture_states"
    assert inspected["cases"] == [{"case_id": "case"}]

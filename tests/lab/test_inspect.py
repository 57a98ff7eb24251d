"""What is said of the lab's own data: its slots are known, its last one is not the target's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import capture_states, inspect_data
from jobs.events import Events
from orchestrator.paths import CLONE
from tests.lab.conftest import STORED, Lab

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
FEW = 16  # prompts


def target_of(lab: Lab) -> dict[str, str]:
    return {"path": str(lab.target), "layout": "hf", "made": ""}


def inspect(lab: Lab, data: Path, tmp_path: Path, first_layers: int | None) -> dict[str, Any]:
    request = {
        "device": "cpu",
        "max_samples": None,
        "first_layers": first_layers,
        "seed": 0,
        "inputs": {
            "target": target_of(lab),
            "data": {
                "path": str(data),
                "states": None,
                "layout": None,
                "damaged": "fail",
                "target_argmax": None,
            },
        },
    }
    with Events(tmp_path / "inspect.jsonl") as events:
        return inspect_data.open_job(request, events).run_case({"case_id": "case"})


def captured(lab: Lab, states: tuple[int, ...], out: Path, tmp_path: Path) -> Path:
    """The first prompts with the target's own words, as the lab's data is made."""
    request = {"device": "cpu", "dtype": "float32", "inputs": {"target": target_of(lab)}}
    case = {
        "out": str(out),
        "prompts": str(CLONE / "lab" / "prompts.jsonl"),
        "states": list(states),
        "new_tokens": 48,
        "repetition_window": 24,
        "min_new_tokens": 24,
        "batch": FEW,
        "max_samples": FEW,
        "keep": False,
    }
    with Events(tmp_path / "capture.jsonl") as events:
        capture_states.open_job(request, events).run_case(case)
    return out


@pytest.mark.parametrize("first_layers", [None, 0])
def test_slot_59_is_named_as_teacher_and_not_the_targets_end(
    lab: Lab, tmp_path: Path, first_layers: int | None
) -> None:
    result = inspect(lab, lab.data, tmp_path, first_layers)
    (found,) = result["findings"]
    assert (found["name"], found["severity"], found["evidence"]) == (
        "wrong-teacher",
        "error",
        "measured",
    )
    assert "hidden_states[3]" in found["what"]
    assert "is state 59 and not the target's end (state 61)" in found["what"]
    assert len(found["what"].split()) <= 45
    embedding, *others = result["slots"]
    match = embedding["embedding"]["by_shift"]["+0"]
    assert embedding["verdict"] == "verified"
    assert match["exact"] == match["rows"] == result["texts"]["positions"]
    if first_layers is None:
        assert [slot["found"] for slot in result["slots"]] == [[k] for k in STORED]
        assert {slot["verdict"] for slot in others} == {"verified"}
    else:
        assert {slot["verdict"] for slot in others} == {"as declared"}
    shares = [s["agreement"]["target_argmax"]["norm_and_head"]["value"] for s in result["slots"]]
    assert shares == sorted(shares)  # the nearer to the end, the more often its choice
    assert result["metrics"]["teacher_agreement"]["high"] < 0.5
    assert result["template"]["prompt_tokens"] == 48
    assert result["template"]["prompt_text_sha256"]


def test_data_with_the_targets_end_is_passed_in_silence(lab: Lab, tmp_path: Path) -> None:
    data = captured(lab, (0, 3, 31, 61), tmp_path / "data", tmp_path)
    for first_layers in (None, 5, 0):
        result = inspect(lab, data, tmp_path, first_layers)
        assert result["findings"] == []
        expected = {
            None: ["verified"] * 4,
            5: ["verified", "verified", "as declared", "as declared"],
            0: ["verified", "as declared", "as declared", "as declared"],
        }[first_layers]
        assert [slot["verdict"] for slot in result["slots"]] == expected
        assert result["metrics"]["teacher_agreement"]["value"] == 1


def test_states_that_the_identity_layers_make_equal_are_named_as_a_set(
    lab: Lab, tmp_path: Path
) -> None:
    data = captured(lab, (0, 7, 40, 61), tmp_path / "data", tmp_path)
    result = inspect(lab, data, tmp_path, None)
    assert result["findings"] == []
    assert [slot["found"] for slot in result["slots"]] == [
        [0],
        list(range(4, 11)),
        list(range(32, 58)),
        [61],
    ]
    assert "states 32..57, all equal here" in result["slots"][2]["what"]

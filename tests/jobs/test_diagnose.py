"""The job on the lab: the story's drafter and the second one behind SGLang 0.5.12, and a sound one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.errors import BadInput
from jobs.diagnose import open_job
from jobs.events import Events

LAB = Path(__file__).parents[2] / "lab"
PROMPTS = 24
KIMI = {"name": "sglang", "version": "0.5.12", "engine_class": "kimi_k25", "ids": [2, 30, 58]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def request_of(made: Path, drafter: Path, **changed: Any) -> dict[str, Any]:
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(made / "target")}
    capture = {
        "job": "capture_states",
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "inputs": {"target": target},
        "cases": [
            {
                "case_id": "case",
                "prompts": str(LAB / "prompts.jsonl"),
                "out": str(made / "data"),
                "keep": True,
                "states": [0, 3, 31, 59],
                "new_tokens": 96,
                "repetition_window": 24,
                "min_new_tokens": 24,
                "batch": PROMPTS,
                "max_samples": PROMPTS,
            }
        ],
    }
    data = {"path": str(made / "data"), "target_argmax": None, "states": None, "layout": None}
    return {
        "job": "diagnose",
        "device": "cpu",
        "threads": 1,
        "steps": 4,
        "max_samples": 16,
        "seed": 0,
        "axes": {"fixed": [], "only": {}, "states": None},
        "start": None,
        "finalists": 4,
        "inputs": {
            "target": target,
            "drafter": {"path": str(drafter), "layout": None},
            "data": {**data, "damaged": "fail", "capture": capture},
        },
        "engine": None,
        "trained_accuracy": None,
        "cases": [{"case_id": "case"}],
        **changed,
    }


def answer(made: Path, drafter: Path, tmp_path: Path, **changed: Any) -> dict[str, Any]:
    with Events(tmp_path / "events.jsonl") as events:
        job = open_job(request_of(made, drafter, **changed), events)
        found = job.run_case({"case_id": "case"})
    return json.loads(json.dumps(found))  # it has to be fit for a result file


def kinds(result: dict[str, Any]) -> list[str]:
    return [cause["kind"] for cause in result["diagnosis"]["causes"]]


def test_the_story_behind_sglang(made: Path, tmp_path: Path):
    result = answer(made, LAB / "drafter", tmp_path, engine=KIMI)
    diagnosis = result["diagnosis"]
    assert diagnosis["verdict"] == "cause"
    assert kinds(result) == ["states"]
    assert diagnosis["trained"]["states"] == [0, 3, 31]
    assert diagnosis["served"]["states"] == [3, 31, 59]
    assert diagnosis["accept_length_served"]["value"] < 1.2
    assert diagnosis["accept_length_repaired"]["value"] > 2.3
    text = "\n".join(diagnosis["first_lines"])
    assert "[-1, 2, 30]" in text
    assert "expected accept length" in text
    assert diagnosis["slots"] == [
        f"slot {i}: state {k}, verified" for i, k in enumerate((0, 3, 31, 59))
    ]
    assert result["ranked"][0]["states"] == [0, 3, 31]
    assert result["metrics"]["accuracy"]["value"] > 0.6


def test_the_second_drafter_has_three_faults(made: Path, tmp_path: Path):
    result = answer(made, LAB / "drafter_speculators", tmp_path, engine=KIMI)
    assert {"teacher", "residual", "states"} <= set(kinds(result))
    diagnosis = result["diagnosis"]
    assert "state 59" in diagnosis["teacher"]
    # What can be written comes first on the ladder: the ids, before what takes a patch.
    ladder = [step["mended"] for step in diagnosis["ladder"]]
    assert ladder[0] == "states"
    assert diagnosis["ladder"][0]["accept_length"]["value"] < 1.3
    assert len(diagnosis["first_lines"]) <= 12


def test_a_sound_drafter_has_nothing(made: Path, tmp_path: Path):
    result = answer(made, LAB / "drafter", tmp_path)
    assert result["diagnosis"]["verdict"] == "sound"
    assert kinds(result) == []
    assert result["diagnosis"]["config"] is None


def test_a_table_that_was_never_filled_is_made_again_from_its_mask(made: Path, tmp_path: Path):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    save_file(tensors, drafter / "model.safetensors")
    result = answer(made, drafter, tmp_path)
    assert kinds(result) == ["d2t"]
    assert result["diagnosis"]["accept_length_repaired"]["value"] > 2.3


def test_damaged_weights_are_not_among_the_causes(made: Path, tmp_path: Path):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    tensors = load_file(drafter / "model.safetensors")
    order = torch.randperm(384, generator=torch.Generator().manual_seed(1))
    name = next(n for n in tensors if n.endswith("mlp.gate_proj.weight"))
    tensors[name] = tensors[name][order]
    save_file(tensors, drafter / "model.safetensors")
    result = answer(made, drafter, tmp_path)
    assert result["diagnosis"]["verdict"] == "unknown"
    assert kinds(result)[0] == "unknown"


def test_an_engine_that_is_not_told_apart_is_left_undecided(made: Path, tmp_path: Path):
    engine = {"name": "sglang", "version": None, "engine_class": "kimi_k25", "ids": [2, 30, 58]}
    result = answer(made, LAB / "drafter", tmp_path, engine=engine)
    assert result["diagnosis"]["served"] is None
    assert any("engine_version" in note for note in result["diagnosis"]["notes"])


def test_a_drafter_of_another_kind_is_refused_by_name(made: Path, tmp_path: Path):
    drafter = tmp_path / "drafter"
    shutil.copytree(LAB / "drafter", drafter)
    path = drafter / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 16}
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"(?i)mla|latent"):
        answer(made, drafter, tmp_path)

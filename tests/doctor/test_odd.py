"""Values that no trainer writes: each is a finding or a sentence, and hides nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.doctor import report as reports
from eagle3.doctor.findings import Finding
from eagle3.doctor.report import examine
from eagle3.doctor.subject import EngineAsked, Subject
from eagle3.errors import BadInput
from jobs.doctor import main
from orchestrator import doctor
from orchestrator.errors import InputError
from tests.doctor.files import (
    flat_config,
    flat_drafter,
    nested_config,
    nested_tensors,
    sound_tensors,
    write_drafter,
    write_target,
)

SGLANG = EngineAsked(name="sglang", version="0.5.23", engine_class="llama")
VLLM = EngineAsked(name="vllm", version="0.33.0", engine_class="llama")


@pytest.mark.parametrize("dtype", [["F32"], {}, None, 3])
def test_a_number_type_that_is_no_name(tmp_path: Path, dtype: Any) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    header = {"fc.weight": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    path = drafter / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * 4)
    found = examine(drafter, engine=SGLANG).findings
    assert "drafter-unreadable" in [f.name for f in found]
    assert any("unknown number type" in f.what for f in found)


@pytest.mark.parametrize("value", [-1, True, 1.5, "LlamaForCausalLMEagle3", {"a": 1}])
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_architectures_that_are_no_list(tmp_path: Path, value: Any, layout: str) -> None:
    flat = layout == "flat"
    config = {**(flat_config() if flat else nested_config()), "architectures": value}
    drafter = write_drafter(
        tmp_path / "drafter", config, sound_tensors() if flat else nested_tensors()
    )
    target = write_target(tmp_path / "target", architectures=value)
    report = examine(drafter, target, engine=SGLANG if flat else VLLM)
    assert report.failed == ()
    assert any("is no list of names" in f.what for f in report.findings)


@pytest.mark.parametrize("count", [10**30, 10**9])
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_more_layers_than_there_can_be(tmp_path: Path, count: int, layout: str) -> None:
    config = flat_config() if layout == "flat" else nested_config()
    config.get("transformer_layer_config", config)["num_hidden_layers"] = count
    tensors = sound_tensors() if layout == "flat" else nested_tensors()
    report = examine(write_drafter(tmp_path / "drafter", config, tensors), engine=VLLM)
    assert report.failed == ()
    assert any("must be a number of layers from 1 to 1000" in f.what for f in report.findings)


@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "vocab_size", "rms_norm_eps"])
@pytest.mark.parametrize("value", [10**30, 10**400])
def test_sizes_beyond_all_bounds(tmp_path: Path, key: str, value: int) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **{key: value})
    report = examine(drafter, write_target(tmp_path / "target"), engine=SGLANG)
    assert report.failed == ()
    assert any(f.severity == "error" for f in report.findings)


@pytest.mark.parametrize("role", ["drafter", "target", "data", "trainer", "checkout"])
def test_a_home_that_is_not_there_is_bad_input(tmp_path: Path, role: str) -> None:
    path = "~nosuchuser/x"
    asked: dict[str, Any] = {"drafter": str(flat_drafter(tmp_path / "drafter"))}
    if role == "checkout":
        asked["engine"] = {"name": "sglang", "version": "0.5.23", "checkout": path}
    else:
        asked[role] = path
    answer = json.loads(main(json.dumps(asked)))
    assert answer["error"]["kind"] == "input"
    assert answer["error"]["message"].startswith(path)


@pytest.mark.parametrize("key", ["aux_hidden_state", "hidden_state"])
def test_a_state_without_dimensions_is_damage(tmp_path: Path, key: str) -> None:
    sample = {
        "input_ids": torch.arange(3),
        "loss_mask": torch.ones(3),
        "aux_hidden_state": torch.zeros(1, 3, 12),
        "hidden_state": torch.zeros(1, 3, 4),
        key: torch.tensor(1.0),
    }
    torch.save(sample, tmp_path / "data_0.pt")
    (found,) = examine(None, None, tmp_path).findings
    assert found.name == "data-damaged"
    assert f"{key} is a single number" in found.what


def test_offsets_that_no_whole_number_holds(tmp_path: Path) -> None:
    tensors = sound_tensors()
    tensors["d2t"] = np.full(len(tensors["d2t"]), 1e30, np.float32)
    report = examine(write_drafter(tmp_path / "drafter", flat_config(), tensors))
    assert [f.name for f in report.findings] == ["d2t-type"]


def test_a_check_that_breaks_down_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(subject: Subject) -> Iterator[Finding]:
        raise ZeroDivisionError("of no file")
        yield

    monkeypatch.setattr(reports, "CHECKS", (broken, *reports.CHECKS))
    drafter = flat_drafter(tmp_path / "drafter", norm_output=False)
    report = examine(drafter, engine=SGLANG)
    assert [f.name for f in report.findings] == ["head-norm-off"]
    (said,) = report.failed
    assert "checks of test_odd broke down" in said
    assert "ZeroDivisionError: of no file (broken, line" in said
    assert doctor.exit_code(report.plain()) == 1
    assert doctor.exit_code({**report.plain(), "failed": []}) == 3


@pytest.mark.parametrize("text", ["[0,3", "0,3]", "[[0,3]]", "[]", "-1,2", "[0,,3]", "0.5", "²"])
def test_states_that_are_no_list_of_them_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="give the canonical states"):
        doctor.states_of(text)


@pytest.mark.parametrize("text", ["[0,3,31]", "0,3,31", " [ 0, 3 ,31 ] "])
def test_states_in_either_spelling(text: str) -> None:
    assert doctor.states_of(text) == [0, 3, 31]


@pytest.mark.parametrize("text", ["[1,2]", '["num_steps=3"]'])
def test_a_list_of_flags_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is a list"):
        doctor.flags_of(text)


def test_a_flag_s_value_may_be_a_list() -> None:
    said = doctor.flags_of("eagle3_layers_to_capture=[1,2,3],topk=1")
    assert said == {"eagle3_layers_to_capture": [1, 2, 3], "topk": 1}


def test_results_of_nobody_are_bad_input(tmp_path: Path) -> None:
    asked = doctor.parse([f"drafter={tmp_path}", "results=~nosuchuser/x"])
    with pytest.raises(InputError, match="results=~nosuchuser"):
        doctor.host_of(asked)


def test_no_home_is_named_where_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="~nosuchuser"):
        examine(flat_drafter(tmp_path / "drafter"), trainer="~nosuchuser/draft.json")

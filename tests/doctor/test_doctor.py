"""Sound checkpoints are passed in silence; each thing that files can show is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3.doctor.data_files import slots_of
from eagle3.doctor.findings import Report
from eagle3.doctor.report import examine
from eagle3.doctor.subject import EngineAsked
from eagle3.errors import BadInput
from tests.doctor.files import (
    CHOSEN,
    VD,
    H,
    N,
    V,
    bf16,
    flat_config,
    flat_drafter,
    nested_config,
    nested_drafter,
    nested_tensors,
    sound_tensors,
    target_table,
    write_drafter,
    write_safetensors,
    write_target,
)

CLONE = Path(__file__).resolve().parents[2]
SGLANG = EngineAsked(name="sglang", version="0.5.23", engine_class="llama")
VLLM = EngineAsked(name="vllm", version="0.33.0", engine_class="llama")
Spoil = Callable[[dict[str, Any], dict[str, Any]], Any]


def names(report: Report, least: str = "warning") -> list[str]:
    """Names of the findings, notes left out."""
    return [f.name for f in report.findings if f.severity != "note" or least == "note"]


def finding(report: Report, name: str) -> Any:
    found = [f for f in report.findings if f.name == name]
    assert len(found) == 1, (name, report.findings)
    return found[0]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def spoilt(folder: Path, layout: str, spoil: Spoil) -> Path:
    """A checkpoint of a layout, changed in its config and tensors by a function."""
    flat = layout == "flat"
    config = flat_config() if flat else nested_config()
    tensors = sound_tensors() if flat else nested_tensors()
    spoil(config, tensors)
    return write_drafter(folder, config, tensors)


# -- sound ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("named", ["alone", "with the target", "with an engine"])
def test_a_sound_checkpoint_is_passed_in_silence(
    tmp_path: Path, target: Path, layout: str, named: str
) -> None:
    write = flat_drafter if layout == "flat" else nested_drafter
    drafter = write(tmp_path / "drafter")
    engine = SGLANG if layout == "flat" else VLLM
    report = examine(
        drafter,
        None if named == "alone" else target,
        engine=engine if named == "with an engine" else None,
        trainer="specforge" if layout == "flat" else "speculators",
    )
    assert report.findings == ()
    assert report.inventory.missing == report.inventory.unread == ()
    assert set(report.inventory.required) <= {
        name.replace("layers.0.", "midlayer.") for name in report.inventory.present
    }


def test_a_bin_is_not_examined_and_said_so(tmp_path: Path, target: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    (drafter / "model.safetensors").rename(drafter / "pytorch_model.bin")
    report = examine(drafter, target, engine=SGLANG)
    assert report.findings == ()
    assert any("pytorch_model.bin: a pickle" in said for said in report.not_examined)


def test_bf16_weights_and_a_whole_vocabulary_are_sound(tmp_path: Path, target: Path) -> None:
    tensors = {
        name: bf16(values) if values.dtype == np.float32 else values
        for name, values in sound_tensors().items()
        if name not in ("d2t", "t2d", "lm_head.weight")
    }
    tensors["lm_head.weight"] = bf16(np.ones((V, H)))
    config = {**flat_config(), "draft_vocab_size": V}
    drafter = write_drafter(tmp_path / "drafter", config, tensors)
    assert examine(drafter, target, engine=SGLANG).findings == ()


def test_shards_are_read(tmp_path: Path, target: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    tensors = sound_tensors()
    (drafter / "model.safetensors").unlink()
    first = {name: tensors.pop(name) for name in list(tensors)[:5]}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": tensors}
    for file, held in files.items():
        write_safetensors(drafter / file, held)
    index = {name: file for file, held in files.items() for name in held}
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert examine(drafter, target, engine=SGLANG).findings == ()
    (drafter / "model-00002-of-00002.safetensors").unlink()
    assert names(examine(drafter, target)) == ["drafter-unreadable"]


# -- layer ids -----------------------------------------------------------------------------------


STORY = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return write_target(tmp_path / "kimi", model_type="kimi_k25", num_hidden_layers=61)


def test_the_story_s_ids_against_the_states_that_were_trained_on(
    tmp_path: Path, kimi: Path
) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **STORY)
    engine = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
    report = examine(drafter, kimi, engine=engine, states=[0, 3, 31, 59])
    found = finding(report, "ids-mean-other-states")
    assert "feeds states 3, 31 and 59" in found.what
    assert "trained on states 0, 3 and 31" in found.what
    assert found.fix[0] == '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}'
    assert "embedding capture patch" in found.fix[1]
    assert found.fix[2] == (
        "that patch: engine.patch=embedding_capture (in job=engine_probe and job=engine_bench)"
    )
    assert found.fix[3] == "or, with no patch, sglang 0.5.14 or newer with the ids [0,3,31]"
    assert found.evidence.startswith("read: models/deepseek_v2.py")


def test_ids_change_their_meaning_between_two_releases(tmp_path: Path, kimi: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **STORY)
    said = {}
    for version in ("0.5.12", "0.5.13"):
        engine = EngineAsked(name="sglang", version=version, engine_class="kimi_k25")
        said[version] = names(examine(drafter, kimi, engine=engine, states=[3, 31, 59]))
    assert said == {"0.5.12": [], "0.5.13": ["ids-mean-other-states"]}


def test_the_class_is_taken_from_the_target(tmp_path: Path, kimi: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **STORY)
    engine = EngineAsked(name="sglang", version="0.5.13")
    report = examine(drafter, kimi, engine=engine, states=[2, 30, 58])
    assert report.subject["engine"] == "sglang 0.5.13, class kimi_k25"
    assert names(report) == []


def test_ids_that_the_engine_does_not_look_up(tmp_path: Path, target: Path) -> None:
    nested = flat_drafter(tmp_path / "nested")
    found = finding(examine(nested, target, engine=VLLM, trainer="specforge"), "ids-not-looked-up")
    assert "takes its default states (states 2, 3 and 4)" in found.what
    assert found.fix[0] == '"eagle_aux_hidden_state_layer_ids": [2, 3, 4]'
    top = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": None}
    report = examine(flat_drafter(tmp_path / "top", **top), target, engine=SGLANG)
    found = finding(report, "ids-not-looked-up")
    assert "looks only in eagle_config.eagle_aux_hidden_state_layer_ids" in found.what


def test_the_default_list_of_another_ecosystem_is_suspected(tmp_path: Path, kimi: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **STORY)
    engine = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
    assert names(examine(drafter, kimi, engine=engine)) == []  # as SpecForge means them
    top = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "eagle_config": None}
    engine = EngineAsked(name="vllm", version="0.33.0", engine_class="kimi_k25")
    report = examine(flat_drafter(tmp_path / "other", **top), kimi, engine=engine)
    found = finding(report, "ids-of-another-convention")
    assert "reads [1,29,57] as states 1, 29 and 57" in found.what
    assert "trained on states 2, 30 and 58" in found.what
    assert found.fix[0] == '"eagle_aux_hidden_state_layer_ids": [2, 30, 58]'


@pytest.mark.parametrize(
    ("ids", "name"),
    [
        ([3, 1, 2], "ids-out-of-order"),
        ([1, 2], "fc-width"),
        ([1, 2, 9], "ids-not-served"),
        ([1, 1, 2], "ids-not-served"),
    ],
)
def test_lists_that_cannot_be_what_was_trained(
    tmp_path: Path, target: Path, ids: list[int], name: str
) -> None:
    drafter = flat_drafter(
        tmp_path / "drafter", eagle_config={"eagle_aux_hidden_state_layer_ids": ids}
    )
    report = examine(drafter, target, engine=SGLANG)
    assert name in names(report) or "file-and-config-disagree" in names(report)
    assert any(f.severity == "error" for f in report.findings)


def test_states_that_no_list_can_name(tmp_path: Path, target: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    report = examine(
        drafter, target, engine=EngineAsked(name="tensorrt_llm", version="1.0"), states=[0, 2, 3]
    )
    found = finding(report, "ids-mean-other-states")
    assert "the embedding output cannot be captured there" in found.fix[0]


def test_the_embedding_needs_a_patch_that_only_an_unknown_checkout_may_have(
    tmp_path: Path, kimi: Path
) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}}
    drafter = flat_drafter(tmp_path / "drafter", **ids)
    engine = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
    report = examine(drafter, kimi, engine=engine, states=[0, 3, 31])
    assert [(f.name, f.severity) for f in report.findings] == [("embedding-needs-a-patch", "error")]
    assert report.findings[0].fix[1].startswith("that patch: engine.patch=embedding_capture")
    other = EngineAsked(name="sglang", version="0.5.11", engine_class="kimi_k25")
    report = examine(drafter, kimi, engine=other, states=[0, 3, 31])
    assert report.findings[0].fix[1:] == (
        "that patch: not shipped for 0.5.11",
        "or, with no patch, sglang 0.5.14 or newer with the ids [0,3,31]",
    )
    (tmp_path / "sglang" / "srt" / "models").mkdir(parents=True)
    patched = EngineAsked(**{**vars(engine), "checkout": str(tmp_path / "sglang")})
    report = examine(drafter, kimi, engine=patched, states=[0, 3, 31])
    assert [(f.name, f.severity) for f in report.findings] == [
        ("embedding-needs-a-patch", "warning"),
        ("checkout-unknown", "warning"),
    ]
    assert "unknown: probe it" in report.findings[1].what


def test_the_config_s_ids_against_the_data_s_states(tmp_path: Path, target: Path) -> None:
    data = write_shards(tmp_path / "data")
    drafter = nested_drafter(tmp_path / "drafter")
    report = examine(drafter, target, data, states=[0, 2, 3, N])
    found = finding(report, "ids-not-those-of-the-data")
    assert "as speculators 0.9.0 means them, are states 2, 3 and 4" in found.what
    assert found.fix[0] == '"eagle_aux_hidden_state_layer_ids": [0, 2, 3]'
    assert names(examine(drafter, target, data, states=[2, 3, 4, N])) == []


def test_eagle_trains_on_layers_of_its_own(tmp_path: Path, kimi: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", **STORY)
    engine = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
    report = examine(drafter, kimi, engine=engine, trainer="eagle")
    assert "trained on states 2, 30 and 58" in finding(report, "ids-mean-other-states").what


# -- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "nested"])
class TestTensors:
    """Faults of the file, in both layouts."""

    def examine(self, folder: Path, layout: str, spoil: Spoil, **more: Any) -> Report:
        engine = SGLANG if layout == "flat" else VLLM
        drafter = spoilt(folder / "drafter", layout, spoil)
        return examine(drafter, write_target(folder / "target"), **{"engine": engine, **more})

    def test_a_renamed_tensor(self, tmp_path: Path, layout: str) -> None:
        def rename(_: Any, tensors: dict[str, Any]) -> None:
            tensors["draft.fc.weight"] = tensors.pop("fc.weight")

        report = self.examine(tmp_path, layout, rename)
        assert (
            "the file lacks fc.weight; it holds draft.fc.weight instead"
            in finding(report, "tensors-missing").what
        )
        assert "draft.fc.weight" in finding(report, "tensors-unread").what

    def test_a_renamed_block(self, tmp_path: Path, layout: str) -> None:
        def rename(_: Any, tensors: dict[str, Any]) -> None:
            for name in [n for n in tensors if n.startswith(("midlayer.", "layers."))]:
                tensors["block." + name] = tensors.pop(name)

        report = self.examine(tmp_path, layout, rename)
        assert "acceptance is about 0" in finding(report, "tensors-missing").effect

    @pytest.mark.parametrize("switch", ["fc_norm", "norm_before_fc"])
    def test_a_norm_in_the_file_without_its_switch(
        self, tmp_path: Path, layout: str, switch: str
    ) -> None:
        def add(_: Any, tensors: dict[str, Any]) -> None:
            if switch == "norm_before_fc":
                tensors["input_norm.weight"] = np.full(3 * H, 1.25, np.float32)
            else:
                tensors |= {f"fc_norm.{i}.weight": np.full(H, 1.25, np.float32) for i in range(3)}

        report = self.examine(tmp_path, layout, add)
        assert names(report) == ["file-and-config-disagree"]
        assert switch in report.findings[0].what

    def test_a_switch_without_its_norm(self, tmp_path: Path, layout: str) -> None:
        report = self.examine(tmp_path, layout, lambda config, _: config.update(fc_norm=True))
        assert names(report) == ["file-and-config-disagree"]

    def test_no_head(self, tmp_path: Path, layout: str) -> None:
        report = self.examine(tmp_path, layout, lambda _, t: t.pop("lm_head.weight"))
        assert names(report) == ["head-missing"]

    @pytest.mark.parametrize(
        ("value", "name"),
        [(np.nan, "not-finite"), (0, "norm-zeros"), (1, "norm-ones")],
    )
    def test_values_of_a_norm(self, tmp_path: Path, layout: str, value: float, name: str) -> None:
        def fill(_: Any, tensors: dict[str, Any]) -> None:
            tensors["norm.weight"][:] = value

        assert names(self.examine(tmp_path, layout, fill)) == [name]

    def test_a_norm_as_gemma_keeps_it(self, tmp_path: Path, layout: str) -> None:
        def shift(_: Any, tensors: dict[str, Any]) -> None:
            tensors["norm.weight"] -= 1

        assert names(self.examine(tmp_path, layout, shift)) == ["norm-around-zero"]

    def test_norms_that_nobody_trained_are_no_finding(self, tmp_path: Path, layout: str) -> None:
        def reset(_: Any, tensors: dict[str, Any]) -> None:
            for values in tensors.values():
                if values.ndim == 1 and values.dtype == np.float32:
                    values[:] = 1

        assert names(self.examine(tmp_path, layout, reset)) == []

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (lambda t: t.update(d2t=CHOSEN), "d2t-absolute"),
            (lambda t: t.update(d2t=np.zeros(VD, np.int64)), "d2t-zeros"),
            (lambda t: t.update(d2t=np.arange(VD)), "d2t-arange"),
            (lambda t: t.update(d2t=t["d2t"] + V), "d2t-out-of-range"),
            (lambda t: t.update(d2t=bf16(CHOSEN.astype(np.float32) * 5)), "d2t-type"),
            (lambda t: t.update(d2t=CHOSEN[::-1] - np.arange(VD)), "d2t-unsorted"),
            (lambda t: t.pop("d2t"), "d2t-missing"),
            (lambda t: t.update(t2d=np.ones(V, bool)), "t2d-count"),
            (lambda t: t.update(t2d=np.roll(t["t2d"], 1)), "d2t-and-t2d-disagree"),
            (lambda t: t.update(t2d=t["t2d"].astype(np.int64)), "t2d-type"),
            (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "d2t-twice"),
        ],
    )
    def test_the_vocabulary_s_tables(
        self, tmp_path: Path, layout: str, make: Callable[[dict[str, Any]], Any], name: str
    ) -> None:
        report = self.examine(tmp_path, layout, lambda _, tensors: make(tensors))
        assert name in names(report)
        assert all(f.name.startswith(("d2t", "t2d")) for f in report.findings)

    def test_an_absolute_map_without_a_mask(self, tmp_path: Path, layout: str) -> None:
        def spoil(_: Any, tensors: dict[str, Any]) -> None:
            del tensors["t2d"]
            tensors["d2t"] = CHOSEN

        found = finding(self.examine(tmp_path, layout, spoil, trainer=None), "d2t-absolute")
        assert found.fix[0].startswith("d2t = d2t - torch.arange(len(d2t))")

    def test_an_unsorted_map_without_a_mask_is_modelopt_s(
        self, tmp_path: Path, layout: str
    ) -> None:
        def spoil(_: Any, tensors: dict[str, Any]) -> None:
            del tensors["t2d"]
            tensors["d2t"] = CHOSEN[::-1] - np.arange(VD)

        assert names(self.examine(tmp_path, layout, spoil)) == []

    def test_another_target(self, tmp_path: Path, layout: str) -> None:
        drafter = spoilt(tmp_path / "drafter", layout, lambda *_: None)
        other = write_target(tmp_path / "target", hidden_size=2 * H)
        assert "other-target" in names(examine(drafter, other))


def test_the_head_s_rows_in_the_target_s_order(tmp_path: Path, target: Path) -> None:
    table = np.random.default_rng(3).standard_normal((V, H)).astype(np.float32)
    right, wrong = table[CHOSEN], table[:VD]
    for rows, said in ((right, []), (wrong, ["head-in-another-order"])):
        tensors = {**sound_tensors(), "lm_head.weight": rows.copy()}
        drafter = write_drafter(tmp_path / f"drafter{len(said)}", flat_config(), tensors)
        assert names(examine(drafter, target)) == said


# -- switches ------------------------------------------------------------------------------------


def test_sglang_ignores_norm_before_residual(tmp_path: Path, target: Path) -> None:
    report = examine(nested_drafter(tmp_path / "drafter"), target, engine=SGLANG)
    found = finding(report, "norm-before-residual-ignored")
    assert found.severity == "error"
    assert "sglang 0.5.23, class llama ignores" in found.what
    assert any("--no-norm-before-residual" in line for line in found.fix)
    assert "config-nested" in names(report)


def test_a_missing_norm_before_residual_means_different_things(
    tmp_path: Path, target: Path
) -> None:
    config = nested_config()
    del config["norm_before_residual"]
    drafter = write_drafter(tmp_path / "drafter", config, nested_tensors())
    report = examine(drafter, target, engine=VLLM)
    assert names(report) == ["norm-before-residual-not-stated"]


def test_norm_output_means_another_thing_in_specforge(tmp_path: Path, target: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", norm_output=True)
    assert names(examine(drafter, target)) == []
    assert names(examine(drafter, target, engine=SGLANG)) == ["norm-output-trap"]


def test_fc_norm_came_with_a_release(tmp_path: Path, target: Path) -> None:
    tensors = sound_tensors()
    tensors |= {f"fc_norm.{i}.weight": np.full(H, 1.25, np.float32) for i in range(3)}
    drafter = write_drafter(tmp_path / "drafter", {**flat_config(), "fc_norm": True}, tensors)
    old = EngineAsked(name="sglang", version="0.5.9", engine_class="llama")
    assert names(examine(drafter, target, engine=SGLANG)) == []
    assert names(examine(drafter, target, engine=old)) == ["fc-norm-ignored"]


def test_a_second_layer_s_norm_has_another_name_in_sglang(tmp_path: Path, target: Path) -> None:
    tensors = nested_tensors()
    for name, values in sound_tensors("layers.1.").items():
        if name.startswith("layers.1.") and "hidden_norm" not in name:
            half = values.ndim == 2 and "self_attn" in name and values.shape[1] == 2 * H
            tensors[name] = np.ascontiguousarray(values[:, :H]) if half else values
    config = nested_config()
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    drafter = write_drafter(tmp_path / "drafter", config, tensors)
    assert names(examine(drafter, target, engine=VLLM)) == []
    found = finding(examine(drafter, target, engine=SGLANG), "deeper-norm-name")
    assert "layers.1.hidden_norm.weight" in found.what
    other = EngineAsked(name="llama_cpp")
    assert "too-many-layers" in names(examine(drafter, target, engine=other))


def test_names_that_old_loaders_do_not_rename(tmp_path: Path, target: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", flat_config(), sound_tensors("layers.0."))
    old = EngineAsked(name="sglang", version="0.5.9", engine_class="llama")
    assert names(examine(drafter, target, engine=SGLANG)) == []
    assert names(examine(drafter, target, engine=old)) == ["names-not-remapped"]
    assert names(examine(drafter, target, trainer="eagle")) == ["names-not-remapped"]


# -- embedding -----------------------------------------------------------------------------------


def test_a_trained_embedding_is_replaced_by_sglang_and_kept_by_vllm(
    tmp_path: Path, target: Path
) -> None:
    table = target_table() + 0.2 * np.random.default_rng(5).standard_normal((V, H))
    tensors = {**sound_tensors(), "embed_tokens.weight": table.astype(np.float32)}
    config = {**flat_config(), "eagle_aux_hidden_state_layer_ids": [2, 3, 4], "eagle_config": None}
    drafter = write_drafter(tmp_path / "drafter", config, tensors)
    assert names(examine(drafter, target, engine=VLLM)) == []
    config = {**flat_config()}
    drafter = write_drafter(tmp_path / "drafter", config, tensors)
    assert names(examine(drafter, target, engine=SGLANG)) == ["embedding-replaced"]


def test_a_made_up_embedding_kills_a_drafter_in_vllm(tmp_path: Path, target: Path) -> None:
    table = np.random.default_rng(9).standard_normal((V, H)).astype(np.float32)
    tensors = {**nested_tensors(), "embed_tokens.weight": table}
    drafter = write_drafter(tmp_path / "drafter", nested_config(), tensors)
    assert names(examine(drafter, target, engine=VLLM)) == ["embedding-unrelated"]


def test_a_narrower_drafter_needs_its_own_embedding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    drafter = flat_drafter(tmp_path / "drafter", target_hidden_size=2 * H)
    assert "embedding-missing" in names(examine(drafter, None))
    assert "other-target" in names(examine(drafter, target))


# -- rope, length, config, flags -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options", "name"),
    [
        ({"rope_theta": 5e5}, {"trainer": "eagle"}, "rope-theta-not-trained"),
        ({"head_dim": 8}, {"trainer": "eagle"}, "head-dim-ignored"),
        ({"rms_norm_eps": 0.1}, {}, "norm-eps"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            {},
            "rope-from-export",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 64.0,
                    "original_max_position_embeddings": 4096,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                }
            },
            {"engine": EngineAsked(name="sglang", version="0.5.9", engine_class="llama")},
            "yarn-mscale-dropped",
        ),
        ({"max_position_embeddings": 256}, {}, "context-too-short"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {},
            "file-and-config-disagree",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, {"engine": SGLANG}, "architecture-unknown"),
        ({"tie_word_embeddings": True}, {"engine": SGLANG}, "head-tied"),
        ({"norm_output": False}, {"engine": SGLANG}, "head-norm-off"),
    ],
)
def test_the_config(
    tmp_path: Path, target: Path, changes: dict[str, Any], options: dict[str, Any], name: str
) -> None:
    report = examine(flat_drafter(tmp_path / "drafter", **changes), target, **options)
    assert name in names(report)


def test_a_missing_base_is_named_where_the_target_has_another(tmp_path: Path) -> None:
    config = flat_config()
    del config["rope_theta"]
    drafter = write_drafter(tmp_path / "drafter", config, sound_tensors())
    other = write_target(tmp_path / "other", rope_theta=5e6)
    assert names(examine(drafter, other)) == ["rope-theta-missing"]
    assert names(examine(drafter, write_target(tmp_path / "same"))) == []
    stated = flat_drafter(tmp_path / "stated", rope_theta=10000.0)
    assert names(examine(stated, other)) == []  # a drafter has its own


def test_yarn_s_mscale_is_read_by_newer_releases(tmp_path: Path, target: Path) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    drafter = flat_drafter(tmp_path / "drafter", rope_scaling=scaling)
    assert names(examine(drafter, target, engine=SGLANG)) == []
    old = EngineAsked(name="sglang", version="0.5.9", engine_class="llama")
    found = finding(examine(drafter, target, engine=old), "yarn-mscale-dropped")
    assert "by 1.416" in found.what
    assert "multiplied by 2.00" in found.effect


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, []),
        ({"--speculative-num-steps": 3, "topk": 1, "num_draft_tokens": 16}, ["num-draft-tokens"]),
        ({"num_steps": 5, "topk": 8, "num_draft_tokens": 16}, []),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 8}, ["num-draft-tokens"]),
        ({"num_steps": 6, "topk": 4, "num_draft_tokens": 4}, ["num-draft-tokens"]),
        ({"topk": 4}, ["num-steps"]),
        ({"algorithm": "EAGLE"}, ["algorithm"]),
        ({"speculative_token_map": "map.pt"}, ["token-map"]),
        ({"speculative_use_rejection_sampling": True}, ["use-rejection-sampling"]),
        ({"speculative_accept_threshold_single": 0.5}, ["accept-threshold-single"]),
        ({"topk": "wide"}, ["no-number"]),
    ],
)
def test_the_server_s_flags(
    tmp_path: Path, target: Path, flags: dict[str, Any], said: list[str]
) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    engine = EngineAsked(name="sglang", version="0.5.23", engine_class="llama", flags=flags)
    report = examine(drafter, target, engine=engine)
    assert names(report) == [f"flag-{name}" for name in said]


# -- data and runs to come -----------------------------------------------------------------------


def write_shards(folder: Path, slots: int = 4, width: int = H, dtype: Any = torch.float32) -> Path:
    for index in range(3):
        shard = folder / "rows_0-2000"
        shard.mkdir(parents=True, exist_ok=True)
        sample = {
            "input_ids": torch.arange(9),
            "loss_mask": torch.ones(9, dtype=torch.int64),
            "hidden_states": [torch.zeros(9, width, dtype=dtype) for _ in range(slots)],
        }
        torch.save(sample, shard / f"data_{index}.pt")
    return folder


def test_a_dump_without_the_target_s_end_makes_another_teacher(
    tmp_path: Path, target: Path
) -> None:
    data = write_shards(tmp_path / "data")
    report = examine(None, target, data, trainer="speculators", states=[0, 2, 3, 4])
    found = finding(report, "teacher-is-not-the-end")
    assert found.severity == "error"
    assert f"state 4, not the target's end (state {N})" in found.what
    assert names(examine(None, target, data, trainer="speculators", states=[0, 2, 3, N])) == []


def test_capture_json_says_the_states(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "data")
    (data / "capture.json").write_text(json.dumps({"states": [0, 2, 3, 4], "num_layers": N}))
    assert names(examine(None, None, data)) == ["teacher-is-not-the-end"]
    assert names(examine(None, None, data, states=[0, 2, 3, N])) == [
        "data-states-disagree",
        "teacher-is-not-the-end",
    ]


@pytest.mark.parametrize(
    ("make", "states", "name"),
    [
        (lambda p: write_shards(p, slots=3), [0, 2, 3, N], "data-states-count"),
        (lambda p: write_shards(p, width=2 * H), None, "data-width"),
        (lambda p: write_shards(p, dtype=torch.float16), None, "data-half-precision"),
        (lambda p: write_shards(p, slots=6), None, "data-slots-do-not-fit"),
    ],
)
def test_data_that_does_not_fit(
    tmp_path: Path, target: Path, make: Callable[[Path], Path], states: Any, name: str
) -> None:
    drafter = flat_drafter(tmp_path / "drafter")
    assert name in names(examine(drafter, target, make(tmp_path / "data"), states=states))


def test_the_data_s_states_against_the_engine(tmp_path: Path, target: Path) -> None:
    data = write_shards(tmp_path / "data")
    drafter = flat_drafter(tmp_path / "drafter")
    report = examine(drafter, target, data, engine=SGLANG, states=[0, 2, 3, N])
    assert names(report) == ["ids-mean-other-states"]
    assert names(examine(drafter, target, data, engine=SGLANG, states=[2, 3, 4, N])) == []


def test_other_layouts_by_their_names(tmp_path: Path, target: Path) -> None:
    dump = tmp_path / "specforge" / "rows_0-2000"
    dump.mkdir(parents=True)
    sample = {
        "input_ids": torch.arange(9),
        "loss_mask": torch.ones(9),
        "aux_hidden_state": torch.zeros(1, 9, 3 * H),
        "hidden_state": torch.zeros(1, 9, H),
    }
    torch.save(sample, dump / "data_0.ckpt")
    report = examine(None, target, tmp_path / "specforge", trainer="specforge", states=[2, 3, 4])
    assert names(report) == []
    assert "specforge, 1 files, 4 slots" in report.subject["data"]
    assert names(examine(None, target, tmp_path / "specforge", trainer="speculators")) == [
        "data-layout-not-read"
    ]
    hidden = np.zeros((9, 4, H), np.float32)
    write_safetensors(tmp_path / "spec" / "hs_0.safetensors", {"hidden_states": hidden})
    report = examine(None, target, tmp_path / "spec", trainer="speculators", states=[2, 3, 4, N])
    assert names(report) == []
    assert "speculators, 1 files, 4 slots" in report.subject["data"]


def test_damaged_and_hostile_files_are_named_and_not_run(tmp_path: Path, target: Path) -> None:
    data = write_shards(tmp_path / "data")
    files = sorted(data.rglob("*.pt"))
    files[1].write_bytes(files[1].read_bytes()[:700])
    ran = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    torch.save({"input_ids": Hostile()}, files[2])
    report = examine(None, target, data)
    damaged = [f for f in report.findings if f.name == "data-damaged"]
    assert [f.where for f in damaged] == [str(files[1]), str(files[2])]
    assert "cut off" in damaged[0].what
    assert "it asks for" in damaged[1].what
    assert not ran.exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_the_number_type_of_a_dump_is_read_from_its_outline(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = write_shards(tmp_path / "data", dtype=dtype)
    slots = slots_of(sorted(folder.rglob("*.pt"))[0])[1]
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float8_e4m3fn": "F8_E4M3"}
    assert {(slot.dtype, slot.width) for slot in slots} == {(names[str(dtype)], H)}
    assert [slot.teacher for slot in slots] == [False, False, False, True]


def test_what_of_a_dump_was_not_opened_is_said(tmp_path: Path) -> None:
    data = write_shards(tmp_path / "data")
    states = [0, 2, 3, N]
    all_three = examine(None, None, data, states=states)
    assert not any("were opened" in left for left in all_three.not_examined)
    shard = data / "rows_0-2000"
    shutil.copy(shard / "data_0.pt", shard / "data_3.pt")
    some = examine(None, None, data, states=states)
    (left,) = [left for left in some.not_examined if "were opened" in left]
    assert "1 of its 4 files" in left


def test_a_dump_s_files_are_those_that_a_job_would_read(tmp_path: Path) -> None:
    elsewhere = write_shards(tmp_path / "elsewhere")
    data = write_shards(tmp_path / "data")
    (data / "rows_2000-4000").symlink_to(elsewhere / "rows_0-2000")
    assert "6 files" in str(examine(None, None, data, states=[0, 2, 3, N]).subject)
    (data / "rows_4000-6000").symlink_to("gone")
    report = examine(None, None, data, states=[0, 2, 3, N])
    assert any("leads nowhere" in found.what for found in report.findings)


def test_a_run_to_come(tmp_path: Path, target: Path) -> None:
    data = write_shards(tmp_path / "data")
    report = examine(None, target, data, trainer="speculators", engine=SGLANG, states=[0, 2, 3, N])
    assert "trainer-default-not-served" in names(report)
    assert "--no-norm-before-residual" in finding(report, "trainer-default-not-served").fix[0]
    vllm = examine(None, target, data, trainer="speculators", engine=VLLM, states=[0, 2, 3, N])
    assert names(vllm) == []
    five = write_shards(tmp_path / "five", slots=5)
    assert "trainer-takes-three" in names(examine(None, target, five, trainer="specforge"))


def test_modelopt_s_double_norm_is_a_warning_where_it_is_named(
    tmp_path: Path, target: Path
) -> None:
    assert names(examine(None, target, trainer="modelopt")) == ["double-norm-in-training"]
    block = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "next_layer_regular": True}
    report = examine(flat_drafter(tmp_path / "drafter", eagle_config=block), target)
    assert names(report) == []
    assert names(report, "note") == ["double-norm-in-training"]


def test_a_draft_model_s_config_is_linted_before_it_is_trained(
    tmp_path: Path, target: Path
) -> None:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**flat_config(), "vocab_size": V + 8}))
    assert names(examine(None, target, trainer=str(path))) == ["other-target"]
    path.write_text(json.dumps(flat_config()))
    assert names(examine(None, target, trainer=str(path), engine=SGLANG)) == []
    nested = {**nested_config()}
    nested["transformer_layer_config"]["hidden_size"] = 2 * H
    path.write_text(json.dumps(nested))
    assert "widths-must-agree" in names(examine(None, target, trainer=str(path)))


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": EngineAsked(name="sglan")}, "did you mean sglang"),
        ({"engine": EngineAsked(name="sglang", engine_class="kimi_k25")}, "engine_version"),
        ({"trainer": "specforg"}, "did you mean specforge"),
    ],
)
def test_what_is_no_engine_or_trainer_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        examine(flat_drafter(tmp_path / "drafter"), **options)


def test_folders_that_are_not_there_are_refused(tmp_path: Path) -> None:
    for options in ({"drafter": tmp_path / "no"}, {"data": tmp_path / "no"}):
        with pytest.raises(BadInput, match="is no folder on this host"):
            examine(**options)


def test_nothing_imports_torch() -> None:
    program = (
        "import sys; import jobs.doctor, eagle3.doctor.report; "
        "print([m for m in ('torch', 'safetensors', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CLONE, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

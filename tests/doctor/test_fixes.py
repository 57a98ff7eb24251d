"""A fix that is followed to the letter leads to silence, and not to the next finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3.doctor.findings import Report
from eagle3.doctor.report import examine
from eagle3.doctor.subject import EngineAsked
from tests.doctor.files import (
    H,
    Tensors,
    flat_config,
    nested_config,
    nested_tensors,
    sound_tensors,
    write_drafter,
    write_target,
)
from tests.doctor.fixing import applied, states_asked

KEY = "eagle_aux_hidden_state_layer_ids"
KIMI, LLAMA = "kimi_k25", "llama"
# What a nested config brings in an engine that does not know the layout, whatever its ids are.
OF_LAYOUT = {"config-nested", "norm-before-residual-ignored"}


def asked(name: str, version: str | None, kind: str | None = LLAMA, **flags: Any) -> EngineAsked:
    return EngineAsked(name=name, version=version, engine_class=kind, flags=flags)


ENGINES = (
    asked("sglang", "0.5.12", KIMI),
    asked("sglang", "0.5.13", KIMI),
    asked("sglang", "0.5.23", KIMI),
    asked("sglang", "0.5.23", LLAMA),
    asked("sglang", "0.5.23", "gpt_oss"),
    asked("vllm", "0.20.0"),
    asked("vllm", "0.24.0"),
    asked("vllm", "0.33.0"),
    asked("vllm", "0.33.0", KIMI),
)


class Files:
    """A drafter whose config is written again and again beside the same weights."""

    def __init__(self, folder: Path, kind: str | None = LLAMA) -> None:
        self.folder = folder
        self.target = write_target(folder / "target", model_type=kind)
        self.written: Tensors | None = None

    def examine(
        self, config: dict[str, Any], tensors: Tensors, engine: EngineAsked, **more: Any
    ) -> Report:
        drafter = self.folder / "drafter"
        if self.written is not tensors:
            write_drafter(drafter, config, tensors)
            self.written = tensors
        (drafter / "config.json").write_text(json.dumps(config))
        return examine(drafter, self.target, engine=engine, **more)


def with_ids(layout: str, place: str, ids: list[int]) -> dict[str, Any]:
    """A sound config but for its ids."""
    config = flat_config() if layout == "flat" else nested_config()
    config.pop("eagle_config", None)
    config.pop(KEY, None)
    if place in ("top", "both"):
        config[KEY] = ids
    if place in ("eagle_config", "both"):
        config["eagle_config"] = {KEY: ids, "has_lm_head": True}
    return config


def tensors_of(layout: str, takes: int) -> Tensors:
    """Tensors whose fc takes so many states."""
    tensors = sound_tensors() if layout == "flat" else nested_tensors()
    rng = np.random.default_rng(0)
    tensors["fc.weight"] = (rng.standard_normal((H, takes * H)) * 0.1).astype(np.float32)
    return tensors


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{e.name}-{e.version}-{e.engine_class}")
@pytest.mark.parametrize("trainer", [None, "specforge", "speculators"])
def test_every_fix_of_ids_leads_to_silence(
    tmp_path: Path, layout: str, engine: EngineAsked, trainer: str | None
) -> None:
    files = Files(tmp_path, engine.engine_class)
    followed = 0
    for states in ([2, 3, 4], [1, 3, 5], [0, 3, 4], [2, 3, 4, 6]):
        if len(states) != 3 and engine.version == "0.20.0":
            continue  # that release takes three only
        tensors = tensors_of(layout, len(states))
        lists = [[k - 1 for k in states], states, states[::-1]]
        for place, ids in (
            *((place, ids) for place in ("top", "eagle_config") for ids in lists),
            ("both", lists[0]),
            ("nowhere", []),
        ):
            config = with_ids(layout, place, ids)
            before = files.examine(config, tensors, engine, states=states, trainer=trainer)
            seen: list[dict[str, Any]] = []  # several findings may ask for the same
            for finding in before.findings:
                if not finding.name.startswith("ids-") and finding.name != "fc-width":
                    continue
                if any("cannot be fed" in line for line in finding.fix):
                    assert applied(config, finding.fix) == config
                    continue
                assert states_asked(finding.fix)[0] == states, finding
                now = applied(config, finding.fix)
                followed += 1
                if now in seen:
                    continue
                seen.append(now)
                after = files.examine(now, tensors, engine, states=states, trainer=trainer)
                left = {f.name for f in after.findings}
                left -= OF_LAYOUT if layout == "nested" else set()
                left -= {"embedding-needs-a-patch"} if 0 in states else set()
                assert not left, (config, finding, after.findings)
    assert followed > 10


def test_ids_that_were_moved_to_the_engine_s_place_are_not_the_trainer_s(tmp_path: Path) -> None:
    files = Files(tmp_path)
    engine, tensors = asked("vllm", "0.33.0"), sound_tensors()
    found = files.examine(flat_config(), tensors, engine, trainer="specforge").findings
    assert [f.name for f in found] == ["ids-not-looked-up"]
    assert found[0].fix == (
        f'"{KEY}": [2, 3, 4]',
        f'remove "{KEY}" of eagle_config',
        "then: doctor … states=[2,3,4]",
    )
    moved = applied(flat_config(), found[0].fix)
    report = files.examine(moved, tensors, engine, trainer="specforge")
    assert report.findings == ()
    assert "what the ids [2,3,4] were trained as: give states=[…]" in report.not_examined
    assert not any("trained on" in fact for fact in report.facts)


def test_ids_in_a_place_that_trainer_and_engine_share_have_two_readings(tmp_path: Path) -> None:
    files = Files(tmp_path, KIMI)
    engine, tensors = asked("sglang", "0.5.13", KIMI), sound_tensors()
    config = with_ids("flat", "eagle_config", [2, 3, 5])
    report = files.examine(config, tensors, engine, trainer="specforge")
    (found,) = report.findings
    assert (found.name, found.severity) == ("ids-have-two-readings", "warning")
    assert "as specforge means [2,3,5], the drafter was trained on states 3, 4 and 6" in found.what
    assert "it feeds states 2, 3 and 5" in found.what
    assert states_asked(found.fix) == [[3, 4, 6], [2, 3, 5]]
    assert not any("trained on" in fact for fact in report.facts)
    # Either answer ends it: the ids are written anew, or they are right as they are.
    for states, now in (([3, 4, 6], applied(config, found.fix)), ([2, 3, 5], config)):
        after = files.examine(now, tensors, engine, trainer="specforge", states=states)
        assert after.findings == ()
    # Unless it is asked without states, when the new ids have two readings again.
    again = files.examine(applied(config, found.fix), tensors, engine, trainer="specforge")
    assert [f.name for f in again.findings] == ["ids-have-two-readings"]


def test_a_flattened_speculators_config_is_not_read_as_its_trainer_s(tmp_path: Path) -> None:
    files = Files(tmp_path)
    config = with_ids("flat", "eagle_config", [1, 2, 3])
    report = files.examine(
        config, sound_tensors(), asked("sglang", "0.5.23"), trainer="speculators"
    )
    assert report.findings == ()


def test_both_runners_are_given_the_same_ids(tmp_path: Path) -> None:
    files = Files(tmp_path)
    engine = asked("vllm", "0.24.0")
    config = with_ids("flat", "eagle_config", [1, 2, 3])
    report = files.examine(config, sound_tensors(), engine, states=[2, 3, 4])
    lines = {f.name: f.fix[0] for f in report.findings}
    assert lines == {
        "ids-mean-other-states": f'"{KEY}": [2, 3, 4]',
        "ids-not-looked-up-by-other-runner": f'"{KEY}": [2, 3, 4]',
    }


def test_a_setting_of_the_server_s_is_read_from_its_flags(tmp_path: Path) -> None:
    files = Files(tmp_path)
    states = [3, 4, 6]
    report = files.examine(
        flat_config(), sound_tensors(), asked("tensorrt_llm", "1.0"), states=states
    )
    (found,) = report.findings
    assert found.fix[-1] == (
        "then: doctor … engine_flags='{\"eagle3_layers_to_capture\": [2, 3, 5]}' states=[3,4,6]"
    )
    engine = asked("tensorrt_llm", "1.0", eagle3_layers_to_capture=[2, 3, 5])
    assert files.examine(flat_config(), sound_tensors(), engine, states=states).findings == ()
    engine = asked("tensorrt_llm", "1.0", eagle3_layers_to_capture="2,3,5")
    report = files.examine(flat_config(), sound_tensors(), engine, states=states)
    assert [f.name for f in report.findings] == ["ids-no-list"]


@pytest.mark.parametrize("ids", [[1, 2, 3], [2, 3, 4]])
def test_what_nobody_says_is_said_to_be_untold(tmp_path: Path, ids: list[int]) -> None:
    files = Files(tmp_path, KIMI)
    engine, config = asked("sglang", "0.5.13", KIMI), with_ids("flat", "eagle_config", ids)
    said = f"what the ids [{','.join(map(str, ids))}] were trained as: give trainer= or states=[…]"
    report = files.examine(config, sound_tensors(), engine)
    assert report.findings == ()
    assert said in report.not_examined
    told = files.examine(config, sound_tensors(), engine, states=[2, 3, 4])
    assert said not in told.not_examined


def test_no_ids_and_no_word_of_the_states_is_said_too(tmp_path: Path) -> None:
    files = Files(tmp_path)
    report = files.examine(
        with_ids("flat", "nowhere", []), sound_tensors(), asked("sglang", "0.5.23")
    )
    assert "which states the drafter was trained on: give states=[…]" in report.not_examined


@pytest.mark.parametrize(
    ("states", "name"), [([2, 3], True), ([2, 3, 4, 7], False), ([2] * 5, True)]
)
def test_states_are_counted_against_fc(tmp_path: Path, states: list[int], name: bool) -> None:
    report = Files(tmp_path).examine(
        flat_config(), sound_tensors(), asked("sglang", "0.5.23"), states=states
    )
    assert ("states-count" in [f.name for f in report.findings]) == name


def test_the_norm_output_trap_is_left_by_removing_the_key(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for more, fix in (
        ({"norm_output": True}, ('remove "norm_output" at the top level',)),
        ({"eagle_config": {KEY: [1, 2, 3], "return_hidden_post_norm": True}}, None),
        (
            {
                "norm_output": False,
                "eagle_config": {KEY: [1, 2, 3], "return_hidden_post_norm": True},
            },
            ('"norm_output": true',),
        ),
    ):
        config = {**flat_config(), **more}
        engine = asked("sglang", "0.5.23")
        before = files.examine(config, sound_tensors(), engine).findings
        found = next(f for f in before if f.name != "head-norm-off")
        assert fix is None or found.fix == fix
        after = files.examine(applied(config, found.fix), sound_tensors(), engine)
        assert after.findings == ()


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        (asked("sglang", "0.5.23"), {"norm_before_residual": False}),
        (asked("sglang", "0.5.23"), {"norm_before_residual": False, "norm_output": True}),
        (asked("sglang", "0.5.13", KIMI), {"norm_before_residual": False}),
        (asked("llama_cpp", None), {}),
    ],
)
def test_a_nested_config_is_printed_flat(
    tmp_path: Path, engine: EngineAsked, changes: dict[str, Any]
) -> None:
    files = Files(tmp_path, engine.engine_class)
    config: dict[str, Any] = {
        **nested_config(),
        **changes,
        "auto_map": {"": "speculators"},
        "torch_dtype": "bfloat16",
    }
    tensors = nested_tensors()
    before = files.examine(config, tensors, engine)
    (found,) = [f for f in before.findings if f.name == "config-nested"]
    flat = applied(config, found.fix)
    assert not [key for key in flat if key.startswith(("speculators_", "transformer_layer"))]
    assert flat["torch_dtype"] == "bfloat16"
    after = files.examine(flat, tensors, engine, states=states_asked(found.fix)[0])
    assert after.findings == ()


def test_a_nested_config_s_defaults_are_written_out(tmp_path: Path) -> None:
    config = {**nested_config(), "norm_before_residual": False}
    layer = config["transformer_layer_config"]
    for key in ("rms_norm_eps", "num_key_value_heads"):
        del layer[key]
    tensors = nested_tensors()
    for part in "kv":  # as many keys as heads, the default
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = np.concatenate([tensors[name]] * 2)
    files = Files(tmp_path)
    report = files.examine(config, tensors, asked("sglang", "0.5.23"))
    flat = applied(config, next(f for f in report.findings if f.name == "config-nested").fix)
    assert (flat["rms_norm_eps"], flat["num_key_value_heads"]) == (1e-6, 4)
    after = files.examine(flat, tensors, asked("sglang", "0.5.23"), states=[2, 3, 4])
    assert after.findings == ()


def test_a_draft_vocabulary_of_the_first_ids_is_a_note(tmp_path: Path) -> None:
    tensors = sound_tensors()
    tensors["d2t"][:] = 0
    tensors["t2d"] = np.arange(len(tensors["t2d"])) < len(tensors["d2t"])
    report = Files(tmp_path).examine(flat_config(), tensors, asked("sglang", "0.5.23"))
    assert [(f.name, f.severity) for f in report.findings] == [("d2t-zeros", "note")]


@pytest.mark.parametrize(
    "switch", [{"use_aux_norm": True}, {"fc_norm": False, "use_aux_norm": True}]
)
def test_the_first_names_of_the_chunks_norms(tmp_path: Path, switch: dict[str, Any]) -> None:
    norm = np.linspace(0.9, 1.2, H).astype(np.float32)
    old = {f"aux_norm_{which}.weight": norm for which in ("low", "mid", "high")}
    new = {f"fc_norm.{i}.weight": norm for i in range(3)}
    files = Files(tmp_path)
    for names in (old, new):
        config = {**flat_config(), **switch}
        report = files.examine(config, {**sound_tensors(), **names}, asked("sglang", "0.5.23"))
        assert report.findings == ()
        assert report.form is not None
        assert report.form["fc_norm"]["value"] is True
    report = files.examine(flat_config(), {**sound_tensors(), **old}, asked("sglang", "0.5.23"))
    assert [f.name for f in report.findings] == ["file-and-config-disagree"]


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_yarn_s_factor_is_written_as_the_old_release_reads_it(
    tmp_path: Path, spelling: str
) -> None:
    config = {
        **flat_config(),
        spelling: {
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    files, old = Files(tmp_path), asked("sglang", "0.5.9")
    (found,) = files.examine(config, sound_tensors(), old).findings
    assert found.fix[0] == f'"{spelling}": {{"attn_factor": 0.7063}}'
    now = applied(config, found.fix)
    assert files.examine(now, sound_tensors(), old).findings == ()
    # A release that reads mscale would multiply by both.
    report = files.examine(now, sound_tensors(), asked("sglang", "0.5.23"))
    assert [f.name for f in report.findings] == ["file-and-config-disagree"]


def test_a_drafter_of_another_kind_is_one_note(tmp_path: Path) -> None:
    config = {
        **flat_config(),
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "rope_interleave": True,
    }
    report = Files(tmp_path).examine(config, sound_tensors(), asked("sglang", "0.5.23"))
    assert [f.name for f in report.findings if f.name == "not-run-here"] == ["not-run-here"]
    assert "rope behind sglang: neighbouring numbers of a head turn in pairs" in report.facts


@pytest.mark.parametrize(
    ("flags", "near"), [({"num_stps": 3}, "num_steps=3"), ({"topkk": 9}, "topk=9")]
)
def test_a_flag_that_is_near_another_is_named(
    tmp_path: Path, flags: dict[str, Any], near: str
) -> None:
    engine = asked("sglang", "0.5.23", tp_size=8, **flags)
    report = Files(tmp_path).examine(flat_config(), sound_tensors(), engine)
    (found,) = report.findings
    assert (found.name, found.fix) == ("flag-unknown", (near,))
    assert "the flag tp_size: nothing is known of it here" in report.not_examined


def test_the_config_that_is_printed_is_json(tmp_path: Path) -> None:
    config = {**nested_config(), "norm_before_residual": False}
    report = Files(tmp_path).examine(config, nested_tensors(), asked("sglang", "0.5.23"))
    (found,) = [f for f in report.findings if f.name == "config-nested"]
    assert json.loads(found.fix[1])["eagle_config"] == {KEY: [1, 2, 3]}

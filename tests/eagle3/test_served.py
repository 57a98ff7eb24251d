"""The wiring that an engine runs, resolved from its tables and a drafter's config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from eagle3.checkpoints import examine
from eagle3.conventions import RULES
from eagle3.doctor.subject import Drafter, EngineAsked, read_drafter
from eagle3.errors import BadInput
from eagle3.form import DrafterForm
from eagle3.served import ServedWiring, served_wiring
from eagle3.serving import SERVING
from eagle3.wiring import (
    D2T,
    Biases,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    Parts,
    Residual,
    RopeChoice,
    Rotation,
    Window,
    Wiring,
)
from tests.doctor.files import (
    Tensors,
    flat_config,
    nested_config,
    nested_tensors,
    sound_tensors,
    write_drafter,
)
from tests.eagle3 import configs
from tests.eagle3.configs import WHERE, YARN, changed, form_of, sound, to_start

KEY = "eagle_aux_hidden_state_layer_ids"
KIMI = 61  # layers
# Of a target that is as wide as the drafter, and of another one.
FLAT, NESTED = ({**base, "target_hidden_size": 24} for base in (configs.FLAT, configs.NESTED))
WIDE = configs.FLAT


def asked(name: str, version: str | None, kind: str | None = "llama", **flags: Any) -> EngineAsked:
    return EngineAsked(name=name, version=version, engine_class=kind, flags=flags)


def form_with(config: dict[str, Any], *more: str) -> DrafterForm:
    """The form of a config whose file holds what it asks for, and `more`."""
    shapes = sound(config)
    if "embed_tokens.weight" in more:
        shapes["embed_tokens.weight"] = (50, 24)
    form, _ = examine(config, shapes, WHERE)
    assert form is not None
    return form


def served(
    config: dict[str, Any],
    engine: EngineAsked,
    *more: str,
    form: DrafterForm | None = None,
    **how: Any,
) -> ServedWiring:
    return served_wiring(form or form_with(config, *more), config, engine, num_layers=KIMI, **how)


def run(*args: Any, **how: Any) -> Wiring:
    wiring = served(*args, **how).wiring
    assert wiring is not None
    return wiring


def stopped(*args: Any, **how: Any) -> str:
    """Why an engine does not start."""
    resolved = served(*args, **how)
    assert resolved.wiring is None
    return resolved.problems[0]


def with_nested(ids: list[int], **more: Any) -> dict[str, Any]:
    return {**FLAT, **more, "eagle_config": {KEY: ids}}


OLD, NEW = asked("sglang", "0.5.12", "kimi_k25"), asked("sglang", "0.5.23", "kimi_k25")
VLLM = asked("vllm", "0.33.0")
TRT = asked("tensorrt_llm", None, None)


def test_the_story_of_ids_that_bring_the_neighbours() -> None:
    resolved = served(with_nested([2, 30, 58]), OLD)
    assert resolved.wiring == Wiring.of_states(
        (3, 31, 59),
        residual=Residual.raw,
        fc_input=FcInput.raw,
        head_input=HeadInput.normed,
        feedback=Feedback.raw,
    )
    assert (resolved.states, resolved.ids) == ((3, 31, 59), (2, 30, 58))
    assert resolved.place == f"eagle_config.{KEY}"
    assert resolved.engine == "SGLang 0.5.12, class kimi_k25"
    assert list(resolved.because) == ["states"]
    assert resolved.because["states"].endswith(
        "reads the ids [2,30,58] (eagle_config.eagle_aux_hidden_state_layer_ids) as states 3, 31 and 59 "
        "(read: models/deepseek_v2.py::set_eagle3_layers_to_capture and the layer loop)"
    )
    assert served(with_nested([2, 30, 58]), NEW).states == (2, 30, 58)


def test_given_ids_take_the_place_of_those_in_the_config() -> None:
    resolved = served(with_nested([2, 30, 58]), OLD, ids=[-1, 2, 30])
    assert (resolved.states, resolved.ids) == ((0, 3, 31), (-1, 2, 30))
    assert resolved.wiring is not None  # with the patch that the problem names
    assert "needs the embedding capture patch" in resolved.problems[0]
    assert served(FLAT, VLLM, ids=(30, 2, 58)).states == (2, 30, 58)  # ascending
    assert served(FLAT, TRT, ids=(2, 30, 58)).states == (3, 31, 59)


def test_ids_that_an_engine_does_not_look_at_leave_it_with_its_default() -> None:
    top = {**FLAT, KEY: [0, 3, 31]}
    resolved = served(top, OLD)
    assert (resolved.states, resolved.ids, resolved.place) == ((2, 30, 58), None, None)
    assert f"it does not look at [0,3,31] in {KEY}" in resolved.because["states"]
    # Nested ids: vLLM's old runner finds them, its new one does not.
    assert served(with_nested([3, 31, 59]), asked("vllm", "0.24.0")).states == (3, 31, 59)
    other = served(with_nested([3, 31, 59]), asked("vllm", "0.24.0")).notes
    assert any("feeds states 2, 30 and 58, its default" in note for note in other)
    assert served(with_nested([3, 31, 59]), VLLM).states == (2, 30, 58)
    # In speculators' layout vLLM takes the top level's ids alone.
    config = {
        **changed(NESTED, eagle_aux_hidden_state_layer_ids=None),
        "eagle_config": {KEY: [3, 31, 59]},
    }
    assert served(config, asked("vllm", "0.24.0")).states == (2, 30, 58)


def test_an_engine_whose_ids_are_a_setting_reads_its_flag() -> None:
    flags = asked("tensorrt_llm", None, None, eagle3_layers_to_capture=[-1 + 3, 30, 58])
    assert served(with_nested([7, 8, 9]), flags).states == (3, 31, 59)
    assert served(with_nested([7, 8, 9]), TRT).states == (2, 30, 58)
    bad = asked("tensorrt_llm", None, None, eagle3_layers_to_capture="2,30")
    assert "not a list of layer ids" in stopped(FLAT, bad)


def test_too_few_states_stop_the_engine() -> None:
    assert "fc takes 3 aux states" in stopped(FLAT, OLD, ids=[2, 30])
    assert [stop.switch for stop in served(FLAT, OLD, ids=[2, 30]).stops][-1] == "states"
    assert "state n behind the last layer" in served(FLAT, OLD, ids=[2, 30, 60]).problems[1]
    four = {**FLAT, "num_aux_hidden_states": 4, KEY: [2, 3, 4, 5]}
    assert run(four, VLLM).states() == (2, 3, 4, 5)
    assert "builds it for 3" in stopped(changed(four, num_aux_hidden_states=None), VLLM)


def test_what_an_engine_needs_to_be_told_is_asked_for() -> None:
    with pytest.raises(BadInput, match="engine_version=X"):
        served(FLAT, asked("sglang", None, "kimi_k25"))
    with pytest.raises(BadInput, match="engine_class=NAME"):
        served(FLAT, asked("sglang", "0.5.13", None))
    with pytest.raises(BadInput, match="did you mean 'sglang'"):
        served(FLAT, asked("sgland", None))
    with pytest.raises(BadInput, match="specforge trains drafters and serves none"):
        served(FLAT, asked("specforge", None, None))


def test_norm_before_residual_is_run_by_vllm_alone() -> None:
    flat = {**FLAT, "norm_before_residual": True}
    assert run(flat, OLD).residual is Residual.raw
    assert "has no norm_before_residual" in served(flat, OLD).because["residual"]
    assert run(flat, TRT).residual is Residual.raw
    assert run(flat, VLLM).residual is Residual.normed
    assert "residual" not in served(flat, VLLM).because
    assert run(NESTED, VLLM).residual is Residual.normed


def test_a_missing_norm_before_residual_is_true_for_vllm_in_speculators_layout() -> None:
    silent = changed(NESTED, norm_before_residual=None)
    assert run(silent, VLLM).residual is Residual.normed
    assert "does not state norm_before_residual" in served(silent, VLLM).because["residual"]
    assert run({**silent, "norm_before_residual": None}, VLLM).residual is Residual.raw
    assert run(FLAT, VLLM).residual is Residual.raw  # a flat config: false


@pytest.mark.parametrize(
    ("name", "engine", "value"),
    [
        ("norm_before_fc", asked("sglang", "0.5.16"), FcInput.raw),
        ("norm_before_fc", asked("sglang", "0.5.17"), FcInput.whole),
        ("norm_before_fc", asked("vllm", "0.18.0"), FcInput.whole),
        ("norm_before_fc", TRT, FcInput.raw),  # it looks in eagle_config alone
        ("fc_norm", asked("sglang", "0.5.11"), FcInput.raw),
        ("fc_norm", asked("sglang", "0.5.12"), FcInput.chunks),
        ("fc_norm", asked("vllm", "0.22.0"), FcInput.chunks),
    ],
)
def test_norms_in_front_of_fc_by_release(name: str, engine: EngineAsked, value: FcInput) -> None:
    config = {**FLAT, name: True}
    assert run(config, engine).fc_input is value
    assert ("fc_input" in served(config, engine).because) is (value is FcInput.raw)


def test_a_nested_norm_before_fc_is_found() -> None:
    config = {**FLAT, "eagle_config": {"norm_before_fc": True}}
    assert run(config, asked("sglang", "0.5.23")).fc_input is FcInput.whole
    assert run(config, TRT).fc_input is FcInput.whole


@pytest.mark.parametrize(
    ("config", "version", "switch"),
    [
        ({**FLAT, "fc_norm": True}, "0.21.0", "fc_input"),
        ({**FLAT, "norm_before_fc": True}, "0.17.1", "fc_input"),
        ({**FLAT, "attention_bias": True}, "0.15.0", "biases"),
        ({**FLAT, "model_type": "qwen3"}, "0.33.0", "qk_norm"),
        ({**FLAT, "bias": True}, "0.33.0", None),
    ],
)
def test_vllm_refuses_tensors_that_it_has_no_place_for(
    config: dict[str, Any], version: str, switch: str | None
) -> None:
    engine = asked("vllm", version)
    assert "has no place for" in stopped(config, engine)
    (stop,) = served(config, engine).stops
    assert stop.switch == switch
    assert bool(stop.left) is (switch is None)
    assert served(config, engine).states == (2, 30, 58)  # which is still said


def test_the_feedback_and_the_key_that_two_ecosystems_share() -> None:
    trap = {**FLAT, "norm_output": True}
    assert form_with(trap).feedback_normed.value is False
    assert run(trap, OLD).feedback is Feedback.normed
    assert (
        "SpecForge writes for the norm in front of the head"
        in served(trap, OLD).because["feedback"]
    )
    assert run(trap, asked("sglang", "0.5.11")).feedback is Feedback.raw
    both = {**trap, "eagle_config": {"return_hidden_post_norm": True}}
    assert "feedback" not in served(both, OLD).because
    assert run(both, asked("sglang", "0.5.11")).feedback is Feedback.raw
    assert run(changed(NESTED, norm_output=True), VLLM).feedback is Feedback.normed


def test_every_engine_norms_in_front_of_the_head() -> None:
    config = {**FLAT, "norm_output": False}
    for engine in (OLD, VLLM, TRT):
        assert run(config, engine).head_input is HeadInput.normed
        assert "head_input" in served(config, engine).because
        assert "head_input" not in served(FLAT, engine).because


def test_whose_embedding_is_read() -> None:
    own = "embed_tokens.weight"
    assert run(FLAT, OLD, own).embedding is Embedding.target
    assert "replaces the file's embedding" in served(FLAT, OLD, own).because["embedding"]
    assert run(FLAT, VLLM, own).embedding is Embedding.own
    assert run(WIDE, OLD, own).embedding is Embedding.own
    assert "embedding" not in served(FLAT, OLD).because
    # A table that is the target's anyway.
    assert run(FLAT, OLD, own, same_embedding=True).embedding is Embedding.own
    assert "embedding" not in served(FLAT, OLD, own, same_embedding=True).because
    absent = form_with(WIDE)
    assert absent.embedding.value == "target"
    assert "the table stays random" in stopped(WIDE, OLD, form=absent)


def headless(config: dict[str, Any]) -> DrafterForm:
    shapes = {k: v for k, v in sound(config).items() if k != "lm_head.weight"}
    form, _ = examine(config, {**shapes, "embed_tokens.weight": (50, 24)}, WHERE)
    assert form is not None
    return form


def test_whose_head_is_used() -> None:
    whole = {**FLAT, "draft_vocab_size": None}
    assert run(whole, OLD).head is Head.target
    assert "draft_vocab_size is null" in served(whole, OLD).because["head"]
    assert run({**FLAT, "draft_vocab_size": 50}, OLD).head is Head.own
    assert "leaves the head random" in stopped(FLAT, OLD, form=headless(FLAT))
    assert served(FLAT, OLD, form=headless(FLAT)).stops[0].switch == "head"
    assert "target tokens, not draft tokens" in stopped(FLAT, VLLM, form=headless(FLAT))
    assert run(whole, VLLM, form=headless(whole)).head is Head.target
    silent = changed(FLAT, draft_vocab_size=None)
    assert "draft_vocab_size" in stopped(silent, OLD)
    # What it runs once the line is written, with the file's own rows.
    resolved = served(silent, OLD, form=form_with(FLAT))
    assert to_start(resolved) == ('"draft_vocab_size": 30',)
    assert resolved.run == run(FLAT, OLD)
    bare = headless({**FLAT, "draft_vocab_size": 50})
    assert to_start(served(silent, OLD, form=bare)) == ('"draft_vocab_size": null',)


def test_a_null_width_stops_both_llama_classes() -> None:
    config = {**FLAT, "target_hidden_size": None}
    for engine in (OLD, VLLM):
        assert "target_hidden_size null" in stopped(config, engine)
    assert run({**NESTED, "target_hidden_size": None}, VLLM, form=form_with(NESTED)).states() == (
        2,
        4,
        6,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "drafter"


def drafter_of(folder: Path, config: dict[str, Any], tensors: Tensors) -> Drafter:
    write_drafter(folder, config, tensors)
    found, findings = read_drafter(folder)
    assert findings == []
    return found


def resolved_of(drafter: Drafter, engine: EngineAsked) -> ServedWiring:
    assert drafter.form is not None
    return served_wiring(drafter.form, drafter.config, engine, num_layers=7, drafter=drafter)


def test_the_table_of_draft_ids_is_offsets_or_is_not_there(folder: Path) -> None:
    tensors = sound_tensors()
    sound_one = resolved_of(drafter_of(folder, flat_config(), tensors), OLD).wiring
    assert sound_one is not None
    assert sound_one.d2t is D2T.offset
    lost = {name: value for name, value in tensors.items() if name != "d2t"}
    resolved = resolved_of(drafter_of(folder, flat_config(), lost), OLD)
    assert resolved.wiring is not None
    assert resolved.wiring.d2t is D2T.identity
    assert "the file has no d2t" in resolved.because["d2t"]


def test_releases_that_know_only_midlayer_leave_the_layer_random(folder: Path) -> None:
    drafter = drafter_of(folder, flat_config(), sound_tensors("layers.0."))
    resolved = resolved_of(drafter, asked("sglang", "0.5.11"))
    assert resolved.wiring is None
    assert "called layers.0.*" in resolved.problems[0]
    assert any("call the first layer's tensors midlayer.*" in line for line in to_start(resolved))
    assert resolved_of(drafter, OLD).wiring is not None
    same = drafter_of(folder, flat_config(), sound_tensors())
    assert resolved_of(same, asked("sglang", "0.5.11")).wiring is not None


def test_the_deeper_norm_is_looked_for_under_a_name(folder: Path) -> None:
    config = nested_config()
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    tensors = nested_tensors()
    first = {name: value for name, value in tensors.items() if name.startswith("layers.0.")}
    deeper = {
        name.replace("layers.0.", "layers.1."): value[:, : value.shape[1] // 2]
        if "self_attn" in name and "o_proj" not in name
        else value
        for name, value in first.items()
        if "hidden_norm" not in name
    }
    drafter = drafter_of(folder, config, {**tensors, **deeper})
    vllm = resolved_of(drafter, VLLM).wiring
    assert vllm is not None
    assert vllm.deeper_norm is Parts.declared
    resolved = resolved_of(drafter, OLD)
    assert resolved.wiring is not None
    assert resolved.wiring.deeper_norm is Parts.dropped
    assert "looks for layers.1.hidden_norm.weight" in resolved.because["deeper_norm"]
    renamed = {
        **tensors,
        **deeper,
        "layers.1.hidden_norm.weight": deeper["layers.1.input_layernorm.weight"],
    }
    again = resolved_of(drafter_of(folder, config, renamed), OLD).wiring
    assert again is not None
    assert again.deeper_norm is Parts.declared
    assert "has 2 layers" in " ".join(resolved_of(drafter, asked("sglang", "0.5.11")).problems)


def test_fc_is_not_applied_where_it_changes_no_width() -> None:
    config = changed(FLAT, target_hidden_size=8)  # 3 · 8 = 24
    assert "without fc" in stopped(config, OLD, "embed_tokens.weight")
    assert run(config, VLLM, "embed_tokens.weight").states() == (2, 30, 58)


def test_parts_that_an_engine_drops() -> None:
    biased = {**FLAT, "attention_bias": True}
    assert run(biased, OLD).biases is Biases.first_dropped
    assert run(biased, VLLM).biases is Biases.declared
    assert run(biased, TRT).biases is Biases.declared
    qwen = changed(NESTED, inner=True, model_type="qwen3")
    assert run(qwen, OLD).qk_norm is Parts.dropped
    assert run(qwen, VLLM).qk_norm is Parts.declared
    assert "has no place for" in stopped(qwen, asked("vllm", "0.23.0"))
    mlp = served({**FLAT, "mlp_bias": True}, OLD)
    assert mlp.wiring is not None
    assert any("no switch of a wiring stands for" in problem for problem in mlp.problems)


@pytest.mark.parametrize("base", [FLAT, NESTED], ids=["specforge", "speculators"])
def test_yarns_factor_is_unread_by_old_releases(base: dict[str, Any]) -> None:
    config = changed(base, inner=True, rope_scaling={"rope_type": "yarn", **YARN})
    old, new = asked("sglang", "0.5.15"), asked("sglang", "0.5.16")
    assert run(config, old).rope is RopeChoice.no_mscale
    assert (
        "scales yarn's cos and sin by 1.208, training by 1.000: it does not read mscale"
        in served(config, old).because["rope"]
    )
    assert run(config, new).rope is RopeChoice.declared
    assert run(config, VLLM).rope is RopeChoice.declared
    assert run(config, asked("vllm", "0.29.0")).rope is RopeChoice.no_mscale
    # A factor of the old spelling mends it for those releases alone.
    mended = changed(
        base, inner=True, rope_scaling={"rope_type": "yarn", **YARN, "attn_factor": 0.8278}
    )
    for engine in (old, asked("vllm", "0.29.0"), VLLM):
        assert run(mended, engine, form=form_with(config)).rope is RopeChoice.declared
    assert "rope" not in served(mended, new, form=form_with(config)).because
    assert any(
        "multiplies by attn_factor" in p
        for p in served(mended, new, form=form_with(config)).problems
    )
    # A factor that is stated outright is read by vLLM from 0.30 on, and by no SGLang.
    stated = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0}
    outright = changed(base, inner=True, rope_scaling=stated)
    assert run(outright, VLLM).rope is RopeChoice.declared
    assert run(outright, new).rope is RopeChoice.no_mscale
    assert "attention_factor" in served(outright, new).because["rope"]
    plain = {k: v for k, v in YARN.items() if not k.startswith("mscale")}
    assert run(
        changed(base, inner=True, rope_scaling={"rope_type": "yarn", **plain}), old
    ).rope is (RopeChoice.declared)


def test_a_window_is_a_flag_in_sglang() -> None:
    config = changed(NESTED, inner=True, layer_types=["sliding_attention"], sliding_window=32)
    assert run(config, OLD).window is Window.none
    assert "--speculative-draft-window-size alone" in served(config, OLD).because["window"]
    assert run(config, VLLM).window is Window.declared
    given = asked("sglang", "0.5.12", "kimi_k25", speculative_draft_window_size=32)
    assert run(config, given).window is Window.declared
    other = asked("sglang", "0.5.12", "kimi_k25", speculative_draft_window_size=16)
    assert any("told a window of 16" in problem for problem in served(config, other).problems)


def test_a_drafter_of_deepseeks_kind_turns_neighbouring_numbers() -> None:
    config = {**FLAT, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    wiring = run(config, OLD, form=form_with(FLAT))
    assert wiring.rotation is Rotation.interleaved
    assert "has no place for a drafter" in stopped(
        config, asked("sglang", "0.5.11"), form=form_with(FLAT)
    )
    assert run(FLAT, OLD).rotation is Rotation.half_split


def test_a_layout_that_an_engine_does_not_load_is_answered_for_a_flat_copy() -> None:
    resolved = served(NESTED, OLD, ids=[2, 30, 58])
    assert resolved.states == (3, 31, 59)
    assert resolved.wiring is not None
    assert resolved.wiring.residual is Residual.raw
    assert any("in speculators' layout" in problem for problem in resolved.problems)
    assert not any("in speculators' layout" in problem for problem in served(NESTED, VLLM).problems)


VERSIONS: dict[str, list[str | None]] = {
    "sglang": ["0.5.6", "0.5.11", "0.5.12", "0.5.13", "0.5.16", "0.5.17", "0.5.23", "0.7.0"],
    "vllm": ["0.11.2", "0.16.0", "0.18.0", "0.22.0", "0.24.0", "0.33.0"],
    "tensorrt_llm": [None],
    "llama_cpp": [None],
}
SWITCHED = ("norm_before_residual", "norm_before_fc", "norm_output", "attention_bias")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_not_as_declared_has_a_reason(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(VERSIONS)))
    version = data.draw(st.sampled_from(VERSIONS[name]))
    classes = sorted({row.classes[0] for row in RULES if row.ecosystem == name} - {"*"})
    kind = data.draw(st.sampled_from([*classes, "other"]))
    nested = data.draw(st.booleans())
    base = NESTED if nested else FLAT
    on = {key: data.draw(st.booleans()) for key in SWITCHED}
    bias = {"attention_bias": on.pop("attention_bias")}
    config = changed(base, **on)
    config = changed(config, inner=True, **bias) if nested else {**config, **bias}
    form = form_with(config, *data.draw(st.sampled_from([(), ("embed_tokens.weight",)])))
    try:
        resolved = served(config, asked(name, version, kind), form=form)
    except BadInput:
        event("the release does not capture of this class")
        return
    known = {row.source for row in RULES} | {row.source for row in SERVING}
    for why in resolved.because.values():
        assert any(source in why for source in known)
    run = resolved.run
    assert (resolved.wiring is None) is bool(resolved.stops)
    for stop in resolved.stops:
        assert stop.why in resolved.problems
        # States and switches are mended by their kind; all else says how, or what is left.
        assert (stop.switch is None) is (bool(stop.lines) or bool(stop.left))
    if resolved.wiring is not None:
        assert run == resolved.wiring
    if run is None:
        event("the release has no place for such a drafter")
        return
    declared = Wiring.of_states(
        run.states(),
        embedding=Embedding.own if form.embedding.value == "own" else Embedding.target,
    ).resolved(form)
    assert set(resolved.because) - {"states"} == set(run.differing(declared))
    assert ("states" in resolved.because) is (resolved.states is not None)
    assert run.states() == (resolved.states or ())
    assert list(run.states()) == sorted(run.states())
    assert run.resolved(form) == run


def test_a_whole_vocabulary_whose_table_vllm_does_not_read(folder: Path) -> None:
    config = {**flat_config(), "draft_vocab_size": 200}
    tensors = sound_tensors()
    rng = np.random.default_rng(5)
    order = rng.permutation(200)
    tensors |= {
        "lm_head.weight": rng.standard_normal((200, 16)).astype(np.float32),
        "d2t": order - np.arange(200),
        "t2d": np.ones(200, bool),
    }
    drafter = drafter_of(folder, config, tensors)
    vllm, sglang = resolved_of(drafter, VLLM).wiring, resolved_of(drafter, OLD).wiring
    assert vllm is not None
    assert sglang is not None
    assert (vllm.d2t, sglang.d2t) == (D2T.identity, D2T.offset)


def test_form_of_a_config_alone_is_enough() -> None:
    resolved = served(FLAT, OLD, form=form_of(FLAT))
    assert resolved.wiring is not None
    assert "whether the file has a head of its own was not examined" in resolved.notes


def test_what_an_engine_would_run_is_known_where_it_does_not_start(folder: Path) -> None:
    config = {**FLAT, "norm_before_residual": True, "norm_output": True}
    started = served(config, OLD, ids=[2, 30, 58])
    assert started.run == started.wiring
    assert started.run is not None
    # Ids that bring fewer states than fc takes.
    fewer = served(config, OLD, ids=[2, 30])
    assert (fewer.wiring, fewer.states) == (None, (3, 31))
    assert fewer.run == replace(started.run, layers=(3, 31))
    assert {"states", "residual", "feedback"} == set(fewer.because)
    # No ids at all: whoever scores it puts in states of his own.
    none = served({**config, "eagle_config": {KEY: "2,30"}}, OLD, form=form_with(config))
    assert (none.wiring, none.states) == (None, None)
    assert none.run == replace(started.run, layers=())
    assert {"residual", "feedback"} == set(none.because)
    # A layer that is not loaded.
    drafter = drafter_of(folder, flat_config(), sound_tensors("layers.0."))
    unloaded = resolved_of(drafter, asked("sglang", "0.5.11"))
    loaded = resolved_of(
        drafter_of(folder, flat_config(), sound_tensors()), asked("sglang", "0.5.11")
    )
    assert unloaded.wiring is None
    assert unloaded.run == loaded.wiring
    # A kind of drafter that the release does not know.
    mla = {**FLAT, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    unknown = served(mla, asked("sglang", "0.5.11"), form=form_with(FLAT))
    assert (unknown.run, unknown.wiring) == (None, None)
    assert unknown.states == (2, 30, 58)


def test_every_program_that_makes_an_engine_start_is_whole(folder: Path) -> None:
    drafter = drafter_of(folder, flat_config(), sound_tensors("layers.0."))
    said, program = to_start(resolved_of(drafter, asked("sglang", "0.5.11")))
    assert said == "rename the first layer's tensors to midlayer.*"
    compile(program, "this.py", "exec")
    assert program.count("os.replace(") == program.count("import torch\n") == 1

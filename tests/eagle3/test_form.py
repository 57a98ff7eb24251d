"""A checkpoint's form: every switch with its origin, in both layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from eagle3.checkpoints.agree import expected_shapes
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.model import Drafter
from tests.eagle3.configs import (
    BOTH,
    FLAT,
    LAYER,
    NESTED,
    YARN,
    changed,
    dropped,
    faults,
    form_of,
    sound,
)
from tests.eagle3.small import drafter_shape_of


def test_the_flat_layout_and_where_its_values_are_from() -> None:
    form = form_of(FLAT, {**sound(FLAT), "embed_tokens.weight": (50, 24)})
    plain = form.plain()
    assert plain["layout"] == {
        "value": "specforge",
        "origin": "a flat config.json and midlayer.* tensors",
    }
    assert plain["heads"] == {"value": 6, "origin": "config.json: num_attention_heads"}
    assert plain["num_aux"] == {"value": 3, "origin": "fc.weight"}
    assert plain["rope"]["value"] == {"theta": 500.0, "kind": "default"}
    assert plain["embedding"] == {"value": "own", "origin": "embed_tokens.weight"}
    assert plain["head_norm"] == {"value": True, "origin": "default of SpecForge"}
    assert plain["norm_before_residual"]["value"] is False
    assert plain["layer_convention"]["value"] is None
    assert json.loads(json.dumps(plain)) == plain
    assert len(form.lines()) == len(plain)


def test_the_nested_layout_and_where_its_values_are_from() -> None:
    plain = form_of(NESTED, sound(NESTED, "layers.0.")).plain()
    assert plain["layout"]["value"] == "speculators"
    assert plain["heads"]["origin"] == "config.json: transformer_layer_config.num_attention_heads"
    assert plain["num_aux"]["origin"] == "config.json: eagle_aux_hidden_state_layer_ids"
    assert plain["norm_before_residual"] == {
        "value": True,
        "origin": "config.json: norm_before_residual",
    }
    assert plain["layer_convention"] == {"value": "input", "origin": "speculators 0.9.0"}
    assert plain["target_name"]["value"] == "org/target"
    assert plain["embedding"]["value"] == "target"


@BOTH
def test_one_drafter_in_two_layouts_is_one_form(base: dict[str, Any]) -> None:
    config = changed(changed(base, norm_before_residual=True), inner=True, attention_bias=True)
    form = form_of(config)
    drafter = Drafter(drafter_shape_of(form))
    assert drafter.shape.norm_before_residual
    assert drafter.shape.attention_bias
    assert (drafter.shape.hidden, drafter.shape.vocab, drafter.shape.rope.theta) == (24, 50, 500.0)


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3"},
        {"target_hidden_size": 24, "fc_norm": True},
        {"norm_before_fc": True},
    ],
)
def test_the_tensors_a_form_expects_are_the_drafters(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    inner = {k: v for k, v in changes.items() if k in (*LAYER, "attention_bias", "mlp_bias")}
    outer = {key: value for key, value in changes.items() if key not in inner}
    if base is NESTED and inner.get("model_type") == "qwen3":
        inner.pop("mlp_bias", None)
    form = form_of(changed(changed(base, **outer), inner=True, **inner))
    state = Drafter(drafter_shape_of(form)).state_dict()
    got = {name: tuple(t.shape) for name, t in state.items() if name != "t2d"}
    assert got == expected_shapes(form)


@BOTH
def test_without_the_file_nothing_is_claimed_about_it(base: dict[str, Any]) -> None:
    form = form_of(base)
    assert form.embedding.value is form.head.value is None
    assert "not examined" in form.head.origin
    assert form.num_aux.value == 3


def test_layer_ids_are_found_in_both_places_and_must_agree() -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = form_of({**FLAT, "eagle_config": {key: [1, 3, 5]}})
    top = form_of({**FLAT, key: [1, 3, 5]})
    assert nested.layer_ids.value == top.layer_ids.value == (1, 3, 5)
    assert nested.layer_ids.origin == f"config.json: eagle_config.{key}"
    both = {**FLAT, key: [1, 3, 5], "eagle_config": {key: [2, 4, 6]}}
    assert f"{key}=[1, 3, 5], but eagle_config.{key}=[2, 4, 6]" in faults(both, None)


@pytest.mark.parametrize(
    ("version", "meaning"),
    [("0.9.0", "input"), ("0.5.0.1", "input"), ("0.4.2", "output"), ("main", None), (None, None)],
)
def test_what_speculators_ids_mean_depends_on_its_version(
    version: str | None, meaning: str | None
) -> None:
    form = form_of(changed(NESTED, speculators_version=version))
    assert form.layer_convention.value == meaning


@BOTH
def test_absent_keys_take_the_ecosystems_defaults_and_say_so(base: dict[str, Any]) -> None:
    config = changed(base, inner=True, rope_theta=None, rms_norm_eps=None, head_dim=None)
    if base is NESTED:
        config = changed(config, norm_before_residual=None, norm_output=None, draft_vocab_size=None)
        config = changed(config, inner=True, vocab_size=40_000)
    form = form_of(config)
    assert form.rope.value == Rope(theta=10_000.0)
    assert (form.norm_eps.value, form.norm_eps.origin) == (1e-6, "default of LlamaConfig")
    assert form.head_dim.value == 4
    assert form.norm_before_residual.value is False
    if base is NESTED:
        assert form.draft_vocab.value == 32_000
        assert "its trainer's is true" in form.norm_before_residual.origin


def test_a_silent_decoder_layer_block_is_its_classs_own_defaults() -> None:
    form = form_of(changed(NESTED, transformer_layer_config={}, draft_vocab_size=32_000))
    assert form.qk_norm.value is True  # the class is Qwen3Config
    assert (form.hidden.value, form.head_dim.value, form.vocab.value) == (4096, 128, 151_936)
    assert form.hidden.origin == "default of Qwen3Config"


@pytest.mark.parametrize(
    ("layer", "windows"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 5}, (5,)),
        ({"layer_types": ["full_attention"], "sliding_window": 5}, (None,)),
        ({"sliding_window": 5, "use_sliding_window": True}, (None,)),  # Llama needs layer_types
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, (None,)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            (5,),
        ),
    ],
)
def test_sliding_windows(layer: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    form = form_of(changed(NESTED, inner=True, **layer))
    assert form.windows.value == windows


def test_the_nested_block_as_modelopt_writes_it() -> None:
    block = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "return_hidden_post_norm": True,
    }
    config = {**FLAT, "eagle_config": block, "bos_token_id": 1, "torch_dtype": "bfloat16"}
    shapes = dropped(sound(FLAT, "layers.0."), "t2d")
    assert form_of(config, shapes).feedback_normed.value is True


def test_norm_output_means_different_things() -> None:
    flat = form_of({**FLAT, "norm_output": False})
    nested = form_of({**NESTED, "norm_output": True})
    assert (flat.head_norm.value, flat.feedback_normed.value) == (False, False)
    assert (nested.head_norm.value, nested.feedback_normed.value) == (True, True)


def test_the_layout_is_found_by_looking_or_as_asked() -> None:
    assert form_of(FLAT, layout="specforge").layout.origin == "asked for"
    with pytest.raises(BadInput, match="no checkpoint layout named 'x'; there are specforge, spec"):
        form_of(FLAT, layout="x")
    target = {"architectures": ["LlamaForCausalLM"], "hidden_size": 24}
    with pytest.raises(
        BadInput, match=r"config\.json looks like no layout that is known; known are"
    ):
        form_of(target, {"model.layers.0.input_layernorm.weight": (24,)})


@BOTH
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN}},
        {
            "rope_scaling": {"rope_type": "yarn", "attention_factor": None, **YARN},
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 500, **YARN},
        },
    ],
)
def test_one_rotary_embedding_in_every_spelling(
    base: dict[str, Any], spelling: dict[str, Any]
) -> None:
    rope = form_of(changed(base, inner=True, **spelling)).rope.value
    assert rope == Rope(theta=500.0, kind="yarn", scaling=tuple(sorted(YARN.items())))


def test_no_torch_is_imported() -> None:
    code = "import sys; import eagle3.form, eagle3.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

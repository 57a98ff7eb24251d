"""Every contradiction of a checkpoint's config with its file, or with itself, is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.eagle3.configs import BOTH, FLAT, NESTED, YARN, changed, faults, form_of, sound


@BOTH
def test_switches_that_the_file_contradicts_are_all_named(base: dict[str, Any]) -> None:
    shapes = sound(base) | {
        "input_norm.weight": (60,),
        "fc_norm.0.weight": (20,),
        "midlayer.self_attn.q_norm.weight": (8,),
        "midlayer.self_attn.q_proj.bias": (48,),
        "midlayer.mlp.up_proj.bias": (40,),
        "fc.bias": (24,),
        "layers.1.input_layernorm.weight": (24,),
        "layers.1.hidden_norm.weight": (24,),
        "lm_head.weight": (31, 24),
        "embed_tokens.weight": (51, 24),
        "t2d": (49,),
    }
    message = faults(base, shapes)
    for words in (
        "the file holds input_norm.weight, but norm_before_fc is false",
        "the file holds fc_norm.0.weight, but fc_norm is false",
        "the file holds midlayer.self_attn.q_norm.weight, but qk_norm is false",
        "the file holds midlayer.self_attn.q_proj.bias, but attention_bias is false",
        "the file holds midlayer.mlp.up_proj.bias, but mlp_bias is false",
        "the file holds fc.bias, but fc_bias is false",
        "the file holds layer 0, 1, but num_layers is 1",
        "layers.1.hidden_norm.weight, but only the first layer has a hidden_norm",
        "lm_head.weight is [31, 24], expected [30, 24] (draft_vocab: config.json: draft_vocab_size)",
        "embed_tokens.weight is [51, 24], expected [50, 24] (vocab: ",
        "t2d is [49], expected [50]",
    ):
        assert words in message


@BOTH
def test_switches_that_the_file_cannot_serve_are_all_named(base: dict[str, Any]) -> None:
    config = changed(base, norm_before_fc=True, fc_norm=True)
    config = changed(config, inner=True, attention_bias=True, num_hidden_layers=2, head_dim=6)
    message = faults(config, sound(base))
    for words in (
        "norm_before_fc is true (config.json: norm_before_fc), but the file has no such tensor",
        "fc_norm is true (config.json: fc_norm), but the file has no such tensor",
        "attention_bias is true",
        "the file holds layer 0, but num_layers is 2",
        "exclude each other",
        "midlayer.self_attn.q_proj.weight is [48, 48], expected [36, 48] (heads: ",
    ):
        assert words in message


@BOTH
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            "fc.weight is [24, 60], expected [24, 40]: 2 aux states (config.json: eagle_aux_",
        ),
        (
            {"target_hidden_size": 30},
            "fc.weight is [24, 60], expected [24, 90]: 3 aux states",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "num_aux_hidden_states": 4},
            "num_aux_hidden_states=4, but config.json: eagle_aux_hidden_state_layer_ids lists 3 ids",
        ),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "must be a list of whole numbers"),
        ({"draft_vocab_size": 60}, "draft_vocab is 60 (config.json: draft_vocab_size), more than"),
    ],
)
def test_sizes_that_the_file_contradicts_are_named(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    config = changed(base, **changes)
    if "target_hidden_size" in changes and base is FLAT:
        config["num_aux_hidden_states"] = 3
    assert words in faults(config, sound(base))


@BOTH
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"head_dim": 7}, "head_dim is 7, but a rotary embedding needs an even one"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 keys and values"),
        ({"hidden_size": "24"}, "hidden_size' must be a positive integer, not '24'"),
        ({"hidden_size": True}, "hidden_size' must be a positive integer, not True"),
        ({"attention_bias": 1}, "attention_bias' must be a switch, not 1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps' must be a positive number, not '1e-5'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; this version runs silu"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0, a switch that this version does not know"),
        ({"post_mlp_norm": True}, "post_mlp_norm=True, a switch that this version does not know"),
        ({"q_lora_rank": 16}, "multi-head latent attention (q_lora_rank)"),
        ({"rope_scaling": [1]}, "rope_scaling' must be an object or null, not [1]"),
    ],
)
def test_what_is_not_run_is_named(base: dict[str, Any], layer: dict[str, Any], words: str) -> None:
    assert words in faults(changed(base, inner=True, **layer), None)


@BOTH
def test_other_kinds_of_drafters_are_named(base: dict[str, Any]) -> None:
    shapes = sound(base)
    assert "P-EAGLE" in faults(base, shapes | {"mask_hidden": (1, 1, 60)})
    assert "P-EAGLE" in faults({**base, "mask_token_id": 3}, shapes)
    latent = {"midlayer.self_attn.kv_a_proj_with_mqa.weight": (8, 48)}
    assert "multi-head latent attention" in faults(base, shapes | latent)
    experts = {"midlayer.mlp.experts.0.up_proj.weight": (8, 24)}
    assert "mixture of experts" in faults(base, shapes | experts)
    assert "attention" in faults({**base, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, None)
    other = {**NESTED, "speculators_model_type": "dflash"}
    assert "is a speculator of type 'dflash'" in faults(other, None)
    mamba = changed(NESTED, inner=True, model_type="mamba")
    assert "drafters are of llama or qwen3 layers" in faults(mamba, None)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"use_mtp_layernorm": True}, "sets eagle_config.use_mtp_layernorm=True"),
        ({"use_aux_hidden_state": False}, "sets eagle_config.use_aux_hidden_state=False"),
        ({"parallel_draft_step": 4}, "sets eagle_config.parallel_draft_step=4"),
        ({"norm_output": True}, "sets eagle_config.norm_output=True"),
        ({"norm_before_fc": True}, "norm_before_fc is true (config.json: eagle_config.norm"),
        ({"something": "new"}, "sets eagle_config.something='new'"),
        ([1], "'eagle_config' must be an object, not [1]"),
    ],
)
def test_the_nested_block_of_a_flat_config(block: Any, words: str) -> None:
    assert words in faults({**FLAT, "eagle_config": block}, sound(FLAT))


def test_both_names_of_the_first_layer_at_once() -> None:
    shapes = sound(FLAT) | {"layers.0.hidden_norm.weight": (24,)}
    assert "midlayer.hidden_norm.weight and layers.0.hidden_norm.weight" in faults(FLAT, shapes)
    shapes = sound(FLAT, "layers.0.") | {"midlayer.hidden_norm.weight": (24,)}
    assert "layers.0.hidden_norm.weight and midlayer.hidden_norm.weight" in faults(FLAT, shapes)


LINEAR = {"rope_type": "linear", "factor": 32.0}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {
                **NESTED,
                "norm_before_residual": False,
                "eagle_config": {"norm_before_residual": True},
            },
            "sets eagle_config.norm_before_residual=True, which the speculators layout does not read "
            "there (it has norm_before_residual=False); take it out",
        ),
        (
            {**NESTED, "eagle_config": {"norm_before_residual": False}},
            "eagle_config.norm_before_residual=False, which",
        ),
        (
            {**NESTED, "eagle_config": {"return_hidden_post_norm": True}},
            "eagle_config.return_hidden_post_norm=True, which the speculators layout does not read "
            "there (it has no such switch)",
        ),
        ({**NESTED, "eagle_config": {"norm_before_fc": True}}, "eagle_config.norm_before_fc=True"),
        ({**NESTED, "return_hidden_post_norm": True}, "sets return_hidden_post_norm=True, which"),
        ({**FLAT, "return_hidden_post_norm": True}, "sets return_hidden_post_norm=True, which"),
        (
            changed(
                changed(NESTED, norm_before_residual=None), inner=True, norm_before_residual=True
            ),
            "transformer_layer_config.norm_before_residual=True, which the speculators layout does not "
            "read there (it has norm_before_residual); take it out",
        ),
        (
            changed(NESTED, inner=True, norm_output=True),
            "transformer_layer_config.norm_output=True, which",
        ),
        (changed(NESTED, inner=True, bias=True), "transformer_layer_config.bias=True, which"),
        ({**NESTED, "rope_scaling": {**LINEAR}}, "sets rope_scaling={'rope_type': 'linear'"),
        ({**NESTED, "rope_theta": 7.0}, "sets rope_theta=7.0, which"),
        ({**NESTED, "attention_bias": True}, "sets attention_bias=True, which"),
        ({**NESTED, "bias": True}, "sets bias=True, which"),
        ({**NESTED, "rms_norm_eps": 0.1}, "sets rms_norm_eps=0.1, which"),
        ({**NESTED, "sliding_window": 9}, "sets sliding_window=9, which"),
        (
            changed(NESTED, inner=True, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            "transformer_layer_config.eagle_aux_hidden_state_layer_ids=[1, 2, 3], which",
        ),
        (
            changed(NESTED, inner=True, model_type="qwen3", mlp_bias=True),
            "transformer_layer_config.mlp_bias=True, which",
        ),
        ({**FLAT, "is_neox_style": False}, "sets is_neox_style=False; this version runs True"),
        ({**FLAT, "hidden_activation": "gelu"}, "hidden_activation='gelu'; this version runs silu"),
        ({**FLAT, "layer_types": ["chunked_attention"]}, "layer_types has chunked_attention, not"),
        ({**FLAT, "layer_types": ["sliding_attention"]}, "asks for a sliding window"),
    ],
)
def test_a_switch_where_its_layout_does_not_look_is_named(
    config: dict[str, Any], words: str
) -> None:
    assert words in faults(config, sound(NESTED if "speculators_version" in config else FLAT))


@pytest.mark.parametrize(
    "config",
    [
        {**NESTED, "eagle_config": {"norm_before_residual": True, "norm_before_fc": False}},
        {**NESTED, "rope_theta": 500.0, "attention_bias": False, "rms_norm_eps": 1e-5},
        {**NESTED, "bias": False, "return_hidden_post_norm": None, "rope_scaling": {}},
        changed(NESTED, inner=True, norm_output=False, hidden_act="silu", mlp_bias=False),
        {**FLAT, "is_neox_style": True, "hidden_activation": "silu", "sliding_window": 4096},
        {**FLAT, "layer_types": ["full_attention"], "max_window_layers": 28},
        {**FLAT, "tie_word_embeddings": True},
    ],
)
def test_a_switch_that_is_off_or_says_what_is_read_elsewhere_is_none(
    config: dict[str, Any],
) -> None:
    assert form_of(config, sound(NESTED if "speculators_version" in config else FLAT))


@BOTH
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"layer_types": 5}, "layer_types' must be a list of names, not 5"),
        ({"layer_types": [1]}, "layer_types' must be a list of names, not [1]"),
        ({"layer_types": [None]}, "layer_types' must be a list of names, not [None]"),
        ({"layer_types": [["a"]]}, "layer_types' must be a list of names, not [['a']]"),
        ({"rope_scaling": {"type": ["x"], "factor": 2.0}}, "asks for '['x']' rope scaling"),
        ({"rope_scaling": {"type": "yarn", **YARN, "factor": "8"}}, "factor' must be a positive"),
        ({"rope_scaling": {"type": "yarn", **YARN, "mscale": "x"}}, "mscale' must be a positive"),
        ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1}, "yarn needs a base above 1"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "needs a high_freq_factor above its low_freq_factor",
        ),
        (
            {
                "rope_scaling": {"type": "yarn", **YARN},
                "original_max_position_embeddings": "x",
            },
            "original_max_position_embeddings' must be a positive number, not 'x'",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps' must be a positive number"),
        ({"head_dim": 1}, "head_dim is 1, but a rotary embedding needs an even one"),
    ],
)
def test_values_of_the_wrong_kind_are_named(
    base: dict[str, Any], layer: dict[str, Any], words: str
) -> None:
    assert words in faults(changed(base, inner=True, **layer), None)


def test_values_of_the_wrong_kind_in_speculators_block_are_named() -> None:
    words = "max_window_layers' must be a whole number, not 'x'"
    assert words in faults(changed(NESTED, inner=True, max_window_layers="x"), None)
    odd = changed(NESTED, speculators_version="²2.3")
    assert form_of(odd).layer_convention.value is None


@BOTH
@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        (
            {"rope_parameters": {"rope_theta": 7.0}},
            "rope_parameters.rope_theta=7.0, but config.json",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "says {'factor': 2.0, 'rope_type': 'linear'}",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type='linear' and",
        ),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor', which linear needs"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, "asks for 'longrope' rope scaling"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, "asks for 'mrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "means nothing in"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor' must be a positive number"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 0}}, "truncate' must be a switch"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta' must be a positive number, not -1"),
        (
            {
                "rope_scaling": {"type": "yarn", **YARN},
                "original_max_position_embeddings": 99,
            },
            "original_max_position_embeddings=99, but",
        ),
    ],
)
def test_rotary_embeddings_that_contradict_themselves(
    base: dict[str, Any], spelling: dict[str, Any], words: str
) -> None:
    assert words in faults(changed(base, inner=True, **spelling), None)


def test_a_yarn_that_specforge_computes_otherwise_than_engines_is_refused() -> None:
    scaling = {**YARN, "type": "yarn", "mscale": 0.5, "mscale_all_dim": 0.0}
    message = faults({**FLAT, "rope_scaling": scaling}, None)
    assert "scales by 1.1040 in SpecForge and by 1.2079 in transformers" in message
    stated = {**scaling, "attention_factor": 1.104}
    assert form_of({**FLAT, "rope_scaling": stated}).rope.value.kind == "yarn"
    assert form_of(changed(NESTED, inner=True, rope_scaling=scaling))

"""A checkpoint's form: every switch with its origin, and every contradiction named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoints.agree import expected_shapes
from eagle3.errors import BadInput
from eagle3.form import BadForm, DrafterForm, Rope, read_form
from eagle3.model import Drafter
from tests.eagle3.small import drafter_shape_of

WHERE = Path("folder/config.json")
FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 50,
    "draft_vocab_size": 30,
    "target_hidden_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
LAYER = {
    key: FLAT[key]
    for key in (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
    )
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {"verifier": {"name_or_path": "org/target"}},
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 30,
    "target_hidden_size": 20,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
BOTH = pytest.mark.parametrize("base", [FLAT, NESTED], ids=["specforge", "speculators"])


def changed(base: dict[str, Any], inner: bool = False, **changes: Any) -> dict[str, Any]:
    """A config with other values; None leaves a key out. `inner` meets the decoder layer's block."""
    if inner and "transformer_layer_config" in base:
        layer = changed(base["transformer_layer_config"], **changes)
        return {**base, "transformer_layer_config": layer}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def file_of(form: DrafterForm, prefix: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """The tensors of a file that fits a form."""
    names = {name.replace("midlayer.", prefix): s for name, s in expected_shapes(form).items()}
    return {**names, "t2d": (form.vocab.value,)}


def sound(config: dict[str, Any], prefix: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """The tensors of a file that fits a config."""
    return file_of(read_form(config, None, WHERE), prefix)


def faults(config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None) -> str:
    with pytest.raises(BadForm) as caught:
        read_form(config, shapes, WHERE)
    assert str(caught.value).startswith(f"{WHERE}: ")
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return str(caught.value)


def test_the_flat_layout_and_where_its_values_are_from() -> None:
    form = read_form(FLAT, {**sound(FLAT), "embed_tokens.weight": (50, 24)}, WHERE)
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
    plain = read_form(NESTED, sound(NESTED, "layers.0."), WHERE).plain()
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
    form = read_form(config, None, WHERE)
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
    form = read_form(changed(changed(base, **outer), inner=True, **inner), None, WHERE)
    state = Drafter(drafter_shape_of(form)).state_dict()
    got = {name: tuple(t.shape) for name, t in state.items() if name != "t2d"}
    assert got == expected_shapes(form)


@BOTH
def test_without_the_file_nothing_is_claimed_about_it(base: dict[str, Any]) -> None:
    form = read_form(base, None, WHERE)
    assert form.embedding.value is form.head.value is None
    assert "not examined" in form.head.origin
    assert form.num_aux.value == 3


def test_layer_ids_are_found_in_both_places_and_must_agree() -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = read_form({**FLAT, "eagle_config": {key: [1, 3, 5]}}, None, WHERE)
    top = read_form({**FLAT, key: [1, 3, 5]}, None, WHERE)
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
    form = read_form(changed(NESTED, speculators_version=version), None, WHERE)
    assert form.layer_convention.value == meaning


@BOTH
def test_absent_keys_take_the_ecosystems_defaults_and_say_so(base: dict[str, Any]) -> None:
    config = changed(base, inner=True, rope_theta=None, rms_norm_eps=None, head_dim=None)
    if base is NESTED:
        config = changed(config, norm_before_residual=None, norm_output=None, draft_vocab_size=None)
        config = changed(config, inner=True, vocab_size=40_000)
    form = read_form(config, None, WHERE)
    assert form.rope.value == Rope(theta=10_000.0)
    assert (form.norm_eps.value, form.norm_eps.origin) == (1e-6, "default of LlamaConfig")
    assert form.head_dim.value == 4
    assert form.norm_before_residual.value is False
    if base is NESTED:
        assert form.draft_vocab.value == 32_000
        assert "its trainer's is true" in form.norm_before_residual.origin


def test_a_silent_decoder_layer_block_is_its_classs_own_defaults() -> None:
    form = read_form(
        changed(NESTED, transformer_layer_config={}, draft_vocab_size=32_000), None, WHERE
    )
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
    form = read_form(changed(NESTED, inner=True, **layer), None, WHERE)
    assert form.windows.value == windows


def dropped(shapes: dict[str, tuple[int, ...]], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name not in names}


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
    assert read_form(config, shapes, WHERE).feedback_normed.value is True


def test_norm_output_means_different_things() -> None:
    flat = read_form({**FLAT, "norm_output": False}, None, WHERE)
    nested = read_form({**NESTED, "norm_output": True}, None, WHERE)
    assert (flat.head_norm.value, flat.feedback_normed.value) == (False, False)
    assert (nested.head_norm.value, nested.feedback_normed.value) == (True, True)


def test_both_names_of_the_first_layer_at_once() -> None:
    shapes = sound(FLAT) | {"layers.0.hidden_norm.weight": (24,)}
    assert "midlayer.hidden_norm.weight and layers.0.hidden_norm.weight" in faults(FLAT, shapes)


def test_the_layout_is_found_by_looking_or_as_asked() -> None:
    assert read_form(FLAT, None, WHERE, layout="specforge").layout.origin == "asked for"
    with pytest.raises(BadInput, match="no checkpoint layout named 'x'; there are specforge, spec"):
        read_form(FLAT, None, WHERE, layout="x")
    target = {"architectures": ["LlamaForCausalLM"], "hidden_size": 24}
    with pytest.raises(
        BadInput, match=r"config\.json looks like no layout that is known; known are"
    ):
        read_form(target, {"model.layers.0.input_layernorm.weight": (24,)}, WHERE)


YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}


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
    rope = read_form(changed(base, inner=True, **spelling), None, WHERE).rope.value
    assert rope == Rope(theta=500.0, kind="yarn", scaling=tuple(sorted(YARN.items())))


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
    assert read_form({**FLAT, "rope_scaling": stated}, None, WHERE).rope.value.kind == "yarn"
    assert read_form(changed(NESTED, inner=True, rope_scaling=scaling), None, WHERE)


def test_no_torch_is_imported() -> None:
    code = "import sys; import eagle3.form, eagle3.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Configs of both layouts, and files that fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoints.agree import expected_shapes
from eagle3.form import BadForm, DrafterForm, read_form

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
YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
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


def dropped(shapes: dict[str, tuple[int, ...]], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name not in names}

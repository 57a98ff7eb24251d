"""Configs of both layouts, and files that fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoints import examine
from eagle3.checkpoints.agree import expected_shapes
from eagle3.form import DrafterForm, Shapes
from eagle3.served import ServedWiring

WHERE = Path("folder/config.json")
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
DRAFT_VOCAB = 30
LAYER = {"model_type": "llama", **SIZES, "rope_theta": 500.0}
FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **LAYER,
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": 20,
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {"verifier": {"name_or_path": "org/target"}},
    "transformer_layer_config": LAYER,
    "draft_vocab_size": DRAFT_VOCAB,
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


def form_of(
    config: dict[str, Any], shapes: Shapes | None = None, layout: str | None = None
) -> DrafterForm:
    """The form of a sound checkpoint."""
    form, faults = examine(config, shapes, WHERE, layout=layout)
    assert form is not None
    assert faults == ()
    return form


def sound(config: dict[str, Any], prefix: str = "midlayer.") -> dict[str, tuple[int, ...]]:
    """The tensors of a file that fits a config."""
    form = form_of(config)
    names = {name.replace("midlayer.", prefix): s for name, s in expected_shapes(form).items()}
    return {**names, "t2d": (form.vocab.value,)}


def faults(config: dict[str, Any], shapes: Shapes | None) -> str:
    """What is wrong with a checkpoint."""
    _, found = examine(config, shapes, WHERE)
    assert found
    return "; ".join(found)


def dropped(shapes: dict[str, tuple[int, ...]], *names: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name not in names}


def to_start(resolved: ServedWiring) -> tuple[str, ...]:
    """The lines that mend what stops an engine."""
    return tuple(dict.fromkeys(line for stop in resolved.stops for line in stop.lines))

"""What is refused by name: run as an ordinary EAGLE-3 drafter, it would be plausibly wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from eagle3.checkpoints.reading import listed_names
from eagle3.form import Shapes

# Keys that each layout reads in places of its own; anywhere else they are faults (unread_switches).
READ_IN_PLACES = frozenset(
    {
        "attention_bias",
        "bias",
        "eagle_aux_hidden_state_layer_ids",
        "fc_norm",
        "layer_types",
        "mlp_bias",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "num_aux_hidden_states",
        "partial_rotary_factor",
        "return_hidden_post_norm",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "use_aux_norm",  # SGLang's first name for fc_norm
        "use_sliding_window",
    }
)
# Keys that do not touch the forward pass of an inference in float32, though their names look so.
HARMLESS = frozenset({"embed_requires_grad", "tie_word_embeddings"})
# Keys of which one value alone is the drafter that is run here.
SILU = ("silu", "swish")
ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "act_fn"), SILU),
    "is_causal": (True,),
    "is_neox_style": (True,),
}
# Names that say what a key does to the forward pass.
SUSPICIOUS = re.compile(
    r"norm|residual|rope|rotary|bias|multipl|softcap|logit|sink|clip|parallel|expert|lora|interleav"
    r"|bidirectional|qk_|attn_temperature|scale_|_scal|quantization|compression"
)
# ModelOpt's block: what layouts may read there, and what may stand there and be the drafter run here.
EAGLE_KNOWN = frozenset(
    {
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "return_hidden_post_norm",
        "has_lm_head",  # whether the file has one is seen in the file
    }
)
EAGLE_ALLOWED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
MLA_KEYS = ("q_lora_rank", "kv_lora_rank")
MLA_TENSORS = ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def other_kinds(config: Mapping[str, Any], shapes: Shapes | None) -> list[str]:
    """What a checkpoint is, where it is no EAGLE-3 drafter of the kind that is run here."""
    names = list(shapes or {})
    inner = as_block(config, "transformer_layer_config")
    architectures = " ".join(listed_names(config.get("architectures"))).lower()
    kind = config.get("speculators_model_type")
    faults = []
    if (
        "mask_hidden" in names
        or kind == "peagle"
        or "peagle" in architectures
        or any(config.get(key) is not None for key in ("mask_token_id", "pard_token"))
    ):
        faults.append(
            "is a P-EAGLE drafter (mask_hidden, a mask token), which this version does not run"
        )
    elif kind not in (None, "eagle3"):
        faults.append(f"is a speculator of type '{kind}', no EAGLE-3 drafter")
    latent = [n for n in names if any(part in n.split(".") for part in MLA_TENSORS)]
    latent += [key for block in (config, inner) for key in MLA_KEYS if block.get(key) is not None]
    latent += [name for name in architectures.split() if "deepseek" in name]
    if latent:
        faults.append(
            f"is a drafter with multi-head latent attention ({', '.join(latent[:3])}), which this "
            "version does not run"
        )
    if any(".experts." in name for name in names):
        faults.append("has a mixture of experts, which this version does not run")
    return faults


def unknown_switches(config: Mapping[str, Any]) -> list[str]:
    """Keys that change, or may change, the forward pass in a way that is not run here."""
    faults = []
    named = config.get("architectures")
    if named is not None and not isinstance(named, list):
        faults.append(f"has architectures={named!r}, which is no list of names")
    for prefix, block in blocks(config)[:-1]:
        faults += [
            f"sets {prefix}{key}={value!r}; this version runs {ONLY[key][0]}"
            for key, value in block.items()
            if key in ONLY and value is not None and value not in ONLY[key]
        ]
        faults += [
            f"sets {prefix}{key}={value!r}, a switch that this version does not know; it may change "
            "the forward pass, so the drafter is not run without it"
            for key, value in block.items()
            if SUSPICIOUS.search(key)
            and key not in READ_IN_PLACES
            and key not in HARMLESS
            and not neutral(value)
        ]
    for key, value in as_block(config, "eagle_config").items():
        allowed = value == EAGLE_ALLOWED[key] if key in EAGLE_ALLOWED else neutral(value)
        if key not in EAGLE_KNOWN and value is not None and not allowed:
            faults.append(
                f"sets eagle_config.{key}={value!r}, which this version does not run; scoring the "
                "drafter without it would give a wrong number"
            )
    return faults


def unread_switches(config: Mapping[str, Any], read: Collection[str], layout: str) -> list[str]:
    """Switches that stand where the layout's reader does not look: `read` are the keys it looked at.

    Somebody else may read them there, so they must say nothing, or what is read elsewhere.
    """
    places: dict[str, list[tuple[str, Any]]] = {}
    for prefix, block in blocks(config):
        for key in READ_IN_PLACES & block.keys():
            if prefix == "eagle_config." and key not in EAGLE_KNOWN and not neutral(block[key]):
                continue  # no layout knows it there, which is said already
            places.setdefault(key, []).append((f"{prefix}{key}", block[key]))
    faults = []
    for key, stated in sorted(places.items()):
        looked_at = {name for name in read if name.rpartition(".")[2] == key}
        elsewhere = [(name, v) for name, v in stated if name in looked_at and v is not None]
        for name, value in stated:
            says = bool(value) if not elsewhere else value is not None
            if name in read or not says or any(value == v for _, v in elsewhere):
                continue
            there = [f"{n}={v!r}" for n, v in elsewhere] or sorted(looked_at) or ["no such switch"]
            faults.append(
                f"sets {name}={value!r}, which the {layout} layout does not read there (it has "
                f"{', '.join(there)}); take it out, or state it where it is read"
            )
    return faults


def blocks(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The config and its nested blocks that hold switches, each with the prefix of its names."""
    nested = ("transformer_layer_config", "eagle_config")
    return [("", config), *((f"{key}.", as_block(config, key)) for key in nested)]


def as_block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object, empty where there is none."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def neutral(value: object) -> bool:
    """Whether a switch is off by its value: null, false, zero, a factor of one, empty."""
    if isinstance(value, list | dict | str):
        return not value
    return value is None or value is False or (type(value) in (int, float) and value in (0, 1))

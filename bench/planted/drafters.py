"""The lab's drafters as sound drafts, each in the flat layout and in speculators' nested one.

The flat layout is SpecForge's, EAGLE's and ModelOpt's. SpecForge itself trains one layer only; a
drafter of two is written there as ModelOpt exports one, `layers.1.*` beside the first layer. What
speculators calls norm_output is two keys there: engines look for `norm_output`, which to SpecForge means
the norm in front of the head, and ModelOpt and TensorRT-LLM for eagle_config.return_hidden_post_norm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from bench.planted.draft import FIRST, KEY, LAYER, SGLANG, SGLANG_KIMI, VLLM, Draft, Engine
from bench.planted.dumps import Dump
from bench.planted.lab import LAB, num_layers

LAYOUTS = ("specforge", "speculators")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One of the lab's drafters, the target beside which it is sound, and how it was trained."""

    name: str
    folder: str  # below lab/
    target: str  # one of lab.TARGETS
    states: tuple[int, ...]
    trained_accuracy: float  # step 0, of its training log


FIRST_DRAFTER = Lab(
    name="first", folder="drafter", target="whole", states=(0, 3, 31), trained_accuracy=0.77
)
SECOND_DRAFTER = Lab(
    name="second",
    folder="drafter_speculators",
    target="ends_at_59",
    states=(0, 3, 31),
    trained_accuracy=0.765,
)
THIRD_DRAFTER = Lab(
    name="third",
    folder="drafter_two_layers",
    target="whole",
    states=(2, 30, 58),
    trained_accuracy=0.73,
)
EARLY_DRAFTER = Lab(
    name="early",
    folder="drafter_early",
    target="whole",
    states=(2, 30, 58),
    trained_accuracy=0.35,
)
TUNING = (FIRST_DRAFTER, SECOND_DRAFTER)
HELD_OUT = (THIRD_DRAFTER,)
DRAFTERS = {lab.name: lab for lab in (*TUNING, *HELD_OUT, EARLY_DRAFTER)}


@lru_cache(maxsize=len(DRAFTERS))
def shipped(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's config and tensors, by SpecForge's names."""
    config = json.loads((folder / "config.json").read_text())
    raw = load_file(folder / "model.safetensors")
    return config, {own(name): tensor for name, tensor in raw.items()}


def own(name: str) -> str:
    """SpecForge's name of a tensor."""
    return FIRST + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def sound(
    lab: Lab, layout: str, dump: str, chosen: tuple[int, ...], *, argmax: bool = True
) -> Draft:
    """A sound draft without an engine, its ids stated as its layout states them."""
    config, held = shipped(LAB / lab.folder)
    config = json.loads(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in held.items()}
    nested = LAYER in config
    if layout == "specforge" and nested:
        config = flattened(config)
        del tensors["embed_tokens.weight"]  # a copy of the target's, which trainers drop
    elif layout == "speculators" and not nested:
        config = nested_config(config)
        tensors["embed_tokens.weight"] = target_embedding()
    last = num_layers(lab.target)
    slots = (*lab.states, last)
    draft = Draft(
        drafter=lab.name,
        layout=layout,
        config=config,
        tensors=tensors,
        states=lab.states,
        target=lab.target,
        dump=Dump(
            layout=dump,
            texts=lab.target,
            slots=slots,
            declared=slots,
            chosen=chosen,
            argmax=argmax,
        ),
        trained_accuracy=lab.trained_accuracy,
    )
    if layout == "speculators":
        draft.write_ids(lab.states, "top")  # inputs of layers, by its version
    else:
        draft.write_ids(None, "nested")  # nothing in a flat config says what its ids would mean
    return draft


def target_embedding() -> Tensor:
    """The lab target's token embedding as stored, [V, H]."""
    return load_file(LAB / "target" / "live.safetensors")["embed_tokens.weight"]


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """speculators' config as a flat one."""
    layer = config[LAYER]
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    flat: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: layer[key] for key in sizes},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": layer["hidden_size"],
        "rope_theta": layer["rope_parameters"]["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{key: True for key in SWITCHES if config[key]},
    }
    if config["norm_output"]:
        flat["eagle_config"] = {"return_hidden_post_norm": True}
    return flat


def nested_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config as speculators writes one."""
    like, _ = shipped(LAB / SECOND_DRAFTER.folder)
    nested: dict[str, Any] = json.loads(json.dumps(like))
    layer = nested[LAYER]
    layer.update({key: config[key] for key in layer if key in config})
    layer["rope_parameters"] = {"rope_theta": config["rope_theta"], "rope_type": "default"}
    nested.update({key: bool(config.get(key, False)) for key in SWITCHES})
    nested["draft_vocab_size"] = config["draft_vocab_size"]
    nested.pop(KEY, None)
    return nested


def fitting(draft: Draft) -> tuple[Engine, ...]:
    """Engines that serve a sound draft as it was trained."""
    if draft.flat and not draft.normed_residual and draft.num_layers == 1:
        return (SGLANG, SGLANG_KIMI, VLLM)
    return (VLLM,)

"""speculators' layout: a nested config.json, `layers.i.*`.

The decoder layer's block is written without the values that are its config class's own defaults, so
those defaults are part of the format. Source: speculators 0.9.0 `models/eagle3/{config,core}.py`,
transformers `LlamaConfig`, `Qwen3Config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle3.checkpoints.reading import Block, Reader
from eagle3.checkpoints.rotary import read_rope
from eagle3.form import DrafterForm, Setting, Shapes

NAME = "speculators"
LAYER = "transformer_layer_config"
OWN = "default of speculators"
# What the decoder layer's config class takes where its block is silent.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "default of LlamaConfig",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "qwen3": (
        "default of Qwen3Config",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 22_016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
        },
    ),
}
# Switches whose default is worth a line in a run's notes.
LOUD = ("rope", "norm_eps", "norm_before_residual", "feedback_normed", "draft_vocab")


def recognise(config: Mapping[str, Any], _shapes: Shapes | None) -> str | None:
    """The keys that only this ecosystem writes."""
    found = [
        key for key in ("speculators_model_type", "speculators_config", LAYER) if key in config
    ]
    return f"config.json has {', '.join(found)}" if found else None


def read(reader: Reader) -> DrafterForm | None:
    """The form of a nested checkpoint."""
    top, layer = reader.block(), reader.block(LAYER)
    kind = reader.setting("model_type", [layer], Setting("qwen3", OWN), "text")
    if kind.value not in CLASSES:
        reader.faults.append(
            f"{layer.name('model_type')}={kind.value!r}; speculators' drafters "
            f"are of {' or '.join(CLASSES)} layers"
        )
        return None
    origin, defaults = CLASSES[kind.value]

    def size(key: str, default: int = 0) -> Setting[int]:
        return reader.integer(key, [layer], Setting(defaults.get(key, default), origin))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    positions = size("max_position_embeddings")
    num_layers = reader.layers(
        "num_hidden_layers", [layer], Setting(defaults["num_hidden_layers"], origin)
    )
    norm_eps = reader.number("rms_norm_eps", [layer], Setting(1e-6, origin))
    draft_vocab = reader.integer("draft_vocab_size", [top], Setting(32_000, OWN))
    target_hidden = reader.integer(
        "target_hidden_size", [top], Setting(hidden.value, f"{OWN}: hidden_size")
    )
    for_ids = [top, reader.block("eagle_config")]
    ids = reader.layer_ids(for_ids)
    no_bias = Setting(False, origin)
    return DrafterForm(
        layout=reader.layout,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads.value),
        head_dim=size("head_dim", hidden.value // heads.value),
        intermediate=size("intermediate_size"),
        num_layers=num_layers,
        vocab=size("vocab_size"),
        draft_vocab=draft_vocab,
        target_hidden=target_hidden,
        num_aux=reader.num_aux(ids, for_ids, target_hidden.value, Setting(3, OWN)),
        windows=windows(reader, layer, kind.value, num_layers.value),
        norm_eps=norm_eps,
        rope=read_rope(reader, layer, positions.value, Setting(10_000.0, origin)),
        max_positions=positions,
        norm_before_residual=reader.switch(
            "norm_before_residual",
            [top],
            Setting(False, f"{OWN}' config class; its trainer's is true, and vLLM takes true here"),
        ),
        norm_before_fc=reader.switch("norm_before_fc", [top], Setting(False, OWN)),
        fc_norm=reader.switch("fc_norm", [top], Setting(False, OWN)),
        feedback_normed=reader.switch("norm_output", [top], Setting(False, OWN)),
        head_norm=Setting(True, f"{OWN}, which always norms"),
        attention_bias=reader.switch("attention_bias", [layer], no_bias),
        mlp_bias=(
            reader.switch("mlp_bias", [layer], no_bias)
            if kind.value == "llama"
            else Setting(False, "a Qwen3 layer has none")
        ),
        fc_bias=Setting(False, f"{OWN}, which has none"),
        qk_norm=Setting(kind.value == "qwen3", kind.origin),
        embedding=reader.owner("embed_tokens.weight"),
        head=reader.owner("lm_head.weight"),
        layer_ids=ids,
        layer_convention=convention(reader, ids),
        target_name=target_name(reader),
    )


def windows(
    reader: Reader, layer: Block, kind: str, num_layers: int
) -> Setting[tuple[int | None, ...]]:
    """The sliding window of each layer. The trainer's default gives every layer one."""
    width = layer.get("sliding_window")
    if width is None and "sliding_window" not in layer.values and kind == "qwen3":
        width = 4096
    stated = reader.setting("use_sliding_window", [layer], Setting(None, ""), "switch").value
    used = stated if stated is not None else kind != "qwen3"
    first = reader.setting("max_window_layers", [layer], Setting(28, OWN), "whole number").value
    types = reader.layer_types(layer)
    if types is None and kind == "qwen3" and used:
        types = ["full_attention"] * min(first, num_layers)
        types += ["sliding_attention"] * (num_layers - len(types))
    if types is None:
        return Setting((None,) * num_layers, f"no {layer.name('layer_types')}")
    origin = reader.origin(f"{layer.name('layer_types')}, sliding_window")
    if len(types) != num_layers:
        reader.faults.append(
            f"{layer.name('layer_types')} lists {len(types)} layers, but num_hidden_layers is "
            f"{num_layers}"
        )
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        reader.faults.append(f"{layer.name('layer_types')} has {', '.join(unknown)}, not run here")
    sliding = "sliding_attention" in types
    if sliding and width is not None and (type(width) is not int or width < 1):
        reader.faults.append(
            f"'{layer.name('sliding_window')}' must be a positive integer, not {width!r}"
        )
        width = None
    if sliding and stated is False and width is not None:
        reader.faults.append(
            f"{layer.name('layer_types')} has sliding layers, but use_sliding_window is false"
        )
    window = width if used else None
    return Setting(tuple(window if t == "sliding_attention" else None for t in types), origin)


def convention(reader: Reader, ids: Setting[tuple[int, ...] | None]) -> Setting[str | None]:
    """What the ids mean: the trainer passes them to vLLM since 0.5, and hooked outputs before."""
    version = reader.config.get("speculators_version")
    numbers = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(\.|$)", str(version or ""))
    if ids.value is None or numbers is None:
        return Setting(None, "no ids" if ids.value is None else "no speculators_version")
    old = (int(numbers[1]), int(numbers[2])) < (0, 5)
    return Setting("output" if old else "input", f"speculators {version}")


def target_name(reader: Reader) -> Setting[str | None]:
    """The verifier's name or folder."""
    block: Any = reader.config
    for key in ("speculators_config", "verifier", "name_or_path"):
        block = block.get(key) if isinstance(block, Mapping) else None
    name = "speculators_config.verifier.name_or_path"
    return Setting(block if isinstance(block, str) else None, reader.origin(name))

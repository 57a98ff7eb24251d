"""SpecForge's layout, and EAGLE's and ModelOpt's: a flat config.json, `midlayer.*` or `layers.0.*`.

Source: SpecForge 0.2.0 `modeling/draft/llama3_eagle.py`, SafeAILab/EAGLE `eagle/model/cnets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.checkpoints.reading import Block, Reader, listed_names
from eagle3.checkpoints.rotary import read_rope
from eagle3.form import DrafterForm, Rope, Setting, Shapes

NAME = "specforge"
NEVER = "default of SpecForge and EAGLE, which have no such switch"
LLAMA = "default of LlamaConfig"
# Switches whose default is worth a line in a run's notes.
LOUD = ("rope", "norm_eps", "draft_vocab", "num_layers")


def recognise(config: Mapping[str, Any], shapes: Shapes | None) -> str | None:
    """A flat config with an EAGLE-3 drafter's names."""
    if (
        any(key.startswith("speculators_") for key in config)
        or "transformer_layer_config" in config
    ):
        return None
    for prefix in ("midlayer.", "layers.0."):
        if any(name.startswith(prefix) for name in shapes or ()):
            return f"a flat config.json and {prefix}* tensors"
    if "draft_vocab_size" in config or "eagle3" in str(config.get("architectures")).lower():
        return "a flat config.json of an EAGLE-3 drafter"
    return None


def read(reader: Reader) -> DrafterForm | None:
    """The form of a flat checkpoint."""
    top, eagle = reader.block(), reader.block("eagle_config")
    both = [top, eagle]
    hidden = reader.required("hidden_size", [top])
    heads = reader.required("num_attention_heads", [top])
    intermediate = reader.required("intermediate_size", [top])
    vocab = reader.required("vocab_size", [top])
    if hidden is None or heads is None or intermediate is None or vocab is None:
        return None
    kv_heads = reader.integer("num_key_value_heads", [top], Setting(heads.value, LLAMA))
    head_dim = reader.integer("head_dim", [top], Setting(hidden.value // heads.value, LLAMA))
    num_layers = reader.layers("num_hidden_layers", [top], Setting(1, "default of EAGLE"))
    draft_vocab = reader.integer(
        "draft_vocab_size",
        [top],
        Setting(vocab.value, "default of engines: the target's vocabulary"),
    )
    target_hidden = reader.integer(
        "target_hidden_size", [top], Setting(hidden.value, "default of SpecForge: hidden_size")
    )
    norm_eps = reader.number("rms_norm_eps", [top], Setting(1e-6, LLAMA))
    positions = reader.integer("max_position_embeddings", [top], Setting(2048, LLAMA))
    ids = reader.layer_ids(both)
    rope = read_rope(
        reader,
        top,
        positions.value,
        Setting(10_000.0, "default of SpecForge, EAGLE and engines"),
    )
    check_yarn(reader, rope)
    check_attention(reader, top)
    head = reader.owner("lm_head.weight")
    if head.value == "target" and top.get("tie_word_embeddings"):
        reader.faults.append(
            "ties the head to the drafter's embedding (tie_word_embeddings), which no trainer does"
        )
    return DrafterForm(
        layout=reader.layout,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        num_layers=num_layers,
        vocab=vocab,
        draft_vocab=draft_vocab,
        target_hidden=target_hidden,
        num_aux=reader.num_aux(ids, both, target_hidden.value, Setting(3, "default of SpecForge")),
        windows=Setting((None,) * num_layers.value, NEVER),
        norm_eps=norm_eps,
        rope=rope,
        max_positions=positions,
        norm_before_residual=reader.switch("norm_before_residual", both, Setting(False, NEVER)),
        norm_before_fc=reader.switch("norm_before_fc", both, Setting(False, NEVER)),
        fc_norm=fc_norm(reader, both),
        feedback_normed=reader.switch("return_hidden_post_norm", [eagle], Setting(False, NEVER)),
        # The same key means the feedback in speculators and in engines.
        head_norm=reader.switch("norm_output", [top], Setting(True, "default of SpecForge")),
        attention_bias=reader.switch("attention_bias", [top], Setting(False, LLAMA)),
        mlp_bias=reader.switch("mlp_bias", [top], Setting(False, LLAMA)),
        fc_bias=reader.switch("bias", [top], Setting(False, NEVER)),
        qk_norm=qk_norm(reader),
        embedding=reader.owner("embed_tokens.weight"),
        head=head,
        layer_ids=ids,
        layer_convention=Setting(
            None, "SpecForge, ModelOpt and TorchSpec mean the output of a layer"
        ),
        target_name=Setting(None, "this layout does not state it"),
    )


def check_attention(reader: Reader, top: Block) -> None:
    """Every layer sees the whole text; a window's width alone, as other models have it, says nothing."""
    types = reader.layer_types(top) or []
    for key in ("sliding_window", "max_window_layers"):
        top.get(key)
    if top.get("use_sliding_window") or "sliding_attention" in types:
        reader.faults.append("asks for a sliding window, which SpecForge's drafters do not have")
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        reader.faults.append(f"layer_types has {', '.join(unknown)}, not run here")


def fc_norm(reader: Reader, blocks: Sequence[Block]) -> Setting[bool]:
    """A norm for each chunk, by its name or by the one that SGLang had for it first."""
    setting = reader.switch("fc_norm", blocks, Setting(False, "default of SpecForge"))
    legacy = reader.switch("use_aux_norm", blocks[:1], Setting(False, ""))
    return legacy if legacy.value and not setting.value else setting


def qk_norm(reader: Reader) -> Setting[bool]:
    """Qwen3 drafters have norms on q and k; nothing but the type says so."""
    kind = reader.config.get("model_type")
    names = [str(kind), *listed_names(reader.config.get("architectures"))]
    if any("qwen3" in name.lower() for name in names):
        return Setting(True, reader.origin("model_type, architectures"))
    return Setting(False, reader.origin("model_type") if kind else LLAMA)


def check_yarn(reader: Reader, rope: Setting[Rope]) -> None:
    """SpecForge scales cos and sin by its own formula; where transformers' differs, neither is taken."""
    scaling = dict(rope.value.scaling)
    if rope.value.kind != "yarn" or "attention_factor" in scaling or "factor" not in scaling:
        return
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale is None or all_dim is None or (mscale and all_dim) or (mscale == 1 and not all_dim):
        return

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    ours, theirs = grown(1), grown(mscale) / grown(all_dim)
    if ours != theirs:
        reader.faults.append(
            f"yarn with mscale={mscale}, mscale_all_dim={all_dim} scales by {theirs:.4f} in SpecForge "
            f"and by {ours:.4f} in transformers; write the one that is meant as attention_factor"
        )

"""Sound drafters in both layouts, of every kind that the trainers make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.doctor.subject import EngineAsked
from tests.faults.sound import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LONG,
    STATES,
    TEMPLATE,
    VOCAB,
    WIDE,
    WIDTH,
    Target,
)

LAYOUTS = ("specforge", "speculators")
SGLANG = EngineAsked(name="sglang", version="0.5.23", engine_class="llama")
VLLM = EngineAsked(name="vllm", version="0.33.0", engine_class="llama")
FITTING = {"specforge": SGLANG, "speculators": VLLM}


def draft_ids() -> Tensor:
    """The target ids of the draft vocabulary, ascending."""
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values


def layer_config() -> dict[str, Any]:
    """The decoder layer's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": LONG,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def flat_config() -> dict[str, Any]:
    """As SpecForge writes it; its ids are outputs of layers, so they mean STATES."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(),
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in STATES]},
    }


def nested_config() -> dict[str, Any]:
    """As speculators writes it; its ids are inputs of layers, so they are STATES."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(STATES),
        "speculators_config": {"verifier": {"name_or_path": "target"}},
    }


class Random:
    """Weights as training leaves them: small matrices, norms near one; in bf16 as they are saved."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=self.generator)).bfloat16()

    def norm(self, width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=self.generator)).bfloat16()


def block(random: Random, prefix: str, inputs: int, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    """The tensors of one decoder layer whose attention sees `inputs` numbers."""
    return {
        f"{prefix}input_layernorm.weight": random.norm(WIDTH),
        f"{prefix}self_attn.q_proj.weight": random.matrix(HEADS * head_dim, inputs),
        f"{prefix}self_attn.k_proj.weight": random.matrix(KV_HEADS * head_dim, inputs),
        f"{prefix}self_attn.v_proj.weight": random.matrix(KV_HEADS * head_dim, inputs),
        f"{prefix}self_attn.o_proj.weight": random.matrix(WIDTH, HEADS * head_dim),
        f"{prefix}post_attention_layernorm.weight": random.norm(WIDTH),
        f"{prefix}mlp.gate_proj.weight": random.matrix(WIDE, WIDTH),
        f"{prefix}mlp.up_proj.weight": random.matrix(WIDE, WIDTH),
        f"{prefix}mlp.down_proj.weight": random.matrix(WIDTH, WIDE),
    }


def drafter_tensors(layout: str, table: Tensor, *, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    """The tensors of a drafter of one layer; speculators keeps the target's embedding in the file."""
    random = Random()
    first = "midlayer." if layout == "specforge" else "layers.0."
    ids = draft_ids()
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    tensors = {
        "fc.weight": random.matrix(WIDTH, len(STATES) * WIDTH),
        f"{first}hidden_norm.weight": random.norm(WIDTH),
        **block(random, first, 2 * WIDTH, head_dim),
        "norm.weight": random.norm(WIDTH),
        "lm_head.weight": random.matrix(DRAFT_VOCAB, WIDTH),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": mask,
    }
    if layout == "speculators":
        tensors["embed_tokens.weight"] = table.bfloat16()
    return tensors


Config = dict[str, Any]
Tensors = dict[str, Tensor]


def layer_block(config: Config) -> Config:
    """Where a layout keeps the decoder layer's keys."""
    inner: Config = config.get("transformer_layer_config", config)
    return inner


def with_fc_norm(config: Config, tensors: Tensors) -> None:
    config["fc_norm"] = True
    random = Random(7)
    tensors |= {f"fc_norm.{i}.weight": random.norm(WIDTH) for i in range(len(STATES))}


def with_input_norm(config: Config, tensors: Tensors) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = Random(8).norm(len(STATES) * WIDTH)


def with_second_layer(config: Config, tensors: Tensors) -> None:
    layer_block(config)["num_hidden_layers"] = 2
    tensors |= block(Random(9), "layers.1.", WIDTH)


def with_biases(config: Config, tensors: Tensors) -> None:
    layer_block(config)["attention_bias"] = True
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".self_attn." in n]:
        bias = name.removesuffix("weight") + "bias"
        tensors[bias] = Random(10).matrix(len(tensors[name]))


def of_qwen3(config: Config, tensors: Tensors) -> None:
    layer_block(config)["model_type"] = "qwen3"
    if layer_block(config) is config:
        config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    for name in [n for n in tensors if n.endswith("q_proj.weight")]:
        for part in "qk":
            norm = name.replace("q_proj", f"{part}_norm")
            tensors[norm] = Random(11).norm(HEAD_DIM)


def with_wide_heads(config: Config, tensors: Tensors) -> None:
    layer_block(config)["head_dim"] = 2 * HEAD_DIM
    layout = "speculators" if "transformer_layer_config" in config else "specforge"
    wide = drafter_tensors(layout, torch.zeros(VOCAB, WIDTH), head_dim=2 * HEAD_DIM)
    tensors |= {name: wide[name] for name in tensors if ".self_attn." in name}


def renamed(config: Config, tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def for_vllm(config: Config, tensors: Tensors) -> None:
    """A flat config with its ids where vLLM looks, in vLLM's meaning."""
    if "eagle_config" in config:
        config["eagle_aux_hidden_state_layer_ids"] = list(STATES)
        del config["eagle_config"]


def of_whole_vocabulary(config: Config, tensors: Tensors) -> None:
    config["draft_vocab_size"] = VOCAB
    tensors["lm_head.weight"] = Random(13).matrix(VOCAB, WIDTH)
    del tensors["d2t"], tensors["t2d"]


def without_mask(config: Config, tensors: Tensors) -> None:
    """As ModelOpt writes it: no t2d, and the map in order of frequency."""
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(4))
    tensors["d2t"] = draft_ids()[order] - torch.arange(DRAFT_VOCAB)
    del tensors["t2d"]


def of_a_block(config: Config, tensors: Tensors) -> None:
    """Neighbouring ids, whose offsets are all the same round number."""
    tensors["d2t"] = torch.full((DRAFT_VOCAB,), 512)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][512 : 512 + DRAFT_VOCAB] = True


def with_frequencies(config: Config, tensors: Tensors) -> None:
    """The rotary table that old trainers keep in the file."""
    first = next(name for name in tensors if name.endswith("q_proj.weight"))
    table = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors[first.replace("q_proj.weight", "rotary_emb.inv_freq")] = table.bfloat16()


def with_untrained_norms(config: Config, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensors[name] = torch.ones_like(tensor)


Change = Callable[[Config, Tensors], None]
VARIANTS: dict[str, tuple[Change, ...]] = {
    "plain": (),
    "for vLLM": (for_vllm,),
    "fc_norm": (with_fc_norm,),
    "norm_before_fc": (with_input_norm,),
    "layers.0": (renamed,),
    "two layers": (with_second_layer, for_vllm),
    "attention_bias": (with_biases, for_vllm),
    "qwen3": (of_qwen3, for_vllm),
    "wide heads": (with_wide_heads,),
    "whole vocabulary": (of_whole_vocabulary,),
    "no t2d": (without_mask,),
    "block of ids": (of_a_block,),
    "rotary table": (with_frequencies,),
    "norms of one": (with_untrained_norms,),
}


def engine_of(layout: str, variant: str) -> EngineAsked:
    """An engine that serves this variant of a layout as it was trained."""
    return VLLM if for_vllm in VARIANTS[variant] else FITTING[layout]


def write_drafter(folder: Path, layout: str, target: Target, variant: str = "plain") -> Path:
    """A sound checkpoint folder."""
    config = flat_config() if layout == "specforge" else nested_config()
    tensors = drafter_tensors(layout, target.embedding)
    for change in VARIANTS[variant]:
        change(config, tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / TEMPLATE).write_bytes((target.folder / TEMPLATE).read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

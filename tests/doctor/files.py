"""Checkpoints written byte by byte, without torch: sound ones in both layouts, to be spoilt by tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

V, VD, H, N = 200, 64, 16, 7
HEADS, KV, DIM, WIDE = 4, 2, 4, 24
CHOSEN = np.sort(np.random.default_rng(1).permutation(V)[:VD])
TYPES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
Tensors = dict[str, np.ndarray]


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file of the format's own layout; uint16 arrays are the upper halves of float32: bf16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        dtype = "BF16" if values.dtype == np.uint16 else TYPES[str(values.dtype)]
        end = offset + values.nbytes
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = b"".join(np.ascontiguousarray(values).tobytes() for values in tensors.values())
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, cut off."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sound_tensors(first: str = "midlayer.") -> Tensors:
    """Tensors of a llama drafter of one layer; norms are near one, as trained ones are."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)

    mask = np.zeros(V, bool)
    mask[CHOSEN] = True
    return {
        "fc.weight": matrix(H, 3 * H),
        f"{first}hidden_norm.weight": norm(H),
        f"{first}input_layernorm.weight": norm(H),
        f"{first}self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * H),
        f"{first}self_attn.k_proj.weight": matrix(KV * DIM, 2 * H),
        f"{first}self_attn.v_proj.weight": matrix(KV * DIM, 2 * H),
        f"{first}self_attn.o_proj.weight": matrix(H, HEADS * DIM),
        f"{first}post_attention_layernorm.weight": norm(H),
        f"{first}mlp.gate_proj.weight": matrix(WIDE, H),
        f"{first}mlp.up_proj.weight": matrix(WIDE, H),
        f"{first}mlp.down_proj.weight": matrix(H, WIDE),
        "norm.weight": norm(H),
        "lm_head.weight": matrix(VD, H),
        "d2t": CHOSEN - np.arange(VD),
        "t2d": mask,
    }


def layer_config() -> dict[str, Any]:
    """The decoder layer's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "vocab_size": V,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def flat_config() -> dict[str, Any]:
    """SpecForge's config.json, with ids of its own convention: states 2, 3 and 4."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(),
        "draft_vocab_size": VD,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }


def nested_config() -> dict[str, Any]:
    """speculators' config.json, with ids as vLLM has them: states 2, 3 and 4."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "speculators_config": {"verifier": {"name_or_path": "target"}},
    }


def write_drafter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def flat_drafter(folder: Path, **changes: Any) -> Path:
    """A sound checkpoint in SpecForge's layout; `changes` go into its config."""
    return write_drafter(folder, {**flat_config(), **changes}, sound_tensors())


def nested_tensors() -> Tensors:
    """The tensors of a sound checkpoint in speculators' layout, which keeps the target's embedding."""
    return {**sound_tensors("layers.0."), "embed_tokens.weight": target_table()}


def nested_drafter(folder: Path, **changes: Any) -> Path:
    """A sound checkpoint in speculators' layout."""
    return write_drafter(folder, {**nested_config(), **changes}, nested_tensors())


def target_table() -> np.ndarray:
    """The target's embedding [V, H]."""
    return np.random.default_rng(2).standard_normal((V, H)).astype(np.float32)


def write_target(folder: Path, **changes: Any) -> Path:
    """A target of N layers: its config, embedding, final norm and head."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "num_hidden_layers": N,
        "vocab_size": V,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    write_safetensors(
        folder / "model.safetensors",
        {
            "model.embed_tokens.weight": target_table(),
            "model.norm.weight": np.ones(H, np.float32),
            "lm_head.weight": rng.standard_normal((V, H)).astype(np.float32),
        },
    )
    return folder


def write_sparse(
    path: Path, tensors: Mapping[str, np.ndarray | tuple[str, tuple[int, ...]]]
) -> None:
    """A file of any size: tensors given as (dtype, shape) take room in the header, not on the disk."""
    sizes = {"BF16": 2, "I64": 8, "BOOL": 1, "F32": 4}
    header: dict[str, Any] = {}
    offset = 0
    values = {}
    for name, held in tensors.items():
        if isinstance(held, tuple):
            dtype, shape = held
        else:
            dtype = "BF16" if held.dtype == np.uint16 else TYPES[str(held.dtype)]
            shape, values[name] = held.shape, held
        end = offset + int(np.prod(shape)) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        base = file.tell()
        for name, held in values.items():
            file.seek(base + header[name]["data_offsets"][0])
            file.write(np.ascontiguousarray(held).tobytes())
        file.truncate(base + offset)

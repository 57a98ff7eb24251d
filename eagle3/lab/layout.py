"""From the lab's shipped weights to an ordinary Hugging Face checkpoint of 61 layers, and back.

Only the trained layers are stored (`live.safetensors`, bf16). `lay_out` places them at their
positions and fills the others with zero weights: such a layer adds nothing to the residual stream.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.lab.corpus import END_TOKEN
from eagle3.lab.target import LiveTarget, TargetShape

LIVE_FILE = "live.safetensors"
SHAPE_FILE = "shape.json"
TOKENIZER_FILE = "tokenizer.json"


def save_live(model: LiveTarget, folder: Path) -> None:
    """Write the trained layers in bf16 and their shape."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, folder / LIVE_FILE)
    shape = {**model.shape.__dict__, "live_layers": list(model.shape.live_layers)}
    (folder / SHAPE_FILE).write_text(json.dumps(shape, indent=2) + "\n")


def load_live(folder: Path) -> LiveTarget:
    """The trained layers in float32."""
    try:
        raw = json.loads((folder / SHAPE_FILE).read_text())
        tensors = load_file(folder / LIVE_FILE)
    except FileNotFoundError as error:
        raise BadInput(
            f"{error.filename} is missing; the lab's weights are part of the repository (lab/target)"
        ) from error
    model = LiveTarget(TargetShape(**{**raw, "live_layers": tuple(raw["live_layers"])}))
    model.load_state_dict({k: v.float() for k, v in tensors.items()})
    return model.eval().requires_grad_(False)


def lay_out(folder: Path, out: Path) -> Path:
    """The full checkpoint of the lab folder at `out`, made once; concurrent callers agree."""
    if (out / "config.json").is_file():
        return out
    model = load_live(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
    try:
        save_file(full_tensors(model), temporary / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(folder / TOKENIZER_FILE, temporary / TOKENIZER_FILE)
        write_json(temporary / "tokenizer_config.json", tokenizer_config(model.shape))
        write_json(temporary / "generation_config.json", {"eos_token_id": model.shape.vocab - 1})
        write_json(temporary / "config.json", hf_config(model.shape))
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        if not (out / "config.json").is_file():  # else another process laid it out meanwhile
            raise BadInput(f"{out} cannot be written: {error}; make room there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A small JSON file inside the folder being built."""
    path.write_text(json.dumps(data, indent=2) + "\n")


def full_tensors(model: LiveTarget) -> dict[str, Tensor]:
    """All tensors of the full checkpoint under Hugging Face's names, bf16."""
    live = dict(zip(model.shape.live_layers, model.layers, strict=True))
    template = model.layers[0].state_dict()
    tensors = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for position in range(model.shape.num_layers):
        for name, value in template.items():
            if position in live:
                tensor = live[position].state_dict()[name]
            elif value.dim() == 1:
                tensor = torch.ones_like(value)  # a norm
            else:
                tensor = torch.zeros_like(value)
            tensors[f"model.layers.{position}.{name}"] = tensor
    return {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}


def hf_config(shape: TargetShape) -> dict[str, Any]:
    """config.json of the full checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": shape.vocab - 1,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(shape: TargetShape) -> dict[str, Any]:
    """tokenizer_config.json: a fast tokenizer with an end token and nothing added in front."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }

"""A small target, and checkpoints of small drafters that need no file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.form import DrafterForm, Setting
from eagle3.model import Drafter, DrafterShape
from eagle3.target import TargetParts, load_target_parts
from tests.eagle3.small import SHAPE, write_tensors


def target_of(folder: Path, hidden: int, vocab: int = SHAPE.vocab, **config: Any) -> TargetParts:
    folder.mkdir()
    base = {"model_type": "llama", "num_hidden_layers": 7, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    torch.manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(vocab, hidden),
    }
    write_tensors(folder / "model.safetensors", tensors)
    return load_target_parts(folder)


def form_of(shape: DrafterShape, *, own_embedding: bool = True) -> DrafterForm:
    """The form that a checkpoint of this shape would declare."""
    values: dict[str, Any] = {
        "layout": "specforge",
        "max_positions": None,
        "embedding": "own" if own_embedding else "target",
        "head": "own" if shape.own_head else "target",
        "layer_ids": None,
        "layer_convention": None,
        "target_name": None,
    }
    for field in fields(DrafterForm):
        if field.name not in values:
            values[field.name] = getattr(shape, field.name)
    values["windows"] = shape.windows or (None,) * shape.num_layers
    return DrafterForm(**{name: Setting(value, "a test") for name, value in values.items()})


def checkpoint_of(drafter: Drafter, embedding: Tensor | None = None) -> DrafterCheckpoint:
    return DrafterCheckpoint(
        drafter=drafter,
        form=form_of(drafter.shape, own_embedding=embedding is not None),
        own_t2d=True,
        embedding=embedding,
        fingerprint="",
        notes=(),
    )

"""Small random drafters and samples; every size is odd enough to show a mixed-up dimension."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.checkpoint import drafter_shape
from eagle3.form import DrafterForm, Rope
from eagle3.model import Drafter, DrafterShape

SHAPE = DrafterShape(
    hidden=24,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=40,
    vocab=50,
    draft_vocab=30,
    target_hidden=20,
    num_aux=3,
    norm_eps=1e-5,
    rope=Rope(theta=500.0),
)


def random_drafter(seed: int = 0, shape: DrafterShape = SHAPE) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(shape).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 2 else 1.0))
    chosen = torch.randperm(shape.vocab)[: shape.draft_vocab].sort().values
    drafter.d2t.copy_(chosen - torch.arange(shape.draft_vocab))
    drafter.t2d.zero_()
    drafter.t2d[chosen] = True
    return drafter


def drafter_shape_of(form: DrafterForm) -> DrafterShape:
    """The shape of a drafter whose file was not examined; its head is then taken to be its own."""
    return replace(drafter_shape(form), own_head=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})

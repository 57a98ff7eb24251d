"""What jobs share: finding the target's folder and the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import BadInput
from eagle3.lab.layout import lay_out
from jobs.events import Events


def target_folder(spec: Mapping[str, Any]) -> Path:
    """The target's checkpoint folder; the lab's is laid out at spec['made'] on first use."""
    path = Path(spec["path"])
    if spec["layout"] == "lab":
        return lay_out(path, Path(spec["made"]))
    if not (path / "config.json").is_file():
        raise BadInput(
            f"target {path} holds no config.json; target.path must be a checkpoint folder"
        )
    return path


def pick_device(wanted: str, events: Events) -> str:
    """'cpu' or 'cuda'; 'auto' says which it took, and cuda is never replaced in silence."""
    available = torch.cuda.is_available()
    if wanted == "auto":
        chosen = "cuda" if available else "cpu"
        events.note(f"job.device=auto: running on {chosen}")
        return chosen
    if wanted == "cuda" and not available:
        raise BadInput("job.device=cuda, but torch finds no CUDA device here; use job.device=cpu")
    return wanted

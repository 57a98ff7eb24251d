"""What jobs share: finding the target's folder and the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.data import read_capture
from eagle3.errors import BadInput
from eagle3.lab.layout import lay_out
from eagle3.target import TargetParts
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


def capture_missing_data(data: Mapping[str, Any], events: Events) -> None:
    """Capture the data first where the request says how and it is not there yet.

    In one job with what reads it, so that an answer needs nobody who waits for the capture.
    """
    request = data.get("capture")
    if request is None or read_capture(Path(data["path"])):
        return
    from jobs import capture_states

    (case,) = request["cases"]
    capture_states.open_job(request, events).run_case(case)
    if request["device"] != "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the target is gone; its memory goes back to the GPU's others


def check_captured(data: Path, target: TargetParts) -> None:
    """Data that says from which target it was captured must be from this one."""
    captured = read_capture(data)
    if captured and captured.get("target") not in (None, target.fingerprint):
        raise BadInput(
            f"{data} was captured from another target ({str(captured['target'])[:19]}…) than "
            f"{target.folder} ({target.fingerprint[:19]}…); capture it again"
        )


def pick_device(wanted: str, events: Events) -> str:
    """'cpu' or 'cuda'; 'auto' says which it took, and cuda is never replaced in silence."""
    available = torch.cuda.is_available()
    if wanted == "auto":
        chosen = "cuda" if available else "cpu"
        events.note(f"job.device=auto: running on {chosen}{'' if available else why_no_cuda()}")
        return chosen
    if wanted == "cuda" and not available:
        raise BadInput(
            f"job.device=cuda, but torch finds no CUDA device here{why_no_cuda()}; use job.device=cpu"
        )
    return wanted


def why_no_cuda() -> str:
    """', since …' where it is plain why torch finds no GPU, else nothing."""
    if not (torch.version.cuda or torch.version.hip):
        return f", since torch {torch.__version__} is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"

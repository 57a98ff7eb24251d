"""Reading captured samples in the layout of row-sharded `.pt` files.

    FOLDER/rows_0-2000/data_0.pt, data_1.pt, …   each a dict:
        input_ids      [T] int64          the text
        loss_mask      [T] 0 or 1         1 where the target wrote the token
        hidden_states  list of [T, H]     one entry a stored state, in the order of capture.json
        target_argmax  [T] int64          optional: the target's own choice behind each position
    FOLDER/capture.json                   optional: which canonical states the entries are

Files are loaded with weights only, so pickled code is refused, never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import load_pt, read_json

CAPTURE_FILE = "capture.json"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One text with its target states; everything has T positions."""

    path: Path
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    states: dict[int, Tensor]  # canonical k → [T, H] float32
    target_argmax: Tensor | None  # [T] int64

    def aux(self, states: Sequence[int]) -> Tensor:
        """The named canonical states side by side, [T, A·H]."""
        lacking = [k for k in states if k not in self.states]
        if lacking:
            raise BadInput(
                f"the wiring asks for state {', '.join(map(str, lacking))}, but the data stores only "
                f"{', '.join(map(str, self.states))} ({self.path}); capture the missing state or "
                "change wiring.layers"
            )
        return torch.cat([self.states[k] for k in states], -1)


def sample_files(folder: Path) -> list[Path]:
    """The sample files below a folder, in numeric order."""
    if not folder.is_dir():
        raise BadInput(f"data folder {folder} does not exist")
    files = sorted(folder.rglob("*.pt"), key=lambda p: natural_key(p.relative_to(folder)))
    if not files:
        raise BadInput(f"data folder {folder} holds no .pt files")
    return files


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts data_10 behind data_9."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def read_capture(folder: Path) -> dict[str, Any] | None:
    """What the capture job wrote beside its samples, or None."""
    path = folder / CAPTURE_FILE
    return read_json(path) if path.is_file() else None


def stored_states(folder: Path, declared: Sequence[int] | None) -> tuple[int, ...]:
    """Which canonical states a folder stores: from capture.json, from the config, or both, agreeing."""
    captured = read_capture(folder)
    listed = None if captured is None else captured.get("states")
    if captured is not None and not (
        isinstance(listed, list) and listed and all(type(k) is int for k in listed)
    ):
        raise BadInput(f"{folder / CAPTURE_FILE} does not list the stored states under 'states'")
    written = None if listed is None else tuple(listed)
    if written is None and declared is None:
        raise BadInput(
            f"{folder} has no {CAPTURE_FILE} and the config does not say which states are stored; "
            "set data.states to the canonical states in the files' order, such as [0,3,31,59]"
        )
    if written is not None and declared is not None and written != tuple(declared):
        raise BadInput(
            f"data.states says {list(declared)}, but {folder / CAPTURE_FILE} says "
            f"{list(written)}; correct the config"
        )
    return written if written is not None else tuple(declared or ())


def read_samples(
    files: Sequence[Path], states: Sequence[int], *, vocab: int, hidden: int, device: str = "cpu"
) -> Iterator[Sample]:
    """The samples one by one, checked against the target's vocabulary [V] and hidden size [H]."""
    for path in files:
        yield read_sample(path, states, vocab=vocab, hidden=hidden, device=device)


def read_sample(
    path: Path, states: Sequence[int], *, vocab: int, hidden: int, device: str = "cpu"
) -> Sample:
    """One sample; raises BadInput that names the file and what is wrong with it."""
    raw = load_plain(path)
    lacking = [key for key in ("input_ids", "loss_mask", "hidden_states") if key not in raw]
    if lacking:
        raise BadInput(f"{path} lacks {', '.join(lacking)}; it has {', '.join(map(str, raw))}")
    ids = flat(raw["input_ids"], path, "input_ids").long()
    mask = flat(raw["loss_mask"], path, "loss_mask")
    stored = raw["hidden_states"]
    if not isinstance(stored, list | tuple) or not all(isinstance(h, Tensor) for h in stored):
        raise BadInput(f"{path}: hidden_states is no list of tensors")
    if len(stored) != len(states):
        raise BadInput(
            f"{path} stores {len(stored)} states, but {len(states)} are declared ({list(states)}); "
            "set data.states to what the files hold"
        )
    length = len(ids)
    rows = [h.squeeze(0) if h.dim() == 3 else h for h in stored]
    if length < 3 or len(mask) != length or any(h.dim() != 2 or len(h) != length for h in rows):
        raise BadInput(
            f"{path}: lengths differ: input_ids {length}, loss_mask {len(mask)}, hidden_states "
            f"{[list(h.shape) for h in stored]}"
        )
    if any(h.shape[1] != hidden for h in rows):
        raise BadInput(
            f"{path}: the stored states are {sorted({h.shape[1] for h in rows})} wide, but the target's "
            f"hidden size is {hidden}; is this another model's data?"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise BadInput(
            f"{path}: input_ids reach from {int(ids.min())} to {int(ids.max())}, but the target's "
            f"vocabulary has {vocab} ids; is this another model's data?"
        )
    if not mask.bool().any():
        raise BadInput(f"{path}: loss_mask is empty, so no position can be scored")
    for k, h in zip(states, rows, strict=True):
        if not torch.isfinite(h).all():
            raise BadInput(f"{path}: stored state {k} holds NaN or infinity")
    argmax = raw.get("target_argmax")
    if argmax is not None:
        argmax = flat(argmax, path, "target_argmax").long()
        if len(argmax) != length:
            raise BadInput(f"{path}: target_argmax has {len(argmax)} positions, not {length}")
        if int(argmax.min()) < 0 or int(argmax.max()) >= vocab:
            raise BadInput(
                f"{path}: target_argmax reaches from {int(argmax.min())} to {int(argmax.max())}, but "
                f"the target's vocabulary has {vocab} ids"
            )
    return Sample(
        path=path,
        input_ids=ids.to(device),
        loss_mask=mask.bool().to(device),
        states={k: h.float().to(device) for k, h in zip(states, rows, strict=True)},
        target_argmax=None if argmax is None else argmax.to(device),
    )


def load_plain(path: Path) -> dict[str, object]:
    """A `.pt` file's dict."""
    raw = load_pt(path)
    if not isinstance(raw, dict):
        raise BadInput(f"{path} holds no dict but {type(raw).__name__}")
    return raw


def flat(value: object, path: Path, name: str) -> Tensor:
    """A one-dimensional tensor from [T] or [1, T]."""
    if not isinstance(value, Tensor):
        raise BadInput(f"{path}: {name} is no tensor but {type(value).__name__}")
    squeezed = value.squeeze(0) if value.dim() == 2 else value
    if squeezed.dim() != 1 or squeezed.is_floating_point():
        raise BadInput(
            f"{path}: {name} must be whole numbers of shape [T], not {list(value.shape)}"
        )
    return squeezed

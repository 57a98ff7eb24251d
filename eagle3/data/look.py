"""What the layouts share: finding files, reading torch dicts, and the shapes they may come in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import load_pt

T = TypeVar("T")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts data_10 behind data_9."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def files_below(
    folder: Path, endings: tuple[str, ...], without: Collection[str] = ()
) -> tuple[Path, ...]:
    """All files below a folder whose names end so, in numeric order, but for the names `without`."""
    found = [
        Path(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(endings) and name not in without
    ]
    return tuple(sorted(found, key=lambda path: natural_key(path.relative_to(folder))))


def load_plain(path: Path) -> dict[str, Any]:
    """A torch file's dict."""
    raw = load_pt(path)
    if not isinstance(raw, dict):
        raise BadInput(f"{path} holds no dict but {type(raw).__name__}")
    return raw


def first_that(files: Sequence[Path], probe: Callable[[Path], T], folder: Path) -> tuple[Path, T]:
    """The first file on which a probe raises no BadInput, and what it says.

    A damaged file tells nothing of the others; it is named when samples are read. Raises BadInput
    with the first file's fault where all are damaged.
    """
    fault: BadInput | None = None
    for path in files:
        try:
            return path, probe(path)
        except BadInput as error:
            fault = fault or error
    raise BadInput(
        f"none of the {len(files)} files of {folder} can be read; the first: {fault}"
    ) from fault


def first_or_last(
    files: Sequence[Path], fits: Callable[[dict[str, Any]], bool]
) -> tuple[Path, dict[str, Any]] | None:
    """The first or the last torch dict that can be read, if it fits."""
    for order in (files, files[::-1]):
        for path in order:
            try:
                raw = load_plain(path)
            except BadInput:
                continue
            if fits(raw):
                return path, raw
            break
    return None


def taken(raw: dict[str, Any], names: Sequence[str], path: Path) -> tuple[Any, ...]:
    """The named entries of a dict."""
    lacking = [name for name in names if name not in raw]
    if lacking:
        raise BadInput(f"{path} lacks {', '.join(lacking)}; it has {', '.join(map(str, raw))}")
    return tuple(raw[name] for name in names)


def vector(value: object, path: Path, name: str) -> Tensor:
    """Whole numbers [T] int64 from [T] or [1, T] of any width."""
    squeezed = one_text(value, path, name, 1)
    if squeezed.is_floating_point() or squeezed.is_complex():
        raise BadInput(
            f"{path}: {name} must be whole numbers of shape [T], not {squeezed.dtype} "
            f"{list(squeezed.shape)}"
        )
    return squeezed.long()


def mask(value: object, path: Path, name: str = "loss_mask") -> Tensor:
    """A mask [T] bool from zeros and ones of any type; anything else in it is refused."""
    squeezed = one_text(value, path, name, 1)
    ones = squeezed == 1
    if not (ones | (squeezed == 0)).all():
        raise BadInput(
            f"{path}: {name} holds other values than 0 and 1, such as "
            f"{squeezed[~(ones | (squeezed == 0))][0].item()}"
        )
    return ones


def rows(value: object, path: Path, name: str) -> Tensor:
    """States [T, W] from [T, W] or [1, T, W], in their stored type."""
    squeezed = one_text(value, path, name, 2)
    if squeezed.dtype not in FLOATS:
        raise BadInput(
            f"{path}: {name} is stored as {squeezed.dtype}; states are read as bfloat16, float16 or "
            "float32"
        )
    return squeezed


def one_text(value: object, path: Path, name: str, dims: int) -> Tensor:
    """A tensor of `dims` dimensions, a leading one of size 1 taken off."""
    if not isinstance(value, Tensor):
        raise BadInput(f"{path}: {name} is no tensor but {type(value).__name__}")
    squeezed = value[0] if value.dim() == dims + 1 and len(value) == 1 else value
    if squeezed.dim() != dims:
        expected = "[T]" if dims == 1 else "[T, H]"
        raise BadInput(
            f"{path}: {name} must have the shape {expected}, or that behind a leading 1, not "
            f"{list(value.shape)}"
        )
    return squeezed


def chunks(wide: Tensor, count: int, path: Path, name: str) -> tuple[Tensor, ...]:
    """States that lie side by side [T, count·H], one by one."""
    width = wide.shape[1]
    if width % count:
        raise BadInput(f"{path}: {name} is {width} wide, which {count} states do not share evenly")
    parts: tuple[Tensor, ...] = wide.split(width // count, 1)
    return parts


def chunk_names(width: int, hidden: int, path: Path, name: str) -> tuple[str, ...]:
    """Names of the states that share a width of A·H, by the target's hidden size H."""
    if not width or width % hidden:
        raise BadInput(
            f"{path}: {name} is {width} wide, which is no multiple of the target's hidden size "
            f"{hidden}; is this another model's data?"
        )
    return tuple(f"{name}[{at}:{at + hidden}]" for at in range(0, width, hidden))

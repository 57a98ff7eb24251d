"""What the layouts share: finding files, reading torch dicts, and the shapes they may come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import load_pt

T = TypeVar("T", bound=Hashable)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WHOLE = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
LOOKED_AT = 5  # files, spread evenly over a folder, by which its form is told


def load_plain(path: Path) -> dict[str, Any]:
    """A torch file's dict."""
    raw = load_pt(path)
    if not isinstance(raw, dict):
        raise BadInput(f"{path} holds no dict but {type(raw).__name__}")
    return raw


def told_by_most(files: Sequence[Path], probe: Callable[[Path], T], folder: Path) -> tuple[Path, T]:
    """What a probe says of most of the files that are looked at, and the first of these.

    A file of another form is damaged, and so is one on which the probe raises BadInput; it is named
    when samples are read, not here. Raises BadInput with the first file's fault where all are damaged.
    """
    spread = files[:: -(-len(files) // LOOKED_AT)]
    said: dict[Path, T] = {}
    fault: BadInput | None = None
    for place, path in enumerate(dict.fromkeys([*spread, *files])):
        if said and place >= len(spread):
            break
        try:
            said[path] = probe(path)
        except BadInput as error:
            fault = fault or error
    if not said:
        raise BadInput(
            f"none of the {len(files)} files of {folder} can be read; the first: {fault}"
        ) from fault
    ((most, _),) = Counter(said.values()).most_common(1)
    return next((path, most) for path, what in said.items() if what == most)


def check_count(path: Path, stored: int, expected: int) -> None:
    """Raises BadInput where a file stores another number of states than the data's form says."""
    if stored != expected:
        raise BadInput(f"{path} stores {stored} states, but the data's other files {expected}")


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
    if squeezed.dtype not in WHOLE:
        raise BadInput(
            f"{path}: {name} must be whole numbers of shape [T], not {squeezed.dtype} "
            f"{list(squeezed.shape)}"
        )
    return squeezed.long()


def mask(value: object, path: Path, name: str = "loss_mask") -> Tensor:
    """A mask [T] bool from zeros and ones of any real type; anything else in it is refused."""
    squeezed = one_text(value, path, name, 1)
    if squeezed.dtype in WHOLE:
        squeezed = squeezed.long()  # torch computes little in uint16 to uint64
    elif squeezed.dtype not in (torch.bool, *FLOATS):
        raise BadInput(f"{path}: {name} must be zeros and ones, not {squeezed.dtype}")
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
    """A plain tensor of `dims` dimensions, a leading one of size 1 taken off."""
    if not isinstance(value, Tensor):
        raise BadInput(f"{path}: {name} is no tensor but {type(value).__name__}")
    kind = odd_kind(value)
    if kind is not None:
        raise BadInput(f"{path}: {name} is a {kind} tensor; store it as a plain, dense one")
    value = value.detach().resolve_neg()  # a saved parameter still asks for gradients
    squeezed = value[0] if value.dim() == dims + 1 and len(value) == 1 else value
    if squeezed.dim() != dims:
        expected = "[T]" if dims == 1 else "[T, H]"
        raise BadInput(
            f"{path}: {name} must have the shape {expected}, or that behind a leading 1, not "
            f"{list(value.shape)}"
        )
    return squeezed


def odd_kind(value: Tensor) -> str | None:
    """In what a tensor is no plain one: its numbers cannot be taken row by row. None: it is plain."""
    if value.layout is not torch.strided:
        return str(value.layout).removeprefix("torch.")
    if value.is_nested:
        return "nested"
    if value.is_quantized:
        return "quantised"
    return None if value.device.type == "cpu" else value.device.type


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

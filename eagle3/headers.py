"""What weight files hold, by their headers: names, number types and shapes, read without torch.

A safetensors file opens with eight bytes of length and a JSON header. It is read strictly, so that a
file that was cut off or patched together is named before anything is built on it. Single tensors can
be read as well, in place. A `.bin` file is a pickle and is not looked into.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.errors import BadInput

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
PART = re.compile(r"model-\d+-of-\d+\.safetensors")
MAX_HEADER = 100_000_000  # bytes, as the format's own readers have it
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
FLOATS = frozenset(name for name in BITS if name[0] in "FB" and name != "BOOL")
NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are byte offsets in that file."""

    name: str
    dtype: str  # as safetensors spells it: F32, F16, BF16, I64, BOOL, F8_E4M3, …
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype in FLOATS


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a checkpoint folder; `tensors` is None for a `.bin`, which is not examined."""

    folder: Path
    kind: str  # safetensors, sharded, bin
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo] | None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises BadInput that names the file and what is wrong."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            opening = file.read(8)
            if len(opening) < 8:
                raise BadInput(f"{path} is cut off: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", opening)
            if length > MAX_HEADER:
                raise BadInput(
                    f"{path} is no safetensors file: its header would be {length} bytes long, the "
                    f"format's limit is {MAX_HEADER}"
                )
            if 8 + length > size:
                raise BadInput(
                    f"{path} is cut off: its header ends at byte {8 + length}, the file at {size}"
                )
            raw = file.read(length)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    tensors = {}
    for name, entry in _entries(path, raw).items():
        if name != "__metadata__":
            tensors[name] = _tensor(path, name, entry, 8 + length)
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _entries(path: Path, raw: bytes) -> dict[str, Any]:
    """The header's JSON object, in which no name may stand twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInput(f"{path}: its header names {twice!r} twice")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except BadInput:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is damaged: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise BadInput(f"{path} is damaged: its header is no JSON object")
    return header


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    """One entry of a header, checked in itself."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(f"{path} is damaged: its header's entry of {name} is incomplete") from error
    if not isinstance(dtype, str) or dtype not in BITS:
        raise BadInput(f"{path}: {name} has the unknown number type {dtype!r}")
    if any(type(number) is not int or number < 0 for number in numbers) or end < start:
        raise BadInput(f"{path} is damaged: {name} has the shape {shape} at bytes {start} to {end}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != (end - start) * 8:
        raise BadInput(
            f"{path} is damaged: {name} is {dtype} {list(shape)}, which is {bits // 8} bytes, but has "
            f"{end - start}"
        )
    return TensorInfo(
        name=name, dtype=dtype, shape=tuple(shape), file=path, start=base + start, end=base + end
    )


def _check_layout(path: Path, tensors: Mapping[str, TensorInfo], base: int, size: int) -> None:
    """The tensors must fill the file: no overlap, no gap, nothing behind the last one."""
    last, reached = "its header", base
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if info.end > size:
            raise BadInput(
                f"{path} is cut off: {info.name} ends at byte {info.end}, the file at {size}"
            )
        if info.start < reached:
            raise BadInput(f"{path} is damaged: {info.name} overlaps {last}")
        if info.start > reached:
            raise BadInput(f"{path} is damaged: nothing lies between {last} and {info.name}")
        last, reached = info.name, info.end
    if reached < size:
        raise BadInput(f"{path} is damaged: {size - reached} bytes lie behind {last}")


def find_weights(folder: Path) -> Weights:
    """The weights of a checkpoint folder, every header read.

    Taken are model.safetensors, an index with its shards, the one other *.safetensors, or
    pytorch_model.bin. Raises BadInput where there is none or more than one kind, and for damage.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder; name the one that holds config.json and weights")
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    tensor_files = [name for name in names if name.endswith(".safetensors")]
    bins = [name for name in names if name == BIN or re.fullmatch(r"pytorch_model-.*\.bin", name)]
    if BIN_INDEX in names and not bins:
        raise BadInput(f"{folder} holds {BIN_INDEX}, but none of its files")
    if tensor_files and bins:
        raise BadInput(
            f"{folder} holds both {tensor_files[0]} and {bins[0]}, which may differ; move one away"
        )
    if INDEX in names:
        if SINGLE in names:
            raise BadInput(f"{folder} holds both {SINGLE} and {INDEX}, which may differ; move one")
        return _sharded(folder, tensor_files)
    if SINGLE in tensor_files and len(tensor_files) > 1:
        other = next(name for name in tensor_files if name != SINGLE)
        raise BadInput(
            f"{folder} holds {other} beside {SINGLE}; engines load every *.safetensors of a folder, so "
            "move it away"
        )
    if len(tensor_files) > 1:
        raise BadInput(
            f"{folder} holds {len(tensor_files)} safetensors files, but no {INDEX} that says which "
            "tensors are in which"
        )
    if tensor_files:
        path = folder / tensor_files[0]
        return Weights(folder=folder, kind="safetensors", files=(path,), tensors=read_header(path))
    if bins:
        files = tuple(folder / name for name in bins)
        return Weights(folder=folder, kind="bin", files=files, tensors=None)
    raise BadInput(
        f"{folder} holds no weights: expected {SINGLE}, {INDEX} with its shards, or {BIN}"
    )


def read_index(folder: Path) -> dict[str, str]:
    """{tensor: file} of a folder's index. Raises BadInput."""
    path = folder / INDEX
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is damaged: it has no 'weight_map'") from error
    if not isinstance(listed, dict) or not listed:
        raise BadInput(f"{path} is damaged: its weight_map is empty or no object")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or not file:
            raise BadInput(f"{path} is damaged: it puts {name} into {file!r}")
    return dict(listed)


def _sharded(folder: Path, present: Sequence[str]) -> Weights:
    """Shards and their index, which must agree both ways."""
    listed = read_index(folder)
    shards = sorted(set(listed.values()))
    if lacking := [shard for shard in shards if not (folder / shard).is_file()]:
        raise BadInput(f"{folder} lacks {', '.join(lacking)}, which {INDEX} names")
    if unnamed := [name for name in present if PART.fullmatch(name) and name not in shards]:
        raise BadInput(
            f"{folder} holds {', '.join(unnamed)}, which {INDEX} does not name, so nothing loads it"
        )
    tensors: dict[str, TensorInfo] = {}
    faults = []
    for shard in shards:
        for name, info in read_header(folder / shard).items():
            if name in tensors:
                faults.append(f"{name} is in {tensors[name].file.name} and in {shard}")
            elif name not in listed:
                faults.append(f"{name} is in {shard}, but not in the index")
            elif listed[name] != shard:
                faults.append(f"{name} is in {shard}, the index says {listed[name]}")
            tensors[name] = info
    faults += [f"{name} is not in {listed[name]}" for name in listed if name not in tensors]
    if faults:
        raise BadInput(f"{folder / INDEX} does not fit its shards: {'; '.join(faults)}")
    files = tuple(folder / shard for shard in shards)
    return Weights(folder=folder, kind="sharded", files=files, tensors=tensors)


def find_tensors(folder: Path, suffixes: Iterable[str]) -> dict[str, TensorInfo]:
    """{suffix: tensor} of those whose name is a suffix or ends in `.suffix`, in safetensors files.

    Of a sharded checkpoint only the headers that are needed are read: a target has hundreds of them.
    A suffix that no tensor has is left out. Raises BadInput for several tensors of one suffix.
    """
    if (folder / INDEX).is_file():
        where = read_index(folder)
    else:
        weights = find_weights(folder)
        where = {name: info.file.name for name, info in (weights.tensors or {}).items()}
    found: dict[str, TensorInfo] = {}
    headers: dict[str, dict[str, TensorInfo]] = {}
    for suffix in suffixes:
        names = [name for name in where if name == suffix or name.endswith(f".{suffix}")]
        # A vision tower or a multi-token head may have norms of its own: the shortest is the model's.
        names = [n for n in names if n.count(".") == min(m.count(".") for m in names)]
        if len(names) > 1:
            raise BadInput(f"{folder} holds {len(names)} tensors named *.{suffix}, expected one")
        for name in names:
            file = where[name]
            if file not in headers:
                if not (folder / file).is_file():
                    raise BadInput(f"{folder} lacks {file}, which {INDEX} names")
                headers[file] = read_header(folder / file)
            if name not in headers[file]:
                raise BadInput(f"{folder / INDEX} puts {name} into {file}, which does not hold it")
            found[suffix] = headers[file][name]
    return found


def read_values(info: TensorInfo) -> np.ndarray[Any, Any]:
    """A tensor's values, read from its place in the file; bf16 and fp8 become float32."""
    flat = _read(info, info.start, info.end)
    return flat.reshape(info.shape)


def read_rows(info: TensorInfo, rows: Sequence[int]) -> np.ndarray[Any, Any]:
    """The named rows of a tensor of two dimensions, [len(rows), width]; nothing else is read."""
    if len(info.shape) != 2:
        raise BadInput(f"{info.file}: {info.name} has no rows: its shape is {list(info.shape)}")
    if any(not 0 <= row < info.shape[0] for row in rows):
        raise BadInput(f"{info.file}: {info.name} has {info.shape[0]} rows")
    wide = info.shape[1] * BITS[info.dtype] // 8
    parts = [_read(info, info.start + row * wide, info.start + (row + 1) * wide) for row in rows]
    return np.stack(parts) if parts else np.empty((0, info.shape[1]), np.float32)


def _read(info: TensorInfo, start: int, end: int) -> np.ndarray[Any, Any]:
    """The numbers between two byte offsets of a tensor's file."""
    with info.file.open("rb") as file:
        file.seek(start)
        data = file.read(end - start)
    if len(data) < end - start:
        raise BadInput(f"{info.file} is cut off: {info.name} ends behind the file's end")
    if info.dtype in NUMPY:
        return np.frombuffer(data, np.dtype(NUMPY[info.dtype]))
    if info.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    codes = np.frombuffer(data, np.uint8)
    if info.dtype == "F8_E5M2":  # the upper half of an f16
        with np.errstate(invalid="ignore"):  # NaN of either kind is NaN
            return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if info.dtype == "F8_E4M3":
        return E4M3[codes]
    if info.dtype == "F8_E8M0":
        return E8M0[codes]
    raise BadInput(f"{info.file}: {info.name} is {info.dtype}, which is not decoded here")


def _e4m3() -> np.ndarray[Any, Any]:
    """The value of each byte: sign, 4 bits of exponent (bias 7), 3 of fraction; no infinity."""
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    size = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    )
    return np.where(code & 0x7F == 0x7F, np.nan, sign * size).astype(np.float32)


E4M3 = _e4m3()
E8M0 = np.where(np.arange(256) == 255, np.nan, np.exp2(np.arange(256) - 127.0)).astype(np.float32)

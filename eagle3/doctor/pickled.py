"""The outline of a `.pt` file: its dict's keys with the shapes and number types of the tensors.

Nothing of the file is executed: every name that the pickle asks for is answered with a stand-in of
this module, and any other is refused. The numbers themselves are not touched.
"""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput

MAX_PICKLE = 16 << 20  # bytes; a sample's outline is some kB
MAX_PACKED = 256 << 20  # bytes of a .gz that are unpacked to look at it
DTYPES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}


@dataclass(frozen=True)
class TensorOutline:
    """A tensor of a pickle."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StorageType:
    """A class or constant of torch's that names a number type."""

    dtype: str


def _rebuild(storage: Any, _offset: Any, size: Any, *_rest: Any) -> TensorOutline:
    """What stands in for torch's own function: its size argument and the storage's type."""
    dtype = storage if isinstance(storage, str) else "?"
    return TensorOutline(dtype, tuple(int(n) for n in size))


def _rebuild_typed(_storage: Any, _offset: Any, size: Any, *rest: Any) -> TensorOutline:
    """The same for number types that have no storage class: the type comes as an argument."""
    named = [value.dtype for value in rest if isinstance(value, StorageType)]
    return TensorOutline(named[0] if named else "?", tuple(int(n) for n in size))


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


STAND_INS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
    ("torch.storage", "UntypedStorage"): StorageType("?"),
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): tuple,
}


class _Outline(pickle.Unpickler):
    """Runs the pickle's own small machine over stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return StorageType(DTYPES[name])
        stand_in: Callable[..., Any] | None = STAND_INS.get((module, name))
        if stand_in is None:
            raise BadInput(f"it asks for {module}.{name}, which no plain file of tensors does")
        return stand_in

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[1] if isinstance(pid, tuple) and len(pid) > 1 else None
        return kind.dtype if isinstance(kind, StorageType) else "?"


def outline(path: Path) -> dict[str, Any]:
    """{key: TensorOutline, list of them, or a plain value} of a file's dict.

    Raises BadInput where it is damaged, asks for code, or is no dict, and NotExaminedError where
    looking would cost too much.
    """
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as packed:
            try:
                data = packed.read(MAX_PACKED + 1)
            except (OSError, EOFError, ValueError) as error:
                raise BadInput(f"{path} is damaged or cut off: {error}") from error
        if len(data) > MAX_PACKED:
            raise NotExaminedError(f"{path} unpacks to more than {MAX_PACKED >> 20} MiB")
        return _outline(path, io.BytesIO(data))
    with path.open("rb") as file:
        return _outline(path, file)


class NotExaminedError(Exception):
    """A file is sound as far as can be told, but its outline was not read."""


def _outline(path: Path, file: Any) -> dict[str, Any]:
    opening = file.read(2)
    file.seek(0)
    if opening == b"\x80\x02":
        raise NotExaminedError(f"{path} is of torch's format before 1.6")
    try:
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"]
            if len(names) != 1:
                raise BadInput(f"{path} is no file that torch.save wrote")
            if archive.getinfo(names[0]).file_size > MAX_PICKLE:
                raise NotExaminedError(f"{path} has an outline of more than {MAX_PICKLE >> 20} MiB")
            value = _Outline(io.BytesIO(archive.read(names[0]))).load()
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise BadInput(f"{path} is damaged or cut off: {error}") from error
    except (
        pickle.UnpicklingError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise BadInput(f"{path} is damaged: its pickle cannot be followed ({error})") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds no dict but {type(value).__name__}")
    return {str(key): entry for key, entry in value.items()}

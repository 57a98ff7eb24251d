"""Reading JSON and torch files, with one clear sentence for whatever is wrong with them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import BadInput


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(
            f"{path} does not exist; a checkpoint is a folder with config.json and its weights"
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # odd bytes, numbers of 5000 digits
        raise BadInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{path} holds no JSON object but {type(data).__name__}")
    return data


def load_pt(path: Path) -> object:
    """What a torch file holds, without running its code.

    Memory-mapped where its format allows it; a `.gz` file is decompressed in memory.
    """
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path) as file:
                content = file.read()
            check_start(content[:64], path)
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        with path.open("rb") as plain:
            check_start(plain.read(64), path)
        # Files of torch before 1.6 are no zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except BadInput:
        raise
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):
            raise BadInput(
                f"{path} is damaged: its pickle holds what torch never writes"
            ) from error
        raise BadInput(
            f"{path} contains pickled code, not only tensors, and was not loaded; save it again as a "
            "plain dict of tensors"
        ) from error
    except (OSError, RuntimeError, EOFError, zlib.error) as error:
        # torch adds advice to the first sentence, which is not about this file.
        what = first_line(error).split(". ")[0]
        raise BadInput(f"{path} is damaged or truncated: {what}") from error
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # A flipped bit in the pickle makes its reader stumble in any of these ways.
        kind = type(error).__name__
        raise BadInput(f"{path} is damaged: reading it failed ({kind}: {error})") from error


def check_start(start: bytes, path: Path) -> None:
    """Raises BadInput where a file's first bytes are no torch file's, before a pickle is looked for."""
    if start.startswith(b"version https://git-lfs"):
        raise BadInput(f"{path} is only a Git LFS pointer; fetch the file itself (git lfs pull)")
    if start and not start.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise BadInput(f"{path} is damaged or no torch file: it starts with {start[:8]!r}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

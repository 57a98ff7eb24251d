"""Reading JSON and torch files, with one clear sentence for whatever is wrong with them."""

from __future__ import annotations

import json
import pickle
import zipfile
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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{path} holds no JSON object but {type(data).__name__}")
    return data


def load_pt(path: Path) -> object:
    """What a torch file holds, memory-mapped where its format allows it, without running its code."""
    try:
        # Files of torch before 1.6 are no zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise BadInput(
            f"{path} contains pickled code, not only tensors, and was not loaded; save it again as a "
            "plain dict of tensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""The target's own choices beside a dump that was made without them, in a folder of their own.

    FOLDER/argmax.json                  what made it, and for which data
    FOLDER/PATH/OF/SAMPLE.safetensors   input_ids [T] int32, target_argmax [T] int32

The dump stays as it is. Each file repeats the text, so that choices are never joined to another one.
Whoever can name the greedy token behind every position may write such a folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import first_line, read_json
from eagle3.samples import Sample

ABOUT = "argmax.json"


def check_argmax(folder: Path, fingerprint: str) -> None:
    """Raises BadInput where a folder holds no choices, or those of another target."""
    about = folder / ABOUT
    if not about.is_file():
        raise BadInput(
            f"data.target_argmax={folder} holds no {ABOUT}, so nobody says whose choices these are; "
            "make it with job=capture_states data=path"
        )
    made_by = read_json(about).get("target")
    if made_by != fingerprint:
        raise BadInput(
            f"data.target_argmax={folder} holds the choices of another target ({str(made_by)[:19]}…) "
            f"than this one ({fingerprint[:19]}…); make it anew with job=capture_states"
        )


def argmax_file(folder: Path, sample: Path, data: Path) -> Path:
    """Where the choices of a sample of `data` lie."""
    return folder / f"{sample.relative_to(data).as_posix()}.safetensors"


def write_argmax(folder: Path, sample: Path, data: Path, ids: Tensor, argmax: Tensor) -> None:
    """Keep the choices [T] behind the positions of a text [T]."""
    path = argmax_file(folder, sample, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"input_ids": ids, "target_argmax": argmax}
    try:
        save_file({name: tensor.to(torch.int32).cpu() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # how its writer reports a full disk
        raise OSError(None, f"writing {path.name} failed: {first_line(error)}") from error


def read_argmax(folder: Path, sample: Path, data: Path, ids: Tensor) -> Tensor:
    """The choices [T] int64 of a sample; raises BadInput where there are none for this text [T]."""
    path = argmax_file(folder, sample, data)
    try:
        with safe_open(path, framework="pt") as file:
            of: Tensor = file.get_tensor("input_ids")
            argmax: Tensor = file.get_tensor("target_argmax")
    except FileNotFoundError as error:
        raise BadInput(
            f"data.target_argmax={folder} has nothing for {sample}: {path.name} is not there; make it "
            "anew with job=capture_states"
        ) from error
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    if of.shape != ids.shape or not torch.equal(of.long(), ids.cpu()) or argmax.shape != of.shape:
        raise BadInput(f"{path} was made for another text than {sample} holds; make it anew")
    return argmax.long().to(ids.device)


def with_argmax(
    samples: Iterator[Sample], folder: Path, data: Path, vocab: int
) -> Iterator[Sample]:
    """The samples of `data` with the target's choices out of `folder` in place of their own."""
    for sample in samples:
        argmax = read_argmax(folder, sample.path, data, sample.input_ids)
        if int(argmax.min()) < 0 or int(argmax.max()) >= vocab:
            raise BadInput(
                f"{argmax_file(folder, sample.path, data)} reaches from {int(argmax.min())} to "
                f"{int(argmax.max())}, but the target's vocabulary has {vocab} ids"
            )
        yield replace(sample, target_argmax=argmax)

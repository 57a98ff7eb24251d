"""Reading drafter checkpoints of every layout, strictly.

A folder holds `config.json` and its weights: `model.safetensors`, an index with its shards, or
`pytorch_model.bin`. Every tensor that the drafter needs must be there in its right shape and nothing
else may be; all faults are named in one error. Pickled code is never executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.checkpoints import LAYOUTS, examine
from eagle3.checkpoints.agree import PASSED_OVER, expected_shapes, optional_shapes, own_name
from eagle3.checkpoints.refused import other_kinds
from eagle3.errors import BadInput
from eagle3.files import first_line, load_pt, read_json
from eagle3.form import DrafterForm
from eagle3.headers import BIN_INDEX, INDEX, Weights, find_weights
from eagle3.model import Drafter, DrafterShape
from eagle3.rope import inverse_frequencies

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter as loaded; `embedding` [V, H_d], as stored, is None where the file has none."""

    drafter: Drafter
    form: DrafterForm
    embedding: Tensor | None
    own_t2d: bool  # whether t2d is the file's; else it was made of d2t, read as offsets
    fingerprint: str  # sha256 over config.json and the weights
    notes: tuple[str, ...]  # the layout, and every default that changes what is computed

    def vocabulary(self, to_target: Tensor) -> Tensor:
        """The target ids that can be drafted, a mask [V]: the file's t2d, or, where it has none, what
        d2t leads to as it is read. `to_target` [V_d] holds -1 where it leads outside.
        """
        if self.own_t2d:
            return self.drafter.t2d
        named = torch.zeros_like(self.drafter.t2d)
        named[to_target[to_target >= 0]] = True
        return named


def load_drafter(
    folder: Path, device: str = "cpu", *, layout: str | None = None
) -> DrafterCheckpoint:
    """The drafter in `folder`, in float32; raises BadInput that names every fault.

    `layout` names one of eagle3.checkpoints.LAYOUTS instead of looking for it.
    """
    where = folder / "config.json"
    config = read_json(where)
    weights = find_weights(folder)
    files = read_files(weights)
    turns = [files.pop(name) for name in list(files) if PASSED_OVER.fullmatch(name)]
    shapes = {name: tuple(t.shape) for name, t in files.items()}
    if kinds := other_kinds(config, shapes):
        raise BadInput(f"the checkpoint in {folder} {'; it '.join(kinds)}")
    form, faults = examine(config, shapes, where, layout=layout)
    tensors = {own_name(name): tensor for name, tensor in files.items()}
    faults += wrong_tensors(form, tensors) + wrong_numbers(files)
    if form is None or faults:
        raise BadInput(f"{weights.files[0]} and {where} do not fit: {'; '.join(faults)}")
    embedding, own_t2d = tensors.pop(EMBEDDING, None), "t2d" in tensors
    notes = [*said_aloud(form, config), *other_turns(form, turns), *complete_tables(form, tensors)]
    return DrafterCheckpoint(
        drafter=build(drafter_shape(form), tensors, device),
        form=form,
        embedding=None if embedding is None else embedding.to(device),
        own_t2d=own_t2d,
        fingerprint=fingerprint_files([where, *index_file(weights), *weights.files]),
        notes=tuple(notes),
    )


def read_files(weights: Weights) -> dict[str, Tensor]:
    """All tensors of a checkpoint, mapped where the format allows it."""
    tensors: dict[str, Tensor] = {}
    for path in weights.files:
        for name, tensor in read_tensors(path).items():
            if name in tensors:
                raise BadInput(f"{path} holds {name}, which another file of the folder holds too")
            tensors[name] = tensor
    if weights.kind == "bin" and (weights.folder / BIN_INDEX).is_file():
        listed = read_json(weights.folder / BIN_INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise BadInput(f"{weights.folder / BIN_INDEX} is damaged: its weight_map is no object")
        if lacking := sorted(set(listed) ^ set(tensors)):
            raise BadInput(
                f"{weights.folder / BIN_INDEX} and its files do not agree on {', '.join(lacking)}"
            )
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one weights file."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    loaded = load_pt(path)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise BadInput(f"{path} holds no state_dict (a dict of names to tensors)")
    odd = [name for name, tensor in loaded.items() if not is_plain(tensor)]
    if odd:
        raise BadInput(
            f"{path}: {', '.join(odd[:3])} is sparse, nested, quantised or without numbers; only plain "
            "tensors are read"
        )
    return {name: tensor.detach() for name, tensor in loaded.items()}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie there one by one."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return plain and not (tensor.is_nested or tensor.is_quantized)


def wrong_tensors(form: DrafterForm | None, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Missing and unread tensors. Wrong shapes are named where file and config are compared."""
    if form is None:
        return ()
    needed, optional = expected_shapes(form), optional_shapes(form)
    present = {layer_of(name) for name in tensors}
    missing = [f"missing {n}" for n in needed if n not in tensors and layer_of(n) in present]
    unread = [f"unexpected {n}" for n in tensors if n not in needed and n not in optional]
    return tuple(first_few(missing) + first_few(unread))


def layer_of(name: str) -> str:
    """What a tensor belongs to. A layer that is missing as a whole is named where layers are counted."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else ""


def first_few(faults: list[str], most: int = 12) -> list[str]:
    """A list that can be read: the first faults, and how many more there are."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return faults[:most] + more


def wrong_numbers(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Tensors of the wrong number type, and such as hold NaN or infinity."""
    faults = []
    for name, tensor in tensors.items():
        if name == "d2t":
            if tensor.dtype not in (torch.int64, torch.int32):
                faults.append(f"d2t holds {tensor.dtype}, expected whole numbers (int64)")
        elif name == "t2d":
            if tensor.dtype not in (torch.bool, torch.uint8) or (tensor > 1).any():
                faults.append(f"t2d holds {tensor.dtype}, expected a mask (bool)")
        elif tensor.dtype not in FLOATS:
            faults.append(f"{name} holds {tensor.dtype}, expected floating point of 16 or 32 bits")
        elif not finite(tensor):
            faults.append(f"{name} holds NaN or infinity")
    return tuple(faults)


def finite(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers only; nothing of its size is made, it may fill gigabytes."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def build(shape: DrafterShape, tensors: Mapping[str, Tensor], device: str) -> Drafter:
    """The drafter with these tensors, in float32; what a file may lack is as a new module has it.

    Copied one by one into a module without memory of its own: a large drafter is never there twice,
    nor filled with random numbers first.
    """
    with torch.device("meta"):
        drafter = Drafter(shape)
    values: dict[str, Tensor] = {}
    for name, empty in drafter.state_dict().items():
        if name in tensors:
            values[name] = tensors[name].to(device, empty.dtype, copy=True)
        elif name == "norm.weight" or name == "t2d":
            values[name] = torch.ones(empty.shape, dtype=empty.dtype, device=device)
        elif name == "d2t":
            values[name] = torch.zeros(empty.shape, dtype=empty.dtype, device=device)
    drafter.load_state_dict(values, assign=True)
    return drafter.eval().requires_grad_(False)


def drafter_shape(form: DrafterForm) -> DrafterShape:
    """The sizes and switches that the drafter is built from."""
    values = {name: setting.value for name, setting in form.settings()}
    sizes = {
        field.name: values[field.name] for field in fields(DrafterShape) if field.name in values
    }
    if not any(sizes["windows"]):
        sizes["windows"] = ()
    return DrafterShape(**sizes, own_head=form.head.value == "own")


def said_aloud(form: DrafterForm, config: Mapping[str, Any]) -> list[str]:
    """The layout, the defaults that matter, and keys that ecosystems read in different ways."""
    notes = [f"drafter: layout {form.layout.value}, since {form.layout.origin}"]
    for name in LAYOUTS[form.layout.value].LOUD:
        setting = getattr(form, name)
        if "default of" in setting.origin:
            value = setting.value.plain() if name == "rope" else setting.value
            notes.append(f"config.json does not state {name}: {value} taken, {setting.origin}")
    if form.layout.value == "specforge" and "norm_output" in config:
        notes.append(
            f"config.json sets norm_output={config['norm_output']}, read as SpecForge trains: whether "
            "the head sees the normed state; engines read that key as what the next step is fed"
        )
    if form.rope.value.kind == "dynamic":
        theirs = ["SpecForge's own table"] if form.layout.value == "specforge" else []
        notes.append(
            "dynamic rope scaling is run as transformers does, so not at all up to "
            f"{form.max_positions.value} positions, and longer texts are refused; "
            f"{' and '.join([*theirs, 'that of some engines'])} is scaled from the first position on"
        )
    if form.layer_ids.value is not None:
        means = form.layer_convention
        convention = f"the {means.value} convention" if means.value else "no stated convention"
        notes.append(
            f"config.json declares aux layer ids {list(form.layer_ids.value)}, in {convention} "
            f"({means.origin})"
        )
    return notes


def other_turns(form: DrafterForm, saved: Sequence[Tensor]) -> list[str]:
    """Where a file that kept its rotary frequencies was trained with others than its config says."""
    ours, _ = inverse_frequencies(form.rope.value, form.head_dim.value)
    close = [s.shape == ours.shape and torch.allclose(s.float(), ours, rtol=0.02) for s in saved]
    if all(close):
        return []
    return [
        "the file's rotary_emb.inv_freq is not what config.json's rope makes; the latter is run"
    ]


def complete_tables(form: DrafterForm, tensors: dict[str, Tensor]) -> list[str]:
    """Fill in the mask t2d where the file has none, and say where the two tables disagree."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        return []
    ids = torch.arange(len(d2t)) + d2t
    inside = (ids >= 0) & (ids < form.vocab.value)
    mask = torch.zeros(form.vocab.value, dtype=torch.bool)
    mask[ids[inside]] = True
    if t2d is None:
        tensors["t2d"] = mask
        return ["the file has no t2d: taken from d2t, read as offsets"]
    t2d = tensors["t2d"] = t2d.bool()  # some writers keep masks as bytes
    if not torch.equal(mask, t2d) or not inside.all():
        return ["d2t, read as offsets, and t2d do not name the same target ids"]
    return []


def index_file(weights: Weights) -> list[Path]:
    """The index of a checkpoint in several files."""
    names = {"sharded": INDEX, "bin": BIN_INDEX}
    path = weights.folder / names.get(weights.kind, INDEX)
    return [path] if weights.kind in names and path.is_file() else []


def fingerprint_files(paths: Iterable[Path]) -> str:
    """sha256 over the names and contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0")
            while block := file.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"

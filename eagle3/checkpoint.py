"""Reading drafter checkpoints in SpecForge's layout, strictly.

A folder holds `config.json` and either `model.safetensors` or `pytorch_model.bin`. Every tensor the
drafter needs must be there in its right shape and nothing else may be; all faults are named in one
error. Pickled code is never executed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import first_line, load_pt, read_json
from eagle3.model import Drafter, DrafterShape

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# Switches of other trainers that change the forward pass. A file that asks for one is refused, since
# running it without would give a plausible wrong number.
UNSUPPORTED_SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
)


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter as loaded; `embedding` [V, H_d] is None where the file has none of its own."""

    drafter: Drafter
    embedding: Tensor | None
    fingerprint: str  # sha256 over config.json and the weights
    notes: tuple[str, ...]


def load_drafter(folder: Path, device: str = "cpu") -> DrafterCheckpoint:
    """The drafter in `folder`, in float32; raises BadInput that names every fault."""
    config = read_json(folder / "config.json")
    weights = find_weights(folder)
    tensors = read_tensors(weights)
    shape, notes = drafter_shape(config, tensors, folder / "config.json")
    embedding = tensors.pop("embed_tokens.weight", None)
    drafter = Drafter(shape)
    needed = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    optional = {"d2t", "t2d"} if shape.draft_vocab == shape.vocab else set()
    check_tensors(needed, optional, tensors, embedding, shape, weights)
    drafter.load_state_dict({**drafter.state_dict(), **tensors})
    if embedding is not None:
        embedding = embedding.float().to(device)
    return DrafterCheckpoint(
        drafter=drafter.float().eval().requires_grad_(False).to(device),
        embedding=embedding,
        fingerprint=fingerprint_files([folder / "config.json", weights]),
        notes=tuple(notes),
    )


def find_weights(folder: Path) -> Path:
    """The weights file of a checkpoint folder."""
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not found:
        raise BadInput(f"{folder} holds no weights: expected {' or '.join(WEIGHT_FILES)}")
    if len(found) > 1:
        raise BadInput(
            f"{folder} holds both {found[0].name} and {found[1].name}, which may differ; move one away"
        )
    return found[0]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a weights file, memory-mapped where the format allows it."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    loaded = load_pt(path)
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise BadInput(f"{path} holds no state_dict (a dict of names to tensors)")
    return dict(loaded)


def drafter_shape(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path
) -> tuple[DrafterShape, list[str]]:
    """Sizes from config.json, and notes on every default that was taken because a key is absent."""
    notes = []

    def integer(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            if default is None:
                raise BadInput(f"{path} lacks '{key}'")
            notes.append(f"{path.name} lacks '{key}': {default} taken")
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise BadInput(f"{path}: '{key}' must be a positive integer, not {value!r}")
        return value

    for where, block in (("", config), ("eagle_config.", config.get("eagle_config") or {})):
        for switch in UNSUPPORTED_SWITCHES:
            if block.get(switch):
                raise BadInput(
                    f"{path} sets {where}{switch}={block[switch]!r}, which this version does not run; "
                    "scoring the drafter without it would give a wrong number"
                )
    if config.get("hidden_act", "silu") != "silu":
        raise BadInput(f"{path} sets hidden_act={config['hidden_act']!r}; this version runs silu")
    if config.get("norm_output") is False:
        notes.append(
            f"{path.name} sets norm_output=false, read as engines do: the head sees the normed state, "
            "the next step the one before the norm"
        )
    if declared := declared_layer_ids(config):
        notes.append(
            f"{path.name} declares aux layer ids {list(declared)}, in no stated convention"
        )
    if config.get("num_hidden_layers", 1) != 1:
        raise BadInput(
            f"{path} declares {config['num_hidden_layers']} decoder layers; this version runs "
            "drafters of one layer"
        )
    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    vocab = integer("vocab_size")
    target_hidden = integer("target_hidden_size", hidden)
    fc = tensors.get("fc.weight")
    fc_width = fc.shape[-1] if fc is not None and fc.dim() == 2 else 3 * target_hidden
    if fc_width % target_hidden:
        raise BadInput(
            f"{path}: fc.weight takes {fc_width} inputs, no multiple of the target's hidden size "
            f"{target_hidden}"
        )
    norm_eps = config.get("rms_norm_eps")
    if not isinstance(norm_eps, float):
        raise BadInput(f"{path}: 'rms_norm_eps' must be a float, not {norm_eps!r}")
    theta, rope_note = rope_theta(config, path)
    notes += [rope_note] if rope_note else []
    return DrafterShape(
        hidden=hidden,
        heads=heads,
        kv_heads=integer("num_key_value_heads", heads),
        head_dim=integer("head_dim", hidden // heads),
        intermediate=integer("intermediate_size"),
        vocab=vocab,
        draft_vocab=integer("draft_vocab_size", vocab),
        target_hidden=target_hidden,
        num_aux=fc_width // target_hidden,
        norm_eps=norm_eps,
        rope_theta=theta,
    ), notes


def rope_theta(config: Mapping[str, Any], path: Path) -> tuple[float, str | None]:
    """The rotary base in the old or the new spelling; scaled rotary embeddings are refused."""
    block = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if not isinstance(block, dict) or not isinstance(scaling, dict):
        raise BadInput(f"{path}: rope_parameters and rope_scaling must be objects or null")
    kind = scaling.get("rope_type") or scaling.get("type") or block.get("rope_type") or "default"
    if kind != "default":
        raise BadInput(f"{path} asks for '{kind}' rope scaling, which this version does not run")
    theta = config.get("rope_theta")
    if theta is None:
        theta = block.get("rope_theta")
    if theta is None:
        return 10_000.0, f"{path.name} lacks 'rope_theta': 10000 taken, as trainers and engines do"
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise BadInput(f"{path}: 'rope_theta' must be a positive number, not {theta!r}")
    return float(theta), None


def check_tensors(
    needed: Mapping[str, tuple[int, ...]],
    optional: set[str],
    tensors: Mapping[str, Tensor],
    embedding: Tensor | None,
    shape: DrafterShape,
    path: Path,
) -> None:
    """Names, shapes and number types of a checkpoint's tensors; every fault in one BadInput."""
    faults = [f"missing {name}" for name in needed if name not in tensors and name not in optional]
    faults += [f"unexpected {name}" for name in tensors if name not in needed]
    for name, want in needed.items():
        if name in tensors and tuple(tensors[name].shape) != want:
            faults.append(f"{name} is {list(tensors[name].shape)}, expected {list(want)}")
    if embedding is not None and tuple(embedding.shape) != (shape.vocab, shape.hidden):
        faults.append(
            f"embed_tokens.weight is {list(embedding.shape)}, expected [{shape.vocab}, {shape.hidden}]"
        )
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and d2t.dtype not in (torch.int64, torch.int32):
        faults.append(f"d2t holds {d2t.dtype}, expected whole numbers (int64)")
    if t2d is not None and t2d.dtype is not torch.bool:
        faults.append(f"t2d holds {t2d.dtype}, expected a mask (bool)")
    own = {} if embedding is None else {"embed_tokens.weight": embedding}
    for name, tensor in {**tensors, **own}.items():
        if name in ("d2t", "t2d"):
            continue
        if not tensor.is_floating_point():
            faults.append(f"{name} holds {tensor.dtype}, expected floating point")
        elif not torch.isfinite(tensor).all():
            faults.append(f"{name} holds NaN or infinity")
    if faults:
        raise BadInput(f"{path} does not fit its config.json: {'; '.join(faults)}")


def declared_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The aux layer ids a config.json states, nested or at top level; None where it states none."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}
    ids = nested.get(key, config.get(key))
    return None if ids is None else tuple(ids)


def fingerprint_files(paths: Iterable[Path]) -> str:
    """sha256 over the names and contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0")
            while block := file.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """What a drafter takes from its target's checkpoint."""

    num_layers: int
    embedding: Tensor  # [V, H]
    fingerprint: str  # sha256 over config.json and the embedding, not over all weights


def load_target_parts(folder: Path, device: str = "cpu") -> TargetParts:
    """The embedding table and the number of layers of a target in Hugging Face's layout."""
    config_path = folder / "config.json"
    config = read_json(config_path)
    text_config = config.get("text_config", config)  # multimodal targets nest the language model
    num_layers = text_config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        raise BadInput(f"{config_path} lacks 'num_hidden_layers'")
    path, name = find_target_tensor(folder, "embed_tokens.weight")
    try:
        with safe_open(path, framework="pt") as file:
            embedding = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or truncated: {first_line(error)}") from error
    digest = hashlib.sha256(config_path.read_bytes())
    digest.update(embedding.contiguous().view(torch.uint8).numpy().tobytes())
    return TargetParts(
        num_layers=num_layers,
        embedding=embedding.float().to(device),
        fingerprint=f"sha256:{digest.hexdigest()}",
    )


def find_target_tensor(folder: Path, suffix: str) -> tuple[Path, str]:
    """The file and full name of the target's one tensor whose name ends in `suffix`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        entries = {
            name: folder / file for name, file in read_json(index).get("weight_map", {}).items()
        }
    else:
        single = folder / "model.safetensors"
        try:
            with safe_open(single, framework="pt") as file:
                entries = dict.fromkeys(file.keys(), single)
        except FileNotFoundError as error:
            raise BadInput(
                f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
            ) from error
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{single} is damaged or truncated: {first_line(error)}") from error
    names = [name for name in entries if name == suffix or name.endswith(f".{suffix}")]
    if len(names) != 1:
        raise BadInput(f"{folder} holds {len(names)} tensors named *.{suffix}, expected one")
    return entries[names[0]], names[0]

"""Faults are planted by editing the files of sound checkpoints and dumps, as accidents do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.eagle3.dumps import Text, write_dataset
from tests.faults.sound import Target, prompt_mask

# What is done to a folder; the target is there for what was captured from it.
Edit = Callable[[Path, Target], object]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON object in place."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=2))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a safetensors file in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"format": "pt"})


def config(change: Callable[[dict[str, Any]], object]) -> Edit:
    """An edit of a drafter's config.json."""
    return lambda folder, _: edit_json(folder / "config.json", change)


def layer(**keys: Any) -> Edit:
    """An edit that writes keys of the decoder layer, wherever the layout keeps them; None: removed."""

    def change(values: dict[str, Any]) -> None:
        block = values.get("transformer_layer_config", values)
        block.update(keys)
        for key in [key for key, value in keys.items() if value is None]:
            del block[key]

    return config(change)


def top(**keys: Any) -> Edit:
    """An edit that writes keys at the top level of config.json; None: removed."""

    def change(values: dict[str, Any]) -> None:
        values.update(keys)
        for key in [key for key, value in keys.items() if value is None]:
            del values[key]

    return config(change)


def weights(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    """An edit of a drafter's model.safetensors."""
    return lambda folder, _: edit_tensors(folder / "model.safetensors", change)


def drop(*names: str) -> Edit:
    """An edit that takes tensors out."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return weights(change)


def of_norm(change: Callable[[Tensor], Tensor]) -> Edit:
    """An edit of norm.weight, in float32."""

    def edit(tensors: dict[str, Tensor]) -> None:
        old = tensors["norm.weight"]
        tensors["norm.weight"] = change(old.float()).to(old.dtype)

    return weights(edit)


def of_d2t(change: Callable[[Tensor], Tensor]) -> Edit:
    """An edit of d2t."""
    return weights(lambda tensors: tensors.update(d2t=change(tensors["d2t"])))


def of_t2d(change: Callable[[Tensor], Tensor]) -> Edit:
    """An edit of t2d."""
    return weights(lambda tensors: tensors.update(t2d=change(tensors["t2d"])))


def in_turn(*edits: Edit) -> Edit:
    """Several edits."""

    def edit(folder: Path, target: Target) -> None:
        for each in edits:
            each(folder, target)

    return edit


def nothing(folder: Path, target: Target) -> None:
    """No edit: the files are sound, and the engine or trainer that is named does not fit them."""


# -- dumps ---------------------------------------------------------------------------------------


@dataclass
class Stored:
    """What one sample's file holds, whatever its layout: all slots in order, the last one included."""

    number: int
    ids: Tensor
    mask: Tensor
    slots: list[Tensor]
    target: Target
    layout: str

    @property
    def states(self) -> Tensor:
        """All states of the target behind this text, [n + 1, T, H]."""
        return self.target.states[self.number]

    def put(self, place: int, h: Tensor) -> None:
        """Store other rows in a slot, in its number type."""
        self.slots[place] = h.to(self.slots[place].dtype)


def files_of(folder: Path) -> list[Path]:
    """The sample files of a dump, in order."""
    found = [p for p in folder.rglob("*") if p.suffix in (".pt", ".ckpt", ".safetensors")]
    return sorted(found, key=lambda p: int(p.stem.split("_")[-1]))


def dump(change: Callable[[Stored], object]) -> Edit:
    """An edit of every sample of a dump, in whichever layout it is."""

    def edit(folder: Path, target: Target) -> None:
        rows = [edit_sample(path, target, change) for path in files_of(folder)]
        if (folder / "state.json").is_file():  # speculators keeps texts and masks apart
            texts = [Text(ids=r.ids, mask=r.mask, aux=(), end=r.ids, normed=r.ids) for r in rows]
            write_dataset(folder, texts, 2)

    return edit


def edit_sample(path: Path, target: Target, change: Callable[[Stored], object]) -> Stored:
    """Read a file, change what it holds, write it back."""
    number = int(path.stem.split("_")[-1])
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        ids, slots = tensors["token_ids"], list(tensors["hidden_states"].unbind(1))
        stored = Stored(number, ids, prompt_mask(len(ids)), slots, target, "speculators")
        change(stored)
        held = {"token_ids": stored.ids, "hidden_states": torch.stack(stored.slots, 1)}
        save_file({name: t.contiguous() for name, t in held.items()}, path)
        return stored
    raw = torch.load(path, weights_only=True)
    if "aux_hidden_state" in raw:
        wide, end = raw["aux_hidden_state"][0], raw["hidden_state"][0]
        layout, slots = "specforge", [*wide.split(end.shape[-1], -1), end]
    else:
        layout, slots = "pt_shards", raw["hidden_states"]
    slots = [h.clone() for h in slots]
    stored = Stored(number, raw["input_ids"], raw["loss_mask"], slots, target, layout)
    change(stored)
    raw |= {"input_ids": stored.ids, "loss_mask": stored.mask}
    if layout == "pt_shards":
        raw["hidden_states"] = stored.slots
    else:
        raw["aux_hidden_state"] = torch.cat(stored.slots[:-1], -1)[None]
        raw["hidden_state"] = stored.slots[-1][None]
    torch.save(raw, path)
    return stored


def captured_states_are(*states: int) -> Edit:
    """An edit of what capture.json says of the slots."""
    return lambda folder, _: edit_json(
        folder / "capture.json", lambda values: values.update(states=list(states))
    )

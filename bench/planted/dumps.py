"""Dumps of a target's states in three layouts, as their ecosystems write them, sound or changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.planted.lab import Laboratory, Text
from eagle3.data.argmax import ABOUT, write_argmax
from eagle3.target import load_target_parts

LAYOUTS = ("pt_shards", "speculators", "specforge")


@dataclass
class Stored:
    """What one file holds: all slots in order, the last one included."""

    text: Text
    ids: Tensor
    mask: Tensor
    argmax: Tensor
    slots: list[Tensor]


Change = Callable[[Stored], None]


@dataclass(frozen=True, kw_only=True)
class Dump:
    """Which texts and states a dump holds, and in which layout."""

    layout: str
    texts: str  # whose words: one of lab.TARGETS
    slots: tuple[int, ...]  # canonical states stored, the last one included
    declared: tuple[int, ...]  # what capture.json says they are
    chosen: tuple[int, ...]  # which of the texts, by number
    argmax: bool = True  # the target's choices lie in it, or beside it
    changes: tuple[Change, ...] = ()

    def changed(self, change: Change) -> Dump:
        """The same dump with one more change of every text."""
        return replace(self, changes=(*self.changes, change))

    def key(self, fingerprint: str) -> str:
        """A name for an unchanged dump."""
        told = {**vars(self), "changes": None, "target": fingerprint}
        return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:16]


def write_dump(
    dump: Dump, laboratory: Laboratory, target: Path, layers: int, folder: Path
) -> tuple[Path, Path | None]:
    """The dump's folder, and that of the target's choices where they lie beside it.

    Unchanged dumps are written once and shared by cases.
    """
    fingerprint = load_target_parts(target).fingerprint
    place = folder if dump.changes else laboratory.work / "dumps" / dump.key(fingerprint)
    out = place / "data"
    beside = place / "argmax" if dump.argmax and dump.layout != "pt_shards" else None
    if out.is_dir():
        return out, beside
    part = place / "part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    texts = laboratory.texts(dump.texts)
    stored = [read(texts[i], dump, layers) for i in dump.chosen]
    paths = WRITERS[dump.layout](part, stored, dump)
    captured = {"states": list(dump.declared), "target": fingerprint, "num_layers": layers}
    (part / "capture.json").write_text(json.dumps(captured))
    if beside is not None:
        for path, held in zip(paths, stored, strict=True):
            write_argmax(beside, path, part, held.ids, held.argmax)
        (beside / ABOUT).write_text(json.dumps({"target": fingerprint}))
    part.rename(out)
    return out, beside


def read(text: Text, dump: Dump, layers: int) -> Stored:
    """What a text's file is to hold."""
    *aux, last = dump.slots
    normed = dump.layout == "specforge"
    if normed and last != layers:
        raise ValueError("SpecForge's dump keeps the target's end, and no other state, as its last")
    end = text.normed if normed else text.states[last]
    stored = Stored(
        text=text,
        ids=text.ids.clone(),
        mask=text.mask.clone(),
        argmax=text.argmax.clone(),
        slots=[*(text.states[k].clone() for k in aux), end.clone()],
    )
    for change in dump.changes:
        change(stored)
    return stored


def write_pt_shards(folder: Path, texts: Sequence[Stored], dump: Dump) -> list[Path]:
    """A list of states a file."""
    rows = folder / "rows_0-2000"
    rows.mkdir()
    paths = []
    for i, text in enumerate(texts):
        content: dict[str, Any] = {
            "input_ids": text.ids,
            "loss_mask": text.mask,
            "hidden_states": [h.clone() for h in text.slots],
        }
        if dump.argmax:
            content["target_argmax"] = text.argmax
        paths.append(rows / f"data_{i}.pt")
        torch.save(content, paths[-1])
    return paths


def write_specforge(folder: Path, texts: Sequence[Stored], _dump: Dump) -> list[Path]:
    """Aux states side by side, and the end behind the norm."""
    rows = folder / "rows_0-2000"
    rows.mkdir()
    paths = []
    for i, text in enumerate(texts):
        content = {
            "input_ids": text.ids,
            "loss_mask": text.mask,
            "aux_hidden_state": torch.cat(text.slots[:-1], -1)[None],
            "hidden_state": text.slots[-1][None].clone(),
        }
        paths.append(rows / f"data_{i}.ckpt")
        torch.save(content, paths[-1])
    return paths


def write_speculators(folder: Path, texts: Sequence[Stored], _dump: Dump) -> list[Path]:
    """States in safetensors, and texts and masks in an arrow dataset beside them."""
    import pyarrow as pa

    states = folder / "hidden_states"
    states.mkdir()
    paths = []
    for i, text in enumerate(texts):
        tensors = {"token_ids": text.ids, "hidden_states": torch.stack(text.slots, 1)}
        paths.append(states / f"hs_{i}.safetensors")
        save_file({name: t.contiguous() for name, t in tensors.items()}, paths[-1])
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.int64())),
            ("seq_len", pa.int64()),
        ]
    )
    columns = {
        "input_ids": [text.ids.tolist() for text in texts],
        "loss_mask": [text.mask.tolist() for text in texts],
        "seq_len": [len(text.ids) for text in texts],
    }
    name = "data-00000-of-00001.arrow"
    with (folder / name).open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(pa.table(columns, schema=schema))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return paths


WRITERS: dict[str, Callable[[Path, Sequence[Stored], Dump], list[Path]]] = {
    "pt_shards": write_pt_shards,
    "speculators": write_speculators,
    "specforge": write_specforge,
}

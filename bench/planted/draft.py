"""A case as it is being made: a drafter's config and tensors, a dump, a target, an engine.

A draft starts sound; kinds of faults change it in memory, and `write` leaves folders as their
ecosystems would. Tensors carry SpecForge's names for the first layer and are renamed when written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from bench.planted.dumps import Change, Dump, write_dump
from bench.planted.lab import Laboratory, num_layers

STEPS = 4  # that are drafted
# What a diagnosis may vary: everything, as the command asks.
AXES: dict[str, Any] = {
    "fixed": [],
    "only": {},
    "states": None,
    "more_states": [],
    "neighbours": True,
}
FIRST = "midlayer."
KEY = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine that serves, and how it takes layer ids: the id of state k is k + plus, at `place`."""

    name: str
    version: str
    engine_class: str
    place: str  # "nested": in eagle_config; "top"
    plus: int


SGLANG = Engine(name="sglang", version="0.5.23", engine_class="llama", place="nested", plus=-1)
SGLANG_KIMI = Engine(
    name="sglang", version="0.5.18", engine_class="kimi_k25", place="nested", plus=0
)
SGLANG_KIMI_OLD = Engine(
    name="sglang", version="0.5.12", engine_class="kimi_k25", place="nested", plus=-1
)
SGLANG_OLD = Engine(name="sglang", version="0.5.9", engine_class="llama", place="nested", plus=-1)
VLLM = Engine(name="vllm", version="0.33.0", engine_class="llama", place="top", plus=0)
VLLM_OLD = Engine(name="vllm", version="0.20.0", engine_class="llama", place="top", plus=0)


@dataclass(kw_only=True)
class Draft:
    """One case in the making."""

    drafter: str  # which of the lab's
    layout: str  # of the checkpoint: "specforge" (flat) or "speculators" (nested)
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    states: tuple[int, ...]  # canonical, that it was trained on, in the order of fc's chunks
    target: str  # one of lab.TARGETS
    dump: Dump
    engine: Engine | None = None
    engine_ids: tuple[int, ...] | None = None  # ids as served, where they are not config.json's
    engine_flags: dict[str, Any] = field(default_factory=dict)
    # The accept length that was measured behind the engine, as made of the standalone one.
    measured: Callable[[float], float] | None = None
    trained_accuracy: float | None = None

    @property
    def block(self) -> dict[str, Any]:
        """Where the layout keeps the decoder layer's keys."""
        inner: dict[str, Any] = self.config.get(LAYER, self.config)
        return inner

    @property
    def width(self) -> int:
        """H_d, which is H in the lab."""
        return int(self.block["hidden_size"])

    @property
    def num_layers(self) -> int:
        """Of the drafter."""
        return int(self.block["num_hidden_layers"])

    @property
    def flat(self) -> bool:
        """Whether the checkpoint is in the flat layout."""
        return self.layout == "specforge"

    @property
    def normed_residual(self) -> bool:
        """Whether it says it was trained with norm_before_residual."""
        return bool(self.config.get("norm_before_residual"))

    def serve(self, engine: Engine | None) -> None:
        """Name an engine and write the ids that it needs, where it reads them."""
        self.engine = engine
        if engine is not None:
            self.write_ids([k + engine.plus for k in sorted(self.states)], engine.place)

    def write_ids(self, ids: Sequence[int] | None, place: str) -> None:
        """Write layer ids in one place, "top" or "nested", and nowhere else; None: nowhere."""
        self.config.pop(KEY, None)
        if KEY in self.config.get("eagle_config", {}):
            del self.config["eagle_config"][KEY]
            if not self.config["eagle_config"]:
                del self.config["eagle_config"]
        if ids is None:
            return
        if place == "top":
            self.config[KEY] = list(ids)
        else:
            self.config.setdefault("eagle_config", {})[KEY] = list(ids)

    def change(self, name: str, edit: Callable[[Tensor], Tensor]) -> None:
        """Replace a tensor by what `edit` makes of it in float32; it keeps its number type."""
        old = self.tensors[name]
        self.tensors[name] = edit(old.float()).to(old.dtype)

    def first(self, part: str) -> str:
        """The full name of a tensor of the first layer."""
        return f"{FIRST}{part}.weight"

    def edit_dump(self, change: Change) -> None:
        """Change every text of the dump."""
        self.dump = self.dump.changed(change)

    def write(self, folder: Path, laboratory: Laboratory) -> dict[str, Any]:
        """Write the checkpoint and the dump; the inputs of a job's request."""
        drafter = folder / "drafter"
        write_checkpoint(self, drafter)
        target = laboratory.target(self.target)
        data, argmax = write_dump(self.dump, laboratory, target, num_layers(self.target), folder)
        return {
            "target": {"path": str(target), "layout": "hf", "made": ""},
            "drafter": {"path": str(drafter), "layout": None},
            "data": {
                "path": str(data),
                "layout": None,
                "states": None,
                "damaged": "fail",
                "target_argmax": None if argmax is None else str(argmax),
            },
        }


def write_checkpoint(draft: Draft, folder: Path) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.config, indent=2) + "\n")
    tensors = {file_name(draft.layout, n): t.contiguous() for n, t in draft.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def file_name(layout: str, name: str) -> str:
    """A tensor's name in the file."""
    if layout == "speculators" and name.startswith(FIRST):
        return "layers.0." + name.removeprefix(FIRST)
    return name

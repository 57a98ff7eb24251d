"""A drafter's config.json as an engine should find it: edits of plain data, and the lines that say them.

Every function returns a new config in which only the keys that it is about are changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.conventions import KEY, NESTED
from eagle3.doctor.flat import flat_config
from eagle3.doctor.subject import LAYER
from eagle3.doctor.switches import at, line, removal
from eagle3.form import DrafterForm, Rope
from eagle3.served import SPECULATORS_KEYS
from eagle3.served_switches import KNOWS_NESTED, is_nested, plain_drafter
from eagle3.serving import Switch

COUNT = "num_aux_hidden_states"
POST_NORM = "eagle_config.return_hidden_post_norm"
LENGTH = "max_position_embeddings"  # of dynamic scaling, which reads it from outside its block


@dataclass(frozen=True)
class Edited:
    """A config and the lines that lead to it; `config` None: nothing has to be changed."""

    config: dict[str, Any] | None
    lines: tuple[str, ...]


class Edit:
    """A config being changed for one engine, with a line for each change."""

    def __init__(self, config: Mapping[str, Any], engine: str | None, form: DrafterForm) -> None:
        self.lines: list[str] = []
        self.nested = is_nested(config)
        self.flattened = self.nested and engine is not None and engine not in KNOWS_NESTED
        self.before = copy.deepcopy(dict(config))
        self.config = copy.deepcopy(self.before)
        if self.flattened:
            eagle = at(self.before, "eagle_config")
            self.config = copy.deepcopy(flat_config(plain_drafter(config, form), form))
            if isinstance(eagle, dict) and KEY in eagle:
                self.put(NESTED, eagle[KEY])
            self.nested = False
            self.lines = []

    def put(self, path: str, value: Any) -> None:
        """Set a dotted path; nothing is said where it is so already."""
        if at(self.config, path) == value and value is not None:
            return
        block, (*outer, key) = self.config, path.split(".")
        for name in outer:
            if not isinstance(block.get(name), dict):
                block[name] = {}
            block = block[name]
        block[key] = value
        self.lines.append(line(path, value))

    def remove(self, path: str) -> None:
        """Take a dotted path out, where it is there."""
        *outer, key = path.split(".")
        block: Any = self.config
        for name in outer:
            block = block.get(name) if isinstance(block, dict) else None
        if isinstance(block, dict) and key in block:
            del block[key]
            self.lines.append(removal(path))

    @property
    def layer(self) -> str:
        """The prefix of the decoder layer's keys."""
        return f"{LAYER}." if self.nested else ""

    def done(self) -> Edited:
        """What came of it; that a flat copy is needed is a fix of its own."""
        if self.config == self.before:
            return Edited(None, ())
        return Edited(self.config, tuple(self.lines))


def write_ids(edit: Edit, place: str, ids: Sequence[int], counts: Sequence[str]) -> None:
    """Ids where the engine looks, out of every other place, and their number where it needs that."""
    edit.put(place, list(ids))
    for other in (KEY, NESTED):
        if other != place:
            edit.remove(other)
    stated = edit.layer + COUNT
    there = at(edit.config, stated) is not None
    if there or (COUNT in counts and place not in counts and len(ids) != 3):
        edit.put(stated, len(ids))


def set_switch(edit: Edit, name: str, switch: Switch, value: bool) -> None:
    """A switch, wherever the engine reads it: in each place that has it, else in one."""
    if edit.nested:
        # What vLLM does not take from the top level is the decoder layer's.
        places = [
            path if path in SPECULATORS_KEYS else edit.layer + path
            for path in switch.places
            if "." not in path
        ]
    else:
        places = list(switch.places)
    there = [path for path in places if at(edit.config, path) is not None]
    plain = [path for path in places if "eagle_config" not in path and path != "norm_output"]
    if name == "feedback_normed" and not edit.nested:
        set_feedback(edit, places, value)
        return
    for path in there or [*plain, *places][:1]:
        edit.put(path, value)


def switch_off(edit: Edit, name: str) -> None:
    """A norm in front of fc, wherever anybody reads it."""
    names = (name, "use_aux_norm") if name == "fc_norm" else (name,)
    for path in (p for n in names for p in (n, f"eagle_config.{n}")):
        if at(edit.config, path):
            edit.put(path, False)


def set_feedback(edit: Edit, places: Sequence[str], value: bool) -> None:
    """What the next step is fed, in a flat config, whose norm_output is SpecForge's for the head.

    Its own key for the feedback stands beside it, so that the two readings do not contradict.
    """
    if value:
        if "norm_output" in places:
            edit.put("norm_output", True)
        edit.put(POST_NORM, True)
        return
    if at(edit.config, "norm_output"):
        edit.remove("norm_output")
    if at(edit.config, POST_NORM) is not None:
        edit.put(POST_NORM, False)


def set_rope(edit: Edit, rope: Rope) -> None:
    """A base and a scaling, in the spellings that the config has."""
    block = edit.layer
    new, old = f"{block}rope_parameters", f"{block}rope_scaling"
    scaling = {key: value for key, value in rope.scaling if key != LENGTH}
    spelled = [path for path in (new, old) if isinstance(at(edit.config, path), dict)]
    outer = f"{block}rope_theta"
    if at(edit.config, outer) is not None or new not in spelled:
        edit.put(outer, rope.theta)
    for path in spelled:
        base = {"rope_theta": rope.theta} if "rope_theta" in at(edit.config, path) else {}
        if path == new and outer.rpartition(".")[2] not in base and at(edit.config, outer) is None:
            base = {"rope_theta": rope.theta}
        if rope.kind == "default" and path == old:
            edit.remove(path)
        else:
            edit.put(path, {**base, "rope_type": rope.kind, **scaling})
    if not spelled and rope.kind != "default":
        edit.put(old, {"rope_type": rope.kind, **scaling})


def no_window(edit: Edit, layers: int) -> None:
    """Every layer sees the whole text."""
    edit.put(f"{edit.layer}layer_types", ["full_attention"] * layers)
    edit.put(f"{edit.layer}use_sliding_window", False)

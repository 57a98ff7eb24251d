"""Reading settings out of a config.json: typed, with the place each is from, faults gathered."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3.form import Setting, Shapes

LARGEST = sys.float_info.max
LARGEST_SIZE = 1 << 40  # no model's size is beyond it
MOST_LAYERS = 1000


@dataclass(frozen=True)
class Block:
    """An object inside a config: the config itself (`prefix` empty) or a nested one."""

    values: Mapping[str, Any]
    prefix: str
    read: set[str]  # the full names of all keys that were looked at, of every block

    def get(self, key: str) -> Any:
        """The value of a key, None where it is absent; the key then counts as read."""
        self.read.add(self.name(key))
        return self.values.get(key)

    def name(self, key: str) -> str:
        """The full name of a key of this block."""
        return f"{self.prefix}{key}"


@dataclass(kw_only=True)
class Reader:
    """A checkpoint being read. A key that stands in several blocks must say the same in all."""

    config: Mapping[str, Any]
    shapes: Shapes | None  # tensor names as in the file; None: the file was not examined
    layout: Setting[str]
    file: str  # the config's file name, for origins
    faults: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # full names of the keys that were looked at

    def block(self, key: str | None = None) -> Block:
        """The config itself, or the object at `key` (empty where it is absent or null)."""
        if key is None:
            return Block(self.config, "", self.read)
        values = self.config.get(key)
        if values is not None and not isinstance(values, Mapping):
            self.faults.append(f"'{key}' must be an object, not {values!r}")
            values = None
        return Block(values or {}, f"{key}.", self.read)

    def find(self, key: str, blocks: Sequence[Block]) -> tuple[Any, str] | None:
        """The value of a key and its full name; null counts as absent."""
        found = [
            (value, block.name(key)) for block in blocks if (value := block.get(key)) is not None
        ]
        for value, name in found[1:]:
            if value != found[0][0]:
                self.faults.append(f"{found[0][1]}={found[0][0]!r}, but {name}={value!r}")
        return found[0] if found else None

    def required(self, key: str, blocks: Sequence[Block]) -> Setting[int] | None:
        """A positive integer that has no default."""
        found = self.find(key, blocks)
        if found is None:
            self.faults.append(f"lacks '{blocks[0].name(key)}'")
            return None
        checked = self.setting(key, blocks, Setting(0, ""), "positive integer")
        return checked if checked.value else None

    def setting(
        self, key: str, blocks: Sequence[Block], default: Setting[Any], kind: str
    ) -> Setting[Any]:
        """A value of a kind (one of KINDS), or the default where the key is absent or wrong."""
        found = self.find(key, blocks)
        if found is None:
            return default
        value, name = found
        if not KINDS[kind](value):
            self.faults.append(f"'{name}' must be a {kind}, not {value!r}")
            return default
        return Setting(value, self.origin(name))

    def integer(self, key: str, blocks: Sequence[Block], default: Setting[int]) -> Setting[int]:
        """A positive integer."""
        return self.setting(key, blocks, default, "positive integer")

    def layers(self, key: str, blocks: Sequence[Block], default: Setting[int]) -> Setting[int]:
        """A number of layers, of which a drafter has few."""
        return self.setting(key, blocks, default, f"number of layers from 1 to {MOST_LAYERS}")

    def number(self, key: str, blocks: Sequence[Block], default: Setting[float]) -> Setting[float]:
        """A positive number."""
        setting = self.setting(key, blocks, default, "positive number")
        return Setting(float(setting.value), setting.origin)

    def switch(self, key: str, blocks: Sequence[Block], default: Setting[bool]) -> Setting[bool]:
        """A boolean."""
        return self.setting(key, blocks, default, "switch")

    def layer_ids(self, blocks: Sequence[Block]) -> Setting[tuple[int, ...] | None]:
        """The aux layer ids as written; an empty list counts as absent."""
        ids = self.find("eagle_aux_hidden_state_layer_ids", blocks)
        if ids is None or ids[0] == []:
            return Setting(None, f"{self.file} states none")
        value, name = ids
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            self.faults.append(f"'{name}' must be a list of whole numbers, not {value!r}")
            return Setting(None, self.origin(name))
        return Setting(tuple(value), self.origin(name))

    def layer_types(self, block: Block) -> list[str] | None:
        """The attention of each layer by name; None where it is not stated."""
        types = block.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
            self.faults.append(
                f"'{block.name('layer_types')}' must be a list of names, not {types!r}"
            )
            return None
        return types

    def num_aux(
        self,
        ids: Setting[tuple[int, ...] | None],
        blocks: Sequence[Block],
        target_hidden: int,
        default: Setting[int],
    ) -> Setting[int]:
        """A, from the ids, from its own key, else from fc's width."""
        stated = self.layers("num_aux_hidden_states", blocks, Setting(0, ""))
        if ids.value is not None:
            if stated.value not in (0, len(ids.value)):
                self.faults.append(
                    f"{stated.origin}={stated.value}, but {ids.origin} lists {len(ids.value)} ids"
                )
            return Setting(len(ids.value), ids.origin)
        if stated.value:
            return stated
        fc = (self.shapes or {}).get("fc.weight")
        if fc is not None and len(fc) == 2 and fc[1] % target_hidden == 0 and fc[1] > 0:
            return Setting(fc[1] // target_hidden, "fc.weight")
        return default

    def owner(self, tensor: str) -> Setting[str | None]:
        """Whether the file has a tensor that may be the target's."""
        if self.shapes is None:
            return Setting(None, "the weights were not examined")
        if tensor in self.shapes:
            return Setting("own", tensor)
        return Setting("target", f"no {tensor} in the file")

    def origin(self, name: str) -> str:
        """How a key's origin is written."""
        return f"{self.file}: {name}"


def is_integer(value: object) -> bool:
    """A whole number above zero that a size may be, no bool."""
    return type(value) is int and 0 < value < LARGEST_SIZE


def listed_names(value: object) -> list[str]:
    """The entries of a list as text; none where it is no list."""
    return [str(entry) for entry in value] if isinstance(value, list) else []


def is_number(value: object) -> bool:
    """A finite number above zero, no bool."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value <= LARGEST


KINDS = {
    "positive integer": is_integer,
    f"number of layers from 1 to {MOST_LAYERS}": lambda v: is_integer(v) and v <= MOST_LAYERS,
    "positive number": is_number,
    "whole number": lambda value: type(value) is int and value >= 0,
    "switch": lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
}

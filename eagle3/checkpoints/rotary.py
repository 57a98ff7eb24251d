"""Reading a rotary embedding in its old spelling (rope_theta, rope_scaling) and its new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eagle3.checkpoints.reading import Block, Reader, is_number
from eagle3.form import Rope, Setting

# The keys of each kind, as transformers reads them; the first ones must be there.
REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
OPTIONAL = {
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def read_rope(
    reader: Reader, block: Block, max_positions: int, default_theta: Setting[float]
) -> Setting[Rope]:
    """The rotary embedding that a block states; what its places say must agree."""
    faults = reader.faults
    spellings = {
        key: dict(value)
        for key in ("rope_parameters", "rope_scaling")
        if (value := as_object(reader, block, key))
    }
    theta: Setting[float] | None = None
    for name, value in [
        (block.name("rope_theta"), block.get("rope_theta")),
        *(
            (block.name(f"{key}.rope_theta"), s.pop("rope_theta", None))
            for key, s in spellings.items()
        ),
    ]:
        if value is None:
            continue
        if not is_number(value):
            faults.append(f"'{name}' must be a positive number, not {value!r}")
        elif theta is None:
            theta = Setting(float(value), reader.origin(name))
        elif float(value) != theta.value:
            faults.append(f"{name}={value!r}, but {theta.origin} is {theta.value!r}")
    theta = theta or default_theta
    outer = block.get("original_max_position_embeddings")
    if outer is not None and not is_number(outer):
        name = block.name("original_max_position_embeddings")
        faults.append(f"'{name}' must be a positive number, not {outer!r}")
        outer = None
    named = {block.name(key): plain(spelling, faults) for key, spelling in spellings.items()}
    for name, spelling in list(named.items())[1:]:
        first_name, first = next(iter(named.items()))
        if spelling != first:
            faults.append(f"{first_name} says {first}, but {name} says {spelling}")
    name, stated = next(iter(named.items()), (block.name("rope_theta"), {}))
    stated = dict(stated)
    kind = stated.pop("rope_type", "default")
    partial = [
        block.get("partial_rotary_factor"),
        stated.pop("partial_rotary_factor", None),
    ]
    if any(value not in (None, 1, 1.0) for value in partial):
        faults.append(
            f"{name}: only a part of each head is rotated, which this version does not run"
        )
    if not isinstance(kind, str) or kind not in REQUIRED:
        faults.append(f"{name} asks for '{kind}' rope scaling, which this version does not run")
        return Setting(Rope(theta=theta.value), theta.origin)
    scaling = check_scaling(kind, stated, name, faults)
    if kind == "dynamic":
        scaling["max_position_embeddings"] = max_positions
    if kind in ("llama3", "yarn"):
        inner = scaling.setdefault("original_max_position_embeddings", outer or max_positions)
        if outer is not None and outer != inner:
            faults.append(
                f"{block.name('original_max_position_embeddings')}={outer!r}, but {name} says {inner!r}"
            )
    if kind == "yarn" and theta.value <= 1:
        faults.append(f"{theta.origin} is {theta.value!r}, but yarn needs a base above 1")
    if kind == "llama3" and not scaling.get("low_freq_factor", 1) < scaling.get(
        "high_freq_factor", math.inf
    ):
        faults.append(f"{name} needs a high_freq_factor above its low_freq_factor")
    rope = Rope(theta=theta.value, kind=kind, scaling=tuple(sorted(scaling.items())))
    origin = theta.origin if kind == "default" else f"{reader.origin(name)}; theta: {theta.origin}"
    return Setting(rope, origin)


def as_object(reader: Reader, block: Block, key: str) -> Mapping[str, Any]:
    """The object at a key; anything else is a fault."""
    value = block.get(key)
    if value is not None and not isinstance(value, Mapping):
        reader.faults.append(f"'{block.name(key)}' must be an object or null, not {value!r}")
        return {}
    return value or {}


def plain(spelling: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """A scaling block with its kind under one key and without nulls."""
    values = {key: value for key, value in spelling.items() if value is not None}
    old, new = values.pop("type", None), values.get("rope_type")
    if old is not None and new is not None and old != new:
        faults.append(f"the rope scaling has type='{old}' and rope_type='{new}'")
    values["rope_type"] = new or old or "default"
    return values


def check_scaling(
    kind: str, stated: Mapping[str, Any], name: str, faults: list[str]
) -> dict[str, Any]:
    """The keys of a kind; what it lacks, does not know or cannot compute with is a fault."""
    known = (*REQUIRED[kind], *OPTIONAL.get(kind, ()))
    faults += [
        f"{name} lacks '{key}', which {kind} needs" for key in REQUIRED[kind] if key not in stated
    ]
    sound = {}
    for key, value in stated.items():
        if key not in known:
            faults.append(
                f"{name} has {key}={value!r}, which means nothing in '{kind}' rope scaling"
            )
        elif key == "truncate":
            if not isinstance(value, bool):
                faults.append(f"'{name}.truncate' must be a switch, not {value!r}")
            else:
                sound[key] = value
        elif not is_number(value) and not (key.startswith("mscale") and value == 0):
            faults.append(f"'{name}.{key}' must be a positive number, not {value!r}")
        else:
            sound[key] = value
    return sound

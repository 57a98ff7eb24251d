"""The types of what YAML and the command line hold, before the library converts anything.

A typed config would take `off` for a bool, 1 for an enum and 5 for text; here each is an error.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from orchestrator.errors import InputError
from orchestrator.schema import JOB_SCHEMAS, Config


def check_raw_types(found: Any, job: str) -> None:
    """YAML's own types must be the schema's: `off` and `no` are bools there, 1 is no enum's name."""
    for key, value, where in found:
        kind = schema_type(key, job)
        problem = None if kind is None else type_problem(value, kind)
        if problem:
            raise InputError(f"{key} in {where}: {problem}")


def schema_type(key: str, job: str) -> Any:
    """The annotated type at a dotted key of Config, or None where there is none to check."""
    kind: Any = Config
    for part in key.split("."):
        kind = without_none(kind)
        if kind is Any and part:
            return None
        if typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
            continue
        if not dataclasses.is_dataclass(kind):
            return None
        hints = typing.get_type_hints(kind)
        if part == "job" and kind is Config:
            kind = JOB_SCHEMAS[job]
        elif part in hints:
            kind = hints[part]
        else:
            return None
    return kind


def without_none(kind: Any) -> Any:
    """X for `X | None`."""
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    return args[0] if type(None) in typing.get_args(kind) and len(args) == 1 else kind


def type_problem(value: Any, kind: Any) -> str | None:
    """What is wrong with a raw value for a type, or None."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return None
    if value is None:
        return None if type(None) in typing.get_args(kind) else "null is not allowed"
    kind = without_none(kind)
    if typing.get_origin(kind) is dict:
        return None if isinstance(value, Mapping) else f"a mapping is needed, not {value!r}"
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if not isinstance(value, list | tuple):
            return (
                f"a list is needed, such as [{'-1,2,30' if item is int else 'a,b'}], not {value!r}"
            )
        return next((p for p in (type_problem(v, item) for v in value) if p), None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if isinstance(value, kind) or value in kind.__members__:
            return None
        return f"{value!r} is none of {', '.join(kind.__members__)}"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return None
    if isinstance(kind, type) and kind in (str, bool, int, float):
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        return None if right else f"{value!r} is no {kind.__name__}{as_text(value, kind)}"
    return None


def as_text(value: Any, kind: type) -> str:
    """How to say that a number is meant as text."""
    if kind is not str:
        return ""
    return f'; quote it if it is meant as text, as "{value}" within the shell\'s own quotes'

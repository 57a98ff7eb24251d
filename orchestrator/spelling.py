"""How names and values are spelled in MLflow, which refuses some and cuts others without a word."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping

# First parts of names that belong to the orchestrator's own metrics.
RESERVED = (
    "accuracy",
    "accept_length",
    "accept_length_uniform",
    "coverage",
    "tok_s",
    "step_accuracy",
    "counts",
    "runs",
)
LONG_PARAM = 500  # characters: MLflow servers cut longer ones, at a length that varies by version
LONG_TAG = 4000
NAME_LENGTH = 250


def canonical(value: object) -> str:
    """One spelling a value, since MLflow refuses 0.50 where it holds 0.5."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def flatten(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Leaves of nested mappings, their keys joined with '.'; lists are leaves."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def legal_name(raw: str) -> str:
    """`raw` as MLflow accepts it in a name; a legal name stays as it is."""
    parts = re.sub(r"[^/\w.\- :]", "_", raw)[:NAME_LENGTH].split("/")
    name = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    return "_" + name[1:] if name.startswith("..") else name


class Names:
    """Gives each raw name a legal one of its own, in order of appearance; notes what changed."""

    def __init__(self, taken: set[str], notes: list[str]) -> None:
        self._raw: dict[str, str] = {}
        self._taken = set(taken)
        self._notes = notes

    def of(self, kind: str, raw: str) -> str:
        """The legal name of `raw`; two raw names never share one."""
        if raw in self._raw:
            return self._raw[raw]
        name = legal_name(raw)
        own = kind == "metric" and name.split("/")[0] in RESERVED
        if own or name in self._taken:
            plain = name
            name = f"{plain[: NAME_LENGTH - 9]}-{hashlib.sha256(raw.encode()).hexdigest()[:8]}"
            self._notes.append(
                f"{kind} {raw!r} is filed as {name!r}: {plain!r} already names another {kind}"
            )
        elif name != raw:
            self._notes.append(f"{kind} {raw!r} is filed as {name!r}: MLflow refuses the name")
        self._raw[raw] = name
        self._taken.add(name)
        return name


def shorten(kind: str, name: str, value: str, limit: int, texts: dict[str, str]) -> str:
    """`value`, or its hash where it is over `limit`; it is then put into `texts`, by file name."""
    if len(value) <= limit:
        return value
    texts[f"values/{kind}/{name}.txt"] = value
    return "sha256:" + hashlib.sha256(value.encode()).hexdigest()

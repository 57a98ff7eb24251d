"""The golden file: accept lengths by what was measured and by engine version, for a person to commit.

    {"format": 1, "entries": [{"key": {…}, "versions": {"0.5.23": {"value": 2.5, …}}}]}

A key says everything that an accept length hangs on but the version (gate_figure.key_of).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from eagle3.releases import VersionKey, parse_version
from orchestrator.errors import InputError
from orchestrator.follow import write_atomic
from orchestrator.gate_figure import Figure, Gated
from orchestrator.locked import locked_folder

FORMAT = 1
KINDS: Mapping[str, type] = {"passes": int, "tokens": list, "rounds": list, "date": str, "run": str}
NUMBERS = re.compile(r"\[\n[\s\d,-]*\]")  # a list of whole numbers over several lines


def read_golden(path: Path) -> dict[str, Any] | None:
    """What a golden file holds; None where there is none. Raises InputError for any other file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"golden={path} cannot be read ({error})") from error
    try:
        data = json.loads(text, object_pairs_hook=once, parse_constant=refuse_constant)
        if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
            raise ValueError("it holds no entries")
        if data.get("format") != FORMAT:
            raise ValueError(f"its format is {data.get('format')!r}, not {FORMAT}")
        for number, entry in enumerate(data["entries"], start=1):
            check_entry(entry, f"entry {number}")
        keys = [entry["key"] for entry in data["entries"]]
        if any(key in keys[:at] for at, key in enumerate(keys)):
            raise ValueError("two entries have the same key")
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"golden={path} is no golden file ({error}); it stays as it is: name another, or mend it"
        ) from error
    return data


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which no name is lost because it stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def refuse_constant(name: str) -> None:
    """NaN and infinities, which JSON does not have."""
    raise ValueError(f"{name} is no number")


def check_entry(entry: Any, where: str) -> None:
    """Raises ValueError where an entry is not of the form."""
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), dict):
        raise ValueError(f"{where} has no key")
    versions = entry.get("versions")
    if not isinstance(versions, dict) or not versions:
        raise ValueError(f"{where} has no versions")
    for version, figure in versions.items():
        check_figure(figure, f"{version} of {where}")
        if len(figure["tokens"]) != entry["key"].get("number_of_prompts"):
            raise ValueError(f"{version} of {where} has no count for every prompt")


def check_figure(figure: Any, where: str) -> None:
    """Raises ValueError where a figure lacks something, or is not what its counts come to."""
    if not isinstance(figure, dict):
        raise ValueError(f"{where} is no figure")
    for name, kind in KINDS.items():
        if type(figure.get(name)) is not kind:
            raise ValueError(f"{where} has no {name}")
    for name in ("value", "low", "high"):
        if type(figure.get(name)) not in (int, float):
            raise ValueError(f"{where} has no {name}")
    if "patch" in figure and type(figure["patch"]) is not str:
        raise ValueError(f"{where} has a patch that is no digest")
    tokens, rounds = figure["tokens"], figure["rounds"]
    if any(type(count) is not int or count < 0 for count in (*tokens, *rounds)):
        raise ValueError(f"{where} has counts that are none")
    if len(tokens) != len(rounds) or not sum(rounds) or figure["passes"] < 1:
        raise ValueError(f"{where} has no count for every prompt")
    for name, counts in (("numerator", tokens), ("denominator", rounds)):
        if figure.get(name) != sum(counts):
            raise ValueError(f"{where}: its {name} is not the sum of its counts")
    if not abs(figure["value"] - sum(tokens) / sum(rounds)) < 1e-6:
        raise ValueError(f"{where}: its value is not its numerator over its denominator")
    if not -math.inf < figure["low"] <= figure["value"] <= figure["high"] < math.inf:
        raise ValueError(f"{where}: its value is not within its interval")


def stored(data: Mapping[str, Any] | None, key: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a key by engine version, the newest first; empty where there is no such key."""
    for entry in (data or {"entries": []})["entries"]:
        if entry["key"] == key:
            found = {name: figure_of(figure) for name, figure in entry["versions"].items()}
            return dict(sorted(found.items(), key=age, reverse=True))
    return {}


def check_patch(path: Path, versions: Mapping[str, Figure], run: Gated) -> None:
    """Raises InputError where the run's own version is stored with a shipped patch of other content."""
    mine = run.figure.patch
    theirs = versions[run.version].patch if run.version in versions else None
    if None not in (mine, theirs) and mine != theirs:
        there, here = (in_short({"patch": digest}, "patch") for digest in (theirs, mine))
        raise InputError(
            f"golden={path} has {run.version} with another {run.key['patch']} ({there} there, {here} "
            f"here), so the two are not compared; take {run.version} out of {path} and store again"
        )


def age(item: tuple[str, Figure]) -> tuple[VersionKey, str]:
    """What sorts versions: the release's number; where it has none, it is old, and the date counts."""
    version, figure = item
    try:
        return parse_version(version), figure.date
    except BadInput:
        return ((), -1), figure.date


def figure_of(raw: Mapping[str, Any]) -> Figure:
    """A checked figure of the file."""
    return Figure(
        **{name: raw[name] for name in ("value", "low", "high", "passes", "date", "run")},
        tokens=tuple(raw["tokens"]),
        rounds=tuple(raw["rounds"]),
        patch=raw.get("patch"),  # older files do not say it
    )


def with_figure(data: Mapping[str, Any] | None, run: Gated) -> dict[str, Any]:
    """The file's content with a run's figure under its key and version; all else as it was."""
    figure = run.figure
    raw = {
        **{name: getattr(figure, name) for name in ("value", "low", "high")},
        **{name: getattr(figure, name) for name in ("numerator", "denominator", "passes")},
        "tokens": list(figure.tokens),
        "rounds": list(figure.rounds),
        **{name: getattr(figure, name) for name in ("date", "run")},
        **({} if figure.patch is None else {"patch": figure.patch}),
    }
    content = dict(data or {"format": FORMAT, "entries": []})
    entries = list(content["entries"])
    for at, entry in enumerate(entries):
        if entry["key"] == run.key:
            entries[at] = {**entry, "versions": {**entry["versions"], run.version: raw}}
            break
    else:
        entries.append({"key": dict(run.key), "versions": {run.version: raw}})
    return {**content, "entries": entries}


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within the block no other gate stores into the file. Raises InputError where it has no lock."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(path.resolve().parent))
        except OSError as error:
            raise InputError(
                f"golden={path}: its folder cannot be locked ({error.strerror}), so that two commands "
                "could lose a figure; name a file on a local disk"
            ) from error
        yield


def write_golden(path: Path, data: Mapping[str, Any]) -> None:
    """Write the file whole, or leave the old one; a list of counts on a line. Raises InputError."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    text = NUMBERS.sub(lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)
    try:
        write_atomic(path.resolve(), f"{text}\n".encode())
    except OSError as error:
        raise InputError(f"golden={path} cannot be written ({error.strerror})") from error


def no_entry(path: Path, data: Mapping[str, Any] | None, key: Mapping[str, Any]) -> str:
    """Why there is nothing to hold a key against, and in what the closest entry differs."""
    if data is None or not data["entries"]:
        return f"golden={path} holds nothing yet; store a figure that you trust with store=true"
    closest = min(data["entries"], key=lambda entry: len(apart(entry["key"], key)))
    theirs = closest["key"]
    parts = [
        f"{part} ({in_short(theirs, part)} there, {in_short(key, part)} here)"
        for part in apart(theirs, key)
    ]
    return (
        f"golden={path} has no entry for this; the closest one ({theirs.get('engine')} "
        f"{', '.join(closest['versions'])}) differs in {' and '.join(parts)}; store=true adds an entry"
    )


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The parts in which two keys differ; one that only one of them has is such a part."""
    return [
        part
        for part in dict.fromkeys((*one, *other))
        if part not in one or part not in other or one[part] != other[part]
    ]


def in_short(key: Mapping[str, Any], part: str) -> str:
    """A part of a key in a sentence; of a digest its beginning."""
    if part not in key:
        return "not said"
    value = key[part]
    if isinstance(value, str) and value.startswith("sha256:"):
        return f"{value[:19]}…"
    return value if isinstance(value, str) else json.dumps(value)

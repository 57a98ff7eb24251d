"""What a run's folder says, in MLflow's terms. Reads files, touches no store, imports no mlflow.

Every value comes from the folder alone, times included, so that filing twice gives the same points.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.errors import InputError, TrackingError
from orchestrator.filing_search import finalist_result, tags_of, texts_of
from orchestrator.spelling import (
    LONG_PARAM,
    LONG_TAG,
    NAME_LENGTH,
    Names,
    canonical,
    flatten,
    legal_name,
    shorten,
)

FILES = (
    "config.yaml",
    "run.json",
    "request.json",
    "log",
    "events.jsonl",
    "result.json",
    "exit.json",
    "environment.json",
    "gpus.json",
    "preflight.json",
    "verdict.json",
    "snapshot.diff",
)
EXPERIMENT = "experiment/diagnose.yaml"  # what `diagnose` wrote of what it was asked
# The config's sections that make params; host and experiment are params of their own.
SECTIONS = ("wiring", "target", "drafter", "data", "engine", "job")


class FolderError(TrackingError):
    """The folder holds something that must not be filed; the store is not at fault."""


class Point(NamedTuple):
    """One metric point; `timestamp` in ms since 1970."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Filing:
    """Everything that MLflow is to hold about one run; times in ms since 1970.

    `texts` are artifacts that are no file of the folder, by file name: values that are too long for
    a param or a tag, tables. `ended` is None exactly where `status` is RUNNING. `children` are runs
    below this one, which end before it does; `name` is what a person sees, where not the id.
    """

    run_id: str
    started: int
    ended: int | None
    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: tuple[Point, ...]
    texts: Mapping[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    name: str | None = None
    children: tuple[Filing, ...] = ()


def read_run(folder: Path) -> Filing:
    """Read a run's folder.

    Raises:
        InputError: there is no run in `folder`.
        FolderError: a file is not readable or a figure is not a finite number.
    """
    run = read_json(folder / "run.json")
    config_bytes = _read(folder / "config.yaml")
    if run is None or config_bytes is None:
        raise InputError(f"{folder} is not a run's folder: it has no run.json and config.yaml.")
    result = read_json(folder / "result.json")
    ended_how = read_json(folder / "exit.json")
    verdict = read_json(folder / "verdict.json")
    events, notes = _events(folder / "events.jsonl")

    run_id = check_id(run.get("run_id"), folder)
    texts = texts_of(result or {})
    if (own := _read(folder / EXPERIMENT)) is not None:
        texts[EXPERIMENT] = own.decode("utf-8", "replace")
    params = _params(config_bytes, run, result, texts, notes)
    points = _result_points(folder / "result.json", result)
    if run.get("job") == "script":  # its result repeats what it printed on the way
        known = {*((result or {}).get("metrics") or {}), *((result or {}).get("curves") or {})}
        events = [event for event in events if event.get("name") not in known]
    points += _user_points(events, str(run.get("case_id")), points, notes)
    tags = _tags(config_bytes, run, result, ended_how, verdict)
    tags |= _where(
        read_json(folder / "environment.json") or {}, read_json(folder / "preflight.json") or {}
    )
    said = [str(note) for note in (result or {}).get("notes") or []]
    if said or notes:
        tags["notes"] = "\n".join(said + notes)
    tags |= tags_of(result or {})

    status = _status(result, ended_how, verdict)
    return Filing(
        run_id=run_id,
        started=time_ms(folder / "run.json", run, "created"),
        ended=None if status == "RUNNING" else _ended(run, result, ended_how, events),
        status=status,
        params=params,
        tags={key: shorten("tag", key, value, LONG_TAG, texts) for key, value in tags.items()},
        points=tuple(points),
        texts=texts,
        files=tuple(folder / name for name in FILES if (folder / name).is_file()),
        notes=tuple(notes),
        children=tuple(
            _finalist(folder / "result.json", run_id, number, row, result or {})
            for number, row in enumerate((result or {}).get("ranked") or (), start=1)
        ),
    )


def _finalist(
    path: Path, run_id: str, number: int, row: Mapping[str, Any], result: Mapping[str, Any]
) -> Filing:
    """A ranked wiring of a search, as a run below the search's own."""
    own = finalist_result(row, result)
    texts: dict[str, str] = {}
    params = {
        "rank": number,
        "changed": row["changed"],
        "teacher": row["teacher"],
        "resolved.states": row["states"],
        **dict(flatten("wiring", row["wiring"])),
    }
    tags = {"finalist_of": run_id, "tied": row["tied"], **_truths(own)}
    return Filing(
        run_id=f"{run_id}.{number:02d}",
        started=time_ms(path, own, "started"),
        ended=time_ms(path, own, "ended"),
        status="FINISHED",
        params={k: shorten("param", k, canonical(v), LONG_PARAM, texts) for k, v in params.items()},
        tags={
            k: shorten("tag", k, canonical(v), LONG_TAG, texts)
            for k, v in tags.items()
            if v is not None
        },
        points=tuple(_result_points(path, own)),
        texts=texts,
        files=(),
        notes=(),
        name=f"{number} {row['name']}"[:NAME_LENGTH],
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file."""
    data = _read(path)
    if data is None:
        return None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise FolderError(f"{path} is not valid JSON ({error}); fetch the run again.") from error
    if not isinstance(value, dict):
        raise FolderError(f"{path} does not hold a JSON object; fetch the run again.")
    return value


def time_ms(path: Path, record: Mapping[str, Any], key: str) -> int:
    """The time under `key`, in ms since 1970."""
    seconds = _finite(record.get(key))
    if not seconds or seconds < 0:
        raise FolderError(f"{path} has no time under {key!r}; fetch the run again.")
    return _ms(seconds)


def check_id(run_id: object, folder: Path) -> str:
    """A run's or sweep's id, which goes into MLflow's search as it is."""
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
        raise FolderError(
            f"{folder} has the id {run_id!r}; ids are letters, digits, '.', '_', '-'."
        )
    return run_id


def _params(
    config_bytes: bytes,
    run: Mapping[str, Any],
    result: Mapping[str, Any] | None,
    texts: dict[str, str],
    notes: list[str],
) -> dict[str, str]:
    import yaml

    try:
        config = yaml.safe_load(config_bytes)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FolderError(
            f"config.yaml of run {run.get('run_id')} is not valid YAML ({error}); fetch it again."
        ) from error
    config = config if isinstance(config, Mapping) else {}
    values: dict[str, object] = {}
    for section in SECTIONS:
        if section in config:
            values.update(flatten(section, config[section]))
    if wiring := (result or {}).get("wiring"):
        values.update(flatten("resolved", wiring))
    for part in ("bench", "probe"):
        if patch := ((result or {}).get(part) or {}).get("patch"):
            values.update(flatten("resolved.patch", patch))
    if not isinstance(config.get("job"), Mapping):
        values["job"] = run.get("job")
    values["host"] = run.get("host")
    values["experiment"] = run.get("experiment")
    names = Names(set(), notes)
    params = {}
    for raw, value in values.items():
        name = names.of("param", raw)
        params[name] = shorten("param", name, canonical(value), LONG_PARAM, texts)
    return params


def _tags(
    config_bytes: bytes,
    run: Mapping[str, Any],
    result: Mapping[str, Any] | None,
    ended_how: Mapping[str, Any] | None,
    verdict: Mapping[str, Any] | None,
) -> dict[str, str]:
    snapshot = run.get("snapshot") or {}
    tags: dict[str, object] = {
        "orchestrator.case_id": run.get("case_id"),
        "orchestrator.sweep": run.get("sweep"),
        "experiment": run.get("experiment"),
        "claim": run.get("claim"),
        "predict": run.get("predict"),
        "host": run.get("host"),
        "overrides": run.get("overrides") or None,
        "snapshot": snapshot.get("digest"),
        "snapshot.commit": snapshot.get("commit") or "none",
        "config.sha256": hashlib.sha256(config_bytes).hexdigest(),
    }
    if verdict is not None:
        tags["verdict"] = verdict.get("verdict")
        tags["verdict.reason"] = verdict.get("reason")
    if ended_how is not None:
        tags["exit"] = ended_how.get("state")
        tags["exit.code"] = ended_how.get("rc")
        tags["exit.signal"] = ended_how.get("signal_name") or ended_how.get("signal")
        tags["exit.out_of_memory"] = ended_how.get("out_of_memory")
    if result is not None:
        for what, fingerprint in (result.get("fingerprints") or {}).items():
            tags[legal_name(what)] = fingerprint
        if found := result.get("findings"):
            tags["findings"] = "\n".join(f"{f['severity']} {f['name']}: {f['what']}" for f in found)
        if error := result.get("error"):
            tags["error"] = f"{error.get('kind')}: {error.get('message')}"
        tags |= _truths(result)
    return {key: canonical(value) for key, value in tags.items() if value is not None}


def _truths(result: Mapping[str, Any]) -> dict[str, str | None]:
    """What each figure and each curve is compared with."""
    tags: dict[str, str | None] = {}
    for name, figure in (result.get("metrics") or {}).items():
        tags[f"truth.{legal_name(name)}"] = figure.get("truth") if figure else None
    for name, curve in (result.get("curves") or {}).items():
        truths = {str(point["truth"]) for point in curve if point.get("truth") is not None}
        tags[f"truth.{legal_name(name)}"] = ", ".join(sorted(truths)) or None
    return tags


def _where(environment: Mapping[str, Any], preflight: Mapping[str, Any]) -> dict[str, str]:
    """Which machine it was, and what there was not as in the run before."""
    tags: dict[str, object] = {
        "hostname": environment.get("hostname"),
        "environment": environment.get("fingerprint"),
    }
    if changes := preflight.get("differences"):
        tags["environment.changes"] = "\n".join(map(str, changes))
        tags["environment.compared_with"] = preflight.get("compared_with")
    return {key: canonical(value) for key, value in tags.items() if value is not None}


def _result_points(path: Path, result: Mapping[str, Any] | None) -> list[Point]:
    if result is None:
        return []
    timestamp = time_ms(path, result, "ended")
    curves = result.get("curves") or {}
    figures = [
        (name, _step_of(figure or {}, curves.get(name) or []), figure)
        for name, figure in (result.get("metrics") or {}).items()
    ]
    for name, curve in curves.items():
        figures += [(name, point["step"], point) for point in curve]
    points: dict[Point, None] = {}
    for name, step, figure in figures:
        name = legal_name(name)
        for part, key in (
            ("value", name),
            ("low", f"{name}/low"),
            ("high", f"{name}/high"),
            ("numerator", f"counts/{name}/numerator"),
            ("denominator", f"counts/{name}/denominator"),
        ):
            value = (figure or {}).get(part)
            if value is None:
                continue
            number = _finite(value)
            if number is None:
                raise FolderError(
                    f"{path} says {name}.{part} = {value!r} at step {step}, which is not a finite "
                    "number and is not filed; correct the job and run it again."
                )
            points[Point(key, number, timestamp, int(step))] = None
    return list(points)


def _step_of(figure: Mapping[str, Any], curve: Sequence[Mapping[str, Any]]) -> int:
    """Where a figure stands that has a curve of the same name: MLflow shows the last step's."""
    if not curve:
        return 0
    last = max(curve, key=lambda point: int(point["step"]))
    return int(last["step"]) + int(figure.get("value") != last["value"])


def _user_points(
    events: list[dict[str, Any]], case_id: str, own: list[Point], notes: list[str]
) -> list[Point]:
    names = Names({point.key for point in own}, notes)
    points: dict[Point, None] = {}  # a repeated event is one point
    left_out: dict[str, int] = {}
    for event in events:
        if event.get("type") != "metric" or event.get("case_id") not in (None, case_id):
            continue
        name, number, step = str(event.get("name")), _finite(event.get("value")), event.get("step")
        step = 0 if step is None else step
        if number is None or not isinstance(step, int) or not _finite(event.get("t")):
            left_out[name] = left_out.get(name, 0) + 1
            continue
        points[Point(names.of("metric", name), number, _ms(event["t"]), step)] = None
    notes += [
        f"metric {name!r}: {count} points left out, whose value is not a finite number"
        for name, count in left_out.items()
    ]
    return list(points)


def _events(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The events, and a note where a line is not one; a last line cut short is not there yet."""
    lines = (_read(path) or b"").split(b"\n")
    events, unreadable = [], 0
    for line in lines[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        else:
            unreadable += 1
    return events, [f"events.jsonl: {unreadable} lines are not events"] if unreadable else []


def _status(
    result: Mapping[str, Any] | None,
    ended_how: Mapping[str, Any] | None,
    verdict: Mapping[str, Any] | None,
) -> str:
    """MLflow's status. An answered case is FINISHED whatever became of the job after it."""
    if result is not None:
        return "FINISHED" if result.get("status") == "ok" else "FAILED"
    if ended_how is not None:
        stopped = ended_how.get("state") in ("killed", "cancelled", "timed_out")
        return "KILLED" if stopped else "FAILED"
    # Vanished: nobody is left to write exit.json, but the run was judged, which ends it.
    return "RUNNING" if verdict is None else "FAILED"


def _ended(
    run: Mapping[str, Any],
    result: Mapping[str, Any] | None,
    ended_how: Mapping[str, Any] | None,
    events: list[dict[str, Any]],
) -> int:
    times = [(result or {}).get("ended"), (ended_how or {}).get("ended")]
    times += [event.get("t") for event in reversed(events)] + [run["created"]]
    return _ms(next(time for time in map(_finite, times) if time))


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FolderError(f"{path} cannot be read ({error.strerror}).") from error

"""The files of a run folder that more than one program writes or reads."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput

CASE_ID = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,120}", re.ASCII)
DEVICES = ("cpu", "cuda", "auto")
JOB = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


def write_json_atomic(path: Path, data: object) -> None:
    """Writes JSON under a temporary name, on to the disk, then under its own name.

    Raises ValueError for NaN and infinities, TypeError for what JSON cannot hold, OSError where the
    disk refuses; the file that stood there before is then untouched and no temporary name is left.
    """
    path = Path(path)
    text = json.dumps(data, allow_nan=False, indent=1) + "\n"
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temp.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def read_request(run_dir: Path) -> dict[str, Any]:
    """The run's request.json, with the keys that every job has checked. Raises BadInput."""
    path = Path(run_dir) / "request.json"
    try:
        request = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not isinstance(request, dict):
        raise BadInput(f"{path} is not a JSON object")
    if not isinstance(request.get("job"), str) or not JOB.fullmatch(request["job"]):
        raise BadInput(f"{path}: job {request.get('job')!r} is not the name of a job")
    threads = request.get("threads")
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise BadInput(f"{path}: threads {threads!r} is not a whole number of at least 1")
    _check_seconds(path, request, "timeout_s", 0.0, optional=True)
    _check_seconds(path, request, "grace_s", -1.0, optional="grace_s" not in request)
    _check_machine(path, request)
    _check_cases(path, request.get("cases"))
    return request


def _check_machine(path: Path, request: dict[str, Any]) -> None:
    """The keys that say where on the machine a job runs; each may be missing."""
    if request.get("device", "cpu") not in DEVICES:
        raise BadInput(f"{path}: device {request['device']!r} is not one of {', '.join(DEVICES)}")
    if not _is_list_of(str, request.get("checkouts", [])):
        raise BadInput(f"{path}: checkouts is not a list of paths")
    if "gpus" not in request:
        return
    gpus = request["gpus"]
    wanted = gpus.get("wanted") if isinstance(gpus, dict) else ()
    if not (wanted is None or _is_list_of(int, wanted)) or not isinstance(gpus.get("lease"), bool):
        raise BadInput(f"{path}: gpus {gpus!r} is not {{wanted: [numbers] or null, lease: bool}}")
    if "device" not in request:
        raise BadInput(f"{path}: gpus stands there without a device")


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _check_seconds(
    path: Path, request: dict[str, Any], name: str, above: float, *, optional: bool
) -> None:
    value = request.get(name)
    if value is None and optional:
        return
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if number is not None and math.isfinite(number) and number > above:
        return
    raise BadInput(f"{path}: {name} {value!r} is not a number of seconds")


def _check_cases(path: Path, cases: object) -> None:
    if not isinstance(cases, list) or not cases:
        raise BadInput(f"{path}: cases is not a list of at least one case")
    seen = set()
    for case in cases:
        case_id = case.get("case_id") if isinstance(case, dict) else None
        if not isinstance(case_id, str) or not CASE_ID.fullmatch(case_id):
            raise BadInput(f"{path}: the case_id {case_id!r} is not a plain file name")
        if case_id in seen:
            raise BadInput(f"{path}: the case_id {case_id!r} stands there twice")
        seen.add(case_id)


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Within the block, a folder to write to; at its end it gets its name `out`, or goes.

    Raises BadInput where it cannot be written, or where `out` has come to be meanwhile.
    """
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
        yield temporary
        temporary.rename(out)
    except OSError as error:
        where = error.filename or out
        raise BadInput(f"{where} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

"""A run's records on this machine: its folder, why it gave no answer, the exit code they add up to."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from orchestrator.channel import RefusedError
from orchestrator.config import Resolved
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.follow import Ended, write_atomic
from orchestrator.paths import CLONE, RunPaths, runs_folder
from orchestrator.plan import CASE
from orchestrator.schema import HostConfig
from orchestrator.snapshot import Snapshot

BAD_INPUT = ("BadInput", "InputError")  # raised on the host, and here


def new_folder(results: Path, run_id: str) -> RunPaths:
    """The folder of a new run, empty."""
    paths = RunPaths(runs_folder(results) / run_id)
    try:
        paths.folder.mkdir(parents=True)
        paths.owner.touch()
    except OSError as error:
        raise no_room(paths, error) from error
    return paths


def write_records(
    paths: RunPaths, resolved: Resolved, snapshot: Snapshot, sweep: str | None
) -> None:
    """All that is known of a run before it starts; with run.json, the last, it can be seen."""
    record = {
        "run_id": paths.folder.name,
        "case_id": CASE,
        "experiment": resolved.experiment,
        "claim": resolved.config["claim"],
        "predict": resolved.config["predict"],
        "strict": resolved.config["strict"],
        "detach": resolved.config["detach"],
        "job": resolved.config["job"]["name"],
        "host": resolved.config["host"]["name"],
        "snapshot": {"digest": snapshot.digest, "commit": snapshot.commit},
        "overrides": list(resolved.overrides),
        "sweep": sweep,
        "created": time.time(),
    }
    try:
        write_atomic(paths.config, resolved.yaml.encode())
        paths.snapshot_diff.write_text(snapshot.diff, encoding="utf-8")
        paths.log.touch()
        write_json(paths.run, record)
    except OSError as error:
        raise no_room(paths, error) from error


def no_room(paths: RunPaths, error: OSError) -> InputError:
    """What to say where a run's folder cannot be written."""
    return InputError(
        f"{paths.folder} cannot be written ({error.strerror}); set results=FOLDER to a place with room"
    )


def reference(folder: Path) -> str:
    """What names a run to the verbs: its id, or its folder where that is not in the usual place."""
    usual = folder.parent == runs_folder(CLONE / "results")
    return folder.name if usual else shlex.quote(str(folder))


def find_run(name: str, results: Path) -> Path:
    """The run that is meant: its id, a part of it that no other has, its folder, or `last`.

    Raises InputError where there is none, or more than one.
    """
    root = runs_folder(results)
    if name == "last":
        found = all_runs(results)[-1:]
    elif "/" in name:
        found = [Path(name).expanduser().absolute()]
    elif (root / name).is_dir() and name not in ("", ".", ".."):
        found = [root / name]
    else:
        found = [folder for folder in all_runs(results) if name and name in folder.name]
    if len(found) > 1:
        ids = ", ".join(folder.name for folder in found[-3:])
        raise InputError(
            f"{len(found)} runs have {name!r} in their id ({ids}, …); write more of it"
        )
    if not found or not RunPaths(found[0]).run.is_file():
        where = found[0] if found else root
        raise InputError(
            f"there is no run {name} in {where}; `runs` lists them, results=FOLDER says where they are"
        )
    return found[0]


def results_of(given: str | None) -> Path:
    """The folder that a verb's `results=` names; quotes as Hydra wants them may be around it.

    Raises InputError where no results are kept there.
    """
    if given is None:
        return CLONE / "results"
    if len(given) > 1 and given[0] == given[-1] and given[0] in "'\"":
        given = given[1:-1].replace(f"\\{given[0]}", given[0])
    folder = Path(given).expanduser().absolute()
    if not given or not runs_folder(folder).is_dir():
        raise InputError(f"no runs are kept in results={given}: there is no {runs_folder(folder)}")
    return folder


def all_runs(results: Path) -> list[Path]:
    """The folders of all runs on this machine, oldest first."""
    return sorted(p for p in runs_folder(results).glob("*") if RunPaths(p).run.is_file())


def record_of(paths: RunPaths) -> dict[str, Any]:
    """A run's run.json. Raises OrchestratorError where it cannot be read."""
    return read_record(paths.run)


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object of a run's or a sweep's folder. Raises OrchestratorError where there is none."""
    try:
        record = json.loads(path.read_bytes())
        if isinstance(record, dict):
            return record
        problem = "it is no JSON object"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise OrchestratorError(
        f"{path} cannot be read ({problem}); if the run is of no use any more, remove its folder"
    )


def config_of(paths: RunPaths) -> dict[str, Any]:
    """The resolved config of a run, as it was written when it was made.

    Raises OrchestratorError where it cannot be read.
    """
    try:
        config: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(paths.config))  # type: ignore[assignment]
        return config
    except (OSError, ValueError, YAMLError) as error:
        raise OrchestratorError(
            f"{paths.config} cannot be read ({' '.join(str(error).split())}); if the run is of no use "
            "any more, remove its folder"
        ) from error


def open_config(paths: RunPaths) -> dict[str, Any]:
    """The config of a run that is to be taken up on its host.

    Raises OrchestratorError where it cannot be read or another version of the orchestrator wrote it.
    """
    config = config_of(paths)
    known = {field.name for field in dataclasses.fields(HostConfig)}
    if missing := known - set(config.get("host") or {}):
        raise OrchestratorError(
            f"{paths.config} has no host.{min(missing)}: another version of the orchestrator wrote it; "
            "take the run up with that one, or remove its folder"
        )
    return config


@contextlib.contextmanager
def owned(paths: RunPaths) -> Iterator[bool]:
    """Within the block this command is the one that brings the run to its end, if it yields True.

    The kernel gives the ownership back when a command dies, however it dies.
    """
    with paths.owner.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def new_run_id(name: str) -> str:
    """A name for a run that sorts by time and is safe in paths and shells."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:48].strip("-.") or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{secrets.token_hex(3)}"


def why_not(ended: Ended, paths: RunPaths) -> str:
    """Why a job gave no answer, in one sentence."""
    if ended.result is not None and ended.result.get("error"):
        error = ended.result["error"]
        plain = error["kind"] in BAD_INPUT
        return str(error["message"]) if plain else f"{error['kind']}: {error['message']}"
    state = ended.state
    last = last_line(paths.log)
    said = f"; its last line: {last}" if last else ""
    words = {
        "finished": f"the job ended with exit code {state.get('rc')} and left no result{said}",
        "killed": f"the job was killed by {state.get('signal_name')}"
        + (
            f" (out of memory, by the {state['out_of_memory']})"
            if state.get("out_of_memory")
            else ""
        )
        + said,
        "timed_out": "the job ran past its time limit (job.timeout_s) and was stopped",
        "cancelled": "the run was cancelled",
        "vanished": f"the job vanished: {state.get('reason', 'its supervisor is gone')}",
        "never_started": "the command ended before the job was started",
    }
    return words[state["state"]]


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    if not path.is_file():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 4096))
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def failed_result(error: OrchestratorError) -> dict[str, Any]:
    """The result of a run that failed on this side, before or beside the job."""
    # An interpreter that cannot be run is what the config asked for, not the host's fault.
    asked_for = isinstance(error, RefusedError) and error.kind == "python"
    kind = "InputError" if asked_for else type(error).__name__
    return {
        "case_id": CASE,
        "status": "failed",
        "error": {"kind": kind, "message": str(error), "traceback": ""},
        "started": time.time(),
        "ended": time.time(),
        "metrics": {},
        "curves": {},
    }


def write_json(path: Path, data: Any) -> None:
    """A JSON file under its final name only when complete."""
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False).encode())


def write_patched(paths: RunPaths, result: Mapping[str, Any] | None) -> list[str]:
    """Keep the drafter's config.json as a diagnosis wants it, and the programs for its tensors.

    The names of the files, in the order in which they are to be used.
    """
    diagnosis = (result or {}).get("diagnosis") or {}
    programs = {
        f"{cause['kind']}.py": program
        for cause in diagnosis.get("causes") or []
        if (program := program_of(cause)) is not None
    }
    config = diagnosis.get("config")
    if config is None and not programs:
        return []
    paths.patched.parent.mkdir(exist_ok=True)
    if config is not None:
        write_json(paths.patched, config)
    for name, program in programs.items():
        write_atomic(paths.patched.parent / name, program.encode())
    return [*([paths.patched.name] if config is not None else []), *programs]


def program_of(cause: Mapping[str, Any]) -> str | None:
    """The program of a cause's first fix; None: that is none over tensors."""
    fix: Mapping[str, Any] = next(iter(cause["fixes"]), {})
    program: str | None = fix.get("snippet") if fix.get("possible") else None
    return program


def exit_code(folders: list[Path], failed: bool = False) -> int:
    """0 answered, 1 not answered or not filed, 2 bad input, 3 refuted with strict=true."""
    codes = {code_of(RunPaths(folder)) for folder in folders} | ({1} if failed else set())
    return next((code for code in (1, 2, 3) if code in codes), 0)


def code_of(paths: RunPaths) -> int:
    """The exit code of one run, from its records."""
    if not paths.verdict.is_file():
        return 0 if record_of(paths).get("detach") else 1
    verdict = json.loads(paths.verdict.read_bytes())["verdict"]
    if verdict == "not_answered":
        result = json.loads(paths.result.read_bytes()) if paths.result.is_file() else {}
        return 2 if (result.get("error") or {}).get("kind") in BAD_INPUT else 1
    if not paths.filed.is_file():
        return 1
    return 3 if verdict == "refuted" and json.loads(paths.run.read_bytes())["strict"] else 0

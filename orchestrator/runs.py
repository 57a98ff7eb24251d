"""A run's records on this machine: its folder, why it gave no answer, the exit code they add up to."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

from orchestrator.channel import RefusedError
from orchestrator.config import Resolved
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.follow import Ended, write_atomic
from orchestrator.paths import RunPaths, runs_folder
from orchestrator.plan import CASE
from orchestrator.snapshot import Snapshot

BAD_INPUT = ("BadInput", "InputError")  # raised on the host, and here


def create_folder(
    results: Path, run_id: str, resolved: Resolved, snapshot: Snapshot, sweep: str | None
) -> RunPaths:
    """The run's folder with all that is known before it starts."""
    paths = RunPaths(runs_folder(results) / run_id)
    try:
        paths.folder.mkdir(parents=True)
        paths.config.write_text(resolved.yaml, encoding="utf-8")
        paths.snapshot_diff.write_text(snapshot.diff, encoding="utf-8")
        paths.log.touch()
        record = {
            "run_id": run_id,
            "case_id": CASE,
            "experiment": resolved.experiment,
            "claim": resolved.config["claim"],
            "predict": resolved.config["predict"],
            "strict": resolved.config["strict"],
            "job": resolved.config["job"]["name"],
            "host": resolved.config["host"]["name"],
            "snapshot": {"digest": snapshot.digest, "commit": snapshot.commit},
            "overrides": list(resolved.overrides),
            "sweep": sweep,
            "created": time.time(),
        }
        write_json(paths.run, record)
    except OSError as error:
        raise InputError(
            f"{paths.folder} cannot be written ({error.strerror}); set results=FOLDER to a place "
            "with room"
        ) from error
    return paths


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
    }
    return words[state["state"]]


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    if not path.is_file():
        return ""
    lines = path.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
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


def exit_code(folders: list[Path], failed: bool = False) -> int:
    """0 answered, 1 not answered or not filed, 2 bad input, 3 refuted with strict=true."""
    codes = {code_of(RunPaths(folder)) for folder in folders} | ({1} if failed else set())
    return next((code for code in (1, 2, 3) if code in codes), 0)


def code_of(paths: RunPaths) -> int:
    """The exit code of one run, from its records."""
    if not paths.verdict.is_file():
        return 1
    verdict = json.loads(paths.verdict.read_bytes())["verdict"]
    if verdict == "not_answered":
        result = json.loads(paths.result.read_bytes()) if paths.result.is_file() else {}
        return 2 if (result.get("error") or {}).get("kind") in BAD_INPUT else 1
    if not paths.filed.is_file():
        return 1
    return 3 if verdict == "refuted" and json.loads(paths.run.read_bytes())["strict"] else 0

"""A multirun: one parent, a run a point, and no point takes the others down."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.config import Resolved
from orchestrator.errors import OrchestratorError
from orchestrator.loop import run
from orchestrator.paths import RunPaths, sweeps_folder
from orchestrator.pickup import file_sweep
from orchestrator.runs import owned, write_json
from orchestrator.session import Session
from orchestrator.show import error_line, wiring_in_short


def run_sweep(session: Session, points: Sequence[Resolved]) -> None:
    """Run all points as one sweep, which this command owns until it is filed."""
    with ExitStack() as stack:
        run_points(session, points, stack)


def run_points(session: Session, points: Sequence[Resolved], stack: ExitStack) -> None:
    """Run every point in turn; each is shown and filed as it ends, then all of them together.

    A point that fails does not take the others down; one that is cancelled ends the sweep.
    """
    results = Path(points[0].config["results"])
    sweep_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = sweeps_folder(results) / sweep_id
    record: dict[str, Any] = {
        "sweep_id": sweep_id,
        "experiment": common(point.experiment for point in points),
        "overrides": sorted({o for point in points for o in point.overrides}),
        "runs": [],
        "created": time.time(),
        "ended": None,
    }

    def begun(run_id: str) -> None:
        """Before a run starts, so that a command that dies leaves no run outside its sweep."""
        record["runs"].append(run_id)
        write_json(folder / "sweep.json", record)

    try:
        folder.mkdir(parents=True)
        stack.enter_context(owned(RunPaths(folder)))
        for number, point in enumerate(points, start=1):
            session.show.line(f"run {number} of {len(points)}", style="bold")
            try:
                run(session, point, sweep=sweep_id, begun=begun)
            except OrchestratorError as error:
                session.failed = True
                error_line(str(error))
            if session.cancelled:
                session.failed = True
                session.show.line(f"cancelled: {len(points) - number} runs were not started")
                break
        if all(RunPaths(path).verdict.is_file() for path in session.folders):
            record["ended"] = time.time()  # else whoever takes up the last one closes the sweep
            write_json(folder / "sweep.json", record)
    except OSError as error:
        raise OrchestratorError(
            f"{error.filename or folder} cannot be written ({error.strerror}); make room or set "
            "results=FOLDER"
        ) from error
    session.show.sweep([row(RunPaths(path)) for path in session.folders])
    if record["runs"]:
        file_sweep(session, folder)


def common(names: Any) -> str | None:
    """The one experiment of all points, or their names joined."""
    found = sorted({name for name in names if name})
    return "+".join(found) or None


def row(paths: RunPaths) -> dict[str, Any]:
    """A run as one line of the sweep's table."""
    request = json.loads(paths.request.read_bytes()) if paths.request.is_file() else {}
    result = json.loads(paths.result.read_bytes()) if paths.result.is_file() else {}
    run = json.loads(paths.run.read_bytes())
    verdict = "started" if run["detach"] else "not_answered"
    if paths.verdict.is_file():
        verdict = json.loads(paths.verdict.read_bytes())["verdict"]
    wiring = (request.get("cases") or [{}])[0].get("wiring")
    name = run["experiment"] or ""

    def figure(metric: str) -> str:
        found = (result.get("metrics") or {}).get(metric)
        return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else "-"

    return {
        "experiment": name,
        "wiring": wiring_in_short(wiring) if wiring else "",
        "accuracy": figure("accuracy"),
        "accept_length": figure("accept_length"),
        "verdict": verdict,
    }

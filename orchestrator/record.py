"""Files runs and sweeps in MLflow, from their folders, again and again to the same end state.

The folder is the truth and MLflow its mirror: a filing that was cut short, by a kill or a full
disk, is made whole by the next one. `heal` finds what was left RUNNING.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import InputError, TrackingError
from orchestrator.filing import (
    Filing,
    FolderError,
    Point,
    check_id,
    read_json,
    read_run,
    time_ms,
)
from orchestrator.spelling import LONG_TAG, canonical, shorten
from orchestrator.tracking import (
    Store,
    Tracking,
    default_tracking,
    how_to_open,
    local_path,
    locked,
    open_store,
    store_errors,
)

__all__ = [
    "Filed",
    "FolderError",
    "Store",
    "Tracking",
    "default_tracking",
    "fill_run",
    "fill_sweep",
    "heal",
    "how_to_open",
    "open_store",
]

RUN_TAG = "orchestrator.run_id"
SWEEP_TAG = "orchestrator.sweep_id"
FINALIST_TAG = "orchestrator.finalist_id"
# MLflow's limits a batch.
METRICS, PARAMS, TAGS, ENTITIES = 1000, 100, 100, 1000


@dataclass(frozen=True, kw_only=True)
class Filed:
    """Where a run (or a sweep) stands in MLflow.

    `status` is MLflow's: RUNNING, FINISHED, FAILED or KILLED. `notes` name what could not be filed
    under its own name or at all.
    """

    mlflow_run_id: str
    experiment_id: str
    run_id: str
    status: str
    notes: tuple[str, ...] = ()


def fill_run(store: Store, run_dir: Path, *, parent: str | None = None) -> Filed:
    """File the run in `run_dir`; `parent` is the MLflow run id of its sweep.

    A run without exit.json, result.json and verdict.json is taken for a running one and stays
    RUNNING; with a verdict but neither of the others it has vanished, which is FAILED.

    Raises:
        InputError: there is no run in `run_dir`.
        FolderError: it holds a figure that is not a finite number, or an unreadable file.
        TrackingError: the store cannot be written; the folder is as it was.
    """
    if not (run_dir / "run.json").is_file():
        raise InputError(f"{run_dir} is not a run's folder: it has no run.json.")
    with locked(run_dir / "run.json", create=False):
        filing = read_run(run_dir)
        with store_errors(store.tracking):
            return _file(store, RUN_TAG, filing, parent)


def fill_sweep(store: Store, sweep_dir: Path, runs_root: Path) -> Filed:
    """File a sweep as the parent of its runs, and those runs; a run not fetched yet is a note.

    The parent is RUNNING until the sweep has ended and none of its runs is running.

    Raises:
        FolderError: there is no sweep in `sweep_dir`.
        TrackingError: the store cannot be written.
    """
    path = sweep_dir / "sweep.json"
    if read_json(path) is None:
        raise FolderError(f"{sweep_dir} is not a sweep's folder: it has no sweep.json.")
    with locked(path, create=False):
        sweep = read_json(path) or {}
        started = _sweep_filing(path, sweep, [], ())
        with store_errors(store.tracking):
            parent = _find_or_create(store, SWEEP_TAG, started, None)
        children, notes = [], []
        for run_id in sweep.get("runs") or []:
            run_dir = runs_root / check_id(run_id, sweep_dir)
            if not (run_dir / "run.json").is_file():
                notes.append(f"run {run_id} is not under {runs_root}")
                continue
            try:
                children.append(fill_run(store, run_dir, parent=parent.info.run_id))
            except (FolderError, InputError) as error:
                notes.append(f"run {run_id}: {error}")
        filing = _sweep_filing(path, sweep, children, tuple(notes))
        with store_errors(store.tracking):
            return _file(store, SWEEP_TAG, filing, None)


def heal(store: Store, runs_root: Path) -> list[Filed]:
    """Fill again whatever of ours is RUNNING in MLflow and has ended in its folder.

    Sweeps are looked for beside `runs_root`, in `sweeps/`. What has no folder here, or has not
    ended, is left alone. A run whose folder is refused is FAILED, with the reason as tag `refused`.
    """
    healed = []
    with store_errors(store.tracking):
        runs = _search(store, f"attributes.status = 'RUNNING' and tags.`{RUN_TAG}` LIKE '%'")
        sweeps = _search(store, f"attributes.status = 'RUNNING' and tags.`{SWEEP_TAG}` LIKE '%'")
    for run in runs:
        run_dir = runs_root / Path(run.data.tags[RUN_TAG]).name
        if not (run_dir / "run.json").is_file():
            continue
        try:
            filed = fill_run(store, run_dir)
        except (FolderError, InputError) as error:
            filed = _refuse(store, run, str(error))
        if filed.status != "RUNNING":
            healed.append(filed)
    for run in sweeps:
        sweep_dir = runs_root.parent / "sweeps" / Path(run.data.tags[SWEEP_TAG]).name
        if (sweep_dir / "sweep.json").is_file():
            filed = fill_sweep(store, sweep_dir, runs_root)
            if filed.status != "RUNNING":
                healed.append(filed)
    return healed


def _sweep_filing(
    path: Path, sweep: Mapping[str, Any], children: Sequence[Filed], notes: tuple[str, ...]
) -> Filing:
    started = time_ms(path, sweep, "created")
    ended = None if sweep.get("ended") is None else time_ms(path, sweep, "ended")
    if any(child.status == "RUNNING" for child in children):
        ended = None
    answered = sum(child.status == "FINISHED" for child in children)
    missing = len(sweep.get("runs") or []) - answered
    texts: dict[str, str] = {}
    points: tuple[Point, ...] = ()
    if ended is not None:
        # MLflow shows the last step and deletes no point: a run answered after all, by a retry or
        # a host that came back, must come out on top, and `answered` only grows.
        points = (
            Point("runs/answered", float(answered), ended, answered),
            Point("runs/not_answered", float(missing), ended, answered),
        )
        rows = [
            {"run_id": c.run_id, "mlflow_run_id": c.mlflow_run_id, "status": c.status}
            for c in children
        ]
        texts["runs.json"] = json.dumps(rows, indent=2) + "\n"
    tags = {
        "experiment": sweep.get("experiment"),
        "overrides": sweep.get("overrides") or None,
        "notes": "\n".join(notes) or None,
    }
    return Filing(
        run_id=check_id(sweep.get("sweep_id"), path),
        started=started,
        ended=ended,
        status="RUNNING" if ended is None else "FAILED" if missing else "FINISHED",
        params={"experiment": canonical(sweep.get("experiment"))},
        tags={
            key: shorten("tag", key, canonical(value), LONG_TAG, texts)
            for key, value in tags.items()
            if value is not None
        },
        points=points,
        texts=texts,
        files=(path,),
        notes=notes,
    )


def _file(store: Store, id_tag: str, filing: Filing, parent: str | None) -> Filed:
    """Make the store hold `filing`. The status comes last: what was cut short stays RUNNING."""
    client = store.client
    run = _find_or_create(store, id_tag, filing, parent)
    run_id = run.info.run_id
    for key, old in run.data.params.items():
        if filing.params.get(key, old) != old:
            raise TrackingError(
                f"run {filing.run_id} is filed in {store.tracking.experiment} with {key} = {old}, "
                f"and its folder now says {filing.params[key]}; a folder is not edited after the "
                "run: start a new one."
            )
    tags = dict(filing.tags)
    if parent is not None:
        tags["mlflow.parentRunId"] = parent
    _log(client, run_id, filing, tags)
    for path in filing.files:
        client.log_artifact(run_id, str(path))
    for name, text in filing.texts.items():
        client.log_text(run_id, text, name)
    for child in filing.children:  # before the parent ends, so that a kill here leaves it to `heal`
        _file(store, FINALIST_TAG, child, run_id)
    _sweep_up(run.info.artifact_uri)
    if filing.ended is not None and (run.info.status, run.info.end_time) != (
        filing.status,
        filing.ended,
    ):
        client.set_terminated(run_id, filing.status, filing.ended)
    return Filed(
        mlflow_run_id=run_id,
        experiment_id=store.experiment_id,
        run_id=filing.run_id,
        status=filing.status,
        notes=filing.notes,
    )


def _find_or_create(store: Store, id_tag: str, filing: Filing, parent: str | None) -> Any:
    """The one MLflow run of `filing`; callers hold the folder's lock."""
    found = _search(store, f"tags.`{id_tag}` = '{filing.run_id}'")
    if not found:
        tags = {id_tag: filing.run_id}
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        store.client.create_run(
            store.experiment_id,
            start_time=filing.started,
            tags=tags,
            run_name=filing.name or filing.run_id,
        )
        found = _search(store, f"tags.`{id_tag}` = '{filing.run_id}'")
    # An answer lost on the network is asked for again, and so may have made two.
    first, *others = sorted(found, key=lambda r: (r.info.status == "RUNNING", r.info.run_id))
    for other in others:
        store.client.delete_run(other.info.run_id)
    return first


def _search(store: Store, query: str) -> list[Any]:
    found: list[Any] = []
    token = None
    while True:
        page = store.client.search_runs([store.experiment_id], query, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _log(client: Any, run_id: str, filing: Filing, tags: Mapping[str, str]) -> None:
    """One batch, or as many as MLflow's limits ask for; what is there already stays as it is."""
    from mlflow.entities import Metric, Param, RunTag

    metrics = [Metric(*point) for point in filing.points]
    params = [Param(key, value) for key, value in filing.params.items()]
    labels = [RunTag(key, value) for key, value in tags.items()]
    while metrics or params or labels:
        room = min(METRICS, ENTITIES - len(params[:PARAMS]) - len(labels[:TAGS]))
        client.log_batch(run_id, metrics[:room], params[:PARAMS], labels[:TAGS])
        del metrics[:room], params[:PARAMS], labels[:TAGS]


def _sweep_up(artifact_uri: str) -> None:
    """Remove the half-written copies that a killed filing left among the run's files."""
    if urlsplit(artifact_uri).scheme in ("", "file"):
        for leftover in local_path(artifact_uri).rglob(".artifact.uploading.*"):
            leftover.unlink(missing_ok=True)


def _refuse(store: Store, run: Any, reason: str) -> Filed:
    with store_errors(store.tracking):
        store.client.set_tag(run.info.run_id, "refused", reason[:LONG_TAG])
        store.client.set_terminated(run.info.run_id, "FAILED", run.info.start_time)
    return Filed(
        mlflow_run_id=run.info.run_id,
        experiment_id=store.experiment_id,
        run_id=run.data.tags[RUN_TAG],
        status="FAILED",
        notes=(reason,),
    )

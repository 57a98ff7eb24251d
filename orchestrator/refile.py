"""Verb `record`: bring runs into MLflow from their folders, and from the host where they go on.

Filing a run again changes nothing. A run whose command was stopped is taken up: followed to its end,
collected, judged and filed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from orchestrator.errors import InputError, OrchestratorError, TrackingError
from orchestrator.loop import Session, file_run, resume, tracking_of
from orchestrator.paths import CLONE, RunPaths, runs_folder, sweeps_folder
from orchestrator.show import Show, error_line
from orchestrator.tracking import Tracking

USAGE = "python -m orchestrator record RUN… | all [results=FOLDER]"


def run(arguments: list[str]) -> int:
    """File the runs named (or all of them) and the sweeps they belong to; 0 if all were filed."""
    show = Show()
    results = CLONE / "results"
    names = []
    for argument in arguments:
        if argument in ("-h", "--help"):
            show.line(f"{USAGE}\nFile runs from their folders; one that goes on is followed first.")
            return 0
        if argument.startswith("results="):
            results = Path(argument.removeprefix("results=")).expanduser().absolute()
        elif "=" in argument:
            raise InputError(f"record takes no setting {argument.split('=')[0]!r}; {USAGE}")
        else:
            names.append(argument)
    folders = run_folders(runs_folder(results), names)
    with Session(show) as session:
        for folder in folders:
            try:
                bring_in(session, folder)
            except OrchestratorError as error:
                session.failed = True
                error_line(str(error))
        for sweep in sweeps_of(folders):
            file_sweep_again(session, sweep)
    unfiled = any(not RunPaths(folder).filed.is_file() for folder in folders)
    return 1 if unfiled or session.failed else 0


def run_folders(root: Path, names: list[str]) -> list[Path]:
    """The folders of the runs named; raises InputError where one does not exist."""
    if not names:
        raise InputError(f"record needs a run's id, its folder, or 'all'; {USAGE}")
    if names == ["all"]:
        return sorted(p for p in root.glob("*") if RunPaths(p).run.is_file())
    folders = []
    for name in names:
        folder = (Path(name) if "/" in name else root / name).absolute()
        if not RunPaths(folder).run.is_file():
            raise InputError(f"there is no run {name} ({RunPaths(folder).run} does not exist)")
        folders.append(folder)
    return folders


def bring_in(session: Session, folder: Path) -> None:
    """File one run; one without a verdict is taken up first."""
    paths = RunPaths(folder)
    if not paths.verdict.is_file():
        resume(session, folder)
        return
    paths.filed.unlink(missing_ok=True)  # until the store says so again
    session.show.line(f"run      {folder.name}")
    file_run(session, tracking_in(folder), folder.parent.parent, paths)


def tracking_in(folder: Path) -> Tracking:
    """Where a run's own config files it."""
    config = OmegaConf.to_container(OmegaConf.load(RunPaths(folder).config))
    return tracking_of(config)  # type: ignore[arg-type]


def sweeps_of(folders: Iterable[Path]) -> list[Path]:
    """The folders of the sweeps that these runs belong to, beside the runs' own."""
    found = set()
    for folder in folders:
        sweep = json.loads(RunPaths(folder).run.read_bytes()).get("sweep")
        if sweep:
            found.add(sweeps_folder(folder.parent.parent) / sweep)
    return sorted(found)


def file_sweep_again(session: Session, sweep: Path) -> None:
    """File a sweep's parent run in the store of its own runs."""
    from orchestrator.record import fill_sweep

    results = sweep.parent.parent
    first = json.loads((sweep / "sweep.json").read_bytes())["runs"][0]
    try:
        store = session.store(tracking_in(runs_folder(results) / first), results).result()
        fill_sweep(store, sweep, runs_folder(results))
    except TrackingError as error:
        session.failed = True
        session.show.line(f"not filed  sweep {sweep.name}: {error}", style="red")

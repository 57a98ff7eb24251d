"""Verb `record`: file runs in MLflow again from their folders; the end state is always the same."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import OmegaConf

from orchestrator.errors import InputError, TrackingError
from orchestrator.loop import tracking_of, write_json
from orchestrator.paths import CLONE, RunPaths, runs_folder, sweeps_folder
from orchestrator.show import Show
from orchestrator.tracking import Store, Tracking, how_to_open, open_store

USAGE = "python -m orchestrator record RUN… | all [results=FOLDER]"


def run(arguments: list[str]) -> int:
    """File the runs named (or all of them) and then the sweeps they belong to."""
    show = Show()
    results = CLONE / "results"
    names = []
    for argument in arguments:
        if argument in ("-h", "--help"):
            show.line(f"{USAGE}\nFile runs again from their folders; filing twice changes nothing.")
            return 0
        if argument.startswith("results="):
            results = Path(argument.removeprefix("results=")).expanduser().absolute()
        elif "=" in argument:
            raise InputError(f"record takes no setting {argument.split('=')[0]!r}; {USAGE}")
        else:
            names.append(argument)
    folders = run_folders(runs_folder(results), names)
    stores: dict[Tracking, Store] = {}
    failed = False
    for folder in folders:
        if not RunPaths(folder).verdict.is_file():
            show.line(
                f"not filed  {folder.name} has not ended here: its command was stopped before"
            )
            failed = True
            continue
        failed |= not file_again(folder, stores, show)
    for sweep in sweeps_of(folders):
        failed |= not file_sweep_again(sweep, stores, show)
    return 1 if failed else 0


def run_folders(root: Path, names: list[str]) -> list[Path]:
    """The folders of the runs named; raises InputError where one does not exist."""
    if not names:
        raise InputError(f"record needs a run's id, its folder, or 'all'; {USAGE}")
    if names == ["all"]:
        return sorted(p for p in root.glob("*") if RunPaths(p).run.is_file())
    folders = []
    for name in names:
        folder = Path(name) if "/" in name else root / name
        if not RunPaths(folder).run.is_file():
            raise InputError(f"there is no run {name} ({RunPaths(folder).run} does not exist)")
        folders.append(folder)
    return folders


def file_again(folder: Path, stores: dict[Tracking, Store], show: Show) -> bool:
    """File one run; False where the store refuses it, said on the terminal."""
    from orchestrator.record import fill_run

    paths = RunPaths(folder)
    tracking = tracking_of(OmegaConf.to_container(OmegaConf.load(paths.config)))  # type: ignore[arg-type]
    try:
        if tracking not in stores:
            stores[tracking] = open_store(tracking)
        filed = fill_run(stores[tracking], folder)
    except TrackingError as error:
        show.line(f"not filed  {folder.name}: {error}", style="red")
        return False
    write_json(paths.filed, {"uri": tracking.uri, "run": filed.mlflow_run_id})
    show.line(f"filed  {folder.name} as {filed.mlflow_run_id}; {how_to_open(tracking)}")
    return True


def sweeps_of(folders: list[Path]) -> list[Path]:
    """The folders of the sweeps that these runs belong to, beside the runs' own."""
    found = set()
    for folder in folders:
        sweep = json.loads(RunPaths(folder).run.read_bytes()).get("sweep")
        if sweep:
            found.add(sweeps_folder(folder.absolute().parent.parent) / sweep)
    return sorted(found)


def file_sweep_again(sweep: Path, stores: dict[Tracking, Store], show: Show) -> bool:
    """File a sweep's parent run in the store of its runs."""
    from orchestrator.record import fill_sweep

    try:
        for store in stores.values():
            fill_sweep(store, sweep, runs_folder(sweep.parent.parent))
    except TrackingError as error:
        show.line(f"not filed  sweep {sweep.name}: {error}", style="red")
        return False
    return True

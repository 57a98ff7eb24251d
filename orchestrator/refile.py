"""Verb `record`: bring runs into MLflow from their folders. Filing a run again changes nothing."""

from __future__ import annotations

from pathlib import Path

from orchestrator.conclude import file_run, tracking_of
from orchestrator.errors import InputError, OrchestratorError
from orchestrator.paths import CLONE, RunPaths
from orchestrator.pickup import file_sweep, sweeps_of
from orchestrator.runs import all_runs, config_of, find_run, reference, results_of
from orchestrator.session import Session
from orchestrator.show import Show, error_line

USAGE = "python -m orchestrator record RUN… | all [results=FOLDER] [tracking.uri=URI]"


def run(arguments: list[str]) -> int:
    """File the runs named (or all of them) and the sweeps they belong to; 0 if all were filed."""
    show = Show()
    results, uri = CLONE / "results", None
    names = []
    for argument in arguments:
        if argument in ("-h", "--help"):
            show.line(f"{USAGE}\nFile runs that have ended, again, from their folders.")
            return 0
        if argument.startswith("results="):
            results = results_of(argument.removeprefix("results="))
        elif argument.startswith("tracking.uri="):
            uri = argument.removeprefix("tracking.uri=")
        elif "=" in argument:
            raise InputError(f"record takes no setting {argument.split('=')[0]!r}; {USAGE}")
        else:
            names.append(argument)
    folders = run_folders(results, names)
    with Session(show) as session:
        for folder in folders:
            try:
                bring_in(session, folder, uri)
            except OrchestratorError as error:
                session.failed = True
                error_line(str(error))
        for sweep in sweeps_of(folders) if uri is None else ():
            file_sweep(session, sweep)
    unfiled = any(not RunPaths(folder).filed.is_file() for folder in folders)
    return 1 if unfiled or session.failed else 0


def run_folders(results: Path, names: list[str]) -> list[Path]:
    """The folders of the runs named; raises InputError where one does not exist."""
    if not names:
        raise InputError(f"record needs a run's id, its folder, or 'all'; {USAGE}")
    if names == ["all"]:
        return all_runs(results)
    return [find_run(name, results) for name in names]


def bring_in(session: Session, folder: Path, uri: str | None) -> None:
    """File one run that has ended, where its config says or at `uri`."""
    paths = RunPaths(folder)
    if not paths.verdict.is_file():
        raise OrchestratorError(
            f"{folder.name} was not followed to its end; do that first: python -m orchestrator attach "
            f"{reference(folder)}"
        )
    paths.filed.unlink(missing_ok=True)  # until the store says so again
    session.show.line(f"run      {folder.name}")
    config = config_of(paths)
    if uri is not None:
        config["tracking"]["uri"] = uri
    file_run(session, tracking_of(config), folder.parent.parent, paths)

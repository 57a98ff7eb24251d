"""What earlier commands left open: runs that ended on a host while nobody looked.

A command that is connected to a host asks it for them, collects and judges them at once, and files
them with its own run. What still runs is named and left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel
from orchestrator.conclude import file_run, judged, tracking_of
from orchestrator.errors import (
    Detached,
    HostUnreachable,
    OrchestratorError,
    StateUnknown,
    TrackingError,
)
from orchestrator.filing import FolderError
from orchestrator.follow import (
    OVER,
    Ended,
    Wish,
    collect,
    follow,
    follow_request,
    poll,
    size_of,
)
from orchestrator.paths import RunPaths, runs_folder, sweeps_folder
from orchestrator.plan import CASE
from orchestrator.runs import (
    all_runs,
    config_of,
    open_config,
    owned,
    read_record,
    record_of,
    reference,
    write_json,
    write_patched,
)
from orchestrator.session import Session, key_of
from orchestrator.tracking import Tracking


def meanwhile(session: Session, config: dict[str, Any]) -> None:
    """Collect and judge what ended on this config's host since; once a command."""
    host = key_of(config["host"])
    if host in session.asked:
        return
    for paths in open_runs(Path(config["results"])):
        try:
            theirs = open_config(paths)
        except OrchestratorError as error:
            session.show.line(f"meanwhile  {error}", style="yellow")
            continue
        if key_of(theirs["host"]) != host:
            continue
        with owned(paths) as mine:
            if not mine or paths.verdict.is_file():
                continue
            try:
                take_in(session, theirs, paths)
            except HostUnreachable:
                raise
            except OrchestratorError as error:  # its own, and no reason to stop what is asked now
                session.show.line(
                    f"meanwhile  {paths.folder.name} cannot be taken in: {error}", style="yellow"
                )
    session.asked.add(host)


def open_runs(results: Path) -> Iterator[RunPaths]:
    """Runs without a verdict."""
    for folder in all_runs(results):
        if not RunPaths(folder).verdict.is_file():
            yield RunPaths(folder)


def take_in(session: Session, config: dict[str, Any], paths: RunPaths) -> dict[str, Any]:
    """Collect and judge a run that has ended, or say that it goes on; its state.

    Its host is only asked where it may know something. Raises StateUnknown where it does not, though
    it should.
    """
    run_id = paths.folder.name
    state: dict[str, Any] = {"state": "never_started"}
    if was_sent(paths):
        channel = session.link_again(config["host"]).channel
        state = state_of(channel, paths)
        if state["state"] == "never_started":
            state = forgo(channel, paths)
    if state["state"] not in OVER:
        session.show.line(
            f"meanwhile  {run_id} is {state['state']}; follow it with: python -m orchestrator attach "
            f"{reference(paths.folder)}"
        )
        return state
    result = None
    if state["state"] != "never_started":
        try:
            follow(channel, run_id, paths.folder, lambda _: None, lambda: "detach", Wish())
        except Detached:
            raise KeyboardInterrupt from None  # it was not meant for this run
        result = collect(channel, run_id, CASE, paths)
    verdict = judged(config, Ended(state=state, result=result), paths)
    write_json(paths.verdict, verdict.plain())
    write_patched(paths, result)
    session.unfiled.append(paths.folder)
    session.show.meanwhile(run_id, verdict.plain())
    return state


def state_of(channel: Channel, paths: RunPaths) -> dict[str, Any]:
    """The run's state on its host; never_started where the host knows no such run.

    Raises StateUnknown where the host knows none although it was started there.
    """
    run_id = paths.folder.name
    (reply,) = channel.pipeline([follow_request(run_id, {})], check=False)
    if reply.ok or reply.header.get("kind") != "missing":
        return poll(channel, run_id, {}, "", reply)[0]
    if was_started(paths):
        raise StateUnknown(
            f"{channel.name}: {reply.header.get('error')}, although it was started there; is host.work "
            f"mounted, and is it the same machine? If the run is gone for good, remove {paths.folder}"
        )
    return {"state": "never_started"}


def was_sent(paths: RunPaths) -> bool:
    """Whether the run's start may have reached its host."""
    return paths.request.is_file() or was_started(paths)


def was_started(paths: RunPaths) -> bool:
    """Whether this machine has seen anything of the run on its host."""
    return paths.started.is_file() or any(map(size_of, (paths.log, paths.events)))


def forgo(channel: Channel, paths: RunPaths) -> dict[str, Any]:
    """See to it that what a dead command sent does not start its run later; the run's state."""
    return dict(channel.request("forgo", run_id=paths.folder.name).header["state"])


def file_meanwhile(session: Session, results: Path) -> None:
    """File what was judged meanwhile, and what an earlier command judged and did not get to file.

    A store that is down, or a run that cannot be filed, leaves the others alone.
    """
    folders = {*session.unfiled, *(f for f in all_runs(results) if needs_filing(RunPaths(f)))}
    session.unfiled.clear()
    down: set[Tracking] = set()
    filed = []
    for folder in sorted(folders):
        paths = RunPaths(folder)
        with owned(paths) as mine:
            if not mine or not needs_filing(paths):
                continue
            try:
                tracking = tracking_of(config_of(paths))
            except OrchestratorError as error:
                session.show.line(f"not filed  {error}", style="red")
                continue
            if tracking in down:
                continue
            failure = file_run(session, tracking, results, paths)
            if failure is None:
                filed.append(folder)
            elif not isinstance(failure, FolderError):
                down.add(tracking)
    settled = settle_sweeps(session, results)
    for sweep in sweeps_of(filed):
        if sweep not in settled and not_owned(sweep):
            file_sweep(session, sweep)


def needs_filing(paths: RunPaths) -> bool:
    """Whether a run has its verdict and was not filed."""
    return paths.verdict.is_file() and not paths.filed.is_file()


def settle_sweeps(session: Session, results: Path) -> list[Path]:
    """Close the sweeps whose command is gone and whose runs are all judged; their folders.

    Else their parents would stay open in MLflow.
    """
    settled = []
    for folder in sorted(sweeps_folder(results).glob("*")):
        path = folder / "sweep.json"
        try:
            if not path.is_file() or read_record(path).get("ended") is not None:
                continue
            with owned(RunPaths(folder)) as mine:
                record = read_record(path)
                runs = [RunPaths(runs_folder(results) / run) for run in record["runs"]]
                judged_all = all(p.verdict.is_file() for p in runs if p.run.is_file())
                if mine and record["ended"] is None and runs and judged_all:
                    write_json(path, {**record, "ended": time.time()})
                    file_sweep(session, folder)
                    settled.append(folder)
        except OrchestratorError as error:
            session.show.line(f"sweep {folder.name} cannot be closed: {error}", style="yellow")
    return settled


def not_owned(sweep: Path) -> bool:
    """Whether no living command is at this sweep."""
    with owned(RunPaths(sweep)) as mine:
        return mine


def sweeps_of(folders: Iterable[Path]) -> list[Path]:
    """The folders of the sweeps that these runs belong to, beside the runs' own."""
    found = set()
    for folder in folders:
        sweep = record_of(RunPaths(folder)).get("sweep")
        if sweep and (sweeps_folder(folder.parent.parent) / sweep / "sweep.json").is_file():
            found.add(sweeps_folder(folder.parent.parent) / sweep)
    return sorted(found)


def file_sweep(session: Session, folder: Path) -> None:
    """File a sweep's parent run in the store of its own runs, with its children below it."""
    from orchestrator.record import fill_sweep

    results = folder.parent.parent
    first = read_record(folder / "sweep.json")["runs"][0]
    tracking = tracking_of(config_of(RunPaths(runs_folder(results) / first)))
    try:
        filed = fill_sweep(session.store(tracking, results).result(), folder, runs_folder(results))
    except TrackingError as error:
        session.failed = True
        session.show.line(f"sweep {folder.name} not filed  {error}", style="red")
        return
    session.show.filed(f"MLflow parent run {filed.mlflow_run_id}")

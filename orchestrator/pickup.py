"""What earlier commands left open: runs that ended on a host while nobody looked.

A command that is connected to a host asks it for them, collects and judges them at once, and files
them with its own run. What still runs is named and left alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel, RefusedError
from orchestrator.conclude import file_run, judged, tracking_of
from orchestrator.errors import HostUnreachable, OrchestratorError, TrackingError
from orchestrator.follow import OVER, Ended, collect, follow, follow_request
from orchestrator.paths import RunPaths, runs_folder, sweeps_folder
from orchestrator.plan import CASE
from orchestrator.runs import all_runs, config_of, open_config, owned, reference, write_json
from orchestrator.session import Session, key_of


def meanwhile(session: Session, config: dict[str, Any]) -> None:
    """Collect and judge what ended on this config's host since; once a command."""
    host = key_of(config["host"])
    if host in session.asked:
        return
    channel = session.link(config["host"]).channel
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
                take_in(session, channel, theirs, paths)
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


def take_in(
    session: Session, channel: Channel, config: dict[str, Any], paths: RunPaths
) -> dict[str, Any]:
    """Collect and judge a run that has ended, or say that it goes on; its state."""
    run_id = paths.folder.name
    state = state_of(channel, run_id)
    if state["state"] == "never_started":
        state = forgo(channel, run_id)
    if state["state"] not in OVER:
        session.show.line(
            f"meanwhile  {run_id} is {state['state']}; follow it with: python -m orchestrator attach "
            f"{reference(paths.folder)}"
        )
        return state
    result = None
    if state["state"] != "never_started":
        follow(channel, run_id, paths.folder, lambda _: None, lambda: "detach")
        result = collect(channel, run_id, CASE, paths)
    verdict = judged(config, Ended(state=state, result=result), paths)
    write_json(paths.verdict, verdict.plain())
    session.unfiled.append(paths.folder)
    session.show.meanwhile(run_id, verdict.plain())
    return state


def state_of(channel: Channel, run_id: str) -> dict[str, Any]:
    """The run's state on its host; never_started where the host knows no such run."""
    (reply,) = channel.pipeline([follow_request(run_id, {})], check=False)
    if reply.ok:
        return dict(reply.header["state"])
    if reply.header.get("kind") == "missing":
        return {"state": "never_started"}
    raise RefusedError(f"{channel.name}: {reply.header.get('error')}", reply.header)


def forgo(channel: Channel, run_id: str) -> dict[str, Any]:
    """See to it that what a dead command sent does not start its run later; the run's state."""
    return dict(channel.request("forgo", run_id=run_id).header["state"])


def file_meanwhile(session: Session, results: Path) -> None:
    """File what was judged meanwhile, and what an earlier command judged and did not get to file."""
    folders = {*session.unfiled, *(f for f in all_runs(results) if needs_filing(RunPaths(f)))}
    session.unfiled.clear()
    for folder in sorted(folders):
        paths = RunPaths(folder)
        with owned(paths) as mine:
            if mine and needs_filing(paths):
                file_run(session, tracking_of(config_of(paths)), results, paths)
                if not paths.filed.is_file():
                    return  # the store is not to be had now; nothing is lost
    settle_sweeps(session, results)


def needs_filing(paths: RunPaths) -> bool:
    """Whether a run has its verdict and was not filed."""
    return paths.verdict.is_file() and not paths.filed.is_file()


def settle_sweeps(session: Session, results: Path) -> None:
    """Close the sweeps whose command died, so that their parents do not stay open in MLflow."""
    for folder in sorted(sweeps_folder(results).glob("*")):
        path = folder / "sweep.json"
        if not path.is_file() or json.loads(path.read_bytes())["ended"] is not None:
            continue
        with owned_sweep(folder) as mine:
            record = json.loads(path.read_bytes())
            if mine and record["ended"] is None and record["runs"]:
                write_json(path, {**record, "ended": time.time()})
                file_sweep(session, folder)


def owned_sweep(folder: Path) -> AbstractContextManager[bool]:
    """As `owned`, for a sweep."""
    return owned(RunPaths(folder))


def sweeps_of(folders: Iterable[Path]) -> list[Path]:
    """The folders of the sweeps that these runs belong to, beside the runs' own."""
    found = set()
    for folder in folders:
        sweep = json.loads(RunPaths(folder).run.read_bytes()).get("sweep")
        if sweep:
            found.add(sweeps_folder(folder.parent.parent) / sweep)
    return sorted(found)


def file_sweep(session: Session, folder: Path) -> None:
    """File a sweep's parent run in the store of its own runs, with its children below it."""
    from orchestrator.record import fill_sweep

    results = folder.parent.parent
    first = json.loads((folder / "sweep.json").read_bytes())["runs"][0]
    tracking = tracking_of(config_of(RunPaths(runs_folder(results) / first)))
    try:
        filed = fill_sweep(session.store(tracking, results).result(), folder, runs_folder(results))
    except TrackingError as error:
        session.failed = True
        session.show.line(f"sweep {folder.name} not filed  {error}", style="red")
        return
    session.show.filed(f"MLflow parent run {filed.mlflow_run_id}")

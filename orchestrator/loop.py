"""The way of one run: snapshot, preflight, push and start, follow, collect; `conclude` does the rest.

Two round trips lead to the first output: one question (what is missing there, is the host as the job
needs it), and one stream (what is missing, the start, what the job says first).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.channel import RefusedError, Request
from orchestrator.conclude import conclude, tracking_of
from orchestrator.config import Resolved
from orchestrator.errors import Detached, HostUnreachable, InputError, OrchestratorError
from orchestrator.follow import FOLLOWED, Ended, collect, follow, follow_request, write_atomic
from orchestrator.paths import RunPaths
from orchestrator.pickup import file_meanwhile, forgo, meanwhile, state_of
from orchestrator.plan import CASE, Input, loads_of, made_data, placed, request_of
from orchestrator.preflight import (
    Check,
    Found,
    answer_of,
    checks,
    last_environment,
    question,
    refuse,
)
from orchestrator.push import Load, deliver, lay_out, to_send
from orchestrator.runs import create_folder, new_run_id, open_config, owned, write_json
from orchestrator.session import Link, Session

BUSY_PAUSE_S = 1.0
SOON_SENT = 1 << 20  # bytes that need no waiting for
CHANGED = (
    "the command ended before the job was started, and {} has changed since; run the experiment again"
)


def run(
    session: Session,
    resolved: Resolved,
    sweep: str | None = None,
    begun: Callable[[str], None] = lambda _: None,
) -> Path:
    """Answer one hypothesis and file it; returns the run's folder on this machine.

    `begun` is told the run's id before anything is started.

    Raises InputError before anything is started; whatever happens later is in the records, and
    where the host is lost on the way, `resume` goes on from them.
    """
    config = resolved.config
    snapshot = session.snapshot()
    run_id = new_run_id(resolved.experiment or name_of(config["job"]))
    paths = create_folder(Path(config["results"]), run_id, resolved, snapshot, sweep)
    session.folders.append(paths.folder)
    begun(run_id)
    session.show.heading(config, resolved.experiment, run_id)

    def ending() -> Ended:
        host = config["host"]
        session.patiently(host, lambda: meanwhile(session, config))
        asked = session.patiently(host, lambda: start(session, config, paths))
        if config["detach"]:
            raise Detached(f"run {run_id} was started and goes on")
        return session.patiently(host, lambda: finish(session, config, paths, interrupted=asked))

    with owned(paths):
        conclude(session, config, paths, ending)
        file_meanwhile(session, Path(config["results"]))
    return paths.folder


def name_of(job: dict[str, Any]) -> str:
    """What a run without an experiment is called: a script's own name, else the job's."""
    return Path(job["path"]).stem if job["name"] == "script" else str(job["name"])


def resume(session: Session, folder: Path) -> None:
    """Take up a run whose command ended before it did: follow it, collect, judge and file it.

    One that was never started is started now, where the code is still the same. Raises InputError
    where another command has the run in its hands.
    """
    paths = RunPaths(folder)
    config = open_config(paths)
    record = json.loads(paths.run.read_bytes())
    session.folders.append(folder)
    session.show.heading(config, record["experiment"], record["run_id"])

    def begin() -> bool:
        channel = session.link(config["host"]).channel
        state = state_of(channel, record["run_id"])
        if state["state"] != "never_started" or "ended" in state:  # or it was forgone before
            return False
        try:
            if session.snapshot().digest != record["snapshot"]["digest"]:
                raise OrchestratorError(CHANGED.format("the code"))
            return start(session, config, paths)
        except HostUnreachable:
            raise
        except OrchestratorError:
            forgo(channel, record["run_id"])
            raise

    def ending() -> Ended:
        host = config["host"]
        session.link_again(host)
        asked = session.patiently(host, begin)
        return session.patiently(host, lambda: finish(session, config, paths, interrupted=asked))

    with owned(paths) as mine:
        if not mine:
            raise InputError(f"another command follows {record['run_id']} already; leave it to it")
        conclude(session, config, paths, ending)


def start(session: Session, config: dict[str, Any], paths: RunPaths) -> bool:
    """Look over the host, send what it lacks and start the job, detached; again changes nothing.

    True where Ctrl-C came when all but the start was done: it has yet to be asked what is wanted.
    Before that, Ctrl-C leaves the run unstarted.
    """
    run_id = paths.folder.name
    inputs = session.inputs(config)
    link = session.link(config["host"])
    loads = [Load(kind="snapshots", tree=session.snapshot().tree), *loads_of(inputs)]
    while True:
        asked = paths_asked(config, inputs, link.root)
        *laid_out, told = link.channel.pipeline(
            [*map(lay_out, loads), question(config, asked)], check=False
        )
        found = answer_of(link.channel, told)
        sizes = [size_of(put) for put in to_send(loads, laid_out)]
        look_over(session, config, inputs, found, sum(sizes), link, paths)
        request = request_of(config, placed(inputs, link.root, found.expanded()), link.root)
        payload = json.dumps({"run_id": run_id, **request}, indent=1).encode()
        if paths.request.is_file() and paths.request.read_bytes() != payload:
            raise OrchestratorError(CHANGED.format("what it reads"))
        write_atomic(paths.request, payload)
        fields = {
            "run_id": run_id,
            "snapshot": loads[0].folder,
            "needs": [load.folder for load in loads[1:]],
            "python": config["host"]["python"],
            "env": config["host"]["env"],
        }
        go = Request(op="start", fields=fields, payload=payload)
        first = follow_request(run_id, dict.fromkeys(FOLLOWED, 0), seen="starting", wait_s=1.0)
        session.store(tracking_of(config), Path(config["results"]))  # opens while the job starts
        try:
            deliver(link.channel, loads, laid_out, [go, first])
            return False
        except KeyboardInterrupt:
            if sum(sizes) < SOON_SENT:
                return True
            session.drop(config["host"])
            raise
        except RefusedError as error:
            if error.kind != "busy":
                raise
            session.show.line(f"waiting  {error}", style="dim")
            time.sleep(BUSY_PAUSE_S)


def paths_asked(config: dict[str, Any], inputs: dict[str, Input], root: str) -> list[str]:
    """The paths on the host that the preflight is to look at."""
    asked = [given.path for given in inputs.values() if given.tree is None]
    if made := data_to_make(config, inputs, root):
        asked.append(f"{made}/capture.json")
    return asked


def data_to_make(config: dict[str, Any], inputs: dict[str, Input], root: str) -> str | None:
    """Where the job captures its data where it is not there yet; None where it makes none."""
    if config["job"]["name"] != "drafter_test" or "prompts" not in inputs:
        return None
    as_given = {given.path: given.path for given in inputs.values()}
    return made_data(config, placed(inputs, root, as_given), root)


def look_over(
    session: Session,
    config: dict[str, Any],
    inputs: dict[str, Input],
    found: Found,
    to_send: int,
    link: Link,
    paths: RunPaths,
) -> None:
    """Check the host, keep what was found with the run, and show what differs from the last one."""
    from jobs.environment import differences

    made = data_to_make(config, inputs, link.root)
    there = made is not None and found.paths[f"{made}/capture.json"]["exists"]
    results: list[Check] = checks(config, inputs, found, to_send, there)
    last, before = last_environment(paths.folder.parent, config["host"]["name"], paths.folder.name)
    changes = differences(before, found.environment) if before else []
    write_json(
        paths.preflight,
        {
            "checks": [{"what": c.what, "ok": c.ok, "said": c.said} for c in results],
            "environment": found.environment,
            "memory": found.memory,
            "gpus": found.gpus,
            "free": found.free,
            "compared_with": last,
            "differences": changes,
        },
    )
    session.show.host(found.environment, changes, last)
    refuse(link.channel.name, results)


def size_of(put: Request) -> int:
    """How many bytes a content still has to send."""
    body = put.payload
    return len(body) if isinstance(body, bytes) else max(0, body.stat().st_size - put.offset)


def finish(
    session: Session, config: dict[str, Any], paths: RunPaths, *, interrupted: bool
) -> Ended:
    """Follow the job to its end and collect what it left."""
    run_id = paths.folder.name
    link = session.link(config["host"])
    session.store(tracking_of(config), Path(config["results"]))
    with session.show.progress() as (on_event, on_interrupt):
        state = follow(
            link.channel, run_id, paths.folder, on_event, on_interrupt, interrupted=interrupted
        )
    return Ended(state=state, result=collect(link.channel, run_id, CASE, paths))

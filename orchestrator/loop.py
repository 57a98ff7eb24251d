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

from orchestrator.channel import RefusedError, Reply, Request
from orchestrator.conclude import conclude, tracking_of
from orchestrator.config import Resolved
from orchestrator.errors import (
    Detached,
    HostError,
    HostUnreachable,
    InputError,
    OrchestratorError,
    StateUnknown,
)
from orchestrator.follow import (
    Ended,
    Wish,
    collect,
    follow,
    follow_request,
    noting_interrupts,
    write_atomic,
)
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
from orchestrator.runs import (
    new_folder,
    new_run_id,
    open_config,
    owned,
    record_of,
    write_json,
    write_records,
)
from orchestrator.session import Link, Session, key_of

UNDER_WAY = ("queued", "starting", "running")
FIRST_S = 1.0  # how long the answer to a start waits for the job's first output
BUSY_PAUSE_S = 1.0
SOON_SENT = 1 << 20  # bytes that need no waiting for
CHANGED = "the command ended before the job started, and {} has changed since; run it again"


def run(
    session: Session,
    resolved: Resolved,
    sweep: str | None = None,
    begun: Callable[[str], None] = lambda _: None,
) -> Path:
    """Answer one hypothesis and file it; returns the run's folder on this machine.

    `begun` is told the run's id before anything is started. Raises InputError before anything is
    started; whatever happens later is in the records, and where the host is lost on the way,
    `resume` goes on from them.
    """
    config = resolved.config
    snapshot = session.snapshot()
    run_id = new_run_id(resolved.experiment or name_of(config["job"]))
    paths = new_folder(Path(config["results"]), run_id)
    # Owned before it can be seen: nobody else may take it for one that was left.
    with owned(paths) as mine:
        if not mine:
            raise InputError(f"{paths.folder} is another command's; run it again")
        write_records(paths, resolved, snapshot, sweep)
        session.folders.append(paths.folder)
        begun(run_id)
        session.show.heading(config, resolved.experiment, run_id)
        wish = Wish()

        def ending() -> Ended:
            host = config["host"]
            try:
                session.link(host)
            except HostUnreachable as error:  # so nothing was started, and that is certain
                raise HostError(f"{error}; nothing was started") from error
            session.patiently(host, lambda: meanwhile(session, config))
            first = session.patiently(host, lambda: start(session, config, paths, wish))
            if config["detach"]:
                raise Detached(f"run {run_id} was started and goes on")
            return finish(session, config, paths, wish, first)

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
    record = record_of(paths)
    session.folders.append(folder)
    session.show.heading(config, record["experiment"], record["run_id"])
    wish = Wish()

    def begin() -> Reply | None:
        channel = session.link(config["host"]).channel
        state = state_of(channel, paths)
        if state["state"] != "never_started" or "ended" in state:  # or it was forgone before
            return None
        try:
            if session.snapshot().digest != record["snapshot"]["digest"]:
                raise OrchestratorError(CHANGED.format("the code"))
            return start(session, config, paths, wish)
        except (HostUnreachable, StateUnknown):
            raise
        except OrchestratorError:
            forgo(channel, paths)
            raise

    def ending() -> Ended:
        session.link_again(config["host"])
        first = session.patiently(config["host"], begin)
        return finish(session, config, paths, wish, first)

    with owned(paths) as mine:
        if not mine:
            raise InputError(f"another command follows {record['run_id']} already; leave it to it")
        conclude(session, config, paths, ending)


def start(session: Session, config: dict[str, Any], paths: RunPaths, wish: Wish) -> Reply | None:
    """Look over the host, send what it lacks and start the job, detached; again changes nothing.

    Returns what the host said of the run behind the start. Ctrl-C leaves the run unstarted while
    there is much to send; once the start is on its way it is kept in `wish`, to be talked about.
    """
    run_id = paths.folder.name
    inputs = session.inputs(config)
    link = session.link(config["host"])
    if paths.request.is_file() and state_of(link.channel, paths)["state"] != "never_started":
        return None  # it was sent before the connection was lost, and got there
    loads = [Load(kind="snapshots", tree=session.snapshot().tree), *loads_of(inputs)]
    waiting = False
    while True:
        asked = paths_asked(config, inputs, link.root)
        *laid_out, told = link.channel.pipeline(
            [*map(lay_out, loads), question(config, asked, session.modules(config))], check=False
        )
        found = answer_of(link.channel, told)
        sizes = [size_of(put) for put in to_send(loads, laid_out)]
        if any(answer.header.get("busy") for answer in laid_out):
            if not waiting:
                session.show.trouble("waiting  another command is sending the same content")
            waiting = True
            time.sleep(BUSY_PAUSE_S)
            continue
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
        # Of the log alone: else the event that the case has started would be the answer, and what
        # the job then prints would take another round trip.
        first = follow_request(run_id, {"log": 0}, UNDER_WAY, FIRST_S)
        session.store(tracking_of(config), Path(config["results"]))  # opens while the job starts
        try:
            much = sum(sizes) >= SOON_SENT
            with noting_interrupts(wish, lambda: much and link.channel.writing):  # noqa: B023 -- used here
                _, said = deliver(link.channel, loads, laid_out, [go, first])
                write_json(paths.started, {"root": link.root, "t": time.time()})
            return said
        except KeyboardInterrupt:
            session.drop(config["host"])  # what is not sent yet stays here
            raise
        except RefusedError as error:
            if error.kind != "busy":
                raise


def paths_asked(config: dict[str, Any], inputs: dict[str, Input], root: str) -> list[str]:
    """The paths on the host that the preflight is to look at."""
    asked = [given.path for given in inputs.values() if given.tree is None]
    if made := data_to_make(config, inputs, root):
        asked.append(f"{made}/capture.json")
    return asked


def data_to_make(config: dict[str, Any], inputs: dict[str, Input], root: str) -> str | None:
    """Where the job captures its data where it is not there yet; None where it makes none."""
    if config["job"]["name"] == "capture_states" or "prompts" not in inputs:
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
    session: Session,
    config: dict[str, Any],
    paths: RunPaths,
    wish: Wish,
    first: Reply | None = None,
) -> Ended:
    """Follow the job to its end and collect what it left; `first` is what was said of it already.

    Raises StateUnknown for whatever is in the way, since the job goes on, and Detached.
    """
    run_id = paths.folder.name
    session.store(tracking_of(config), Path(config["results"]))
    answers = [first]

    def follow_on() -> Ended:
        link = session.link(config["host"])
        with session.show.progress() as (on_event, on_interrupt):
            said = answers.pop() if answers else None
            state = follow(link.channel, run_id, paths.folder, on_event, on_interrupt, wish, said)
        return Ended(state=state, result=collect(link.channel, run_id, CASE, paths))

    host = config["host"]
    try:
        with noting_interrupts(wish, lambda: key_of(host) in session.lost):
            return session.patiently(host, follow_on)
    except KeyboardInterrupt:
        raise Detached(f"run {run_id} goes on") from None
    except (HostUnreachable, StateUnknown, Detached):
        raise
    except OrchestratorError as error:
        raise StateUnknown(str(error)) from error

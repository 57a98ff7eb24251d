"""Verbs over runs that were started before: runs, attach, logs, cancel, collect."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel
from orchestrator.errors import (
    HostError,
    HostUnreachable,
    InputError,
    OrchestratorError,
    StateUnknown,
)
from orchestrator.follow import OVER, follow_request, poll, prove_gone
from orchestrator.loop import resume
from orchestrator.paths import RunPaths
from orchestrator.pickup import (
    file_meanwhile,
    file_sweep,
    forgo,
    needs_filing,
    not_owned,
    open_runs,
    state_of,
    sweeps_of,
    take_in,
    was_sent,
)
from orchestrator.runs import (
    all_runs,
    config_of,
    exit_code,
    find_run,
    open_config,
    owned,
    read_record,
    record_of,
    results_of,
)
from orchestrator.session import Session, key_of
from orchestrator.show import Show, error_line

USAGE = {
    "runs": "runs [host=NAME]: all runs, oldest first, and the state of those that have not ended",
    "attach": "attach RUN: follow a run to its end, judge and file it",
    "logs": "logs RUN [-f]: what a run has printed; -f goes on until it ends",
    "cancel": "cancel RUN…: end runs, with every process that they started",
    "collect": "collect [RUN…] [host=NAME]: bring in, judge and file all runs that have ended",
}
BLOCK = 1 << 20
WAIT_S = 1.0  # how long the host holds a request open when nothing happens
GRACE_S = 20.0  # a supervisor gives its job 5 seconds to end, and kills it then


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A verb's arguments."""

    names: tuple[str, ...]
    results: Path
    host: str | None = None
    follow: bool = False


def parse(verb: str, arguments: Sequence[str]) -> Asked | None:
    """The arguments of a verb; None where its help was asked for. Raises InputError."""
    usage = f"python -m orchestrator {USAGE[verb].partition(':')[0]} [results=FOLDER]"
    names: list[str] = []
    settings: dict[str, str] = {}
    follow = False
    for argument in arguments:
        key, is_setting, value = argument.partition("=")
        if argument in ("-h", "--help"):
            return None
        if argument in ("-f", "--follow") and verb == "logs":
            follow = True
        elif is_setting and (key == "results" or (key == "host" and f"[{key}=" in USAGE[verb])):
            settings[key] = value
        elif argument.startswith("-") or (is_setting and "/" not in key):
            raise InputError(f"{verb} takes no {argument!r}; usage: {usage}")
        else:
            names.append(argument)
    least, most = {"runs": (0, 0), "collect": (0, 999), "cancel": (1, 999)}.get(verb, (1, 1))
    if not least <= len(names) <= most:
        wanted = "no run" if not most else "one run" if most == 1 else "a run"
        raise InputError(f"{verb} takes {wanted}; usage: {usage}")
    return Asked(
        names=tuple(names),
        results=results_of(settings.get("results")),
        host=settings.get("host"),
        follow=follow,
    )


def run(verb: str, arguments: Sequence[str]) -> int:
    """Do what a verb says; its exit code."""
    asked = parse(verb, arguments)
    show = Show()
    if asked is None:
        usage, _, words = USAGE[verb].partition(": ")
        show.line(
            f"python -m orchestrator {usage} [results=FOLDER]\n{words[0].upper()}{words[1:]}."
        )
        return 0
    action = {
        "runs": list_runs,
        "attach": attach,
        "logs": logs,
        "cancel": cancel,
        "collect": collect,
    }
    with Session(show) as session:
        return action[verb](session, asked)


def list_runs(session: Session, asked: Asked) -> int:
    """All runs with their state; a host that does not answer makes its runs unreachable, not failed."""
    rows = []
    lost: dict[str, str] = {}
    for folder in all_runs(asked.results):
        paths = RunPaths(folder)
        try:
            record = record_of(paths)
        except OrchestratorError as error:
            rows.append({"run_id": folder.name, "host": "", "state": "unknown", "said": str(error)})
            continue
        if asked.host in (None, record["host"]):
            rows.append({**record, **standing(session, paths, lost)})
    if asked.host is not None and not rows:
        raise InputError(f"no run here was made on a host named {asked.host}")
    session.show.runs(rows)
    for sentence in lost.values():
        error_line(sentence)
    return 1 if lost else 0


def diagnosed(paths: RunPaths) -> str:
    """What a run's diagnosis found, in a line; '' of a run that asked for none, or got none."""
    if read_record(paths.run)["job"] != "diagnose" or not paths.result.is_file():
        return ""
    diagnosis = read_record(paths.result).get("diagnosis") or {}
    return str(diagnosis.get("headline", ""))


def standing(session: Session, paths: RunPaths, lost: dict[str, str]) -> dict[str, str]:
    """A run's state, and its verdict or what else is to be said."""
    if paths.verdict.is_file():
        verdict = read_record(paths.verdict)
        ended = read_record(paths.exit) if paths.exit.is_file() else {"state": "not started"}
        word, found = verdict["verdict"].replace("_", " "), diagnosed(paths)
        if found:
            word = found if word == "measured" else f"{word}; {found}"
        filed = "" if paths.filed.is_file() else ", not filed"
        return {"state": state_in_words(ended), "said": word + filed}
    try:
        host = open_config(paths)["host"]
    except OrchestratorError as error:
        return {"state": "unknown", "said": str(error)}
    key = key_of(host)
    if not was_sent(paths):
        with owned(paths) as mine:
            said = "attach starts it, collect closes it" if mine else "another command has it"
        return {"state": "never started", "said": said}
    if key in lost:
        return {"state": "unreachable", "said": ""}
    try:
        state = state_of(session.link(host).channel, paths)
    except StateUnknown as error:
        return {"state": "unknown", "said": str(error)}
    except OrchestratorError as error:
        lost[key] = str(error)
        session.drop(host)
        return {"state": "unreachable", "said": ""}
    with owned(paths) as mine:
        if not mine:
            return {"state": state_in_words(state), "said": "another command has it"}
    said = (
        f"waits for {state.get('waiting_for', 'its start')}" if state["state"] == "queued" else ""
    )
    if state["state"] == "never_started":
        said = "attach starts it, collect closes it"
    elif state["state"] in OVER:
        said = "collect it"
    return {"state": state_in_words(state), "said": said}


def state_in_words(state: dict[str, Any]) -> str:
    """'finished(0)', 'killed(SIGSEGV)', 'running'."""
    word = str(state["state"]).replace("_", " ")
    detail = state.get("signal_name") or state.get("rc")
    return f"{word}({detail})" if detail is not None and word in ("finished", "killed") else word


def attach(session: Session, asked: Asked) -> int:
    """Follow one run to its end; the answer of one that has ended is shown again."""
    folder = find_run(asked.names[0], asked.results)
    paths = RunPaths(folder)
    if paths.verdict.is_file():
        record, verdict = record_of(paths), read_record(paths.verdict)
        session.show.heading(config_of(paths), record["experiment"], record["run_id"])
        if verdict["verdict"] == "not_answered":
            session.show.not_answered(verdict["reason"], folder)
        else:
            session.show.answer(read_record(paths.result), verdict)
        return exit_code([folder])
    resume(session, folder)
    file_meanwhile(session, folder.parent.parent)
    for sweep in sweeps_of([folder]):
        if paths.filed.is_file() and not_owned(sweep):
            file_sweep(session, sweep)
    return exit_code(session.folders, failed=session.failed)


def logs(session: Session, asked: Asked) -> int:
    """The log as bytes, from the host while the run goes on, else from this machine."""
    folder = find_run(asked.names[0], asked.results)
    paths = RunPaths(folder)
    if paths.verdict.is_file():
        emit_file(paths.log)
        return 0
    try:
        channel = session.link(open_config(paths)["host"]).channel
        state_of(channel, paths)
    except HostError as error:
        error_line(f"{error}; this is what had come before")
        emit_file(paths.log)
        return 1
    printed = 0
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave it
        for part in log_of(channel, folder.name, follow=asked.follow):
            printed += len(part)
            emit(part)
    if not printed:
        sys.stderr.write("the job has printed nothing so far; attach shows its progress\n")
    return 0


def emit_file(path: Path) -> None:
    """A log on this machine to stdout."""
    with path.open("rb") as file:
        while part := file.read(BLOCK):
            emit(part)


def log_of(channel: Channel, run_id: str, *, follow: bool) -> Iterator[bytes]:
    """A run's log on its host, in parts; with `follow` until the run has ended."""
    offset, seen = 0, ""
    while True:
        wait_s = WAIT_S if follow and seen else 0.0
        request = follow_request(run_id, {"log": offset}, [seen] if seen else [], wait_s)
        (reply,) = channel.pipeline([request], check=False)
        state, parts = poll(channel, run_id, {"log": offset}, seen, reply)
        seen, part = state["state"], parts.get("log", b"")
        offset += len(part)
        yield part
        if not part and (not follow or seen in OVER):
            return


def emit(part: bytes) -> None:
    """Bytes to stdout, as they are."""
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def cancel(session: Session, asked: Asked) -> int:
    """End runs, and see that nothing of them is left; one that cannot be ended keeps no other."""
    failed = False
    for folder in [find_run(name, asked.results) for name in asked.names]:
        paths = RunPaths(folder)
        try:
            config = open_config(paths)
            if paths.verdict.is_file():
                session.show.line(f"{folder.name}  {standing(session, paths, {})['state']} already")
                continue
            if was_sent(paths):
                channel = session.link_again(config["host"]).channel
                state = state_in_words(end(channel, paths))
                session.show.line(f"{folder.name}  {state}; no process of it is left there")
            with owned(paths) as mine:
                if mine and not paths.verdict.is_file():
                    take_in(session, config, paths)
        except OrchestratorError as error:
            failed = True
            error_line(f"{folder.name}: {error}")
    file_meanwhile(session, asked.results)
    return 1 if failed else 0


def end(channel: Channel, paths: RunPaths) -> dict[str, Any]:
    """Ask a run to end, insist, and prove it; its final state. Raises HostError where it goes on.

    A run that another command is about to start is forgone: its start will come too late.
    """
    run_id = paths.folder.name
    state = state_of(channel, paths)
    if state["state"] == "never_started":
        state = forgo(channel, paths)
    if state["state"] not in OVER:
        channel.request("signal", run_id=run_id, signal="TERM")
        waited = 0.0
        while state["state"] not in OVER and waited < GRACE_S:
            request = follow_request(run_id, {}, [state["state"]], WAIT_S)
            state = channel.pipeline([request])[0].header["state"]
            waited += WAIT_S
    if state["state"] not in OVER:
        channel.request("signal", run_id=run_id, signal="KILL")
        state = state_of(channel, paths)
    if state["state"] != "never_started":
        prove_gone(channel, run_id)
    if state["state"] not in OVER:
        raise HostError(f"{channel.name}: {run_id} is still {state['state']} after SIGKILL")
    return state


def collect(session: Session, asked: Asked) -> int:
    """Bring in what has ended, of the runs named or of all."""
    if asked.names:
        folders = [RunPaths(find_run(name, asked.results)) for name in asked.names]
    else:
        folders = list(open_runs(asked.results))
    failed = False
    lost: set[str] = set()
    for paths in folders:
        try:
            config = open_config(paths)
        except OrchestratorError as error:
            failed = True
            error_line(str(error))
            continue
        if asked.host not in (None, config["host"]["name"]) or key_of(config["host"]) in lost:
            continue
        with owned(paths) as mine:
            if not mine:
                session.show.line(f"{paths.folder.name}  another command follows it")
                continue
            if paths.verdict.is_file():
                continue
            try:
                take_in(session, config, paths)
            except HostUnreachable as error:
                failed = True
                lost.add(key_of(config["host"]))
                error_line(f"unreachable: {error}")
            except OrchestratorError as error:  # its own, and no reason to leave the others
                failed = True
                error_line(f"{paths.folder.name}: {error}")
    file_meanwhile(session, asked.results)
    unfiled = any(needs_filing(RunPaths(folder)) for folder in all_runs(asked.results))
    if not folders:
        session.show.line("every run has ended and was judged")
    return 1 if failed or unfiled else 0

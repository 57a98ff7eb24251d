"""The way of one run: snapshot, push, start, follow, collect, judge, show, record.

A `Session` is what the runs of one command share: the snapshot, the connection to each host, the
tracking store that opens while the first job runs. The command's exit code is computed at the end
from the records on disk, since Hydra swallows what a job function returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from orchestrator.channel import Channel, RefusedError, open_local
from orchestrator.config import Resolved
from orchestrator.errors import HostUnreachable, InputError, OrchestratorError, TrackingError
from orchestrator.follow import Ended, collect, follow, write_atomic
from orchestrator.judge import judge, not_answered, parse_predictions
from orchestrator.paths import CLONE, RunPaths, runs_folder
from orchestrator.plan import (
    CASE,
    Placed,
    capture_request,
    drafter_test_request,
    host_path,
    local_tree,
    made_data,
)
from orchestrator.push import push_tree
from orchestrator.runs import create_folder, failed_result, new_run_id, why_not, write_json
from orchestrator.show import Show
from orchestrator.snapshot import Snapshot, take_snapshot
from orchestrator.tracking import Tracking, default_tracking, how_to_open

if TYPE_CHECKING:
    from orchestrator.tracking import Store


class Session:
    """What the runs of one command share. Use as a context manager."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.folders: list[Path] = []  # of the runs made, in order
        self.failed = False  # something went wrong that no run's records tell
        self.cancelled = False  # the last run was cancelled, so a sweep stops
        self._stack = ExitStack()
        self._channels: dict[tuple[str, str], tuple[Channel, str]] = {}
        self._snapshot: Snapshot | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tracking")
        self._stores: dict[Tracking, Future[Store]] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._stack.close()

    def snapshot(self) -> Snapshot:
        """The code as it is now; taken once a command, so that a sweep tests one thing."""
        if self._snapshot is None:
            self._snapshot = take_snapshot(CLONE)
        return self._snapshot

    def channel(self, host: dict[str, Any]) -> tuple[Channel, str]:
        """The channel to a host and the root folder of its program there."""
        key = (host["work"], host["python"])
        if key not in self._channels:
            work = Path(host["work"]).expanduser()
            channel = self._stack.enter_context(
                open_local(work, host["python"], name=f"host {host['name']}")
            )
            self._channels[key] = channel, channel.hello()["root"]
        return self._channels[key]

    def store(self, tracking: Tracking, results: Path) -> Future[Store]:
        """The tracking store; the first call starts to open it, beside whatever else goes on."""
        if tracking not in self._stores:
            self._stores[tracking] = self._pool.submit(open_and_heal, tracking, results)
        return self._stores[tracking]


def open_and_heal(tracking: Tracking, results: Path) -> Store:
    """Open the store, and end what a command that was killed while filing left as running there."""
    from orchestrator.record import heal, open_store

    store = open_store(tracking)
    heal(store, runs_folder(results))
    return store


def run(session: Session, resolved: Resolved, sweep: str | None = None) -> Path:
    """Answer one hypothesis and file it; returns the run's folder on this machine.

    Raises InputError before anything is started; whatever happens later is in the records, and
    where the host is lost on the way, `resume` goes on from them.
    """
    config = resolved.config
    snapshot = session.snapshot()
    run_id = new_run_id(resolved.experiment or config["job"]["name"])
    paths = create_folder(Path(config["results"]), run_id, resolved, snapshot, sweep)
    session.folders.append(paths.folder)
    session.show.heading(config, resolved.experiment, run_id)
    conclude(session, config, paths, lambda: execute(session, config, run_id, paths))
    return paths.folder


def resume(session: Session, folder: Path) -> None:
    """Take up a run whose command ended before it did: follow it, collect, judge and file it."""
    paths = RunPaths(folder)
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(paths.config))  # type: ignore[assignment]
    record = json.loads(paths.run.read_bytes())
    session.folders.append(folder)
    session.show.heading(config, record["experiment"], record["run_id"])

    def take_up() -> Ended:
        channel, _ = session.channel(config["host"])
        for path in (paths.log, paths.events):
            path.write_bytes(b"")  # read again from the start
        session.store(tracking_of(config), Path(config["results"]))
        try:
            with session.show.progress() as on_event:
                state = follow(channel, record["run_id"], folder, on_event)
        except RefusedError as error:
            if error.kind != "missing":
                raise
            raise OrchestratorError(
                "the command was stopped before the job was started; run it again"
            ) from error
        result = collect(channel, record["run_id"], record["case_id"], paths)
        return Ended(state=state, result=result)

    conclude(session, config, paths, take_up)


def conclude(
    session: Session, config: dict[str, Any], paths: RunPaths, ending: Callable[[], Ended]
) -> None:
    """Bring a run to its end by `ending`, judge it, show it and file it."""
    try:
        answer(session, config, paths, ending)
    except HostUnreachable as error:
        # Never the same as a failed run: it may go on there, so nothing is judged.
        session.failed = True
        session.show.line(f"unreachable  {error}", style="red")
        session.show.line(f"Take it up again with: python -m orchestrator record {paths.folder}")
        return
    except OSError as error:
        raise OrchestratorError(
            f"{error.filename or paths.folder} cannot be written ({error.strerror}); make room, then "
            f"take the run up again with: python -m orchestrator record {paths.folder}"
        ) from error
    file_run(session, tracking_of(config), Path(config["results"]), paths)


def answer(
    session: Session, config: dict[str, Any], paths: RunPaths, ending: Callable[[], Ended]
) -> None:
    """End a run, judge it and show it; its folder then holds the verdict."""
    try:
        ended = ending()
        verdict = (
            judge(parse_predictions(config["predict"]), (ended.result or {}).get("metrics", {}))
            if ended.ok
            else not_answered(why_not(ended, paths))
        )
    except HostUnreachable:
        raise
    except OrchestratorError as error:
        ended = Ended(state={}, result=failed_result(error))
        write_json(paths.result, ended.result)
        verdict = not_answered(str(error))
    write_json(paths.verdict, verdict.plain())
    session.cancelled = ended.state.get("state") == "cancelled"
    if ended.ok and ended.result is not None:
        session.show.answer(ended.result, verdict.plain())
    else:
        session.show.not_answered(verdict.reason, paths.folder)


def execute(session: Session, config: dict[str, Any], run_id: str, paths: RunPaths) -> Ended:
    """Push, start and follow the job, and before it the capture of data that is not there yet."""
    channel, root = session.channel(config["host"])
    code = push_tree(channel, "snapshots", session.snapshot().tree)
    target = place(channel, "target", config["target"])
    job = config["job"]["name"]
    if job == "capture_states":
        prompts = place_prompts(channel, config)
        out = expanded(channel, "job.out", config["job"]["out"])
        request = capture_request(config, target, prompts, out, root, keep=False)
        return start_and_follow(session, channel, config, code, run_id, request, paths)
    drafter = place(channel, "drafter", config["drafter"])
    if config["data"]["capture"] is None:
        if config["data"]["path"] is None:
            raise InputError("data has neither a path nor a capture; set data.path")
        data = place(channel, "data", config["data"]).path
    else:
        prompts = place_prompts(channel, config)
        data = made_data(config, target, prompts, root)
        if not channel.request("stat", path=f"{data}/capture.json").header["exists"]:
            request = capture_request(config, target, prompts, data, root, keep=True)
            captured = start_and_follow(
                session, channel, config, code, f"{run_id}-capture", request, paths
            )
            if not captured.ok:
                return captured
            for path in (paths.exit, paths.result, paths.environment):
                path.unlink(missing_ok=True)  # they are about the capture, not about this run
    request = drafter_test_request(config, target, drafter, data, root)
    return start_and_follow(session, channel, config, code, run_id, request, paths)


def place(channel: Channel, role: str, section: dict[str, Any]) -> Placed:
    """An input on the host: sent along where it lies here, used in place where it lies there."""
    if section["where"] == "host":
        return Placed(path=expanded(channel, role, section["path"]), digest="")
    tree = local_tree(role, section["path"])
    return Placed(path=push_tree(channel, "inputs", tree), digest=tree.digest)


def expanded(channel: Channel, role: str, path: str) -> str:
    """A path on the host with its `~` expanded by the host."""
    return str(channel.request("stat", path=host_path(role, path)).header["path"])


def place_prompts(channel: Channel, config: dict[str, Any]) -> Placed:
    """The prompts file, which always lies on this machine."""
    if config["data"]["capture"] is None:
        raise InputError(
            "job=capture_states needs data=capture with data.capture.prompts and states"
        )
    prompts = config["data"]["capture"]["prompts"]
    tree = local_tree("data.capture.prompts", prompts)
    folder = push_tree(channel, "inputs", tree)
    return Placed(path=f"{folder}/{Path(prompts).name}", digest=tree.digest)


def start_and_follow(
    session: Session,
    channel: Channel,
    config: dict[str, Any],
    code: str,
    run_id: str,
    request: dict[str, Any],
    paths: RunPaths,
) -> Ended:
    """Start a job on the host, detached, and follow it to its end."""
    payload = json.dumps({"run_id": run_id, **request}, indent=1).encode()
    write_atomic(paths.request, payload)
    channel.request(
        "start",
        run_id=run_id,
        snapshot=code,
        python=config["host"]["python"],
        env={},
        payload=payload,
    )
    session.store(tracking_of(config), Path(config["results"]))  # opens while the job runs
    with session.show.progress() as on_event:
        state = follow(channel, run_id, paths.folder, on_event)
    return Ended(state=state, result=collect(channel, run_id, CASE, paths))


def file_run(session: Session, tracking: Tracking, results: Path, paths: RunPaths) -> None:
    """File the run in MLflow; where that fails, the run's folder stays and can be filed later."""
    from orchestrator.record import fill_run

    try:
        filed = fill_run(session.store(tracking, results).result(), paths.folder)
    except (TrackingError, KeyboardInterrupt) as error:
        reason = str(error) or "interrupted"
        session.show.line(f"not filed  {reason}", style="red")
        session.show.line(
            f"The run is whole; file it: python -m orchestrator record {paths.folder}"
        )
        session.cancelled |= isinstance(error, KeyboardInterrupt)
        return
    write_json(paths.filed, {"uri": tracking.uri, "run": filed.mlflow_run_id})
    session.show.filed(
        f"MLflow run {filed.mlflow_run_id}; look at it with: {how_to_open(tracking)}"
    )


def tracking_of(config: dict[str, Any]) -> Tracking:
    """Where a config's runs are filed."""
    uri, experiment = config["tracking"]["uri"], config["tracking"]["experiment"]
    default = default_tracking(Path(config["results"]))
    if uri is None:
        return Tracking(uri=default.uri, experiment=experiment, artifact_root=default.artifact_root)
    return Tracking(uri=uri, experiment=experiment)

"""The way of one run: snapshot, push, start, follow, collect, judge, show, record.

A `Session` is what the runs of one command share: the snapshot, the connection to each host, the
tracking store that opens while the first job runs. The command's exit code is computed at the end
from the records on disk, since Hydra swallows what a job function returns.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from orchestrator.channel import Channel, open_local
from orchestrator.config import Resolved
from orchestrator.errors import InputError, OrchestratorError, TrackingError
from orchestrator.follow import Ended, collect, follow, write_atomic
from orchestrator.judge import Prediction, judge, not_answered, parse_predictions
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
from orchestrator.show import Show
from orchestrator.snapshot import Snapshot, take_snapshot
from orchestrator.tracking import Tracking, default_tracking, how_to_open

if TYPE_CHECKING:
    from orchestrator.tracking import Store

BAD_INPUT = ("BadInput", "InputError")  # raised on the host, and here


class Session:
    """What the runs of one command share. Use as a context manager."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.folders: list[Path] = []  # of the runs made, in order
        self.failed = False  # something went wrong that no run's records tell
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

    Raises InputError before anything is started; whatever happens later is in the records.
    """
    config = resolved.config
    predictions = parse_predictions(config["predict"])
    results = Path(config["results"])
    snapshot = session.snapshot()
    run_id = new_run_id(resolved.experiment or config["job"]["name"])
    paths = create_folder(results, run_id, resolved, snapshot, sweep)
    session.folders.append(paths.folder)
    session.show.heading(config, resolved.experiment, run_id)
    try:
        answer(session, config, predictions, run_id, paths)
    except OSError as error:
        raise OrchestratorError(
            f"{error.filename or paths.folder} cannot be written ({error.strerror}); make room and run "
            f"it again; what the host has of this run stays in {config['host']['work']}/runs/{run_id}"
        ) from error
    file_run(session, tracking_of(config), results, paths)
    return paths.folder


def answer(
    session: Session,
    config: dict[str, Any],
    predictions: tuple[Prediction, ...],
    run_id: str,
    paths: RunPaths,
) -> None:
    """Execute a run, judge it and show it; its folder then holds the verdict."""
    try:
        ended = execute(session, config, run_id, paths)
        verdict = (
            judge(predictions, (ended.result or {}).get("metrics", {}))
            if ended.ok
            else not_answered(why_not(ended, paths))
        )
    except OrchestratorError as error:
        ended = Ended(state={}, result=failed_result(error))
        write_json(paths.result, ended.result)
        verdict = not_answered(str(error))
    write_json(paths.verdict, verdict.plain())
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
        out = host_path("job.out", config["job"]["out"])
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
        return Placed(path=host_path(role, section["path"]), digest="")
    tree = local_tree(role, section["path"])
    return Placed(path=push_tree(channel, "inputs", tree), digest=tree.digest)


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
    except TrackingError as error:
        session.show.line(f"not filed  {error}", style="red")
        session.show.line(
            f"The run is whole in {paths.folder}; file it with: python -m orchestrator record "
            f"{paths.folder}"
        )
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


def create_folder(
    results: Path, run_id: str, resolved: Resolved, snapshot: Snapshot, sweep: str | None
) -> RunPaths:
    """The run's folder with all that is known before it starts."""
    paths = RunPaths(runs_folder(results) / run_id)
    try:
        paths.folder.mkdir(parents=True)
        paths.config.write_text(resolved.yaml, encoding="utf-8")
        paths.snapshot_diff.write_text(snapshot.diff, encoding="utf-8")
        paths.log.touch()
        record = {
            "run_id": run_id,
            "case_id": CASE,
            "experiment": resolved.experiment,
            "claim": resolved.config["claim"],
            "predict": resolved.config["predict"],
            "strict": resolved.config["strict"],
            "job": resolved.config["job"]["name"],
            "host": resolved.config["host"]["name"],
            "snapshot": {"digest": snapshot.digest, "commit": snapshot.commit},
            "overrides": list(resolved.overrides),
            "sweep": sweep,
            "created": time.time(),
        }
        write_json(paths.run, record)
    except OSError as error:
        raise InputError(
            f"{paths.folder} cannot be written ({error.strerror}); set results=FOLDER to a place "
            "with room"
        ) from error
    return paths


def new_run_id(name: str) -> str:
    """A name for a run that sorts by time and is safe in paths and shells."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:48].strip("-.") or "run"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{secrets.token_hex(3)}"


def why_not(ended: Ended, paths: RunPaths) -> str:
    """Why a job gave no answer, in one sentence."""
    if ended.result is not None and ended.result.get("error"):
        error = ended.result["error"]
        plain = error["kind"] in BAD_INPUT
        return str(error["message"]) if plain else f"{error['kind']}: {error['message']}"
    state = ended.state
    last = last_line(paths.log)
    said = f"; its last line: {last}" if last else ""
    words = {
        "finished": f"the job ended with exit code {state.get('rc')} and left no result{said}",
        "killed": f"the job was killed by {state.get('signal_name')}"
        + (
            f" (out of memory, by the {state['out_of_memory']})"
            if state.get("out_of_memory")
            else ""
        )
        + said,
        "timed_out": "the job ran past its time limit (job.timeout_s) and was stopped",
        "cancelled": "the run was cancelled",
        "vanished": f"the job vanished: {state.get('reason', 'its supervisor is gone')}",
    }
    return words[state["state"]]


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    if not path.is_file():
        return ""
    lines = path.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def failed_result(error: OrchestratorError) -> dict[str, Any]:
    """The result of a run that failed on this side, before or beside the job."""
    return {
        "case_id": CASE,
        "status": "failed",
        "error": {"kind": type(error).__name__, "message": str(error), "traceback": ""},
        "started": time.time(),
        "ended": time.time(),
        "metrics": {},
        "curves": {},
    }


def write_json(path: Path, data: Any) -> None:
    """A JSON file under its final name only when complete."""
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False).encode())


def exit_code(folders: list[Path], failed: bool = False) -> int:
    """0 answered, 1 not answered or not filed, 2 bad input, 3 refuted with strict=true."""
    codes = {code_of(RunPaths(folder)) for folder in folders} | ({1} if failed else set())
    return next((code for code in (1, 2, 3) if code in codes), 0)


def code_of(paths: RunPaths) -> int:
    """The exit code of one run, from its records."""
    if not paths.verdict.is_file():
        return 1
    verdict = json.loads(paths.verdict.read_bytes())["verdict"]
    if verdict == "not_answered":
        result = json.loads(paths.result.read_bytes()) if paths.result.is_file() else {}
        return 2 if (result.get("error") or {}).get("kind") in BAD_INPUT else 1
    if not paths.filed.is_file():
        return 1
    return 3 if verdict == "refuted" and json.loads(paths.run.read_bytes())["strict"] else 0

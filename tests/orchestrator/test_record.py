"""Runs and sweeps in MLflow, read back through MLflow's own client from a real database."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError, TrackingError
from orchestrator.filing import FolderError, read_run
from orchestrator.record import (
    Store,
    Tracking,
    default_tracking,
    fill_run,
    fill_sweep,
    heal,
    open_store,
)

# MLflow 3.17 uses what SQLAlchemy 2.1 gives up.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")

T0 = 1_790_000_000.0
CONFIG = """\
claim: embedding capture
wiring: {layers: [-1, 2, 30], convention: output, d2t: offset, decoder_layer: included}
drafter: {name: eagle, where: host, path: /models/eagle}
job: {name: drafter_test, steps: 2, seed: 0, timeout_s: null, rate: 0.50}
tracking: {uri: null}
"""
EXIT = {
    "state": "finished",
    "rc": 0,
    "signal": None,
    "signal_name": None,
    "out_of_memory": None,
    "started": T0 + 1,
    "ended": T0 + 9,
}
VERDICT = {"verdict": "supported", "reason": "accuracy 0.77 > 0.7", "predictions": []}


def figure(value: float, count: int, of: int = 1000, **more: object) -> dict[str, Any]:
    low, high = value - 0.01, value + 0.01
    counts = {"numerator": count, "denominator": of, "truth": "target_argmax"}
    return {"value": value, "low": low, "high": high, **counts, **more}


def result(**changes: object) -> dict[str, Any]:
    return {
        "case_id": "c0",
        "status": "ok",
        "error": None,
        "started": T0 + 2,
        "ended": T0 + 8.25,
        "metrics": {
            "accuracy": figure(0.769, 769),
            "accept_length": figure(2.5, 2500, truth="target_argmax"),
            "accept_length_uniform": figure(2.25, 2250),
            "coverage": figure(0.98, 980) | {"low": None, "high": None},
        },
        "curves": {
            f"step_accuracy/{kind}": [figure(0.7 - step / 10, 700, step=step) for step in range(3)]
            for kind in ("marginal", "conditional", "cumulative")
        },
        "wiring": {"states": [0, 3, 31], "fc_norm": False},
        "fingerprints": {"drafter": "sha256:d", "target": "sha256:t", "data": "sha256:x"},
        "notes": ["42 samples"],
        **changes,
    }


def metric(name: str, value: float, step: int | None = 0, t: float = T0 + 3) -> dict[str, Any]:
    return {
        "t": t,
        "type": "metric",
        "case_id": "c0",
        "name": name,
        "value": value,
        "step": step,
    }


def write_run(
    runs: Path,
    run_id: str,
    *,
    result: dict[str, Any] | None = None,
    exit: dict[str, Any] | None = None,  # noqa: A002
    verdict: dict[str, Any] | None = VERDICT,
    events: list[dict[str, Any]] | None = None,
    config: str = CONFIG,
    **run: object,
) -> Path:
    """A client-side run folder, as a command leaves it."""
    folder = runs / run_id
    folder.mkdir(parents=True)
    files = {
        "run.json": {
            "run_id": run_id,
            "case_id": "c0",
            "experiment": "capture",
            "claim": "embedding capture",
            "predict": "accuracy > 0.7",
            "job": "drafter_test",
            "host": "gpu",
            "snapshot": {"digest": "sha256:s", "commit": "abc"},
            "overrides": ["wiring.d2t=offset"],
            "sweep": None,
            "created": T0,
            **run,
        },
        "request.json": {"run_id": run_id},
        "environment.json": {"python": "3.11"},
        "result.json": result,
        "exit.json": exit,
        "verdict.json": verdict,
    }
    for name, value in files.items():
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    (folder / "config.yaml").write_text(config)
    (folder / "log").write_bytes(b"scored \xff\n")
    (folder / "snapshot.diff").touch()
    events = [{"t": T0 + 1, "type": "note", "text": "hi"}] if events is None else events
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def stored(store: Store, mlflow_run_id: str) -> dict[str, Any]:
    """Everything MLflow holds about a run."""
    run = store.client.get_run(mlflow_run_id)
    files, folders = {}, [None]
    while folders:
        for entry in store.client.list_artifacts(mlflow_run_id, folders.pop()):
            if entry.is_dir:
                folders.append(entry.path)
            else:
                path = store.client.download_artifacts(mlflow_run_id, entry.path)
                files[entry.path] = Path(path).read_bytes()
    return {
        "info": (run.info.status, run.info.start_time, run.info.end_time, run.info.run_name),
        "params": dict(run.data.params),
        "tags": dict(run.data.tags),
        "points": {
            key: [
                (point.step, point.value, point.timestamp)
                for point in store.client.get_metric_history(mlflow_run_id, key)
            ]
            for key in run.data.metrics
        },
        "files": files,
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One opened store for the module; every test files runs of its own ids, in its own folder."""
    return open_store(default_tracking(tmp_path_factory.mktemp("results")))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.mark.parametrize("part", ["bench", "probe"])
def test_a_patch_of_the_engine_is_filed_with_its_hash(part: str, runs: Path) -> None:
    patch = {"name": "my.patch", "sha256": "ab12", "files": ["sglang/srt/models/llama.py"]}
    folder = write_run(runs, "run-p", result={**result(), part: {"patch": patch}}, exit=EXIT)
    params = read_run(folder).params
    assert params["resolved.patch.name"] == "my.patch"
    assert params["resolved.patch.sha256"] == "ab12"
    assert "sglang/srt/models/llama.py" in params["resolved.patch.files"]


def test_a_run_reads_back_as_its_folder_says(store: Store, runs: Path) -> None:
    folder = write_run(
        runs,
        "run-a",
        result=result(),
        exit=EXIT,
        events=[metric("loss", 1.5), metric("loss", 1.25, 1), {"t": T0, "type": "progress"}],
    )
    filed = fill_run(store, folder)
    got = stored(store, filed.mlflow_run_id)

    assert filed.status == "FINISHED"
    assert filed.notes == ()
    assert got["info"] == ("FINISHED", 1_790_000_000_000, 1_790_000_008_250, "run-a")
    assert got["params"] == {
        "wiring.layers": "[-1, 2, 30]",
        "wiring.convention": "output",
        "wiring.d2t": "offset",
        "wiring.decoder_layer": "included",
        "drafter.name": "eagle",
        "drafter.where": "host",
        "drafter.path": "/models/eagle",
        "job.name": "drafter_test",
        "job.steps": "2",
        "job.seed": "0",
        "job.timeout_s": "null",
        "job.rate": "0.5",
        "resolved.states": "[0, 3, 31]",
        "resolved.fc_norm": "false",
        "host": "gpu",
        "experiment": "capture",
    }
    ended = 1_790_000_008_250
    points = got["points"]
    assert points["accuracy"] == [(0, 0.769, ended)]
    assert points["accuracy/low"] == [(0, 0.769 - 0.01, ended)]
    assert points["counts/accuracy/numerator"] == [(0, 769.0, ended)]
    assert points["counts/accept_length/denominator"] == [(0, 1000.0, ended)]
    assert points["step_accuracy/marginal"] == [(step, 0.7 - step / 10, ended) for step in range(3)]
    assert len(points["counts/step_accuracy/cumulative/numerator"]) == 3
    assert "coverage/low" not in points
    assert points["loss"] == [(0, 1.5, 1_790_000_003_000), (1, 1.25, 1_790_000_003_000)]
    assert {
        "orchestrator.run_id": "run-a",
        "mlflow.runName": "run-a",
        "verdict": "supported",
        "claim": "embedding capture",
        "predict": "accuracy > 0.7",
        "experiment": "capture",
        "host": "gpu",
        "snapshot": "sha256:s",
        "snapshot.commit": "abc",
        "target": "sha256:t",
        "drafter": "sha256:d",
        "data": "sha256:x",
        "truth.accuracy": "target_argmax",
        "truth.step_accuracy/marginal": "target_argmax",
        "config.sha256": hashlib.sha256(CONFIG.encode()).hexdigest(),
        "exit": "finished",
        "notes": "42 samples",
    }.items() <= got["tags"].items()
    assert "orchestrator.sweep" not in got["tags"]
    assert got["files"] == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_filing_again_changes_nothing(store: Store, runs: Path) -> None:
    folder = write_run(runs, "run-twice", result=result(), exit=EXIT, events=[metric("loss", 1.5)])
    (folder / "config.yaml").chmod(0o444)
    before = {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    first = fill_run(store, folder)
    once = stored(store, first.mlflow_run_id)
    assert fill_run(store, folder) == first
    assert stored(store, first.mlflow_run_id) == once
    assert {path.name: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


def test_a_run_filed_while_it_runs_ends_as_one_filed_afterwards(store: Store, runs: Path) -> None:
    whole = [metric("loss", 1.5), metric("loss", 1.0, 1)]
    late = fill_run(store, write_run(runs / "b", "run-late", result=result(), events=whole))
    folder = write_run(runs, "run-early", verdict=None, events=whole[:1])
    early = fill_run(store, folder)
    assert early.status == "RUNNING"
    assert stored(store, early.mlflow_run_id)["info"][0] == "RUNNING"
    shutil.rmtree(folder)
    folder = write_run(runs, "run-early", result=result(), events=whole)
    assert fill_run(store, folder).mlflow_run_id == early.mlflow_run_id
    ours, reference = stored(store, early.mlflow_run_id), stored(store, late.mlflow_run_id)
    for part in ("params", "points"):
        assert ours[part] == reference[part]
    assert ours["info"][:3] == reference["info"][:3]


KILLED = EXIT | {"state": "killed", "rc": None, "signal": 9, "signal_name": "SIGKILL"}
FAILED = result(
    status="failed",
    metrics={},
    curves={},
    wiring={},
    error={"kind": "InputError", "message": "d2t is missing", "traceback": "…"},
)


@pytest.mark.parametrize(
    ("name", "parts", "status", "end"),
    [
        ("failed", {"result": FAILED, "exit": EXIT}, "FAILED", 8.25),
        ("no-result", {"exit": EXIT | {"rc": 1}}, "FAILED", 9),
        ("rc0-no-result", {"exit": EXIT}, "FAILED", 9),
        ("killed", {"exit": KILLED}, "KILLED", 9),
        ("cancelled", {"exit": EXIT | {"state": "cancelled", "rc": None}}, "KILLED", 9),
        ("timed-out", {"exit": EXIT | {"state": "timed_out", "rc": None}}, "KILLED", 9),
        ("vanished", {"verdict": VERDICT | {"verdict": "not_answered"}}, "FAILED", 1),
        ("answered-then-killed", {"result": result(), "exit": KILLED}, "FINISHED", 8.25),
    ],
)
def test_the_status_tells_how_the_run_ended(
    store: Store, runs: Path, name: str, parts: dict[str, Any], status: str, end: float
) -> None:
    filed = fill_run(store, write_run(runs, f"run-{name}", **parts))
    run = store.client.get_run(filed.mlflow_run_id)
    assert (filed.status, run.info.status) == (status, status)
    assert run.info.end_time == round((T0 + end) * 1000)
    if name == "failed":
        assert run.data.tags["error"] == "InputError: d2t is missing"
    if name == "killed":
        assert run.data.tags["exit.signal"] == "SIGKILL"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.7", True])
def test_a_figure_that_is_no_number_is_refused_before_anything_is_filed(
    store: Store, runs: Path, value: object
) -> None:
    bad = result(metrics={"accuracy": figure(0.5, 5) | {"high": value}})
    folder = write_run(runs, "run-nan", result=bad, exit=EXIT)
    with pytest.raises(FolderError, match=r"result.json says accuracy.high = .* not a finite"):
        fill_run(store, folder)
    query = "tags.`orchestrator.run_id` = 'run-nan'"
    assert list(store.client.search_runs([store.experiment_id], query)) == []


def test_long_values_are_filed_whole_beside_their_hash(store: Store, runs: Path) -> None:
    claim, path = "because " * 2000, "/models/" + "x" * 7000
    folder = write_run(
        runs,
        "run-long",
        result=result(),
        claim=claim,
        config=CONFIG.replace("/models/eagle", path),
    )
    got = stored(store, fill_run(store, folder).mlflow_run_id)
    for kind, name, text in (("tag", "claim", claim), ("param", "drafter.path", path)):
        value = got[f"{kind}s"][name]
        assert value == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        assert got["files"][f"values/{kind}/{name}.txt"].decode() == text


def test_many_values_take_several_batches(store: Store, runs: Path) -> None:
    wide = "wiring: {" + ", ".join(f"k{i}: {i}" for i in range(250)) + "}\n"
    events = [metric("loss", i / 7, i) for i in range(1500)]
    folder = write_run(runs, "run-wide", result=result(), config=wide, events=events)
    got = stored(store, fill_run(store, folder).mlflow_run_id)
    assert got["params"]["wiring.k249"] == "249"
    assert [step for step, *_ in got["points"]["loss"]] == list(range(1500))


def test_metric_names_are_made_legal_and_never_merged(store: Store, runs: Path) -> None:
    names = ["loss@1", "loss_1", "loss$1", "/top", "..", "accuracy", "π/loss"]
    events = [metric(name, float(i)) for i, name in enumerate(names)]
    events += [metric("loss@1", 9.0, 1), metric("bad", float("nan")), {"type": "metric", "t": 0}]
    events += [metric("loss@1", 9.0, 1) | {"case_id": "another"}]
    folder = write_run(runs, "run-names", result=result(), exit=EXIT, events=events)
    filed = fill_run(store, folder)
    points = stored(store, filed.mlflow_run_id)["points"]
    user = {key: [value for _, value, _ in history] for key, history in points.items()}
    assert user["accuracy"] == [0.769]
    assert user["loss_1"] == [0.0, 9.0]
    assert user["_/top"] == [3.0]
    assert user["_"] == [4.0]
    assert user["π/loss"] == [6.0]
    for name, value in (("loss_1", 1.0), ("loss$1", 2.0), ("accuracy", 5.0)):
        short = hashlib.sha256(name.encode()).hexdigest()[:8]
        assert user[f"{name.replace('$', '_')}-{short}"] == [value]
        assert any(f"metric {name!r} is filed as" in note for note in filed.notes)
    assert any("'bad': 1 points left out" in note for note in filed.notes)
    tag = store.client.get_run(filed.mlflow_run_id).data.tags["notes"]
    assert all(note in tag for note in filed.notes)


def test_an_edited_folder_is_refused(store: Store, runs: Path) -> None:
    folder = write_run(runs, "run-edited", result=result(), exit=EXIT)
    fill_run(store, folder)
    (folder / "config.yaml").write_text(CONFIG.replace("d2t: offset", "d2t: absolute"))
    with pytest.raises(TrackingError, match=r"wiring.d2t = offset, and its folder now says abs"):
        fill_run(store, folder)


def test_what_is_no_run_is_said(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has no run\.json"):
        fill_run(store, tmp_path)
    folder = write_run(tmp_path, "run-torn", result=result())
    (folder / "exit.json").write_text('{"state": "fini')
    with pytest.raises(FolderError, match=r"exit.json is not valid JSON"):
        fill_run(store, folder)


def test_a_server_that_went_down_leaves_the_folder_as_it_is(runs: Path) -> None:
    from mlflow import MlflowClient

    folder = write_run(runs, "run-down", result=result(), exit=EXIT)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with socket.socket() as unused:  # bound and not listening: the port refuses
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        down = Store(
            tracking=Tracking(uri=uri, experiment="x"),
            client=MlflowClient(tracking_uri=uri),
            experiment_id="1",
        )
        with pytest.raises(TrackingError, match=r"does not answer \(Connection refused\)"):
            fill_run(down, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_last_event_cut_short_is_not_there_yet(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run-cut", events=[metric("loss", 1.0)])
    with (folder / "events.jsonl").open("a") as events:
        events.write('garbage\n{"t": 1790000004, "type": "metric", "na')
    filing = read_run(folder)
    assert [point.key for point in filing.points] == ["loss"]
    assert filing.notes == ("events.jsonl: 1 lines are not events",)


def sweep_of(tmp_path: Path, ended: float | None, *run_ids: str) -> Path:
    folder = tmp_path / "sweeps" / "sweep-1"
    folder.mkdir(parents=True, exist_ok=True)
    sweep = {
        "sweep_id": "sweep-1",
        "experiment": "capture",
        "overrides": ["wiring.d2t=offset,absolute"],
        "runs": list(run_ids),
        "created": T0,
        "ended": ended,
    }
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def test_a_sweep_is_the_parent_of_its_runs(store: Store, runs: Path, tmp_path: Path) -> None:
    write_run(runs, "s-ok", result=result(), exit=EXIT, sweep="sweep-1")
    nan = result(metrics={"accuracy": figure(float("nan"), 5)})
    write_run(runs, "s-nan", result=nan, exit=EXIT, sweep="sweep-1")
    write_run(runs, "s-killed", exit=KILLED, sweep="sweep-1")
    ids = ("s-nan", "s-ok", "s-killed", "s-missing")

    running = fill_sweep(store, sweep_of(tmp_path, None, *ids), runs)
    assert running.status == "RUNNING"
    parent = fill_sweep(store, sweep_of(tmp_path, T0 + 20, *ids), runs)
    assert (parent.mlflow_run_id, parent.status) == (running.mlflow_run_id, "FAILED")
    assert [note.split(":")[0].split(" is")[0] for note in parent.notes] == [
        "run s-nan",
        "run s-missing",
    ]
    once = stored(store, parent.mlflow_run_id)
    assert once["info"] == ("FAILED", round(T0 * 1000), round(T0 * 1000) + 20_000, "sweep-1")
    assert [value for _, value, _ in once["points"]["runs/answered"]] == [1.0]
    assert [value for _, value, _ in once["points"]["runs/not_answered"]] == [3.0]
    assert once["tags"]["orchestrator.sweep_id"] == "sweep-1"
    rows = json.loads(once["files"]["runs.json"])
    assert [(row["run_id"], row["status"]) for row in rows] == [
        ("s-ok", "FINISHED"),
        ("s-killed", "KILLED"),
    ]
    for row in rows:
        tags = store.client.get_run(row["mlflow_run_id"]).data.tags
        assert tags["mlflow.parentRunId"] == parent.mlflow_run_id
        assert tags["orchestrator.sweep"] == "sweep-1"
    assert fill_sweep(store, tmp_path / "sweeps" / "sweep-1", runs) == parent
    assert stored(store, parent.mlflow_run_id) == once

    # What was missing is answered after all: the latest count must say so.
    for run_id in ("s-nan", "s-killed"):
        shutil.rmtree(runs / run_id)
    for run_id in ("s-nan", "s-killed", "s-missing"):
        write_run(runs, run_id, result=result(), exit=EXIT, sweep="sweep-1")
    healed = fill_sweep(store, tmp_path / "sweeps" / "sweep-1", runs)
    assert healed.status == "FINISHED"
    latest = store.client.get_run(healed.mlflow_run_id).data.metrics
    assert latest == {"runs/answered": 4.0, "runs/not_answered": 0.0}


def test_heal_ends_what_has_ended_and_nothing_else(
    store: Store, runs: Path, tmp_path: Path
) -> None:
    for run_id in ("h-answered", "h-killed", "h-running", "h-gone", "h-nan"):
        fill_run(store, write_run(runs, run_id, verdict=None))
    (runs / "h-answered" / "result.json").write_text(json.dumps(result()))
    (runs / "h-killed" / "exit.json").write_text(json.dumps(KILLED))
    nan = result(metrics={"accuracy": figure(float("nan"), 5)})
    (runs / "h-nan" / "result.json").write_text(json.dumps(nan))
    shutil.rmtree(runs / "h-gone")

    healed = heal(store, runs)
    assert {filed.run_id: filed.status for filed in healed} == {
        "h-answered": "FINISHED",
        "h-killed": "KILLED",
        "h-nan": "FAILED",
    }
    assert heal(store, runs) == []
    refused = next(filed for filed in healed if filed.run_id == "h-nan")
    assert "not a finite" in store.client.get_run(refused.mlflow_run_id).data.tags["refused"]


def test_a_filing_killed_half_way_is_made_whole_by_the_next(
    store: Store, runs: Path, tmp_path: Path
) -> None:
    events = [metric("loss", i / 7, i) for i in range(4000)]
    folder = write_run(runs, "run-cut", result=result(), exit=EXIT, events=events)
    whole = write_run(runs / "reference", "run-whole", result=result(), exit=EXIT, events=events)
    database = tmp_path / "mlflow.db"
    shutil.copy(store.tracking.uri.removeprefix("sqlite:///"), database)
    tracking = Tracking(uri=f"sqlite:///{database}", experiment="cut")

    filer = os.fork()  # cheaper than another import of mlflow; the database is its own
    if filer == 0:
        try:
            fill_run(open_store(tracking), folder)
        finally:
            os._exit(1)
    connection = sqlite3.connect(database, timeout=60)
    count = (
        "SELECT count(*) FROM metrics JOIN tags USING (run_uuid) "
        "WHERE tags.key = 'orchestrator.run_id' AND tags.value = 'run-cut'"
    )
    deadline = time.monotonic() + 60
    while connection.execute(count).fetchone()[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(filer, signal.SIGKILL)
    os.waitpid(filer, 0)
    filed = connection.execute(count).fetchone()[0]
    connection.close()
    assert 0 < filed < 4000, "the filing was not cut in the middle"

    store = open_store(tracking)
    query = "tags.`orchestrator.run_id` = 'run-cut'"
    (cut,) = store.client.search_runs([store.experiment_id], query)
    assert cut.info.status == "RUNNING"
    # What a kill in the middle of a copy leaves.
    artifacts = Path(cut.info.artifact_uri.removeprefix("file://"))
    artifacts.mkdir(parents=True, exist_ok=True)
    (artifacts / ".artifact.uploading.x").touch()

    (healed,) = heal(store, runs)
    assert healed.mlflow_run_id == cut.info.run_id
    ours = stored(store, healed.mlflow_run_id)
    reference = stored(store, fill_run(store, whole).mlflow_run_id)
    assert ours["info"][:3] == reference["info"][:3]
    assert ours["points"] == reference["points"]
    assert ours["params"] == reference["params"]
    assert ours["files"].keys() == reference["files"].keys()
    assert {path.name for path in artifacts.iterdir()} == ours["files"].keys()


def test_any_characters_in_the_results_path_work(tmp_path: Path) -> None:
    results = tmp_path / "a b#c?d%20e%zü'\""
    opened = open_store(default_tracking(results))
    folder = write_run(results / "runs", "run-odd", result=result(), exit=EXIT)
    filed = fill_run(opened, folder)
    assert stored(opened, filed.mlflow_run_id)["files"]["log"] == b"scored \xff\n"
    assert (results / "mlflow.db").is_file()
    assert list(tmp_path.iterdir()) == [results]


def test_a_full_disk_is_one_sentence_and_healed_by_the_next_filing(
    store: Store, runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    database = Path(store.tracking.uri.removeprefix("sqlite:///"))
    size = database.stat().st_size // 1024 + 256
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        shutil.copy(database, small / "mlflow.db")
        tracking = Tracking(uri=f"sqlite:///{small}/mlflow.db", experiment="full")
        opened = open_store(tracking)
        events = [metric("loss", i / 7, i) for i in range(6000)]
        folder = write_run(runs, "run-full", result=result(), exit=EXIT, events=events)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(
            TrackingError, match=r"mlflow.db has no space left; free some"
        ) as caught:
            fill_run(opened, folder)
        assert "\n" not in str(caught.value)
        assert capfd.readouterr() == ("", "")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        filed = fill_run(opened, folder)
        got = stored(opened, filed.mlflow_run_id)
        assert got["info"][0] == "FINISHED"
        assert len(got["points"]["loss"]) == 6000
        opened.client._tracking_client.store.engine.dispose()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_scripts_figure_is_filed_once_and_shown_last(tmp_path: Path) -> None:
    curve = [{"step": 1, "value": 0.5}, {"step": 3, "value": 0.25}]
    metrics = {"loss": {"value": 0.25}, "best": {"value": 9.0}, "plain": {"value": 1.0}}
    curves = {"loss": curve, "best": [{"step": 0, "value": 7.0}]}
    said = [
        metric("loss", 0.5, 1),
        metric("loss", 0.25, 3),
        metric("best", 7.0, 0),
        metric("best", 9.0, None),
    ]
    answer = result(metrics=metrics, curves=curves)
    folder = write_run(tmp_path, "script", result=answer, events=said, job="script")
    filing = read_run(folder)
    found = sorted((p.key, p.step, p.value) for p in filing.points)
    assert found == [
        ("best", 0, 7.0),
        ("best", 1, 9.0),
        ("loss", 1, 0.5),
        ("loss", 3, 0.25),
        ("plain", 0, 1.0),
    ]
    assert filing.notes == ()


def test_where_a_run_was_made_and_what_had_changed_are_tags(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "there", result=result())
    environment = {"hostname": "gpu8", "fingerprint": "sha256:e", "python": "3.11"}
    (folder / "environment.json").write_text(json.dumps(environment))
    changes = ["torch 2.12.0 → 2.13.0", "driver 570.1 → 580.2"]
    preflight = {"differences": changes, "compared_with": "before", "environment": environment}
    (folder / "preflight.json").write_text(json.dumps(preflight))
    tags = read_run(folder).tags
    assert (tags["hostname"], tags["environment"]) == ("gpu8", "sha256:e")
    assert tags["environment.changes"] == "\n".join(changes)
    assert tags["environment.compared_with"] == "before"

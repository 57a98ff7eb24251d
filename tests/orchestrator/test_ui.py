"""The verb `ui`: a real MLflow server, started, used, and seen to be gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import ui
from orchestrator.record import Tracking, default_tracking, fill_run, open_store

# MLflow 3.17 uses what SQLAlchemy 2.1 gives up.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")

CODE = "import sys; from orchestrator.ui import run; sys.exit(run(sys.argv[1:]))"


def write_run(runs: Path, run_id: str) -> Path:
    folder = runs / run_id
    folder.mkdir(parents=True)
    ended = 1_790_000_008.0
    run = {"run_id": run_id, "case_id": "c0", "host": "local", "job": "j", "created": ended - 8}
    figure = {"value": 0.75, "numerator": 3, "denominator": 4, "truth": "next_token"}
    result = {"status": "ok", "ended": ended, "metrics": {"accuracy": figure}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.yaml").write_text("wiring: {layers: [1, 2]}\n")
    (folder / "log").write_text("scored\n")
    (folder / "snapshot.diff").touch()
    return folder


def members(group: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(stat.parent.name)
    return found


def child_of(parent: int) -> int:
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tracking, str, int]]:
    """A store with one run, in an odd folder, behind `ui` on a free port; ended with Ctrl-C."""
    results = tmp_path_factory.mktemp("served") / "re sults#1?%"
    tracking = default_tracking(results)
    store = open_store(tracking)
    fill_run(store, write_run(results / "runs", "run-local"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", CODE, f"tracking.uri={tracking.uri}", f"port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(f"http://127.0.0.1:{port}"), process.communicate()[1]
        group = child_of(process.pid)
        assert members(group)
        yield replace(tracking, uri=line.split()[0]), line.split()[0], port
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "stopped.\n", "")
        assert members(group) == []
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
        assert [path.name for path in results.parent.iterdir()] == [results.name]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        return answer.read()


@pytest.mark.runs
def test_the_server_shows_what_was_filed(served: tuple[Tracking, str, int]) -> None:
    tracking, url, _ = served
    store = open_store(tracking)
    (run,) = store.client.search_runs(
        [store.experiment_id], "tags.`orchestrator.run_id` = 'run-local'"
    )
    assert run.data.metrics["accuracy"] == 0.75
    log = get(f"{url}/get-artifact?path=log&run_uuid={run.info.run_id}")
    assert log == b"scored\n"
    assert b"MLflow" in get(url)


@pytest.mark.runs
def test_a_run_is_filed_through_the_server_twice_to_the_same_end(
    served: tuple[Tracking, str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracking, _, _ = served
    # Another experiment, whose files go through the server instead of the shared disk.
    proxied = Tracking(
        uri=tracking.uri, experiment="proxied", artifact_root="mlflow-artifacts:/proxied"
    )
    store = open_store(proxied)
    folder = write_run(tmp_path, "run-http")
    first = fill_run(store, folder)

    def held() -> tuple[object, ...]:
        run = store.client.get_run(first.mlflow_run_id)
        history = store.client.get_metric_history(first.mlflow_run_id, "accuracy")
        entries = store.client.list_artifacts(first.mlflow_run_id)
        files = {entry.path: entry.file_size or 0 for entry in entries}
        return run.to_dictionary(), [point.value for point in history], files

    once = held()
    assert (first.status, once[1]) == ("FINISHED", [0.75])
    assert once[2] == {path.name: path.stat().st_size for path in folder.iterdir()}
    assert fill_run(store, folder) == first
    assert held() == once
    assert capfd.readouterr() == ("", "")


@pytest.mark.runs
def test_a_taken_port_is_said(
    served: tuple[Tracking, str, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mlflow.db").touch()
    _, _, port = served
    assert ui.run([f"port={port}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]) == 2
    said = capsys.readouterr()
    assert f"port {port} on 127.0.0.1 is taken by another program; choose another" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_server_that_dies_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").touch()
    # In mlflow's place, so as not to wait for its import: a program that says why and ends.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho starting; echo no such schema >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert ui.run([f"port={port}", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]) == 1
    error = capsys.readouterr().err
    assert error == "error: the server did not start: starting / no such schema\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_no_database_yet_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.run([f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]) == 1
    error = capsys.readouterr().err
    assert f"no run was filed yet in {tmp_path}/mlflow.db; make one with" in error
    assert list(tmp_path.iterdir()) == []


def test_a_server_s_address_is_told_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.run(["tracking.uri=http://me:secret@host:5000"]) == 0
    assert capsys.readouterr().out.startswith("http://me:***@host:5000 is a server already")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("prot=5001", "did you mean port=?"),
        ("verbose", "ui takes port=, host=, tracking.uri=."),
        ("port=", "needs a value for port"),
        ("port", "needs a value for port"),
        ("port=http", "port=http is not a port"),
        ("port=70000", "port=70000 is not a port"),
        ("port=0", "port=0 is not a port"),
        ("host=no such host", "cannot listen on host=no such host"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    argument: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mlflow.db").touch()
    assert ui.run([f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", argument]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.run(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m orchestrator ui [port=5000]")


def test_the_user_s_side_starts_without_mlflow() -> None:
    code = (
        "import sys, orchestrator.ui, orchestrator.record\n"
        "sys.exit(any(name in sys.modules for name in ('mlflow', 'sqlalchemy', 'torch', 'numpy')))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )

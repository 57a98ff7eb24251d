"""Opening the tracking store: at once by several commands, in silence, and one sentence if not."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestrator.errors import TrackingError
from orchestrator.tracking import (
    CLONE,
    Store,
    Tracking,
    default_tracking,
    how_to_open,
    locked,
    open_store,
    safe_uri,
    sqlite_path,
    sqlite_uri,
)

# MLflow 3.17 uses what SQLAlchemy 2.1 gives up.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")


def at(database: Path, experiment: str = "drafters") -> Tracking:
    return Tracking(uri=sqlite_uri(database), experiment=experiment)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that four commands open at once before it exists."""
    results = tmp_path_factory.mktemp("new")
    # The folder a killed command may leave: a half-made database under the other name.
    (results / "mlflow.db.new").write_bytes(b"half")
    code = """
import os, sys, threading
from pathlib import Path
from orchestrator import tracking
for name, value in tracking.QUIET_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
import mlflow.store.tracking.sqlalchemy_store  # once, for all four
go, start = os.pipe()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os.close(start)
        os.read(go, 1)  # until the parent closes its end
        def work():
            store = tracking.open_store(tracking.default_tracking(Path(sys.argv[1])))
            os.write(1, f"experiment {store.experiment_id}\\n".encode())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        os._exit(0)
    children.append(child)
os.close(start)
for child in children:
    os.waitpid(child, 0)
"""
    commands = subprocess.run(
        [sys.executable, "-c", code, str(results)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    assert commands.stdout == "experiment 1\n" * 4
    return results / "mlflow.db"


def test_commands_that_start_at_once_make_one_database(database: Path) -> None:
    names = {path.name for path in database.parent.iterdir()}
    assert names == {"mlflow.db", "mlflow.db.lock"}
    connection = sqlite3.connect(database)
    rows = connection.execute("SELECT name, artifact_location FROM experiments").fetchall()
    connection.close()
    root = (database.parent / "mlartifacts").as_uri()
    assert sorted(rows) == [("Default", f"{root}/0"), ("drafters", root)]


def test_the_default_store_lies_under_the_results(tmp_path: Path) -> None:
    tracking = default_tracking(tmp_path / "x" / ".." / "results")
    assert tracking.uri == f"sqlite:///{tmp_path}/results/mlflow.db"
    assert tracking.artifact_root == f"file://{tmp_path}/results/mlartifacts"


@pytest.mark.parametrize("name", ["plain", "a b", "a#b", "a?b=c", "50%", "a%20b", "ü/é"])
def test_a_database_path_survives_its_uri(name: str) -> None:
    path = Path("/results") / name / "mlflow.db"
    assert sqlite_path(sqlite_uri(path)) == path
    assert sqlite_path("http://host:5000") is None


def test_a_relative_uri_is_read_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_path("sqlite:///mlflow.db?timeout=5") == tmp_path / "mlflow.db"
    with pytest.raises(TrackingError, match="is gone when the command ends"):
        sqlite_path("sqlite:///:memory:")


def test_the_terminal_is_told_how_to_open_it() -> None:
    assert how_to_open(default_tracking(CLONE / "results")) == "python -m orchestrator ui"
    server = Tracking(uri="https://me:secret@host:5000", experiment="x")
    assert how_to_open(server) == "https://me:***@host:5000"
    assert "tracking.uri=sqlite:////r/mlflow.db" in how_to_open(at(Path("/r/mlflow.db")))
    assert safe_uri("postgresql+psycopg://u:p@ss@h/db") == "postgresql+psycopg://u:***@h/db"


@pytest.fixture
def dead_server() -> tuple[str, list[int]]:
    """A port where every connection is closed at once, and a list with an entry for each."""
    connections: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            connections.append(address[1])
            connection.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_server_that_does_not_answer_is_not_tried_for_long(
    dead_server: tuple[str, list[int]],
) -> None:
    uri, connections = dead_server
    with pytest.raises(TrackingError, match=r"does not answer .*; start it or set tracking") as no:
        open_store(Tracking(uri=uri, experiment="x"))
    assert uri in str(no.value)
    assert "\n" not in str(no.value)
    assert len(connections) == 2  # once, and once more


def test_a_server_that_is_down_is_said() -> None:
    with socket.socket() as unused:  # bound and not listening: the port refuses
        unused.bind(("127.0.0.1", 0))
        uri = f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TrackingError, match=r"does not answer \(Connection refused\)") as no:
            open_store(Tracking(uri=uri, experiment="x"))
    assert "secret" not in str(no.value)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match=r"cannot be written \(.*\); make it writable"):
        open_store(at(tmp_path / "file" / "results" / "mlflow.db"))


def test_a_disk_without_room_for_a_database_is_said(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(TrackingError, match="has no space left; free some space"):
            open_store(at(tmp_path / "mlflow.db"))
        assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db.lock"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_what_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("my notes, not a database" * 100)
    with pytest.raises(TrackingError, match="is not an intact SQLite database; move it away"):
        open_store(at(tmp_path / "mlflow.db"))
    with pytest.raises(TrackingError, match="is a folder, which MLflow no longer writes"):
        open_store(Tracking(uri=str(tmp_path / "mlruns"), experiment="x"))


def test_another_version_s_database_is_left_alone(database: Path, tmp_path: Path) -> None:
    old = tmp_path / "mlflow.db"
    shutil.copy(database, old)
    connection = sqlite3.connect(old)
    connection.execute("UPDATE alembic_version SET version_num = '0a8213491aaa'")
    connection.commit()
    connection.close()
    with pytest.raises(TrackingError, match=r"another version of MLflow; back it up and run"):
        open_store(at(old))


def test_a_database_in_use_is_said(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.tracking.BUSY_S", 0.1)
    shutil.copy(database, tmp_path / "mlflow.db")
    other = sqlite3.connect(tmp_path / "mlflow.db")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TrackingError, match="is locked by another program; end that program"):
        open_store(at(tmp_path / "mlflow.db"))
    other.close()


def test_a_deleted_experiment_is_said(database: Path, tmp_path: Path) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    store: Store = open_store(at(tmp_path / "mlflow.db", "old"))
    store.client.delete_experiment(store.experiment_id)
    with pytest.raises(TrackingError, match=r"'old' .* was deleted; restore it with"):
        open_store(at(tmp_path / "mlflow.db", "old"))


def test_a_lock_is_waited_for_and_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        locked(lock, create=True),
        pytest.raises(TrackingError, match="another command has held"),
        locked(lock, create=True, wait_s=0.1),
    ):
        pass
    with locked(lock, create=False, wait_s=0.1):
        pass

"""The tracking store: where runs are filed in MLflow; opened once, safely and in silence.

MLflow's own first use of a database is neither safe for several commands at once nor against being
killed, and it waits for minutes on a database or server that will never answer. What is done here
about it: a new database is built under another name, by one process at a time, and renamed; what
can be checked without MLflow is checked first; whatever fails is one TrackingError.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import url2pathname

from orchestrator.errors import TrackingError
from orchestrator.paths import CLONE

# Set before mlflow is imported, and only where the user has not set them: a server that is down
# costs seconds instead of the default's minutes, and nothing is sent anywhere or printed.
QUIET_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
BUSY_S = 20.0  # as MLflow's own busy_timeout
LOCK_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where runs are filed: a tracking URI and the name of the MLflow experiment in it.

    `artifact_root` is a URI for the files of a new MLflow experiment; None leaves it to the server,
    or is the folder `mlartifacts` beside an SQLite database.
    """

    uri: str
    experiment: str
    artifact_root: str | None = None


@dataclass(frozen=True, kw_only=True)
class Store:
    """An opened tracking store; `client` is an `mlflow.MlflowClient`."""

    tracking: Tracking
    client: Any
    experiment_id: str


def default_tracking(results: Path) -> Tracking:
    """The store that needs no server: an SQLite database and a folder of files under `results`."""
    folder = Path(os.path.abspath(results))  # noqa: PTH100  (resolve() would follow links)
    return Tracking(
        uri=sqlite_uri(folder / "mlflow.db"),
        experiment="drafters",
        artifact_root=(folder / "mlartifacts").as_uri(),
    )


def how_to_open(tracking: Tracking) -> str:
    """One line for the terminal: the command or the address that shows what was filed."""
    if urlsplit(tracking.uri).scheme in ("http", "https"):
        return safe_uri(tracking.uri)
    if tracking.uri == default_tracking(CLONE / "results").uri:
        return "python -m orchestrator ui"
    return f"python -m orchestrator ui {shlex.quote(f'tracking.uri={safe_uri(tracking.uri)}')}"


def sqlite_uri(database: Path) -> str:
    """SQLAlchemy's URI of an SQLite file, whatever characters its absolute path has."""
    path = str(database)
    if not set("%?") & set(path):
        return f"sqlite:///{path}"
    # With the driver named, MLflow does not create the folder of the *quoted* name beside ours.
    return "sqlite+pysqlite:///" + path.replace("%", "%25").replace("?", "%3F")


def sqlite_path(uri: str) -> Path | None:
    """The file behind an SQLite URI, absolute; None for any other kind of store.

    Raises:
        TrackingError: the URI names no file (`:memory:`).
    """
    match = re.match(r"sqlite(?:\+\w+)?://(?:/([^?]*))?", uri)
    if match is None:
        return None
    path = unquote(match[1] or "")
    if path in ("", ":memory:"):
        raise TrackingError(
            f"tracking store {uri} is gone when the command ends; set tracking.uri=sqlite:////"
            "absolute/path/mlflow.db."
        )
    return Path(os.path.abspath(path))  # noqa: PTH100


def safe_uri(uri: str) -> str:
    """The URI without its password, for messages."""
    return re.sub(r"(//[^:/@?#]*):[^/]*@", r"\1:***@", uri)


@contextlib.contextmanager
def locked(path: Path, *, create: bool, wait_s: float = LOCK_S) -> Iterator[None]:
    """Hold `path` against other commands; a file replaced by another meanwhile is locked anew.

    Raises:
        TrackingError: still held by another command after `wait_s`, or the file cannot be opened.
    """
    deadline = time.monotonic() + wait_s
    while True:
        writable = create or os.access(path, os.W_OK)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0)
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise TrackingError(
                f"{path} cannot be opened ({error.strerror}); make its folder writable or choose "
                "another store with tracking.uri=…."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TrackingError(
                    f"another command has held {path} for {wait_s:.0f} s; end it, then file again."
                ) from None
        except FileNotFoundError:
            pass  # replaced between the two calls
        except OSError as error:
            os.close(descriptor)
            raise TrackingError(
                f"{path} cannot be locked ({error.strerror}); choose a store on a file system with "
                "locks with tracking.uri=…."
            ) from error
        os.close(descriptor)
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def store_errors(tracking: Tracking) -> Iterator[None]:
    """Turn whatever MLflow, the database or the network raises into one TrackingError."""
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, sqlite3.Error, OSError) as error:
        raise TrackingError(_explain(tracking.uri, error)) from error


def open_store(tracking: Tracking) -> Store:
    """Open the store, and create what is missing: the database, the MLflow experiment.

    Takes 2 to 4 s where mlflow is not imported yet; made to run in a thread beside the job. Any
    number of commands may do so at once.

    Raises:
        TrackingError: the store does not answer, cannot be written or is another MLflow's.
    """
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    database = sqlite_path(tracking.uri)
    if database is None and urlsplit(tracking.uri).scheme in ("", "file"):
        raise TrackingError(
            f"tracking store {tracking.uri} is a folder, which MLflow no longer writes; set "
            "tracking.uri=sqlite:////absolute/path/mlflow.db or a server's http address."
        )
    from mlflow import MlflowClient

    _silence()
    with store_errors(tracking):
        if database is None:
            client = MlflowClient(tracking_uri=tracking.uri)
            return Store(
                tracking=tracking, client=client, experiment_id=_experiment(client, tracking)
            )
        if tracking.artifact_root is None:
            root = (database.parent / "mlartifacts").as_uri()
            tracking = Tracking(
                uri=tracking.uri, experiment=tracking.experiment, artifact_root=root
            )
        database.parent.mkdir(parents=True, exist_ok=True)
        with locked(database.with_name(database.name + ".lock"), create=True):
            if not database.exists() or database.stat().st_size == 0:
                _create_database(database, tracking)
            _check_writable(database)
            client = MlflowClient(tracking_uri=tracking.uri)
            return Store(
                tracking=tracking, client=client, experiment_id=_experiment(client, tracking)
            )


def _silence() -> None:
    if "MLFLOW_LOGGING_LEVEL" in os.environ:
        return
    # mlflow logs with a traceback what it raises as well; urllib3 announces its retries.
    for name in ("mlflow", "alembic", "sqlalchemy.engine", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _create_database(database: Path, tracking: Tracking) -> None:
    """Run all migrations on a file of another name, so that a kill leaves no half-made database."""
    from mlflow.store.tracking import sqlalchemy_store
    from sqlalchemy import Engine, event

    build: Any = sqlalchemy_store.SqlAlchemyStore  # untyped
    fresh = database.with_name(database.name + ".new")
    leftovers = [fresh, fresh.with_name(fresh.name + "-journal")]

    def hurry(connection: Any, _record: object) -> None:
        # Hundreds of waits for the disk, for a file that nobody reads yet; one at the end will do.
        if connection.execute("PRAGMA database_list").fetchone()[2] == os.path.realpath(fresh):
            connection.execute("PRAGMA synchronous = OFF")

    for path in leftovers:
        path.unlink(missing_ok=True)
    event.listen(Engine, "connect", hurry)
    try:
        store = build(sqlite_uri(fresh), tracking.artifact_root)
        store.engine.dispose()
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        fresh.replace(database)
    finally:
        event.remove(Engine, "connect", hurry)
        for path in leftovers:
            path.unlink(missing_ok=True)


def _check_writable(database: Path) -> None:
    """Raise sqlite3.Error at once, where MLflow would try to open it for a hundred seconds."""
    uri = f"file:{quote(str(database))}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def _experiment(client: Any, tracking: Tracking) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(tracking.experiment)
    if found is None:
        try:
            client.create_experiment(tracking.experiment, artifact_location=tracking.artifact_root)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another command was first
                raise
        found = client.get_experiment_by_name(tracking.experiment)
    if found.lifecycle_stage != "active":
        raise TrackingError(
            f"MLflow experiment {tracking.experiment!r} in {safe_uri(tracking.uri)} was deleted; "
            f"restore it with `mlflow experiments restore -x {found.experiment_id}` or set "
            "tracking.experiment=…."
        )
    _check_artifacts_reach(found.artifact_location, tracking)
    return str(found.experiment_id)


def _check_artifacts_reach(location: str, tracking: Tracking) -> None:
    """A remote server whose files lie on a path of its own would get metrics and no files."""
    server = urlsplit(tracking.uri)
    if server.scheme not in ("http", "https") or urlsplit(location).scheme not in ("", "file"):
        return
    if server.hostname in ("localhost", "127.0.0.1", "::1") or local_path(location).is_dir():
        return
    raise TrackingError(
        f"the server {safe_uri(tracking.uri)} keeps the files of experiment "
        f"{tracking.experiment!r} under its own path {location}, which does not exist here; start "
        "it with --serve-artifacts and set tracking.experiment= to a new name."
    )


def local_path(location: str) -> Path:
    """The folder behind a `file:` URI or a bare path."""
    parts = urlsplit(location)
    return Path(url2pathname(parts.path) if parts.scheme == "file" else location)


# What the text of an error holds -> what is wrong, and what to do.
_CAUSES = (
    ("disk is full|No space left|quota exceeded", "has no space left", "free some space"),
    ("database is locked", "is locked by another program", "end that program"),
    (
        "out-of-date database schema|Can't locate revision",
        "was written by another version of MLflow",
        "back it up and run `mlflow db upgrade {uri}`, or choose another with tracking.uri=…",
    ),
    (
        "file is not a database|malformed",
        "is not an intact SQLite database",
        "move it away or choose another with tracking.uri=…",
    ),
    (
        "readonly|unable to open database file|Permission denied|Not a directory|File exists"
        "|Read-only file system|Is a directory|Operation not permitted",
        "cannot be written ({detail})",
        "make it writable or choose another with tracking.uri=…",
    ),
    (
        "Connection refused|Max retries exceeded|timed out|Name or service not known"
        "|Temporary failure in name resolution|Connection aborted|No route to host",
        "does not answer ({detail})",
        "start it or set tracking.uri=…",
    ),
    (
        "error code 401|error code 403|UNAUTHENTICATED",
        "refuses the login",
        "check MLFLOW_TRACKING_*",
    ),
)


def _explain(uri: str, error: BaseException) -> str:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = " ".join(" ".join(texts).split())
    for pattern, wrong, remedy in _CAUSES:
        if found := re.search(pattern, text, re.IGNORECASE):
            detail = re.search(r"\[Errno -?\d+\] ([\w ]+)", text)
            wrong = wrong.format(detail=detail[1].strip() if detail else found[0])
            remedy = remedy.format(uri=safe_uri(uri))
            return f"tracking store {safe_uri(uri)} {wrong}; {remedy}, then file the run again."
    return (
        f"tracking store {safe_uri(uri)} failed ({type(error).__name__}: "
        f"{safe_uri(texts[0])[:300].strip()}); put that right, then file the run again."
    )

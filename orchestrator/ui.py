"""The verb `ui`: MLflow's own pages over what was filed, until Ctrl-C; imports no mlflow."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

from orchestrator.errors import InputError, OrchestratorError, TrackingError
from orchestrator.paths import CLONE
from orchestrator.tracking import default_tracking, safe_uri, sqlite_path

USAGE = """\
usage: python -m orchestrator ui [port=5000] [host=127.0.0.1] [tracking.uri=URI]

Shows what was filed, in MLflow's pages, until Ctrl-C.

  port=N            port to listen on; default 5000
  host=ADDRESS      address to listen on; default 127.0.0.1, which only this machine reaches
  tracking.uri=URI  the store to show; default results/mlflow.db in the clone
"""
START_S = 120.0
# How the server's processes are ended: signal, and seconds until the next one.
ESCALATION = ((signal.SIGTERM, 4.0), (signal.SIGKILL, 5.0))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for."""

    port: int
    host: str
    uri: str | None


def run(argv: list[str]) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP; exit code 0, 1 it did not start, 2 bad input."""
    if any(argument in ("-h", "--help") for argument in argv):
        _say(USAGE.rstrip())
        return 0
    try:
        options = parse(argv)
        uri = options.uri or default_tracking(CLONE / "results").uri
        if urlsplit(uri).scheme in ("http", "https"):
            _say(f"{safe_uri(uri)} is a server already: open it in a browser.")
            return 0
        command, folder = _command(uri, options)
        _check_port(options)
        return _serve(command, folder, options)
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def parse(argv: list[str]) -> Options:
    """Read `key=value` arguments.

    Raises:
        InputError: an unknown key, a value that is none, or a port that is not one.
    """
    keys = ("port", "host", "tracking.uri")
    given: dict[str, str] = {}
    for argument in argv:
        key, _, value = argument.partition("=")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"ui takes {'=, '.join(keys)}=."
            raise InputError(f"ui does not know {argument!r}; {hint}")
        if not value:
            raise InputError(f"ui needs a value for {key}, as in {key}=….")
        if key in given:
            raise InputError(f"ui was given {key}= twice; leave one.")
        given[key] = value
    port = given.get("port", "5000")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise InputError(f"port={port} is not a port; give a number from 1 to 65535.")
    return Options(
        port=int(port), host=given.get("host", "127.0.0.1"), uri=given.get("tracking.uri")
    )


def _command(uri: str, options: Options) -> tuple[list[str], Path]:
    """The server's command line, and the folder to run it in."""
    database = sqlite_path(uri)
    folder = Path.cwd()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    if database is not None:
        if not database.is_file():
            raise TrackingError(
                f"no run was filed yet in {database}; make one with "
                "`python -m orchestrator +experiment=NAME`, then start ui again."
            )
        folder = database.parent
        root = (folder / "mlartifacts").as_uri()
        command += ["--default-artifact-root", root, "--artifacts-destination", root]
    command += ["--host", options.host, "--port", str(options.port), "--workers", "1"]
    return command, folder


def _check_port(options: Options) -> None:
    """Raise InputError where the server could not listen."""
    where = f"host={options.host} port={options.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {options.port} on {options.host} is taken by another program; choose "
                f"another with port={options.port % 65535 + 1}."
            ) from error
        raise InputError(
            f"cannot listen on {where} ({error.strerror}); choose others with host= and port=."
        ) from error


def _serve(command: list[str], folder: Path, options: Options) -> int:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    url = f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # else 10 processes instead of 2
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }
    with tempfile.TemporaryFile() as log, _stop_signals() as stopped:
        # A session of its own: the terminal's Ctrl-C reaches this process alone, which then stops
        # the whole group.
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_up(server, url, stopped, log)
            if not stopped:
                _say(f"{url}   (Ctrl-C stops it)")
                if options.host not in ("127.0.0.1", "localhost", "::1"):
                    _say(f"whoever reaches {options.host} can read and delete runs: no login.")
            while not stopped:
                if server.poll() is not None:
                    raise TrackingError(f"the server ended by itself: {_last_words(log)}")
                time.sleep(0.1)
        finally:
            _end(server)
    _say("stopped.")
    return 0


def _wait_until_up(
    server: subprocess.Popen[bytes], url: str, stopped: list[int], log: IO[bytes]
) -> None:
    # Straight to this machine, whatever proxy the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while not stopped:
        if server.poll() is not None:
            raise TrackingError(f"the server did not start: {_last_words(log)}")
        with (
            contextlib.suppress(OSError),  # URLError is one
            opener.open(f"{url}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            raise TrackingError(
                f"the server did not answer on {url} in {START_S:.0f} s: {_last_words(log)}"
            )
        time.sleep(0.1)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end, so that none of them skips the clean-up."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's process group and see that nobody of it is left."""
    group = server.pid
    for number, patience_s in ESCALATION:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            server.poll()
            if not _lives(group):
                server.wait()
                return
            time.sleep(0.05)
    raise TrackingError(
        f"the server's process group {group} does not end; end it with `kill -9 -- -{group}`."
    )


def _lives(group: int) -> bool:
    """Whether a process of the group runs; one that only waits to be reaped does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state ppid pgrp …; the name may hold anything, brackets included
            state, _, pgrp = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                return True
    return False


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-3:])[-600:] or "it said nothing."


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

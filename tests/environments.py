"""Environments that tests make for other programs, outside the clone, whose pins are not the project's.

Each is a folder in ${XDG_CACHE_HOME:-~/.cache}/drafter-orchestrator with an interpreter at bin/python
and a marker file that says what it was made from. The marker is written last: without it the folder
is unfinished. A finished folder of the same pins is left alone; one of others is made anew beside it
and put in its place at once. A second caller waits for the first. uv installs: that of the
environment this runs in (`make setup`), or the one on PATH; UV_FIND_LINKS, or else PIP_FIND_LINKS,
says where wheels lie on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

MARKER = "made.json"

Pins = Mapping[str, object]


class SetupError(Exception):
    """An environment cannot be made; the message says why in one sentence."""


def cache_folder() -> Path:
    """Where all of the project's environments lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "drafter-orchestrator"


def interpreter_pins() -> dict[str, object]:
    """What any environment depends on beside the packages in it."""
    return {"python": platform.python_version(), "machine": platform.machine()}


def fault(folder: Path, pins: Pins, name: str) -> str | None:
    """Why the folder cannot be used, in words, or None where it is finished and of these pins."""
    try:
        made = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return f"{name} is not at {folder}"
    except ValueError:
        return f"{folder / MARKER} is damaged"
    if made != pins:
        return f"{name} at {folder} was made from other pins"
    return None


def find_uv() -> str:
    """The uv to install with."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise SetupError("uv is needed to make an environment; run `make setup` first")
    return found


def run_uv(*arguments: str) -> None:
    """Runs uv quietly; raises SetupError with what it said."""
    environment = {**os.environ}
    if not environment.get("UV_FIND_LINKS") and environment.get("PIP_FIND_LINKS"):
        environment["UV_FIND_LINKS"] = environment["PIP_FIND_LINKS"]
    done = subprocess.run(
        [find_uv(), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SetupError(f"`uv {' '.join(arguments)}` failed: {done.stderr.strip()}")


def new_environment(folder: Path) -> str:
    """An empty environment that may be moved; gives its interpreter."""
    run_uv("venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder))
    return str(folder / "bin" / "python")


def check_imports(python: str, names: str, environment: Mapping[str, str] | None = None) -> None:
    """Raise SetupError where the interpreter cannot import the names."""
    imported = subprocess.run(
        [python, "-c", f"import {names}"],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if imported.returncode:
        raise SetupError(f"{names} cannot be imported: {imported.stderr.strip()}")


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One at a time; the operating system frees the lock where its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(folder: Path, pins: Pins, install: Callable[[Path], None]) -> bool:
    """Makes the environment where it is not there or of other pins; says whether it was made.

    `install` puts everything into a new folder; the marker file is written behind it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.parent / f"{folder.name}.lock"):
        if fault(folder, pins, folder.name) is None:
            return False
        for leftover in folder.parent.glob(f"{folder.name}.*"):  # of a caller that was killed
            if leftover.is_dir():
                shutil.rmtree(leftover)
        # In the same file system, so that one rename puts it in its place.
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as work:
            new = Path(work) / "new"
            install(new)
            (new / MARKER).write_text(json.dumps(pins, indent=1) + "\n")
            if folder.exists():
                folder.rename(Path(work) / "old")
            new.rename(folder)
    return True


def report(folder: Path, pins: Pins, install: Callable[[Path], None]) -> bool:
    """Makes the environment and says where it is, or why it cannot be made; whether it is there."""
    try:
        made = make(folder, pins, install)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return False
    sys.stdout.write(f"{folder} {'was made' if made else 'is as it must be'}\n")
    return True

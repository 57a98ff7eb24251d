"""Makes the environment of the peers that the tests in this folder hold the project against.

    python tests/peers/setup_peers.py

SpecForge and speculators, and what they need to import and run on a CPU, go into an environment of
their own; SGLang's wheel is unpacked beside them as source to read, since its GPU dependencies are
not installed. All of it lies in

    ${XDG_CACHE_HOME:-~/.cache}/drafter-orchestrator/peers
        bin/python        the interpreter, which imports specforge and speculators
        sglang-source/    the unpacked wheel of SGLang; not importable from that interpreter
        made.json         what was installed; written last, so without it the folder is unfinished

A finished folder with the same pins is left alone; one with others is made anew beside it and put
in its place at once. A second caller waits for the first. uv installs: that of the environment
this runs in (`make setup`), or the one on PATH; UV_FIND_LINKS, or else PIP_FIND_LINKS, says where
wheels lie on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PEERS = ("specforge==0.2.0", "hs-connectors==0.9.0", "speculators==0.9.0")
SGLANG = "sglang==0.5.23"
# What the peers import on a CPU. Unpinned names take their version from the project's constraints.
NEEDED = (
    "accelerate==1.15.0",
    "aiohttp",
    "datasets==5.2.0",
    "httpx==0.28.1",
    "loguru==0.7.3",
    "numpy",
    "openai==3.57.0",
    "pydantic",
    "pydantic-settings==2.16.3",
    "pyyaml",
    "safetensors",
    "torch",
    "tqdm",
    "transformers",
    "triton",  # SpecForge imports its kernels, which a CPU does not run
)
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
MARKER = "made.json"
SGLANG_FOLDER = "sglang-source"


class SetupError(Exception):
    """The peers' environment cannot be made; the message says why in one sentence."""


def peers_folder() -> Path:
    """Where the peers' environment lies or would lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "drafter-orchestrator" / "peers"


def pins() -> dict[str, object]:
    """What a finished folder must have been made from, as its marker file says it."""
    names = {re.split(r"[=<>;\s]", need)[0] for need in NEEDED}
    lines = CONSTRAINTS.read_text().splitlines()
    constraints = sorted(line for line in lines if re.split(r"[=<>;\s]", line)[0] in names)
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "needed": list(NEEDED),
        "constraints": constraints,
        "peers": list(PEERS),
        "sglang": SGLANG,
    }


def fault(folder: Path) -> str | None:
    """Why the folder cannot be used, in words, or None where it is finished and of these pins."""
    try:
        made = json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return f"the peers' environment is not at {folder}"
    except ValueError:
        return f"{folder / MARKER} is damaged"
    if made != pins():
        return f"the peers' environment at {folder} was made from other pins"
    return None


def find_uv() -> str:
    """The uv to install with."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise SetupError("uv is needed to make the peers' environment; run `make setup` first")
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


def install(folder: Path) -> None:
    """Everything into a new folder; the marker file last."""
    made_from = pins()
    python = str(folder / "bin" / "python")
    run_uv("venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder))
    to = ("pip", "install", "--quiet")
    run_uv(*to, "--python", python, "--constraint", str(CONSTRAINTS), *NEEDED)
    run_uv(*to, "--python", python, "--no-deps", *PEERS)
    source = str(folder / SGLANG_FOLDER)
    run_uv(*to, "--python", python, "--no-deps", "--target", source, SGLANG)
    imported = subprocess.run(
        [python, "-c", "import torch, transformers, specforge, speculators"],
        capture_output=True,
        text=True,
        check=False,
    )
    if imported.returncode:
        raise SetupError(f"the peers do not import: {imported.stderr.strip()}")
    (folder / MARKER).write_text(json.dumps(made_from, indent=1) + "\n")


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One at a time; the operating system frees the lock where its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(folder: Path) -> bool:
    """Makes the environment where it is not there or of other pins; says whether it was made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.parent / "peers.lock"):
        if fault(folder) is None:
            return False
        for leftover in folder.parent.glob("peers.*"):  # of a caller that was killed
            if leftover.is_dir():
                shutil.rmtree(leftover)
        # In the same file system, so that one rename puts it in its place.
        with tempfile.TemporaryDirectory(prefix="peers.", dir=folder.parent) as work:
            new = Path(work) / "new"
            install(new)
            if folder.exists():
                folder.rename(Path(work) / "old")
            new.rename(folder)
    return True


def main() -> int:
    """Makes the environment and prints where it is."""
    folder = peers_folder()
    try:
        made = make(folder)
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{folder} {'was made' if made else 'is as it must be'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

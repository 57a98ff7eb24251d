"""Makes the environment of the peers that the tests in this folder hold the project against.

    python -m tests.peers.setup_peers

SpecForge and speculators, and what they need to import and run on a CPU, go into an environment of
their own; SGLang's wheel is unpacked beside them as source to read, since its GPU dependencies are
not installed. All of it lies in

    ${XDG_CACHE_HOME:-~/.cache}/drafter-orchestrator/peers
        bin/python        the interpreter, which imports specforge and speculators
        sglang-source/    the unpacked wheel of SGLang; not importable from that interpreter
        made.json         what was installed; written last, so without it the folder is unfinished

How it is made, and when anew, is `tests/environments.py`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import environments

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
SGLANG_FOLDER = "sglang-source"


def peers_folder() -> Path:
    """Where the peers' environment lies or would lie."""
    return environments.cache_folder() / "peers"


def pins() -> dict[str, object]:
    """What a finished folder must have been made from, as its marker file says it."""
    names = {re.split(r"[=<>;\s]", need)[0] for need in NEEDED}
    lines = CONSTRAINTS.read_text().splitlines()
    constraints = sorted(line for line in lines if re.split(r"[=<>;\s]", line)[0] in names)
    return {
        **environments.interpreter_pins(),
        "needed": list(NEEDED),
        "constraints": constraints,
        "peers": list(PEERS),
        "sglang": SGLANG,
    }


def fault(folder: Path) -> str | None:
    """Why the folder cannot be used, in words, or None where it is finished and of these pins."""
    return environments.fault(folder, pins(), "the peers' environment")


def install(folder: Path) -> None:
    """Everything into a new folder."""
    python = environments.new_environment(folder)
    to = ("pip", "install", "--quiet", "--python", python)
    environments.run_uv(*to, "--constraint", str(CONSTRAINTS), *NEEDED)
    environments.run_uv(*to, "--no-deps", *PEERS)
    environments.run_uv(*to, "--no-deps", "--target", str(folder / SGLANG_FOLDER), SGLANG)
    environments.check_imports(python, "torch, transformers, specforge, speculators")


def main() -> int:
    """Makes the environment and prints where it is."""
    return 0 if environments.report(peers_folder(), pins(), install) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Makes the environments in which the tests in this folder run SGLang and vLLM on a CPU.

    python -m tests.engines.setup_engines [sglang] [vllm]

Each engine has an environment of its own, since their pins contradict each other and the project's:

    ${XDG_CACHE_HOME:-~/.cache}/drafter-orchestrator/engines/sglang    3.3 GB
    ${XDG_CACHE_HOME:-~/.cache}/drafter-orchestrator/engines/vllm      1.4 GB

What goes into them is `sglang.txt` and `vllm.txt` here, name by name and without dependencies. Nothing
is resolved, so no CUDA build of torch comes in by the back door: torch's CPU build is asked for by its
local version, which the usual index does not have, and comes from UV_FIND_LINKS or PIP_FIND_LINKS.

- SGLang has no CPU build of its kernels (`sgl_kernel`) there; `sgl_kernel_stand_in` takes their place.
  torchvision is the CUDA build, which it imports and does not use.
- vLLM is its CPU build. torchvision, torchaudio and torchcodec, which it asks for, are left out: their
  CUDA builds break the import of transformers.

How an environment is made, and when anew, is `tests/environments.py`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests import environments
from tests.engines.serving import engine_folder, environment

MODULES = {
    "sglang": "sglang.srt.entrypoints.http_server",
    "vllm": "vllm.entrypoints.openai.api_server",
}
ENGINES = tuple(MODULES)
# The engines' own versions; `sglang.txt` and `vllm.txt` pin them with everything else.
RELEASES = {"sglang": "0.5.23", "vllm": "0.32.0"}


def requirements(engine: str) -> Path:
    """The file that names every package of the engine's environment."""
    return Path(__file__).parent / f"{engine}.txt"


def pins(engine: str) -> dict[str, object]:
    """What a finished folder must have been made from, as its marker file says it."""
    lines = requirements(engine).read_text().splitlines()
    needed = [line for line in lines if not line.startswith("#")]
    return {**environments.interpreter_pins(), "needed": needed}


def fault(engine: str) -> str | None:
    """Why the engine's environment cannot be used, or None where it can."""
    name = f"the environment of {engine}"
    return environments.fault(engine_folder(engine), pins(engine), name)


def install(engine: str, folder: Path) -> None:
    """Everything into a new folder."""
    python = environments.new_environment(folder)
    file = str(requirements(engine))
    to = ("pip", "install", "--quiet", "--compile-bytecode", "--no-deps", "--python", python)
    environments.run_uv(*to, "--requirement", file)
    variables = environment(engine)
    variables.pop("LD_PRELOAD", None)  # names a file of the finished folder
    environments.check_imports(python, MODULES[engine], variables)


def main(engines: list[str]) -> int:
    """Makes the environments of the engines, or of all, and prints where they are."""
    for engine in engines:
        if engine not in ENGINES:
            sys.stderr.write(f"{engine} is no engine; there are {' and '.join(ENGINES)}\n")
            return 2
    made = [
        environments.report(engine_folder(engine), pins(engine), partial(install, engine))
        for engine in engines or ENGINES
    ]
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

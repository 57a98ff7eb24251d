"""The command and environment that start each real engine on a machine without a GPU.

What is here is special to a CPU: device flags, preloads, the stand-in for SGLang's kernels. The
environments are what has to be set beside the caller's own. Who starts an engine also stops it, as a
process group: both engines start processes of their own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import environments

ENGINES = ("sglang", "vllm")
STAND_IN = Path(__file__).parent / "sgl_kernel_stand_in"
CONTEXT = 1024  # tokens; enough for the lab, and a cache that a small machine has
REQUESTS = 8  # at a time


def engine_folder(engine: str) -> Path:
    """Where the engine's environment lies or would lie; `setup_engines` makes it."""
    return environments.cache_folder() / "engines" / engine


def engine_python(engine: str) -> Path:
    """The interpreter that runs the engine."""
    return engine_folder(engine) / "bin" / "python"


def sglang_command(
    target: Path,
    drafter: Path | None,
    port: int,
    *,
    steps: int = 3,
    topk: int = 1,
    draft_tokens: int | None = None,
) -> list[str]:
    """SGLang behind `port`; a chain of `steps`, or with `topk` a tree of `draft_tokens`."""
    command = [str(engine_python("sglang")), "-m", "sglang.launch_server"]
    command += ["--model-path", str(target), "--host", "127.0.0.1", "--port", str(port)]
    # The only attention of a CPU that can verify drafts is the one made for AMX.
    command += ["--device", "cpu", "--attention-backend", "intel_amx", "--dtype", "float32"]
    command += ["--context-length", str(CONTEXT), "--max-running-requests", str(REQUESTS)]
    command += ["--max-total-tokens", str(CONTEXT * REQUESTS)]
    command += ["--disable-cuda-graph", "--disable-overlap-schedule"]
    command += ["--enable-metrics", "--skip-server-warmup"]
    if drafter is None:
        return command
    tokens = steps + 1 if draft_tokens is None else draft_tokens
    command += ["--speculative-algorithm", "EAGLE3"]
    command += ["--speculative-draft-model-path", str(drafter)]
    command += ["--speculative-num-steps", str(steps)]
    command += ["--speculative-eagle-topk", str(topk)]
    return [*command, "--speculative-num-draft-tokens", str(tokens)]


def sglang_environment() -> dict[str, str]:
    """What SGLang needs set on a CPU, its stand-in for kernels included."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(STAND_IN),
        "TORCHDYNAMO_DISABLE": "1",  # else the first speculative request compiles for 40 s
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def vllm_command(target: Path, drafter: Path | None, port: int, *, steps: int = 3) -> list[str]:
    """vLLM behind `port`; `vllm serve` looks for a distribution that its CPU build is not."""
    command = [str(engine_python("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(REQUESTS)]
    if drafter is None:
        return command
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": steps}
    return [*command, "--speculative-config", json.dumps(speculative)]


def vllm_environment() -> dict[str, str]:
    """What vLLM needs set on a CPU; its OpenMP has to be there before torch's."""
    openmp = engine_folder("vllm") / "lib" / "libiomp5.so"
    preloaded = [str(openmp), os.environ.get("LD_PRELOAD", "")]
    return {
        "LD_PRELOAD": " ".join(filter(None, preloaded)),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }

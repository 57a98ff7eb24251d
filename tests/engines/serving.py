"""What starts each real engine on a machine without a GPU, beside what a person would set.

Flags and environment are special to a CPU: device flags, a preload, the stand-in for SGLang's kernels.
Servers are started, watched and stopped by jobs.engines.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests import environments

STAND_IN = Path(__file__).parent / "sgl_kernel_stand_in"
CONTEXT = 1024  # tokens; enough for the lab, and a cache that a small machine has
REQUESTS = 8  # at a time


def engine_folder(engine: str) -> Path:
    """Where the engine's environment lies or would lie; `setup_engines` makes it."""
    return environments.cache_folder() / "engines" / engine


def engine_python(engine: str) -> Path:
    """The interpreter that runs the engine."""
    return engine_folder(engine) / "bin" / "python"


def flags(engine: str) -> dict[str, Any]:
    """Its server's flags, as engine.flags has them."""
    if engine == "vllm":
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": CONTEXT,
            "max_num_seqs": REQUESTS,
        }
    return {
        "device": "cpu",
        # The only attention of a CPU that can verify drafts is the one made for AMX.
        "attention_backend": "intel_amx",
        "dtype": "float32",
        "context_length": CONTEXT,
        "max_running_requests": REQUESTS,
        "max_total_tokens": CONTEXT * REQUESTS,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # two servers poll at full speed on two cores otherwise
    }


def environment(engine: str) -> dict[str, str]:
    """Its server's variables, as engine.env has them."""
    shared = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if engine == "vllm":
        # Its OpenMP has to be there before torch's.
        openmp = engine_folder("vllm") / "lib" / "libiomp5.so"
        preloaded = [str(openmp), os.environ.get("LD_PRELOAD", "")]
        return {
            **shared,
            "LD_PRELOAD": " ".join(filter(None, preloaded)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return {
        **shared,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": str(STAND_IN),
        "TORCHDYNAMO_DISABLE": "1",  # else the first speculative request compiles for 40 s
    }

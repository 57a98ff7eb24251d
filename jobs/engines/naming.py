"""Which canonical states a running server returns: as it was told, and as measured, which must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.engines import looked_up, rule_for, served_states
from eagle3.errors import BadInput
from eagle3.files import read_json
from jobs.engines.probing import FED, NONE, Chunk, open_end
from jobs.engines.records import Facts

MEASURED, DECLARED = "measured", "declared"
CAPTURE_ONLY = "aux_hidden_state_capture"  # SGLang's flag as resolved: capturing without a drafter
IDS = "return_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Told:
    """Which states a server was told to hand over."""

    states: (
        tuple[int, ...] | None
    )  # canonical, in the order of a row's chunks; None: it is not known
    said: str  # by what, or why it is not known
    doubts: tuple[str, ...] = ()  # what else the engine's rules say of these ids


@dataclass(frozen=True, kw_only=True)
class Named:
    """The states that a server returns, in the order of a row's chunks."""

    states: tuple[int, ...]
    known_by: tuple[str, ...]  # MEASURED or DECLARED, of each
    notes: tuple[str, ...] = ()


def told(facts: Facts, version: str, engine_class: str | None, num_layers: int) -> Told:
    """What a server's own flags, and the drafter that they name, say of its layers."""
    method, ids = facts.flags.get(CAPTURE_ONLY), None
    if method:
        if method != "eagle3":
            return Told(
                states=None,
                said=f"its layers are numbered as {method} does, which is not known here",
            )
        ids, named = facts.flags.get(IDS), f"--{IDS.replace('_', '-')}"
    elif facts.drafter is None:
        return Told(states=None, said="it does not name its drafter")
    else:
        path = Path(facts.drafter) / "config.json"
        named = str(path)
        try:
            config: Mapping[str, Any] = read_json(path)
        except BadInput as error:
            return Told(states=None, said=f"its drafter's ids cannot be read from here: {error}")
    try:
        rule = rule_for(facts.engine, version, engine_class)
        if not method:
            ids = looked_up(rule, config).ids
            block = config.get("eagle_config")
            if isinstance(block, Mapping) and block.get("use_aux_hidden_state") is False:
                return Told(states=None, said=f"{named} has use_aux_hidden_state off")
        served = served_states(rule, ids, num_layers)
    except BadInput as error:
        return Told(states=None, said=f"what its layer ids mean is not known: {error}")
    listed = "no ids" if ids is None else f"ids {list(ids)}"
    engine = f"{facts.engine} {version}, class {engine_class}"
    if served.states is None:
        return Told(states=None, said=f"{named}: {listed} ({engine}): {'; '.join(served.problems)}")
    return Told(
        states=served.states,
        said=f"{named}: {listed} = states {list(served.states)} ({engine}; {rule.evidence.value})",
        doubts=served.problems,
    )


def name_states(
    told: Told, chunks: Sequence[Chunk], count: int, computed: int, num_layers: int, why: str
) -> Named:
    """The states of a row's `count` chunks: measured where `chunks` name them among the target's own
    states 0 … `computed`, else as the server was told. `why` says why no more were computed.

    Raises BadInput where neither settles it, or where both speak and contradict each other.
    """
    if told.states is not None and len(told.states) != count and not all_named(chunks):
        raise BadInput(
            f"the server returns {count} states a row, but was told {len(told.states)}: {told.said}"
        )
    agreed = (
        told.states if told.states is not None and len(told.states) == count else (None,) * count
    )
    if not chunks:
        if told.states is None or told.doubts:
            because = "; ".join((told.said, *told.doubts))
            raise BadInput(
                f"which states the server returns is not known ({because}), and not measured: {why}"
            )
        return Named(states=told.states, known_by=(DECLARED,) * count)
    states, known_by = [], []
    for chunk, k in zip(chunks, agreed, strict=True):
        state, how = settle(chunk, k, told, computed, num_layers)
        states.append(state)
        known_by.append(how)
    notes = []
    if told.states is not None and tuple(states) != told.states:
        notes.append(f"measured, the server returns states {states}, and not as told: {told.said}")
    return Named(states=tuple(states), known_by=tuple(known_by), notes=tuple(notes))


def settle(
    chunk: Chunk, k: int | None, told: Told, computed: int, num_layers: int
) -> tuple[int, str]:
    """A chunk's state, and how it is known; `k` is the one that was told. Raises BadInput."""
    if chunk.shift:
        raise BadInput(
            f"the server's rows are not their positions' own, so no data can be made: {chunk.in_words}"
        )
    last = open_end(chunk, computed, num_layers)
    if chunk.verdict == FED and k in chunk.states and k is not None:
        return k, MEASURED
    beyond = k is not None and k > computed
    if k is not None and not told.doubts:
        if beyond and (chunk.verdict == NONE or last):
            return k, DECLARED
        if k in chunk.states:
            return k, DECLARED
    if chunk.verdict == FED and not last:
        return chunk.states[0], MEASURED
    said = "; ".join((told.said, *told.doubts))
    what = "nobody says which it is" if k is None else f"it was told that this is state {k}"
    raise BadInput(f"the server's {chunk.in_words} of states 0 to {computed}, but {what}: {said}")


def all_named(chunks: Sequence[Chunk]) -> bool:
    """Whether the measurement needs nobody's word."""
    return bool(chunks) and all(chunk.verdict == FED for chunk in chunks)

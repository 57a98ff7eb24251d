"""What a search, a diagnosis and the engine that it asks about may be set to."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.engines import rule_for
from eagle3.errors import BadInput
from eagle3.wiring import SWITCHES
from orchestrator.check_bench import ENGINES
from orchestrator.errors import InputError

JOBS = ("wiring_search", "diagnose")
STATES = "states"


def check_search(config: Mapping[str, Any]) -> None:
    """The axes, the engine and the figures of a search. Raises InputError for what will not do."""
    if config["job"]["name"] not in JOBS:
        return
    check_axes(config["job"]["axes"])
    check_accuracy(config["job"].get("trained_accuracy"))
    if "engine" in config:
        check_engine(config["engine"])


def check_axes(axes: Mapping[str, Any]) -> None:
    """Every name is an axis, every value one of its own, and none is asked for and left out."""
    fixed, only, states = axes["fixed"], axes["only"], axes["states"]
    more = axes["more_states"]
    for name in fixed:
        if name not in (STATES, *SWITCHES):
            raise InputError(f"job.axes.fixed: {no_such('axis', name, (STATES, *SWITCHES))}")
    for name, values in only.items():
        if name == STATES:
            raise InputError("job.axes.only.states: name states by job.axes.states=[[0,3,31],…]")
        if name not in SWITCHES:
            raise InputError(f"job.axes.only: {no_such('switch', name, (*SWITCHES,))}")
        known = [value.value for value in SWITCHES[name]]
        wrong = [value for value in values if value not in known]
        if wrong:
            raise InputError(f"job.axes.only.{name}: {no_such('value', wrong[0], known)}")
        if not values or len(set(values)) < len(values):
            raise InputError(f"job.axes.only.{name} is {values}; name each value to try once")
    both = [name for name in fixed if name in only or (name == STATES and states is not None)]
    if both:
        raise InputError(
            f"job.axes: {both[0]} is in fixed, and its values are named as well; keep one of the two"
        )
    if more and (states is not None or STATES in fixed):
        so = "states is in job.axes.fixed" if STATES in fixed else "job.axes.states names them all"
        raise InputError(
            f"job.axes.more_states adds to the states that are tried, but {so}; keep one of the two"
        )
    if states is not None:
        check_states("states", states)
    if more:
        check_states("more_states", more)


def check_states(key: str, states: Sequence[Sequence[int]]) -> None:
    """Choices of canonical states, all of one length, each once."""
    whole = all(isinstance(chosen, list) and chosen and min(chosen) >= 0 for chosen in states)
    alike = whole and len({len(chosen) for chosen in states}) == 1
    if not alike or len({tuple(chosen) for chosen in states}) < len(states):
        raise InputError(
            f"job.axes.{key} is {states}; name each choice of canonical states once, as many states in "
            "each as the drafter's fc takes, from 0 up: [[0,3,31],[3,31,59]]"
        )


def check_accuracy(accuracy: float | None) -> None:
    """A share, not a percentage."""
    if accuracy is not None and not 0 <= accuracy <= 1:
        hint = f"; for {accuracy:g} % write {accuracy / 100:g}" if 1 < accuracy <= 100 else ""
        raise InputError(f"job.trained_accuracy is {accuracy}, but must be from 0 to 1{hint}")


def check_engine(engine: Mapping[str, Any]) -> None:
    """Nothing is said of an engine that has no name."""
    if engine["accept_length"] is not None and engine["accept_length"] < 1:
        raise InputError(
            f"engine.accept_length is {engine['accept_length']}, but must be at least 1: it counts the "
            "target's own token as well"
        )
    if engine["ids"] is not None and not engine["ids"]:
        raise InputError("engine.ids is empty; leave it out where config.json is what counts")
    stated = [key for key, value in engine.items() if key != "name" and value not in (None, {})]
    if engine["name"] is None and stated:
        raise InputError(
            f"engine.{stated[0]} is set without an engine; name it: engine=sglang, vllm, tensorrt_llm "
            "or llama_cpp"
        )
    if engine["url"] is not None:
        check_url(engine)
    elif engine["name"] is not None and (engine["version"] or not engine["checkout"]):
        try:  # a checkout says which release it is where it lies
            rule_for(engine["name"], engine["version"], engine["engine_class"])
        except BadInput as error:
            raise InputError(f"engine: {error}") from error


def check_url(engine: Mapping[str, Any]) -> None:
    """A server that runs is asked what it is told, and is of an engine that can be asked."""
    if engine["name"] not in ENGINES:
        raise InputError(
            f"engine.url asks a running {' or '.join(ENGINES)}, but the engine is {engine['name']}; "
            "leave it out"
        )
    if engine["ids"] is not None:
        raise InputError(
            f"engine.ids={engine['ids']} is what a server is told, but engine.url names one that runs "
            "and is asked what it feeds; leave one of them out"
        )


def no_such(kind: str, name: str, known: Sequence[str]) -> str:
    """'there is no axis …; did you mean …?'."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"there is no {kind} {name!r}; {hint}"

"""A request as the question that it asks a search or a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.doctor.subject import EngineAsked
from eagle3.wiring import Wiring
from jobs.question import Asked


def asked_of(request: Mapping[str, Any]) -> Asked:
    """A request as a question."""
    inputs, axes = request["inputs"], request.get("axes") or {}
    data, drafter = inputs["data"], inputs["drafter"]
    engine = request.get("engine")
    only: dict[str, Sequence[Any]] = dict(axes.get("only") or {})
    if axes.get("states") is not None:
        only["states"] = [tuple(states) for states in axes["states"]]
    start = request.get("start")
    return Asked(
        drafter=Path(drafter["path"]),
        data=Path(data["path"]),
        drafter_layout=drafter.get("layout"),
        data_layout=data.get("layout"),
        states=data.get("states"),
        damaged=data.get("damaged", "fail"),
        argmax=Path(data["target_argmax"]) if data.get("target_argmax") else None,
        engine=None if engine is None else engine_of(engine),
        ids=None if engine is None else engine.get("ids"),
        accept_length=None if engine is None else engine.get("accept_length"),
        trained_accuracy=request.get("trained_accuracy"),
        steps=int(request["steps"]),
        max_samples=request.get("max_samples"),
        seed=int(request["seed"]),
        finalists=int(request.get("finalists") or 8),
        start=None if start is None else Wiring.parse(start),
        fixed=tuple(axes.get("fixed") or ()),
        only=only,
        more_states=tuple(tuple(states) for states in axes.get("more_states") or ()),
        neighbours=bool(axes.get("neighbours", True)),
    )


def engine_of(engine: Mapping[str, Any]) -> EngineAsked:
    """The engine of a request."""
    return EngineAsked(
        name=engine["name"],
        version=engine.get("version"),
        engine_class=engine.get("engine_class"),
        checkout=engine.get("checkout"),
        flags=dict(engine.get("flags") or {}),
    )

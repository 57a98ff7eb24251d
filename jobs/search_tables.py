"""A search's tables, as results hold them."""

from __future__ import annotations

from typing import Any

from eagle3.metrics import Difference, Rate
from eagle3.search.results import Dropped, Ranked, Searched, TeacherScore


def tables(searched: Searched) -> dict[str, Any]:
    """A search's tables, as results hold them."""
    return {
        "ranked": [ranked_row(ranked) for ranked in searched.ranked],
        "dropped": [
            dropped_row(dropped, dropped.behind)
            for dropped in searched.dropped
            if dropped.behind is not None
        ],
        "teachers": [teacher_row(score) for score in searched.teachers],
        "teacher": {"name": searched.teacher.name, "clear": searched.teacher_clear},
        "rounds": list(searched.rounds),
        "scored": searched.scored,
    }


def ranked_row(ranked: Ranked) -> dict[str, Any]:
    """One wiring of the ranked table."""
    return {
        "name": row_name(ranked),
        "changed": list(ranked.changed),
        "wiring": ranked.wiring.plain(),
        "states": list(ranked.wiring.states()),
        "teacher": ranked.teacher,
        "texts": len(ranked.counts),
        "metrics": {
            "accuracy": ranked.accuracy.plain(),
            "accept_length": ranked.accept_length.plain(),
        },
        "curves": curves(ranked),
        "behind": None if ranked.behind is None else difference(ranked.behind),
        "tied": ranked.tied,
    }


def row_name(ranked: Ranked) -> str:
    """What a person calls it."""
    return "; ".join(ranked.changed) or "as the search started"


def dropped_row(dropped: Dropped, behind: Difference) -> dict[str, Any]:
    """One wiring that was left behind."""
    return {
        "changed": list(dropped.changed),
        "texts": dropped.texts,
        "positions": dropped.positions,
        "accuracy": dropped.accuracy,
        "behind": difference(behind),
        "why": dropped.why,
    }


def teacher_row(score: TeacherScore) -> dict[str, Any]:
    """One teacher."""
    return {
        "teacher": score.teacher.name,
        "in_words": score.teacher.in_words,
        "slot": score.teacher.slot,
        "norms": score.teacher.norms,
        "accuracy": score.accuracy.plain(),
        "agreement": None if score.agreement is None else score.agreement.plain(),
    }


def curves(ranked: Ranked) -> dict[str, list[dict[str, Any]]]:
    """Curves over draft steps."""
    return {
        name: [point(step, rate) for step, rate in points] for name, points in ranked.curves.items()
    }


def point(step: int, rate: Rate) -> dict[str, Any]:
    """One step of a curve."""
    return {"step": step, **rate.plain()}


def difference(found: Difference) -> dict[str, float]:
    """A difference as plain data."""
    return {"value": found.value, "low": found.low, "high": found.high}

"""Holding a prediction against what was measured.

    accuracy >= 0.70 and accept_length >= 2.5

A comparison holds where the whole interval is on its side, fails where the whole interval is on the
other, and is open otherwise. All hold: supported. One fails: refuted. Else: inconclusive.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import InputError

METRICS = (
    "accuracy",
    "accept_length",
    "accept_length_uniform",
    "accept_length_tree",
    "accept_length_tree_uniform",
    "coverage",
    "accept_length_standalone",  # of the drafter alone, beside what an engine serves
    "accept_length_fed",  # of the drafter alone, on the states that an engine was seen to feed
    "tok_s",
    "tok_s_baseline",
    "speedup",
    "break_even",  # accept length below which a drafter slows serving down
    "accuracy_served",  # by the engine that a diagnosis is asked about
    "accept_length_served",
    "accuracy/target_argmax",
    "accuracy/next_token",
    "accuracy/stored_teacher",
    "teacher_agreement",
    "teacher_next_token",
)
OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
COMPARISON = re.compile(
    r"^\s*([A-Za-z_][A-Za-z0-9_./-]*)\s*(>=|<=|>|<)\s*([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)\s*$"
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One comparison of a metric with a number."""

    metric: str
    op: str
    threshold: float

    @property
    def text(self) -> str:
        return f"{self.metric} {self.op} {self.threshold:g}"

    def holds(self, low: float, high: float) -> bool | None:
        """True or False where the interval [low, high] decides it, else None."""
        compare = OPERATORS[self.op]
        ends = {bool(compare(low, self.threshold)), bool(compare(high, self.threshold))}
        return ends.pop() if len(ends) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run answered: supported, refuted, inconclusive, measured or not_answered."""

    verdict: str
    reason: str
    predictions: tuple[dict[str, Any], ...] = ()

    def plain(self) -> dict[str, Any]:
        """As plain data for verdict.json."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "predictions": list(self.predictions),
        }


def metrics_of(job: str) -> tuple[str, ...] | None:
    """The metrics of a job that may be predicted; None for a script, whose metrics are its own."""
    return None if job == "script" else METRICS


def parse_predictions(
    text: str | None, metrics: Sequence[str] | None = METRICS
) -> tuple[Prediction, ...]:
    """The comparisons of a prediction joined by 'and'; `metrics` None allows any name.

    Raises InputError with the form that a prediction takes.
    """
    if text is None:
        return ()
    found = []
    for part in text.split(" and "):
        match = COMPARISON.match(part)
        if match is None:
            raise InputError(
                f"predict: {part.strip()!r} is no comparison; write METRIC OP NUMBER joined by 'and', "
                "such as 'accuracy >= 0.70 and accept_length >= 2.5'"
            )
        metric, op, number = match.groups()
        if metrics is not None and metric not in metrics:
            raise InputError(
                f"predict: there is no metric {metric!r}; the metrics are {', '.join(metrics)}"
            )
        found.append(Prediction(metric=metric, op=op, threshold=float(number)))
    return tuple(found)


def judge(predictions: tuple[Prediction, ...], metrics: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """Hold predictions against a result's metrics (name → value, low, high)."""
    if not predictions:
        return Verdict(verdict="measured", reason="nothing was predicted")
    rows = []
    for p in predictions:
        if p.metric not in metrics:
            return not_answered(f"{p.metric} was predicted but not measured")
        m = metrics[p.metric]
        # A script's figure may come without an interval: then the value itself has to decide.
        low, high = m.get("low", m["value"]), m.get("high", m["value"])
        rows.append(
            {
                "text": p.text,
                "metric": p.metric,
                "op": p.op,
                "threshold": p.threshold,
                "value": m["value"],
                "low": low,
                "high": high,
                "interval": "low" in m and "high" in m,
                "holds": p.holds(low, high),
            }
        )
    failing = [r for r in rows if r["holds"] is False]
    open_rows = [r for r in rows if r["holds"] is None]
    if failing:
        return Verdict(verdict="refuted", reason=in_words(failing[0]), predictions=tuple(rows))
    if open_rows:
        return Verdict(
            verdict="inconclusive", reason=in_words(open_rows[0]), predictions=tuple(rows)
        )
    reason = "; ".join(in_words(r) for r in rows)
    return Verdict(verdict="supported", reason=reason, predictions=tuple(rows))


def in_words(row: Mapping[str, Any]) -> str:
    """'accuracy >= 0.7: 0.741 [0.722, 0.760]', or 'ms < 9: 7.4 (no interval)'."""
    if not row["interval"]:
        return f"{row['text']}: {row['value']:.6g} (no interval)"
    # Rates have three places; a script's figures may be of any size.
    form = ".3f" if row["metric"] in METRICS else ".4g"
    return f"{row['text']}: {row['value']:{form}} [{row['low']:{form}}, {row['high']:{form}}]"


def not_answered(reason: str) -> Verdict:
    """The verdict of a run that gave no figures."""
    return Verdict(verdict="not_answered", reason=reason)

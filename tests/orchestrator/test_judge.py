"""Verdicts: a prediction is held against the whole interval."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.judge import judge, parse_predictions


def metrics(low: float, high: float, name: str = "accuracy") -> dict[str, dict[str, float]]:
    return {name: {"value": (low + high) / 2, "low": low, "high": high}}


@pytest.mark.parametrize(
    ("predict", "low", "high", "verdict"),
    [
        ("accuracy >= 0.70", 0.70, 0.75, "supported"),
        ("accuracy > 0.70", 0.70, 0.75, "inconclusive"),
        ("accuracy >= 0.70", 0.69, 0.75, "inconclusive"),
        ("accuracy >= 0.70", 0.60, 0.6999, "refuted"),
        ("accuracy < 0.02", 0.0, 0.019, "supported"),
        ("accuracy < 0.02", 0.02, 0.03, "refuted"),
        ("accuracy <= .5 and accuracy >= 4e-1", 0.41, 0.49, "supported"),
        ("accuracy <= 0.45 and accuracy >= 0.4", 0.41, 0.49, "inconclusive"),
        ("accuracy <= 0.45 and accuracy >= 0.9", 0.41, 0.49, "refuted"),
        (None, 0.1, 0.2, "measured"),
    ],
)
def test_verdicts(predict: str | None, low: float, high: float, verdict: str) -> None:
    assert judge(parse_predictions(predict), metrics(low, high)).verdict == verdict


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_claim_and_its_opposite_are_never_both_supported(a: float, b: float, x: float) -> None:
    found = metrics(min(a, b), max(a, b))
    verdicts = {
        judge(parse_predictions(f"accuracy {op} {x:.17f}"), found).verdict for op in (">=", "<")
    }
    assert verdicts in ({"supported", "refuted"}, {"inconclusive"})


def test_a_metric_that_was_not_measured_is_no_answer() -> None:
    verdict = judge(parse_predictions("accept_length >= 2"), metrics(0, 1))
    assert verdict.verdict == "not_answered"
    assert "accept_length was predicted but not measured" in verdict.reason


@pytest.mark.parametrize("name", ["ms", "Loss", "eval/top-1.acc", "_x9"])
def test_a_script_may_measure_anything(name: str) -> None:
    (prediction,) = parse_predictions(f"{name} < 9.5", None)
    assert prediction.metric == name
    with pytest.raises(InputError, match="no metric"):
        parse_predictions(f"{name} < 9.5")


@pytest.mark.parametrize(
    ("predict", "verdict"),
    [("ms < 9.5", "supported"), ("ms < 7.4", "refuted"), ("ms <= 7.4", "supported")],
)
def test_a_figure_without_an_interval_decides_by_itself_and_says_so(
    predict: str, verdict: str
) -> None:
    found = judge(parse_predictions(predict, None), {"ms": {"value": 7.4}})
    assert found.verdict == verdict
    assert found.reason == f"{predict}: 7.4 (no interval)"
    (row,) = found.plain()["predictions"]
    assert (row["low"], row["high"]) == (7.4, 7.4)


def test_an_interval_is_shown_in_the_size_of_the_figure() -> None:
    small = {"loss": {"value": 2e-5, "low": 1e-5, "high": 3e-5}}
    reason = judge(parse_predictions("loss < 0.1", None), small).reason
    assert reason == "loss < 0.1: 2e-05 [1e-05, 3e-05]"
    rate = judge(parse_predictions("accuracy >= 0.7"), metrics(0.70, 0.75)).reason
    assert rate == "accuracy >= 0.7: 0.725 [0.700, 0.750]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accuracy => 3", "is no comparison"),
        ("accuracy", "is no comparison"),
        ("", "is no comparison"),
        ("acuracy > 0.5", "no metric 'acuracy'"),
        ("accuracy > 0.5 or accuracy < 0.1", "is no comparison"),
        ("9x > 0.5", "is no comparison"),
        ("größe > 0.5", "is no comparison"),
    ],
)
def test_a_prediction_that_cannot_be_read_says_its_form(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_predictions(text)

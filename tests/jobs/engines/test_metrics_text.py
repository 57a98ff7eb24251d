"""Counters are read as Prometheus writes them."""

from __future__ import annotations

from jobs.engines.metrics_text import by_label, samples, totals

TEXT = r"""# HELP vllm:tokens_total Tokens.
# TYPE vllm:tokens_total counter
vllm:tokens_total{engine="0",model_name="/m, \"a\"} b"} 12.0
vllm:tokens_total{engine="1",model_name="m"} 1.5e+01
vllm:tokens_created{engine="0"} 1.79e+09
vllm:per_pos_total{engine="0",position="0"} 7
vllm:per_pos_total{engine="1",position="0"} 1
vllm:per_pos_total{engine="0",position="10"} 3
vllm:latency_bucket{le="+Inf"} 4
up 1
vllm:cache_usage NaN
vllm:queue +Inf
this is no sample
"""


def test_a_counter_is_summed_over_replicas() -> None:
    assert totals(TEXT)["vllm:tokens_total"] == 27
    assert totals(TEXT)["up"] == 1


def test_one_label_tells_a_counter_apart() -> None:
    assert by_label(TEXT, "vllm:per_pos_total", "position") == {"0": 8, "10": 3}
    assert by_label(TEXT, "vllm:per_pos_total", "engine") == {"0": 10, "1": 1}
    assert by_label(TEXT, "vllm:per_pos_total", "pos") == {}
    assert by_label(TEXT, "vllm:nothing_total", "position") == {}


def test_quotes_commas_and_braces_may_stand_in_a_label() -> None:
    (first, *_) = samples(TEXT)
    assert first == ("vllm:tokens_total", {"engine": "0", "model_name": r"/m, \"a\"} b"}, 12.0)


def test_what_is_no_finite_number_is_no_sample() -> None:
    assert {"vllm:cache_usage", "vllm:queue", "this"}.isdisjoint(totals(TEXT))
    assert totals("") == {}

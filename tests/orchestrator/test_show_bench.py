"""What a benchmark of an engine prints."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.show import Show
from tests.orchestrator.searched import T0, rate

MEASURED = {"verdict": "measured", "reason": "nothing was predicted"}


def level(concurrency: int, **given: Any) -> dict[str, Any]:
    """The figures at one concurrency, as the job gives them."""
    made = {
        "concurrency": concurrency,
        "tok_s": {"value": 152.25, "low": 150.0, "high": 154.0},
        "tok_s_baseline": {"value": 101.5, "low": 100.0, "high": 103.0},
        "speedup": {"value": 1.5, "low": 1.45, "high": 1.55},
        "accept_length": rate(2.5, 300, 120),
        "per_position": [0.75, 0.5, 0.25],
        "first_token_s": {"median": 0.0123, "p95": 0.0456},
        "decode_tok_s": 160.0,
        "limits": {"break_even": 1.667},
        "advice": None,
        "limit_in_words": ["a round takes 20.0 ms, a plain step 12.0 ms"],
        "between_starts": None,
    }
    return {**made, **given}


def bench(*levels: dict[str, Any], **given: Any) -> dict[str, Any]:
    made = {
        "engine": "sglang",
        "version": "0.5.23",
        "class": "llama",
        "ids": [-1, 2, 30],
        "states": [0, 3, 31],
        "steps": 4,
        "topk": 1,
        "draft_tokens": 5,
        "prompts": 16,
        "levels": list(levels or (level(1),)),
        "agreement": {},
        "servers": [],
        "passes": [],
    }
    return {**made, **given}


def answer(found: dict[str, Any], *, terminal: bool = False, **metrics: Any) -> str:
    """What is printed of a result."""
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False, force_terminal=terminal, width=160)
    made = {
        "accept_length": rate(2.5, 300, 120),
        "speedup": {"value": 1.5, "low": 1.4, "high": 1.6},
    }
    result: dict[str, Any] = {
        "case_id": "case",
        "status": "ok",
        "error": None,
        "started": T0,
        "ended": T0 + 60,
        "metrics": {**made, **metrics},
        "curves": {},
        "findings": [],
        "wiring": None,
        "fingerprints": {},
        "notes": [],
        "bench": found,
    }
    Show(console).answer({k: v for k, v in result.items() if v is not None}, MEASURED)
    return out.getvalue()


def row(text: str, first: str) -> list[str]:
    """The cells of a table's row."""
    (line,) = [line for line in text.splitlines() if line.split("  ")[0].strip() == first]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_what_was_served_is_said_above_its_figures() -> None:
    text = answer(bench())
    assert (
        "sglang 0.5.23, class llama: ids [-1, 2, 30] = states 0, 3, 31; 4 steps; 16 prompts" in text
    )


def test_a_patch_of_the_engine_is_said_and_none_is_not() -> None:
    patch = {"name": "my.patch", "sha256": "0123456789abcdef", "files": ["vllm/a.py", "vllm/b.py"]}
    text = answer(bench(patch=patch))
    assert "patched  my.patch (0123456789ab) over vllm/a.py, vllm/b.py" in text
    assert "patched" not in answer(bench(patch=None))


def test_a_tree_is_said_with_its_shape() -> None:
    assert "; 4 steps, topk 2, 8 draft tokens; 16 prompts" in answer(bench(topk=2, draft_tokens=8))


def test_states_that_need_no_ids_are_the_engines_own() -> None:
    assert "class llama: its own states = states 0, 3, 31;" in answer(bench(ids=None))


def test_each_concurrency_is_a_row() -> None:
    text = answer(bench(level(1), level(32, speedup={"value": 0.9}, limits=None)))
    assert row(text, "1") == [
        *("1", "101.5", "152.2", "1.50 [1.45, 1.55]", "2.50 [2.48, 2.52] 300/120", "1.67"),
        "12 (95 %: 46)",
    ]
    assert row(text, "32")[3] == "0.90"
    assert "1.67" not in row(text, "32")


def test_without_a_baseline_its_columns_are_empty() -> None:
    alone = level(1, tok_s_baseline=None, speedup=None, limits=None, limit_in_words=[])
    assert row(answer(bench(alone)), "1") == [
        *("1", "152.2", "2.50 [2.48, 2.52] 300/120", "12 (95 %: 46)"),
    ]


def test_rounds_that_nobody_counts_are_not_taken_for_none() -> None:
    assert "not counted" in row(answer(bench(level(1, accept_length=None))), "1")


def test_what_limits_is_said_for_each_concurrency() -> None:
    text = answer(bench(level(1), level(8, limit_in_words=["best: 2 steps"])))
    assert "at 1 at once: a round takes 20.0 ms, a plain step 12.0 ms" in text
    assert "at 8 at once: best: 2 steps" in text


def test_what_contexts_and_time_do_is_said_where_there_is_something_to_say() -> None:
    text = answer(bench(level(1, parts_in_words=[]), level(8, parts_in_words=["it fell"])))
    assert "at 8 at once: it fell" in text
    assert text.count("it fell") == 1


def test_arms_beside_are_said_and_are_no_row_of_the_table() -> None:
    bound = {"simulated": True, "tok_s": 77.7}
    lines = ["simulated: 77.7 tok/s if no draft stood"]
    text = answer(bench(level(1, floor=bound, ceiling=bound, beside_in_words=lines)))
    assert "at 1 at once: simulated: 77.7 tok/s if no draft stood" in text
    assert text.count("77.7") == 1


def test_what_two_starts_differ_by_is_said() -> None:
    text = answer(bench(level(1, between_starts=0.034)))
    assert "at 1 at once: two starts of the baseline differ by 3.4%" in text
    assert "two starts" not in answer(bench())


def test_how_texts_agree_is_said_beside_how_the_baseline_does() -> None:
    found = {
        "speculative": {"prompts": 16, "same": 14, "first": [["a", 3], ["b", 9]]},
        "baseline": {"prompts": 16, "same": 15, "first": [["a", 3]]},
    }
    text = answer(bench(agreement=found))
    assert "texts    speculative: 14 of 16 as the baseline's" in text
    assert "texts    baseline again: 15 of 16 as the baseline's" in text


def test_every_server_is_named_with_its_start() -> None:
    facts = {"engine": "vllm", "version": "0.32.0"}
    servers = [{"label": label, "facts": facts, "ready_s": 33.4} for label in ("baseline", "fewer")]
    text = answer(bench(servers=servers))
    assert "server   baseline: vllm 0.32.0, ready after 33 s" in text
    assert "server   fewer: vllm 0.32.0, ready after 33 s" in text


def test_the_main_figures_are_named_in_words() -> None:
    text = answer(
        bench(),
        accept_length_standalone=rate(2.6, 260, 100),
        tok_s={"value": 152.25},
        tok_s_baseline={"value": 101.5},
        break_even={"value": 1.67},
    )
    for label in (
        "accept length",
        "accept length, the drafter alone",
        "tok/s with the drafter",
        "tok/s without it",
        "speedup",
        "break-even accept length",
    ):
        assert row(text, label), label


@pytest.mark.parametrize("place", ["version", "class", "limit"])
def test_text_of_a_host_is_not_taken_for_markup_or_control(place: str) -> None:
    nasty = "[red]\x1b[2J"
    found = bench(level(1, limit_in_words=[nasty])) if place == "limit" else bench(**{place: nasty})
    text = answer(found, terminal=True)
    assert "[red]?[2J" in text
    assert "\x1b[2J" not in text


def test_another_job_shows_no_bench() -> None:
    assert "at once" not in answer({})

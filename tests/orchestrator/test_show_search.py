"""What a search and a diagnosis print, and in which order."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestrator.conclude import conclude
from orchestrator.errors import HostError, StateUnknown
from orchestrator.follow import Ended
from orchestrator.paths import RunPaths
from orchestrator.session import Session
from orchestrator.show import Show
from tests.orchestrator.searched import (
    FIRST_LINES,
    diagnose_result,
    diagnosis,
    dropped_row,
    search_result,
)

MEASURED = {"verdict": "measured", "reason": "nothing was predicted"}
MACHINE = {"device": "cpu"}


def config(job: str) -> dict[str, Any]:
    """As much of a config as a heading tells."""
    return {
        "job": {"name": job, "device": "cpu"},
        "claim": "It is the wiring.",
        "predict": None,
        "host": {"name": "gpu8"},
        "target": {"name": "T"},
        "drafter": {"name": "D"},
        "data": {"name": "S"},
        "detach": False,
    }


def shown(*, terminal: bool = False) -> tuple[Show, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False, force_terminal=terminal, width=120)
    return Show(console), out


ENVIRONMENT = {
    "python": "3.11.7",
    "torch": None,
    "gpus": [],
    "kernel": "6.1",
    "hostname": "gpu8",
}


def go_through(show: Show, job: str, result: dict[str, Any]) -> None:
    """What is shown of a run, in the order in which a run comes to it."""
    show.heading(config(job), "mine", "run-1")
    show.host(ENVIRONMENT, ["torch: 2.6 is now 2.7"], "run-0")
    show.meanwhile("run-0", MEASURED)
    with show.progress() as (on_event, _):
        on_event({"type": "note", "text": "the data is whole"})
        on_event({"type": "progress", "what": "score", "done": 4, "total": 4})
    show.answer(result, MEASURED)


def test_a_diagnosis_opens_with_its_first_lines_and_everything_else_follows() -> None:
    show, out = shown()
    go_through(show, "diagnose", diagnose_result())
    lines = out.getvalue().splitlines()
    assert lines[: len(FIRST_LINES)] == FIRST_LINES
    below = "\n".join(lines[len(FIRST_LINES) :])
    order = [
        "mine ──",
        "claim    It is the wiring.",
        "run      run-1",
        "where    gpu8: Python 3.11.7",
        "changed  torch: 2.6 is now 2.7",
        "meanwhile  run-0 has ended",
        "note     the data is whole",
        "scoring samples: 4 of 4",
        "accuracy (step 0)",
        "cause 1  states: trained on states 0, 3 and 31; served 3, 31 and 59",
        "accept length 2.994 → 1.050 [1.030, 1.070]",
        "SGLang 0.5.12, class kimi_k25 (read)",
        "needs: the embedding capture, as a patch",
        "accept length as one after the other is mended",
        "the same states elsewhere",
        "slot 0: state 0, verified",
        "signature  low, then recovering",
        "undecided  rope scaling: no text is longer than 512 tokens",
        "note     96 texts",
        "ranked: 3 wirings on all samples, 4 dropped on the way",
        "teachers:",
        "ids-mean-other-states",
        "\nmeasured  nothing was predicted",
    ]
    found = [below.find(words) for words in order]
    assert -1 not in found, [words for words, at in zip(order, found, strict=True) if at < 0]
    assert found == sorted(found), [*zip(order, found, strict=True)]


def test_without_an_engine_the_figures_are_of_what_is_declared() -> None:
    result = diagnose_result()
    length = result["metrics"]["accept_length"]
    result["metrics"] = {"accept_length": length, "accept_length_served": length}
    for served, words in (({"engine": "SGLang"}, "as served"), (None, "as declared")):
        show, out = shown()
        result["diagnosis"] = {**result["diagnosis"], "served": served}
        show.answer(result, MEASURED)
        assert f"accept length, {words}" in out.getvalue()


def test_another_job_opens_with_its_heading() -> None:
    show, out = shown()
    go_through(show, "wiring_search", search_result())
    assert out.getvalue().startswith("mine ──")


def test_progress_bars_vanish_from_a_terminal_before_the_first_line() -> None:
    show, out = shown(terminal=True)
    go_through(show, "diagnose", diagnose_result())
    printed = out.getvalue()
    first = printed.index("cause    states")
    assert "mine" not in printed[:first]
    assert "the data is whole" not in printed[:first]
    assert printed.index("the data is whole", first)


def test_the_table_ranks_says_ties_and_draws_curves() -> None:
    show, out = shown()
    show.answer(search_result(), MEASURED)
    text = out.getvalue()
    (best,) = [line for line in text.splitlines() if line.rstrip().endswith("]  the best")]
    assert "states=0,3,31" in best
    assert "2.994 [2.974, 3.014]" in best
    (tie,) = [line for line in text.splitlines() if line.rstrip().endswith("a tie")]
    assert "states=0,3,31; rope=base_10000" in tie
    assert "as the search started" in text
    assert "step_accuracy/conditional, from step 0 on" in text
    assert "  1  0.749  0.648  0.548  0.449" in text
    assert "round 1 tried 144 wirings" in text
    (teacher,) = [line for line in text.splitlines() if line.startswith("target_argmax ")]
    assert teacher.rstrip().endswith("0.980 [0.960, 1.000]         the target's own choice")


def test_what_was_dropped_is_grouped_and_counted_with_the_nearest_and_why() -> None:
    show, out = shown()
    many = [dropped_row([f"axis{n}=x"], 1.0) for n in range(12)]
    show.answer(search_result(dropped=[*search_result()["dropped"], *many]), MEASURED)
    lines = out.getvalue().splitlines()
    (states,) = [n for n, line in enumerate(lines) if line == "  states: 3, after 8 to 32 texts"]
    assert lines[states + 1].startswith("    states=3,31,0: accuracy 0.040; 1.25 behind")
    assert lines[states + 2].startswith("    states=3,0,31: accuracy 0.040; 1.50 behind")
    assert lines[states + 3] == "  d2t: 1, after 8 texts"
    assert "  and 6 more that change 6 other things" in lines
    assert not any("states=31,0,3" in line for line in lines)


def test_a_sound_drafter_has_no_cause_to_show() -> None:
    show, out = shown()
    sound = diagnosis(verdict="sound", causes=[], ladder=[], elsewhere=[], findings=[], config=None)
    show.answer(search_result(diagnosis=sound, dropped=[], teachers=[]), MEASURED)
    assert "cause 1" not in out.getvalue()
    assert "dropped" not in out.getvalue()


def test_text_of_a_host_is_not_taken_for_markup_or_control() -> None:
    show, out = shown(terminal=True)
    show.answer(
        diagnose_result() | {"diagnosis": diagnosis(first_lines=["[red]\x1b[2J"])}, MEASURED
    )
    assert "[red]?[2J" in out.getvalue().splitlines()[0]


@pytest.mark.parametrize(
    "error", [HostError("gpu8: refused; nothing was started"), StateUnknown("gpu8: gone")]
)
def test_where_there_is_no_answer_nothing_is_swallowed(tmp_path: Path, error: Exception) -> None:
    show, out = shown()
    paths = RunPaths(tmp_path)

    def ending() -> Ended:
        raise error

    show.heading(config("diagnose"), None, "run-1")
    assert out.getvalue() == ""
    with Session(show) as session:
        if isinstance(error, StateUnknown):
            conclude(session, config("diagnose"), paths, ending)
        else:
            # Filing is another matter: only up to there.
            from orchestrator.conclude import answer

            with show.until_answered():
                answer(session, config("diagnose"), paths, ending)
    printed = out.getvalue()
    assert printed.startswith("diagnose ──")
    assert printed.index("run      run-1") < printed.index(str(error))
    show.line("and on")
    assert out.getvalue().endswith("and on\n")


def test_a_lost_host_is_said_at_once_and_not_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    show, out = shown()
    show.heading(config("diagnose"), None, "run-1")
    show.trouble("lost     gpu8: connection reset; trying again for 60 s")
    assert out.getvalue() == ""
    assert "trying again for 60 s" in capsys.readouterr().err
    show.release()
    show.trouble("lost     once more")
    assert out.getvalue().endswith("lost     once more\n")

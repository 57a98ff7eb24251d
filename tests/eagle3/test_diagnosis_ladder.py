"""The ladder mends first what stops the engine, then what can be written, and says what that gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from eagle3.diagnosis.causes import with_part_of
from eagle3.diagnosis.evidence import Evidence, Scored
from eagle3.diagnosis.verdict import diagnose
from eagle3.search.score import Scorer
from eagle3.served_switches import Stop
from eagle3.wiring import Feedback, Residual, Wiring
from jobs.measuring import Matter, with_ladder
from tests.eagle3.diagnosed import GOOD, evidence, scored, served, wiring

T = wiring(0, 3, 31)
# Residual: no line in SGLang; feedback: a line; states: a line that needs a patch of the engine.
S = wiring(3, 31, 59, residual=Residual.normed, feedback=Feedback.normed)
POOR, DEAD = (0.3, 0.4, 0.4, 0.4), (0.03, 0.0, 0.0, 0.0)


class Found:
    """Scores a wiring by how many of its differences are left."""

    def why_not(self, _: Wiring) -> None:
        """Every wiring can be scored."""

    def scored(self, _: Scorer, wired: Wiring) -> Scored:
        left = len(T.differing(wired))
        return scored(wired, (0.75 - 0.2 * left, 0.8, 0.8, 0.8))


def ladder_of(e: Evidence) -> Evidence:
    """The evidence with its ladder."""
    found: Any = Found()
    m = SimpleNamespace(scored=found.scored, asked=SimpleNamespace(seed=0))
    return with_ladder(cast(Matter, m), e, cast(Scorer, found), None)


def alone(*kinds: str, curve: tuple[float, ...] = POOR) -> dict[str, Scored]:
    return {kind: scored(with_part_of(T, S, kind), curve) for kind in kinds}


def names(e: Evidence) -> list[str]:
    return [kind for kind, _ in e.ladder]


def expected(e: Evidence) -> str:
    (line,) = [line for line in diagnose(e).first_lines() if line.startswith("expected")]
    return line


def test_lines_come_before_patches_and_those_before_what_is_not_there() -> None:
    differences = {**alone("states", "residual", curve=DEAD), **alone("feedback")}
    e = ladder_of(evidence(scored(T, GOOD), wrong=scored(S, DEAD), alone=differences))
    assert names(e) == ["feedback", "states", "residual"]
    said = expected(e)
    values = [f"{so.accept_length.value:.2f}" for _, so in e.ladder]
    told = f"{values[0]} by lines alone → {values[1]} with a patch → not by lines: {values[2]} with"
    assert said.endswith(f"{told} residual too")


def stopped(*stops: Stop) -> Evidence:
    """Behind an engine that does not start."""
    dead = replace(served(None), stops=stops, states=S.states(), run=S)
    return ladder_of(
        evidence(
            scored(T, GOOD),
            alone=alone("states", "residual", "feedback"),
            served=dead,
            as_served=None,
            why_not_served="the engine does not run it",
        )
    )


def test_what_stops_the_engine_is_mended_first_also_where_nothing_mends_it() -> None:
    # With the biases alone in front, nothing that can be written counts before them.
    e = stopped(Stop(why="it refuses the biases", switch="biases"))
    assert names(e) == ["biases", "feedback", "states", "residual"]
    said = expected(e)
    assert "it does not start, whatever is written → not by lines: " in said
    assert "after all fixes" not in said
    assert "by lines alone" not in said
    # Nor is anything served with the states alone mended.
    assert e.states_alone is None


def test_a_stop_that_is_mended_is_a_step_by_itself() -> None:
    e = stopped(Stop(why="its layer stays random", program="# call it midlayer\n"))
    assert names(e) == ["not-served", "feedback", "states", "residual"]
    said = expected(e)
    assert "it does not start → " in said
    assert f"{e.ladder[1][1].accept_length.value:.2f} by lines alone" in said
    both = stopped(
        Stop(why="it refuses the biases", switch="biases"),
        Stop(why="its layer stays random", program="# call it midlayer\n"),
    )
    assert names(both)[:2] == ["not-served", "biases"]
    assert "by lines alone" not in expected(both)


def test_states_alone_are_told_where_they_are_what_stops_it() -> None:
    e = stopped(Stop(why="id -1 names no state", switch="states"))
    assert names(e) == ["states", "feedback", "residual"]
    assert e.states_alone is not None
    assert "it does not start → " in expected(e)

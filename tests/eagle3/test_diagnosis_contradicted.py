"""A finding that rests on what is declared does not stand beside a measurement of something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.diagnosis.answer import Diagnosis
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.findings import Finding
from eagle3.wiring import FcInput, Feedback, HeadInput, Residual
from tests.eagle3.diagnosed import DEAD, GOOD, POOR, SLOT3, T, evidence, scored

RAW = {"residual": Residual.raw}
IGNORED = "norm-before-residual-ignored"


def finding(name: str) -> Finding:
    return Finding(
        name=name,
        severity="error",
        where="config.json",
        what=name,
        effect="what doctor says of it",
        fix=(),
        evidence="read",
    )


def answer(e: Evidence, name: str) -> Diagnosis:
    return diagnose(replace(e, doctor=(finding(name),)))


def kept(e: Evidence, name: str) -> tuple[bool, bool]:
    """Whether the finding is shown, and whether a note says that it does not hold."""
    d = answer(e, name)
    return bool(d.findings), any("does not hold" in note for note in d.notes)


@pytest.mark.parametrize(
    ("name", "run", "trained"),
    [
        (IGNORED, RAW, {"residual": Residual.normed}),
        ("norm-before-residual-differs", {"residual": Residual.normed}, RAW),
        ("norm-before-residual-not-stated", RAW, {"residual": Residual.normed}),
        ("norm-before-fc-ignored", {"fc_input": FcInput.raw}, {"fc_input": FcInput.whole}),
        ("fc-norm-ignored", {"fc_input": FcInput.whole}, {"fc_input": FcInput.chunks}),
        ("feedback-normed-ignored", {"feedback": Feedback.raw}, {"feedback": Feedback.normed}),
        ("norm-output-trap", {"feedback": Feedback.normed}, {"feedback": Feedback.raw}),
        ("head-norm-off", {"head_input": HeadInput.normed}, {"head_input": HeadInput.raw}),
    ],
)
def test_a_switch_that_is_run_as_it_was_trained_is_no_fault(
    name: str, run: dict[str, Any], trained: dict[str, Any]
) -> None:
    sound = evidence(scored(replace(T, **run), GOOD))
    assert kept(sound, name) == (False, True)
    so = scored(replace(T, **run), POOR)
    faulty = evidence(scored(replace(T, **trained), GOOD), wrong=so, alone={"states": so})
    assert kept(faulty, name) == (True, False)


def test_what_costs_nothing_here_is_a_warning_that_says_so() -> None:
    trained = scored(replace(T, residual=Residual.normed), GOOD)
    so = scored(replace(T, **RAW), (GOOD[0] - 0.005, *GOOD[1:]))
    e = evidence(trained, wrong=so, alone={"residual": so})
    (said,) = answer(e, IGNORED).findings
    assert said.severity == "warning"
    assert "makes no settled difference" in said.effect
    costly = scored(replace(T, **RAW), POOR)
    (kept_one,) = answer(
        evidence(trained, wrong=costly, alone={"residual": costly}), IGNORED
    ).findings
    assert kept_one == finding(IGNORED)


def test_what_the_texts_do_not_tell_leaves_the_finding() -> None:
    e = evidence(scored(replace(T, **RAW), GOOD))
    unclear = replace(e, searched=replace(e.searched, unclear=("residual",)))
    not_asked = replace(e, searched=replace(e.searched, axes=("states",)))
    assert kept(unclear, IGNORED) == kept(not_asked, IGNORED) == (True, False)


def test_a_drafter_that_does_not_work_refutes_nothing() -> None:
    d = answer(evidence(scored(replace(T, **RAW), DEAD)), IGNORED)
    assert d.verdict == "unknown"
    assert d.findings
    assert not any("does not hold" in note for note in d.notes)


@pytest.mark.parametrize("name", ["teacher-is-not-the-end", "wrong-teacher"])
def test_a_slot_that_this_drafter_was_not_trained_on_stays_true_of_the_data(name: str) -> None:
    (said,) = answer(evidence(scored(T, GOOD)), name).findings
    assert said.severity == "warning"
    assert "no cause here" in said.effect
    assert "one that is trained on this data learns what the slot holds" in said.effect
    learnt = scored(T, GOOD, truth=SLOT3.name)
    taught = evidence(scored(T, POOR), teacher=SLOT3, by_teacher=learnt)
    open_ = evidence(scored(T, GOOD))
    open_ = replace(open_, searched=replace(open_.searched, teacher_clear=False))
    for e in (taught, open_):
        assert answer(e, name).findings == (finding(name),)


def test_a_finding_on_anything_else_stays() -> None:
    assert kept(evidence(scored(T, GOOD)), "names-not-remapped") == (True, False)

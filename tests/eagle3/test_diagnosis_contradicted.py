"""A finding that rests on what is declared does not stand beside a measurement of something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.findings import Finding
from eagle3.wiring import Biases, FcInput, Feedback, Residual
from tests.eagle3.diagnosed import GOOD, SLOT3, T, evidence, scored


def finding(name: str) -> Finding:
    return Finding(
        name=name,
        severity="error",
        where="config.json",
        what=name,
        effect="",
        fix=(),
        evidence="read",
    )


def with_finding(e: Evidence, name: str) -> Evidence:
    return replace(e, doctor=(finding(name),))


def kept(e: Evidence) -> tuple[bool, bool]:
    """Whether the finding is shown, and whether a note says that it does not hold."""
    d = diagnose(e)
    return bool(d.findings), any("does not hold" in note for note in d.notes)


@pytest.mark.parametrize(
    ("name", "otherwise", "so"),
    [
        ("norm-before-residual-ignored", {"residual": Residual.raw}, {"residual": Residual.normed}),
        ("norm-before-fc-ignored", {"fc_input": FcInput.raw}, {"fc_input": FcInput.whole}),
        ("fc-norm-ignored", {"fc_input": FcInput.whole}, {"fc_input": FcInput.chunks}),
        ("feedback-normed-ignored", {"feedback": Feedback.raw}, {"feedback": Feedback.normed}),
        ("attention-bias-ignored", {"biases": Biases.dropped}, {"biases": Biases.declared}),
    ],
)
def test_a_switch_that_was_not_trained_is_not_missed(
    name: str, otherwise: dict[str, Any], so: dict[str, Any]
) -> None:
    assert kept(with_finding(evidence(scored(replace(T, **otherwise), GOOD)), name)) == (
        False,
        True,
    )
    assert kept(with_finding(evidence(scored(replace(T, **so), GOOD)), name)) == (True, False)


def test_what_the_texts_do_not_tell_leaves_the_finding() -> None:
    e = with_finding(
        evidence(scored(replace(T, residual=Residual.raw), GOOD)), "norm-before-residual-ignored"
    )
    unclear = replace(e, searched=replace(e.searched, unclear=("residual",)))
    not_asked = replace(e, searched=replace(e.searched, axes=("states",)))
    assert kept(unclear) == kept(not_asked) == (True, False)


@pytest.mark.parametrize("name", ["teacher-is-not-the-end", "wrong-teacher"])
def test_a_slot_that_nobody_was_trained_on_is_no_wrong_teacher(name: str) -> None:
    assert kept(with_finding(evidence(scored(T, GOOD)), name)) == (False, True)
    learnt = scored(T, GOOD, truth=SLOT3.name)
    taught = evidence(scored(T, GOOD), teacher=SLOT3, by_teacher=learnt)
    assert kept(with_finding(taught, name)) == (True, False)
    open_ = with_finding(evidence(scored(T, GOOD)), name)
    open_ = replace(open_, searched=replace(open_.searched, teacher_clear=False))
    assert kept(open_) == (True, False)


def test_a_finding_on_anything_else_stays() -> None:
    assert kept(with_finding(evidence(scored(T, GOOD)), "names-not-remapped")) == (True, False)

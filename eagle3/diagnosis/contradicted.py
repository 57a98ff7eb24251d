"""Findings in the files that what was measured speaks against.

Doctor reads what a config declares and what an engine would do with it; whether the drafter was really
trained so, only its texts tell. Where they do, a finding that rests on the declaration does not stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eagle3.diagnosis import beyond
from eagle3.diagnosis.causes import how_trained
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.words import value_words
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.wiring import Biases, FcInput, Feedback, Parts, Residual, Window, Wiring

# What a drafter is trained with where a finding of this name is right about it, by the switch.
RESTS_ON: dict[str, tuple[str, Callable[[Wiring], bool]]] = {
    "norm-before-residual": ("residual", lambda w: w.residual is Residual.normed),
    "norm-before-fc": ("fc_input", lambda w: w.fc_input is FcInput.whole),
    "fc-norm": ("fc_input", lambda w: w.fc_input is FcInput.chunks),
    "feedback-normed": ("feedback", lambda w: w.feedback is Feedback.normed),
    "attention-bias": ("biases", lambda w: w.biases is Biases.declared),
    "qk-norm": ("qk_norm", lambda w: w.qk_norm is Parts.declared),
    "window": ("window", lambda w: w.window is Window.declared),
}
IGNORED = "-ignored"
OF_TEACHER = ("teacher-is-not-the-end", "wrong-teacher")


def contradiction(e: Evidence, finding: Finding) -> str | None:
    """Why a finding does not hold for this drafter, measured; None: nothing speaks against it."""
    if finding.name in OF_TEACHER:
        if not e.searched.teacher_clear or not beyond.is_target(e, e.searched.teacher):
            return None
        learnt = e.searched.teacher.in_words
        return f"the finding {finding.name} does not hold: it was trained on {learnt} (measured)"
    if not finding.name.endswith(IGNORED):
        return None
    switch, stands = RESTS_ON.get(finding.name.removesuffix(IGNORED), ("", None))
    if stands is None or stands(e.trained.wiring) or how_trained(e, switch) != MEASURED:
        return None
    trained = value_words(e.trained.wiring, switch)
    return (
        f"the finding {finding.name} does not hold: it was trained otherwise ({trained}, measured)"
    )


def contradictions(e: Evidence, findings: Sequence[Finding]) -> dict[str, str]:
    """Name of a finding that does not hold → why."""
    found = {finding.name: contradiction(e, finding) for finding in findings}
    return {name: why for name, why in found.items() if why is not None}

"""Findings in the files that what was measured speaks against.

Doctor reads what a config declares and what an engine does with it; whether the drafter was really
trained so, only its texts tell. Where they show that it was trained as it is run, a finding on that
switch does not stand. One on the data's last slot stays true of the data, but says nothing of a drafter
that was not trained on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3.diagnosis import beyond
from eagle3.diagnosis.causes import comparisons_of, how_trained, is_open, lost_words, shows
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.kinds import kind_of
from eagle3.diagnosis.words import value_words
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.search.axes import value_of

# The switch that a finding of this name is about, besides its ending.
OF_SWITCHES = {
    "norm-before-residual": "residual",
    "norm-before-fc": "fc_input",
    "fc-norm": "fc_input",
    "feedback-normed": "feedback",
    "norm-output-trap": "feedback",
    "head-norm-off": "head_input",
    "attention-bias": "biases",
    "qk-norm": "qk_norm",
    "deeper-norm-name": "deeper_norm",
    "window": "window",
}
ENDINGS = ("-ignored", "-differs", "-not-stated")
OF_TEACHER = ("teacher-is-not-the-end", "wrong-teacher")


def switch_of_finding(finding: Finding) -> str | None:
    """The switch that it is about; None: none, or several."""
    name = finding.name
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return OF_SWITCHES.get(name)


def contradiction(e: Evidence, finding: Finding) -> str | None:
    """Why a finding does not hold for this drafter, measured; None: nothing speaks against it."""
    switch = switch_of_finding(finding)
    trained = e.trained.wiring
    if switch is None or value_of(trained, switch) != value_of(e.wrong, switch):
        return None
    if how_trained(e, switch) != MEASURED:
        return None
    return (
        f"the finding {finding.name} does not hold: it was trained as it is run "
        f"({value_words(trained, switch)}, measured)"
    )


def standing(e: Evidence, findings: Sequence[Finding]) -> tuple[list[Finding], list[str]]:
    """The findings that stand, and why the others do not."""
    kept, refuted = [], dict[str, str]()
    for finding in findings:
        why = contradiction(e, finding)
        if why is None:
            kept.append(without_cost(e, of_data_alone(e, finding)))
        else:
            refuted[finding.name] = why
    return kept, list(refuted.values())


def without_cost(e: Evidence, finding: Finding) -> Finding:
    """The finding as a warning where the difference that it names costs nothing on these texts."""
    kind = kind_of(switch_of_finding(finding) or "")
    so = e.alone.get(kind)
    if so is None or shows(e, kind, so) or is_open(e, so) is not None:
        return finding
    return replace(
        finding,
        severity="warning",
        effect=f"{finding.effect}; on these texts that makes no settled difference "
        f"({lost_words(e.trained, so, comparisons_of(e, kind))})",
    )


def of_data_alone(e: Evidence, finding: Finding) -> Finding:
    """The finding, said of the data alone where the drafter was clearly trained on the target itself."""
    searched = e.searched
    learnt_target = searched.teacher_clear and beyond.is_target(e, searched.teacher)
    if finding.name not in OF_TEACHER or not learnt_target:
        return finding
    return replace(
        finding,
        severity="warning",
        effect=f"this drafter was trained on {searched.teacher.in_words} (measured), so it is no cause "
        "here; one that is trained on this data learns what the slot holds",
    )

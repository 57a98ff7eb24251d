"""From evidence to a diagnosis: which causes are believed, in which order, and how surely.

A repair is only believed where it leaves a drafter that works: every part of a trained drafter does
some work, and it knows more than a table of token pairs. Where the best wiring leaves a part that
harms, or a dead drafter, an axis that helps a little is a symptom, and the answer is that the cause is
none of those known here.

Causes of the wiring, of tables and of slots stand by what they cost. The teacher, which no repair of
the wiring touches, stands before them where it holds the drafter back further than all of them
together (`beyond.teacher_limits_most`), else behind those of them that can be mended by lines. Before
all stands what keeps the engine from starting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.diagnosis import beyond
from eagle3.diagnosis.answer import (
    CAUSE,
    CERTAIN,
    LIKELY,
    POSSIBLE,
    SOUND,
    UNDECIDED,
    UNKNOWN,
    Cause,
    Diagnosis,
)
from eagle3.diagnosis.behind_engine import comparable, engine_causes
from eagle3.diagnosis.causes import (
    by_cost,
    fixes_of,
    mended_causes,
    mended_config,
    wiring_causes,
)
from eagle3.diagnosis.contradicted import standing
from eagle3.diagnosis.damage import broken, ceiling, only_blank, reaches_log
from eagle3.diagnosis.evidence import Evidence, SlotSeen
from eagle3.diagnosis.fixes import elsewhere, flat_copy
from eagle3.diagnosis.heard import Joined, fault_of, gains_more, joined_with
from eagle3.diagnosis.incomplete import STAND_IN, absent_head, headless
from eagle3.diagnosis.kinds import NOT_SERVED, ORDER, STATES, WIRING
from eagle3.diagnosis.open_questions import (
    FEW,
    ahead,
    doubts,
    texts_of,
    undecided,
    unsettled_counts,
    unshown,
)
from eagle3.diagnosis.signatures import signature_of
from eagle3.diagnosis.words import joined, truth_words, value_words
from eagle3.doctor.findings import Finding, ordered
from eagle3.engines import unread
from eagle3.metrics import Rate, Truth

LOWER = {CERTAIN: LIKELY, LIKELY: POSSIBLE, POSSIBLE: POSSIBLE}


@dataclass(frozen=True, kw_only=True)
class Concluded:
    """What is believed of the causes."""

    verdict: str
    causes: tuple[Cause, ...]
    because: tuple[str, ...]  # reasons that the drafter is broken, or that nothing can be told
    notes: tuple[str, ...]


def diagnose(e: Evidence) -> Diagnosis:
    """The diagnosis that the evidence gives."""
    concluded = conclude(e)
    shown = e.as_served or e.trained
    findings: Sequence[Finding] = (*e.inspected.findings, *e.doctor)
    refuted: Sequence[str] = ()
    if concluded.verdict in (CAUSE, SOUND):  # else what was measured says nothing of the drafter
        findings, refuted = standing(e, findings)
    return Diagnosis(
        verdict=concluded.verdict,
        headline=headline(e, concluded),
        causes=concluded.causes,
        trained=e.trained.wiring,
        teacher=teacher_words(e),
        served=e.served,
        slots=tuple(slot.in_words for slot in e.inspected.slots),
        accept_length_served=None if e.as_served is None else e.as_served.accept_length,
        accept_length_repaired=e.trained.accept_length,
        ladder=ladder_of(e, concluded),
        repaired=STAND_IN if headless(e) else "as trained",
        signature=signature_of(shown.conditional, e.trained.conditional).in_words,
        confidence=confidence(e, concluded),
        undecided=tuple(undecided(e)),
        doubts=tuple(doubts(e)),
        elsewhere=()
        if not of_states(e, concluded)
        else elsewhere(
            e.trained.wiring.states(),
            num_layers=e.num_layers,
            target_classes=e.target_classes,
        ),
        findings=relevant(findings),
        engine_figure=engine_figure(e),
        provided=provided(e),
        joined=joined_server(e, concluded),
        states_alone=None
        if e.states_alone is None or not ladder_of(e, concluded)
        else (e.states_alone[0], e.states_alone[1].accept_length),
        notes=(
            *concluded.notes,
            *filter(None, [e.health.blank if reaches_log(e) else None]),
            *refuted,
            *e.inspected.notes,
            *e.searched.notes,
            *e.notes,
        ),
        before=flat_copy(e.config, form=e.form, asked=e.asked),
        config=mended_config(e, [cause.kind for cause in concluded.causes]),
    )


def ladder_of(e: Evidence, concluded: Concluded) -> tuple[tuple[str, Rate], ...]:
    """Accept length behind each fix, where any of them is of a cause that is believed, and what it is
    measured with is the drafter's own.
    """
    named = {cause.kind for cause in concluded.causes}
    if headless(e) or not any(kind in named for kind, _ in e.ladder):
        return ()
    return tuple((kind, scored.accept_length) for kind, scored in e.ladder)


def joined_server(e: Evidence, concluded: Concluded) -> Joined | None:
    """Where the fault lies, with what a running server returned; None: none was asked."""
    if e.heard is None or e.served is None:
        return None
    fault = fault_of(concluded.causes, undecided=concluded.verdict == UNDECIDED)
    if gains_more(e.counted) and not e.served.measured:
        fault = "undecided, since it accepts more than the tables' states can give"
    return joined_with(e.heard, e.served, e.counted, fault)


def of_states(e: Evidence, concluded: Concluded) -> bool:
    """Whether it is of use what other engines are told for these states: they are known, and no engine
    is, or the one that is feeds others, or does not start.
    """
    if concluded.verdict in (UNKNOWN, UNDECIDED):
        return False
    return e.served is None or any(c.kind in (STATES, ORDER) or c.stops for c in concluded.causes)


def conclude(e: Evidence) -> Concluded:
    """Verdict and causes."""
    wiring, harmless = wiring_causes(e)
    reasons = broken(e)
    slots = list(beyond.slot_causes(e, wiring))
    shifted = e.inspected.shift and not e.inspected.aligned
    unmeasured = not e.inspected.remade and any(unfound(s) for s in e.inspected.slots)
    if slots and (shifted or unmeasured):
        # What was measured on such data says nothing of the drafter.
        left = [f"on this data: {reason}" for reason in reasons]
        return Concluded(verdict=CAUSE, causes=tuple(slots), because=(), notes=(*harmless, *left))
    open_ones = doubts(e)
    absent = absent_head(e, wiring)
    if absent is not None:
        return of_absent_head(absent, wiring, slots, reasons, harmless)
    if reasons and (beside_better(e) or texts_of(e) < FEW):
        return undecided_yet(open_ones, slots, harmless)
    if reasons:
        notes = [*harmless, *(symptom(c) for c in wiring)]
        unknown = beyond.unknown_cause(e, reasons)
        # A piece that is lacking, of a drafter that works in spite of it, hides no states.
        fed = [c for c in wiring if c.kind in (STATES, ORDER) and only_blank(e, reasons)]
        # What was measured of the data stands, whatever the drafter is.
        return Concluded(
            verdict=UNKNOWN, causes=(unknown, *fed, *slots), because=reasons, notes=tuple(notes)
        )
    explained = {kind for slot in slots for kind in slot.explains}
    causes = by_cost(
        [c for c in wiring if c.kind not in explained] + slots + list(mended_causes(e))
    )
    causes = with_teacher(e, causes)
    causes += filter(None, [beyond.coverage_cause(e)])
    behind = list(engine_causes(e))
    if open_ones and not causes and not behind:
        return undecided_yet(open_ones, slots, harmless)
    lost = beyond.lost_since_training(e)
    alone = not causes and not behind and lost is None
    if lost is not None:  # so it was trained enough
        causes.append(beyond.unknown_cause(e, [lost]))
    else:
        causes += filter(None, [beyond.under_trained(e, alone=alone)])
    causes += behind or ([] if causes else filter(None, [not_loaded(e)]))
    if not causes and (unheard := unsettled_counts(e)) is not None:
        return undecided_yet([unheard], slots, harmless)
    verdict = CAUSE if causes else SOUND
    if causes and causes[0].kind == "unknown":
        verdict = UNKNOWN
    return Concluded(verdict=verdict, causes=tuple(causes), because=(), notes=tuple(harmless))


def of_absent_head(
    absent: Cause,
    wiring: Sequence[Cause],
    slots: Sequence[Cause],
    reasons: Sequence[str],
    harmless: Sequence[str],
) -> Concluded:
    """That the head is lacking, and what holds whatever it was: the level of a stand-in says nothing of
    teacher, training or vocabulary, and one that does not work nothing of the wiring either.
    """
    explained = {kind for slot in slots for kind in slot.explains} | {absent.kind}
    others = [c for c in wiring if c.kind not in explained and (c.stops or not reasons)]
    return Concluded(
        verdict=CAUSE,
        causes=(absent, *by_cost([*others, *slots])),
        because=(),
        notes=(*harmless, *(f"{STAND_IN}: {reason}" for reason in reasons)),
    )


def beside_better(e: Evidence) -> bool:
    """Whether the search ended beside the right wiring, which leaves a drafter that looks broken: what
    is declared or served scores higher, and may be that of one that works.
    """
    other = e.as_served
    alive = other is not None and other.accuracy.high >= beyond.DECENT * ceiling(e)
    return alive and ahead(e) is not None


def not_loaded(e: Evidence) -> Cause | None:
    """That the engine does not load this layout of config.json. Said as a cause where there is no other:
    all fixes of others are changes of the copy that it takes (`Diagnosis.before`).
    """
    copy = flat_copy(e.config, form=e.form, asked=e.asked)
    if copy is None or e.served is None:
        return None
    what = f"{e.served.engine} does not load the nested layout of this config.json"
    return Cause(
        kind=NOT_SERVED,
        what=f"{what}; on a flat copy it runs the drafter as it was trained",
        trained=value_words(e.trained.wiring, STATES),
        served=what,
        cost=None,
        fixes=(copy,),
        confidence=LIKELY,
        evidence=f"served: {e.served.evidence.value}",
        stops=True,
    )


def undecided_yet(
    open_ones: Sequence[str], slots: Sequence[Cause], harmless: Sequence[str]
) -> Concluded:
    """That there is too little data; what was measured of the data itself stands."""
    return Concluded(
        verdict=CAUSE if slots else UNDECIDED,
        causes=tuple(slots),
        because=tuple(open_ones),
        notes=tuple(harmless),
    )


def with_teacher(e: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """The teacher among the others, by the rule that stands above."""
    teacher = beyond.teacher_cause(e)
    if teacher is None:
        return list(causes)
    if beyond.teacher_limits_most(e):
        before = [c for c in causes if c.stops]
    else:
        before = [c for c in causes if c.stops or any(fix.possible for fix in c.fixes)]
    return [*before, teacher, *(c for c in causes if c not in before)]


def unfound(slot: SlotSeen) -> bool:
    """Whether a slot holds no state that could be named."""
    return slot.verdict == "contradicted" and not slot.found


def provided(e: Evidence) -> str | None:
    """The patch without which the engine feeds no such states, where those that it is told to are the
    trained ones; whether it has the patch, no file shows.
    """
    if e.served is None or e.served.wiring is None or e.served.measured:
        return None  # or it was seen to feed them
    if e.served.wiring.states() != e.trained.wiring.states():
        return None
    patch = next((fix.needs for fix in fixes_of(e, STATES) if fix.patched), None)
    if patch is None:
        return None
    return (
        f"provided that {e.served.engine} has {patch}: without it the first forward fails, or another "
        "state is fed"
    )


def engine_figure(e: Evidence) -> str | None:
    """The engine's own accept length where it cannot be set beside the predicted one, and why."""
    why = comparable(e)
    if e.engine_accept_length is None or why is None:
        return None
    return f"the engine's own {e.engine_accept_length:.2f} is not compared: {why}"


def symptom(cause: Cause) -> str:
    """A difference that is not believed to be the cause, since it leaves a drafter that is broken."""
    gain = ""
    if cause.cost is not None:
        so, best = cause.cost.accuracy_so.value, cause.cost.accuracy_as_trained.value
        gain = f" (accuracy {so:.3f} to {best:.3f})"
    return f"{cause.kind}: {cause.what}{gain}; it helps, but what is left is still broken"


def teacher_words(e: Evidence) -> str:
    """What the drafter was trained on, and how that is known."""
    searched = e.searched
    score = next((s for s in searched.teachers if s.teacher == searched.teacher), None)
    told = "" if score is None else f" (the drafter agrees with it at {score.accuracy.value:.3f})"
    sure = "" if searched.teacher_clear else "; other teachers explain it as well"
    return f"{searched.teacher.in_words}{told}{sure}"


def headline(e: Evidence, concluded: Concluded) -> str:
    """One sentence that says it."""
    causes = concluded.causes
    who = e.served.engine if e.served is not None else "no engine was named"
    if e.asked is not None and e.asked.version and unread(e.asked.name, e.asked.version):
        who += " (not read)"
    if concluded.verdict == UNKNOWN:
        return causes[0].what
    if concluded.verdict == UNDECIDED and concluded.because == (unsettled_counts(e),):
        return f"undecided: {concluded.because[0]}; by its wiring alone nothing is wrong"
    if concluded.verdict == UNDECIDED:
        texts, positions = texts_of(e), e.trained.accuracy.denominator
        counted = "1 text" if texts == 1 else f"{texts} texts"
        return (
            f"undecided: too few texts ({counted}, {positions} scored positions): "
            f"{'; '.join(concluded.because[:2])}; score more texts (a larger job.max_samples, or more "
            "files)"
        )
    if not causes:
        trained = value_words(e.trained.wiring, STATES)
        said = f"{who} runs the drafter as it was trained ({trained})"
        if e.served is None:
            said = f"config.json and data declare what the drafter was trained with ({trained})"
        if engine_figure(e) is not None:
            said += (
                f"; why the engine's own accept length is {e.engine_accept_length:.2f} stays open"
            )
        if unseen := unshown(e):
            said += f"; but for {joined(unseen)}, which texts of {e.longest} positions cannot show"
        if e.trained_accuracy is None:
            said += "; whether its level is that of its training is not known (trained_accuracy=X)"
        return f"nothing found: {said}"
    many = f"{len(causes)} causes, the gravest first: " if len(causes) > 1 else "one cause: "
    return f"{many}{joined([c.kind for c in causes])} ({who})"


def confidence(e: Evidence, concluded: Concluded) -> str:
    """One of the three words, and why it is no other."""
    reasons: list[str] = []
    first = concluded.causes[0] if concluded.causes else None
    level = LIKELY if first is None else first.confidence
    if concluded.verdict == UNDECIDED:
        level = POSSIBLE
    texts, positions = len(e.trained.counts), e.trained.accuracy.denominator
    reasons.append(f"{positions} positions of {texts} texts")
    if e.trained.truth == Truth.next_token.value:
        # A wiring's cause is lowered for it already.
        level = level if first is not None and first.kind in WIRING else LOWER[level]
        reasons.append("against the text's next token, not the target's own choice")
    elif e.trained.truth != Truth.target_argmax.value:
        reasons.append(f"against {truth_words(e.trained.truth)}")
    if e.served is not None:
        known = e.served.evidence.value
        outside = unread(e.asked.name, e.asked.version) if e.asked and e.asked.version else None
        more = f", since {outside}" if outside else ""
        what = f"what {e.served.engine} does"
        if e.served.measured:
            what = f"the states that are fed are known by: run; what else {e.served.engine} does"
        reasons.append(f"{what} is known by: {known}{more}")
    else:
        reasons.append("no engine was named")
    verified = [s for s in e.inspected.slots if s.verdict == "verified"]
    reasons.append(f"{len(verified)} of {len(e.inspected.slots)} slots verified")
    if e.inspected.remade:
        reasons.append(
            "in the place of slots that hold no state, what the target's own layers make"
        )
    if first is not None and first.cost is not None:
        lost = first.cost.difference
        said = "cost settled at" if lost.low > 0 else "cost not settled:"
        many = first.cost.comparisons
        corrected = f", corrected for {many} comparisons" if many > 1 else ""
        reasons.append(f"{said} {lost.low:.2f} to {lost.high:.2f}{corrected}")
    return f"{level}: {'; '.join(reasons)}"


def relevant(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, each name once at a place; notes are left out."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for finding in ordered(findings):
        key = (finding.name, finding.what)
        if key in seen or finding.severity == "note":
            continue
        seen.add(key)
        kept.append(finding)
    return tuple(kept)

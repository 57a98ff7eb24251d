"""From evidence to a diagnosis: which causes are believed, in which order, and how surely.

A repair is only believed where it leaves a drafter that works: every part of a trained drafter does
some work, and it knows more than a table of token pairs. Where the best wiring leaves a part that
harms, or a dead drafter, an axis that helps a little is a symptom, and the answer is that the cause is
none of those known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eagle3.diagnosis import beyond
from eagle3.diagnosis.answer import (
    CAUSE,
    CERTAIN,
    LIKELY,
    POSSIBLE,
    SOUND,
    UNKNOWN,
    Cause,
    Diagnosis,
)
from eagle3.diagnosis.causes import by_cost, mended_causes, mended_config, wiring_causes
from eagle3.diagnosis.evidence import Evidence, SlotSeen
from eagle3.diagnosis.fixes import elsewhere
from eagle3.diagnosis.kinds import ORDER, STATES, kind_of
from eagle3.diagnosis.signatures import signature_of
from eagle3.diagnosis.words import joined, value_words
from eagle3.doctor.findings import Finding, ordered
from eagle3.metrics import Truth

LOWER = {CERTAIN: LIKELY, LIKELY: POSSIBLE, POSSIBLE: POSSIBLE}


@dataclass(frozen=True, kw_only=True)
class Concluded:
    """What is believed of the causes."""

    verdict: str
    causes: tuple[Cause, ...]
    because: tuple[str, ...]  # reasons that the drafter itself is broken
    notes: tuple[str, ...]


def diagnose(e: Evidence) -> Diagnosis:
    """The diagnosis that the evidence gives."""
    concluded = conclude(e)
    shown = e.as_served or e.trained
    wrong_states = any(c.kind in (STATES, ORDER) for c in concluded.causes)
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
        ladder=tuple((kind, scored.accept_length) for kind, scored in e.ladder),
        signature=signature_of(shown.conditional, e.trained.conditional).in_words,
        confidence=confidence(e, concluded),
        undecided=tuple(undecided(e)),
        elsewhere=()
        if concluded.verdict == UNKNOWN
        else elsewhere(
            e.trained.wiring.states(),
            num_layers=e.num_layers,
            target_classes=e.target_classes,
        ),
        findings=relevant(e, states_wrong=wrong_states),
        notes=(*concluded.notes, *e.inspected.notes, *e.searched.notes, *e.notes),
        config=mended_config(e, [cause.kind for cause in concluded.causes]),
    )


def conclude(e: Evidence) -> Concluded:
    """Verdict and causes."""
    wiring, harmless = wiring_causes(e)
    reasons = beyond.broken(e)
    slots = list(beyond.slot_causes(e, wiring))
    if slots and (e.inspected.shift or any(unfound(s) for s in e.inspected.slots)):
        # What was measured on such data says nothing of the drafter.
        left = [f"on this data: {reason}" for reason in reasons]
        return Concluded(verdict=CAUSE, causes=tuple(slots), because=(), notes=(*harmless, *left))
    if reasons:
        notes = [*harmless, *(symptom(c) for c in wiring)]
        unknown = beyond.unknown_cause(e, reasons)
        # What was measured of the data stands, whatever the drafter is.
        return Concluded(
            verdict=UNKNOWN, causes=(unknown, *slots), because=reasons, notes=tuple(notes)
        )
    explained = {ORDER} if any("in another order" in s.what for s in slots) else set()
    causes = [c for c in wiring if c.kind not in explained] + slots + list(mended_causes(e))
    causes += filter(None, [beyond.teacher_cause(e)])
    causes = by_cost(causes)
    causes += filter(None, [beyond.coverage_cause(e)])
    lost = beyond.lost_since_training(e)
    if lost is not None:
        causes.append(beyond.unknown_cause(e, [lost]))
    behind = list(beyond.engine_causes(e))
    alone = not causes and not behind
    causes += filter(None, [beyond.under_trained(e, alone=alone)])
    causes += behind
    verdict = CAUSE if causes else SOUND
    if causes and causes[0].kind == "unknown":
        verdict = UNKNOWN
    return Concluded(verdict=verdict, causes=tuple(causes), because=(), notes=tuple(harmless))


def unfound(slot: SlotSeen) -> bool:
    """Whether a slot holds no state that could be named."""
    return slot.verdict == "contradicted" and not slot.found


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
    if concluded.verdict == UNKNOWN:
        return causes[0].what
    if not causes:
        trained = value_words(e.trained.wiring, STATES)
        if e.served is None:
            return (
                f"nothing found: config.json and data declare what the drafter was trained with "
                f"({trained})"
            )
        return f"nothing found: {who} runs the drafter as it was trained ({trained})"
    many = f"{len(causes)} causes, the most costly first: " if len(causes) > 1 else "one cause: "
    return f"{many}{joined([c.kind for c in causes])} ({who})"


def confidence(e: Evidence, concluded: Concluded) -> str:
    """One of the three words, and why it is no other."""
    reasons: list[str] = []
    first = concluded.causes[0] if concluded.causes else None
    level = LIKELY if first is None else first.confidence
    texts, positions = len(e.trained.counts), e.trained.accuracy.denominator
    reasons.append(f"{positions} positions of {texts} texts")
    if e.trained.truth != Truth.target_argmax.value:
        level = LOWER[level]
        reasons.append("against the text's next token, not the target's own choice")
    if e.served is not None:
        reasons.append(f"what {e.served.engine} does is known by: {e.served.evidence.value}")
    else:
        reasons.append("no engine was named")
    verified = [s for s in e.inspected.slots if s.verdict == "verified"]
    reasons.append(f"{len(verified)} of {len(e.inspected.slots)} slots verified")
    if first is not None and first.cost is not None:
        lost = first.cost.difference
        reasons.append(
            f"cost settled at {lost.low:.2f} to {lost.high:.2f}, corrected for {e.searched.scored} "
            "wirings"
        )
    return f"{level}: {'; '.join(reasons)}"


def undecided(e: Evidence) -> Iterator[str]:
    """What the data cannot decide, with the data that would."""
    if e.served is None:
        yield (
            "what is served: name the engine (engine=sglang engine_version=… engine_class=…); without "
            "one the trained wiring is held against what config.json declares"
        )
    elif e.why_not_served is not None:
        yield f"accept length as served: {e.why_not_served}"
    for kind, why in e.not_alone.items():
        yield f"the cost of {kind}: {why}"
    yield from ties(e)
    if e.trained.truth != Truth.target_argmax.value:
        yield (
            "agreement with the target itself: the data has no target_argmax; add it with "
            "job=capture_states, then data.target_argmax=FOLDER"
        )
    told = [s for s in e.inspected.slots if s.verdict == "as declared"]
    if told:
        yield (
            f"which states {joined([f'slot {s.index}' for s in told])} really hold: taken as declared; "
            "the target's layers, run as far as them, would tell (job=inspect_data job.first_layers=N)"
        )
    if not e.searched.teacher_clear:
        yield (
            f"whether {e.searched.teacher.in_words} or another teacher was learnt: more texts would tell"
        )
    if e.served is not None and e.engine_accept_length is None:
        yield (
            "whether the engine reaches what its wiring predicts: give the accept length that it "
            "reports (accept_length=X)"
        )
    differs = beyond.comparable(e)
    if e.engine_accept_length is not None and differs is not None:
        yield f"the engine's accept length of {e.engine_accept_length:.2f}: {differs}"


def ties(e: Evidence) -> Iterator[str]:
    """Switches whose other values explain the drafter as well, within what was measured."""
    best = e.searched.best.wiring
    tied: dict[str, list[str]] = {}
    for ranked in e.searched.ranked:
        names = best.differing(ranked.wiring)
        if ranked.tied and len(names) == 1:
            tied.setdefault(names[0], []).append(value_words(ranked.wiring, names[0]))
    for name, values in tied.items():
        data = (
            f"texts longer than {e.longest} positions would tell"
            if name in ("rope", "window", "positions")
            else "more texts would tell"
        )
        yield (
            f"{kind_of(name)}: {value_words(best, name)} or {joined(values, 'or')} (a tie on these "
            f"texts); {data}"
        )


def relevant(e: Evidence, *, states_wrong: bool) -> tuple[Finding, ...]:
    """Doctor's and the inspection's findings, each name once at a place, notes left out."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for finding in ordered((*e.inspected.findings, *e.doctor)):
        key = (finding.name, finding.what)
        if key in seen or finding.severity == "note":
            continue
        if states_wrong and finding.name == "wrong-teacher" and e.searched.teacher.slot is None:
            continue  # the drafter was not trained on that slot
        seen.add(key)
        kept.append(finding)
    return tuple(kept)

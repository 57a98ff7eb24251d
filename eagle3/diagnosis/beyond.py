"""Causes that lie beyond the wiring: teacher, data, vocabulary, training, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eagle3.conventions import Evidence as Ground
from eagle3.diagnosis.answer import CERTAIN, LIKELY, POSSIBLE, Cause, Cost
from eagle3.diagnosis.behind_engine import comparable, inside
from eagle3.diagnosis.causes import LEAST_ACCURACY, comparisons_of, cost_of
from eagle3.diagnosis.damage import ceiling, only_blank
from eagle3.diagnosis.evidence import Evidence, Scored, SlotSeen
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.kinds import ORDER, STATES
from eagle3.diagnosis.signatures import curve_words, level
from eagle3.diagnosis.words import joined, rate_words, truth_words
from eagle3.doctor.findings import MEASURED
from eagle3.metrics import Count, Truth
from eagle3.search.bounds import rate_difference
from eagle3.search.teachers import Teacher
from eagle3.truths import SOUND_AGREEMENT

# Fixed on two lab drafters.
DECENT = 0.5  # accuracy below which a drafter whose parts all work counts as under-trained
LOW_COVERAGE = 0.85  # below this the vocabulary is a cause, not a note
REACHED = 0.75  # of the training log's accuracy: on other texts a sound drafter reaches this much
NOT_THE_WIRING = "no line of a config mends it"


def plain_fix(
    *lines: str,
    possible: bool = True,
    left: str | None = None,
    evidence: str = Ground.inferred.value,
) -> Fix:
    """Something to do that is no engine's setting; what nothing here has shown to help is inferred."""
    return Fix(engine="", possible=possible, lines=lines, left=left, evidence=evidence)


def unverified(e: Evidence) -> str | None:
    """Why the level of accuracy on these texts says little of the drafter; None: it does.

    A text that the target did not write is harder than what it serves, however well it was learnt.
    """
    if e.by_teacher.truth == Truth.next_token.value:
        return "it is held against the text's next tokens, which the target may not have written"
    if e.follows is not None and e.follows.high < SOUND_AGREEMENT:
        return (
            f"the target goes on as the text does at only {e.follows.value:.3f}, so these texts are "
            "harder than what it writes itself"
        )
    return None


def lost_since_training(e: Evidence) -> str | None:
    """That the log's accuracy is not reached by the drafter as best it can be wired.

    A log's accuracy is that against the trainer's own teacher, which the drafter's best one stands for;
    a text that the target may not have written says nothing of it.
    """
    log, ours = e.trained_accuracy, e.by_teacher.accuracy
    # Trainers count the tokens of the draft vocabulary only, or all: the kinder reading counts.
    if log is None or unverified(e) is not None or ours.high / ceiling(e) >= REACHED * log:
        return None
    return (
        f"the training log says {log:.3f}, but the best wiring reaches {rate_words(ours, 3)} against "
        f"{e.searched.teacher.in_words} on this data, which may be harder than the log's"
    )


def unknown_cause(e: Evidence, reasons: Sequence[str]) -> Cause:
    """That something is wrong which is none of the causes known here.

    Zeros alone may have been written on purpose, as by who prunes.
    """
    pruned = only_blank(e, reasons)
    grave = [f.what for f in e.doctor if f.severity == "error"][:2]
    files = f" The files themselves show: {'; '.join(grave)}" if grave else ""
    return Cause(
        kind="unknown",
        what=f"not among the causes I know: {'; '.join(reasons)}.{files}",
        trained="not known",
        served="not known",
        cost=None,
        fixes=(
            plain_fix(
                "compare the weights' sha256 with the trainer's own checkpoint, and score that one",
                possible=False,
                left="export it again, unless the zeros were written on purpose"
                if pruned
                else "no wiring of this file works; export it again, or train again",
            ),
        ),
        confidence=POSSIBLE if pruned else LIKELY,
        evidence=MEASURED,
    )


def is_target(e: Evidence, teacher: Teacher) -> bool:
    """Whether a teacher is the target itself: no slot, or its end behind one norm and the head."""
    return teacher.slot is None or (
        teacher.norms == 1 and e.inspected.is_end(teacher.slot, e.num_layers)
    )


def teacher_cause(e: Evidence) -> Cause | None:
    """The drafter agrees most with another teacher than the target.

    Beside a text that the target may not have written, only a teacher that the drafter agrees with
    decently is told apart from one that happens to be nearer than the text.
    """
    searched = e.searched
    score = next((s for s in searched.teachers if s.teacher == searched.teacher), None)
    if score is None or is_target(e, searched.teacher):
        return None
    agreement = score.agreement
    if agreement is None or agreement.high >= SOUND_AGREEMENT:
        return None
    # By the first step alone, and of the tokens that the draft vocabulary has: it may have more of the
    # one's than of the other's, which is not learnt.
    more = rate_difference(
        of_named(e.by_teacher), of_named(e.trained), comparisons=comparisons_of(e)
    )
    if more.low <= 0 or more.value < LEAST_ACCURACY:
        return None
    text = e.trained.truth == Truth.next_token.value
    if text and e.by_teacher.accuracy.value / ceiling(e) < DECENT:
        return None
    learnt, theirs = searched.teacher.in_words, truth_words(e.trained.truth)
    length = rate_words(e.trained.accept_length)
    slot = searched.teacher.slot
    seen = [s.state for s in e.inspected.slots if s.index == slot and s.state is not None]
    chosen = f"state {seen[0]} of the data" if seen else learnt
    return Cause(
        kind="teacher",
        what=f"it chooses as {chosen} does (agreement {e.by_teacher.accuracy.value:.3f}) more than as "
        f"{theirs} ({e.trained.accuracy.value:.3f}): accept length {length} at most, with all wiring "
        f"mended; trained on {learnt}, which agrees with {theirs} at {agreement.value:.3f}",
        trained=learnt,
        served=theirs,
        cost=None,  # of another truth: agreement with the two is in `what`, each by its name
        fixes=(
            plain_fix(
                f"train again on data whose last slot is state {e.num_layers}, the target's end",
                f"until then expect accept length {length} at most",
                possible=False,
                left="no engine and no config can mend what was learnt",
            ),
        ),
        # Which of the slot's readings it was may be open; that it was not the target is settled.
        confidence=CERTAIN if searched.teacher_clear and not text else LIKELY,
        evidence=MEASURED,
    )


def of_named(scored: Scored) -> list[Count]:
    """How many first tokens are right of those that the draft vocabulary has, a text."""
    return [Count(t["accuracy"].numerator, t["coverage"].numerator) for t in scored.counts]


def teacher_limits_most(e: Evidence) -> bool:
    """Whether the teacher holds the drafter back further than all wiring faults together.

    Measured by first-step accuracy, since all of it is counted at the same positions: what lies between
    agreement with its own teacher and with the target is out of reach of every wiring; what lies
    between the latter as trained and as served is what wiring repairs bring.
    """
    by_target = e.trained.accuracy.value
    served = by_target if e.as_served is None else e.as_served.accuracy.value
    return e.by_teacher.accuracy.value - by_target > by_target - served


def slot_causes(e: Evidence, wiring: Sequence[Cause]) -> Iterator[Cause]:
    """Slots that do not hold what is declared, with the wiring causes that only say the same."""
    inspected = e.inspected
    wrong = [s for s in inspected.slots if s.verdict == "contradicted"]
    out_of_order = any(f.name == "slots-out-of-order" for f in inspected.findings)
    cost = None
    if inspected.as_declared is not None:
        cost = cost_of(e.trained, inspected.as_declared, comparisons_of(e))
    if wrong:
        # Whoever believes the labels serves, or declares, the trained states by their wrong names.
        trained, held = e.trained.wiring.states(), e.wrong.states()
        named_so = held != trained and held == inspected.labelled(trained)
        fed = e.served if e.served is not None and e.served.wiring is not None else None
        # Fed what it was trained on, it loses nothing, whatever the labels say.
        right, known = "", MEASURED
        if held == trained:
            right = f"; {fed.engine} feeds what it was trained on" if fed else ""
            known += "" if cost is None else f"; fed as labelled it would accept {labelled(cost)}"
            cost = None
        yield Cause(
            kind="slots",
            what=joined([s.in_words for s in wrong]) + right,
            trained=joined([f"slot {s.index}: state {s.state}" for s in wrong if s.found])
            or "no state of this target",
            served=joined([f"slot {s.index}: state {s.declared}" for s in wrong]),
            cost=cost,
            fixes=(slots_fix(inspected.slots),),
            confidence=CERTAIN,
            evidence=known,
            # An engine that goes by the labels has ids to mend besides.
            explains=(STATES, ORDER) if named_so and fed is None else (),
        )
    elif inspected.shift:
        over = "over the answer alone, " if inspected.in_answer else ""
        yield Cause(
            kind="slots",
            what=f"the states are shifted against the ids: {over}row t belongs to position "
            f"t{inspected.shift:+d}",
            trained="the data's rows as stored",
            served="row t beside token t",
            cost=next((c.cost for c in wiring if c.kind == "token"), cost),
            fixes=(plain_fix("store slots and input_ids unshifted, and train on them again"),),
            confidence=CERTAIN,
            evidence=MEASURED,
            explains=("token",),
        )
    elif out_of_order and (order := next((c for c in wiring if c.kind == ORDER), None)):
        yield replace(
            order,
            kind="slots",
            what=f"the slots seem to lie in another order than declared: {order.what}",
            fixes=(plain_fix("data.states=[…] in the files' order", "job=inspect_data shows it"),),
            confidence=LIKELY,
            explains=(ORDER,),
        )


def labelled(cost: Cost) -> str:
    """What is accepted where the states are taken as declared."""
    as_trained = rate_words(cost.accept_length_as_trained)
    return f"{cost.accept_length_so.value:.2f} in the place of {as_trained}"


def slots_fix(slots: Sequence[SlotSeen]) -> Fix:
    """The states to declare, where every slot that is wrong was found."""
    if any(s.verdict == "contradicted" and not s.found for s in slots):
        return plain_fix(
            "capture the data again from this target",
            possible=False,
            left="a slot holds no state of this target",
        )
    states = ",".join("null" if s.state is None else str(s.state) for s in slots)
    return plain_fix(f"states=[{states}] (in a config: data.states)", evidence=MEASURED)


def coverage_cause(e: Evidence) -> Cause | None:
    """The draft vocabulary lacks much of what the target says, and the drafter is near that ceiling."""
    coverage, accuracy = e.trained.coverage, e.trained.accuracy
    if not coverage.denominator or coverage.high >= LOW_COVERAGE:
        return None
    if accuracy.value < DECENT * coverage.value:
        return None  # it is far from the ceiling
    size, whole = e.form.draft_vocab.value, e.form.vocab.value
    return Cause(
        kind="coverage",
        what=f"the draft vocabulary has {rate_words(coverage, 3)} of the target's tokens here, the "
        f"ceiling of accuracy, which is {accuracy.value:.3f}: "
        f"{accuracy.value / coverage.value:.3f} of what can be drafted",
        trained=f"{size} of {whole} tokens",
        served=f"texts of which {1 - coverage.value:.1%} cannot be drafted",
        cost=None,
        fixes=(
            plain_fix(
                "train again with a larger draft_vocab_size, or one counted on texts like these",
                possible=False,
                left=NOT_THE_WIRING,
            ),
        ),
        confidence=LIKELY if e.trained.truth == Truth.next_token.value else CERTAIN,
        evidence=MEASURED,
    )


def is_low(e: Evidence) -> bool:
    """Whether the first token is right less often than that of a drafter that was trained enough."""
    return e.by_teacher.accuracy.high / ceiling(e) < DECENT


def under_trained(e: Evidence, *, alone: bool) -> Cause | None:
    """Every part works, no wiring helps and no step breaks off, but the level is low.

    `alone`: nothing else was found. Of a drafter that reaches what its training log says, if one is
    given. Held back where only the text is there to compare with, and where the curve is not level:
    `open_questions` then says what would decide.
    """
    accuracy = e.by_teacher.accuracy
    if not is_low(e) or unverified(e) is not None or not level(e.by_teacher.conditional):
        return None
    log = e.trained_accuracy
    told = "" if log is None else f"; the training log says the same ({log:.3f})"
    return Cause(
        kind="under-trained",
        what=f"wired as it was trained it is right at {rate_words(accuracy, 3)}, level over the draft "
        f"steps ({curve_words(e.by_teacher.conditional)}), every part of it does its work and no other "
        f"wiring is better; {standalone(e)}{told}: too little training, or texts that are hard",
        trained=f"accuracy {accuracy.value:.3f}",
        served=f"accuracy {accuracy.value:.3f}",
        cost=None,
        fixes=(
            plain_fix(
                "train for longer, or on texts like those that are served",
                possible=False,
                left=NOT_THE_WIRING,
            ),
        ),
        confidence=LIKELY if alone else POSSIBLE,
        evidence=MEASURED,
    )


def standalone(e: Evidence) -> str:
    """Whether the engine gives what the drafter gives by itself."""
    ours, measured = e.trained.accept_length, e.engine_accept_length
    if measured is not None and comparable(e) is None:
        word = "as" if inside(measured, ours) else "not as"
        return (
            f"the engine's accept length ({measured:.2f}) is {word} standalone ({rate_words(ours)})"
        )
    if e.as_served is not None and e.served is not None:
        so = e.as_served.accept_length
        why = "was not given" if measured is None else "cannot be compared"
        return (
            f"its wiring as served gives {so.value:.2f}, standalone {ours.value:.2f}; the engine's own "
            f"figure {why}"
        )
    told = "no engine's figure was given"
    if measured is not None:
        told = f"the engine's own {measured:.2f} is not compared"
    return f"standalone accept length {ours.value:.2f}; {told}"

"""Causes that lie beyond the wiring: teacher, data, vocabulary, training, engine state, measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eagle3.diagnosis.answer import CERTAIN, LIKELY, POSSIBLE, Cause, Cost
from eagle3.diagnosis.causes import comparisons_of, cost_of, matters
from eagle3.diagnosis.evidence import Evidence, Part, Scored, SlotSeen
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.kinds import ORDER
from eagle3.diagnosis.signatures import COLLAPSE, NOTHING, signature_of
from eagle3.diagnosis.words import joined, rate_words
from eagle3.doctor.findings import MEASURED
from eagle3.metrics import Rate, Truth
from eagle3.truths import SOUND_AGREEMENT

# Fixed on two lab drafters; docs/diagnose.md says what they lead to on others.
DECENT = 0.5  # accuracy below which a drafter whose parts all work counts as under-trained
USELESS = 0.15  # a part without which less than this share of the accuracy is lost does no work
HARM = 0.05  # a part without which this share of the accuracy is gained does harm
BESIDE_BIGRAM = 1.25  # a drafter below this many times a table of token pairs is dead
LOW_COVERAGE = 0.85  # below this the vocabulary is a cause, not a note
REACHED = 0.75  # of the training log's accuracy: on other texts a sound drafter reaches this much
NEAR_LENGTH = 0.1  # the same of accept lengths behind an engine, whose prompts are others
EXACTLY = 0.02  # a figure this near to the predicted one less 1 lacks the bonus token
NOT_THE_WIRING = "no line of a config mends it"


def plain_fix(*lines: str, possible: bool = True, left: str | None = None) -> Fix:
    """Something to do that is no engine's setting."""
    return Fix(
        engine="",
        possible=possible,
        lines=lines,
        left=left,
        evidence=MEASURED,
    )


def broken(e: Evidence) -> tuple[str, ...]:
    """Why the drafter does not work as a trained one does, even wired as best it can be."""
    accuracy = e.by_teacher.accuracy
    # The table of pairs may name any token, the drafter those of its vocabulary.
    floor = max(BESIDE_BIGRAM * e.health.bigram * ceiling(e), 0.02)
    if accuracy.value < floor:
        return (
            f"its first token is right at {accuracy.value:.3f}, where a table of token pairs has "
            f"{e.health.bigram:.3f}",
        )
    reasons = [
        f"{part.name} {'harms' if harms(part) else 'does next to nothing'}: accuracy is "
        f"{part.without.value:.3f} without, {accuracy.value:.3f} with"
        for part in idle(e.health.parts)
    ]
    signature = signature_of(e.by_teacher.conditional, e.by_teacher.conditional)
    if signature.name == COLLAPSE and e.by_teacher.conditional[1][1].value < NOTHING * 2:
        reasons.append(signature.in_words)
    return tuple(reasons)


def ceiling(e: Evidence) -> float:
    """The share of the teacher's tokens that the drafter can name at all."""
    return e.by_teacher.coverage.value or 1.0


def idle(parts: Sequence[Part]) -> Iterator[Part]:
    """Parts that do no work: all of a sort together, or a single one that does harm."""
    for part in parts:
        if harms(part) or (not part.single and part.share < USELESS):
            yield part


def harms(part: Part) -> bool:
    """Whether the drafter is clearly better without a part."""
    return part.worth.high < 0 and part.share <= -HARM


def lost_since_training(e: Evidence) -> str | None:
    """That the log's accuracy is not reached by the drafter as best it can be wired."""
    log, ours = e.trained_accuracy, e.by_teacher.accuracy
    # Trainers count the tokens of the draft vocabulary only, or all: the kinder reading counts.
    if log is None or ours.high / ceiling(e) >= REACHED * log:
        return None
    return (
        f"the training log says {log:.3f}, but the best wiring reaches {rate_words(ours, 3)} on this "
        "data, which may be harder than the log's"
    )


def unknown_cause(e: Evidence, reasons: Sequence[str]) -> Cause:
    """That something is wrong which is none of the causes known here."""
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
                left="no wiring of this file works; export it again, or train again",
            ),
        ),
        confidence=LIKELY,
        evidence=MEASURED,
    )


def teacher_cause(e: Evidence) -> Cause | None:
    """The drafter agrees most with another teacher than the target."""
    searched = e.searched
    score = next((s for s in searched.teachers if s.teacher == searched.teacher), None)
    if score is None or searched.teacher.slot is None:
        return None
    agreement = score.agreement
    if agreement is None or agreement.high >= SOUND_AGREEMENT:
        return None
    if not matters(e.by_teacher, e.trained, comparisons_of(e)):
        return None
    reference = e.trained
    text = reference.truth == Truth.next_token.value
    theirs = "the text's next token" if text else "the target's own choice"
    return Cause(
        kind="teacher",
        what=f"trained on {searched.teacher.in_words}, which is {theirs} at only "
        f"{agreement.value:.3f}; the drafter agrees with it at {e.by_teacher.accuracy.value:.3f}, with "
        f"the target at {reference.accuracy.value:.3f}",
        trained=searched.teacher.in_words,
        served=theirs,
        cost=teacher_cost(e),
        fixes=(
            plain_fix(
                f"train again on data whose last slot is state {e.num_layers}, the target's end",
                f"until then expect accept length {rate_words(reference.accept_length)} at most",
                possible=False,
                left="no engine and no config can mend what was learnt",
            ),
        ),
        # Which of the slot's readings it was may be open; that it was not the target is settled.
        confidence=CERTAIN if searched.teacher_clear and not text else LIKELY,
        evidence=MEASURED,
    )


def teacher_cost(e: Evidence) -> Cost:
    """Agreement with its own teacher beside that with the target: what a right one may give at most."""
    return cost_of(e.by_teacher, e.trained, comparisons_of(e))


def slot_causes(e: Evidence, wiring: Sequence[Cause]) -> Iterator[Cause]:
    """Slots that do not hold what is declared."""
    inspected = e.inspected
    wrong = [s for s in inspected.slots if s.verdict == "contradicted"]
    out_of_order = any(f.name == "slots-out-of-order" for f in inspected.findings)
    cost = None
    if inspected.as_declared is not None:
        cost = cost_of(e.trained, inspected.as_declared, comparisons_of(e))
    if wrong:
        yield Cause(
            kind="slots",
            what=joined([s.in_words for s in wrong]),
            trained=joined([f"slot {s.index}: state {s.state}" for s in wrong if s.found])
            or "no state of this target",
            served=joined([f"slot {s.index}: state {s.declared}" for s in wrong]),
            cost=cost,
            fixes=(slots_fix(inspected.slots),),
            confidence=CERTAIN,
            evidence=MEASURED,
        )
    elif inspected.shift:
        yield Cause(
            kind="slots",
            what=f"the states are shifted against the ids: row t belongs to position "
            f"t{inspected.shift:+d}",
            trained="the data's rows as stored",
            served="row t beside token t",
            cost=next((c.cost for c in wiring if c.kind == "token"), cost),
            fixes=(plain_fix("store slots and input_ids unshifted, and train on them again"),),
            confidence=CERTAIN,
            evidence=MEASURED,
        )
    elif out_of_order and (order := next((c for c in wiring if c.kind == ORDER), None)):
        yield replace(
            order,
            kind="slots",
            what=f"the slots seem to lie in another order than declared: {order.what}",
            fixes=(plain_fix("data.states=[…] in the files' order", "job=inspect_data shows it"),),
            confidence=LIKELY,
        )


def slots_fix(slots: Sequence[SlotSeen]) -> Fix:
    """The states to declare, where every slot that is wrong was found."""
    if any(s.verdict == "contradicted" and not s.found for s in slots):
        return plain_fix(
            "capture the data again from this target",
            possible=False,
            left="a slot holds no state of this target",
        )
    states = ",".join("null" if s.state is None else str(s.state) for s in slots)
    return plain_fix(f"data.states=[{states}]")


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
        confidence=CERTAIN if e.trained.truth == Truth.target_argmax.value else LIKELY,
        evidence=MEASURED,
    )


def under_trained(e: Evidence, *, alone: bool) -> Cause | None:
    """Every part works and no wiring helps, but the level is low. `alone`: nothing else was found."""
    accuracy = e.by_teacher.accuracy
    if accuracy.high / ceiling(e) >= DECENT:
        return None
    log = e.trained_accuracy
    as_logged = log is not None and lost_since_training(e) is None
    told = f"; the training log says the same ({log:.3f})" if as_logged else ""
    return Cause(
        kind="under-trained",
        what=f"wired as it was trained it is right at {rate_words(accuracy, 3)}, every part of it does "
        f"its work and no other wiring is better{told}: too little training, or texts that are hard",
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
        confidence=LIKELY if alone and (as_logged or log is None) else POSSIBLE,
        evidence=MEASURED,
    )


def engine_causes(e: Evidence) -> Iterator[Cause]:
    """What the figure behind the engine says beside the one that its wiring predicts."""
    measured, predicted = e.engine_accept_length, e.as_served
    if measured is None or predicted is None or comparable(e) is not None:
        return
    length = predicted.accept_length
    if inside(measured, length):
        return
    if abs(measured + 1 - length.value) <= EXACTLY:
        yield without_bonus(e, length, LIKELY)
        yield engine_state(e, predicted)
    elif inside(measured + 1, length):
        yield engine_state(e, predicted)
        yield without_bonus(e, length, POSSIBLE)
    elif e.tree is not None and inside(measured, e.tree):
        yield measurement(
            e,
            f"a tree gains more than a chain: {rate_words(e.tree)} are expected of the tree",
            LIKELY,
        )
    elif measured > length.high:
        yield measurement(
            e,
            "no chain of this drafter gains so much on this data: a tree, other texts, or more steps",
            POSSIBLE,
        )
    else:
        yield engine_state(e, predicted)


def without_bonus(e: Evidence, length: Rate, confidence: str) -> Cause:
    """The figure is the predicted one less the bonus token."""
    why = f"it is {length.value:.2f} less 1: the engine's figure leaves the bonus token out"
    return measurement(e, why, confidence)


def inside(measured: float, predicted: Rate) -> bool:
    """Whether a figure behind the engine is the predicted one, whose prompts are others."""
    return predicted.low - NEAR_LENGTH <= measured <= predicted.high + NEAR_LENGTH


def comparable(e: Evidence) -> str | None:
    """Why the engine's figure cannot be set beside the predicted one; None: it can."""
    steps = e.asked.flags.get("speculative_num_steps") if e.asked is not None else None
    if steps is not None and str(steps) != str(e.trained.steps):
        return (
            f"the engine drafts {steps} steps and {e.trained.steps} were scored, so their accept "
            f"lengths have other ceilings; score with job.steps={steps}"
        )
    return None


def measurement(e: Evidence, why: str, confidence: str) -> Cause:
    """The figure behind the engine is another one than it is taken for."""
    assert e.as_served is not None
    length = e.as_served.accept_length
    return Cause(
        kind="measurement",
        what=f"the engine reports {e.engine_accept_length:.2f} where its wiring predicts "
        f"{rate_words(length)}; {why}",
        trained=f"predicted {length.value:.2f}",
        served=f"reported {e.engine_accept_length:.2f}",
        cost=None,
        fixes=(
            plain_fix("compare tokens a target forward, the bonus token included, on both sides"),
        ),
        confidence=confidence,
        evidence="inferred",
    )


def engine_state(e: Evidence, predicted: Scored) -> Cause:
    """The engine accepts less than its own wiring gives on fresh states."""
    length = predicted.accept_length
    return Cause(
        kind="engine-state",
        what=f"the engine reports {e.engine_accept_length:.2f} where its wiring, on fresh states, gives "
        f"{rate_words(length)}: something behind the engine loses the rest (the drafter's cache not "
        "rebuilt behind accepted tokens, prefix cache, another target build, other prompts)",
        trained=f"predicted {length.value:.2f}",
        served=f"reported {e.engine_accept_length:.2f}",
        cost=None,
        fixes=(
            plain_fix(
                "serve once with the prefix cache off and one request at a time, and compare",
                "compare the first round's accept length with the later ones",
            ),
        ),
        confidence=POSSIBLE,
        evidence="inferred",
    )

"""Whether a drafter, wired as best it can be, works as a trained one does, or is damaged.

Every part of a trained drafter does some work, and it knows more than a table of token pairs. What no
wiring explains shows as a part that does none or harms, or as a table or a norm that is not its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.diagnosis.causes import shows
from eagle3.diagnosis.evidence import Evidence, Part, chunk_name
from eagle3.diagnosis.kinds import ORDER, STATES, kind_of
from eagle3.diagnosis.signatures import COLLAPSE, NOTHING, signature_of
from eagle3.diagnosis.words import joined, rate_words
from eagle3.metrics import Rate
from eagle3.wiring import Head

# Fixed on the lab's drafters.
# A part without which less than this share of the accuracy is lost does no work, unless the
# cross-entropy shows some.
USELESS = 0.15
HARM = 0.05  # a part without which this share of the accuracy is gained does harm
LEAST_LOSS = 0.02  # of cross-entropy, in nats: less is none
MOST_OF_ALL = 0.75  # of all tokens: a draft vocabulary of more is not told from one drawn at random
CHANCE = 0.25  # of what tokens drawn at random lack; one that was counted has more
BESIDE_BIGRAM = 1.25  # a drafter below this many times a table of token pairs is dead


def broken(e: Evidence) -> tuple[str, ...]:
    """Why the drafter does not work as a trained one does, even wired as best it can be."""
    accuracy = e.by_teacher.accuracy
    if accuracy.value < least_accuracy(e):
        return (
            f"its first token is right at {accuracy.value:.3f}, where a table of token pairs has "
            f"{e.health.bigram:.3f}",
        )
    reasons = [] if e.health.blank is None or reaches_log(e) else [e.health.blank]
    reasons += [idle_words(part, accuracy) for part in idle(e.health.parts, accuracy.value)]
    reasons += filter(None, [idle_states(e), foreign_vocabulary(e), damaged_norm(e)])
    signature = signature_of(e.by_teacher.conditional, e.by_teacher.conditional)
    little = NOTHING * 2 * ceiling(e)
    if signature.name == COLLAPSE and e.by_teacher.conditional[1][1].value < little:
        reasons.append(signature.in_words)
    return tuple(reasons)


def least_accuracy(e: Evidence) -> float:
    """Below which a first step is no better than a broken drafter's."""
    # The table of pairs may name any token, the drafter those of its vocabulary.
    return max(BESIDE_BIGRAM * e.health.bigram * ceiling(e), 0.02)


def only_blank(e: Evidence, reasons: Sequence[str]) -> bool:
    """Whether nothing but zeros speaks against the drafter, which works in spite of them."""
    return list(reasons) == [e.health.blank]


def reaches_log(e: Evidence) -> bool:
    """Whether it is as good as its training log says, so that zeros were there when it was trained."""
    return e.trained_accuracy is not None and e.by_teacher.accuracy.high >= e.trained_accuracy


def idle_words(part: Part, accuracy: Rate) -> str:
    """That a part does no work, or harm."""
    surer = ""
    if part.loss is not None:
        surer = f", cross-entropy {-part.loss.value:+.3f} with it"
    return (
        f"{part.name} {'harms' if harms(part) else 'does next to nothing'}: accuracy is "
        f"{part.without.value:.3f} without, {accuracy.value:.3f} with{surer}"
    )


def idle_states(e: Evidence) -> str | None:
    """That clearly nothing is made of the states that the search found in the place of others.

    It took them for the harm that the others do there; the fault is that chunk's, then.
    """
    settled = [
        kind for kind in (STATES, ORDER) if kind in e.alone and shows(e, kind, e.alone[kind])
    ]
    if not settled:
        return None
    found, others = e.trained.wiring.states(), e.wrong.states()
    changed = [j for j, (k, other) in enumerate(zip(found, others, strict=False)) if k != other]
    accuracy = e.by_teacher.accuracy.value
    idle_ones = {part.name for part in e.health.parts if is_idle(part, accuracy)}
    if not changed or not all(chunk_name(j) in idle_ones for j in changed):
        return None
    named = joined([chunk_name(j) for j in changed])
    return (
        f"{named} {'does' if len(changed) == 1 else 'do'} no work: of all states those are best there "
        f"that do the least harm ({joined([str(found[j]) for j in changed])})"
    )


def is_idle(part: Part, accuracy: float) -> bool:
    """Whether a part clearly does no work, neither in what is chosen nor in how surely."""
    nothing = part.loss is not None and part.loss.high < LEAST_LOSS
    return nothing and part.worth.high < USELESS * accuracy


def damaged_norm(e: Evidence) -> str | None:
    """That the drafter is clearly better without its last norm, although that was trained."""
    kind = kind_of("head_input")
    so = e.alone.get(kind)
    return e.health.left_out if so is not None and shows(e, kind, so) else None


def foreign_vocabulary(e: Evidence) -> str | None:
    """That only the target's head works, and on a draft vocabulary that has no more of what the target
    says than any tokens would.

    Trainers fill it with the tokens that are most frequent in what the target says. Where the file's
    own head goes with it, the vocabulary is a ceiling and nothing else; one that leaves few tokens out
    has most of them in any case.
    """
    size, whole, coverage = e.form.draft_vocab.value, e.form.vocab.value, e.by_teacher.coverage
    if e.trained.wiring.head is not Head.target or e.wrong.head is not Head.own:
        return None
    share = size / whole
    if (
        not coverage.denominator
        or share > MOST_OF_ALL
        or coverage.high > share + CHANCE * (1 - share)
    ):
        return None
    return (
        f"its own head does not work, and its draft vocabulary has {rate_words(coverage, 3)} of the "
        f"target's tokens, as {size} of {whole} drawn at random would: both are of another tokenizer"
    )


def ceiling(e: Evidence) -> float:
    """The share of the teacher's tokens that the drafter can name at all."""
    return e.by_teacher.coverage.value or 1.0


def idle(parts: Sequence[Part], accuracy: float) -> Iterator[Part]:
    """Parts that do no work: all of a sort together, or a single one that does harm.

    That a part does none has to be settled: few texts alone make no drafter broken.
    """
    for part in parts:
        does_none = part.share < USELESS and part.worth.high < USELESS * accuracy
        some = part.loss is not None and part.loss.low > 0
        if harms(part) or (not part.single and does_none and not some):
            yield part


def harms(part: Part) -> bool:
    """Whether the drafter is clearly better without a part."""
    return part.worth.high < 0 and part.share <= -HARM

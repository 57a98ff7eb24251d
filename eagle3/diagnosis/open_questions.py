"""What the data at hand cannot decide, each with the data that would."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.diagnosis import beyond
from eagle3.diagnosis.behind_engine import comparable
from eagle3.diagnosis.causes import (
    LEAST_ACCURACY,
    LEAST_LENGTH,
    OPEN_LENGTH,
    difference_of,
    kinds_of,
    unsettled,
)
from eagle3.diagnosis.damage import broken
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.heard import NEAR_LENGTH
from eagle3.diagnosis.kinds import kind_of, switch_of
from eagle3.diagnosis.signatures import curve_words, level
from eagle3.diagnosis.words import difference_words, joined, rate_words, value_words
from eagle3.metrics import Truth
from eagle3.wiring import Wiring

FAR = ("rope", "window", "positions")  # switches that show far back, or only there
FEW = 6  # texts below which too little is known of the spread between them
MORE_TEXTS = "more texts of this data would tell (a larger job.max_samples, or more files)"
GREEDY = (
    "texts that the target wrote greedily would tell, with its own choices (job=capture_states)"
)


def undecided(e: Evidence) -> Iterator[str]:
    """Everything that stays open, what concerns the verdict first."""
    yield from doubts(e)
    yield from of_serving(e)
    for kind in unshown(e):
        yield (
            f"what {kind} costs ({difference_of(e, switch_of(kind) or kind)}): nothing within "
            f"{e.longest} positions; longer texts would tell"
        )
    for kind, why in e.not_alone.items():
        yield f"the cost of {kind}: {why}"
    yield from ties(e)
    yield from of_truth(e)
    yield from of_slots(e)
    if not e.searched.teacher_clear:
        yield (
            f"whether {e.searched.teacher.in_words} or another teacher was learnt: more texts would tell"
        )


def doubts(e: Evidence) -> list[str]:
    """Why no drafter can be called sound here; empty: the texts tell."""
    found = list(unsettled(e))
    better = ahead(e)
    if better is not None and not any("scores higher" in said for said in found):
        found.insert(0, better)
    if not found and texts_of(e) < FEW:
        many = "one text settles" if texts_of(e) == 1 else f"{texts_of(e)} texts settle"
        found.append(f"whether anything is wrong: {many} no small difference; {MORE_TEXTS}")
    return found


def texts_of(e: Evidence) -> int:
    """How many texts count at all."""
    return sum(text["accuracy"].denominator > 0 for text in e.trained.counts)


def ahead(e: Evidence) -> str | None:
    """That what is declared or served scores higher than what the search ended with, settled or not."""
    ours, other = e.trained, e.as_served
    if other is None or other.wiring == ours.wiring or other.truth != ours.truth:
        return None
    right = other.accuracy.value - ours.accuracy.value
    gained = other.accept_length.value - ours.accept_length.value
    if max(right / LEAST_ACCURACY, gained / LEAST_LENGTH) < 1 or min(right, gained) < 0:
        return None
    how = "declared" if e.served is None else "served"
    return (
        f"what the drafter was trained with: the wiring as {how} scores higher "
        f"({rate_words(other.accept_length)} accept length, accuracy {other.accuracy.value:.3f}) than "
        f"the one that the search ended with ({rate_words(ours.accept_length)}, "
        f"{ours.accuracy.value:.3f}); {MORE_TEXTS}"
    )


def unshown(e: Evidence) -> list[str]:
    """Kinds that are served (declared) otherwise, and that no text at hand is long enough to show."""
    return [
        kind
        for kind in kinds_of(e)
        if switch_of(kind) in FAR and kind in e.alone and e.alone[kind].counts == e.trained.counts
    ]


def unsettled_counts(e: Evidence) -> str | None:
    """Why it is not known whether a running server accepts what its wiring gives; None: it is, or no
    server was asked.
    """
    if e.heard is None:
        return None
    whether = "whether the server accepts what its wiring gives"
    if e.heard.accept_length is None:
        counts = f"{whether}: it counts no rounds of a request"
        return counts if e.engine_accept_length is None else None
    if e.counted is None:
        return f"{whether}: {e.not_counted or 'the drafter alone was not counted on these texts'}"
    lost = e.counted.lost
    if lost.low <= NEAR_LENGTH < lost.high - OPEN_LENGTH:
        return (
            f"{whether}: on the prompts of {e.counted.texts} texts it loses {difference_words(lost)}; "
            "job=engine_bench counts on more"
        )
    return None


def of_serving(e: Evidence) -> Iterator[str]:
    """What of the engine is not known."""
    if e.served is None:
        yield (
            "what is served: name the engine (engine=sglang engine_version=… engine_class=…); without "
            "one the trained wiring is held against what config.json declares"
        )
    elif e.why_not_served is not None:
        yield f"accept length as served: {e.why_not_served}"
    if e.heard is not None and e.heard.states is None:
        yield f"which states the server feeds: read from tables, not measured; {e.heard.why_not}"
    if (why := unsettled_counts(e)) is not None:
        yield why
    elif e.heard is None and e.served is not None and e.engine_accept_length is None:
        yield (
            "whether the engine reaches what its wiring predicts: give the accept length that it "
            "reports (accept_length=X)"
        )
    differs = comparable(e)
    if e.engine_accept_length is not None and differs is not None:
        yield f"the engine's accept length of {e.engine_accept_length:.2f}: {differs}"


def of_truth(e: Evidence) -> Iterator[str]:
    """What the figures are held against, and what is held back for it."""
    truth = e.trained.truth
    if truth == Truth.next_token.value:
        yield (
            "agreement with the target itself: the data has no target_argmax; add it with "
            "job=capture_states, then data.target_argmax=FOLDER"
        )
    elif truth == Truth.stored_teacher.value and not e.inspected.verified_end(e.num_layers):
        yield (
            f"whether the slot that is declared state {e.num_layers} is the target's end, whose choices "
            "all figures are held against: taken as declared; target_argmax would tell "
            "(job=capture_states)"
        )
    if e.trained_accuracy is None:
        yield (
            f"whether the drafter is as good as it was trained (right at "
            f"{rate_words(e.by_teacher.accuracy, 3)} here): give the training log's accuracy "
            "(trained_accuracy=X)"
        )
    why = beyond.unverified(e)
    if why is not None:
        accuracy = rate_words(e.by_teacher.accuracy, 3)
        if beyond.is_low(e):
            yield f"whether the drafter is under-trained (right at {accuracy}): {why}; {GREEDY}"
        if e.trained_accuracy is not None:
            yield (
                f"whether the training log's {e.trained_accuracy:.3f} is reached ({accuracy} here): "
                f"{why}; {GREEDY}"
            )
    elif beyond.is_low(e) and not level(e.by_teacher.conditional) and not broken(e):
        yield (
            f"why accuracy is low: the draft steps are not level "
            f"({curve_words(e.by_teacher.conditional)}), so it is not training alone; an earlier "
            "and a later checkpoint of the same run, scored alike, would tell"
        )


def of_slots(e: Evidence) -> Iterator[str]:
    """Slots that nothing verified."""
    told = [s for s in e.inspected.slots if s.verdict == "as declared"]
    if told:
        yield (
            f"which states {joined([f'slot {s.index}' for s in told])} really hold: taken as declared; "
            "the target's layers, run as far as them, would tell (job=inspect_data job.first_layers=N)"
        )


def told_apart(e: Evidence, wiring: Wiring, name: str) -> bool:
    """Whether this one, as served, gives the teacher's choices clearly less probability."""
    kind = kind_of(name)
    so, loss = e.alone.get(kind), e.loss_alone.get(kind)
    return so is not None and so.wiring == wiring and loss is not None and loss.low > 0


def ties(e: Evidence) -> Iterator[str]:
    """Switches whose other values explain the drafter as well, within what was measured."""
    best = e.searched.best.wiring
    tied: dict[str, list[str]] = {}
    for ranked in e.searched.ranked:
        names = best.differing(ranked.wiring)
        if ranked.tied and len(names) == 1 and not told_apart(e, ranked.wiring, names[0]):
            tied.setdefault(names[0], []).append(value_words(ranked.wiring, names[0]))
    for name, values in tied.items():
        data = (
            f"texts longer than {e.longest} positions would tell"
            if name in FAR
            else "more texts would tell"
        )
        yield (
            f"{kind_of(name)}: {value_words(best, name)} or {joined(values, 'or')} (a tie on these "
            f"texts); {data}"
        )

"""What is wrong with the slots of a dump, as findings: each with its figures and what to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from eagle3.data import CAPTURE_FILE
from eagle3.data.form import DataForm
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.metrics import Truth, paired_difference
from eagle3.slot_verdicts import CONTRADICTED, Judged, share_in_words
from eagle3.texts import measured

CLEARLY = 0.02  # a difference of agreements that matters
ORDER = 0.1  # by how much an earlier state may lead to the next token more often than a later one
FP16_MAX = 65504.0


def findings(
    form: DataForm, slots: Sequence[Judged], same: set[tuple[int, int]], tail: int
) -> Iterator[Finding]:
    """All that is wrong with the slots of a dump.

    `same` are the pairs of slots that are equal on every row; `tail` rows at the ends of texts are zero
    in every slot.
    """
    where = str(form.folder)
    yield from value_findings(where, slots, same, tail)
    yield from state_findings(where, slots)
    yield from shift_findings(where, slots, form.teacher)
    yield from teacher_findings(where, form, slots)


def value_findings(
    where: str, slots: Sequence[Judged], same: set[tuple[int, int]], tail: int
) -> Iterator[Finding]:
    """Numbers that no residual stream holds."""
    for judged in slots:
        f, name = judged.figures, judged.slot.name
        if f.non_finite:
            overflow = f.dtype == "float16"
            yield measured(
                "fp16-overflow" if overflow else "non-finite",
                "error",
                where,
                f"{name}: {f.non_finite} of {f.rows} rows hold NaN or infinity, the first at "
                f"{f.first_non_finite}",
                "such rows make every score behind them NaN, and trainers drop or choke on them",
                "capture in bfloat16: float16 ends at 65504, a residual stream may not"
                if overflow
                else "capture the files again",
            )
        elif f.dtype == "float16" and f.max_abs >= FP16_MAX:
            yield measured(
                "fp16-overflow",
                "error",
                where,
                f"{name} reaches {f.max_abs:.0f}, the end of float16: larger values were cut off",
                "the largest components of the state, which carry most of its norm, are wrong",
                "capture in bfloat16",
            )
        if f.zero == f.rows or (f.rows > 1 and not f.changes):
            kind = "zero" if f.zero == f.rows else "the same"
            yield measured(
                "constant-slot",
                "error",
                where,
                f"{name}: all {f.rows} rows are {kind}",
                "the slot tells the drafter nothing",
                "capture the state again",
            )
        elif f.zero > tail:
            yield measured(
                "zero-rows",
                "error",
                where,
                f"{name}: {f.zero - tail} of {f.rows} rows are zero without being the end of a text",
                "a residual stream is never zero: these rows were not written",
                "capture the files again",
            )
    for i, j in sorted(same):
        a, b = slots[i], slots[j]
        if set(a.found) & set(b.found) and a.slot.state in a.found and b.slot.state in b.found:
            continue  # the target makes these states equal
        yield measured(
            "identical-slots",
            "error",
            where,
            f"{a.slot.name} and {b.slot.name} are the same on every row; they are "
            f"{a.declared_in_words} and {b.declared_in_words}",
            "a state was stored twice, and another is missing",
            "capture the missing state",
        )


def state_findings(where: str, slots: Sequence[Judged]) -> Iterator[Finding]:
    """Slots that are another state than declared, or on the other side of the norm."""
    wrong = {s.index for s in slots if s.slot.state is not None and s.state()[0] == CONTRADICTED}
    corrected = None
    if all(slots[i].found for i in wrong):
        states = [s.found[0] if s.index in wrong else s.slot.state for s in slots]
        corrected = f"[{','.join(map(str, states))}]"
    for judged in (slots[i] for i in sorted(wrong)):
        fix = "capture the data again" if corrected is None else f"data.states={corrected}"
        if corrected is not None and judged.slot.origin == CAPTURE_FILE:
            fix = f'"states": {corrected} in {where}/{CAPTURE_FILE}'
        missing = judged.slot.state == 0 and not judged.found
        yield measured(
            "embedding-missing" if missing else "wrong-state",
            "error",
            where,
            f"{judged.in_words} ({judged.slot.origin}), but {judged.state()[1]}",
            "the drafter is fed another state than its training saw, without any error",
            fix,
        )
    for judged in slots:
        verdict, what = judged.norm()
        if verdict != CONTRADICTED:
            continue
        said = "behind" if judged.slot.normed else "before"
        yield measured(
            "slot-norm",
            "error",
            where,
            f"{judged.in_words}, is declared {said} the target's final norm "
            f"({judged.slot.origin}), but lies {what}",
            "as teacher the norm is applied twice or never; as aux state its scale is another "
            "than the engine's",
            "capture the state on the side of the norm that the layout stores",
        )
    by_depth = sorted(
        (
            s
            for s in slots
            if s.slot.state is not None and not s.found and s.state()[0] != CONTRADICTED
        ),
        key=lambda s: s.slot.state or 0,
    )
    for low, high in pairwise(by_depth):
        a, b = (s.agreement(Truth.next_token) for s in (low, high))
        if a and b and a.low > b.high + ORDER:
            yield measured(
                "slots-out-of-order",
                "warning",
                where,
                f"{low.in_words}, leads to the next token at {share_in_words(a)}, but "
                f"{high.in_words}, which should lie closer to the target's end, at {share_in_words(b)}",
                "the slots seem to be in another order than declared",
                "write data.states in the files' order",
            )


def shift_findings(where: str, slots: Sequence[Judged], teacher: int) -> Iterator[Finding]:
    """States that stand beside other positions' ids."""
    by = slots[teacher].data_shift
    if not by:
        return
    shifted = [s.slot.name for s in slots if s.shift == by]
    if shifted:
        alone = all(s.in_answer for s in slots if s.shift == by)
        over = "over the answer alone, " if alone else ""
        what = f"{over}row t of {', '.join(shifted)} belongs to position t{by:+d} of input_ids"
    else:
        end = slots[teacher]
        best, straight = (end.agreement(Truth.next_token, shift=shift) for shift in (by, 0))
        told = "nowhere" if straight is None else f"at {straight.value:.1%}"
        what = (
            f"the head's choice of {end.slot.name} at row t is token t{1 + by:+d} at "
            f"{share_in_words(best) if best else 'some positions'}, and token t+1 {told}"
        )
    yield measured(
        "states-shifted",
        "error",
        where,
        f"the states are shifted against the ids: {what}",
        "the drafter sees each token beside another one's state: accuracy falls to that of a "
        "bigram table",
        "store slots and input_ids unshifted: row t is computed behind input_ids[t]",
    )


def teacher_findings(where: str, form: DataForm, slots: Sequence[Judged]) -> Iterator[Finding]:
    """The slot that a trainer takes for the target's end, where it is something else."""
    judged = slots[form.teacher]
    reason = why_wrong_teacher(judged, slots)
    if reason is None:
        return
    why, evidence = reason
    end, declared, found = judged.num_layers, judged.slot.state, judged.found
    state = found[0] if found and declared not in found else declared
    if state == end:  # so it is declared, and measured not to be
        name = f"declared state {end}, but is not the target's end"
    elif state is None:
        name = f"a state that nobody declares and not the target's end (state {end})"
    else:
        name = f"state {state} and not the target's end (state {end})"
    yield Finding(
        name="wrong-teacher",
        severity="error",
        where=where,
        what=f"{judged.slot.name}, the teacher of the trainer that reads {form.layout}, is {name}: "
        f"{why}",
        effect="a drafter trained on it learns what the head makes of another state, and accuracy "
        "measured against it says nothing about acceptance",
        fix=(
            f"capture state {judged.num_layers} as the last slot, for training",
            "job.truth=target_argmax (or next_token, where the target wrote the text greedily)",
        ),
        evidence=evidence,
    )


def why_wrong_teacher(judged: Judged, slots: Sequence[Judged]) -> tuple[str, str] | None:
    """Why a teacher slot is not the target's end and how that is known; None where it may be it."""
    end, found = judged.num_layers, judged.found
    own, text = judged.agreement(Truth.target_argmax), judged.agreement(Truth.next_token)
    said = ""
    if own is not None:
        said = f"the head makes the target's own choice of {share_in_words(own)}"
    elif text is not None:
        said = f"the head makes the next token of {share_in_words(text)}"
    if found and end not in found and not (judged.located and judged.located.open_end):
        error = f"relative error {judged.located.error:.2g}" if judged.located else ""
        return "; ".join(filter(None, (error, said))) or judged.found_in_words(), MEASURED
    if end in found:
        return None
    if judged.leads_to_choice is False:
        return said, MEASURED
    if own is None:
        for other in slots:
            if other is not judged and (better := agrees_better(other, judged)):
                return f"{said}, and {other.slot.name} does better by {better:.1%}", MEASURED
    # However often the head makes the target's choice of it: so it does of the state before the end.
    if judged.slot.state not in (None, end):
        return f"{judged.slot.origin} says so" + (
            f"; {said}" if said else ""
        ), f"inferred from {judged.slot.origin}"
    return None


def agrees_better(a: Judged, b: Judged) -> float | None:
    """By how much slot a agrees better with the text than slot b; None where that is not clear."""
    counts = [s.counts(Truth.next_token) for s in (a, b)]
    if not all(c and sum(x.denominator for x in c) for c in counts) or len(counts[0]) < 2:
        return None
    difference = paired_difference(*counts, seed=b.seed)
    return difference.value if difference.low > CLEARLY else None


def undecided(form: DataForm, slots: Sequence[Judged], *, argmax: bool) -> Iterator[str]:
    """What no measurement here can tell, in sentences; `argmax`: the data has target_argmax."""
    judged = slots[form.teacher]
    if not judged.found and not argmax:
        yield (
            "the data has no target_argmax, and agreement with the text alone does not tell the "
            "target's end from a state near it; add target_argmax with job=capture_states"
        )
    elif not judged.found and judged.leads_to_choice is not False:
        yield (
            f"how often the head makes the target's own choice does not tell the target's end (state "
            f"{judged.num_layers}) from the state before it; job.first_layers={judged.num_layers} does, "
            "where all layers fit in memory"
        )
    if any(s.located is None and s.slot.state != 0 for s in slots):
        yield (
            "slots that no run of the target's layers verified may have been captured on one of several "
            "tensor-parallel ranks, or before an all-reduce: that shows in no figure here"
        )

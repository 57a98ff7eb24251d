"""What a drafter is held against: the target's own choices, as far as the data has them.

target_argmax where every text has it. Else the data's slot with the target's last state, behind the
final norm once and the head: that is what the target chooses, kept under the name `stored_teacher`. Only
then the text's next token, which the target need not have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3.data.form import DataForm
from eagle3.diagnosis.evidence import Inspected
from eagle3.metrics import Count, Rate, Truth, rate
from eagle3.search.teachers import Teacher, teachers_of
from eagle3.search.texts import Text
from eagle3.target import TargetParts

ARGMAX, END = Truth.target_argmax.value, Truth.stored_teacher.value
NEXT = Truth.next_token.value


def reference_of(texts: Sequence[Text]) -> str:
    """The truth that serving goes by: the target's own choice where all texts have it."""
    for truth in (ARGMAX, END):
        if all(truth in text.truths for text in texts):
            return truth
    return NEXT


def follows(texts: Sequence[Text], seed: int) -> Rate | None:
    """How often a text goes on with the target's own choice; None where that is not known."""
    truth = reference_of(texts)
    if truth == NEXT:
        return None
    counts = []
    for text in texts:
        chosen, written = (text.truths[name][text.rows + 2] for name in (truth, NEXT))
        counts.append(Count(int((chosen == written).sum()), len(text.rows)))
    return rate(counts, Truth(truth), limits=(0.0, 1.0), seed=seed)


def end_of(form: DataForm, target: TargetParts, inspected: Inspected) -> Teacher | None:
    """The slot that holds the target's last state, as the reference; None: no slot does."""
    for teacher in teachers_of(form, target, has_argmax=False):
        if teacher.norms == 1 and inspected.is_end(teacher.slot, target.num_layers):
            assert teacher.slot is not None
            name = form.slots[teacher.slot].name
            return replace(
                teacher,
                name=END,
                in_words=f"the target's own choice, made of state {target.num_layers} ({name})",
            )
    return None


def with_end(
    texts: Sequence[Text], form: DataForm, inspected: Inspected, target: TargetParts
) -> list[Text]:
    """The texts with the choices of the target's last state, where they lack its own."""
    end = end_of(form, target, inspected)
    if end is None or reference_of(texts) == ARGMAX:
        return list(texts)
    made = f"slot{end.slot}/normed"
    return [
        replace(text, truths={**text.truths, END: text.truths[made]})
        if made in text.truths
        else text
        for text in texts
    ]


def candidates(
    form: DataForm, target: TargetParts, texts: Sequence[Text], inspected: Inspected
) -> list[Teacher]:
    """Every teacher whose choices all texts have, the reference first."""
    reference = reference_of(texts)
    found = list(teachers_of(form, target, has_argmax=reference == ARGMAX))
    if reference == END:
        end = end_of(form, target, inspected)
        assert end is not None  # its choices are there
        found = [end, *(t for t in found[1:] if (t.slot, t.norms) != (end.slot, end.norms))]
    return [t for t in found if all(t.name in text.truths for text in texts)]

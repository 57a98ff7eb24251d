"""Whom a drafter may have learned from: the target itself, or what a trainer made of a stored slot.

Trainers take the data's last slot through the target's head. Whether they put the target's final norm
before it, and whether that slot is the target's end at all, differs between releases and dumps, so
every slot is a candidate: behind the norm once, not at all, and twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.data.form import DataForm
from eagle3.errors import BadInput
from eagle3.metrics import Truth
from eagle3.target import TargetParts

TIMES = {0: "raw", 1: "normed", 2: "twice"}
WORDS = {
    0: "through the head without the final norm",
    1: "behind norm and head",
    2: "behind the norm twice and the head",
}


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One candidate; `name` is how results speak of it."""

    name: str  # target_argmax, next_token, slotN/normed, slotN/raw, slotN/twice
    slot: int | None  # index into the data's slots; None: no slot is asked
    norms: (
        int  # how often the final norm stands before the head, those that the data stores included
    )
    in_words: str


def teachers_of(form: DataForm, target: TargetParts, has_argmax: bool) -> tuple[Teacher, ...]:
    """Every teacher that the data can make, the reference first: the target's own choice, or the text.

    Slots are left out where the target's head or norm cannot be had; `without_slots` says why.
    """
    truth = Truth.target_argmax if has_argmax else Truth.next_token
    words = {
        Truth.target_argmax: "the target's own choice",
        Truth.next_token: "the text's next token",
    }
    found = [Teacher(name=truth.value, slot=None, norms=0, in_words=words[truth])]
    if without_slots(target):
        return tuple(found)
    for i, slot in enumerate(form.slots):
        state = "of no declared state" if slot.state is None else f"state {slot.state}"
        last = "last " if i == form.teacher else ""
        for norms in range(1, 3) if slot.normed else range(3):
            found.append(
                Teacher(
                    name=f"slot{i}/{TIMES[norms]}",
                    slot=i,
                    norms=norms,
                    in_words=f"the data's {last}slot ({slot.name}, {state}) {WORDS[norms]}",
                )
            )
    return tuple(found)


def without_slots(target: TargetParts) -> str | None:
    """Why no slot can be made a teacher; None: they can."""
    try:
        target.head()
        target.final_norm()
    except BadInput as error:
        return str(error)
    return None

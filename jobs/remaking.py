"""States of the data that are none of the target's, made anew by the target's own layers.

A drafter that was trained on good data can be diagnosed on a damaged dump of it, where the target can
be run that far: what its layers make of the same texts stands in for the slots that hold no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3.data.form import DataForm
from eagle3.diagnosis.evidence import Inspected
from eagle3.search.texts import Text, with_states
from jobs.inspecting import TargetLayers


def lost_states(inspected: Inspected) -> dict[int, int]:
    """Slot → the state that it is declared to be, of slots that were found to hold no state at all."""
    return {
        slot.index: slot.declared
        for slot in inspected.slots
        if slot.verdict == "contradicted" and not slot.found and slot.declared is not None
    }


def can_be_made(inspected: Inspected, layers: int) -> bool:
    """Whether the target's first `layers` make every lost state."""
    lost = lost_states(inspected)
    return bool(lost) and layers > 0 and max(lost.values()) <= layers


def with_remade(target: TargetLayers, texts: Sequence[Text], inspected: Inspected) -> list[Text]:
    """The texts with their lost states as the target makes them, as if they were stored.

    Raises BadInput where the target cannot be run.
    """
    lost = sorted(set(lost_states(inspected).values()))
    made = target.states([text.ids for text in texts], max(lost), only=lost)
    return [
        replace(
            with_states(
                replace(text, states={k: h for k, h in text.states.items() if k not in lost}),
                dict(zip(lost, states, strict=True)),
            ),
            computed=text.computed,
        )
        for text, states in zip(texts, made, strict=True)
    ]


def without_lost(form: DataForm, inspected: Inspected) -> DataForm:
    """The data's form with its lost slots as what they are: of no state."""
    lost = lost_states(inspected)
    slots = [replace(s, state=None) if i in lost else s for i, s in enumerate(form.slots)]
    return replace(form, slots=tuple(slots))

"""Captured data against the target and the drafter: number of slots, widths, number type, teacher."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.doctor.findings import MEASURED, Finding, in_words
from eagle3.doctor.subject import Data, DataSlot, Subject

# Layouts whose last slot is written by a rule: SpecForge's dump keeps the model's output, behind its
# final norm, apart from the aux states.
END_APART = ("specforge", "speculators_v0", "modelopt")


def check(subject: Subject) -> Iterator[Finding]:
    """All that file names and headers tell."""
    data = subject.data
    if data is None or not data.slots:
        return
    yield from counted(data, data.slots)
    yield from widths(subject, data, data.slots)
    yield from number_type(data, data.slots)
    yield from teacher(subject, data)
    yield from fitting(subject, data, data.slots)


def counted(data: Data, slots: tuple[DataSlot, ...]) -> Iterator[Finding]:
    """The states that are declared, one for each slot; that of an end kept apart may be left out."""
    if data.states is None:
        return
    allowed = {len(slots)} | ({len(slots) - 1} if data.layout in END_APART else set())
    if len(data.states) not in allowed:
        yield Finding(
            name="data-states-count",
            severity="error",
            where=str(data.folder),
            what=f"{data.origin} declares {len(data.states)} states {list(data.states)}, the files hold "
            f"{len(slots)} slots",
            effect="slots would be taken for other states than they are",
            fix=(f"states=[…] with {len(slots)} canonical states",),
            evidence=MEASURED,
        )
    if len(set(data.states)) < len(data.states):
        yield Finding(
            name="data-states-twice",
            severity="warning",
            where=str(data.folder),
            what=f"{data.origin} declares a state twice: {list(data.states)}",
            effect="engines capture no state twice, so such a drafter cannot be served",
            fix=("capture different states",),
            evidence=MEASURED,
        )


def widths(subject: Subject, data: Data, slots: tuple[DataSlot, ...]) -> Iterator[Finding]:
    """Every slot is H wide."""
    hidden = subject.target_hidden
    wrong = [slot for slot in slots if slot.width != (hidden or slots[-1].width)]
    if not wrong:
        return
    yield Finding(
        name="data-width",
        severity="error",
        where=str(data.folder),
        what=f"{', '.join(slot.name for slot in wrong)} is {wrong[0].width} wide, "
        + (f"the target's states are {hidden}" if hidden else f"others are {slots[-1].width}"),
        effect="it was captured from another target, or holds several states in one",
        fix=("name the target that the data was captured from", "or capture it again"),
        evidence=MEASURED,
    )


def number_type(data: Data, slots: tuple[DataSlot, ...]) -> Iterator[Finding]:
    """Half precision overflows where the residual stream is large."""
    half = [slot.name for slot in slots if slot.dtype == "F16"]
    if half:
        yield Finding(
            name="data-half-precision",
            severity="warning",
            where=str(data.folder),
            what=f"{', '.join(half)} is stored as float16",
            effect="the residual stream of deep layers may exceed its 65504 and become infinite; "
            "trainers leave such samples out or learn from them",
            fix=("capture in bfloat16", "or measure it: job=inspect_data"),
            evidence=MEASURED,
        )


def teacher(subject: Subject, data: Data) -> Iterator[Finding]:
    """What a trainer takes for the target's last state must be it."""
    slot, layers = data.teacher, subject.num_layers
    if slot is None or slot.state is None or layers is None or slot.state == layers:
        return
    trainer = subject.trainer.name if subject.trainer is not None else None
    reads = trainer in ("speculators", None)
    yield Finding(
        name="teacher-is-not-the-end",
        severity="error" if reads and trainer else "warning",
        where=f"{data.folder}: {slot.name}",
        what=f"the last slot is state {slot.state}, not the target's end (state {layers}), and trainers "
        "in speculators' manner take the last slot as the teacher",
        effect=f"the drafter learns what the head makes of state {slot.state}: training accuracy looks "
        "fine, agreement with the target's own choices is low",
        fix=(
            f"capture state {layers} as the last slot: states "
            f"{[*(k for k in data.states or () if k != slot.state), layers]}",
            "if it was trained so: job=drafter_test job.truth=target_argmax measures the true agreement",
        ),
        evidence=MEASURED,
    )


def fitting(subject: Subject, data: Data, slots: tuple[DataSlot, ...]) -> Iterator[Finding]:
    """As many aux slots as fc takes."""
    drafter = subject.drafter
    takes = drafter.sizes.num_aux if drafter is not None else None
    aux = [slot for slot in slots if not slot.teacher]
    if drafter is None or takes is None or takes == len(aux):
        return
    if data.layout == "pt_shards" and len(slots) == takes:
        return  # a capture of the aux states alone, for testing
    yield Finding(
        name="data-slots-do-not-fit",
        severity="error",
        where=str(data.folder),
        what=f"fc takes {takes} aux states, the data has {len(aux)} beside the last slot"
        + (f": {in_words(data.aux)}" if data.aux else ""),
        effect="this drafter was not trained on this data, or was trained on a part of its slots",
        fix=("name the data that it was trained on",),
        evidence=MEASURED,
    )

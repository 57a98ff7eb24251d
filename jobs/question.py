"""One question to the diagnosis, and all that can be read before anything is searched.

What is read of a target is kept in a `Kit`, which several questions may share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.connect import check_fit
from eagle3.data import find_data
from eagle3.data.argmax import check_argmax
from eagle3.data.form import DataForm, RawSample
from eagle3.diagnosis.evidence import Inspected, SlotSeen
from eagle3.diagnosis.heard import Heard
from eagle3.doctor.subject import EngineAsked, read_drafter, read_target
from eagle3.engines import rule_for
from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.layers import LayerConvention
from eagle3.samples import LeftOut, Sample
from eagle3.search.texts import Text, load_texts
from eagle3.served import ENGINE_NAMES, ServedWiring, dated, served_wiring
from eagle3.slot_findings import findings, undecided
from eagle3.slot_verdicts import CONTRADICTED, Judged, judge
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import Embedding, Head, Wiring
from jobs.drafter_test import sample_digest
from jobs.first_layers import TEXTS
from jobs.inputs import check_captured
from jobs.inspecting import Inspector, TargetLayers, first_rows, short

ROWS_AT_ONCE = 8192  # of two tables that are compared
INSPECTED = 16  # texts whose slots are measured
Progress = Callable[[str, int, int], None]


class Kit:
    """What is read of a target once."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.target: TargetParts = load_target_parts(folder, device)
        self.layers = TargetLayers(self.target)
        described, _ = read_target(folder)
        self.classes = described.kinds


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question: a drafter, data, and what is known besides."""

    drafter: Path
    data: Path
    drafter_layout: str | None = None
    data_layout: str | None = None
    states: Sequence[int] | None = None  # canonical, of the data's slots
    damaged: str = "fail"
    argmax: Path | None = None  # the target's own choices, beside the data
    engine: EngineAsked | None = None
    ids: Sequence[int] | None = None  # as served instead of config.json's
    accept_length: float | None = None  # measured behind the engine
    heard: Heard | None = None  # of a running server, which counts what it accepts itself
    trained_accuracy: float | None = None
    steps: int = 4
    max_samples: int | None = None
    seed: int = 0
    finalists: int = 8
    start: Wiring | None = None
    fixed: Sequence[str] = ()
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    more_states: Sequence[tuple[int, ...]] = ()  # choices to be tried beside the search's own
    neighbours: bool = True  # make states one off those that are found, and try them


@dataclass(frozen=True, kw_only=True)
class Read:
    """What is known before anything is searched."""

    checkpoint: DrafterCheckpoint
    config: Mapping[str, Any]
    form: DataForm
    declared: Wiring
    declared_by: str
    served: ServedWiring | None


def check_engine(asked: Asked) -> None:
    """Raises BadInput where the engine that was named cannot be told apart, saying what to give."""
    engine = asked.engine
    if engine is None:
        if asked.ids is not None or asked.accept_length is not None:
            raise BadInput(
                "engine.ids and engine.accept_length are an engine's: name it (engine=…)"
            )
        return
    if engine.name not in ENGINE_NAMES:
        raise BadInput(
            f"engine.name={engine.name} serves no drafters; engines are {', '.join(ENGINE_NAMES)}"
        )
    known = dated(engine)
    try:
        rule_for(known.name, known.version, known.engine_class)
    except BadInput as error:
        raise BadInput(
            f"{error}; without it nobody knows what {engine.name} serves (on the command line "
            "engine_version=… engine_class=…)"
        ) from error


def read(asked: Asked, kit: Kit) -> Read:
    """Drafter, data and engine, as they declare themselves."""
    check_engine(asked)
    target = kit.target
    checkpoint = load_drafter(asked.drafter, target.device, layout=asked.drafter_layout)
    check_fit(checkpoint, target)
    form = find_data(
        asked.data,
        layout=asked.data_layout,
        states=asked.states,
        hidden=target.hidden,
        num_layers=target.num_layers,
    )
    check_captured(form.folder, target)
    config = read_json(asked.drafter / "config.json")
    declared, declared_by = declared_wiring(checkpoint, form, target.num_layers)
    served = None
    if asked.engine is not None:
        described, _ = read_drafter(asked.drafter)
        served = served_wiring(
            checkpoint.form,
            config,
            asked.engine,
            num_layers=target.num_layers,
            ids=asked.ids,
            drafter=described,
            same_embedding=same_table(checkpoint, target),
        )
    return Read(
        checkpoint=checkpoint,
        config=config,
        form=form,
        declared=declared.resolved(checkpoint.form),
        declared_by=declared_by,
        served=served,
    )


def same_table(checkpoint: DrafterCheckpoint, target: TargetParts) -> bool:
    """Whether the drafter's own embedding is the target's, so that either may be read."""
    own = checkpoint.embedding
    if own is None or own.shape != target.embedding.shape:
        return False
    pairs = zip(own.split(ROWS_AT_ONCE), target.embedding.split(ROWS_AT_ONCE), strict=True)
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def declared_wiring(
    checkpoint: DrafterCheckpoint, form: DataForm, num_layers: int
) -> tuple[Wiring, str]:
    """What the files declare: the checkpoint's ids, else the data's own order, else the default."""
    drafter = checkpoint.form
    embedding = Embedding.own if drafter.embedding.value == "own" else Embedding.target
    head = Head.own if drafter.head.value == "own" else Head.target
    ids, convention = drafter.layer_ids.value, drafter.layer_convention.value
    if ids is not None and convention is not None:
        stated = Wiring(layers=ids, convention=LayerConvention(convention))
        try:
            return (
                Wiring.of_states(stated.states(num_layers), embedding=embedding, head=head),
                f"ids {list(ids)} in config.json ({drafter.layer_ids.origin}), read as "
                f"'{convention}' ({drafter.layer_convention.origin})",
            )
        except BadInput:
            pass  # ids that name no state declare nothing; the doctor says so
    aux = [slot.state for i, slot in enumerate(form.slots) if i != form.teacher and not slot.normed]
    states = tuple(k for k in aux if k is not None)
    if len(states) == len(aux) == drafter.num_aux.value:
        fed, by = states, "the order of the data's slots"
    else:
        fed = tuple(sorted({2, num_layers // 2, max(0, num_layers - 3)}))
        by = "nobody: the default states of every ecosystem"
    return Wiring.of_states(fed, embedding=embedding, head=head), by


def inspect(asked: Asked, kit: Kit, known: Read) -> tuple[Inspected, DataForm, int]:
    """What the slots are, the data's form with what was found, and how many layers may be run."""
    form = known.form
    also = {k for states in asked.more_states for k in states} | set(known.declared.states())
    if known.served is not None and known.served.wiring is not None:
        also |= set(known.served.wiring.states())
    inspector = Inspector(kit.target, form, also=sorted(also), layers=kit.layers)
    notes: list[str] = []
    meter = inspector.meter(notes)
    kept: list[RawSample] = []
    has_argmax = False
    count = min(INSPECTED, asked.max_samples or INSPECTED)
    for path in form.files[:count]:
        try:
            sample = inspector.read(path)
        except BadInput:
            if asked.damaged == "skip":
                continue
            raise
        has_argmax = has_argmax or sample.target_argmax is not None
        meter.add(sample, short(path), through_head=True)
        if len(kept) < TEXTS and inspector.can_be_run(sample):
            kept.append(first_rows(sample))
    located, ran = inspector.locate(kept, meter)
    slots = judge(form, meter.figures, located, kit.target.num_layers, asked.seed)
    seen = tuple(seen_slot(slot) for slot in slots)
    shift = slots[form.teacher].data_shift
    if any(slot.state is None for slot in form.slots) and all(s.state is not None for s in seen):
        found = ",".join(str(s.state) for s in seen)
        notes.append(f"which states the slots hold was looked for; states=[{found}] spares that")
    inspected = Inspected(
        slots=seen,
        findings=tuple(findings(form, slots, meter.same, tail=0)),
        notes=(*notes, *undecided(form, slots, argmax=has_argmax or asked.argmax is not None)),
        shift=shift,
        in_answer=bool(shift) and all(slot.in_answer for slot in slots if slot.shift == shift),
    )
    return inspected, corrected(form, slots), ran.layers


def seen_slot(slot: Judged) -> SlotSeen:
    """A judged slot as the diagnosis takes it."""
    verdict, sentence = slot.verdict()
    return SlotSeen(
        index=slot.index,
        declared=slot.slot.state,
        found=slot.found,
        verdict=verdict,
        what=sentence,
        in_place=bool(slot.found) and slot.data_shift != 0 and slot.shift == 0,
    )


def corrected(form: DataForm, slots: Sequence[Judged]) -> DataForm:
    """The data's form with the states that its slots were found to be, and their side of the norm."""
    taken = []
    for slot, judged in zip(form.slots, slots, strict=True):
        state, normed = slot.state, slot.normed
        if judged.found and slot.state not in judged.found:
            state = judged.found[0]
        if judged.norm()[0] == CONTRADICTED:
            normed = not normed
        taken.append(replace(slot, state=state, normed=normed))
    return replace(form, slots=tuple(taken))


def texts_of(
    asked: Asked,
    kit: Kit,
    known: Read,
    form: DataForm,
    layers: int,
    progress: Progress,
    *,
    shift: int = 0,
    in_place: Collection[int] = (),
    in_answer: bool = False,
) -> tuple[list[Text], str, LeftOut, tuple[str, ...]]:
    """The texts with the states that a wiring at hand asks for, as far as they can be had."""
    target = kit.target
    if asked.argmax is not None:
        check_argmax(asked.argmax, target.fingerprint)
    wanted = {k for states in asked.more_states for k in states} | set(known.declared.states())
    if known.served is not None and known.served.wiring is not None:
        wanted |= set(known.served.wiring.states())
    stored = {slot.state for slot in form.slots if not slot.normed}
    missing = sorted(k for k in wanted - stored if 0 < k <= layers)
    notes: list[str] = []

    def made(texts: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        states = kit.layers.states(texts, layers)
        return [{k: text[k].to(target.device) for k in missing} for text in states]

    left_out, digest = LeftOut(), hashlib.sha256()

    def seen(sample: Sample) -> None:
        digest.update(sample_digest(sample))

    texts = load_texts(
        form,
        target,
        max_samples=asked.max_samples,
        damaged=asked.damaged,
        argmax=asked.argmax,
        steps=asked.steps,
        left_out=left_out,
        device=target.device,
        more_states=made if missing else None,
        shift=shift,
        in_place=in_place,
        in_answer=in_answer,
        seen=seen,
        progress=lambda done, total: progress("read", done, total),
    )
    if missing:
        named = ", ".join(map(str, missing))
        notes.append(f"state {named} is not stored: made by the target's own first layers")
    return texts, f"sha256:{digest.hexdigest()}", left_out, tuple(notes)

"""Layer ids: where the engine looks for them, which states it then feeds, and which were trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3.conventions import KEY, NESTED, Meaning, Rule
from eagle3.doctor.findings import MEASURED, Finding, in_words, listed
from eagle3.doctor.subject import Drafter, Engine, Subject
from eagle3.doctor.switches import line
from eagle3.engines import (
    LookUp,
    Served,
    default_states,
    id_states,
    ids_to_write,
    looked_up,
    served_states,
)
from eagle3.errors import BadInput

SHIFTED = (
    "the drafter is fed other states than in training: the server starts, the text is right, "
    "acceptance falls (a shift of one layer has cost between 0.1 of accept length and nearly all of it)"
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The canonical states that the drafter was, or is to be, trained on, and who says so."""

    states: tuple[int, ...]
    origin: str


def check(subject: Subject) -> Iterator[Finding]:
    """Ids against the engine, the training data and each other."""
    drafter, engine = subject.drafter, subject.engine
    stated = by_trainer(subject)
    fed = by_data(subject)
    if fed is not None and stated is not None and fed.states != stated.states:
        yield Finding(
            name="ids-not-those-of-the-data",
            severity="error",
            where=str(drafter.config_path) if drafter is not None else "trainer",
            what=f"the data's aux slots are {in_words(fed.states)} ({fed.origin}), but {stated.origin} "
            f"are {in_words(stated.states)}",
            effect="what the config says is not what was trained on; " + SHIFTED,
            fix=(*in_its_own_ids(subject, fed), "or capture the states that the ids mean"),
            evidence=MEASURED,
        )
    wanted = fed or stated
    yield from outside(subject, wanted)
    if engine is None:
        return
    if drafter is None:
        if wanted is not None:
            yield from expressible(subject, engine, wanted)
        return
    try:
        found = looked_up(engine.rule, drafter.config)
    except BadInput as error:
        yield no_list(drafter, engine, error)
        return
    if passed_over(found, engine.rule):
        yield not_looked_up(subject, drafter, engine, found, wanted)
        return
    try:
        served = served_states(engine.rule, found.ids, subject.num_layers)
    except BadInput:
        return  # it needs the target's number of layers, which the report says
    yield from problems(drafter, engine, found, served, wanted)
    yield from unordered(drafter, engine, found)
    if served.states is not None:
        yield from compared(subject, drafter, engine, found, served, wanted)
    yield from other_runner(drafter, engine, found)


def by_data(subject: Subject) -> Wanted | None:
    """The states of the data's aux slots, or those that were declared without data."""
    if subject.data is None and subject.states:
        takes = subject.drafter.sizes.num_aux if subject.drafter is not None else None
        teacher = takes is not None and len(subject.states) == takes + 1
        states = subject.states[:-1] if teacher else subject.states
        return Wanted(states=states, origin="declared by states=")
    if subject.data is None or not subject.data.aux:
        return None
    return Wanted(states=subject.data.aux, origin=f"declared by {subject.data.origin}")


def by_trainer(subject: Subject) -> Wanted | None:
    """What the config's ids mean to the trainer that wrote them; the file's own word goes first."""
    drafter, trainer = subject.drafter, subject.trainer
    form = drafter.form if drafter is not None else None
    if trainer is not None and trainer.rule.meaning is Meaning.derived:
        if subject.num_layers is None:
            return None
        states = default_states(trainer.rule, subject.num_layers)
        return Wanted(states=states, origin=f"the layers that {trainer.name} always takes")
    if form is None or form.layer_ids.value is None:
        return None
    ids = form.layer_ids.value
    origin = f"the ids {listed(ids)} in {form.layer_ids.origin}"
    plus = {"output": 1, "input": 0, "hf": 0}.get(str(form.layer_convention.value))
    if plus is not None:
        said = form.layer_convention.origin
        return Wanted(
            states=tuple(i + plus for i in ids), origin=f"{origin}, as {said} means them,"
        )
    if trainer is None:
        return None
    try:
        states = id_states(trainer.rule, ids, subject.num_layers)
    except BadInput:
        return None
    return Wanted(states=states, origin=f"{origin}, as {trainer.name} means them,")


def in_its_own_ids(subject: Subject, wanted: Wanted) -> tuple[str, ...]:
    """The wanted states as the config's own trainer writes them, where that can be said."""
    form = subject.drafter.form if subject.drafter is not None else None
    if form is None or form.layer_ids.value is None:
        return ("train on the states that it takes",)
    plus = {"output": 1, "input": 0, "hf": 0}.get(str(form.layer_convention.value))
    ids = None if plus is None else [k - plus for k in wanted.states]
    if ids is None and subject.trainer is not None:
        try:
            written = ids_to_write(subject.trainer.rule, wanted.states, subject.num_layers)
        except BadInput:
            written = None
        ids = list(written.ids) if written is not None and written.ids is not None else None
    if ids is None or min(ids) < 0:
        return ("leave the ids out of it, and write the engine's own for these states",)
    return (line(form.layer_ids.origin.split(": ")[-1], ids),)


def outside(subject: Subject, wanted: Wanted | None) -> Iterator[Finding]:
    """States that the target does not have."""
    layers = subject.num_layers
    if wanted is None or layers is None:
        return
    beyond = [k for k in wanted.states if not 0 <= k <= layers]
    if beyond:
        yield Finding(
            name="ids-outside-target",
            severity="error",
            where=wanted.origin,
            what=f"{in_words(beyond)} do not exist in a target of {layers} layers (0 to {layers})",
            effect="an engine stops, or feeds fewer states than fc takes",
            fix=("name the target that the drafter was trained for", "or correct the ids"),
            evidence=MEASURED,
        )


def no_list(drafter: Drafter, engine: Engine, error: BadInput) -> Finding:
    """Something else than whole numbers where the engine looks."""
    return Finding(
        name="ids-no-list",
        severity="error",
        where=str(drafter.config_path),
        what=str(error),
        effect="the engine stops at it, or takes its default states in silence",
        fix=(f"write a list of whole numbers in {engine.rule.places[0].path}",),
        evidence=MEASURED,
    )


def passed_over(found: LookUp, rule: Rule) -> bool:
    """Whether the config has ids and the engine finds none of them."""
    reads = rule.setting is None and rule.meaning is not Meaning.derived
    return found.ids is None and bool(ids_of(found)) and reads


def ids_of(found: LookUp) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Ids of an EAGLE-3 drafter that stand where this engine does not look."""
    return tuple((path, ids) for path, ids in found.ignored if path in (KEY, NESTED))


def not_looked_up(
    subject: Subject, drafter: Drafter, engine: Engine, found: LookUp, wanted: Wanted | None
) -> Finding:
    """Ids that nobody reads: the engine takes its default states."""
    path, ids = ids_of(found)[0]
    rule = engine.rule
    default = in_default_words(subject, rule)
    places = " or ".join(place.path for place in rule.places)
    lines: tuple[str, ...] = (line(rule.places[0].path, list(ids)),)
    if wanted is not None:
        lines = what_to_write(subject, engine, wanted)
    elif rule.meaning is not Meaning.output:
        lines = (*lines, "after checking what they mean there: python -m orchestrator layers …")
    return Finding(
        name="ids-not-looked-up",
        severity="error",
        where=f"{drafter.config_path}: {path}",
        what=f"config.json states the ids {listed(ids)} in {path}, but {engine.words} looks only in "
        f"{places}; it takes its default states{default}",
        effect="editing these ids changes nothing; unless the default states are the trained ones, "
        + SHIFTED,
        fix=lines,
        evidence=engine.evidence,
    )


def in_default_words(subject: Subject, rule: Rule) -> str:
    """' (states 2, 30 and 58)', where the number of layers is known."""
    if subject.num_layers is None:
        return " (2, n//2 and n-3)"
    states = default_states(rule, subject.num_layers)
    return f" ({in_words(states)})" if states else ", of which it has none"


def what_to_write(subject: Subject, engine: Engine, wanted: Wanted) -> tuple[str, ...]:
    """The lines that make the engine feed the wanted states, or why there are none."""
    try:
        written = ids_to_write(engine.rule, wanted.states, subject.num_layers)
    except BadInput as error:
        return (str(error),)
    if not written.possible:
        return (
            f"{in_words(wanted.states)} cannot be fed by {engine.words}: {written.why}",
            "train on states that it can capture, or serve with another engine",
        )
    if written.ids is None:
        return (f"nothing: {written.why}",)
    rule = engine.rule
    if rule.setting is not None:
        lines = [f"{rule.setting}: {list(written.ids)}"]
    else:
        lines = [line(rule.places[0].path, list(written.ids))]
    if written.needs:
        lines.append(f"and {written.needs}")
    return tuple(lines)


def problems(
    drafter: Drafter, engine: Engine, found: LookUp, served: Served, wanted: Wanted | None
) -> Iterator[Finding]:
    """What the engine makes of the ids that it finds, where that is not plain."""
    for problem in served.problems:
        patched = engine.rule.patch is not None and engine.rule.patch in problem
        known = engine.checkout is not None and not engine.checkout.known
        yield Finding(
            name="embedding-needs-a-patch" if patched else "ids-not-served",
            severity="warning" if patched and known else "error",
            where=f"{drafter.config_path}: {found.place or 'no ids'}",
            what=f"{engine.words}: {problem}",
            effect="without it the first forward of the target fails"
            if patched
            else "the engine stops, or feeds other states than the list says",
            fix=("apply the patch to the engine's source, and probe it",)
            if patched
            else ("write ids that it can serve; `python -m orchestrator layers` lists them",)
            if wanted is None
            else ("write the ids of the wanted states:", f"states {list(wanted.states)}"),
            evidence=engine.evidence,
        )


def unordered(drafter: Drafter, engine: Engine, found: LookUp) -> Iterator[Finding]:
    """Chunks come in ascending order whatever the list says."""
    ids = found.ids
    if ids is None or engine.rule.order != "sorted" or list(ids) == sorted(ids):
        return
    deliberate = engine.rule.meaning is Meaning.output_if_first_is_1 and sorted(ids)[0] == 1
    if deliberate:
        return
    yield Finding(
        name="ids-out-of-order",
        severity="error",
        where=f"{drafter.config_path}: {found.place}",
        what=f"the ids {listed(ids)} do not ascend, but {engine.words} captures in ascending order",
        effect="if training kept the list's order, every chunk of fc gets another chunk's state: "
        "acceptance about 0",
        fix=(
            f"train on ascending states, and write {listed(tuple(sorted(ids)))}",
            "or permute fc.weight's blocks of H columns in the same way",
        ),
        evidence=engine.evidence,
    )


def compared(
    subject: Subject,
    drafter: Drafter,
    engine: Engine,
    found: LookUp,
    served: Served,
    wanted: Wanted | None,
) -> Iterator[Finding]:
    """Served against trained, and against what fc takes."""
    assert served.states is not None
    if wanted is not None and tuple(served.states) != wanted.states:
        rule = engine.rule
        named = f"the ids {listed(found.ids)} in {found.place}" if found.ids else "no ids are found"
        if rule.setting is not None:
            named = f"without {rule.setting}"
        elif rule.meaning is Meaning.derived:
            named = "ids are not read"
        place = found.place or (rule.places[0].path if rule.places else "layer ids")
        yield Finding(
            name="ids-mean-other-states",
            severity="error",
            where=f"{drafter.config_path}: {place}",
            what=f"{named}: {engine.words} feeds {in_words(served.states)}, but the drafter was trained "
            f"on {in_words(wanted.states)} ({wanted.origin.rstrip(',')})",
            effect=SHIFTED,
            fix=what_to_write(subject, engine, wanted),
            evidence=engine.evidence,
        )
    elif wanted is None:
        yield from guessed(subject, drafter, engine, found, served)
    takes = drafter.sizes.num_aux
    if takes is not None and len(served.states) != takes and not served.problems:
        yield Finding(
            name="fc-width",
            severity="error",
            where=drafter.where,
            what=f"fc takes {takes} aux states, {engine.words} feeds {len(served.states)}: "
            f"{in_words(served.states)}",
            effect="the server stops at a shape error",
            fix=(f"write {takes} ids",)
            if wanted is None
            else what_to_write(subject, engine, wanted),
            evidence=engine.evidence,
        )


def guessed(
    subject: Subject, drafter: Drafter, engine: Engine, found: LookUp, served: Served
) -> Iterator[Finding]:
    """Ids whose trainer is not named: what those who write this layout usually mean by them."""
    ids, layers = found.ids, subject.num_layers
    if ids is None or layers is None or drafter.nested or served.states is None:
        return
    default = default_states(engine.rule, layers)
    meant = tuple(sorted(i + 1 for i in ids))
    if tuple(served.states) in (default, meant):
        return  # every default is the same states, whatever the ids
    as_input, as_output = tuple(default), tuple(k - 1 for k in default)
    if tuple(ids) == as_input and default:
        other, states = "vLLM's and EAGLE's default layers", default
    elif tuple(ids) == as_output and default:
        other, states = "the default layers of SpecForge, ModelOpt and TensorRT-LLM", default
    else:
        other, states = "ids as SpecForge, ModelOpt and TorchSpec write them", meant
    yield Finding(
        name="ids-of-another-convention",
        severity="warning",
        where=f"{drafter.config_path}: {found.place}",
        what=f"{engine.words} reads {listed(ids)} as {in_words(served.states)}; if they are {other}, "
        f"the drafter was trained on {in_words(states)}",
        effect=SHIFTED,
        fix=(
            *what_to_write(subject, engine, Wanted(states=states, origin="")),
            "trainer=NAME or data=PATH settles it",
        ),
        evidence="inferred: no field of config.json tells what the ids mean",
    )


def expressible(subject: Subject, engine: Engine, wanted: Wanted) -> Iterator[Finding]:
    """A run to come: whether the engine will be able to feed these states at all."""
    if subject.num_layers is None:
        return
    try:
        written = ids_to_write(engine.rule, wanted.states, subject.num_layers)
    except BadInput:
        return  # told as states outside the target
    if written.possible and not written.needs:
        return
    yield Finding(
        name="states-not-servable" if not written.possible else "embedding-needs-a-patch",
        severity="error" if not written.possible else "warning",
        where=wanted.origin,
        what=f"a drafter trained on {in_words(wanted.states)} cannot be served by {engine.words} "
        + (f": {written.why}" if not written.possible else f"without {written.needs}"),
        effect="it would have to be trained again, or be fed other states: " + SHIFTED,
        fix=what_to_write(subject, engine, wanted),
        evidence=engine.evidence,
    )


def other_runner(drafter: Drafter, engine: Engine, found: LookUp) -> Iterator[Finding]:
    """A release with two model runners that look in different places."""
    rule = engine.rule
    if rule.other_runner is None or found.ids is None:
        return
    other: Any = looked_up(rule, drafter.config, other_runner=True)
    if other.ids is not None:
        return
    shared = [p.path for p in rule.places if p.path in {o.path for o in rule.other_places}]
    yield Finding(
        name="ids-not-looked-up-by-other-runner",
        severity="note",
        where=f"{drafter.config_path}: {found.place}",
        what=f"{engine.words} finds the ids in {found.place}; its other model runner "
        f"({rule.other_runner}) does not look there",
        effect="with that runner it takes its default states",
        fix=(line(shared[0], list(found.ids)),) if shared else (),
        evidence=engine.evidence,
    )

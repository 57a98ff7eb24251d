"""Layer ids: where the engine looks for them, which states it then feeds, and which were trained on."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3.conventions import KEY, NESTED, Meaning, Rule
from eagle3.doctor.findings import MEASURED, Finding, in_words, listed
from eagle3.doctor.mending import patch_lines, right_ids, what_to_write
from eagle3.doctor.subject import Drafter, Engine, Subject
from eagle3.doctor.trained import Wanted, by_data, by_trainer, found_ids, takes_of, trained
from eagle3.engines import (
    LookUp,
    Served,
    default_states,
    ids_to_write,
    looked_up,
    served_states,
)
from eagle3.errors import BadInput

# Who keeps ids in a place, and what is to be added to them for a canonical state.
USUAL = {
    NESTED: (1, "outputs of layers, as SpecForge, ModelOpt and TorchSpec write them there"),
    KEY: (0, "inputs of layers, as speculators and vLLM write them there"),
}
ASK = "doctor … states=[…], with the states that it was trained on, tells the line to write"
SHIFTED = (
    "the drafter is fed other states than in training: the server starts, the text is right, "
    "acceptance falls (a shift of one layer has cost between 0.1 of accept length and nearly all of it)"
)


def check(subject: Subject) -> Iterator[Finding]:
    """Ids against the engine, the training data and each other."""
    drafter, engine = subject.drafter, subject.engine
    stated, fed = by_trainer(subject), by_data(subject)
    if fed is not None and subject.data is None:
        yield from counted(subject, fed)
    if fed is not None and stated is not None and fed.states != stated.states:
        yield from contradicted(subject, stated, fed)
    wanted = trained(subject)
    yield from outside(subject, wanted)
    if engine is None:
        return
    if drafter is None:
        if wanted is not None:
            yield from expressible(subject, engine, wanted)
        return
    try:
        found = found_ids(engine, drafter)
    except BadInput as error:
        yield no_list(subject, drafter, engine, error, wanted)
        return
    if passed_over(found, engine.rule):
        yield not_looked_up(subject, drafter, engine, found, wanted)
        return
    try:
        served = served_states(engine.rule, found.ids, subject.num_layers)
    except BadInput:
        return  # it needs the target's number of layers, which the report says
    yield from problems(subject, drafter, engine, found, served, wanted)
    yield from unordered(subject, drafter, engine, found, served, wanted)
    if served.states is not None:
        yield from compared(subject, drafter, engine, found, served, wanted)
    yield from other_runner(subject, drafter, engine, found, wanted or meant_there(served))


def meant_there(served: Served) -> Wanted | None:
    """The states that the engine feeds, as if they were wanted."""
    return None if served.states is None else Wanted(states=served.states, origin="")


def counted(subject: Subject, fed: Wanted) -> Iterator[Finding]:
    """States that were declared without data: as many as fc takes, the teacher's left out or not."""
    takes = takes_of(subject.drafter)
    if takes is None or len(fed.states) == takes:
        return
    assert subject.drafter is not None
    yield Finding(
        name="states-count",
        severity="error",
        where="states=",
        what=f"states= declares {len(fed.states)} states, fc takes {takes}",
        effect="what is said of the ids would be of another drafter than this one",
        fix=(f"states=[…] with {takes} canonical states, or {takes + 1} with the teacher's",),
        evidence=MEASURED,
    )


def contradicted(subject: Subject, stated: Wanted, fed: Wanted) -> Iterator[Finding]:
    """Ids that mean other states to their trainer than the data has.

    Where the engine makes the data's states of them they were written for it, and are right.
    """
    drafter, engine = subject.drafter, subject.engine
    if engine is not None and drafter is not None:
        try:
            found = found_ids(engine, drafter)
            served = served_states(engine.rule, found.ids, subject.num_layers)
        except BadInput:
            pass  # told elsewhere
        else:
            if found.place == stated.place and served.states == fed.states:
                return
    whose = "the data's" if subject.data is not None else "the drafter's"
    yield Finding(
        name="ids-not-those-of-the-data",
        severity="error",
        where=str(drafter.config_path) if drafter is not None else "trainer",
        what=f"{whose} aux slots are {in_words(fed.states)} ({fed.origin}), but {stated.origin} "
        f"are {in_words(stated.states)}",
        effect="what the config says is not what was trained on; " + SHIFTED,
        fix=(*right_ids(subject, fed), "or capture the states that the ids mean"),
        evidence=MEASURED,
    )


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


def no_list(
    subject: Subject, drafter: Drafter, engine: Engine, error: BadInput, wanted: Wanted | None
) -> Finding:
    """Something else than whole numbers where the engine looks."""
    rule = engine.rule
    place = rule.places[0].path if rule.places else str(rule.setting)
    return Finding(
        name="ids-no-list",
        severity="error",
        where=str(drafter.config_path),
        what=str(error),
        effect="the engine stops at it, or takes its default states in silence",
        fix=what_to_write(subject, engine, wanted)
        if wanted is not None
        else (f"write a list of whole numbers in {place}", ASK),
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
    if wanted is not None:
        lines = what_to_write(subject, engine, wanted)
    else:
        plus, whose = USUAL[path]
        usual = Wanted(states=tuple(i + plus for i in ids), origin="")
        lines = (
            f"if they are {whose}:",
            *what_to_write(subject, engine, usual),
            "otherwise: doctor … states=[…], with the states that it was trained on",
        )
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


def problems(
    subject: Subject,
    drafter: Drafter,
    engine: Engine,
    found: LookUp,
    served: Served,
    wanted: Wanted | None,
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
            effect="without it the first forward fails, or the state is another than in training"
            if patched
            else "the engine stops, or feeds other states than the list says",
            fix=(
                "apply the patch to the engine's source, and probe it",
                *patch_lines(subject, engine, served.states or ())[1:],
            )
            if patched
            else ("write ids that it can serve; `python -m orchestrator layers` lists them", ASK)
            if wanted is None
            else what_to_write(subject, engine, wanted),
            evidence=engine.evidence,
        )


def unordered(
    subject: Subject,
    drafter: Drafter,
    engine: Engine,
    found: LookUp,
    served: Served,
    wanted: Wanted | None,
) -> Iterator[Finding]:
    """Chunks come in ascending order whatever the list says."""
    ids = found.ids
    if ids is None or engine.rule.order != "sorted" or list(ids) == sorted(ids):
        return
    ascending = wanted or meant_there(served)
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
            *(what_to_write(subject, engine, ascending) if ascending is not None else ()),
            "where training kept the list's order: permute fc.weight's blocks of H columns likewise",
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
        if rule.setting is not None and not found.ids:
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
        stated = by_trainer(subject)
        if stated is not None:
            yield two_readings(subject, drafter, engine, found, served, stated)
        else:
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
            fix=(f"write {takes} ids, of the states that it was trained on", ASK)
            if wanted is None
            else what_to_write(subject, engine, wanted),
            evidence=engine.evidence,
        )


def two_readings(
    subject: Subject,
    drafter: Drafter,
    engine: Engine,
    found: LookUp,
    served: Served,
    stated: Wanted,
) -> Finding:
    """Ids in a place that the trainer and the engine share, and that mean two things."""
    assert served.states is not None
    return Finding(
        name="ids-have-two-readings",
        severity="warning",
        where=f"{drafter.config_path}: {found.place}",
        what=f"{stated.whose} and {engine.words} keep ids in the same place: as {stated.whose} means "
        f"{listed(found.ids)}, the drafter was trained on {in_words(stated.states)}; as the engine "
        f"reads them, it feeds {in_words(served.states)}; nothing tells whether they were written "
        "for it already",
        effect="if they stand as the trainer wrote them, " + SHIFTED,
        fix=(
            f"where they stand as {stated.whose} wrote them:",
            *what_to_write(subject, engine, stated),
            "where they were written for this engine already, they are right: "
            f"doctor … states={listed(served.states)}",
        ),
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
            "where they were written for this engine already, they are right: "
            f"doctor … states={listed(served.states)}",
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


def other_runner(
    subject: Subject, drafter: Drafter, engine: Engine, found: LookUp, wanted: Wanted | None
) -> Iterator[Finding]:
    """A release with two model runners that look in different places."""
    rule = engine.rule
    if rule.other_runner is None or found.ids is None:
        return
    try:
        other = looked_up(rule, drafter.config, other_runner=True)
    except BadInput:
        return  # no list where only the other one looks: told as a fault of the file
    if other.ids is not None:
        return
    shared = rule.places[0].path in {place.path for place in rule.other_places}
    yield Finding(
        name="ids-not-looked-up-by-other-runner",
        severity="note",
        where=f"{drafter.config_path}: {found.place}",
        what=f"{engine.words} finds the ids in {found.place}; its other model runner "
        f"({rule.other_runner}) does not look there",
        effect="with that runner it takes its default states",
        fix=what_to_write(subject, engine, wanted) if shared and wanted is not None else (),
        evidence=engine.evidence,
    )

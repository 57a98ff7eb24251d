"""The lines that mend layer ids: what to write, what to take out, how to ask again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.conventions import KEY, NESTED
from eagle3.doctor.findings import in_words, listed
from eagle3.doctor.subject import Engine, Subject
from eagle3.doctor.switches import at, line, removal
from eagle3.doctor.trained import PLUS, Wanted, path_of
from eagle3.engine_patches import SETTING, unpatched, way
from eagle3.engines import ids_to_write
from eagle3.errors import BadInput

COUNT = "num_aux_hidden_states"


def what_to_write(subject: Subject, engine: Engine, wanted: Wanted) -> tuple[str, ...]:
    """The lines that make the engine feed the wanted states, or why there are none.

    What to write, what to take out, what else that needs, and how to ask again.
    """
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
    rule, drafter = engine.rule, subject.drafter
    needs = patch_lines(subject, engine, wanted.states) if written.needs else ()
    if rule.setting is not None:
        last = again(subject, wanted, **{rule.setting.split()[0]: list(written.ids)})
        return (f"{rule.setting}: {list(written.ids)}", *needs, last)
    place = rule.places[0].path
    lines = [line(place, list(written.ids))]
    if drafter is None:
        return (*lines, *needs)
    counts = engine.serving.num_aux if engine.serving is not None else ()
    if len(wanted.states) != 3 and COUNT in counts and place not in counts:
        lines.append(line(COUNT, len(wanted.states)))
    return (*lines, *others_removed(drafter.config, place), *needs, again(subject, wanted))


def patch_lines(subject: Subject, engine: Engine, states: Sequence[int]) -> tuple[str, ...]:
    """The patch that an engine needs for these states, how it is had, and which release needs none."""
    rule, klass = engine.rule, engine.asked.engine_class
    had = way(rule, engine.asked.version, klass)
    runs = f"{had} (in job=engine_probe and job=engine_bench)" if had.startswith(SETTING) else had
    lines = [f"and {rule.patch}", f"that patch: {runs}"]
    try:
        newer = unpatched(rule, klass, sorted(states), subject.num_layers)
    except BadInput:
        newer = None  # without the number of layers no ids can be named
    if newer is not None:
        lines.append(
            f"or, with no patch, {engine.name} {newer[0]} or newer with the ids {listed(newer[1])}"
        )
    return tuple(lines)


def right_ids(subject: Subject, wanted: Wanted) -> tuple[str, ...]:
    """The ids of the wanted states: as the engine reads them, else as their own trainer does."""
    drafter, engine = subject.drafter, subject.engine
    form = drafter.form if drafter is not None else None
    if drafter is None or form is None or form.layer_ids.value is None:
        return ("train on the states that it takes",)
    if engine is not None and engine.rule.places:
        return what_to_write(subject, engine, wanted)
    place = path_of(form.layer_ids.origin)
    plus = PLUS.get(str(form.layer_convention.value)) if place == KEY else None
    ids = None if plus is None else [k - plus for k in wanted.states]
    if ids is None and subject.trainer is not None:
        try:
            written = ids_to_write(subject.trainer.rule, wanted.states, subject.num_layers)
        except BadInput:
            written = None
        ids = list(written.ids) if written is not None and written.ids is not None else None
    if ids is None or min(ids) < 0:
        return (
            *others_removed(drafter.config, None),
            "and write the engine's own for these states",
            again(subject, wanted),
        )
    return (line(place, ids), *others_removed(drafter.config, place), again(subject, wanted))


def others_removed(config: Mapping[str, Any], kept: str | None) -> tuple[str, ...]:
    """The lines to take out: whatever stands in another place than the one that is written."""
    places = [path for path in (KEY, NESTED) if path != kept]
    return tuple(removal(path) for path in places if at(dict(config), path) is not None)


def again(subject: Subject, wanted: Wanted, **flags: Any) -> str:
    """How to ask again once it is written, so that the new ids are not taken for the trainer's."""
    asked = "then: doctor …"
    if flags:
        asked += f" engine_flags='{json.dumps(flags)}'"
    if subject.data is None:
        return f"{asked} states={listed(wanted.states)}"
    data = subject.data
    declared = f" states={listed(data.states)}" if data.origin == "states=" else ""
    return f"{asked} data={data.folder}{declared}"

"""What a drafter was trained on: who says so, and whether that is beyond doubt."""

from __future__ import annotations

from dataclasses import dataclass

from eagle3.conventions import KEY, Meaning
from eagle3.doctor.findings import listed
from eagle3.doctor.subject import Drafter, Engine, Subject
from eagle3.engines import LookUp, default_states, id_states, looked_up, served_states
from eagle3.errors import BadInput

PLUS = {"output": 1, "input": 0, "hf": 0}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The canonical states that the drafter was, or is to be, trained on, and who says so."""

    states: tuple[int, ...]
    origin: str
    place: str | None = None  # the dotted path of the ids that say so
    whose: str = ""  # whose convention they are read in


def trained(subject: Subject) -> Wanted | None:
    """What the drafter was trained on, where that is beyond doubt."""
    fed, stated = by_data(subject), by_trainer(subject)
    if fed is not None or stated is None:
        return fed
    return None if in_doubt(subject, stated) else stated


def by_data(subject: Subject) -> Wanted | None:
    """The states of the data's aux slots, or those that were declared without data."""
    if subject.data is None and subject.states:
        takes = takes_of(subject.drafter)
        teacher = takes is not None and len(subject.states) == takes + 1
        states = subject.states[:-1] if teacher else subject.states
        return Wanted(states=states, origin="declared by states=")
    if subject.data is None or not subject.data.aux:
        return None
    return Wanted(states=subject.data.aux, origin=f"declared by {subject.data.origin}")


def by_trainer(subject: Subject) -> Wanted | None:
    """What the config's ids mean to the trainer that wrote them; the file's own word goes first.

    Ids that stand where that trainer does not keep its own were put there for an engine: they
    declare nothing.
    """
    drafter, trainer = subject.drafter, subject.trainer
    form = drafter.form if drafter is not None else None
    if trainer is not None and trainer.rule.meaning is Meaning.derived:
        if subject.num_layers is None:
            return None
        states = default_states(trainer.rule, subject.num_layers)
        return Wanted(states=states, origin=f"the layers that {trainer.name} always takes")
    if form is None or form.layer_ids.value is None:
        return None
    ids, place = form.layer_ids.value, path_of(form.layer_ids.origin)
    origin = f"the ids {listed(ids)} in {form.layer_ids.origin}"
    plus = PLUS.get(str(form.layer_convention.value))
    if plus is not None and place == KEY:
        whose, states = form.layer_convention.origin, tuple(i + plus for i in ids)
    elif trainer is not None and place in [known.path for known in trainer.rule.places]:
        try:
            whose, states = trainer.name, id_states(trainer.rule, ids, subject.num_layers)
        except BadInput:
            return None
    else:
        return None
    return Wanted(
        states=states, origin=f"{origin}, as {whose} means them,", place=place, whose=whose
    )


def in_doubt(subject: Subject, stated: Wanted) -> bool:
    """Whether the ids stand where the engine reads them too, and mean other states to it.

    They may be the trainer's own, or have been rewritten for the engine since: no field tells.
    """
    drafter, engine = subject.drafter, subject.engine
    if drafter is None or engine is None or stated.place is None:
        return False
    try:
        found = found_ids(engine, drafter)
        served = served_states(engine.rule, found.ids, subject.num_layers)
    except BadInput:
        return False
    return found.place == stated.place and served.states != stated.states


def found_ids(engine: Engine, drafter: Drafter) -> LookUp:
    """The ids that the engine takes, from config.json or from its server's setting. Raises BadInput."""
    found = looked_up(engine.rule, drafter.config)
    if engine.rule.setting is None:
        return found
    name = engine.rule.setting.split()[0]
    given = engine.asked.flags.get(name)
    if given is None:
        return found
    if not isinstance(given, list | tuple) or not all(type(i) is int for i in given):
        raise BadInput(f"{name} in engine_flags is {given!r}, not a list of layer ids")
    return LookUp(ids=tuple(given), place=f"engine_flags: {name}", ignored=found.ignored)


def takes_of(drafter: Drafter | None) -> int | None:
    """How many aux states fc takes: by its tensor, else by the config."""
    if drafter is None:
        return None
    fc, width = drafter.tensors.get("fc.weight"), drafter.sizes.target_hidden
    if fc is not None and len(fc.shape) == 2 and width and fc.shape[1] % width == 0:
        return fc.shape[1] // width or None
    return drafter.sizes.num_aux


def path_of(origin: str) -> str:
    """The dotted path of a setting that is from config.json."""
    return origin.split(": ")[-1]

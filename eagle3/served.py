"""What an engine really runs of a drafter: the wiring that follows from its tables and config.json.

The states come from the ids that the engine finds (`eagle3.engines`), every switch from what it does
with a drafter (`eagle3.serving`). Each one that is not as the checkpoint declares it is given a reason.
What a release does not load at all has no wiring. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.checkouts import known_checkout
from eagle3.conventions import ENGINES, KEY, NESTED, Evidence, Meaning, Rule
from eagle3.doctor.findings import in_words, listed
from eagle3.doctor.flat import flat_config
from eagle3.doctor.report import architecture_of
from eagle3.doctor.server import flags_of
from eagle3.doctor.subject import LAYER, Drafter, EngineAsked, on_host
from eagle3.engines import LookUp, Served, looked_up, rule_for, served_states
from eagle3.errors import BadInput
from eagle3.form import DrafterForm
from eagle3.served_start import start_up
from eagle3.served_switches import (
    ENGINE_NAMES,
    KNOWS_NESTED,
    Looked,
    Seen,
    Stop,
    is_nested,
    plain_drafter,
    switches,
)
from eagle3.serving import Serving, serving_for
from eagle3.wiring import Embedding, Head, Wiring

__all__ = ["ENGINE_NAMES", "ServedWiring", "as_read", "engine_words", "is_nested", "served_wiring"]

# What vLLM takes from the top level of a config in speculators' layout; the rest is the layer's.
SPECULATORS_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    KEY,
)


@dataclass(frozen=True, kw_only=True)
class ServedWiring:
    """What an engine runs. `wiring` None: it does not start, or feeds the drafter nothing usable.

    `run` is what it would run if it did start: every switch as the engine has it, and the states that
    it feeds, which may be fewer than fc takes. Where `states` is None they are not known, and `run` has
    none: whoever scores it puts those in that he means, the trained or the declared ones. It is None
    only where the release has no place at all for such a drafter, and `wiring` wherever that is not.
    """

    wiring: Wiring | None  # resolved by the form
    run: Wiring | None  # the same, also where it does not start
    states: tuple[int, ...] | None  # canonical, in the order of fc's chunks
    ids: tuple[int, ...] | None  # None: it finds none and takes its default states
    place: str | None  # where it finds them
    because: Mapping[str, str]  # "states", and each switch that is not as declared → why
    evidence: Evidence  # the weaker one of the two tables' rows
    stops: tuple[Stop, ...]  # why it does not start, with what mends that; empty: it does
    problems: tuple[str, ...]  # the same in words; then what else is not as it seems
    notes: tuple[str, ...]
    engine: str  # in words: "SGLang 0.5.12, class kimi_k25"
    measured: bool = False  # the states are those that a running server returned, not the tables'


def served_wiring(
    form: DrafterForm,
    config: Mapping[str, Any],
    asked: EngineAsked,
    *,
    num_layers: int,
    ids: Sequence[int] | None = None,
    drafter: Drafter | None = None,
    same_embedding: bool = False,
) -> ServedWiring:
    """What the engine that is asked about runs of a drafter with this config.json.

    `ids` are served instead of what config.json holds where the engine looks. `drafter` tells what the
    file's tensors are called; without it the file is taken to be as the form says. `same_embedding`:
    the file's table is the target's, so whose is read makes no difference, and it stays as declared.
    Raises BadInput for an engine that is not known, and where a version or class is needed that is not
    given.
    """
    asked = dated(asked)
    rule = rule_for(asked.name, asked.version, asked.engine_class)
    if asked.name not in ENGINE_NAMES:
        raise BadInput(
            f"{asked.name} trains drafters and serves none; engines are {', '.join(ENGINES)}"
        )
    engine = engine_words(asked)
    seen = Seen()
    seen.notes += rule.notes
    read = with_ids(as_read(config, asked.name, form, seen), rule, ids)
    found, fed = fed_by(seen, rule, read, asked, ids, num_layers)
    states(seen, engine, rule, found, fed, form, config)
    other_runner(seen, rule, read, found, num_layers)
    serving = served_by(asked, config, form, seen)
    run = None
    if serving is not None:
        seen.notes += [note for note in serving.notes if not note.endswith("this holds")]
        looked = Looked(
            form=form,
            config=read,
            whole=config,
            asked=asked,
            serving=serving,
            engine=engine_words(replace(asked, engine_class=None)),
            drafter=drafter,
        )
        switches(seen, start_up(seen, looked))
        if same_embedding and form.embedding.value == "own":
            seen.switches["embedding"] = Embedding.own
        run = Wiring.of_states(fed.states or (), **seen.switches).resolved(form)
    return ServedWiring(
        wiring=None if seen.stops else run,
        run=run,
        states=fed.states,
        ids=found.ids,
        place=found.place,
        because=reasons(seen, run, form),
        evidence=rule.evidence if serving is None else weaker(rule.evidence, serving.evidence),
        stops=tuple({stop.why: stop for stop in seen.stops}.values()),
        problems=tuple(
            dict.fromkeys((*(stop.why for stop in seen.stops), *fed.problems, *seen.problems))
        ),
        notes=tuple(dict.fromkeys((*fed.notes, *seen.notes))),
        engine=engine,
    )


def fed_by(
    seen: Seen,
    rule: Rule,
    read: Mapping[str, Any],
    asked: EngineAsked,
    ids: Sequence[int] | None,
    num_layers: int,
) -> tuple[LookUp, Served]:
    """The ids that the engine finds and the states that they bring; none where they are no ids."""
    try:
        found = found_ids(rule, read, asked, ids)
        return found, served_states(rule, found.ids, num_layers)
    except BadInput as error:
        seen.stop(str(error), switch="states")
        return LookUp(ids=None, place=None), Served(states=None)


def reasons(seen: Seen, run: Wiring | None, form: DrafterForm) -> dict[str, str]:
    """Why the states are what they are, and each switch that is not run as declared."""
    differs = {"states"}
    if run is not None:
        declared = Wiring.of_states(
            run.states(),
            embedding=Embedding.own if form.embedding.value == "own" else Embedding.target,
            head=Head.target if form.head.value == "target" else Head.own,
        ).resolved(form)
        differs |= set(run.differing(declared))
    return {name: why for name, why in seen.because.items() if name in differs}


def dated(asked: EngineAsked) -> EngineAsked:
    """With the release of its checkout, where only that is given."""
    if asked.version is not None or asked.checkout is None:
        return asked
    found = known_checkout(on_host(asked.checkout))
    if found.ecosystem != asked.name:
        return asked
    return replace(asked, version=found.releases[-1] if found.releases else found.nearest)


def engine_words(asked: EngineAsked) -> str:
    """'SGLang 0.5.12, class kimi_k25'."""
    named = " ".join(filter(None, (ENGINE_NAMES.get(asked.name, asked.name), asked.version)))
    return f"{named}, class {asked.engine_class}" if asked.engine_class else named


def weaker(one: Evidence, other: Evidence) -> Evidence:
    """The weaker of two grounds for a statement."""
    return max(one, other, key=list(Evidence).index)


def as_read(
    config: Mapping[str, Any], engine: str, form: DrafterForm, seen: Seen | None = None
) -> dict[str, Any]:
    """The flat config that the engine sees; of one that it does not load, that of a flat copy."""
    if not is_nested(config):
        return dict(config)
    layer = config.get(LAYER)
    inner = dict(layer) if isinstance(layer, Mapping) else {}
    if engine in KNOWS_NESTED:
        kept = {key: config[key] for key in SPECULATORS_KEYS if key in config}
        if kept.get("target_hidden_size", 0) is None:
            del kept["target_hidden_size"]
        return {**inner, **kept}
    if seen is not None:
        seen.problems.append(
            f"config.json is in speculators' layout, which {ENGINE_NAMES[engine]} does not load; what "
            "is said here is of a flat copy of it"
        )
    flat = flat_config(plain_drafter(config, form), form)
    eagle = config.get("eagle_config")
    if isinstance(eagle, Mapping) and KEY in eagle:
        flat["eagle_config"] = {**flat.get("eagle_config", {}), KEY: eagle[KEY]}
    if KEY in config:  # where it does not look; kept so that this can be said
        flat[KEY] = config[KEY]
    return flat


def with_ids(config: Mapping[str, Any], rule: Rule, ids: Sequence[int] | None) -> dict[str, Any]:
    """A config with these ids where the engine looks first; unchanged for None."""
    if ids is None or not rule.places:
        return dict(config)
    return written_at(config, rule.places[0].path, list(ids))


def written_at(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A config with a value at a dotted path."""
    outer, _, key = path.rpartition(".")
    if not outer:
        return {**config, key: value}
    block = config.get(outer)
    return {**config, outer: {**(block if isinstance(block, Mapping) else {}), key: value}}


def found_ids(
    rule: Rule, config: Mapping[str, Any], asked: EngineAsked, ids: Sequence[int] | None
) -> LookUp:
    """The ids that the engine takes. Raises BadInput where a place that it reads holds no list."""
    if rule.setting is None:
        return looked_up(rule, config)
    name = rule.setting.split()[0]
    found = looked_up(rule, config)
    given = flags_of(asked.flags).get(name) if ids is None else list(ids)
    if given is None:
        return found
    if not isinstance(given, list | tuple) or not all(type(i) is int for i in given):
        raise BadInput(f"{name} in engine_flags is {given!r}, not a list of layer ids")
    return LookUp(ids=tuple(given), place=name, ignored=found.ignored)


def states(
    seen: Seen,
    engine: str,
    rule: Rule,
    found: LookUp,
    fed: Served,
    form: DrafterForm,
    config: Mapping[str, Any],
) -> None:
    """Which states are fed and why; whether fc takes as many."""
    known = f"({rule.evidence.value}: {rule.source})"
    if fed.states is None:
        for why in fed.problems or (() if seen.stops else ("no aux state is captured",)):
            seen.stop(why, switch="states")
        return
    fed_words = in_words(fed.states)
    if rule.meaning is Meaning.derived:
        why = f"{engine} reads no ids and always feeds {fed_words}"
    elif not found.ids:
        places = [place.path for place in rule.places]
        more = f" (nor in {len(places) - 1} other places)" if len(places) > 1 else ""
        where = rule.setting or f"{places[0]}{more}"
        why = f"{engine} finds no ids in {where} and feeds its default, {fed_words}"
    else:
        why = f"{engine} reads the ids {listed(found.ids)} ({found.place}) as {fed_words}"
    passed = passed_over(config, found)
    why += f"; it does not look at {' and '.join(passed)}" if passed else ""
    seen.because["states"] = f"{why} {known}"
    takes = form.num_aux.value
    if len(fed.states) != takes:
        seen.stop(
            f"fc takes {takes} aux states, {engine} feeds {len(fed.states)} ({fed_words}): it stops at "
            "a shape error",
            switch="states",
        )


def passed_over(config: Mapping[str, Any], found: LookUp) -> list[str]:
    """Ids of config.json that the engine does not take, as '[2,30,58] in eagle_config.…'."""
    eagle = config.get("eagle_config")
    there = {
        KEY: config.get(KEY),
        NESTED: eagle.get(KEY) if isinstance(eagle, Mapping) else None,
    }
    return [
        f"{listed(ids)} in {path}"
        for path, ids in there.items()
        if isinstance(ids, list) and ids and path != found.place
    ]


def other_runner(
    seen: Seen, rule: Rule, config: Mapping[str, Any], found: LookUp, num_layers: int
) -> None:
    """A release's second model runner may find no ids, or others."""
    if rule.other_runner is None:
        return
    try:
        other = looked_up(rule, config, other_runner=True)
    except BadInput:
        return  # no list where only that one looks
    if other.ids == found.ids:
        return
    fed = served_states(rule, other.ids, num_layers)
    how = "its default" if other.ids is None else f"of the ids {listed(other.ids)} in {other.place}"
    seen.notes.append(
        f"the other model runner of this release ({rule.other_runner}) feeds "
        f"{in_words(fed.states)}, {how}"
    )


def served_by(
    asked: EngineAsked, config: Mapping[str, Any], form: DrafterForm, seen: Seen
) -> Serving | None:
    """The row for this kind of drafter; None where the release has no place for it."""
    architecture = architecture_of(asked.name, plain_drafter(config, form))
    try:
        return serving_for(asked.name, asked.version, architecture)
    except BadInput as error:
        seen.stop(str(error), left="serve it with a newer release")
        return None

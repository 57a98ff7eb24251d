"""All checks on one subject: what is named is read once, every family of checks is asked."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from eagle3.checkouts import known_checkout
from eagle3.conventions import ENGINES, READ, RULES, TRAINERS, Meaning
from eagle3.doctor import data as data_checks
from eagle3.doctor import (
    ids,
    norms,
    parts,
    rope,
    server,
    switches,
    tensors,
    trainer,
    vocabulary,
)
from eagle3.doctor.data_files import read_data
from eagle3.doctor.findings import Finding, Report, in_words, listed, ordered
from eagle3.doctor.subject import (
    Drafter,
    Engine,
    EngineAsked,
    Subject,
    Target,
    Trainer,
    drafter_of,
    on_host,
    read_config,
    read_drafter,
    read_target,
)
from eagle3.doctor.trained import found_ids, trained
from eagle3.engines import plain_class, rule_for, served_states
from eagle3.errors import BadInput
from eagle3.serving import Serving, serving_for

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    tensors.check,
    ids.check,
    vocabulary.check,
    switches.check,
    norms.check,
    parts.check,
    rope.check,
    server.check,
    data_checks.check,
    trainer.check,
)
T = TypeVar("T")
QWEN3_IN_VLLM = "Eagle3Qwen3ForCausalLM"


def examine(
    drafter: Path | None = None,
    target: Path | None = None,
    data: Path | None = None,
    *,
    engine: EngineAsked | None = None,
    trainer: str | None = None,
    states: Sequence[int] | None = None,
) -> Report:
    """Everything that headers and configs tell of these folders, an engine and a trainer.

    `trainer` is an ecosystem or the path of a draft model's config. `states` are the canonical states
    of the data's slots, or, without data, those that the drafter was trained on. Raises BadInput for
    what is not there, or is no engine or trainer; what is there and damaged is a finding.
    """
    findings: list[Finding] = []
    left: list[str] = []
    found_drafter: Drafter | None = None
    found_target: Target | None = None
    found_data = None
    if drafter is not None:
        found_drafter, more = read_drafter(drafter)
        findings += more
        weights = found_drafter.weights
        if weights is not None and weights.kind == "bin":
            left.append(f"{weights.files[0]}: a pickle, so neither names nor values of its tensors")
    if target is not None:
        found_target, more = read_target(target)
        findings += more
        if not found_target.examined and not more:
            left.append(f"{target}: no safetensors, so neither embedding nor head of the target")
    if data is not None:
        found_data, more, not_read = read_data(data, states)
        findings += more
        left += not_read
    by_config, named = trainer_of(trainer)
    if by_config is not None:
        if found_drafter is not None:
            raise BadInput(
                f"trainer={trainer} is the config of a run to come; leave drafter= out, or name the "
                f"trainer that drafter= is of: {', '.join(TRAINERS)}"
            )
        found_drafter = by_config
    found_engine, more = engine_of(engine, found_drafter, found_target)
    findings += more
    subject = Subject(
        drafter=found_drafter,
        target=found_target,
        data=found_data,
        engine=found_engine,
        trainer=named,
        states=tuple(states) if states and data is None else None,
    )
    outside = [k for k in states or () if not 0 <= k <= (subject.num_layers or k)]
    if outside:
        raise BadInput(
            f"states={listed(states)} names state {outside[0]}, but the target has {subject.num_layers} "
            f"decoder layers, so its states are 0 to {subject.num_layers}"
        )
    failed: list[str] = []
    for check in CHECKS:
        findings += guarded(check, subject, failed)
    return Report(
        subject=summary(subject),
        form=found_drafter.form.plain() if found_drafter and found_drafter.form else None,
        inventory=tensors.inventory(found_drafter),
        findings=ordered(findings),
        facts=tuple(guarded(facts, subject, failed)),
        not_examined=(*left, *guarded(not_told, subject, failed)),
        failed=tuple(failed),
    )


def guarded(part: Callable[[Subject], Iterator[T]], subject: Subject, failed: list[str]) -> list[T]:
    """What a part of the report yields; that it breaks down is noted and hides no other part."""
    yielded: list[T] = []
    try:
        yielded.extend(part(subject))
    except Exception as error:  # noqa: BLE001 -- a fault in here is told beside what was found
        failed.append(broken(part, error))
    return yielded


def broken(part: Callable[[Subject], Iterator[T]], error: Exception) -> str:
    """What is said of a part that broke down."""
    family = part.__module__.rpartition(".")[2]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"the checks of {family} broke down, so what they would have found is not told: "
        f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    )


def trainer_of(given: str | None) -> tuple[Drafter | None, Trainer | None]:
    """A trainer by name, or a draft model's config and whose it is."""
    if given is None:
        return None, None
    if given in TRAINERS:
        return None, Trainer(name=given, rule=rule_for(given, newest(given), None))
    path = on_host(given)
    if not path.is_file():
        near = difflib.get_close_matches(given, TRAINERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(
            f"trainer={given} is neither {', '.join(TRAINERS)} nor a file on this host{hint}"
        )
    draft = drafter_of(path, read_config(path), None)
    name = "speculators" if draft.nested else "specforge"
    return draft, Trainer(name=name, rule=rule_for(name, newest(name), None))


def newest(trainer: str) -> str | None:
    """The release of a trainer that is meant where none is named."""
    return READ[trainer][1] if trainer in READ else None


def engine_of(
    asked: EngineAsked | None, drafter: Drafter | None, target: Target | None
) -> tuple[Engine | None, list[Finding]]:
    """The engine with its rows of the tables. Raises BadInput for an engine that is not known."""
    if asked is None:
        return None, []
    if asked.name not in ENGINES:
        near = difflib.get_close_matches(asked.name, ENGINES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ENGINES)}"
        raise BadInput(f"there is no engine '{asked.name}'; {hint}")
    checkout = None
    if asked.checkout is not None:
        checkout = known_checkout(on_host(asked.checkout))
        if asked.version is None and checkout.ecosystem == asked.name:
            version = checkout.releases[-1] if checkout.releases else checkout.nearest
            asked = replace(asked, version=version)
    if asked.engine_class is None and target is not None:
        asked = replace(asked, engine_class=class_of(asked.name, target))
    rule = rule_for(asked.name, asked.version, asked.engine_class)
    findings: list[Finding] = []
    serving: Serving | None = None
    if drafter is not None:
        try:
            serving = serving_for(asked.name, asked.version, architecture_of(asked.name, drafter))
        except BadInput as error:
            findings.append(no_place(error, drafter))
    engine = Engine(asked=asked, rule=rule, serving=serving, checkout=checkout)
    return engine, findings


def class_of(engine: str, target: Target) -> str | None:
    """The target's class, as the table of rules names it, else its architecture."""
    known = {plain_class(name) for row in RULES if row.ecosystem == engine for name in row.classes}
    own = [kind for kind in target.kinds if plain_class(kind) in known]
    return own[0] if own else (target.kinds[-1] if target.kinds else None)


def architecture_of(engine: str, drafter: Drafter) -> str | None:
    """The class that the engine will take the drafter for."""
    if engine == "vllm" and drafter.nested:
        kind = drafter.block.get("model_type", "qwen3")
        return QWEN3_IN_VLLM if kind == "qwen3" else None
    return drafter.architecture


def no_place(error: BadInput, drafter: Drafter) -> Finding:
    """A drafter that the release cannot serve."""
    return Finding(
        name="drafter-not-served",
        severity="error",
        where=str(drafter.config_path),
        what=str(error),
        effect="it does not load there",
        fix=("serve with a newer release",),
        evidence="read: the table of eagle3.serving",
    )


def summary(subject: Subject) -> dict[str, str]:
    """What was examined, a line each."""
    said: dict[str, str] = {}
    drafter, target, data = subject.drafter, subject.target, subject.data
    if drafter is not None:
        form = drafter.form
        kind = f" ({form.layout.value} layout)" if form is not None else ""
        said["drafter"] = f"{drafter.where}{kind}"
    if target is not None:
        layers = f"{target.num_layers} layers" if target.num_layers else "layers not stated"
        said["target"] = f"{target.folder} ({layers}, hidden size {target.hidden})"
    if data is not None:
        held = "slots not examined" if data.slots is None else f"{len(data.slots)} slots"
        said["data"] = (
            f"{data.folder} ({data.layout or 'layout unknown'}, {data.files} files, {held})"
        )
    if subject.engine is not None:
        said["engine"] = subject.engine.words
    if subject.trainer is not None:
        said["trainer"] = subject.trainer.name
    return said


def facts(subject: Subject) -> Iterator[str]:
    """What is worth knowing and wrong in no way."""
    drafter, engine = subject.drafter, subject.engine
    known = trained(subject)
    if known is not None:
        yield f"trained on {in_words(known.states)} ({known.origin.rstrip(',')})"
    if engine is not None and drafter is not None:
        yield from served_fact(subject, drafter, engine)
    if engine is not None:
        yield from (f"{engine.name}: {note}" for note in engine.rule.notes)
        if engine.serving is not None:
            yield f"embedding behind {engine.name}: {engine.serving.embedding}"
            yield f"head behind {engine.name}: {engine.serving.head}"
            yield f"d2t behind {engine.name}: {engine.serving.d2t}"
            if engine.serving.interleaved_rope:
                yield f"rope behind {engine.name}: neighbouring numbers of a head turn in pairs"
        if engine.checkout is not None and engine.checkout.known:
            yield engine.checkout.answer
    if drafter is not None and drafter.examined:
        yield from parts.facts(drafter, subject.target)
    if drafter is not None and drafter.form is not None and subject.target is not None:
        ours, theirs = drafter.form.rope.value.theta, rope.target_theta(subject.target)
        if theirs is not None and theirs != ours:
            yield f"the drafter's rope base is {ours:g}, the target's {theirs:g}; each has its own"


def served_fact(subject: Subject, drafter: Drafter, engine: Engine) -> Iterator[str]:
    """Where ids are found and which states they bring."""
    try:
        found = found_ids(engine, drafter)
        served = served_states(engine.rule, found.ids, subject.num_layers)
    except BadInput:
        return
    if served.states is None:
        return
    if engine.rule.setting is not None and found.ids is None:
        how = f"without {engine.rule.setting}"
    elif engine.rule.meaning is Meaning.derived:
        how = "whatever the ids"
    elif found.ids is None:
        how = "it finds no ids and takes its defaults"
    else:
        how = f"ids {listed(found.ids)} in {found.place}"
    yield f"{engine.words} feeds {in_words(served.states)} ({how}; {engine.rule.evidence.value})"


def untold(subject: Subject) -> Iterator[str]:
    """What a drafter was trained on, where nobody says: then its ids are held against nothing."""
    drafter = subject.drafter
    if drafter is None or trained(subject) is not None:
        return
    form = drafter.form
    if form is not None and form.layer_ids.value is not None:
        named = listed(form.layer_ids.value)
        ask = "give states=[…]" if subject.trainer else "give trainer= or states=[…]"
        yield f"what the ids {named} were trained as: {ask}"
    elif subject.engine is not None:
        yield "which states the drafter was trained on: give states=[…]"


def not_told(subject: Subject) -> Iterator[str]:
    """What could be said if more were named."""
    if subject.engine is not None and subject.num_layers is None and subject.drafter is not None:
        yield "which states the engine's ids bring at both ends: name the target"
    yield from untold(subject)
    if subject.engine is not None:
        yield from server.not_known(subject.engine)
    data = subject.data
    if data is not None and data.states is None:
        yield f"{data.folder}: which states its slots are is declared nowhere; say states=[…]"
    if data is not None:
        yield f"{data.folder}: whether its slots are what is declared; job=inspect_data measures it"

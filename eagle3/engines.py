"""Layer ids of engines and trainers: what a list means there, where it is read, what to write.

The answers follow from the table of `eagle3.conventions`; what an engine does with the rest of a
drafter is asked of `eagle3.serving`, which release a checkout is of `eagle3.checkouts`. No torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from eagle3.checkouts import Checkout, known_checkout
from eagle3.conventions import (
    ENGINES,
    KEY,
    NESTED,
    READ,
    RECORDED,
    RULES,
    RUN,
    TRAINERS,
    Evidence,
    Lost,
    Meaning,
    Place,
    Reach,
    Rule,
)
from eagle3.errors import BadInput
from eagle3.releases import holds, parse_version

__all__ = [
    "ECOSYSTEMS",
    "Checkout",
    "Evidence",
    "LookUp",
    "Meaning",
    "Reach",
    "Rule",
    "Served",
    "Written",
    "default_states",
    "id_states",
    "ids_to_write",
    "known_checkout",
    "looked_up",
    "parse_version",
    "plain_class",
    "rows_of",
    "rule_for",
    "served_states",
]

ECOSYSTEMS = (*ENGINES, *TRAINERS)
ALIKE = 0.85  # of two names that one may be a slip for the other

# Every place in which somebody keeps ids: what a reader passes over is named.
KNOWN_PLACES = (
    KEY,
    NESTED,
    "eagle_config.layer_ids",
    "dflash_config.target_layer_ids",
    "dflash_config.layer_ids",
    "target_layer_ids",
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """The canonical states that an id list brings, in the order of fc's chunks."""

    states: tuple[int, ...] | None  # None: nothing usable is captured
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Written:
    """What to write so that these states are fed."""

    possible: bool
    ids: tuple[int, ...] | None  # None: impossible, or nothing has to be written
    why: str
    needs: str | None = None  # what has to be changed in the engine's code first
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """What is read of a drafter's config.json. `ids` None: the engine takes its default states."""

    ids: tuple[int, ...] | None
    place: str | None
    ignored: tuple[tuple[str, tuple[int, ...]], ...] = ()  # other places that hold ids


def rule_for(ecosystem: str, version: str | None, engine_class: str | None) -> Rule:
    """The row that holds for a target's class in a release; what was assumed stands in its notes.

    Raises BadInput for an unknown ecosystem, and where the meaning depends on a version or a class
    that is not given.
    """
    if ecosystem not in ECOSYSTEMS:
        near = difflib.get_close_matches(ecosystem, ECOSYSTEMS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(ECOSYSTEMS)}"
        raise BadInput(f"there is no engine or trainer '{ecosystem}'; {hint}")
    rows = [row for row in RULES if row.ecosystem == ecosystem]
    notes: list[str] = []
    rows = _of_class(rows, engine_class, version, notes)
    if version is None:
        if len({row.meaning for row in rows}) > 1:
            changed = [b.since for a, b in pairwise(rows) if a.meaning is not b.meaning]
            raise BadInput(
                f"{ecosystem} changed what layer ids mean (at {', '.join(map(str, changed))}); say "
                "which release it is: engine_version=X"
            )
        row = rows[-1]
        if row.since:
            notes.append(f"no version was given; this holds from {ecosystem} {row.since} on")
        return replace(row, notes=(*row.notes, *notes))
    key = parse_version(version)
    for row in rows:
        if holds(row.since, row.until, key):
            break
    else:
        first = rows[0].since
        raise BadInput(
            f"{ecosystem} {version} captures no aux states of {engine_class or 'any class'}; "
            f"it does from {first} on"
        )
    if engine_class is not None and plain_class(engine_class) in RUN.get((ecosystem, version), ()):
        return replace(
            row,
            evidence=Evidence.run,
            source=f"{RECORDED}; {row.source}",
            notes=(*row.notes, *notes),
        )
    evidence = row.evidence
    if key[1] == -1 and any(row.since and parse_version(row.since)[0] == key[0] for row in rows):
        raise BadInput(
            f"{ecosystem} {version} was built before the release in which this changed; "
            "look into its code (known_checkout) or name a release"
        )
    if outside := unread(ecosystem, version):
        evidence = Evidence.inferred
        notes.append(f"{outside}; this is the row of the nearest release")
    return replace(row, evidence=evidence, notes=(*row.notes, *notes))


def rows_of(ecosystem: str, engine_class: str | None) -> tuple[Rule, ...]:
    """The rows that hold for a class, oldest first; the general ones where it has none."""
    rows = [row for row in RULES if row.ecosystem == ecosystem]
    wanted = plain_class(engine_class or "")
    own = [row for row in rows if wanted in map(plain_class, row.classes)]
    return tuple(own or [row for row in rows if row.classes == ("*",)])


def unread(ecosystem: str, version: str) -> str | None:
    """That a release lies outside those whose source was read; None: within."""
    oldest, newest = READ.get(ecosystem, (version, version))
    if parse_version(oldest) <= parse_version(version) <= (parse_version(newest)[0], 1):
        return None
    return f"{version} was not read (what was read: {oldest} to {newest})"


def plain_class(name: str) -> str:
    """A class's name as it is compared: 'Kimi-K2.5' is 'kimi_k25'."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def _of_class(
    rows: list[Rule], engine_class: str | None, version: str | None, notes: list[str]
) -> list[Rule]:
    """The rows for a class, oldest first."""
    others = [row for row in rows if row.classes == ("*",)]
    if engine_class is None:
        key = parse_version(version) if version else None
        held = [row for row in rows if key is None or holds(row.since, row.until, key)]
        usual = {row.meaning for row in held if row in others}
        special = {row.classes[0]: None for row in held if row.meaning not in usual}
        if special:
            raise BadInput(
                f"{' '.join(filter(None, (rows[0].ecosystem, version)))} reads layer ids in another "
                f"way for {' and '.join(special)}; say which class the target is: engine_class=NAME"
                + ("" if version else ", and which release: engine_version=X")
            )
        if any(row not in others for row in held):
            notes.append("no class was given; whether states 0 and n can be captured depends on it")
        return others
    wanted = plain_class(engine_class)
    own = [row for row in rows if wanted in map(plain_class, row.classes)]
    if own or len(rows) == len(others):
        return own or others
    known = {plain_class(name): name for row in rows for name in row.classes}
    near = [known[name] for name in difflib.get_close_matches(wanted, known, cutoff=ALIKE)]
    usual = {row.meaning for row in others}
    if any(row.meaning not in usual for row in rows for name in near if name in row.classes):
        raise BadInput(
            f"{rows[0].ecosystem} has no row for the class {engine_class}; did you mean "
            f"{' or '.join(near)}? There ids are read in another way than generally: name one of these, "
            "or engine_class=other for the general rule"
        )
    notes.append(f"the class {engine_class} has no row of its own; this is the general rule")
    return others


def id_states(rule: Rule, ids: Sequence[int], num_layers: int | None) -> tuple[int, ...]:
    """The canonical state that each id stands for, which may lie outside 0..n.

    `num_layers` (n) may be None where the meaning does not depend on it. Raises BadInput.
    """
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise BadInput(f"layer ids are integers, not {list(ids)!r}")
    if not ids:
        return ()
    if rule.meaning is Meaning.derived:
        if num_layers is None:
            raise BadInput(
                f"{rule.ecosystem} derives its layers from the target's number of layers; give it: "
                "num_layers=N"
            )
        return default_states(rule, num_layers)
    if rule.meaning is Meaning.input_if_highest_is_n and num_layers is None:
        raise BadInput(
            f"what layer ids mean in {rule.ecosystem} for {rule.classes[0]} depends on the target's "
            "number of layers; give it: num_layers=N"
        )
    plus = {
        Meaning.output: 1,
        Meaning.input: 0,
        Meaning.output_if_first_is_1: 1 if ids[0] == 1 else 0,
        Meaning.input_if_highest_is_n: 0 if max(ids) == num_layers else 1,
    }[rule.meaning]
    return tuple(i + plus for i in ids)


def default_states(rule: Rule, num_layers: int) -> tuple[int, ...]:
    """The states that are fed where no ids are found; empty where ids have to be given.

    A target so shallow that they coincide has fewer than three.
    """
    if rule.default_shift is None:
        return ()
    wanted = {k + rule.default_shift for k in (2, num_layers // 2, num_layers - 3)}
    return tuple(sorted(k for k in wanted if 0 <= k <= num_layers))


def served_states(rule: Rule, ids: Sequence[int] | None, num_layers: int | None) -> Served:
    """What an engine or trainer captures for an id list (None: it found none). Raises BadInput."""
    missing = ids is None or (not ids and not rule.empty_counts)
    if missing or rule.meaning is Meaning.derived:
        return _default_served(rule, ids, num_layers)
    assert ids is not None
    if rule.fault:
        return Served(states=None, problems=(rule.fault,))
    if not ids:
        return Served(states=(), problems=("the list is empty: nothing is captured",))
    states = id_states(rule, ids, num_layers)
    problems: list[str] = []
    notes: list[str] = []
    if rule.count is not None and len(ids) != rule.count:
        problems.append(f"it takes exactly {rule.count} ids, not {len(ids)}")
    if rule.lowest is not None and min(ids) < rule.lowest:
        problems.append(f"it takes no id below {rule.lowest}")
    refused = bool(problems)
    fed = []
    for i, k in zip(ids, states, strict=True):
        if rule.wraps_below is not None and k < rule.wraps_below:
            if num_layers is None or k + num_layers < 0:
                problems.append(f"id {i} names no layer: it counts from the end")
                refused = True
                continue
            problems.append(f"id {i} is looked up from the end: it brings state {k + num_layers}")
            k += num_layers
        fault, lost = _edge(rule, i, k, num_layers)
        if fault:
            problems.append(fault)
        if not lost:
            fed.append(k)
        else:
            refused = refused or rule.unreached is not Lost.dropped
    if len(set(fed)) < len(fed):
        how = "is an error" if rule.twice is Lost.refused else "is captured once only"
        problems.append(f"a state that is named twice {how}")
        refused = refused or rule.twice is Lost.refused
        fed = list(dict.fromkeys(fed))
    if rule.order == "sorted" and fed != sorted(fed):
        notes.append("the order of the list is not kept: chunks come in ascending order")
        fed = sorted(fed)
    if len(fed) < len(ids) and not refused:
        problems.append(
            f"{len(fed)} states come out for {len(ids)} ids, so fc is fed less than it takes"
        )
    if num_layers is None:
        notes.append("without num_layers the upper end was not checked")
    if refused:
        return Served(states=None, problems=tuple(problems), notes=tuple(notes))
    return Served(states=tuple(fed), problems=tuple(problems), notes=tuple(notes))


def _default_served(rule: Rule, ids: Sequence[int] | None, num_layers: int | None) -> Served:
    if num_layers is None:
        raise BadInput(
            f"the default layers of {rule.ecosystem} follow from the target's number of layers; "
            "give it: num_layers=N"
        )
    states = default_states(rule, num_layers)
    if rule.fault:
        return Served(states=None, problems=(rule.fault,))
    notes = []
    problems = []
    if rule.meaning is not Meaning.derived:
        notes.append("no ids: these are the default states")
    elif ids:
        notes.append("ids are not read: these states are always fed")
    if not states:
        problems.append("there are no default layers: ids have to be given")
    elif len(states) < 3:
        problems.append(
            f"a target of {num_layers} layers has only {len(states)} different default states"
        )
    if 0 in states and rule.embedding is not Reach.yes:
        problems.append("state 0, the embedding output, is among the defaults and not captured")
    return Served(states=states or None, problems=tuple(problems), notes=tuple(notes))


def _edge(rule: Rule, i: int, k: int, num_layers: int | None) -> tuple[str | None, bool]:
    """What is wrong with an id at the edges, and whether its state is lost."""
    lost = {
        Lost.dropped: "is passed over in silence",
        Lost.refused: "is refused",
        Lost.unset: "leaves its chunk of fc's input unset",
    }[rule.unreached]
    if k < 0:
        return f"id {i} names no state and {lost}", True
    if num_layers is not None and k > num_layers:
        return f"id {i} is state {k}, of {num_layers} layers; it {lost}", True
    if k == 0 and rule.embedding is not Reach.yes:
        if rule.embedding is Reach.patch:
            return f"id {i} is the embedding output, which needs {rule.patch}", False
        return f"id {i} is the embedding output, which cannot be captured; it {lost}", True
    if num_layers is not None and k == num_layers and rule.last is Reach.no:
        return f"id {i} is state n behind the last layer, which the layer loop never reaches", True
    return None, False


def ids_to_write(rule: Rule, states: Sequence[int], num_layers: int | None) -> Written:
    """What to write there so that these canonical states are fed, in this order. Raises BadInput."""
    if not states or min(states) < 0 or (num_layers is not None and max(states) > num_layers):
        upper = "n" if num_layers is None else str(num_layers)
        raise BadInput(f"canonical states lie between 0 and {upper}, not {list(states)!r}")
    wanted = tuple(states)
    if why := _not_expressible(rule, wanted, num_layers):
        return Written(possible=False, ids=None, why=why)
    if rule.meaning is Meaning.derived:
        return Written(possible=True, ids=None, why="it always feeds these; ids are not read")
    why = ""
    for ids in _spellings(rule, wanted):
        if rule.lowest is not None and min(ids) < rule.lowest:
            why = f"that is {list(ids)}, and no id below {rule.lowest} is taken"
        elif rule.meaning is Meaning.input_if_highest_is_n and num_layers is None:
            raise BadInput("this depends on the target's number of layers; give it: num_layers=N")
        elif served_states(rule, ids, num_layers).states == wanted:
            needs = rule.patch if 0 in wanted and rule.embedding is Reach.patch else None
            return Written(
                possible=True,
                ids=ids,
                why=_said(rule, ids, num_layers),
                needs=needs,
                notes=_beside(rule, ids, wanted),
            )
    return Written(
        possible=False,
        ids=None,
        why=why or "a list that starts with 1 is read as outputs of layers there",
    )


def _not_expressible(rule: Rule, wanted: tuple[int, ...], num_layers: int | None) -> str | None:
    if rule.fault:
        return rule.fault
    if rule.meaning is Meaning.derived:
        if num_layers is None:
            return "its layers follow from the target's number of layers; ids are not read"
        default = default_states(rule, num_layers)
        return None if wanted == default else f"it always feeds {list(default)}, ids are not read"
    if rule.count is not None and len(wanted) != rule.count:
        return f"it takes exactly {rule.count} ids"
    if len(set(wanted)) < len(wanted):
        return "no state can be captured twice"
    if rule.order == "sorted" and list(wanted) != sorted(wanted):
        return "it captures in ascending order, so fc's chunks would come in another order"
    if 0 in wanted and rule.embedding is Reach.no:
        return "the embedding output cannot be captured there"
    if num_layers is not None and num_layers in wanted and rule.last is Reach.no:
        return "the state behind the last layer cannot be captured there"
    return None


def _spellings(rule: Rule, wanted: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Lists that may stand for these states, the plainest first."""
    as_output = tuple(k - 1 for k in wanted)
    if rule.meaning in (
        Meaning.output,
        Meaning.output_if_first_is_1,
        Meaning.input_if_highest_is_n,
    ):
        yield as_output
    if rule.meaning is not Meaning.output:
        yield wanted
    # The order of a list does not matter there, but what it starts with does.
    if rule.meaning is Meaning.output_if_first_is_1 and len(wanted) > 1:
        yield (wanted[1], wanted[0], *wanted[2:])


def _said(rule: Rule, ids: tuple[int, ...], num_layers: int | None) -> str:
    """Why these ids are right."""
    if rule.meaning is Meaning.output_if_first_is_1:
        if list(ids) != sorted(ids):
            return "inputs of layers, as the list does not start with 1; its order does not matter"
        if ids[0] == 1:
            return "outputs of layers, as the list starts with 1"
        return "inputs of layers, as the list does not start with 1"
    if rule.meaning is Meaning.input_if_highest_is_n:
        if max(ids) == num_layers:
            return "inputs of layers, as the highest id is n"
        return "outputs of layers, as the highest id is not n"
    return f"{rule.meaning.value}s of layers"


def _beside(rule: Rule, ids: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[str, ...]:
    """What else has to be seen to."""
    notes = []
    if list(ids) != sorted(ids):
        notes.append("in this order, so that the list does not start with 1")
    if rule.appends_last:
        last = "n - 1" if rule.meaning is Meaning.output else "n"
        notes.append(f"data generation takes id {last} behind them, for the teacher")
    if 0 in wanted and rule.captured_by:
        notes.append(f"if the class can capture the embedding in {rule.captured_by}, which it uses")
    return tuple(notes)


def looked_up(rule: Rule, config: Mapping[str, Any], *, other_runner: bool = False) -> LookUp:
    """Where ids are found in a drafter's config.json, and which places with ids are passed over.

    `other_runner` asks for the release's second model runner (`rule.other_runner`). Raises BadInput
    for a place that is read and holds no list of integers.
    """
    places = rule.other_places if other_runner and rule.other_runner else rule.places
    if rule.setting is not None or rule.meaning is Meaning.derived:
        places = ()
    chosen, ids = None, None
    for place in places:
        found = _ids_at(config, place)
        if found or (found is not None and rule.empty_counts):
            chosen, ids = place.path, found
            break
    ignored = []
    for path in KNOWN_PLACES:
        if path != chosen:
            try:
                other = _ids_at(config, Place(path))
            except BadInput:
                continue  # nobody reads it
            if other:
                ignored.append((path, other))
    return LookUp(ids=ids, place=chosen, ignored=tuple(ignored))


def _ids_at(config: Mapping[str, Any], place: Place) -> tuple[int, ...] | None:
    value: Any = config
    for key in place.path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(type(i) is int for i in value):
        raise BadInput(f"{place.path} in config.json is {value!r}, not a list of layer ids")
    return tuple(i + place.plus for i in value)

"""What is said of a list of layer ids: its states in one ecosystem, its spelling in all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eagle3.conventions import RULES, Meaning, Rule
from eagle3.engines import (
    ECOSYSTEMS,
    Served,
    Written,
    id_states,
    ids_to_write,
    plain_class,
    rule_for,
    served_states,
)
from eagle3.errors import BadInput
from eagle3.layers import LayerConvention, canonical_state

MEANINGS = {
    Meaning.output: "id i is the output of layer i: state i + 1",
    Meaning.input: "id i is the input of layer i: state i",
    Meaning.output_if_first_is_1: (
        "id i is the input of layer i (state i), but in a list that starts with 1 its output (i + 1)"
    ),
    Meaning.input_if_highest_is_n: (
        "id i is the output of layer i (state i + 1), but in a list whose highest id is the number "
        "of layers its input (i)"
    ),
    Meaning.derived: "ids are not read: the layers follow from the target's number of layers",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked: ids, and what they are said to mean."""

    ids: tuple[int, ...] | None  # None: the engine's default
    engine: str | None
    engine_version: str | None
    engine_class: str | None
    num_layers: int | None
    convention: str | None


@dataclass(frozen=True, kw_only=True)
class Span:
    """What to write in a range of releases."""

    since: str | None
    until: str | None
    where: str | None  # the place in config.json, or the setting
    written: Written

    def alike(self, other: Span) -> bool:
        """Whether the same has to be written, though it may be for another reason."""
        mine, theirs = self.written, other.written
        if mine.possible and theirs.possible:
            theirs = replace(theirs, why=mine.why)
        return (mine, self.where) == (theirs, other.where)

    @property
    def releases(self) -> str:
        """The range in words."""
        if self.since and self.until:
            return f"{self.since} to before {self.until}"
        if self.until:
            return f"before {self.until}"
        return f"from {self.since}" if self.since else "all"


@dataclass(frozen=True, kw_only=True)
class Line:
    """What to write for some classes of an engine's or a trainer's targets."""

    ecosystem: str
    classes: str  # empty: it makes no difference
    span: Span

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        span = self.span
        return {
            "ecosystem": self.ecosystem,
            "classes": self.classes,
            "releases": span.releases,
            "since": span.since,
            "until": span.until,
            "where": span.where,
            **asdict(span.written),
        }


def explain(asked: Asked) -> dict[str, Any]:
    """All that is said, as plain data. Raises BadInput."""
    if asked.engine is None:
        said, served = by_convention(asked)
    else:
        said, served = by_engine(asked)
    wanted = intended(said["each"], served)
    write = list(what_to_write(wanted, asked)) if wanted else []
    return {
        **said,
        "num_layers": asked.num_layers,
        "states": list(served.states) if served.states is not None else None,
        "problems": list(served.problems),
        "notes": [*said.get("notes", []), *served.notes],
        "write_for": list(wanted) if write else None,
        "write": [line.plain() for line in write],
    }


def intended(each: Sequence[Mapping[str, Any]], served: Served) -> tuple[int, ...]:
    """The states to write elsewhere: all that were named, also those that this engine loses."""
    named = [one["state"] for one in each]
    if None in named or len(set(named)) < len(named):
        return ()
    return served.states if served.states == tuple(named) else tuple(sorted(named))


def by_convention(asked: Asked) -> tuple[dict[str, Any], Served]:
    """What is said of ids whose meaning is given."""
    assert asked.ids is not None
    assert asked.convention is not None
    if not asked.ids:
        raise BadInput("the list is empty")
    if asked.convention == "canonical":
        upper = asked.num_layers
        for k in asked.ids:
            if k < 0 or (upper is not None and k > upper):
                raise BadInput(f"canonical states are 0 to {upper or 'n'}, and {k} is none of them")
        states = asked.ids
    else:
        convention = LayerConvention(asked.convention)
        states = tuple(canonical_state(i, convention, asked.num_layers) for i in asked.ids)
    each = [row(i, k, asked.num_layers, None) for i, k in zip(asked.ids, states, strict=True)]
    said = {"convention": asked.convention, "ids": list(asked.ids), "each": each}
    return said, Served(states=states)


def by_engine(asked: Asked) -> tuple[dict[str, Any], Served]:
    """What is said of ids in an engine's or trainer's config."""
    assert asked.engine is not None
    rule = rule_for(asked.engine, asked.engine_version, asked.engine_class)
    served = served_states(rule, asked.ids, asked.num_layers)
    if asked.ids is None or rule.meaning is Meaning.derived:
        each = [row(None, k, asked.num_layers, None) for k in served.states or ()]
    else:
        each = [
            row(i, k, asked.num_layers, rule)
            for i, k in zip(asked.ids, id_states(rule, asked.ids, asked.num_layers), strict=True)
        ]
    said = {
        "engine": asked.engine,
        "engine_version": asked.engine_version,
        "engine_class": asked.engine_class,
        "ids": list(asked.ids) if asked.ids is not None else None,
        "meaning": MEANINGS[rule.meaning],
        "evidence": rule.evidence.value,
        "source": rule.source,
        "looked_up": [place.path for place in rule.places],
        "looked_up_otherwise": (
            {"by": rule.other_runner, "in": [place.path for place in rule.other_places]}
            if rule.other_runner
            else None
        ),
        "setting": rule.setting,
        "each": each,
        "notes": list(rule.notes),
    }
    return said, served


def row(i: int | None, k: int, num_layers: int | None, rule: Rule | None) -> dict[str, Any]:
    """One id: its canonical state, its index in transformers' hidden_states, and in words."""
    if rule is not None and rule.wraps_below is not None and k < rule.wraps_below and num_layers:
        k += num_layers
    if k < 0 or (num_layers is not None and k > num_layers):
        return {"id": i, "state": None, "hf_index": None, "words": "no state"}
    last = num_layers is not None and k == num_layers
    if k == 0:
        words = "the embedding output, input of layer 0"
    elif last:
        words = (
            f"output of layer {k - 1}, the last, before the final norm; "
            f"hidden_states[{k}] is behind that norm"
        )
    else:
        words = f"output of layer {k - 1}, input of layer {k}"
    return {"id": i, "state": k, "hf_index": None if last else k, "words": words}


def what_to_write(states: Sequence[int], asked: Asked) -> Iterator[Line]:
    """What to write for these states: a line for every ecosystem, class and range that differs."""
    for ecosystem in ECOSYSTEMS:
        rules = [rule for rule in RULES if rule.ecosystem == ecosystem]
        kinds: dict[tuple[Span, ...], list[str]] = {}
        for name in kinds_of(rules, asked.engine_class):
            spans = tuple(merged(of_kind(rules, name), states, asked.num_layers))
            if asked.engine_class is None:  # from when on a class is served is beside the point
                spans = (replace(spans[0], since=None), *spans[1:])
            kinds.setdefault(spans, []).append(name)
        for spans, names in kinds.items():
            classes = "" if len(kinds) == 1 else ", ".join(names)
            if "*" in names:
                classes = classes and "other classes"
            for span in spans:
                yield Line(ecosystem=ecosystem, classes=classes, span=span)


def kinds_of(rules: Sequence[Rule], engine_class: str | None) -> list[str]:
    """The classes to answer for: the one asked for, or one of every kind that has rows."""
    if engine_class is not None:
        return [engine_class]
    return list(dict.fromkeys(rule.classes[0] for rule in rules))


def of_kind(rules: Sequence[Rule], name: str) -> list[Rule]:
    """The rows for a class: its own, or the general ones."""
    wanted = plain_class(name)
    own = [rule for rule in rules if wanted in map(plain_class, rule.classes)]
    return own or [rule for rule in rules if rule.classes == ("*",)]


def merged(rules: Sequence[Rule], states: Sequence[int], num_layers: int | None) -> Iterator[Span]:
    """What to write in each range of releases, neighbours of the same answer as one."""
    before: Span | None = None
    for rule in rules:
        try:
            written = ids_to_write(rule, states, num_layers)
        except BadInput as error:
            written = Written(possible=False, ids=None, why=str(error))
        where = rule.setting or (rule.places[0].path if rule.places else None)
        span = Span(since=rule.since, until=rule.until, where=where, written=written)
        if before and before.alike(span):
            before = replace(span, since=before.since)
            continue
        if before:
            yield before
        before = span
    if before:
        yield before


SHORT = {
    Meaning.output: "i + 1",
    Meaning.input: "i",
    Meaning.output_if_first_is_1: "i; i + 1 if the list starts with 1",
    Meaning.input_if_highest_is_n: "i + 1; i if the highest id is n",
    Meaning.derived: "not read",
}


def meanings_table() -> list[str]:
    """What ids mean to whom, as Markdown; ranges that differ in where ids are read are one row."""
    rows: list[Rule] = []
    for rule in RULES:
        same = replace(rule, places=(), other_runner=None, other_places=())
        if rows and replace(rows[-1], since=None, until=None) == replace(
            same, since=None, until=None
        ):
            rows[-1] = replace(rows[-1], until=rule.until)
        else:
            rows.append(same)
    lines = [
        "| engine or trainer | classes of targets | releases | id i is state | state 0 | state n | "
        "no ids: states | known |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rule in rows:
        names = [name for name in rule.classes if name.islower()]
        shift = rule.default_shift or 0
        default = f"{2 + shift}, n//2{' + 1' * shift}, n-{3 - shift}"
        cells = (
            rule.ecosystem,
            ", ".join(names) or ("any" if len(of_ecosystem(rule)) == 1 else "any other"),
            Span(since=rule.since, until=rule.until, where=None, written=NOTHING).releases,
            "none: needs a patch" if rule.fault else SHORT[rule.meaning],
            rule.embedding.value,
            rule.last.value,
            "none" if rule.fault else default,
            rule.evidence.value,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def places_table() -> list[str]:
    """Where ids are looked up in a drafter's config.json, as Markdown."""
    lines = [
        "| engine or trainer | releases | read of, in this order | another model runner |",
        "|---|---|---|---|",
    ]
    for rule in RULES:
        span = Span(since=rule.since, until=rule.until, where=None, written=NOTHING)
        if rule.classes != ("*",) or rule.meaning is Meaning.derived:
            continue
        places = rule.setting or ", ".join(f"`{place.path}`" for place in rule.places)
        other = ", ".join(f"`{place.path}`" for place in rule.other_places)
        beside = f"{rule.other_runner}: {other}" if rule.other_runner else ""
        lines.append(f"| {rule.ecosystem} | {span.releases} | {places} | {beside} |")
    return lines


NOTHING = Written(possible=False, ids=None, why="")


def of_ecosystem(rule: Rule) -> set[tuple[str, ...]]:
    """The different classes for which this rule's ecosystem has rows."""
    return {other.classes for other in RULES if other.ecosystem == rule.ecosystem}

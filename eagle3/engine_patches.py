"""The patches of engines' source that come with the project, and how one that is needed is had.

The diffs themselves are in jobs/engines/patches. Which classes and releases need one is in
`eagle3.conventions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.conventions import Rule
from eagle3.engines import ids_to_write, rows_of, rule_for
from eagle3.releases import holds, parse_version

NAME = "embedding_capture"
SETTING = f"engine.patch={NAME}"


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A patch for one release."""

    engine: str
    version: str
    classes: tuple[str, ...]  # one of each kind whose files it changes


SHIPPED = (
    Shipped(engine="sglang", version="0.5.12", classes=("llama", "kimi_k25")),
    Shipped(engine="sglang", version="0.5.21", classes=("llama",)),
    Shipped(engine="vllm", version="0.32.0", classes=("kimi_k25",)),
)


def shipped_for_release(engine: str, version: str) -> Shipped | None:
    """The patch for a release, for whichever classes; a build's own mark ('+cpu') does not count."""
    release = version.partition("+")[0]
    return next((s for s in SHIPPED if (s.engine, s.version) == (engine, release)), None)


def changes(one: Shipped, rule: Rule) -> bool:
    """Whether a patch changes the files that a rule of its release was read in."""
    return rule.source in [rule_for(one.engine, one.version, name).source for name in one.classes]


def shipped_within(rule: Rule, since: str | None, until: str | None) -> list[str]:
    """The releases from `since` to before `until` for which the patch that a rule needs is shipped."""
    return [
        one.version
        for one in SHIPPED
        if one.engine == rule.ecosystem
        and holds(since, until, parse_version(one.version))
        and changes(one, rule)
    ]


def way(rule: Rule, version: str | None, engine_class: str | None) -> str:
    """How the patch is had that a release needs: the setting that runs it, or that none is shipped."""
    if version is None:
        return way_within(rule, rule.since, rule.until)
    one = shipped_for_release(rule.ecosystem, version)
    if one is None:
        return f"not shipped for {version}"
    return SETTING if changes(one, rule) else f"not shipped for class {engine_class or 'unknown'}"


def way_within(rule: Rule, since: str | None, until: str | None) -> str:
    """The same of a range of releases."""
    releases = shipped_within(rule, since, until)
    return f"{SETTING} for {' and '.join(releases)}" if releases else "not shipped"


def unpatched(
    rule: Rule, engine_class: str | None, wanted: Sequence[int], num_layers: int | None
) -> tuple[str, tuple[int, ...]] | None:
    """The first later release of an engine that needs no patch for these states, with its ids."""
    rows = rows_of(rule.ecosystem, engine_class)
    places = [(row.since, row.until) for row in rows]
    here = places.index((rule.since, rule.until)) if (rule.since, rule.until) in places else None
    for row in rows[here + 1 :] if here is not None else ():
        written = ids_to_write(row, wanted, num_layers)
        if written.possible and not written.needs and written.ids is not None:
            return str(row.since), written.ids
    return None

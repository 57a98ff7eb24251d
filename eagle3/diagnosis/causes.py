"""Differences between the wiring as trained and as served, each with its cost: the wiring's causes.

A difference is a cause where its cost is settled beyond all comparisons that were made to find it,
and large enough to matter. One whose cost no data at hand can measure is a cause as well, since the
tables say what is served, but never a certain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from eagle3.diagnosis.answer import CERTAIN, LIKELY, POSSIBLE, Cause, Cost
from eagle3.diagnosis.evidence import Evidence, Scored
from eagle3.diagnosis.fixes import MAKERS, Fix, fixes_for, patched_config
from eagle3.diagnosis.kinds import ORDER, STATES, kind_of, switch_of
from eagle3.diagnosis.signatures import signature_of, speaks_against
from eagle3.diagnosis.words import value_words
from eagle3.doctor.findings import MEASURED
from eagle3.served import ServedWiring
from eagle3.wiring import Wiring

# What a cause must cost at least: less is lost among texts, releases and rounding.
LEAST_ACCURACY = 0.02
LEAST_LENGTH = 0.05
VERIFIED = "verified"


def kinds_between(trained: Wiring, wrong: Wiring) -> tuple[str, ...]:
    """The kinds by which two wirings of one form differ; states in another order only are `order`."""
    kinds = []
    for name in trained.differing(wrong):
        if name == STATES and sorted(trained.states()) == sorted(wrong.states()):
            kinds.append(ORDER)
        else:
            kinds.append(kind_of(name))
    return tuple(kinds)


def with_part_of(wiring: Wiring, other: Wiring, kind: str) -> Wiring:
    """A wiring with what `kind` is about taken from another."""
    name = switch_of(kind)
    if name is None:
        raise ValueError(f"{kind} is no kind of wiring")
    if name == STATES:
        return replace(wiring, layers=other.layers, convention=other.convention)
    return replace(wiring, **{name: getattr(other, name)})


def cost_of(trained: Scored, so: Scored, comparisons: int) -> Cost:
    """What the one loses beside the other."""
    return Cost(
        accuracy_as_trained=trained.accuracy,
        accuracy_so=so.accuracy,
        accept_length_as_trained=trained.accept_length,
        accept_length_so=so.accept_length,
        difference=trained.minus(so, "accept_length", comparisons=comparisons),
    )


def matters(trained: Scored, so: Scored, comparisons: int) -> bool:
    """Whether a loss is settled, and more than LEAST_ACCURACY or LEAST_LENGTH."""
    for name, least in (("accept_length", LEAST_LENGTH), ("accuracy", LEAST_ACCURACY)):
        if not (counted(trained, name) and counted(so, name)):
            continue
        lost = trained.minus(so, name, comparisons=comparisons)
        if lost.low > 0 and lost.value >= least:
            return True
    return False


def counted(scored: Scored, name: str) -> bool:
    """Whether anything was counted for a rate."""
    return any(text[name].denominator for text in scored.counts if name in text)


def comparisons_of(e: Evidence) -> int:
    """For how many comparisons an interval is corrected: all wirings that the search scored."""
    return max(1, e.searched.scored, len(e.alone))


def wiring_causes(e: Evidence) -> tuple[list[Cause], list[str]]:
    """The causes among the differences, and what is said of the others."""
    if e.served is not None and e.served.wiring is None:
        return [not_served(e)], []
    trained, wrong = e.trained.wiring, e.wrong
    found: list[Cause] = []
    harmless: list[str] = []
    for kind in kinds_between(trained, wrong):
        name = switch_of(kind) or kind
        what = difference_of(e, name)
        so = e.alone.get(kind)
        if so is not None and not shows(e, kind, so):
            lost = e.trained.accept_length.value - so.accept_length.value
            harmless.append(
                f"{kind} ({what}) makes no difference that these texts can show "
                f"({lost:+.2f} accept length)"
            )
            continue
        found.append(wiring_cause(e, kind, name, so))
    return found, harmless


def shows(e: Evidence, kind: str, so: Scored) -> bool:
    """Whether a difference is settled, against the target or against what the drafter learnt."""
    comparisons = comparisons_of(e)
    by_teacher = e.alone_by_teacher.get(kind)
    return matters(e.trained, so, comparisons) or (
        by_teacher is not None and matters(e.by_teacher, by_teacher, comparisons)
    )


def wiring_cause(e: Evidence, kind: str, name: str, so: Scored | None) -> Cause:
    """One difference as a cause."""
    trained, wrong = e.trained.wiring, e.wrong
    cost = None if so is None else cost_of(e.trained, so, comparisons_of(e))
    ours, theirs = value_words(trained, name), value_words(wrong, name)
    return Cause(
        kind=kind,
        what=difference_of(e, name),
        trained=ours,
        served=theirs,
        cost=cost,
        fixes=fixes_of(e, kind),
        confidence=confidence_of(e, kind, so),
        evidence=f"trained: {MEASURED}; {verb(e)}: {how_known(e, name)}",
    )


def difference_of(e: Evidence, name: str) -> str:
    """'trained on states 0, 3 and 31; served states 3, 31 and 59'."""
    ours, theirs = value_words(e.trained.wiring, name), value_words(e.wrong, name)
    if name == STATES:
        return f"trained on {ours}; {verb(e)} {theirs}"
    return f"trained: {ours}; {verb(e)}: {theirs}"


def verb(e: Evidence) -> str:
    """'served' where an engine was named, else 'declared'."""
    return "declared" if e.served is None else "served"


def how_known(e: Evidence, name: str) -> str:
    """How the wrong side is known."""
    if e.served is None:
        return e.declared_by if name == STATES else "config.json, as engines read it"
    because = e.served.because.get(name)
    return f"{e.served.evidence.value}{f' ({because})' if because else ''}"


def fixes_of(e: Evidence, kind: str) -> tuple[Fix, ...]:
    """What to write for the engine that was asked about."""
    return fixes_for(kind, e.trained.wiring, e.served, config=e.config, **asked_of(e))


def mended_config(e: Evidence, kinds: Sequence[str]) -> dict[str, Any] | None:
    """config.json with the fix of each of these kinds; None where none of them changes it."""
    known = [kind for kind in kinds if kind in MAKERS]
    whole = patched_config(known, e.trained.wiring, e.served, config=e.config, **asked_of(e))
    return None if whole is None else dict(whole)


def asked_of(e: Evidence) -> dict[str, Any]:
    """What a fix depends on beside the kind."""
    return {
        "form": e.form,
        "asked": e.asked,
        "num_layers": e.num_layers,
        "stored": e.stored,
        "target_rope": e.target_rope,
    }


def confidence_of(e: Evidence, kind: str, so: Scored | None) -> str:
    """How sure a difference is: measured, of slots that were verified, against what was read or run."""
    if so is None:
        return LIKELY if e.served is None or e.served.evidence.value != "inferred" else POSSIBLE
    if e.served is not None and e.served.evidence.value == "inferred":
        return LIKELY
    if kind in (STATES, ORDER):
        by_state = {s.state: s.verdict for s in e.inspected.slots}
        fed = e.trained.wiring.states()
        if any(by_state.get(k) not in (VERIFIED, None) for k in fed):
            return LIKELY
    signature = signature_of(so.conditional, e.trained.conditional)
    return LIKELY if speaks_against(kind, signature) else CERTAIN


def not_served(e: Evidence) -> Cause:
    """The engine does not start, or feeds nothing that can be used."""
    assert e.served is not None
    problems = "; ".join(e.served.problems) or "nothing usable is fed"
    ours = value_words(e.trained.wiring, STATES)
    inferred = e.served.evidence.value == "inferred"
    starts = Fix(
        engine=e.served.engine,
        possible=True,
        lines=e.served.to_start,
        evidence=e.served.evidence.value,
    )
    return Cause(
        kind=stopped_by(e.served, e.trained.wiring),
        what=f"trained on {ours}; {e.served.engine}: {problems}",
        trained=ours,
        served=problems,
        cost=None,
        fixes=((starts,) if e.served.to_start else ()) + fixes_of(e, STATES),
        confidence=POSSIBLE if inferred else LIKELY,
        evidence=f"trained: {MEASURED}; served: {e.served.evidence.value}",
    )


def stopped_by(served: ServedWiring, trained: Wiring) -> str:
    """What keeps an engine from starting: its states, or the switch that it has no place for."""
    others = [name for name in served.because if name != STATES]
    if served.states == trained.states() and others:
        return kind_of(others[0])
    return STATES


def by_cost(causes: list[Cause]) -> list[Cause]:
    """The most costly first; states whose cost cannot be measured before all, others behind."""

    def key(cause: Cause) -> float:
        if cause.cost is not None:
            return -cause.cost.difference.value
        return float("-inf") if cause.kind in (STATES, ORDER) else float("inf")

    return sorted(causes, key=key)


def mended_causes(e: Evidence) -> Iterator[Cause]:
    """Tables of the checkpoint that had to be made again before anything could be measured."""
    for mended in e.mended:
        yield Cause(
            kind=mended.kind,
            what=f"trained with {mended.trained}; the file has {mended.served}",
            trained=mended.trained,
            served=mended.served,
            cost=cost_of(e.trained, mended.as_it_is, comparisons_of(e)),
            fixes=(
                Fix(
                    engine="the checkpoint's file",
                    possible=True,
                    lines=mended.lines,
                    evidence=MEASURED,
                ),
            ),
            confidence=CERTAIN,
            evidence=MEASURED,
        )

"""Differences between the wiring as trained and as served, each with its cost: the wiring's causes.

A difference is a cause where its cost is settled beyond all comparisons that were made to find it,
and large enough to matter. One whose cost no data at hand can measure is a cause as well, since the
tables say what is served, but never a certain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from eagle3.conventions import Evidence as Ground
from eagle3.diagnosis.answer import CERTAIN, LIKELY, POSSIBLE, Cause, Cost
from eagle3.diagnosis.evidence import Evidence, Scored
from eagle3.diagnosis.fixes import MAKERS, Fix, fixes_for, patched_config
from eagle3.diagnosis.heard import gains_more
from eagle3.diagnosis.kinds import NOT_SERVED, ORDER, STATES, kind_of, switch_of
from eagle3.diagnosis.signatures import signature_of, speaks_against
from eagle3.diagnosis.tensor_fixes import of_table
from eagle3.diagnosis.words import value_words
from eagle3.doctor.findings import MEASURED
from eagle3.metrics import Truth
from eagle3.search.axes import LATE, value_of
from eagle3.served import ServedWiring
from eagle3.wiring import Wiring

# What a cause must cost at least: less is lost among texts, releases and rounding.
LEAST_ACCURACY = 0.02
LEAST_LENGTH = 0.05
LEAST_SHARE = (
    0.05  # of what is accepted at all; where that is little, less than LEAST_LENGTH matters
)
# A difference of which more than this may be hidden beyond the least is open, not harmless.
OPEN_LENGTH = 0.2
OPEN_ACCURACY = 0.05
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
    """A wiring with what `kind` is about taken from another; the same where that is its start."""
    if kind == NOT_SERVED:
        return wiring
    name = switch_of(kind)
    if name is None:
        raise ValueError(f"{kind} is no kind of wiring")
    if name == STATES:
        return replace(wiring, layers=other.layers, convention=other.convention)
    return replace(wiring, **{name: getattr(other, name)})


def cost_of(trained: Scored, so: Scored, comparisons: int) -> Cost | None:
    """What the one loses beside the other; None where no accept length can be counted of one of them,
    as `no_cost` says.
    """
    if no_cost(trained, so) is not None:
        return None
    return Cost(
        accuracy_as_trained=trained.accuracy,
        accuracy_so=so.accuracy,
        accept_length_as_trained=trained.accept_length,
        accept_length_so=so.accept_length,
        difference=trained.minus(so, "accept_length", comparisons=comparisons),
        comparisons=comparisons,
    )


def no_cost(trained: Scored, so: Scored) -> str | None:
    """Why there is no cost in accept length; None: there is one."""
    if counted(trained, "accept_length") and counted(so, "accept_length"):
        return None
    return (
        f"no round of {trained.steps} steps can be counted to its end on these texts; use fewer "
        "job.steps or longer texts"
    )


def matters(trained: Scored, so: Scored, comparisons: int) -> bool:
    """Whether a loss is settled, and enough in accuracy or in accept length; either will do, so the
    interval is corrected for both.
    """
    return settled_by(trained, so, comparisons) is not None


def settled_by(trained: Scored, so: Scored, comparisons: int) -> str | None:
    """The rate whose loss is settled, and enough; None: neither's is."""
    accepted = trained.accept_length.value - 1
    enough = {
        "accept_length": min(LEAST_LENGTH, LEAST_SHARE * accepted),
        "accuracy": LEAST_ACCURACY,
    }
    for name, least in enough.items():
        lost = trained.minus(so, name, comparisons=comparisons * len(enough))
        if lost.low > 0 and lost.value >= least:
            return name
    return None


def counted(scored: Scored, name: str) -> bool:
    """Whether anything was counted for a rate."""
    return any(text[name].denominator for text in scored.counts if name in text)


def comparisons_of(e: Evidence, kind: str | None = None) -> int:
    """For how many comparisons an interval is corrected: all wirings that the search scored.

    Of a kind whose trained side the cross-entropy settles, which was corrected for them already, only
    for what is served otherwise: the sides were not chosen by what is compared. Of a kind that shows
    behind the first step alone, for those that were compared there.
    """
    if kind is not None and kind in e.loss_alone and e.loss_alone[kind].low > 0:
        return max(1, len(e.alone))
    compared = e.searched.drafted if switch_of(kind or "") in LATE else e.searched.scored
    return max(1, compared, len(e.alone))


def wiring_causes(e: Evidence) -> tuple[list[Cause], list[str]]:
    """The causes among the differences, and what is said of those that make none.

    What the texts leave open is neither: see `unsettled`. Behind an engine that does not start stands
    what it would have otherwise if it did.
    """
    found: list[Cause] = [] if runs(e) else stop_causes(e)
    named = {cause.kind for cause in found}
    harmless: list[str] = []
    for kind in kinds_of(e):
        so = e.alone.get(kind)
        if kind in named:
            continue
        name = switch_of(kind) or kind
        if so is None or shows(e, kind, so):
            found.append(wiring_cause(e, kind, name, so))
        elif is_open(e, so) is None:
            harmless.append(
                f"{kind} ({difference_of(e, name)}) makes no settled difference on these texts, and no "
                f"large one ({lost_words(e.trained, so)})"
            )
    return found, harmless


def unsettled(e: Evidence) -> tuple[str, ...]:
    """What may be a cause or none, in sentences, the widest difference first; empty: all is settled.

    For the verdict: a difference between trained and served (or declared) wiring that is neither
    settled as a loss (then it is among `wiring_causes`) nor so small that it is ruled out (then it is
    among what those say of the rest) is open, whichever side scores higher. A wrong wiring that scores
    higher than the one called trained is said to, clearly or not. Who has any of these sentences has
    found no drafter sound: they belong to `Diagnosis.undecided`, and the verdict is no better than that.
    """
    found: list[tuple[float, str]] = []
    for kind in kinds_of(e):
        so = e.alone.get(kind)
        why = None if so is None or shows(e, kind, so) else is_open(e, so)
        if so is not None and why is not None:
            size = abs(e.trained.accept_length.value - so.accept_length.value)
            said = difference_of(e, switch_of(kind) or kind)
            found.append((size, f"whether {kind} is a fault ({said}): {why}"))
    sentences = [sentence for _, sentence in sorted(found, key=lambda item: -item[0])]
    whole = e.as_served
    longer = whole is not None and whole.accept_length.value > e.trained.accept_length.value
    if whole is not None and longer and len(kinds_of(e)) > 1:
        sentences.append(
            f"whether the wiring called trained is it: all that is {verb(e)} otherwise, together, "
            f"scores higher ({lost_words(e.trained, whole)})"
        )
    return tuple(sentences)


def is_open(e: Evidence, so: Scored) -> str | None:
    """Why a difference that is no settled loss may still be one, or a gain; None: it is ruled out.

    What it may be is not corrected for the search, which chose the trained side and not this one.
    """
    if so.counts == e.trained.counts:
        return None
    trained, texts = e.trained, len(e.trained.counts)
    many = max(1, len(e.alone))
    name, least, room = ("accept_length", LEAST_LENGTH, OPEN_LENGTH)
    if no_cost(trained, so) is not None:
        name, least, room = ("accuracy", LEAST_ACCURACY, OPEN_ACCURACY)
    lost = trained.minus(so, name, comparisons=many)
    if max(-lost.low, lost.high) <= least + room:
        return None
    other = f"the wiring as {verb(e)}"
    if lost.high < 0 and -lost.value >= least:
        told = f"{other} scores clearly higher than the one called trained"
    elif lost.low > 0:
        told = f"not settled beside the {comparisons_of(e)} wirings compared; more texts would tell"
    else:
        told = (
            f"these {texts} texts cannot tell, more would" if texts > 1 else "one text cannot tell"
        )
        if lost.value < 0:
            told += f"; {other} scores higher"
    return f"{lost_words(trained, so, many)}; {told}"


def lost_words(trained: Scored, so: Scored, comparisons: int = 1, rate: str | None = None) -> str:
    """'+0.31 [-0.10, +0.72] accept length lost', of accuracy where there is no accept length.

    Of the `rate` that is named, if one is.
    """
    name = rate or ("accept_length" if no_cost(trained, so) is None else "accuracy")
    lost = trained.minus(so, name, comparisons=comparisons)
    what = name.replace("_", " ")
    return f"{lost.value:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}] {what} lost by it"


def kinds_of(e: Evidence) -> tuple[str, ...]:
    """The kinds by which the wiring as trained and as served (declared) differ."""
    return kinds_between(e.trained.wiring, e.wrong)


def runs(e: Evidence) -> bool:
    """Whether the engine runs the drafter at all; without one, nothing keeps it from doing so."""
    return e.served is None or e.served.wiring is not None


def shows(e: Evidence, kind: str, so: Scored) -> bool:
    """Whether a difference is settled, against the target or against what the drafter learnt."""
    comparisons = comparisons_of(e, kind)
    by_teacher = e.alone_by_teacher.get(kind)
    return matters(e.trained, so, comparisons) or (
        by_teacher is not None and matters(e.by_teacher, by_teacher, comparisons)
    )


def wiring_cause(e: Evidence, kind: str, name: str, so: Scored | None) -> Cause:
    """One difference as a cause."""
    trained, wrong = e.trained.wiring, e.wrong
    cost = None if so is None else cost_of(e.trained, so, comparisons_of(e, kind))
    ours, theirs = value_words(trained, name), value_words(wrong, name)
    costless = None if so is None else no_cost(e.trained, so)
    return Cause(
        kind=kind,
        what=difference_of(e, name) + by_teacher_alone(e, kind, so),
        trained=ours,
        served=theirs,
        cost=cost,
        fixes=fixes_of(e, kind),
        confidence=confidence_of(e, kind, so),
        evidence=f"trained: {how_trained(e, name)}; {verb(e)}: {how_known(e, name)}"
        + (f"; no cost in accept length: {costless}" if costless else ""),
    )


def by_teacher_alone(e: Evidence, kind: str, so: Scored | None) -> str:
    """What the difference costs against what the drafter learnt, where that alone settles it."""
    learnt, many = e.alone_by_teacher.get(kind), comparisons_of(e, kind)
    if so is None or learnt is None or matters(e.trained, so, many):
        return ""
    told = lost_words(e.by_teacher, learnt, 2 * many, settled_by(e.by_teacher, learnt, many))
    return f"; {told} against what it learnt, {e.searched.teacher.in_words}"


def how_trained(e: Evidence, name: str) -> str:
    """How the trained side is known: the search told, or was not asked, or could not tell."""
    searched = e.searched
    if searched.axes is not None and name not in searched.axes:
        same = value_of(e.trained.wiring, name) == value_of(e.declared, name)
        return f"{'as declared' if same else 'as the search started'}, not searched"
    if name in searched.unclear:
        return f"{MEASURED}, the likeliest of values that these texts cannot tell apart"
    return MEASURED


def difference_of(e: Evidence, name: str) -> str:
    """'trained on states 0, 3 and 31; served states 3, 31 and 59'."""
    ours, theirs = value_words(e.trained.wiring, name), value_words(e.wrong, name)
    if name == STATES:
        return f"trained on {ours}; {verb(e)}{'' if runs(e) else ':'} {theirs}"
    return f"trained: {ours}; {verb(e)}: {theirs}"


def verb(e: Evidence) -> str:
    """'served' where an engine was named, else 'declared'."""
    if not runs(e):
        return "served once it starts"
    return "declared" if e.served is None else "served"


def how_known(e: Evidence, name: str) -> str:
    """How the wrong side is known."""
    if e.served is None:
        return e.declared_by if name == STATES else "config.json, as engines read it"
    because = e.served.because.get(name)
    return f"{ground_of(e.served, name).value}{f' ({because})' if because else ''}"


def ground_of(served: ServedWiring, name: str) -> Ground:
    """How it is known what is served of a switch, or of the states."""
    return Ground.run if served.measured and name == STATES else served.evidence


def fixes_of(e: Evidence, kind: str) -> tuple[Fix, ...]:
    """What to write for the engine that was asked about."""
    return fixes_for(kind, e.trained.wiring, e.served, config=e.config, **asked_of(e))


def mended_config(e: Evidence, kinds: Sequence[str]) -> dict[str, Any] | None:
    """config.json with the fix of each of these kinds; None where none of them changes it.

    Where one of them changes it, what costs nothing on these texts is written as trained as well.
    """
    known = [kind for kind in kinds if kind in MAKERS]
    known += [kind for kind in kinds_of(e) if known and kind in MAKERS and kind not in known]
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
    """How sure a difference is.

    Certain: a trained value that the search told from all others, of slots that were verified, whose
    loss against the target's own choice is settled beside what was read or run of an engine that runs.
    No more than possible: what a running server accepts speaks against what was read of it.
    """
    name = switch_of(kind) or kind
    inferred = e.served is not None and ground_of(e.served, name) is Ground.inferred
    if e.served is not None and not e.served.measured and gains_more(e.counted):
        return POSSIBLE
    if so is None:
        return POSSIBLE if inferred else LIKELY
    if inferred:
        return LIKELY
    if how_trained(e, name) != MEASURED or not runs(e):
        return LIKELY
    cost = cost_of(e.trained, so, comparisons_of(e, kind))
    if not target_s_own(e.trained) or cost is None or cost.difference.low <= 0:
        return LIKELY
    if kind in (STATES, ORDER):
        by_state = {s.state: s.verdict for s in e.inspected.slots}
        fed = e.trained.wiring.states()
        if any(by_state.get(k) not in (VERIFIED, None) for k in fed):
            return LIKELY
    signature = signature_of(so.conditional, e.trained.conditional)
    return LIKELY if speaks_against(kind, signature) else CERTAIN


def target_s_own(scored: Scored) -> bool:
    """Whether it was scored against the target's choices, its own or as stored; a text need not be."""
    return scored.truth != Truth.next_token.value


def stop_causes(e: Evidence) -> list[Cause]:
    """What keeps the engine from starting, or from feeding anything that can be used, a cause a kind."""
    assert e.served is not None
    whys: dict[str, list[str]] = {}
    for stop in e.served.stops:
        kind = NOT_SERVED if stop.switch is None else kind_of(stop.switch)
        whys.setdefault(kind, []).append(stop.why)
    return [stop_cause(e, e.served, kind, "; ".join(why)) for kind, why in whys.items()]


def stop_cause(e: Evidence, served: ServedWiring, kind: str, why: str) -> Cause:
    """That the engine does not start, by what stops it."""
    name = switch_of(kind) or STATES
    ours = value_words(e.trained.wiring, name)
    ground = served.evidence.value
    # An engine that reports an accept length has started, whatever was read.
    doubtful = ground == "inferred" or e.engine_accept_length is not None
    return Cause(
        kind=kind,
        what=f"trained on {ours}; {served.engine}: {why}" if kind == STATES else why,
        trained=ours,
        served=why,
        cost=None,
        fixes=fixes_of(e, kind),
        confidence=POSSIBLE if doubtful else LIKELY,
        evidence=f"trained: {how_trained(e, name)}; served: {ground}",
        stops=True,
    )


def by_cost(causes: list[Cause]) -> list[Cause]:
    """The most costly first; before all what keeps an engine from starting, then states and slots whose
    cost cannot be measured; others without a cost behind.
    """

    def key(cause: Cause) -> tuple[bool, float]:
        cost = float("-inf") if cause.kind in (STATES, ORDER, "slots") else float("inf")
        if cause.stops:
            cost = 0.0  # in the order in which the engine meets them
        elif cause.cost is not None:
            cost = -cause.cost.difference.value
        return not cause.stops, cost

    return sorted(causes, key=key)


def mended_causes(e: Evidence) -> Iterator[Cause]:
    """Tables of the checkpoint that had to be made again before anything could be measured."""
    for mended in e.mended:
        settled = matters(e.trained, mended.as_it_is, comparisons_of(e))
        yield Cause(
            kind=mended.kind,
            what=f"trained with {mended.trained}; the file has {mended.served}",
            trained=mended.trained,
            served=mended.served,
            cost=cost_of(e.trained, mended.as_it_is, comparisons_of(e)),
            fixes=(of_table(),),
            confidence=CERTAIN if settled and target_s_own(e.trained) else LIKELY,
            evidence=MEASURED,
        )

"""What a running server said and returned, joined with what its tables and the drafter alone say.

The states that it returns are believed before any table. What it accepts of the data's own prompts is
held against what the drafter alone accepts of the same texts, wired as it is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eagle3.diagnosis.kinds import NOT_SERVED, ORDER, STATES, WIRING
from eagle3.diagnosis.words import joined, rate_words
from eagle3.doctor.findings import in_words
from eagle3.layers import LayerConvention
from eagle3.metrics import Count, Difference, Rate, Truth
from eagle3.search.bounds import rate_difference
from eagle3.served import ServedWiring

if TYPE_CHECKING:
    from eagle3.diagnosis.answer import Cause
    from eagle3.diagnosis.evidence import Scored

SAME_TEXT = 0.98  # of a text's tokens that are the target's own choice; below, it says another text
NEAR_LENGTH = 0.1  # accept lengths behind an engine, whose prompts are others, differ by this much
CONFIG, ENGINE, HEAD, DATA, MEASUREMENT = "config", "engine", "head", "data", "measurement"
# Where a cause lies that is not wiring, and wiring that lies in the drafter's own files.
LIES = {
    **{STATES: CONFIG, ORDER: CONFIG, NOT_SERVED: CONFIG},
    **{"engine-state": ENGINE, "measurement": MEASUREMENT, "slots": DATA},
    **{"d2t": HEAD, "head": HEAD},
}


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a running server said of itself and returned for some of the data's prompts."""

    url: str
    version: str
    states: tuple[int, ...] | None  # canonical, that it hands to its drafter; None: not measured
    why_not: str | None = None  # why the states are not measured, and what would have them
    needs: str | None = None  # the flag that it has to be started with for that, alone
    shift: int = 0  # row t of them is that of position t + shift
    config_seen: bool = True  # the config.json of the drafter that it serves was read
    counts: Mapping[str, Count] = field(default_factory=dict)  # text → (tokens gained, rounds)
    accept_length: Rate | None = None  # over these; None: it counts no rounds of a request
    contradicts: str | None = None  # the tables, in a sentence
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a server accepted of some texts' prompts, beside the drafter alone on these texts."""

    served: Rate
    alone: Rate  # wired as it is served
    lost: Difference  # alone minus served, paired by text
    texts: int


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What the diagnosis makes of a running server."""

    heard: Heard
    counted: Counted | None  # None: nothing can be set beside what it accepts
    fault: str  # config, engine, head, data or measurement, or several; or that none was found
    said: str  # a sentence

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        heard, counted = self.heard, self.counted
        length = heard.accept_length
        return {
            "url": heard.url,
            "version": heard.version,
            "fault": self.fault,
            "said": self.said,
            "states": None if heard.states is None else list(heard.states),
            "why_not": heard.why_not,
            "contradicts": heard.contradicts,
            "shift": heard.shift,
            "accept_length": None if length is None else length.plain(),
            "alone": None if counted is None else counted.alone.plain(),
            "lost": None if counted is None else vars(counted.lost),
        }


def believed(served: ServedWiring, heard: Heard) -> ServedWiring:
    """The served wiring with the states that were measured; as the tables have it where none were.

    What the tables say of the states stops nothing then: the server runs.
    """
    fed = heard.states
    if fed is None:
        return served
    run = served.run
    if run is not None:
        run = replace(run, layers=fed, convention=LayerConvention.input)
    stops = tuple(stop for stop in served.stops if stop.switch != STATES)
    refuted = {stop.why for stop in served.stops} - {stop.why for stop in stops}
    because = f"measured: the server returns {in_words(fed)}"
    return replace(
        served,
        wiring=None if stops else run,
        run=run,
        states=fed,
        because={**served.because, STATES: because},
        stops=stops,
        problems=tuple(p for p in served.problems if p not in refuted),
        measured=True,
    )


def contradiction(served: ServedWiring, heard: Heard) -> str | None:
    """That the tables have other states served than were measured; None: they have the same."""
    if heard.states is None or heard.states == served.states:
        return None
    tables = served.because.get(STATES) or "; ".join(stop.why for stop in served.stops)
    who = "the tables are contradicted"
    if not heard.config_seen:
        who = "what this server serves is not the drafter's config.json that was read"
    return f"{who}: {tables}; but it returns {in_words(heard.states)}, and that is believed"


def why_unlike(truth: str, follows: Rate | None) -> str | None:
    """Why what a server accepts of its own greedy text is not what the drafter alone accepts of the
    data's; None: these texts are the target's own.
    """
    if truth != Truth.target_argmax.value or follows is None:
        return (
            "the drafter alone is held against the data's texts, since the target's own choices are not "
            "known, and a server says its own (job=capture_states engine.url=… makes data of it)"
        )
    if follows.low < SAME_TEXT:
        return (
            f"the target goes on as the data's texts do at only {follows.value:.3f}, so that a server "
            "says others (job=capture_states engine.url=… makes data of its own)"
        )
    return None


def counted_of(heard: Heard | None, scored: Scored | None, names: Sequence[str]) -> Counted | None:
    """What the server accepts beside the drafter alone, on the texts that both have; None: on none.

    `scored` is the served wiring on the texts of these names.
    """
    if heard is None or scored is None or heard.accept_length is None:
        return None
    both = [
        (counts, heard.counts[name])
        for counts, name in zip(scored.counts, names, strict=True)
        if name in heard.counts and counts.get("accept_length", Count(0, 0)).denominator
    ]
    if not both:
        return None
    return Counted(
        served=replace(
            scored, counts=[{"accept_length": count} for _, count in both]
        ).accept_length,
        alone=replace(scored, counts=[counts for counts, _ in both]).accept_length,
        lost=rate_difference(
            [counts["accept_length"] for counts, _ in both],
            [count for _, count in both],
            comparisons=1,
            most=float(scored.steps),
        ),
        texts=len(both),
    )


def gains_more(counted: Counted | None) -> bool:
    """Whether more is accepted than the wiring that is said to be served can give."""
    return counted is not None and counted.lost.high < -NEAR_LENGTH


def fault_of(causes: Sequence[Cause], *, undecided: bool) -> str:
    """Where the causes lie, the gravest first."""
    places = list(dict.fromkeys(place_of(cause) for cause in causes))
    return joined(places) or ("undecided" if undecided else "none found")


def place_of(cause: Cause) -> str:
    """Where a cause lies: a wiring that no line mends is the engine's."""
    if cause.kind in LIES:
        return LIES[cause.kind]
    if cause.kind in WIRING:
        return CONFIG if any(fix.possible for fix in cause.fixes) else ENGINE
    return HEAD


def joined_with(heard: Heard, served: ServedWiring, counted: Counted | None, fault: str) -> Joined:
    """The sentence that joins them."""
    if heard.states is not None:
        against = ", against the tables" if heard.contradicts else ""
        fed = f"the server feeds {in_words(heard.states)} (measured{against})"
    else:
        tables = in_words(served.states) if served.states else "states"
        wants = f"needs {heard.needs}" if heard.needs else heard.why_not
        fed = f"{tables} read from tables, not measured ({wants})"
    length = heard.accept_length if counted is None else counted.served
    accepts = "counts no rounds" if length is None else f"accepts {rate_words(length)}"
    if counted is not None:
        accepts += f", alone so wired {counted.alone.value:.2f}"
    return Joined(
        heard=heard, counted=counted, fault=fault, said=f"fault: {fault}; {fed}; it {accepts}"
    )

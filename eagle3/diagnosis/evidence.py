"""All that a diagnosis rests on, measured or read before anything is concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from eagle3.diagnosis.heard import Counted, Heard
from eagle3.doctor.findings import Finding
from eagle3.doctor.subject import EngineAsked
from eagle3.form import DrafterForm, Rope
from eagle3.metrics import Count, Difference, Rate, Truth, rate
from eagle3.search.bounds import rate_difference
from eagle3.search.search import Searched
from eagle3.served import ServedWiring
from eagle3.wiring import Wiring

NOTHING = Count(0, 0)


@dataclass(frozen=True)
class Scored:
    """One wiring on all texts, against one truth: raw counts a text (eagle3.metrics.count_chains)."""

    wiring: Wiring
    counts: Sequence[Mapping[str, Count]]
    truth: str  # a Truth's name, or a teacher's
    steps: int
    seed: int

    @cached_property
    def accuracy(self) -> Rate:
        """Of the first drafted token."""
        return self.rate("accuracy", (0.0, 1.0))

    @cached_property
    def accept_length(self) -> Rate:
        """On the served walk, the bonus token included."""
        return self.rate("accept_length", (1.0, self.steps + 1.0))

    @cached_property
    def coverage(self) -> Rate:
        """The share of the truth's tokens that the draft vocabulary has."""
        return self.rate("coverage", (0.0, 1.0))

    @cached_property
    def conditional(self) -> list[tuple[int, Rate]]:
        """Accuracy by step, given that all steps before were right; steps without positions left out."""
        points = []
        for step in range(self.steps):
            found = self.found(f"step_accuracy/conditional@{step}", (0.0, 1.0))
            if found is not None:
                points.append((step, found))
        return points

    def rate(self, name: str, limits: tuple[float, float]) -> Rate:
        """A rate over all texts; where nothing could be counted it is at its lowest, known as such."""
        found = self.found(name, limits)
        if found is None:
            low, high = limits
            return Rate(value=low, low=low, high=high, numerator=0, denominator=0, truth=self.truth)
        return found

    def found(self, name: str, limits: tuple[float, float]) -> Rate | None:
        """A rate over all texts, None without positions; named by this truth."""
        counts = [text[name] for text in self.counts if name in text]
        if not counts:
            return None
        made = rate(counts, Truth.target_argmax, limits=limits, seed=self.seed)
        if made is None:
            return None
        return Rate(**{**made.plain(), "truth": self.truth})

    def minus(self, other: Scored, name: str, *, comparisons: int) -> Difference:
        """This one's rate less another's on the same texts, paired, as the search judges differences.

        On fewer than two texts, and where nothing was counted of one of the two, it may be any.
        """
        return rate_difference(
            [text.get(name, NOTHING) for text in self.counts],
            [text.get(name, NOTHING) for text in other.counts],
            comparisons=comparisons,
            most=float(self.steps) if name.startswith("accept_length") else 1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the drafter, and the first step's accuracy without it."""

    name: str  # the attention, the MLP, …
    single: bool  # one of several of its sort, of which each may do little; only harm counts
    without: Rate
    worth: Difference  # accuracy with it less accuracy without it, paired
    share: float  # of the accuracy with it: what is lost without it
    # Cross-entropy without it less that with it, paired; None where accuracy tells, or where a little
    # work is as good as none.
    loss: Difference | None = None


def chunk_name(place: int) -> str:
    """What the part of fc is called that reads the state in this place."""
    return f"chunk {place} of fc"


@dataclass(frozen=True, kw_only=True)
class Health:
    """Whether the drafter, wired as best it can be, works as a trained one does."""

    bigram: float  # the share of the truth that a table of the texts' own pairs of tokens names
    parts: tuple[Part, ...]  # the whole block's first, then a layer's
    # A norm that the wiring as trained leaves out although its weights were trained, in words.
    left_out: str | None = None
    # That much of a projection is zeros, in words.
    blank: str | None = None


@dataclass(frozen=True, kw_only=True)
class SlotSeen:
    """One slot as inspected."""

    index: int
    declared: int | None
    found: tuple[int, ...]  # states that it was measured to be, all equal; empty: not told
    verdict: str  # verified, contradicted or as declared
    what: str  # the sentence of the inspection
    in_place: bool = False  # its rows are at their positions, while other slots' rows are not

    @property
    def state(self) -> int | None:
        """The state to take it for: as found, else as declared."""
        if self.found and self.declared not in self.found:
            return self.found[0]
        return self.declared

    @property
    def in_words(self) -> str:
        """'slot 0: state 0, verified'."""
        if self.declared is None:
            told = f"found to be state {self.found[0]}" if self.found else "nobody says which state"
            return f"slot {self.index}: {told}"
        if self.verdict == "contradicted":
            found = f"state {self.found[0]}" if self.found else "no such state"
            return f"slot {self.index}: declared state {self.declared}, but {found}"
        return f"slot {self.index}: state {self.declared}, {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What the data's slots are, measured on a few texts."""

    slots: tuple[SlotSeen, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    shift: int = 0  # row t of the states belongs to position t + shift
    in_answer: bool = False  # so it does over the answer alone
    aligned: bool = False  # what was measured was measured with each row at its position
    # Slots that hold no state gave way to the states that the target's own layers make.
    remade: bool = False
    as_declared: Scored | None = None  # the trained wiring with the states taken as declared

    def labelled(self, states: Sequence[int]) -> tuple[int, ...]:
        """What the data's labels call these states: found, as declared; others stay."""
        called = {s.state: s.declared for s in self.slots if s.state is not None}
        named = [called.get(k, k) for k in states]
        return tuple(k if name is None else name for k, name in zip(states, named, strict=True))

    def is_end(self, slot: int | None, num_layers: int) -> bool:
        """Whether a slot is the target's last state, found or declared and by nothing contradicted."""
        if slot is None or slot >= len(self.slots):
            return False
        seen = self.slots[slot]
        return seen.state == num_layers and (seen.verdict != "contradicted" or bool(seen.found))

    def verified_end(self, num_layers: int) -> bool:
        """Whether a slot was measured to be the target's last state."""
        return any(num_layers in slot.found for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class Mended:
    """A table of the checkpoint that was made again before the search, since that revived it."""

    kind: str  # d2t
    trained: str
    served: str
    as_it_is: Scored


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything; all wirings are resolved by `form`."""

    form: DrafterForm
    config: Mapping[str, Any]  # the drafter's config.json
    num_layers: int  # of the target
    target_rope: Rope | None  # None: none that is run here
    target_classes: tuple[str, ...]  # as engines may name it
    searched: Searched
    declared: Wiring
    declared_by: str  # who says which states: config.json's ids, the data's order, the default
    served: ServedWiring | None  # None: no engine was named
    trained: Scored  # against the reference: target_argmax, else next_token
    by_teacher: Scored  # the same chains against the teacher that it agrees with most
    as_served: Scored | None  # None: states are not at hand, or it does not run
    why_not_served: str | None
    alone: Mapping[str, Scored]  # kind → trained, with this difference put in alone
    # The same against the teacher: what the drafter learnt shows a difference most clearly.
    alone_by_teacher: Mapping[str, Scored]
    # Kind → cross-entropy of the first step with this difference put in alone minus that as trained,
    # against the teacher, corrected for all wirings: how surely the trained side is what was trained.
    loss_alone: Mapping[str, Difference]
    not_alone: Mapping[str, str]  # kind → why its cost cannot be measured
    ladder: tuple[tuple[str, Scored], ...]  # kind mended → accept length; begins behind the first
    health: Health
    inspected: Inspected
    mended: tuple[Mended, ...]
    doctor: tuple[Finding, ...]
    asked: EngineAsked | None
    engine_accept_length: float | None  # measured behind the engine, as it reports it
    tree: Rate | None  # accept length in the engine's tree of the served wiring; None: a chain
    trained_accuracy: float | None  # the training log's
    longest: int  # positions of the longest text
    stored: tuple[int, ...]  # canonical states that the data holds, verified ones by what they are
    notes: tuple[str, ...] = ()
    # How often the text goes on with the target's own choice; None: that is not known.
    follows: Rate | None = None
    # As served with the states alone mended, by the kind that this is; None: there is nothing else.
    states_alone: tuple[str, Scored] | None = None
    heard: Heard | None = None  # of a running server; None: none was asked
    # What it accepts beside the drafter alone, where the engine's accept length is that.
    counted: Counted | None = None
    not_counted: str | None = None  # why the two cannot be set beside each other

    @property
    def wrong(self) -> Wiring:
        """What the trained wiring is held against: the engine's, else the declared one."""
        return held_against(self.served, self.declared, self.trained.wiring).resolved(self.form)


def held_against(served: ServedWiring | None, declared: Wiring, trained: Wiring) -> Wiring:
    """What a trained wiring is held against: the engine's, else the declared one.

    Of an engine that does not start, what it would run, with the trained states where it is not known
    which it would feed, or where they are what stops it: why it does not start is one fault, what else
    it has otherwise are others. So `measure.alone` is asked for it as well.
    """
    if served is None:
        return declared
    if served.wiring is not None:
        return served.wiring
    if served.run is None:
        return trained
    if served.states is not None and len(served.states) == len(trained.layers):
        return served.run
    return replace(served.run, layers=trained.layers, convention=trained.convention)

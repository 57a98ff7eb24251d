"""A diagnosis: what it found, as plain data and as a text whose first lines hold what counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.diagnosis import told
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.heard import Joined
from eagle3.doctor.findings import Finding
from eagle3.metrics import Difference, Rate
from eagle3.served import ServedWiring
from eagle3.wiring import Wiring

# Verdicts; undecided: there is too little data to tell sound from unknown.
CAUSE, SOUND, UNDECIDED, UNKNOWN = "cause", "sound", "undecided", "unknown"
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one difference costs: it alone is put in, everything else as trained."""

    accuracy_as_trained: Rate
    accuracy_so: Rate
    accept_length_as_trained: Rate
    accept_length_so: Rate
    difference: Difference  # of accept lengths, as trained minus so, paired
    comparisons: int  # that its interval is corrected for

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "accuracy_as_trained": self.accuracy_as_trained.plain(),
            "accuracy_so": self.accuracy_so.plain(),
            "accept_length_as_trained": self.accept_length_as_trained.plain(),
            "accept_length_so": self.accept_length_so.plain(),
            "difference": asdict(self.difference),
            "comparisons": self.comparisons,
        }


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause: a kind of eagle3.diagnosis.kinds, in words, with its cost and what to do."""

    kind: str
    what: str  # 'trained on states 0, 3 and 31; served 3, 31 and 59'
    trained: str
    served: str
    cost: Cost | None  # None: not measurable with what is at hand; `undecided` says why
    fixes: tuple[Fix, ...]
    confidence: str  # certain, likely or possible
    evidence: str
    explains: tuple[str, ...] = ()  # other kinds that would only say the same once more
    stops: bool = False  # it keeps the engine from starting

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **{name: getattr(self, name) for name in ("kind", "what", "trained", "served")},
            "cost": None if self.cost is None else self.cost.plain(),
            "fixes": [fix_plain(fix) for fix in self.fixes],
            "confidence": self.confidence,
            "evidence": self.evidence,
            "stops": self.stops,
        }


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The answer to 'what is wrong with this drafter behind this engine'."""

    verdict: str  # cause, sound, undecided or unknown
    headline: str
    causes: tuple[Cause, ...]  # the most costly first; empty where sound
    trained: Wiring  # resolved; as far as the data tells
    teacher: str  # what the drafter was trained on, in words
    served: ServedWiring | None
    slots: tuple[str, ...]  # "slot 0: state 0, verified"
    accept_length_served: Rate | None
    accept_length_repaired: Rate
    ladder: tuple[tuple[str, Rate], ...]  # accept length behind the first fix, the first two, …
    signature: str
    confidence: str
    undecided: tuple[str, ...]  # what the data cannot decide, with the data that would
    elsewhere: tuple[Fix, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    repaired: str = "as trained"  # what `accept_length_repaired` is, in words
    # Differences that these texts settle neither way; the first of `undecided`.
    doubts: tuple[str, ...] = ()
    # The engine's own accept length where it is not compared with the predicted one, and why.
    engine_figure: str | None = None
    joined: Joined | None = None  # with a running server; None: none was asked
    # The patch on which it rests that the engine feeds the trained states, as it is told to.
    provided: str | None = None
    # Accept length as served with the states alone mended, by the kind that this is.
    states_alone: tuple[str, Rate] | None = None
    # What comes before all other fixes: a copy of config.json in a layout that the engine loads.
    before: Fix | None = None
    # config.json with the changes of all fixes; None: nothing in it has to change.
    config: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """As plain data, the texts among it."""
        served, repaired = self.accept_length_served, self.accept_length_repaired
        return {
            "verdict": self.verdict,
            "headline": self.headline,
            "causes": [cause.plain() for cause in self.causes],
            "trained": {**self.trained.plain(), "states": list(self.trained.states())},
            "teacher": self.teacher,
            "served": None if self.served is None else served_plain(self.served),
            "slots": list(self.slots),
            "accept_length_served": None if served is None else served.plain(),
            "accept_length_repaired": repaired.plain(),
            "repaired": self.repaired,
            "ladder": [{"mended": kind, "accept_length": r.plain()} for kind, r in self.ladder],
            "states_alone": None
            if self.states_alone is None
            else {"mended": self.states_alone[0], "accept_length": self.states_alone[1].plain()},
            "signature": self.signature,
            "confidence": self.confidence,
            "undecided": list(self.undecided),
            "doubts": list(self.doubts),
            "engine_figure": self.engine_figure,
            "provided": self.provided,
            "server": None if self.joined is None else self.joined.plain(),
            "elsewhere": [fix_plain(fix) for fix in self.elsewhere],
            "findings": [{**asdict(f), "fix": list(f.fix)} for f in self.findings],
            "notes": list(self.notes),
            "before": None if self.before is None else fix_plain(self.before),
            "config": None if self.config is None else dict(self.config),
            "first_lines": self.first_lines(),
            "markdown": self.markdown(),
        }

    def markdown(self) -> str:
        """The whole answer; its first lines are `first_lines()`."""
        return told.markdown(self)

    def first_lines(self) -> list[str]:
        """At most 12 lines of at most 120 columns: cause, fix, expected accept length, confidence."""
        return told.first_lines(self)


def fix_plain(fix: Fix) -> dict[str, Any]:
    """A fix as plain data; the config.json to write is the diagnosis'."""
    kept = {name: value for name, value in vars(fix).items() if name != "config"}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}


def served_plain(served: ServedWiring) -> dict[str, Any]:
    """The engine's resolved wiring as plain data."""
    plain: dict[str, Any] = {}
    for name, value in vars(served).items():
        if isinstance(value, Wiring):
            plain[name] = value.plain()
        elif name == "stops":
            plain[name] = [asdict(stop) for stop in value]
        elif isinstance(value, tuple):
            plain[name] = list(value)
        elif isinstance(value, Mapping):
            plain[name] = dict(value)
        else:
            plain[name] = getattr(value, "value", value)
    return plain

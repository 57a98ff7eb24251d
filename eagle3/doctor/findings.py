"""What the checks say: one finding for each thing that is wrong, and the report of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("error", "warning", "note")
MEASURED = "measured"  # seen in the files themselves


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, what it does to acceptance, and the lines that mend it."""

    name: str  # a stable slug, such as ids-not-looked-up
    severity: str  # error, warning or note
    where: str
    what: str  # one sentence
    effect: str  # what acceptance will do
    fix: tuple[str, ...]  # the exact lines to write; without any, `effect` says why
    evidence: (
        str  # measured (in the file), run, read or inferred; with the source where there is one
    )

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"{self.severity!r} is no severity")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The drafter's tensors by name: what its wiring asks for, what is there, what nothing asks for."""

    required: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found. `facts` are worth knowing and wrong in no way."""

    subject: dict[str, Any]  # what was examined: paths, engine, trainer
    form: dict[str, dict[str, Any]] | None  # each switch of the drafter: value and origin
    inventory: Inventory
    findings: tuple[Finding, ...]
    facts: tuple[str, ...]
    not_examined: tuple[str, ...]
    failed: tuple[
        str, ...
    ] = ()  # checks that broke down: a fault of theirs, whatever the files are

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **asdict(self),
            "inventory": {k: list(v) for k, v in asdict(self.inventory).items()},
            "findings": [{**asdict(f), "fix": list(f.fix)} for f in self.findings],
            "facts": list(self.facts),
            "not_examined": list(self.not_examined),
            "failed": list(self.failed),
        }


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Without repetitions, the gravest first; among equals in the order found."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: SEVERITIES.index(f.severity)))


def listed(ids: Sequence[int] | None) -> str:
    """'[2,30,58]', as it is written in a config."""
    return "none" if ids is None else f"[{','.join(map(str, ids))}]"


def in_words(states: Sequence[int] | None) -> str:
    """'states 0, 3 and 31'."""
    if not states:
        return "no states"
    if len(states) == 1:
        return f"state {states[0]}"
    return f"states {', '.join(map(str, states[:-1]))} and {states[-1]}"

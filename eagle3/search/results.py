"""What a search answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3.metrics import Count, Difference, Rate
from eagle3.search.teachers import Teacher
from eagle3.wiring import Wiring


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A wiring that was scored on all texts to the end of its chains.

    Rates are against the reference (the target's own choice, or the text), as they name it.
    """

    wiring: Wiring  # resolved
    changed: tuple[str, ...]  # against the start: states=0,3,31, d2t=absolute
    teacher: str  # whose choices the first step was raced against
    accuracy: Rate
    accept_length: Rate
    coverage: Rate
    curves: Mapping[str, Sequence[tuple[int, Rate]]]
    counts: Sequence[Mapping[str, Count]]  # a text
    behind: Difference | None  # accept length, the best's minus this one's, paired; None: the best
    tied: bool  # the interval of `behind`, corrected for all that were scored, holds 0


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A wiring that was left behind before the end, and why."""

    wiring: Wiring
    changed: tuple[str, ...]
    texts: int  # that it was scored on; 0: it cannot be scored
    positions: int
    accuracy: float | None  # of the first step against the teacher
    behind: Difference | None  # the leader's minus this one's, paired and corrected
    why: str


@dataclass(frozen=True, kw_only=True)
class TeacherScore:
    """How well a teacher explains the drafter."""

    teacher: Teacher
    accuracy: Rate  # of the drafter's first step against it
    agreement: Rate | None  # of the teacher with the reference; None: it is the reference


@dataclass(frozen=True, kw_only=True)
class Searched:
    """All that a search found."""

    start: Wiring  # resolved
    best: Ranked
    ranked: tuple[Ranked, ...]  # the best first
    dropped: tuple[Dropped, ...]  # the closest first
    teachers: tuple[TeacherScore, ...]  # best first
    teacher: Teacher  # what the drafter was trained on, as far as the data tells
    teacher_clear: bool  # every other one explains it clearly worse, or chooses the same
    rounds: tuple[str, ...]  # what each round tried and took, in words
    scored: int  # wirings; each of them is in `ranked` or in `dropped`
    drafted: int  # of them, those that were compared behind the first step, too
    notes: tuple[str, ...]
    # What was searched at all: "states" and switches. What is not among it is as it was at the start.
    # None: whoever made this does not say.
    axes: tuple[str, ...] | None = None
    # Those of which another value than the best's cannot be told from it.
    unclear: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Raced:
    """What a race over a list of wirings left."""

    best: Ranked
    # Those whose accept length cannot be told from the best's, on the texts that both were scored on.
    ties: tuple[Ranked, ...]
    dropped: tuple[Dropped, ...]  # the closest first
    scored: int  # wirings

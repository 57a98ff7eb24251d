"""A row of the table of faults, and the ways in which one is planted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from eagle3.doctor.subject import EngineAsked
from tests.faults.drafters import LAYOUTS
from tests.faults.planting import Edit, nothing
from tests.faults.sound import DUMPS

T = TypeVar("T")


class By(str, Enum):
    """What names a fault."""

    doctor = "doctor"
    inspect_data = "inspect_data"
    loader = "drafter_test"  # which refuses a checkpoint before it scores anything
    samples = "drafter_test and inspect_data"  # which refuse samples
    layers = "layers"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One way to plant a fault, and what must then be said."""

    how: str
    by: By = By.doctor
    name: str = ""  # the finding's; empty where an error is the answer
    reads: str = ""  # words of it
    also: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()  # findings that come with it
    layouts: tuple[str, ...] = LAYOUTS  # of drafters, or of dumps where the fault is in one
    only: str = ""  # why not in the layouts that are left out
    edit: Edit | Mapping[str, Edit] = nothing  # of the drafter, or of the dump that is inspected
    data: Edit | None = nothing  # of the dump that doctor is given with the drafter; None: no dump
    target: Edit | None = None  # of a copy of the target
    variant: str = "plain"  # of the sound drafter
    engine: EngineAsked | Mapping[str, EngineAsked] | None = None  # None: one that fits
    trainer: str | None = None
    refused: str | Mapping[str, str | None] | None = (
        None  # words in which drafter_test refuses it too
    )
    first_layers: int | None = None  # of the target that inspect_data runs; None: all

    @property
    def in_dump(self) -> bool:
        """Whether the fault is in a dump rather than in a drafter."""
        return self.by in (By.inspect_data, By.samples)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The layouts in which it cannot be planted."""
        every = tuple(DUMPS) if self.in_dump else LAYOUTS
        return tuple(layout for layout in every if layout not in self.layouts)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of the 43 faults."""

    number: int
    fault: str
    serving: str  # what one sees in service
    planted: tuple[Planted, ...] = ()
    cannot: str = ""  # why files do not show it, or not always
    unseen: tuple[Planted, ...] = ()  # planted too, and passed in silence: no guess is made
    instead: str = ""  # what would


def of_layout(value: T | Mapping[str, T], layout: str) -> T:
    """A value that may be one for each layout."""
    return value[layout] if isinstance(value, Mapping) else value

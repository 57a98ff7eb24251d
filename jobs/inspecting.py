"""Finding out what slots are, with what can be had of the target: shared by the jobs that ask it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from eagle3.data import LAYOUTS
from eagle3.data.form import DataForm, RawSample
from eagle3.errors import BadInput
from eagle3.headers import find_tensors
from eagle3.samples import answer_start, check_lengths
from eagle3.slot_states import Located, locate
from eagle3.slot_verdicts import MOSTLY
from eagle3.slots import SlotMeter
from eagle3.target import TargetParts, read_tensor
from jobs.first_layers import (
    ANSWER,
    LONGEST,
    POSITIONS,
    FirstLayers,
    load_first_layers,
    plan_layers,
    run_layers,
)

T = TypeVar("T")


class TargetLayers:
    """The target's first layers, loaded when they are first run and kept."""

    def __init__(self, target: TargetParts) -> None:
        self.target = target
        self.loaded = 0
        self._model: Any = None

    def states(
        self, texts: Sequence[Tensor], layers: int, *, only: Sequence[int] | None = None
    ) -> list[Tensor]:
        """States 0 … `layers` or more of each text [T], or `only` these, [K, T, H] on the CPU.

        Raises BadInput.
        """
        if self._model is None or self.loaded < layers:
            self._model = None
            self._model = load_first_layers(self.target.folder, layers, self.target.device)
            self.loaded = layers
        return run_layers(self._model, texts, self.target.device, only)

    def drop(self) -> None:
        """Give the memory back."""
        self._model, self.loaded = None, 0


class Inspector:
    """Measures and locates the slots of one dump."""

    def __init__(
        self,
        target: TargetParts,
        form: DataForm,
        *,
        first_layers: int | None = None,
        also: Sequence[int] = (),
        layers: TargetLayers | None = None,
    ) -> None:
        """`also` are states that the plan of the first layers should reach as well."""
        self.target, self.form = target, form
        self.wanted = first_layers
        declared: list[int | None] = [slot.state for slot in form.slots]
        self.plan = plan_layers(target, first_layers, [*declared, *also])
        self.layers = layers

    def read(self, path: Path) -> RawSample:
        """One sample as stored, with its lengths checked. Raises BadInput."""
        sample = LAYOUTS[self.form.layout].read(path, self.form)
        check_lengths(sample, self.target.hidden)
        if not len(sample.input_ids):
            raise BadInput(f"{path} holds no tokens")
        return sample

    def meter(self, notes: list[str]) -> SlotMeter:
        """What measures the slots, with the target's parts that are at hand."""
        norm = had("which side of the final norm a slot lies on", self.target.final_norm, notes)
        return SlotMeter(
            self.target,
            len(self.form.slots),
            norm=norm,
            input_norm=None if norm is None else self.input_norm(one_plus=norm.one_plus),
            head=had("what the head makes of a slot", self.target.head, notes),
        )

    def input_norm(self, *, one_plus: bool) -> Tensor | None:
        """What the first layer's norm multiplies by, [H], where the target has such a norm."""
        name = f"{self.target.base}layers.0.input_layernorm.weight"
        found = find_tensors(self.target.folder, [name]).get(name)
        if found is None:
            return None
        weight = read_tensor(found).float().to(self.target.device)
        return weight + 1 if one_plus else weight

    def can_be_run(self, sample: RawSample) -> bool:
        """Whether all ids of a sample are the target's."""
        return 0 <= int(sample.input_ids.min()) <= int(sample.input_ids.max()) < self.target.vocab

    def locate(
        self, kept: Sequence[RawSample], meter: SlotMeter
    ) -> tuple[list[Located | None], FirstLayers]:
        """Each slot's place among the states that the target makes of the first texts."""
        nowhere: list[Located | None] = [None] * len(meter.figures)
        if not self.plan.layers or not kept:
            return nowhere, self.plan
        layers = self.layers or TargetLayers(self.target)
        try:
            made = layers.states([sample.input_ids for sample in kept], self.plan.layers)
        except BadInput as error:
            if self.wanted:
                raise
            return nowhere, replace(self.plan, layers=0, why=str(error))
        if self.layers is None:
            layers.drop()
        starts = [answer_start(sample.loss_mask) for sample in kept]
        norm = meter.norm
        normed = None
        located = []
        for i, figures in enumerate(meter.figures):
            rows = [sample.slots[i] for sample in kept]
            place = locate(rows, made, starts)
            if norm and not (place and place.found) and (figures.unit_share or 0) >= MOSTLY:
                normed = normed or [norm(states.to(norm.weight.device)).cpu() for states in made]
                behind = locate(rows, normed, starts)
                place = replace(behind, normed=True) if behind and behind.found else place
            located.append(place)
        return located, self.plan


def had(what: str, read: Callable[[], T], notes: list[str]) -> T | None:
    """A part of the target, or None with a note of what is not measured without it."""
    try:
        return read()
    except BadInput as error:
        notes.append(f"{what} was not measured: {error}")
        return None


def first_rows(sample: RawSample) -> RawSample:
    """The first positions of a sample, some of its answer among them, in memory of their own."""
    count = min(max(POSITIONS, answer_start(sample.loss_mask) + ANSWER), LONGEST)
    return replace(
        sample,
        input_ids=sample.input_ids[:count].clone(),
        loss_mask=sample.loss_mask[:count].clone(),
        slots=tuple(slot[:count].clone() for slot in sample.slots),
    )


def short(path: Path) -> str:
    """A sample file's name with its folder's."""
    return "/".join(path.parts[-2:])

"""Planting a row's faults and asking what is said of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from eagle3.checkpoint import load_drafter
from eagle3.connect import check_fit
from eagle3.data import find_data
from eagle3.doctor.findings import Finding
from eagle3.doctor.report import examine
from eagle3.doctor.subject import EngineAsked
from eagle3.errors import BadInput
from eagle3.samples import read_samples
from eagle3.target import load_target_parts
from jobs.events import Events
from jobs.inspect_data import open_job
from tests.faults.planting import nothing
from tests.faults.sound import Target, engine_of, make_target, write_drafter, write_dump
from tests.faults.table import By, Planted, of_layout


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is reported: findings, and the sentence in which drafter_test's readers refuse the files."""

    findings: tuple[Finding, ...]
    refused: str | None

    @property
    def names(self) -> set[str]:
        """The findings' names."""
        return {finding.name for finding in self.findings}


class Bench:
    """Sound files, made once, and copies of them to plant faults in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target: Target = make_target(folder / "target")
        self.kept: dict[tuple[str, ...], Path] = {}
        self.numbers = count()

    def drafter(self, layout: str, variant: str) -> Path:
        """A sound drafter; not to be edited."""
        return self.sound("drafter", layout, variant)

    def dump(self, layout: str) -> Path:
        """A sound dump; not to be edited."""
        return self.sound("dump", layout)

    def sound(self, *key: str) -> Path:
        """Sound files of a kind, made when they are first asked for."""
        if key not in self.kept:
            folder = self.folder / "-".join(key).replace(" ", "_")
            if key[0] == "drafter":
                write_drafter(folder, key[1], self.target, key[2])
            else:
                write_dump(folder, key[1], self.target)
            self.kept[key] = folder
        return self.kept[key]

    def spoilt(self, sound: Path, edit: Any) -> Path:
        """A copy with an edit; the sound folder itself where there is none."""
        if edit in (None, nothing):
            return sound
        folder = self.folder / f"planted-{next(self.numbers)}"
        shutil.copytree(sound, folder)
        edit(folder, self.target)
        return folder

    def told(self, planted: Planted, layout: str) -> Told:
        """What is said of a planted fault."""
        edit = of_layout(planted.edit, layout)
        target = self.spoilt(self.target.folder, planted.target)
        if planted.by is By.inspect_data or planted.by is By.drafter_test:
            return self.inspected(self.spoilt(self.dump(layout), edit), target, planted)
        return self.examined(
            self.spoilt(self.drafter(layout, planted.variant), edit),
            target,
            None if planted.data is None else self.spoilt(self.dump(layout), planted.data),
            of_layout(planted.engine, layout)
            if planted.engine is not None
            else engine_of(layout, planted.variant),
            planted.trainer,
        )

    def told_of_sound(self, planted: Planted, layout: str) -> Told:
        """What is said of the files that the fault was planted in, asked in the same way."""
        sound = replace(
            planted, edit=nothing, data=planted.data and nothing, target=None, engine=None, trainer=None
        )
        return self.told(sound, layout)

    def examined(
        self,
        drafter: Path,
        target: Path,
        data: Path | None,
        engine: EngineAsked,
        trainer: str | None,
    ) -> Told:
        """doctor's findings, and whether drafter_test loads the checkpoint."""
        report = examine(drafter, target, data, engine=engine, trainer=trainer)
        refused = None
        try:
            check_fit(load_drafter(drafter), load_target_parts(target))
        except BadInput as error:
            refused = str(error)
        return Told(findings=report.findings, refused=refused)

    def inspected(self, data: Path, target: Path, planted: Planted) -> Told:
        """inspect_data's findings, and whether drafter_test reads the samples."""
        request: Mapping[str, Any] = {
            "device": "cpu",
            "max_samples": None,
            "first_layers": planted.first_layers,
            "seed": 0,
            "inputs": {
                "target": {"path": str(target), "layout": "hf", "made": ""},
                "data": {
                    "path": str(data),
                    "states": None,
                    "layout": None,
                    "damaged": "fail",
                    "target_argmax": None,
                },
            },
        }
        refused = None
        try:
            parts = load_target_parts(target)
            form = find_data(data, hidden=parts.hidden, num_layers=parts.num_layers)
            for _ in read_samples(form, vocab=parts.vocab, hidden=parts.hidden):
                pass
        except BadInput as error:
            refused = str(error)
        if planted.by is By.drafter_test:
            return Told(findings=(), refused=refused)
        with Events(self.folder / f"events-{next(self.numbers)}.jsonl") as events:
            result = open_job(request, events).run_case({"case_id": "case"})
        found = [Finding(**{**f, "fix": tuple(f["fix"])}) for f in result["findings"]]
        return Told(findings=tuple(found), refused=refused)

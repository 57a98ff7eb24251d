"""Planting a row's faults and asking what is said of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from eagle3.doctor.findings import Finding
from eagle3.doctor.report import examine
from eagle3.doctor.subject import EngineAsked
from eagle3.errors import BadInput
from eagle3.samples import read_samples
from jobs import drafter_test, inspect_data
from jobs.events import Events
from tests.faults.drafters import engine_of, write_drafter
from tests.faults.form import Planted, of_layout
from tests.faults.planting import nothing
from tests.faults.sound import Target, make_target, write_dump


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is reported: findings, and the sentence in which drafter_test's readers refuse the files."""

    findings: tuple[Finding, ...]
    refused: str | None
    not_inspected: str | None = None  # why inspect_data ended

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
        self.told_before: dict[tuple[object, ...], Told] = {}
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
        if planted.in_dump:
            data = self.spoilt(self.dump(layout), edit)
            return self.inspected(data, target, planted.first_layers)
        return self.examined(
            self.spoilt(self.drafter(layout, planted.variant), edit),
            target,
            None if planted.data is None else self.spoilt(self.dump(layout), planted.data),
            of_layout(planted.engine, layout)
            if planted.engine is not None
            else engine_of(layout, planted.variant),
            planted.trainer,
            layout,
        )

    def told_of_sound(self, planted: Planted, layout: str) -> Told:
        """What is said of the files that the fault was planted in, asked in the same way."""
        sound = replace(
            planted,
            edit=nothing,
            data=planted.data and nothing,
            target=None,
            engine=None,
            trainer=None,
        )
        key = (planted.by, layout, planted.variant, planted.data is None, planted.first_layers)
        if key not in self.told_before:
            self.told_before[key] = self.told(sound, layout)
        return self.told_before[key]

    def examined(
        self,
        drafter: Path,
        target: Path,
        data: Path | None,
        engine: EngineAsked,
        trainer: str | None,
        layout: str,
    ) -> Told:
        """doctor's findings, and whether drafter_test takes the files."""
        report = examine(drafter, target, data, engine=engine, trainer=trainer)
        refused = self.refusal(drafter, target, data or self.dump(layout))
        return Told(findings=report.findings, refused=refused)

    def inspected(self, data: Path, target: Path, first_layers: int | None) -> Told:
        """inspect_data's findings, and whether drafter_test takes the files."""
        request = {
            "device": "cpu",
            "max_samples": None,
            "first_layers": first_layers,
            "seed": 0,
            "inputs": inputs(target, data),
        }
        refused = self.refusal(self.drafter("specforge", "plain"), target, data)
        try:
            with Events(self.events()) as events:
                result = inspect_data.open_job(request, events).run_case({"case_id": "case"})
        except BadInput as error:
            return Told(findings=(), refused=refused, not_inspected=str(error))
        found = [Finding(**{**f, "fix": tuple(f["fix"])}) for f in result["findings"]]
        return Told(findings=tuple(found), refused=refused)

    def refusal(self, drafter: Path, target: Path, data: Path) -> str | None:
        """The sentence in which drafter_test refuses a checkpoint or samples, None where it does not."""
        request = {
            "device": "cpu",
            "steps": 1,
            "truth": "next_token",
            "seed": 0,
            "max_samples": None,
            "inputs": {**inputs(target, data), "drafter": {"path": str(drafter)}},
        }
        try:
            with Events(self.events()) as events:
                job = drafter_test.open_job(request, events)
            for _ in read_samples(job.form, vocab=job.target.vocab, hidden=job.target.hidden):
                pass
        except BadInput as error:
            return str(error)
        return None

    def events(self) -> Path:
        """A file for a job's events."""
        return self.folder / f"events-{next(self.numbers)}.jsonl"


def inputs(target: Path, data: Path) -> dict[str, Any]:
    """The target and the data of a job's request."""
    return {
        "target": {"path": str(target), "layout": "hf", "made": ""},
        "data": {
            "path": str(data),
            "states": None,
            "layout": None,
            "damaged": "fail",
            "target_argmax": None,
        },
    }

"""Measure what the slots of captured samples are, before a number that rests on them is believed.

Samples are streamed, so memory stays flat. The target gives its embedding, final norm and head, and
its first layers, or all of them, where they fit in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eagle3.data import find_data, read_capture
from eagle3.data.argmax import read_argmax
from eagle3.data.form import RawSample
from eagle3.doctor.findings import Finding, ordered
from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.metrics import Truth
from eagle3.slot_findings import findings, undecided
from eagle3.slot_verdicts import Judged, judge
from eagle3.slots import HEAD_ROWS
from eagle3.target import load_target_parts
from eagle3.texts import SpecialIds, TextFigures, measured, sample_zero, special_ids
from jobs.capture_states import load_tokenizer
from jobs.events import Events
from jobs.first_layers import TEXTS
from jobs.inputs import capture_missing_data, pick_device, target_folder
from jobs.inspecting import Inspector, first_rows, short

HEAD_SAMPLES = 200  # that go through the head, spread evenly over the files


def open_job(request: Mapping[str, Any], events: Events) -> InspectData:
    """Find the data and what can be had of the target."""
    device = pick_device(request["device"], events)
    inputs = request["inputs"]
    capture_missing_data(inputs["data"], events)
    return InspectData(request, events, device, target_folder(inputs["target"]))


class InspectData:
    """Answers cases `{"case_id": …}`."""

    def __init__(
        self, request: Mapping[str, Any], events: Events, device: str, folder: Path
    ) -> None:
        data = request["inputs"]["data"]
        self.events = events
        self.device = device
        self.folder = folder
        self.seed = int(request["seed"])
        self.skip_damaged = data["damaged"] == "skip"
        self.max_samples: int | None = request["max_samples"]
        self.argmax = Path(data["target_argmax"]) if data["target_argmax"] else None
        self.target = load_target_parts(folder, device)
        self.form = find_data(
            Path(data["path"]),
            layout=data["layout"],
            states=data["states"],
            hidden=self.target.hidden,
            num_layers=self.target.num_layers,
        )
        events.note(f"{self.form.folder} is in the layout {self.form.layout}: {self.form.why}")
        self.inspector = Inspector(self.target, self.form, first_layers=request["first_layers"])

    def run_case(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Verdicts and figures of every slot, findings, and what the texts are."""
        notes = list(self.form.notes)
        meter = self.inspector.meter(notes)
        tokenizer = self.tokenizer()
        texts = TextFigures(vocab=self.target.vocab, special=self.special_ids(tokenizer))
        damaged: list[str] = []
        kept: list[RawSample] = []
        first: dict[str, Any] = {}
        digest = hashlib.sha256()
        has_argmax = False
        total = min(len(self.form.files), self.max_samples or len(self.form.files))
        stride = max(1, -(-total // HEAD_SAMPLES))
        for number, sample in enumerate(self.samples(damaged)):
            first = first or template(sample, tokenizer)
            digest.update(sample_digest(sample))
            texts.add(sample)
            has_argmax = has_argmax or sample.target_argmax is not None
            meter.add(sample, short(sample.path), through_head=number % stride == 0)
            if len(kept) < TEXTS and self.inspector.can_be_run(sample):
                kept.append(first_rows(sample))
            self.events.progress("inspect", number + 1, total)
        if not texts.samples:
            raise BadInput(f"{self.form.folder} holds no sample that can be read")
        located, ran = self.inspector.locate(kept, meter)
        slots = judge(self.form, meter.figures, located, self.target.num_layers, self.seed)
        found = [
            *findings(self.form, slots, meter.same, texts.zero_positions),
            *texts.findings(str(self.form.folder)),
            *self.origin_findings(damaged),
        ]
        return {
            "metrics": teacher_metrics(slots[self.form.teacher]),
            "curves": {},
            "wiring": {},
            "slots": [slot.plain(teacher=slot.index == self.form.teacher) for slot in slots],
            "findings": [{**asdict(f), "fix": list(f.fix)} for f in ordered(found)],
            "data": self.form.plain(),
            "texts": texts.plain(),
            "template": first,
            "first_layers": ran.plain(),
            "fingerprints": {
                "target": self.target.fingerprint,
                "data": f"sha256:{digest.hexdigest()}",
            },
            "notes": [
                *notes,
                *undecided(self.form, slots, argmax=has_argmax),
                *left_out(slots[self.form.teacher], texts),
            ],
        }

    def samples(self, damaged: list[str]) -> Iterator[RawSample]:
        """The samples one by one as stored; what is damaged ends the job or is added to `damaged`."""
        given = 0
        for place, path in enumerate(self.form.files):
            if given == self.max_samples:
                return
            try:
                sample = self.read(path)
            except BadInput as error:
                damaged.append(str(error))
                if self.skip_damaged:
                    continue
                rest = self.form.files[place + 1 : self.max_samples]
                count = 1 + sum(self.is_damaged(other) for other in rest)
                raise BadInput(
                    f"{error} ({count} of {place + 1 + len(rest)} files cannot be used; "
                    "data.damaged=skip leaves such files out and names them)"
                ) from error
            given += 1
            yield sample

    def read(self, path: Path) -> RawSample:
        """One sample with its lengths checked, and the target's choices where they lie apart."""
        sample = self.inspector.read(path)
        if self.argmax is None:
            return sample
        choices = read_argmax(self.argmax, path, self.form.folder, sample.input_ids)
        return replace(sample, target_argmax=choices)

    def is_damaged(self, path: Path) -> bool:
        """Whether a file cannot be read as a sample."""
        try:
            self.read(path)
        except BadInput:
            return True
        return False

    def special_ids(self, tokenizer: Any) -> SpecialIds:
        """The target's special tokens, by its configs and, where it has one, its tokenizer."""
        generation = self.folder / "generation_config.json"
        named = special_ids(
            read_json(self.folder / "config.json"),
            read_json(generation) if generation.is_file() else {},
        )
        known = set().union(*(ids for _, ids in named.kinds()))
        others = set() if tokenizer is None else set(tokenizer.all_special_ids) - known
        return replace(named, others=frozenset(others))

    def tokenizer(self) -> Any:
        """The target's tokenizer, or None where it has none that can be loaded."""
        try:
            return load_tokenizer(self.folder)
        except (BadInput, ImportError):
            return None

    def origin_findings(self, damaged: Sequence[str]) -> Iterator[Finding]:
        """What is wrong with the folder as a whole."""
        where = str(self.form.folder)
        if damaged:
            yield measured(
                "damaged-files",
                "error",
                where,
                f"{len(damaged)} files cannot be read and were left out, the first: {damaged[0]}",
                "a trainer that drops them in silence has trained on less than it says",
                "write these files again",
            )
        captured = read_capture(self.form.folder) or {}
        if captured.get("target") not in (None, self.target.fingerprint):
            yield measured(
                "another-target",
                "error",
                where,
                f"capture.json says that the data was captured from another target "
                f"({captured['target'][:19]}…) than {self.folder} ({self.target.fingerprint[:19]}…)",
                "states, head and choices of two targets are mixed",
                "name the target that the data is from, or capture again",
            )


def teacher_metrics(teacher: Judged) -> dict[str, Any]:
    """How often the head makes the truth's choice of the teacher slot, under each truth's name."""
    named = (
        ("teacher_agreement", Truth.target_argmax),
        ("teacher_next_token", Truth.next_token),
    )
    rates = {name: teacher.agreement(truth) for name, truth in named}
    return {name: found.plain() for name, found in rates.items() if found is not None}


def left_out(teacher: Judged, texts: TextFigures) -> Iterator[str]:
    """That the teacher's rates count a part of the scored positions, where they do."""
    counted = sum(c.denominator for c in teacher.counts(Truth.next_token, 0))
    scored = texts.masked - texts.first_masked  # nothing stands before a first token
    if 0 < counted < scored:
        yield (
            f"teacher_agreement and teacher_next_token count {counted} of {scored} scored positions "
            f"(at most {HEAD_ROWS} a sample, of at most {HEAD_SAMPLES} samples); drafter_test counts "
            "all, so that its figures are others"
        )


def template(sample: RawSample, tokenizer: Any) -> dict[str, Any]:
    """The first sample's prompt by its hashes; that of its text where the tokenizer is known."""
    prompt = sample_zero(sample)
    ids = sample.input_ids[: prompt["prompt_tokens"]].tolist()
    text = None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    hashed = None if text is None else hashlib.sha256(text.encode()).hexdigest()
    return {**prompt, "prompt_text_sha256": hashed}


def sample_digest(sample: RawSample) -> bytes:
    """A digest of what was measured: ids, mask, choices, first and last row of every slot."""
    digest = hashlib.sha256()
    tensors = [sample.input_ids, sample.loss_mask]
    tensors += [] if sample.target_argmax is None else [sample.target_argmax]
    tensors += [slot[row].float() for slot in sample.slots for row in (0, -1)]
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()

"""Score a drafter on captured states: one case a wiring.

The drafter, the target's parts and the form of the data are read once; samples are streamed for each
case, so memory stays flat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3 import trainer_metrics
from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.connect import Connected, check_fit, connect
from eagle3.data import find_data
from eagle3.data.argmax import check_argmax, with_argmax
from eagle3.data.form import DataForm
from eagle3.doctor.findings import Finding
from eagle3.errors import BadInput
from eagle3.metrics import (
    Count,
    Rate,
    Truth,
    count_chains,
    judge_chains,
    scored_rows,
    summarise,
    truth_tokens,
)
from eagle3.samples import LeftOut, Sample, check_stored, read_samples
from eagle3.target import TargetParts, load_target_parts
from eagle3.trainer_metrics.tally import Tally
from eagle3.tree import check_sizes, count_trees, judge_trees
from eagle3.truths import (
    AGREEMENT,
    count_truths,
    embedding_findings,
    embedding_rows,
    reference_of,
    teacher_findings,
    truths_of,
    why_no_teacher,
)
from eagle3.wiring import Wiring
from jobs.events import Events
from jobs.inputs import capture_missing_data, check_captured, pick_device, target_folder

OURS = "ours"
Figure = Rate | trainer_metrics.Figure


def open_job(request: Mapping[str, Any], events: Events) -> DrafterTest:
    """Read everything that all cases share."""
    device = pick_device(request["device"], events)
    inputs = request["inputs"]
    capture_missing_data(inputs["data"], events)
    target = load_target_parts(target_folder(inputs["target"]), device)
    drafter = load_drafter(
        Path(inputs["drafter"]["path"]), device, layout=inputs["drafter"].get("layout")
    )
    check_fit(drafter, target)
    form = find_data(
        Path(inputs["data"]["path"]),
        layout=inputs["data"].get("layout"),
        states=inputs["data"]["states"],
        hidden=target.hidden,
        num_layers=target.num_layers,
    )
    check_captured(form.folder, target)
    events.note(f"data {form.folder}: layout {form.layout}, since {form.why}")
    for note in (*drafter.notes, *form.notes):
        events.note(note)
    return DrafterTest(request, events, device, target, drafter, form)


@dataclass
class Counts:
    """Raw counts of the texts so far, each a list with an entry a text."""

    paths: list[Path] = field(default_factory=list)
    chains: list[dict[str, Count]] = field(default_factory=list)
    truths: list[dict[str, Count]] = field(default_factory=list)
    references: set[Truth] = field(default_factory=set)
    trainers: list[dict[str, Tally]] = field(default_factory=list)
    embedding: list[Count] = field(default_factory=list)  # of rows declared to be state 0


class DrafterTest:
    """Answers cases `{"case_id": …, "wiring": {…}}`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        events: Events,
        device: str,
        target: TargetParts,
        drafter: DrafterCheckpoint,
        form: DataForm,
    ) -> None:
        self.steps = int(request["steps"])
        self.truth = Truth(request["truth"])
        self.tree: Mapping[str, int] | None = request.get("tree")
        trainers = [name for name in request.get("metrics", [OURS]) if name != OURS]
        ttt_steps = request.get("ttt_steps")
        self.trainers = {name: ttt_steps or trainer_metrics.STEPS[name] for name in trainers}
        self.seed = int(request["seed"])
        self.events = events
        self.device = device
        self.target = target
        self.checkpoint = drafter
        self.form = form
        self.max_samples: int | None = request["max_samples"]
        data = request["inputs"]["data"]
        self.damaged = data.get("damaged", "fail")
        self.argmax = Path(data["target_argmax"]) if data.get("target_argmax") else None
        if self.argmax is not None:
            check_argmax(self.argmax, target.fingerprint)
        self.no_teacher = why_no_teacher(target, form.slots[form.teacher].normed)
        if self.no_teacher and (self.trainers or self.truth is Truth.stored_teacher):
            raise BadInput(f"the stored teacher's choices cannot be had: {self.no_teacher}")

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics, curves, counts a sample, the resolved wiring and fingerprints of one wiring."""
        wiring = Wiring.parse(case["wiring"])
        if self.trainers and (switches := wiring.untrained()):
            raise BadInput(
                f"the figures of {' and '.join(self.trainers)} are of a drafter as it was trained; "
                f"leave them out with {', '.join(switches)}"
            )
        tied = connect(self.checkpoint, self.target, wiring)
        check_stored(self.form, tied.states)
        if self.tree:
            check_sizes(self.steps, **self.tree, draft_vocab=len(tied.to_target))
        total = len(self.form.files[: self.max_samples])
        counts, left_out, digest = Counts(), LeftOut(), hashlib.sha256()
        for sample in self.samples(left_out):
            digest.update(sample_digest(sample))
            counts.embedding.append(embedding_rows(sample, self.target))
            self.score(tied, sample, counts)
            self.events.progress("score", len(counts.paths), total)
        metrics, curves, findings, notes = self.figures(counts)
        said = [
            *left_out.notes(),
            *vocabulary_notes(tied),
            *tied.notes,
            *self.wiring_notes(tied),
            *notes,
        ]
        for note in said:
            self.events.note(note)
        said += self.trainers_notes()
        return {
            "metrics": {name: figure.plain() for name, figure in metrics.items()},
            "curves": {
                name: [{"step": step, **figure.plain()} for step, figure in points]
                for name, points in curves.items()
            },
            "findings": [asdict(finding) for finding in findings],
            "samples": sample_counts(counts),
            "wiring": {
                **wiring.plain(),
                "states": list(tied.states),
                "stored_states": [slot.state for slot in self.form.slots],
            },
            "drafter": self.checkpoint.form.plain(),
            "data": self.form.plain(),
            "fingerprints": {
                "target": self.target.fingerprint,
                "drafter": self.checkpoint.fingerprint,
                "data": f"sha256:{digest.hexdigest()}",
            },
            "notes": [*self.checkpoint.notes, *self.form.notes, *said],
        }

    def samples(self, left_out: LeftOut) -> Iterator[Sample]:
        """The samples, with the target's choices from beside the data where they lie there."""
        samples = read_samples(
            self.form,
            vocab=self.target.vocab,
            hidden=self.target.hidden,
            device=self.device,
            damaged=self.damaged,
            max_samples=self.max_samples,
            left_out=left_out,
        )
        if self.argmax is None:
            return samples
        return with_argmax(samples, self.argmax, self.form.folder, self.target.vocab)

    def score(self, tied: Connected, sample: Sample, counts: Counts) -> None:
        """Add one text's raw counts."""
        rows = scored_rows(sample.loss_mask)
        truths = truths_of(
            sample,
            rows,
            teacher=None if self.no_teacher else self.target,
            steps=self.steps if self.truth is Truth.stored_teacher else 1,
        )
        if self.truth not in truths:
            truth_tokens(sample.input_ids, None, self.truth, str(sample.path))  # says what lacks
        ids, aux, mask = sample.input_ids, sample.aux(tied.states), sample.loss_mask
        drafted = tied.chains(ids, aux, rows, steps=self.steps)
        chains = judge_chains(drafted, rows, ids, mask, truths[self.truth], tied.vocabulary)
        found = count_chains(chains)
        if self.tree:
            topk, draft_tokens = self.tree["topk"], self.tree["draft_tokens"]
            trees = tied.trees(
                ids, aux, rows, steps=self.steps, topk=topk, draft_tokens=draft_tokens
            )
            truth = truths[self.truth]
            found |= count_trees(judge_trees(trees, rows, ids, mask, truth, tied.vocabulary))
        counts.paths.append(sample.path)
        counts.chains.append(found)
        counts.truths.append(count_truths(drafted[:, 0], rows, truths))
        counts.references.add(reference_of(truths))
        if self.trainers:
            counts.trainers.append(
                trainer_metrics.count_text(
                    self.trainers,
                    tied.drafter,
                    tied.embedding,
                    sample,
                    aux,
                    trainer_metrics.stored_teacher(sample, self.target),
                    to_target=tied.to_target,
                    head=tied.head,
                )
            )

    def figures(
        self, counts: Counts
    ) -> tuple[
        dict[str, Figure], dict[str, Sequence[tuple[int, Figure]]], list[Finding], list[str]
    ]:
        """Metrics, curves, findings and notes over all texts."""
        metrics: dict[str, Figure] = {}
        curves: dict[str, Sequence[tuple[int, Figure]]] = {}
        rates, points, notes = summarise(counts.chains, self.truth, self.steps, self.seed)
        metrics |= rates
        curves |= points
        shared = set.intersection(*(set(text) for text in counts.truths))
        # Where samples differ in what they hold, what rests on all of them is dropped, and named.
        (reference, *mixed) = sorted(counts.references)
        kept = shared - {AGREEMENT} if mixed else shared
        partly = sorted(set().union(*counts.truths) - kept)
        if partly:
            notes.append(f"some samples lack what {', '.join(partly)} needs, so it is left out")
        texts = [{name: text[name] for name in text if name in kept} for text in counts.truths]
        truths, _, _ = summarise(texts, reference, self.steps, self.seed)
        metrics |= truths
        teacher = self.form.slots[self.form.teacher]
        state = "of no declared state" if teacher.state is None else f"state {teacher.state}"
        folder = str(self.form.folder)
        findings = [
            *embedding_findings(counts.embedding, folder),
            *teacher_findings(truths, folder, f"{teacher.name}, {state}"),
        ]
        if self.trainers:
            theirs, their_curves, their_notes = trainer_metrics.summarise(
                counts.trainers, self.seed
            )
            metrics |= theirs
            curves |= their_curves
            notes += their_notes
        return metrics, curves, findings, notes

    def wiring_notes(self, tied: Connected) -> Iterator[str]:
        """What a person may take for granted that is not so."""
        if self.no_teacher:
            yield f"nothing is compared with the stored teacher: {self.no_teacher}"
        if list(tied.states) != sorted(tied.states):
            yield (
                f"states {', '.join(map(str, tied.states))} are fed in this order; engines feed theirs "
                "ascending, whatever the list says"
            )
        if self.tree and self.tree["draft_tokens"] <= self.steps:
            yield (
                f"a tree of {self.tree['draft_tokens']} tokens, the root included, is never deeper than "
                f"{self.tree['draft_tokens'] - 1} steps, however many job.steps are drafted"
            )

    def trainers_notes(self) -> list[str]:
        """Why a trainer's own figures may still not be its log's; long, so only kept with the run."""
        notes = []
        for name in self.trainers:
            listed = trainer_metrics.DIFFERENCES[name]
            notes.append(f"{name}'s own figures differ from its log in: {'; '.join(listed)}")
            self.events.note(
                f"{len(listed)} differences from {name}'s own log remain; they stand under 'notes' in "
                "the run's result.json"
            )
        return notes


def vocabulary_notes(tied: Connected) -> list[str]:
    """Where this case's reading of d2t leads to tokens that t2d says are not drafted."""
    outside = int((~tied.vocabulary[tied.to_target]).sum())
    if not outside:
        return []
    return [
        f"read so, {outside} of {len(tied.to_target)} draft ids lead to tokens outside t2d, from "
        "which coverage is counted"
    ]


def sample_counts(counts: Counts) -> list[dict[str, Any]]:
    """Raw counts a sample, from which every figure can be computed again."""
    trainers = counts.trainers or [{}] * len(counts.paths)
    rows = zip(counts.paths, counts.chains, counts.truths, trainers, strict=True)
    return [
        {
            "file": "/".join(path.parts[-2:]),
            **{
                name: [count.numerator, count.denominator]
                for found in (chains, truths, theirs)
                for name, count in found.items()
            },
        }
        for path, chains, truths, theirs in rows
    ]


def sample_digest(sample: Sample) -> bytes:
    """A digest of what was scored: ids, mask, the target's choices, and every slot."""
    digest = hashlib.sha256()
    tensors = [sample.input_ids, sample.loss_mask]
    tensors += [] if sample.target_argmax is None else [sample.target_argmax]
    for tensor in (*tensors, *sample.stored):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()

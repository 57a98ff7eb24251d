"""Find the wiring that a drafter was trained with, and on which teacher, from what the data holds.

The target's parts, the drafter and the samples are read once; the figures that the case answers with
are the best wiring's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from eagle3.data.argmax import check_argmax
from eagle3.doctor.findings import Finding
from eagle3.errors import BadInput
from eagle3.metrics import Count
from eagle3.samples import LeftOut, Sample, asked_in_vain
from eagle3.search.axes import in_words
from eagle3.search.score import Scorer
from eagle3.search.search import Searched
from eagle3.search.teachers import Teacher, teachers_of, without_slots
from eagle3.search.texts import Text, known_states, load_texts, why_no_embedding
from eagle3.truths import embedding_findings, embedding_rows
from eagle3.wiring import Wiring
from jobs.asked import asked_of
from jobs.drafter_test import sample_digest
from jobs.events import Events
from jobs.first_layers import plan_layers
from jobs.inputs import capture_missing_data, pick_device, target_folder
from jobs.inspecting import short
from jobs.neighbours import better_neighbour, missing_beside, with_made
from jobs.question import Kit, Read, read
from jobs.reference import reference_of
from jobs.search_tables import curves, row_name, tables
from jobs.searching import data_order, rope_of, search_texts


def open_job(request: Mapping[str, Any], events: Events) -> WiringSearch:
    """Read the target; everything else belongs to the one case."""
    device = pick_device(request["device"], events)
    inputs = request["inputs"]
    capture_missing_data(inputs["data"], events)
    return WiringSearch(request, events, Kit(target_folder(inputs["target"]), device))


class WiringSearch:
    """Answers cases `{"case_id": …}`."""

    def __init__(self, request: Mapping[str, Any], events: Events, kit: Kit) -> None:
        self.asked = asked_of({**request, "engine": None})
        self.events, self.kit = events, kit
        self.digest = hashlib.sha256()
        self.embedding: list[Count] = []  # of rows that are declared to be state 0

    def run_case(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """The best wiring's figures, and the search's tables."""
        target, notes = self.kit.target, list[str]()
        known = read(self.asked, self.kit)
        form = known.form
        self.events.note(f"data {form.folder}: layout {form.layout}, since {form.why}")
        begun = self.asked.start or known.declared
        if not any(slot.state is not None for slot in form.slots):
            raise BadInput(asked_in_vain(begun.states(target.num_layers), [], str(form.folder)))
        left_out = LeftOut()
        texts = self.texts(known, begun, left_out, notes)
        lacking = [k for k in begun.states(target.num_layers) if k not in known_states(texts)]
        if lacking and self.asked.start is not None:
            raise BadInput(asked_in_vain(lacking, known_states(texts), str(form.folder)))
        reference = reference_of(texts)
        teachers = [
            teacher
            for teacher in teachers_of(form, target, has_argmax=reference == "target_argmax")
            if all(teacher.name in text.truths for text in texts)
        ]
        searched = self.search(known, texts, teachers)
        if self.asked.neighbours and not self.states_are_said():
            texts, searched = self.wider(known, texts, teachers, searched, notes)
        notes += left_out.notes()
        notes += self.said(known, begun, texts, reference, searched)
        for note in (*known.checkpoint.notes, *form.notes, *notes):
            self.events.note(note)
        best = searched.best
        rates = {
            "accuracy": best.accuracy,
            "accept_length": best.accept_length,
            "coverage": best.coverage,
        }
        return {
            "metrics": {name: rate.plain() for name, rate in rates.items()},
            "curves": curves(best),
            "findings": [asdict(finding) for finding in self.findings(str(form.folder))],
            "samples": [
                {
                    "file": short(text.path),
                    **{name: [c.numerator, c.denominator] for name, c in counts.items()},
                }
                for text, counts in zip(texts, best.counts, strict=True)
            ],
            "wiring": {
                **best.wiring.plain(),
                "states": list(best.wiring.states()),
                "stored_states": [slot.state for slot in form.slots],
            },
            "drafter": known.checkpoint.form.plain(),
            "data": form.plain(),
            "fingerprints": {
                "target": target.fingerprint,
                "drafter": known.checkpoint.fingerprint,
                "data": f"sha256:{self.digest.hexdigest()}",
            },
            "notes": [*known.checkpoint.notes, *form.notes, *notes],
            **tables(searched),
        }

    def search(
        self,
        known: Read,
        texts: Sequence[Text],
        teachers: Sequence[Teacher],
        start: Wiring | None = None,
    ) -> Searched:
        """From the wiring that is stated, or from what the files declare and the data's own order.

        `start` is tried beside it.
        """
        starts = [self.asked.start or known.declared, *([start] if start is not None else [])]
        in_order = data_order(known.declared, known.form)
        if self.asked.start is None and in_order is not None:
            starts.append(in_order)
        found, _ = search_texts(
            self.asked,
            known.checkpoint,
            self.kit.target,
            texts,
            starts=starts,
            teachers=teachers,
            progress=self.events.progress,
        )
        return found

    def wider(
        self,
        known: Read,
        texts: list[Text],
        teachers: Sequence[Teacher],
        found: Searched,
        notes: list[str],
    ) -> tuple[list[Text], Searched]:
        """The search again from a neighbour of what it found, where one is clearly better."""
        target, best = self.kit.target, found.best.wiring
        beside = {k + by for k in best.states() for by in (-1, 1)}
        plan = plan_layers(target, None, sorted(k for k in beside if 0 <= k <= target.num_layers))
        missing = missing_beside(best.states(), texts, plan.layers)
        if unmade := missing_beside(best.states(), texts, target.num_layers)[len(missing) :]:
            notes.append(
                f"state {listed(unmade)} is not stored and not tried: {plan.layers} of the target's "
                f"first layers are run here, since {plan.why}"
            )
        try:
            more = with_made(self.kit.layers, texts, missing)
        except BadInput as error:
            notes.append(f"state {listed(missing)} is not stored and not tried: {error}")
            return texts, found
        self.kit.layers.drop()
        leader = better_neighbour(
            Scorer(known.checkpoint, target, more, steps=self.asked.steps),
            best,
            known_states(more),
            teacher=found.teacher.name,
            tried=found.scored,
            seed=self.asked.seed,
        )
        if leader is None:
            if missing:
                notes.append(f"state {listed(missing)}, made by the target, is not clearly better")
            return texts, found
        notes.append(
            f"{in_words('states', leader.states())}, with a state that is not stored, is clearly "
            "better than what the data holds"
        )
        return more, self.search(known, more, teachers, start=leader)

    def states_are_said(self) -> bool:
        """Whether the request says which states to try."""
        return "states" in self.asked.fixed or "states" in self.asked.only

    def resolved(self, known: Read, wiring: Wiring) -> Wiring:
        """The wiring as the search speaks of it."""
        return wiring.resolved(known.checkpoint.form)

    def texts(self, known: Read, begun: Wiring, left_out: LeftOut, notes: list[str]) -> list[Text]:
        """Every text with every teacher's choices, and with states that are made for it."""
        asked, target, form = self.asked, self.kit.target, known.form
        if asked.argmax is not None:
            check_argmax(asked.argmax, target.fingerprint)
        stored = {slot.state for slot in form.slots if slot.state is not None and not slot.normed}
        named = {k for states in asked.more_states for k in states}
        wanted = {k for k in (*begun.states(target.num_layers), *named) if k > 0} - stored
        making: list[int] = []
        if self.asked.neighbours and wanted:
            plan = plan_layers(target, None, [*stored, *wanted])
            making = sorted(k for k in wanted if k <= plan.layers)
            if beyond := sorted(wanted - set(making)):
                notes.append(
                    f"state {listed(beyond)} is not stored and not tried: {plan.layers} of the "
                    f"target's first layers are run here, since {plan.why}"
                )

        def made(ids: Sequence[Tensor]) -> list[dict[int, Tensor]]:
            whole = self.kit.layers.states(ids, making[-1])
            return [{k: states[k].clone() for k in making} for states in whole]

        texts = load_texts(
            form,
            target,
            max_samples=asked.max_samples,
            damaged=asked.damaged,
            argmax=asked.argmax,
            steps=asked.steps,
            left_out=left_out,
            device=target.device,
            more_states=made if making else None,
            seen=self.seen,
            progress=lambda done, total: self.events.progress("read", done, total),
        )
        self.kit.layers.drop()
        if making:
            notes.append(f"state {listed(making)} is not stored: made by the target's first layers")
        elif not self.asked.neighbours:
            notes.append(
                "states one off those of the start are only tried where the data stores them; "
                "job.axes.neighbours=true makes them with the target's first layers"
            )
        if 0 not in stored:
            why = why_no_embedding(target)
            notes.append(
                why
                or "state 0 is not stored: taken from the target's embedding, which is not scaled"
            )
        return texts

    def seen(self, sample: Sample) -> None:
        """What is kept of a sample beside its text."""
        self.digest.update(sample_digest(sample))
        self.embedding.append(embedding_rows(sample, self.kit.target))

    def findings(self, where: str) -> list[Finding]:
        """What the data itself shows to be otherwise than declared."""
        return embedding_findings(self.embedding, where)

    def said(
        self, known: Read, begun: Wiring, texts: Sequence[Text], reference: str, found: Searched
    ) -> Iterator[str]:
        """What a person may take for granted that is not so."""
        start = self.resolved(known, begun)
        if self.asked.start is None:
            yield f"the search starts from {known.declared_by}"
        if lacking := [k for k in start.states() if k not in known_states(texts)]:
            yield (
                f"state {listed(lacking)} of the declared wiring is not in the data, so the search "
                f"starts from {in_words('states', found.start.states())} instead"
            )
        if reference == "next_token":
            yield (
                "the data has no target_argmax (or not every sample has), so accept lengths are held "
                "against the text's next token, which is the target's choice only where the target "
                "wrote the text greedily; job=capture_states data=path adds it"
            )
        if why := without_slots(self.kit.target):
            yield f"nothing is compared with what the stored slots would teach: {why}"
        if rope_of(self.kit.target) is None:
            yield "rope=target is not tried: the target's config states no rope that is run here"
        if len(texts) == 1:
            yield "one text alone says nothing about the spread between texts: nothing is clearly better"
        if not found.teacher_clear:
            yield "which teacher the drafter was trained on is not clear from this data"
        if any(ranked.tied for ranked in found.ranked):
            tied = [row_name(ranked) for ranked in found.ranked if ranked.tied]
            yield f"tied with the best in accept length: {'; '.join(tied)}"
        for dropped in found.dropped:
            if dropped.behind is None:
                yield f"{', '.join(dropped.changed)} cannot be scored: {dropped.why}"
        yield from found.notes


def listed(numbers: Sequence[int]) -> str:
    """Numbers in words."""
    return ", ".join(map(str, numbers))

"""Name the cause: what a drafter was trained with, what an engine does instead, what that costs.

`jobs.diagnosing` answers; this job asks it the request's question and writes the answer down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jobs.asked import asked_of
from jobs.diagnosing import Answer, diagnose_folder
from jobs.events import Events
from jobs.inputs import capture_missing_data, pick_device, target_folder
from jobs.inspecting import short
from jobs.question import Asked, Kit, check_engine
from jobs.search_tables import tables
from jobs.served_live import Server, attached


def open_job(request: Mapping[str, Any], events: Events) -> Diagnose:
    """Read the target; what cannot be asked of an engine is refused before anything is captured."""
    asked, server = asked_of(request), None
    inputs, url = request["inputs"], (request.get("engine") or {}).get("url")
    if url is not None:
        server, asked = attached(asked, url, target_folder(inputs["target"]))
    check_engine(asked)
    device = pick_device(request["device"], events)
    capture_missing_data(inputs["data"], events)
    return Diagnose(asked, events, Kit(target_folder(inputs["target"]), device), server)


class Diagnose:
    """Answers cases `{"case_id": …}`."""

    def __init__(self, asked: Asked, events: Events, kit: Kit, server: Server | None) -> None:
        self.asked, self.server = asked, server
        self.events, self.kit = events, kit

    def run_case(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """The diagnosis with the search's tables and the figures of the trained and served wiring."""
        answer = diagnose_folder(self.asked, self.kit, self.events.progress, self.server)
        for note in answer.notes:
            self.events.note(note)
        return result_of(answer, self.kit)


def result_of(answer: Answer, kit: Kit) -> dict[str, Any]:
    """The answer as a result file's content."""
    e, d = answer.evidence, answer.diagnosis
    metrics = {
        "accuracy": e.trained.accuracy,
        "accept_length": e.trained.accept_length,
        "coverage": e.trained.coverage,
    }
    if e.as_served is not None:
        metrics["accept_length_served"] = e.as_served.accept_length
        metrics["accuracy_served"] = e.as_served.accuracy
    return {
        "metrics": {name: rate.plain() for name, rate in metrics.items() if rate.denominator},
        "curves": {
            "step_accuracy/conditional": [
                {"step": step, **rate.plain()} for step, rate in e.trained.conditional
            ]
        },
        "findings": [{**asdict(f), "fix": list(f.fix)} for f in d.findings],
        "samples": [
            {
                "file": short(text.path),
                **{name: [c.numerator, c.denominator] for name, c in counts.items()},
            }
            for text, counts in zip(answer.texts, e.trained.counts, strict=True)
        ],
        "wiring": {
            **e.trained.wiring.plain(),
            "states": list(e.trained.wiring.states()),
            "stored_states": [slot.state for slot in answer.form.slots],
        },
        "drafter": answer.checkpoint.form.plain(),
        "data": answer.form.plain(),
        "fingerprints": {
            "target": kit.target.fingerprint,
            "drafter": answer.checkpoint.fingerprint,
            "data": answer.data_digest,
        },
        "notes": list(dict.fromkeys((*answer.notes, *d.notes))),
        **tables(e.searched),
        "diagnosis": d.plain(),
    }

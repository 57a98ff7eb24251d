"""Score a drafter on captured states: one case a wiring.

The drafter, the target's embedding and the list of sample files are read once; samples are streamed
for each case, so memory stays flat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint, TargetParts, load_drafter, load_target_parts
from eagle3.errors import BadInput
from eagle3.metrics import (
    Count,
    Truth,
    count_chains,
    judge_chains,
    scored_rows,
    summarise,
    truth_tokens,
)
from eagle3.samples import Sample, read_capture, read_samples, sample_files, stored_states
from eagle3.wiring import Embedding, Wiring
from jobs.events import Events
from jobs.inputs import pick_device, target_folder


def open_job(request: Mapping[str, Any], events: Events) -> DrafterTest:
    """Read everything that all cases share."""
    device = pick_device(request["device"], events)
    inputs = request["inputs"]
    capture_missing_data(inputs["data"], events)
    target = load_target_parts(target_folder(inputs["target"]), device)
    drafter = load_drafter(Path(inputs["drafter"]["path"]), device)
    check_fit(drafter, target)
    folder = Path(inputs["data"]["path"])
    states = stored_states(folder, inputs["data"]["states"])
    captured = read_capture(folder)
    if captured and captured.get("target") not in (None, target.fingerprint):
        raise BadInput(
            f"{folder} was captured from another target ({captured['target'][:19]}…) than "
            f"{inputs['target']['path']} ({target.fingerprint[:19]}…); capture it again"
        )
    files = sample_files(folder)[: request["max_samples"]]
    for note in drafter.notes:
        events.note(note)
    return DrafterTest(request, events, device, target, drafter, files, states)


def capture_missing_data(data: Mapping[str, Any], events: Events) -> None:
    """Capture the data first where the request says how and it is not there yet.

    In one job with the test, so that an answer needs nobody who waits for the capture.
    """
    request = data.get("capture")
    if request is None or read_capture(Path(data["path"])):
        return
    from jobs import capture_states

    (case,) = request["cases"]
    capture_states.open_job(request, events).run_case(case)
    if request["device"] != "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the target is gone; its memory goes back to the GPU's others


def check_fit(drafter: DrafterCheckpoint, target: TargetParts) -> None:
    """The drafter must have been made for a target of this vocabulary and width."""
    shape = drafter.drafter.shape
    vocab, hidden = target.embedding.shape
    if (shape.vocab, shape.target_hidden) != (vocab, hidden):
        raise BadInput(
            f"the drafter is made for a target of vocabulary {shape.vocab} and hidden size "
            f"{shape.target_hidden}, but this target has {vocab} and {hidden}"
        )


class DrafterTest:
    """Answers cases `{"case_id": …, "wiring": {…}}`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        events: Events,
        device: str,
        target: TargetParts,
        drafter: DrafterCheckpoint,
        files: list[Path],
        states: tuple[int, ...],
    ) -> None:
        self.steps = int(request["steps"])
        self.truth = Truth(request["truth"])
        self.seed = int(request["seed"])
        self.events = events
        self.device = device
        self.target = target
        self.checkpoint = drafter
        self.files = files
        self.states = states

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics, curves, counts a sample, the resolved wiring and fingerprints of one wiring."""
        wiring = Wiring.parse(case["wiring"])
        aux = wiring.states(self.target.num_layers)
        drafter = self.checkpoint.drafter
        if len(aux) != drafter.shape.num_aux:
            raise BadInput(
                f"wiring.layers names {len(aux)} states, but the drafter's fc takes "
                f"{drafter.shape.num_aux}"
            )
        embedding = self.embedding(wiring.embedding)
        to_target = draft_to_target_ids(drafter.d2t, wiring.d2t, drafter.shape.vocab)
        texts: list[dict[str, Count]] = []
        digest = hashlib.sha256()
        for sample in read_samples(
            self.files,
            self.states,
            vocab=drafter.shape.vocab,
            hidden=drafter.shape.target_hidden,
            device=self.device,
        ):
            digest.update(sample_digest(sample))
            truth = truth_tokens(
                sample.input_ids, sample.target_argmax, self.truth, str(sample.path)
            )
            rows = scored_rows(sample.loss_mask)
            if not len(rows):
                raise BadInput(
                    f"{sample.path}: loss_mask has no two neighbouring positions, so nothing can be "
                    "scored"
                )
            drafted = draft_chains(
                drafter,
                embedding,
                sample.input_ids,
                sample.aux(aux),
                rows,
                steps=self.steps,
                to_target=to_target,
                decoder_layer=wiring.decoder_layer,
            )
            chains = judge_chains(
                drafted, rows, sample.input_ids, sample.loss_mask, truth, drafter.t2d
            )
            texts.append(count_chains(chains))
            self.events.progress("score", len(texts), len(self.files))
        metrics, curves, notes = summarise(texts, self.truth, self.steps, self.seed)
        return {
            "metrics": {name: rate.plain() for name, rate in metrics.items()},
            "curves": {
                name: [{"step": step, **rate.plain()} for step, rate in points]
                for name, points in curves.items()
            },
            "samples": sample_counts(self.files, texts),
            "wiring": {**wiring.plain(), "states": list(aux), "stored_states": list(self.states)},
            "fingerprints": {
                "target": self.target.fingerprint,
                "drafter": self.checkpoint.fingerprint,
                "data": f"sha256:{digest.hexdigest()}",
            },
            "notes": [*self.checkpoint.notes, *self.vocabulary_notes(to_target), *notes],
        }

    def vocabulary_notes(self, to_target: torch.Tensor) -> list[str]:
        """Where this case's reading of d2t leads to tokens that t2d says are not drafted."""
        t2d = self.checkpoint.drafter.t2d
        outside = int((~t2d[to_target]).sum())
        if not outside:
            return []
        return [
            f"read so, {outside} of {len(to_target)} draft ids lead to tokens outside t2d, from which "
            "coverage is counted"
        ]

    def embedding(self, whose: Embedding) -> torch.Tensor:
        """The token embedding [V, H_d] that the wiring names."""
        if whose is Embedding.own:
            if self.checkpoint.embedding is None:
                raise BadInput(
                    "wiring.embedding=own, but the drafter's checkpoint has no embed_tokens.weight; "
                    "use wiring.embedding=target"
                )
            return self.checkpoint.embedding
        width = self.checkpoint.drafter.shape.hidden
        if self.target.embedding.shape[1] != width:
            raise BadInput(
                f"wiring.embedding=target, but the target's embedding is "
                f"{self.target.embedding.shape[1]} wide and the drafter {width}"
            )
        return self.target.embedding


def sample_counts(files: list[Path], texts: list[dict[str, Count]]) -> list[dict[str, Any]]:
    """Raw counts a sample, from which every figure can be computed again."""
    return [
        {
            "file": "/".join(path.parts[-2:]),
            **{name: [count.numerator, count.denominator] for name, count in counts.items()},
        }
        for path, counts in zip(files, texts, strict=True)
    ]


def sample_digest(sample: Sample) -> bytes:
    """A digest of what was scored: ids, mask, truth and the first and last row of every state."""
    digest = hashlib.sha256()
    tensors = [sample.input_ids, sample.loss_mask]
    tensors += [] if sample.target_argmax is None else [sample.target_argmax]
    tensors += [sample.states[k][row] for k in sample.states for row in (0, -1)]
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()

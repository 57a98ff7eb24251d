"""The lab, run once by the real command: its five experiments in one multirun."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import load_drafter
from eagle3.data import find_data
from eagle3.metrics import Count, Truth, judge_chains, scored_rows, truth_tokens
from eagle3.model import Drafter
from eagle3.samples import Sample, read_samples
from eagle3.target import load_target_parts
from eagle3.wiring import D2T
from orchestrator.__main__ import main
from orchestrator.paths import CLONE

EXPERIMENTS = (
    "layers_m1_2_30",
    "layers_2_30_58",
    "d2t_absolute",
    "no_decoder_layer",
    "d2t_absolute_no_decoder_layer",
)
STORED = (0, 3, 31, 59)


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What the multirun left: results by experiment, and the captured data."""

    results: Path
    exit_code: int
    runs: dict[str, Path]
    data: Path
    target: Path

    def record(self, experiment: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.runs[experiment] / name).read_text())
        return found


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    results = tmp_path_factory.mktemp("lab") / "results"
    code = main(["-m", f"+experiment={','.join(EXPERIMENTS)}", f"results={results}"])
    runs = {}
    for folder in (results / "runs").iterdir():
        runs[json.loads((folder / "run.json").read_text())["experiment"]] = folder
    (data,) = (results / "host" / "made").glob("data-*")
    (target,) = (results / "host" / "made").glob("target-*")
    return Lab(results=results, exit_code=code, runs=runs, data=data, target=target)


@pytest.fixture(scope="session")
def samples(lab: Lab) -> list[Sample]:
    form = find_data(lab.data, states=STORED, hidden=128, num_layers=61)
    return list(read_samples(form, vocab=1024, hidden=128))


@pytest.fixture(scope="session")
def embedding(lab: Lab) -> Tensor:
    return load_target_parts(lab.target).embedding


@pytest.fixture(scope="session")
def lab_drafter() -> Drafter:
    return load_drafter(CLONE / "lab" / "drafter").drafter


def first_step_counts(
    drafter: Drafter, embedding: Tensor, samples: list[Sample], states: tuple[int, ...]
) -> list[Count]:
    """Right first-step tokens of every sample, fed the named states."""
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, drafter.shape.vocab)
    counts = []
    for sample in samples:
        rows = scored_rows(sample.loss_mask)
        drafted = draft_chains(
            drafter,
            embedding,
            sample.input_ids,
            sample.aux(states),
            rows,
            steps=1,
            to_target=to_target,
        )
        truth = truth_tokens(sample.input_ids, sample.target_argmax, Truth.target_argmax, "lab")
        chains = judge_chains(
            drafted, rows, sample.input_ids, sample.loss_mask, truth, torch.ones(1024).bool()
        )
        counts.append(Count(int(chains.correct.sum()), len(rows)))
    return counts


def pooled(counts: list[Count]) -> float:
    return sum(c.numerator for c in counts) / sum(c.denominator for c in counts)

"""The lab, run once by the real command: its five experiments in one multirun; and its texts alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import load_drafter
from eagle3.data import find_data
from eagle3.lab.build import PROMPT
from eagle3.lab.drafter import Texts, continue_prompts, own_words
from eagle3.lab.layout import lay_out, load_live
from eagle3.metrics import (
    Count,
    Rate,
    Truth,
    count_chains,
    judge_chains,
    rate,
    scored_rows,
    truth_tokens,
)
from eagle3.model import Drafter
from eagle3.samples import Sample, read_samples
from eagle3.target import TargetParts, load_target_parts
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
CAPTURE = yaml.safe_load((CLONE / "conf" / "data" / "lab.yaml").read_text())["capture"]


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
    # One thread: beside other tests two would mostly wait for each other.
    shared = [f"results={results}", "job.threads=1"]
    code = main(["-m", f"+experiment={','.join(EXPERIMENTS)}", *shared])
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


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    """The target's head, norm and embedding, without the captured data."""
    return load_target_parts(lay_out(CLONE / "lab" / "target", tmp_path_factory.mktemp("t") / "t"))


@cache
def own_texts() -> Texts:
    """The texts that conf/data/lab.yaml captures."""
    lines = (CLONE / "lab" / "prompts.jsonl").read_text().splitlines()
    live = load_live(CLONE / "lab" / "target")
    prompts = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    return own_words(
        continue_prompts(live, prompts, CAPTURE["new_tokens"]),
        prompt=PROMPT,
        end=live.shape.vocab - 1,
        window=CAPTURE["repetition_window"],
        length=PROMPT + CAPTURE["new_tokens"],
        least=CAPTURE["min_new_tokens"],
    )


@torch.no_grad()
def held_out_samples(states: Sequence[int]) -> list[Sample]:
    """The samples that such a capture makes, from the trained layers alone: in seconds."""
    live, texts, found = load_live(CLONE / "lab" / "target"), own_texts(), []
    for i, length in enumerate(texts.last.tolist()):
        ids = texts.ids[i, :length]
        logits, kept = live(ids[None], states)
        slots = {k: h[0] for k, h in kept.items()}
        found.append(
            Sample(
                path=Path(f"lab/{i}"),
                input_ids=ids,
                loss_mask=texts.scored(torch.tensor([i]))[0, :length],
                states=slots,
                target_argmax=logits[0].argmax(-1),
                teacher=slots[states[-1]],
            )
        )
    return found


def taught(sample: Sample, target: TargetParts) -> Tensor:
    """What speculators takes for the target's choice behind every position: the last slot's."""
    assert sample.teacher is not None
    return target.logits(sample.teacher, normed=False).argmax(-1)


def scores(
    drafter: Drafter,
    samples: Sequence[Sample],
    target: TargetParts,
    states: Sequence[int],
    steps: int,
    reading: D2T = D2T.offset,
) -> dict[Truth, list[dict[str, Count]]]:
    """Every sample's counts over chains of `steps` under each truth."""
    to_target = draft_to_target_ids(drafter.d2t, reading, drafter.shape.vocab)
    t2d = torch.zeros(drafter.shape.vocab, dtype=torch.bool).index_fill(0, to_target, True)
    counts: dict[Truth, list[dict[str, Count]]] = {truth: [] for truth in Truth}
    for sample in samples:
        ids, mask, rows = sample.input_ids, sample.loss_mask, scored_rows(sample.loss_mask)
        aux = sample.aux(states)
        drafted = draft_chains(
            drafter, target.embedding, ids, aux, rows, steps=steps, to_target=to_target
        )
        for truth in Truth:
            teacher = truth is Truth.stored_teacher
            chosen = taught(sample, target) if teacher else sample.target_argmax
            wanted = truth_tokens(ids, chosen, truth, "lab")
            chains = judge_chains(drafted, rows, ids, mask, wanted, t2d)
            counts[truth].append(count_chains(chains))
    return counts


def interval(counts: Sequence[Count], truth: Truth, highest: float = 1.0) -> Rate:
    """A rate between 0 and `highest` with its interval."""
    found = rate(counts, truth, limits=(0.0, highest))
    assert found is not None
    return found

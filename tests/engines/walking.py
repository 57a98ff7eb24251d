"""The lab's texts, and how the drafter alone is walked over them: what an engine has to do as well.

Texts, states and the target's choices come from our own capture; the drafter is walked over them in
plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.checkpoint import load_drafter
from eagle3.connect import connect
from eagle3.data import find_data
from eagle3.metrics import Count, Truth, judge_chains, truth_tokens
from eagle3.samples import Sample, answer_start, read_samples
from eagle3.target import load_target_parts
from eagle3.tree import judge_trees
from eagle3.wiring import Wiring
from jobs import capture_states
from jobs.events import Events

LAB = Path(__file__).parents[2] / "lab"
STEPS = 4
BEYOND = 12  # tokens of the text behind the answer, so that its last round is known, too
TREE = {"topk": 4, "draft_tokens": 8}
TRUE, SHIFTED = [-1, 2, 30], [2, 30, 58]


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The target laid out, and its greedy texts with their states; answers of `tokens` are walked."""

    target: Path
    data: Path
    tokens: int
    samples: tuple[Sample, ...]


def capture(folder: Path, prompts: int, tokens: int) -> Lab:
    """So many of the lab's prompts with the target's own continuation."""
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(folder / "target")}
    request = {"device": "cpu", "dtype": "float32", "inputs": {"target": target}}
    case = {
        "prompts": str(LAB / "prompts.jsonl"),
        "out": str(folder / "data"),
        "keep": False,
        "states": [0, 3, 31, 59],
        "new_tokens": tokens + BEYOND,
        "repetition_window": None,
        "min_new_tokens": tokens + BEYOND,
        "batch": prompts,
        "max_samples": prompts,
    }
    with Events(folder / "events.jsonl") as events:
        capture_states.open_job(request, events).run_case(case)
    form = find_data(folder / "data", hidden=128, num_layers=61)
    samples = read_samples(form, vocab=1024, hidden=128)
    return Lab(
        target=folder / "target", data=folder / "data", tokens=tokens, samples=tuple(samples)
    )


def walked(
    lab: Lab, drafter: Path, wiring: Wiring, tree: Mapping[str, int] | None = None
) -> list[Count]:
    """(tokens gained, rounds) of each answer: draft behind the last token, go on behind what stood and
    the bonus.
    """
    parts = load_target_parts(lab.target)
    tied = connect(load_drafter(drafter), parts, wiring)
    found = []
    for sample in lab.samples:
        ids, start = sample.input_ids, answer_start(sample.loss_mask)
        rows = torch.arange(start - 1, len(ids) - 2)
        aux = sample.aux(tied.states)
        truth = truth_tokens(ids, sample.target_argmax, Truth.target_argmax, "lab")
        everywhere = torch.ones_like(sample.loss_mask)
        if tree:
            trees = tied.trees(ids, aux, rows, steps=STEPS, **tree)
            judged = judge_trees(trees, rows, ids, everywhere, truth, tied.vocabulary)
        else:
            drafted = tied.chains(ids, aux, rows, steps=STEPS)
            judged = judge_chains(drafted, rows, ids, everywhere, truth, tied.vocabulary)
        stood = judged.correct.long().cumprod(1).sum(1)
        found.append(walk(stood, lab.tokens))
    return found


def walk(stood: Tensor, tokens: int) -> Count:
    """Until there are so many tokens; stood [R] is of the chains behind the rows from the answer's
    start on. The prefill gives the first token. The last round counts whole.
    """
    gained = rounds = 0
    while gained < tokens - 1:
        gained += int(stood[gained]) + 1
        rounds += 1
    return Count(gained, rounds)

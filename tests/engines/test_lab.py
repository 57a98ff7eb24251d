"""The lab behind real engines: each request's verifications are those of the drafter alone.

Texts, states and the target's choices come from our own capture; the drafter is walked over them in
plain torch. An engine that feeds other states, shifts a row, or counts otherwise gives other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.checkpoint import load_drafter
from eagle3.connect import connect
from eagle3.data import find_data
from eagle3.doctor.flat import flat_config
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.engines import rule_for
from eagle3.files import read_json
from eagle3.metrics import Truth, judge_chains, truth_tokens
from eagle3.samples import Sample, answer_start, read_samples
from eagle3.served import served_wiring, with_ids
from eagle3.target import load_target_parts
from eagle3.tree import judge_trees
from eagle3.wiring import Residual, Wiring
from jobs import capture_states
from jobs.engines.engine import Draft
from jobs.engines.folder import lay_out
from jobs.engines.hypothesis import served_as
from jobs.engines.records import Prompt, Request
from jobs.events import Events
from tests.engines.conftest import REQUEST_S, USUAL, Starter
from tests.engines.setup_engines import RELEASES

LAB = Path(__file__).parents[2] / "lab"
PROMPTS, TOKENS, STEPS = 6, 48, 4
BEYOND = 12  # tokens of the text behind the answer, so that its last round is known, too
TREE = {"topk": 4, "draft_tokens": 8}
TRUE, SHIFTED = [-1, 2, 30], [2, 30, 58]


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The target laid out, and its greedy texts with their states."""

    target: Path
    samples: tuple[Sample, ...]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    target = {"path": str(LAB / "target"), "layout": "lab", "made": str(folder / "target")}
    request = {"device": "cpu", "dtype": "float32", "inputs": {"target": target}}
    case = {
        "prompts": str(LAB / "prompts.jsonl"),
        "out": str(folder / "data"),
        "keep": False,
        "states": [0, 3, 31, 59],
        "new_tokens": TOKENS + BEYOND,
        "repetition_window": None,
        "min_new_tokens": TOKENS + BEYOND,
        "batch": PROMPTS,
        "max_samples": PROMPTS,
    }
    with Events(folder / "events.jsonl") as events:
        capture_states.open_job(request, events).run_case(case)
    form = find_data(folder / "data", hidden=128, num_layers=61)
    samples = read_samples(form, vocab=1024, hidden=128)
    return Lab(target=folder / "target", samples=tuple(samples))


def walked(lab: Lab, drafter: Path, wiring: Wiring, tree: bool) -> list[int]:
    """Rounds of each answer: draft behind the last token, go on behind what stood and the bonus."""
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
            trees = tied.trees(ids, aux, rows, steps=STEPS, **TREE)
            judged = judge_trees(trees, rows, ids, everywhere, truth, tied.vocabulary)
        else:
            drafted = tied.chains(ids, aux, rows, steps=STEPS)
            judged = judge_chains(drafted, rows, ids, everywhere, truth, tied.vocabulary)
        stood = judged.correct.long().cumprod(1).sum(1)
        found.append(rounds_of(stood, start))
    return found


def rounds_of(stood: Tensor, start: int) -> int:
    """Rounds until TOKENS are there; stood [R] is of the chains behind rows start - 1, start, …"""
    position, rounds = start, 0  # of the last token that is known: the prefill's
    while position < start + TOKENS - 1:
        position += int(stood[position - start]) + 1
        rounds += 1
    return rounds


def rounds_served(
    starter: Starter, lab: Lab, engine: str, folder: Path, tree: bool = False
) -> list[int]:
    """Verifications of each answer behind the engine, whose texts are the target's own."""
    draft = Draft(folder=folder, steps=STEPS, **(TREE if tree else {}))
    server = starter.start(engine, lab.target, draft)
    rounds = []
    for number, sample in enumerate(lab.samples):
        start = answer_start(sample.loss_mask)
        prompt = Prompt(
            name=str(number), ids=tuple(sample.input_ids[:start].tolist()), new_tokens=TOKENS
        )
        answer = server.engine.ask(
            server.running.address,
            Request(prompt=prompt, ignore_eos=True, seconds=REQUEST_S),
            0.0,
            alone=True,
        )
        assert list(answer.output) == sample.input_ids[start : start + TOKENS].tolist()
        rounds.append(answer.rounds)
    return rounds


@pytest.mark.parametrize("layers", [TRUE, SHIFTED], ids=["true", "shifted"])
@pytest.mark.parametrize(("engine", "tree"), [("sglang", False), ("vllm", False), ("sglang", True)])
def test_each_request_is_verified_as_often_as_the_drafter_alone_says(
    starter: Starter, lab: Lab, tmp_path: Path, engine: str, tree: bool, layers: list[int]
) -> None:
    source = LAB / "drafter"
    wiring = Wiring.parse({**USUAL, "layers": layers, "convention": "output"})
    served = served_as(
        read_json(source / "config.json"),
        lab.target,
        wiring,
        engine=engine,
        version=RELEASES[engine],
        engine_class=None,
        num_layers=61,
    )
    folder = lay_out(source, tmp_path / "drafter", served.config)
    rounds = rounds_served(starter, lab, engine, folder, tree)
    assert rounds == walked(lab, source, wiring, tree)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_second_drafter_accepts_what_is_predicted_once_its_ids_are_right(
    starter: Starter, lab: Lab, tmp_path: Path, engine: str
) -> None:
    source = LAB / "drafter_speculators"
    form, config = load_drafter(source).form, read_json(source / "config.json")
    asked = EngineAsked(name=engine, version=RELEASES[engine], engine_class="llama")
    if engine == "sglang":  # which reads no nested config, and looks elsewhere for ids
        rule = rule_for(engine, RELEASES[engine], "llama")
        config = with_ids(flat_config(read_drafter(source)[0], form), rule, TRUE)
    predicted = served_wiring(form, config, asked, num_layers=61)
    assert not predicted.stops
    assert predicted.wiring is not None
    # The ids are right on both; the residual that it was trained with is vLLM's alone.
    assert predicted.states == (0, 3, 31)
    assert predicted.wiring.residual is (Residual.raw if engine == "sglang" else Residual.normed)
    folder = lay_out(source, tmp_path / "drafter", config)
    rounds = rounds_served(starter, lab, engine, folder)
    assert rounds == walked(lab, source, predicted.wiring, False)

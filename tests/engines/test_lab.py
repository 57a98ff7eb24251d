"""The lab behind real engines: each request's verifications are those of the drafter alone.

An engine that feeds other states, shifts a row, or counts otherwise gives other numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.checkpoint import load_drafter
from eagle3.doctor.flat import flat_config
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.engines import rule_for
from eagle3.files import read_json
from eagle3.samples import answer_start
from eagle3.served import served_wiring, with_ids
from eagle3.wiring import Residual, Wiring
from jobs.engines.engine import Draft
from jobs.engines.folder import lay_out
from jobs.engines.hypothesis import served_as
from jobs.engines.records import Prompt, Request
from tests.engines import walking
from tests.engines.conftest import REQUEST_S, USUAL, Starter
from tests.engines.setup_engines import RELEASES
from tests.engines.walking import LAB, SHIFTED, STEPS, TREE, TRUE, Lab

PROMPTS, TOKENS = 6, 48


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return walking.capture(tmp_path_factory.mktemp("lab"), PROMPTS, TOKENS)


def walked(lab: Lab, drafter: Path, wiring: Wiring, tree: bool) -> list[int]:
    """Rounds of each answer, as the drafter alone has them."""
    counts = walking.walked(lab, drafter, wiring, TREE if tree else None)
    return [count.denominator for count in counts]


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

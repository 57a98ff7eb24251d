"""Arms beside a benchmark of real SGLang, by the command itself: a chain, a known-good drafter, bounds.

What each of them accepts is held against the drafter walked alone over the target's texts, and against
what SGLang's source does with SGLANG_SIMULATE_ACC_LEN: each round is verified as ever, and its outcome
then replaced by so many tokens. With a chain these are the drafts, with a tree one fixed token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3.engines import rule_for
from eagle3.files import read_json
from eagle3.metrics import Count
from eagle3.served import with_ids
from eagle3.wiring import Wiring
from jobs.engines.folder import lay_out
from tests.engines import serving, walking
from tests.engines.conftest import USUAL
from tests.engines.setup_engines import RELEASES
from tests.engines.test_page import typed
from tests.engines.walking import LAB, SHIFTED, STEPS, TREE, TRUE, Lab

PROMPTS, TOKENS = 3, 24
SMALL = {
    **{"job.max_prompts": PROMPTS, "job.new_tokens": TOKENS, "job.steps": STEPS},
    **{"job.budget.pairs": 1, "job.budget.least": 1, "job.budget.repeats": 0},
    **{"job.budget.restarts": 5, "job.advice": "false"},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return walking.capture(tmp_path_factory.mktemp("lab"), PROMPTS, TOKENS)


def measured(lab: Lab, results: Path, layers: Sequence[int], **job: object) -> tuple[str, Any]:
    """What a benchmark of the lab's drafter with these layers prints, and its `bench`."""
    given = {**SMALL, **{f"job.{key}": value for key, value in job.items()}}
    said, result = typed(
        ["python", "-m", "orchestrator", "job=engine_bench", "engine=sglang"],
        results,
        f"engine.python={serving.engine_python('sglang')}",
        *("target=path", f"target.path={lab.target}", "data=path", f"data.path={lab.data}"),
        *("drafter=path", f"drafter.path={LAB / 'drafter'}"),
        *(f"wiring.layers={list(layers)}", "wiring.convention=output"),
        *(f"{key}={value}" for key, value in given.items()),
    )
    return said, result["bench"]


def alone(lab: Lab, layers: Sequence[int], tree: dict[str, int] | None = None) -> Count:
    """What the lab's drafter gains over all answers when it is fed so."""
    wiring = Wiring.parse({**USUAL, "layers": list(layers), "convention": "output"})
    counts = walking.walked(lab, LAB / "drafter", wiring, tree)
    return Count(sum(c.numerator for c in counts), sum(c.denominator for c in counts))


def counted(figure: dict[str, Any]) -> Count:
    """An accept length's raw counts."""
    return Count(figure["numerator"], figure["denominator"])


def check_bounds(level: dict[str, Any]) -> None:
    """No draft stands in any round of the floor, and all of them in every round of the ceiling."""
    floor, ceiling = level["floor"], level["ceiling"]
    assert (floor["accept_length_set"], ceiling["accept_length_set"]) == (1, STEPS + 1)
    behind = TOKENS - 1  # the prefill gives the first token
    assert counted(floor["accept_length"]) == Count(PROMPTS * behind, PROMPTS * behind)
    rounds = PROMPTS * -(-behind // (STEPS + 1))
    assert counted(ceiling["accept_length"]) == Count(rounds * (STEPS + 1), rounds)
    assert (floor["held"], ceiling["held"]) == (True, True)


def test_beside_a_tree_stand_its_chain_and_bounds(lab: Lab, tmp_path: Path) -> None:
    said, bench = measured(lab, tmp_path / "results", TRUE, **TREE, chain="true", simulate="true")
    labels = ["baseline", "speculative", "simulated_floor", "simulated_ceiling", "chain"]
    assert [server["label"] for server in bench["servers"]] == labels
    (level,) = bench["levels"]
    tree, chain = alone(lab, TRUE, TREE), alone(lab, TRUE)
    assert tree.denominator < chain.denominator  # else the two could not be told apart here
    assert counted(level["accept_length"]) == tree
    assert counted(level["chain"]["accept_length"]) == chain
    check_bounds(level)
    assert "at 1 at once: a chain of 4 steps gives " in said
    assert "at 1 at once: simulated: " in said
    assert bench["agreement"]["speculative"]["same"] == PROMPTS


def test_a_known_good_drafter_beside_one_that_is_wired_wrongly(lab: Lab, tmp_path: Path) -> None:
    rule = rule_for("sglang", RELEASES["sglang"], "llama")
    config = with_ids(read_json(LAB / "drafter" / "config.json"), rule, TRUE)
    public = lay_out(LAB / "drafter", tmp_path / "public", config)
    said, bench = measured(lab, tmp_path / "results", SHIFTED, known_good=public)
    labels = ["baseline", "speculative", "known_good"]
    assert [server["label"] for server in bench["servers"]] == labels
    (level,) = bench["levels"]
    assert counted(level["accept_length"]) == alone(lab, SHIFTED)
    assert counted(level["known_good"]["accept_length"]) == alone(lab, TRUE)
    assert bench["known_good"]["points_at"] == "drafter"  # alone it is as bad with that wiring
    assert "so look at our drafter: its wiring, its teacher or its training" in said

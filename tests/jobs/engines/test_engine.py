"""The command line of each engine: what the job sets, and what a person may add."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import BadInput
from jobs.engines.engine import Draft, Wanted, arguments
from jobs.engines.sglang import SGLang
from jobs.engines.vllm import VLLM
from tests.jobs.engines.conftest import ENGINES

D = Path("/models/D")
CHAIN = Draft(folder=D, steps=3)
TREE = Draft(folder=D, steps=3, topk=2, draft_tokens=6)


def wanted(draft: Draft | None = None, **flags: Any) -> Wanted:
    return Wanted(python="/py", target=Path("/models/T"), port=21000, draft=draft, flags=flags)


def options(line: list[str]) -> dict[str, str]:
    """Each flag with what follows it; a flag alone with nothing."""
    found: dict[str, str] = {}
    for word, following in zip(line, [*line[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_a_chain_has_one_token_more_than_steps() -> None:
    assert CHAIN.verified == 4
    assert TREE.verified == 6


def test_sglang_is_told_all_three_numbers_or_none() -> None:
    line = SGLang().command(wanted(CHAIN))
    assert line[:3] == ["/py", "-m", "sglang.launch_server"]
    assert options(line[3:]) == {
        "--model-path": "/models/T",
        "--host": "127.0.0.1",
        "--port": "21000",
        "--enable-metrics": "",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "/models/D",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }
    tree = options(SGLang().command(wanted(TREE)))
    assert tree["--speculative-eagle-topk"] == "2"
    assert tree["--speculative-num-draft-tokens"] == "6"
    assert not any("speculative" in word for word in SGLang().command(wanted()))


def test_vllm_is_told_its_drafter_as_json_and_caches_no_prefixes() -> None:
    line = VLLM().command(wanted(CHAIN))
    assert line[:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
    found = options(line[3:])
    assert json.loads(found.pop("--speculative-config")) == {
        "method": "eagle3",
        "model": "/models/D",
        "num_speculative_tokens": 3,
    }
    assert found == {
        "--model": "/models/T",
        "--host": "127.0.0.1",
        "--port": "21000",
        "--no-enable-prefix-caching": "",
    }
    assert "--speculative-config" not in VLLM().command(wanted())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dtype": "float32"}, ["--dtype", "float32"]),
        ({"--mem-fraction-static": 0.4}, ["--mem-fraction-static", "0.4"]),
        ({"disable_cuda_graph": True}, ["--disable-cuda-graph"]),
        ({"cuda_graph_bs": [1, 2]}, ["--cuda-graph-bs", "1", "2"]),
        ({"rope": {"a": [1]}}, ["--rope", '{"a": [1]}']),
        ({"dtype": None}, []),
    ],
)
def test_a_flag_is_written_by_its_value(given: Mapping[str, Any], line: list[str]) -> None:
    assert arguments({}, given, ()) == line


def test_a_persons_flag_takes_the_place_of_one_that_may_be_set() -> None:
    assert arguments({"dtype": "auto"}, {"dtype": "float32"}, ()) == ["--dtype", "float32"]


def test_a_flag_is_not_switched_off_by_false() -> None:
    with pytest.raises(BadInput, match=r"engine\.flags\.disable_cuda_graph is false; leave it out"):
        arguments({}, {"disable_cuda_graph": False}, ())


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("sglang", "speculative_num_steps"),
        ("sglang", "--speculative-num-steps"),
        ("sglang", "speculative-algorithm"),
        ("sglang", "model_path"),
        ("sglang", "port"),
        ("vllm", "speculative_config"),
        ("vllm", "--model"),
        ("vllm", "enable-prefix-caching"),
        ("vllm", "spec_tokens"),
        ("vllm", "speculative-config.rejection_sample_method"),
    ],
)
@pytest.mark.parametrize("draft", [None, CHAIN])
def test_what_was_measured_is_not_changed_by_a_flag(
    engine: str, flag: str, draft: Draft | None
) -> None:
    name = flag.lstrip("-").replace("-", "_")
    with pytest.raises(
        BadInput, match=rf"engine\.flags\.{re.escape(name)} is set by the job itself"
    ):
        ENGINES[engine]().command(wanted(draft, **{flag: 1}))

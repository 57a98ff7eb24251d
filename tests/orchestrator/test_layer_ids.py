"""The verb `layers`: what it says, in words and in JSON, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from eagle3.engines import ECOSYSTEMS
from orchestrator.__main__ import main
from orchestrator.errors import InputError
from orchestrator.layer_ids import parse_ids, run
from orchestrator.layer_words import meanings_table, places_table
from orchestrator.paths import CLONE

STORY = ("[2,30,58]", "engine=sglang", "engine_class=kimi_k25", "num_layers=61")
Said = dict[str, Any]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    assert run([*arguments, "json=true"]) == 0
    said: Said = json.loads(capsys.readouterr().out)
    return said


def written(said: Said, ecosystem: str) -> dict[str, Any]:
    """{releases: ids}, of an ecosystem."""
    lines = [line for line in said["write"] if line["ecosystem"] == ecosystem]
    return {line["releases"]: line["ids"] for line in lines}


def test_the_story_s_ids_changed_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    old = asked(capsys, *STORY, "engine_version=0.5.12")
    new = asked(capsys, *STORY, "engine_version=0.5.13")
    assert (old["states"], new["states"]) == ([3, 31, 59], [2, 30, 58])
    assert [one["hf_index"] for one in old["each"]] == [3, 31, 59]
    assert old["each"][0]["words"] == "output of layer 2, input of layer 3"
    assert (old["evidence"], "deepseek_v2.py" in old["source"]) == ("read", True)


def test_each_ecosystem_is_told_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, *STORY, "engine_version=0.5.12")
    assert written(said, "sglang") == {
        "0.5.10 to before 0.5.13": [2, 30, 58],
        "from 0.5.13": [3, 31, 59],
    }
    assert written(said, "vllm") == {"from 0.18.0": [3, 31, 59]}
    assert written(said, "speculators") == {"before 0.5.0": [2, 30, 58], "from 0.5.0": [3, 31, 59]}
    for ecosystem in ("tensorrt_llm", "specforge", "modelopt", "torchspec"):
        assert written(said, ecosystem) == {"all": [2, 30, 58]}
    for ecosystem in ("llama_cpp", "eagle"):
        assert written(said, ecosystem) == {"all": None}
    assert {line["ecosystem"] for line in said["write"]} == set(ECOSYSTEMS)
    assert all(line["why"] for line in said["write"] if not line["possible"])


def test_the_dump_s_states_need_a_patch_or_cannot_be_fed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = asked(
        capsys, "[0, 3, 31]", "convention=canonical", "engine_class=kimi_k25", "num_layers=61"
    )
    sglang = [line for line in said["write"] if line["ecosystem"] == "sglang"]
    assert [(line["releases"], line["ids"], bool(line["needs"])) for line in sglang] == [
        ("0.5.10 to before 0.5.13", [-1, 2, 30], True),
        ("0.5.13 to before 0.5.14", [0, 3, 31], True),
        ("from 0.5.14", [0, 3, 31], False),
    ]
    assert written(said, "tensorrt_llm") == {"all": None}


def test_a_class_may_be_spelled_as_its_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    ids, engine, _, layers = STORY
    answers = [
        asked(capsys, ids, engine, "engine_version=0.5.13", f"engine_class={name}", layers)
        for name in ("kimi_k25", "KimiK25ForConditionalGeneration")
    ]
    for answer in answers:
        del answer["engine_class"]
    assert answers[0] == answers[1]
    assert answers[0]["states"] == [2, 30, 58]


def test_no_state_is_promised_where_none_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(
        capsys,
        "[2,30,58]",
        "engine=sglang",
        "engine_version=0.5.23",
        "engine_class=Gemma3ForCausalLM",
        "num_layers=61",
    )
    assert said["states"] is None
    assert "needs a patch" in said["problems"][0]
    assert written(said, "sglang") == {"0.5.12 to before 0.5.17": [2, 30, 58], "from 0.5.17": None}


def test_every_patch_that_is_needed_is_said_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    asked_for = ["[0,3,31]", "convention=canonical", "engine_class=qwen3", "num_layers=61"]
    assert run(asked_for) == 0
    out = capsys.readouterr().out
    assert "the embedding copy patch: the layer loop" in out
    assert "the embedding capture patch: the layer loop" in out


def test_without_a_class_every_kind_gets_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, "[3,31,59]", "convention=input", "num_layers=61")
    sglang = [line for line in said["write"] if line["ecosystem"] == "sglang"]
    by_class = {(line["classes"], line["releases"]): line["ids"] for line in sglang}
    deepseek = "deepseek_v2, mistral_large_3, glm_moe_dsa, kimi_k25, glm4_moe_lite"
    assert by_class[(deepseek, "before 0.5.13")] == [2, 30, 58]
    assert by_class[(deepseek, "from 0.5.13")] == [3, 31, 59]
    assert by_class[("gemma3", "before 0.5.17")] == [2, 30, 58]
    assert by_class[("gemma3", "from 0.5.17")] is None
    assert by_class[("other classes", "all")] == [2, 30, 58]


@pytest.mark.parametrize(
    ("ids", "convention", "states"),
    [
        ("[-1,2,30]", "output", [0, 3, 31]),
        ("[2,30,58]", "input", [2, 30, 58]),
        ("[2,30,58]", "hf", [2, 30, 58]),
        ("[0,3,61]", "canonical", [0, 3, 61]),
    ],
)
def test_a_convention_may_stand_for_an_engine(
    capsys: pytest.CaptureFixture[str], ids: str, convention: str, states: list[int]
) -> None:
    assert asked(capsys, ids, f"convention={convention}", "num_layers=61")["states"] == states


def test_the_last_state_has_no_index_in_hidden_states(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, "[61]", "convention=canonical", "num_layers=61")
    assert said["each"][0]["hf_index"] is None
    assert "before the final norm" in said["each"][0]["words"]


def test_states_that_an_engine_loses_are_written_for_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = asked(
        capsys,
        "[2,30,60]",
        "engine=sglang",
        "engine_version=0.5.12",
        "engine_class=kimi_k25",
        "num_layers=61",
    )
    assert said["states"] == [3, 31]
    assert said["problems"]
    assert said["write_for"] == [3, 31, 61]
    assert written(said, "sglang") == {"from 0.5.10": None}
    assert written(said, "tensorrt_llm") == {"all": [2, 30, 60]}


def test_default_asks_for_what_an_engine_feeds_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = asked(capsys, "default", "engine=vllm", "engine_version=0.33.0", "num_layers=36")
    assert said["states"] == [2, 18, 33]


def test_it_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", *STORY, "engine_version=0.5.12"]) == 0
    out = capsys.readouterr().out
    for words in (
        "id i is the output of layer i",
        "known    read: models/deepseek_v2.py",
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "states   3, 31, 59",
        "output of layer 58, input of layer 59",
        "[3,31,59]",
        "not possible: it always feeds [2, 30, 58]",
    ):
        assert words in out


def test_help_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == run(["--help"]) == run(["rules"]) == 0
    out = capsys.readouterr().out
    assert "python -m orchestrator layers" in out
    assert "| torchspec |" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["[2,30", "engine=sglang"], "is no list of layer ids"),
        (["[2;30]", "engine=sglang"], "is no list of layer ids"),
        (["[2,,30]", "engine=sglang"], "is no list of layer ids"),
        (["2,30", "engine=sglang"], "is no list of layer ids"),
        (["[2.0]", "engine=sglang"], "is no list of layer ids"),
        (["[٢]", "engine=sglang"], "is no list of layer ids"),
        (["[2,", "30]", "engine=sglang"], "put it in quotes"),
        (["engine=sglang"], "no list"),
        (["[2]"], "say what the ids mean"),
        (["[2]", "engine=sglang", "convention=output"], "say what the ids mean"),
        (["[2]", "engine=sglnag"], "did you mean 'sglang'"),
        (["[2]", "engin=sglang"], "did you mean 'engine'"),
        (["[2]", "engine=sglang", "engine=vllm"], "given twice"),
        (["[2]", "engine="], "has no value"),
        (["[2]", "convention=outptu"], "did you mean 'output'"),
        (["[2]", "convention=output", "engine_version=0.5.12"], "says nothing without engine"),
        (["default", "convention=output"], "no default list"),
        (["[]", "convention=output"], "empty"),
        (["[2]", "engine=sglang", "engine_version=0.5.13"], "engine_class=NAME"),
        (["[2]", "engine=sglang", "engine_class=kimi_k25"], "engine_version=X"),
        (["[2]", "engine=vllm", "num_layers=61.0"], "num_layers is a number"),
        (["default", "engine=vllm"], "num_layers=N"),
        (["[62]", "convention=canonical", "num_layers=61"], "0 to 61"),
        (["[61]", "convention=hf", "num_layers=61"], "behind the final norm"),
        (["[2]", "engine=vllm", "json=yes"], "json is true or false"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refused:
        run(arguments)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_a_list_may_have_spaces() -> None:
    assert parse_ids(" [ -1, 2 ,30 ] ") == (-1, 2, 30)
    assert parse_ids("[]") == ()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from orchestrator.__main__ import main\n"
        f"assert main(['layers', *{STORY!r}, 'engine_version=0.5.12']) == 0\n"
        "print({'torch', 'numpy', 'hydra', 'omegaconf', 'mlflow', 'fabric'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=CLONE
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_page_holds_the_table_as_it_is() -> None:
    page = (CLONE / "docs" / "layer-ids.md").read_text()
    found = re.search(r"<!-- rules -->\n(.*)\n<!-- /rules -->", page, re.DOTALL)
    assert found is not None
    assert found[1].splitlines() == [*meanings_table(), "", *places_table()]

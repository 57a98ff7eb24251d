"""The ids that a fix writes bring each engine the trained states, or the fix says that none do."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.diagnosis import rewrites
from eagle3.diagnosis.fixes import elsewhere
from eagle3.doctor.subject import EngineAsked
from eagle3.engines import ids_to_write, rule_for
from eagle3.served import served_wiring
from eagle3.wiring import Wiring
from tests.eagle3.configs import changed
from tests.eagle3.fixing import (
    FLAT,
    KEY,
    KIMI,
    NESTED,
    NEW,
    OLD,
    STATES,
    TRT,
    VLLM,
    again,
    asked,
    first,
    form_of,
    wanted_fixes,
)


def means(engine: EngineAsked, ids: Sequence[int], num_layers: int) -> list[int]:
    """The states of an id list, from what is known of these engines in words."""
    version = tuple(map(int, (engine.version or "0").removesuffix(".post1").split(".")))
    if engine.name == "vllm":
        plus = 0  # inputs of layers
    elif engine.name == "sglang" and engine.engine_class in ("kimi_k25", "deepseek_v3"):
        # Outputs of layers before 0.5.13, then only where the list starts with 1.
        plus = 1 if version < (0, 5, 13) or ids[0] == 1 else 0
    elif engine.name == "sglang" and engine.engine_class == "gpt_oss" and version >= (0, 5, 17):
        plus = 0 if max(ids) == num_layers else 1
    else:
        plus = 1  # outputs of layers
    return sorted(i + plus for i in ids)


SGLANG = ("0.5.10", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.14", "0.5.17", "0.5.21", "0.5.23")
ENGINES = [
    *(
        asked("sglang", version, kind)
        for version in SGLANG
        for kind in ("kimi_k25", "deepseek_v3", "llama", "gpt_oss", "qwen3")
    ),
    *(
        asked("vllm", version, kind)
        for version in ("0.18.0", "0.24.0", "0.27.0", "0.33.0")
        for kind in ("kimi_k25", "llama")
    ),
    TRT,
]


def without_ids(config: Any) -> dict[str, Any]:
    """A config without everything that a fix of its ids may touch."""
    bare = {k: v for k, v in config.items() if k not in (KEY, "num_aux_hidden_states")}
    bare["eagle_config"] = {k: v for k, v in config.get("eagle_config", {}).items() if k != KEY}
    layer = bare.get("transformer_layer_config")
    if layer:
        bare["transformer_layer_config"] = {
            k: v for k, v in layer.items() if k != "num_aux_hidden_states"
        }
    return bare


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_written_brings_the_trained_states(data: st.DataObject) -> None:
    engine = data.draw(st.sampled_from(ENGINES))
    num_layers = data.draw(st.integers(8, 61))
    count = data.draw(st.sampled_from([3, 3, 3, 2, 4]))
    k = st.integers(0, num_layers)
    edge = st.sampled_from([0, 1, 2, num_layers])
    drawn = st.lists(st.one_of(k, edge), min_size=count, max_size=count, unique=True)
    trained = tuple(data.draw(drawn))
    wrong = data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count, unique=True))
    layout, places = (
        data.draw(st.sampled_from(["flat", "nested"])),
        data.draw(st.sampled_from([(), (KEY,), ("eagle_config",), (KEY, "eagle_config")])),
    )
    base = FLAT if layout == "flat" else changed(NESTED, False, **{KEY: None})
    config = copy.deepcopy(base)
    if KEY in places:
        config[KEY] = wrong
    if "eagle_config" in places:
        config["eagle_config"] = {KEY: wrong}
    if not places and count != 3:
        config["num_aux_hidden_states"] = count
    before = json.dumps(config)
    fix = first("states", Wiring.of_states(trained), engine, config, num_layers=num_layers)
    assert json.dumps(config) == before
    ascending = sorted(trained)
    rule = rule_for(engine.name, engine.version, engine.engine_class)
    written = ids_to_write(rule, ascending, num_layers)
    assert fix.possible is written.possible
    assert (fix.left is None) is fix.possible
    if not fix.possible:
        # The states at the edges may be out of reach; of others no list at all brings these.
        if not {0, num_layers} & set(trained):
            lists = [p for plus in (0, 1) for p in permutations([k - plus for k in trained])]
            assert all(means(engine, ids, num_layers) != ascending for ids in lists)
        return
    assert (fix.snippet is not None) is (list(trained) != ascending)
    if engine.name == "tensorrt_llm":
        ids = json.loads(fix.lines[0].partition(": ")[2])
        assert fix.config is None
        assert means(engine, ids, num_layers) == ascending
        flagged = replace(engine, flags={"eagle3_layers_to_capture": ids})
        assert served_wiring(
            form_of(config), config, flagged, num_layers=num_layers
        ).states == tuple(ascending)
        return
    if fix.config is None:  # they stood there already
        assert served_wiring(
            form_of(config), config, engine, num_layers=num_layers
        ).states == tuple(ascending)
        return
    resolved = again(fix, engine, num_layers)
    assert resolved.states == tuple(ascending)
    assert resolved.ids is not None
    assert means(engine, resolved.ids, num_layers) == ascending
    patched = any("needs the embedding" in p for p in resolved.problems)
    assert ("the embedding" in (fix.needs or "")) is patched
    copied = layout == "nested" and engine.name != "vllm"
    assert ("the flat copy of config.json" in (fix.needs or "")) is copied
    counted = engine.name == "vllm" and engine.version not in ("0.18.0",)
    counted = counted or engine.version not in ("0.5.10", "0.18.0")
    if counted:
        assert not any("aux states" in problem for problem in resolved.problems)
    if not (layout == "nested" and engine.name == "sglang"):
        assert without_ids(fix.config) == without_ids(config)


def test_the_story_is_mended_by_the_ids_and_a_patch() -> None:
    config = {**FLAT, "eagle_config": {KEY: [2, 30, 58]}}
    trained = Wiring.of_states((0, 3, 31))
    fix = first("states", trained, OLD, config, stored=(0, 3, 31, 59))
    assert fix.lines == (
        '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}',
        "or, with no patch, 0.5.14 or newer: [0,3,31]",
    )
    assert fix.needs == "the embedding capture patch (engine.patch=embedding_capture)"
    assert fix.note is not None
    assert fix.note.startswith("the layer loop adds hidden_states and residual")
    assert fix.config == {**FLAT, "eagle_config": {KEY: [-1, 2, 30]}}
    assert fix.evidence == "read"
    between = first("states", trained, replace(OLD, version="0.5.13"), config)
    assert between.needs == "the embedding capture patch (not shipped for 0.5.13)"
    assert between.lines[-1] == "or, with no patch, 0.5.14 or newer: [0,3,31]"
    newer = first("states", trained, NEW, config)
    assert (newer.config, newer.needs) == ({**FLAT, "eagle_config": {KEY: [0, 3, 31]}}, None)
    top = first("states", trained, VLLM, config)
    assert top.lines == (
        '"eagle_aux_hidden_state_layer_ids": [0, 3, 31]',
        'remove "eagle_aux_hidden_state_layer_ids" of eagle_config',
    )
    none = first("states", trained, TRT, config, stored=(0, 3, 31, 59))
    assert not none.possible
    assert none.left is not None
    assert (
        "train again on states 3, 31 and 59 of the stored ones, with the ids [2,30,58]" in none.left
    )
    nothing = first("states", trained, TRT, config, stored=(0, 3, 61))
    assert nothing.left is not None
    assert "no 3 can be had there, so they have to be captured first" in nothing.left


def test_states_of_an_engine_that_reads_no_ids() -> None:
    llama_cpp = asked("llama_cpp", None, None)
    default = first("states", Wiring.of_states((2, 30, 58)), llama_cpp, FLAT)
    assert default.possible
    assert default.lines[0].startswith("nothing: it always feeds these")
    other = first("states", Wiring.of_states((3, 31, 59)), llama_cpp, FLAT, stored=(2, 30, 58, 61))
    assert not other.possible
    assert other.left is not None
    assert other.left.endswith("train again on states 2, 30 and 58 of the stored ones")
    assert wanted_fixes("states", Wiring.of_states(STATES), None, FLAT) == ()


def test_more_states_than_three_are_counted_where_the_engine_counts() -> None:
    trained = Wiring.of_states((2, 3, 4, 5))
    config = {**FLAT, "num_aux_hidden_states": 4}
    fix = first("states", trained, VLLM, changed(config, num_aux_hidden_states=4))
    assert fix.config == {**config, KEY: [2, 3, 4, 5]}
    nested = changed(NESTED, False, **{KEY: [2, 3, 4, 6]})
    fix = first("states", trained, VLLM, nested)
    assert '"transformer_layer_config": {"num_aux_hidden_states": 4}' in fix.lines
    assert again(fix, VLLM).wiring is not None


# Elsewhere.


def test_the_same_states_elsewhere() -> None:
    fixes = {fix.engine: fix for fix in elsewhere((0, 3, 31), num_layers=KIMI, target_classes=())}
    nested, top = '"eagle_config": {"' + KEY + '": ', f'"{KEY}": '
    told = {name: (fix.lines[:1], bool(fix.needs)) for name, fix in fixes.items() if fix.possible}
    assert told == {
        "SGLang 0.5.10 to before 0.5.13, class kimi_k25": ((f"{nested}[-1, 2, 30]}}",), True),
        "SGLang 0.5.13 to before 0.5.14, class kimi_k25": ((f"{nested}[0, 3, 31]}}",), True),
        "SGLang from 0.5.14 on, class kimi_k25": ((f"{nested}[0, 3, 31]}}",), False),
        "SGLang before 0.5.22, class llama": ((f"{nested}[-1, 2, 30]}}",), True),
        "SGLang from 0.5.22 on, class llama": ((f"{nested}[-1, 2, 30]}}",), False),
        "vLLM from 0.18.0 on, class kimi_k25": ((f"{top}[0, 3, 31]",), True),
        "vLLM before 0.18.0, class llama": ((f"{top}[0, 3, 31]",), True),
        "vLLM from 0.18.0 on, class llama": ((f"{top}[0, 3, 31]",), False),
    }
    assert [fix.engine for fix in fixes.values() if not fix.possible] == [
        "TensorRT-LLM",
        "llama.cpp",
    ]
    assert all(fix.evidence == "read" and fix.source for fix in fixes.values())
    assert "both of its model runners look" in str(fixes["vLLM from 0.18.0 on, class llama"].note)
    patch, setting = "the embedding capture patch", "engine.patch=embedding_capture"
    assert {name: fix.needs for name, fix in fixes.items() if fix.needs} == {
        "SGLang 0.5.10 to before 0.5.13, class kimi_k25": f"{patch} ({setting} for 0.5.12)",
        "SGLang 0.5.13 to before 0.5.14, class kimi_k25": f"{patch} (not shipped)",
        "SGLang before 0.5.22, class llama": f"{patch} ({setting} for 0.5.12 and 0.5.21)",
        "vLLM from 0.18.0 on, class kimi_k25": f"{patch} ({setting} for 0.32.0)",
        "vLLM before 0.18.0, class llama": f"{patch} (not shipped)",
    }


def test_a_targets_own_class_comes_first_and_once() -> None:
    def names(*classes: str) -> list[str]:
        return [f.engine for f in elsewhere((3, 4, 5), num_layers=8, target_classes=classes)]

    assert names("GptOssForCausalLM")[0] == "SGLang, class GptOssForCausalLM"
    assert names("llama", "LlamaForCausalLM") == names("llama")
    trt = elsewhere((3, 31, 59), num_layers=KIMI, target_classes=())[-2]
    assert trt.lines == ("eagle3_layers_to_capture: [2, 30, 58]",)
    mixed = elsewhere((31, 3, 59), num_layers=KIMI, target_classes=())[0]
    assert "ascending order" in mixed.lines[-1]


# The order alone.


def test_an_order_alone_needs_no_other_ids() -> None:
    config = {**FLAT, "eagle_config": {KEY: [0, 3, 31]}}
    for order in permutations((0, 3, 31)):
        if order == (0, 3, 31):
            continue
        fix = first("order", Wiring.of_states(order), NEW, config)
        assert fix.config is None
        assert fix.snippet == rewrites.ascending_chunks(order)
    everywhere = first("order", Wiring.of_states((31, 0, 3)), None, config)
    assert everywhere.engine == "every engine"

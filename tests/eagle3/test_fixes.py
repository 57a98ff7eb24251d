"""What a fix writes is what the engine then runs, and its programs leave the same drafter behind."""

from __future__ import annotations

import copy
import json
import random
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.checkpoint import load_drafter
from eagle3.checkpoints import examine
from eagle3.checkpoints.agree import expected_shapes
from eagle3.connect import connect
from eagle3.diagnosis import rewrites
from eagle3.diagnosis.causes import kinds_between, with_part_of
from eagle3.diagnosis.fixes import MAKERS, Fix, elsewhere, fixes_for, flat_copy, patched_config
from eagle3.diagnosis.kinds import WIRING
from eagle3.diagnosis.rewrites import program_lines
from eagle3.diagnosis.tensor_fixes import of_table
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.engines import ids_to_write, rule_for
from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.served import ServedWiring, served_wiring
from eagle3.target import TargetParts
from eagle3.wiring import (
    D2T,
    Concat,
    DecoderLayer,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Positions,
    Residual,
    RopeChoice,
    Rotation,
    Token,
    Window,
    Wiring,
)
from tests.eagle3 import configs
from tests.eagle3.configs import WHERE, YARN, changed, sound
from tests.eagle3.wired import target_of

KEY = "eagle_aux_hidden_state_layer_ids"
KIMI = 61  # layers
FLAT, NESTED = ({**base, "target_hidden_size": 24} for base in (configs.FLAT, configs.NESTED))
VOCAB, HIDDEN, LENGTH, STEPS = 50, 24, 40, 4
STATES = (0, 3, 5)


def asked(name: str, version: str | None, kind: str | None = "llama", **flags: Any) -> EngineAsked:
    return EngineAsked(name=name, version=version, engine_class=kind, flags=flags)


OLD, NEW = asked("sglang", "0.5.12", "kimi_k25"), asked("sglang", "0.5.23", "kimi_k25")
VLLM = asked("vllm", "0.33.0")
TRT = asked("tensorrt_llm", None, None)


def form_of(config: dict[str, Any], **more: tuple[int, ...]) -> DrafterForm:
    form, _ = examine(config, None, WHERE)
    assert form is not None
    prefix = "midlayer." if form.layout.value == "specforge" else "layers.0."
    shapes = {n.replace("midlayer.", prefix): s for n, s in expected_shapes(form).items()}
    form, _ = examine(config, {**shapes, **more}, WHERE)
    assert form is not None
    return form


def wanted_fixes(
    kind: str,
    trained: Wiring,
    engine: EngineAsked | None,
    config: dict[str, Any],
    *,
    form: DrafterForm | None = None,
    stored: Sequence[int] = (),
    num_layers: int = KIMI,
    **more: Any,
) -> tuple[Fix, ...]:
    form = form or form_of(config)
    served = None
    if engine is not None:
        served = served_wiring(form, config, engine, num_layers=num_layers)
    return fixes_for(
        kind,
        trained.resolved(form),
        served,
        form=form,
        config=config,
        asked=engine,
        num_layers=num_layers,
        stored=stored,
        **more,
    )


def first(*args: Any, **how: Any) -> Fix:
    return wanted_fixes(*args, **how)[0]


def again(fix: Fix, engine: EngineAsked, num_layers: int = KIMI) -> ServedWiring:
    """What the engine runs of the fix's config."""
    assert fix.config is not None
    config = dict(fix.config)
    return served_wiring(form_of(config), config, engine, num_layers=num_layers)


# The states: what is written brings them, or cannot be written.


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
    assert fix.lines == ('"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}',)
    assert fix.needs == "the embedding capture patch"
    assert fix.note is not None
    assert fix.note.startswith("the layer loop adds hidden_states and residual")
    assert fix.config == {**FLAT, "eagle_config": {KEY: [-1, 2, 30]}}
    assert fix.evidence == "read"
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


def test_a_flat_copy_is_a_step_of_its_own() -> None:
    fix = first("states", Wiring.of_states((0, 3, 31)), NEW, NESTED)
    assert fix.lines == ('"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 31]}',)
    assert fix.needs == "the flat copy of config.json"
    assert not any("layout" in problem for problem in again(fix, NEW).problems)
    form = form_of(NESTED)
    copied = flat_copy(NESTED, form=form, asked=NEW)
    assert copied is not None
    assert copied.lines[0].endswith("the flat layout")
    assert not any("layout" in problem for problem in again(copied, NEW).problems)
    assert flat_copy(NESTED, form=form, asked=VLLM) is None
    windowed = LAYOUTS["nested_window"]
    for engine, told in (
        (NEW, "--speculative-draft-window-size 8"),
        (TRT, "has no sliding window"),
    ):
        other = flat_copy(windowed, form=form_of(windowed), asked=engine)
        assert other is not None
        assert told in str(other.note)
    assert flat_copy(NESTED, form=form, asked=None) is None
    assert flat_copy(FLAT, form=form_of(FLAT), asked=NEW) is None
    # It has to be written even where nothing else has.
    how = {"form": form, "asked": NEW, "num_layers": KIMI, "stored": ()}
    assert patched_config((), DEFAULT, None, config=NESTED, **how) == copied.config


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
    assert {fix.needs for fix in fixes.values()} == {
        None,
        "the embedding capture patch",
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


# The programs: the drafter that is left behind computes by default what was trained.


def write(folder: Path, config: dict[str, Any], *, own_embedding: bool = False) -> Path:
    """A random checkpoint of a config."""
    form = form_of(config)
    generator = torch.Generator().manual_seed(11)
    prefix = "midlayer." if form.layout.value == "specforge" else "layers.0."
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_shapes(form).items():
        scale = 0.4 if len(shape) == 2 else 0.3
        value = torch.randn(shape, generator=generator) * scale
        value = value + 1 if len(shape) == 1 and "norm" in name else value
        tensors[name.replace("midlayer.", prefix)] = value
    count = form.draft_vocab.value
    chosen = torch.randperm(VOCAB, generator=generator)[:count].sort().values
    tensors["d2t"] = chosen - torch.arange(count)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][chosen] = True
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "made": "here"})
    return folder


def drafted(folder: Path, target: TargetParts, wiring: Wiring) -> Tensor:
    """Chains from every position of one text."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    states = {k: torch.randn(LENGTH, HIDDEN, generator=generator) for k in range(8)}
    aux = torch.cat([states[k] for k in wiring.states()], -1)
    connected = connect(load_drafter(folder), target, wiring)
    return connected.chains(ids, aux, torch.arange(LENGTH - 2), steps=STEPS)


def default(folder: Path) -> Wiring:
    """What engines run where nothing is out of the ordinary."""
    form = load_drafter(folder).form
    whose = Embedding.own if form.embedding.value == "own" else Embedding.target
    wiring = Wiring.of_states(STATES, embedding=whose, head_input=HeadInput.normed)
    return wiring.resolved(form)


def run_program(snippet: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: Path) -> None:
    program = folder.parent / "this.py"
    program.write_text(snippet)
    monkeypatch.setattr(sys, "argv", [str(program), str(folder), *map(str, more)])
    runpy.run_path(str(program))


QWEN = {**FLAT, "architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
TWO = changed(FLAT, num_hidden_layers=2)
CASES = [
    ("order", {"layers": (5, 0, 3)}, FLAT),
    ("order", {"layers": (3, 5, 0)}, {**FLAT, "fc_norm": True}),
    ("order", {"layers": (5, 3, 0)}, {**NESTED, "norm_before_fc": True, KEY: [0, 3, 5]}),
    ("d2t", {"d2t": D2T.absolute}, FLAT),
    ("d2t", {"d2t": D2T.identity}, FLAT),
    ("decoder-layer", {"decoder_layer": DecoderLayer.skipped}, FLAT),
    ("decoder-layer", {"decoder_layer": DecoderLayer.skipped}, TWO),
    ("concat", {"concat": Concat.hidden_first}, FLAT),
    ("concat", {"concat": Concat.hidden_first}, NESTED),
    ("input-norms", {"input_norms": InputNorms.swapped}, FLAT),
    ("input-norms", {"input_norms": InputNorms.swapped}, NESTED),
    ("rotation", {"rotation": Rotation.interleaved}, FLAT),
    ("rotation", {"rotation": Rotation.interleaved}, {**TWO, "attention_bias": True}),
    (
        "rotation",
        {"rotation": Rotation.interleaved},
        changed(NESTED, inner=True, model_type="qwen3"),
    ),
    ("embedding", {"embedding": Embedding.target}, FLAT),
    ("head", {"head": Head.target}, FLAT),
    ("head-input", {"head_input": HeadInput.raw}, FLAT),
    ("deeper-norm", {"deeper_norm": Parts.dropped}, TWO),
    ("fc-input", {"fc_input": FcInput.raw}, {**FLAT, "norm_before_fc": True}),
    ("fc-input", {"fc_input": FcInput.raw}, {**NESTED, "fc_norm": True}),
    ("biases", {"biases": Parts.dropped}, {**FLAT, "attention_bias": True}),
    ("qk-norm", {"qk_norm": Parts.dropped}, changed(NESTED, inner=True, model_type="qwen3")),
    ("qk-norm", {"qk_norm": Parts.dropped}, QWEN),
]


@pytest.mark.parametrize(("kind", "switches", "config"), CASES)
def test_the_rewritten_drafter_computes_by_default_what_was_trained(
    kind: str,
    switches: dict[str, Any],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config, own_embedding=kind == "embedding")
    if switches.get("d2t") is D2T.absolute:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        save_file(tensors, path, metadata={"format": "pt", "made": "here"})
    form = load_drafter(folder).form
    layers = switches.get("layers", STATES)
    more = {name: value for name, value in switches.items() if name != "layers"}
    trained = replace(default(folder), layers=layers, **more).resolved(form)
    if kind != "d2t" or switches["d2t"] is D2T.identity:
        before = drafted(folder, target, trained)
        assert not torch.equal(before, drafted(folder, target, default(folder)))
    else:
        before = drafted(folder, target, trained)
        assert max(before.flatten().tolist()) < VOCAB
    fix = first(kind, trained, VLLM, config, form=form, num_layers=8)
    assert fix.possible
    assert fix.snippet is not None
    assert fix.lines[-2:] == program_lines(fix.snippet)
    if fix.config is not None:
        (folder / "config.json").write_text(json.dumps(fix.config))
    run_program(fix.snippet, monkeypatch, folder, target.folder)
    assert torch.equal(drafted(folder, target, default(folder)), before)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}


def test_absolute_ids_are_refused_as_offsets_and_mended_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    tensors = load_file(folder / "model.safetensors")
    absolute = tensors["d2t"] + torch.arange(30)
    save_file({**tensors, "d2t": absolute.int()}, folder / "model.safetensors")
    fix = first("d2t", Wiring.of_states(STATES, d2t=D2T.absolute), None, FLAT)
    assert (fix.engine, fix.possible) == ("every engine", True)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    mended = load_file(folder / "model.safetensors")
    assert torch.equal(mended["d2t"], tensors["d2t"].int())
    assert torch.equal(mended["t2d"], tensors["t2d"])


def test_programs_keep_number_types_shards_and_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    split = [{n: t for n, t in half.items() if ("self_attn" in n) is (i == 0)} for i in (0, 1)]
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, split, strict=True):
        save_file(part, folder / name, metadata={"part": name})
    where = {n: name for name, part in zip(names, split, strict=True) for n in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    run_program(rewrites.swapped_halves(), monkeypatch, folder)
    run_program(rewrites.without("norm[.]weight", "the norm"), monkeypatch, folder)
    run_program(rewrites.ones_before_head(), monkeypatch, folder)
    after = {name: t for file in names for name, t in load_file(folder / file).items()}
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in half.items()}
    q = "midlayer.self_attn.q_proj.weight"
    assert torch.equal(after[q][:, :HIDDEN], half[q][:, HIDDEN:])
    assert torch.equal(after["norm.weight"], torch.ones(HIDDEN, dtype=torch.bfloat16))
    told = json.loads(index.read_text())
    assert told["metadata"] == {"total_size": 1}
    assert told["weight_map"] == {n: file for file in names for n in load_file(folder / file)}
    with safe_open(folder / names[0], "pt") as file:
        assert file.metadata() == {"part": names[0]}
    assert load_drafter(folder).form.head_norm.value
    with pytest.raises(SystemExit, match="holds no"):
        run_program(rewrites.swapped_norms(), monkeypatch, tmp_path)


@pytest.mark.parametrize("reading", [D2T.offset, D2T.absolute])
def test_a_whole_vocabulary_is_put_in_the_targets_order(
    reading: D2T, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**FLAT, "draft_vocab_size": VOCAB}
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config)
    path = folder / "model.safetensors"
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    table = order - torch.arange(VOCAB) if reading is D2T.offset else order
    save_file({**load_file(path), "d2t": table}, path)
    engines = default(folder)
    trained = replace(engines, d2t=reading)
    before = drafted(folder, target, trained)
    unread = replace(trained, d2t=D2T.identity)
    assert not torch.equal(drafted(folder, target, unread), before)
    fix = first("d2t", trained, VLLM, config)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    assert torch.equal(drafted(folder, target, unread), before)
    assert torch.equal(drafted(folder, target, engines), before)


def test_the_deeper_norm_is_stored_where_sglang_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", TWO)
    found, _ = read_drafter(folder)
    assert found.form is not None
    lost = served_wiring(found.form, TWO, OLD, num_layers=KIMI, drafter=found).wiring
    assert lost is not None
    assert lost.deeper_norm is Parts.dropped
    fix = first("deeper-norm", Wiring.of_states((2, 30, 58)), OLD, TWO, form=found.form)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    after = load_file(folder / "model.safetensors")
    name = "layers.1.{}.weight"
    assert torch.equal(after[name.format("hidden_norm")], after[name.format("input_layernorm")])
    mended, _ = read_drafter(folder)
    again = served_wiring(found.form, TWO, OLD, num_layers=KIMI, drafter=mended).wiring
    assert again is not None
    assert again.deeper_norm is Parts.declared
    assert not first("deeper-norm", Wiring.of_states(STATES), VLLM, TWO).possible


def test_the_first_layer_is_called_as_an_old_release_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", NESTED)
    found, _ = read_drafter(folder)
    assert found.form is not None
    old = asked("sglang", "0.5.11")
    stopped = served_wiring(found.form, NESTED, old, num_layers=KIMI, drafter=found)
    assert stopped.wiring is None
    assert stopped.to_start[0] == "rename the first layer's tensors to midlayer.*"
    run_program(stopped.to_start[1], monkeypatch, folder)
    renamed, _ = read_drafter(folder)
    resolved = served_wiring(found.form, NESTED, old, num_layers=KIMI, drafter=renamed)
    assert resolved.wiring is not None


# Switches of the config: the engine runs what was trained once it is written.


def mends(kind: str, trained: Wiring, engine: EngineAsked, config: dict[str, Any]) -> Fix:
    """The first fix, followed: its config leads to the trained switch."""
    form = form_of(config)
    name = kind.replace("-", "_")
    before = served_wiring(form, config, engine, num_layers=KIMI).wiring
    assert before is not None
    assert getattr(before, name) is not getattr(trained.resolved(form), name)
    fix = first(kind, trained, engine, config)
    assert fix.possible
    assert fix.config is not None
    after = served_wiring(form, dict(fix.config), engine, num_layers=KIMI).wiring
    assert after is not None
    assert getattr(after, name) is getattr(trained.resolved(form), name)
    others = {n for n in before.differing(after) if n != name}
    assert others == set()
    return fix


DEFAULT = Wiring.of_states((2, 30, 58))


def test_the_residual_where_it_can_be_told_and_where_not() -> None:
    normed = replace(DEFAULT, residual=Residual.normed)
    assert mends("residual", normed, VLLM, FLAT).lines == ('"norm_before_residual": true',)
    silent = changed(NESTED, norm_before_residual=None)
    raw = mends("residual", replace(DEFAULT, residual=Residual.raw), VLLM, silent)
    assert raw.lines == ('"norm_before_residual": false',)
    none = first("residual", normed, OLD, FLAT)
    assert not none.possible
    assert none.left is not None
    assert none.left.startswith("patch models/llama_eagle3.py")
    assert "serve it with vLLM" in none.left
    assert "--no-norm-before-residual" in none.left


def test_the_feedback_and_specforges_key() -> None:
    trap = {**FLAT, "norm_output": True}
    fix = mends("feedback", replace(DEFAULT, feedback=Feedback.raw), OLD, trap)
    assert fix.lines == ('remove "norm_output" at the top level',)
    assert fix.config == FLAT
    normed = replace(DEFAULT, feedback=Feedback.normed)
    fix = mends("feedback", normed, OLD, FLAT)
    assert form_of(dict(fix.config or {})).feedback_normed.value  # its own reading agrees
    assert form_of(dict(fix.config or {})).head_norm.value
    assert mends("feedback", normed, TRT, FLAT).lines == (
        '"norm_output": true',
        '"eagle_config": {"return_hidden_post_norm": true}',
    )
    assert mends("feedback", normed, VLLM, NESTED).lines == ('"norm_output": true',)
    off = mends(
        "feedback", replace(DEFAULT, feedback=Feedback.raw), VLLM, {**NESTED, "norm_output": True}
    )
    assert off.lines == ('"norm_output": false',)
    assert not first("feedback", normed, asked("sglang", "0.5.11"), FLAT).possible


def test_norms_in_front_of_fc() -> None:
    whole = {**FLAT, "norm_before_fc": True}
    wanted = replace(DEFAULT, fc_input=FcInput.whole)
    fix = mends("fc-input", wanted, TRT, whole)
    assert fix.lines == ('"eagle_config": {"norm_before_fc": true}',)
    none = first("fc-input", wanted, OLD, whole)
    assert not none.possible
    assert none.left is not None
    assert "SGLang 0.5.17 or vLLM 0.18" in none.left


@pytest.mark.parametrize("base", [FLAT, NESTED], ids=["specforge", "speculators"])
def test_the_rope_is_written_where_the_layout_has_it(base: dict[str, Any]) -> None:
    prefix = "transformer_layer_config" if base is NESTED else ""

    def rope_of(fix: Fix) -> Rope:
        assert fix.config is not None
        return form_of(dict(fix.config)).rope.value

    fix = first("rope", replace(DEFAULT, rope=RopeChoice.base_10000), VLLM, base)
    assert rope_of(fix) == Rope(theta=10_000.0)
    assert ("transformer_layer_config" in fix.lines[0]) is bool(prefix)
    yarn = changed(base, inner=True, rope_scaling={"rope_type": "yarn", **YARN})
    unscaled = first("rope", replace(DEFAULT, rope=RopeChoice.unscaled), VLLM, yarn)
    assert rope_of(unscaled) == Rope(theta=500.0)
    bare = first("rope", replace(DEFAULT, rope=RopeChoice.no_mscale), VLLM, yarn)
    assert not {"mscale", "mscale_all_dim"} & set(dict(rope_of(bare).scaling))
    theirs = Rope(theta=1e6, kind="linear", scaling=(("factor", 4.0),))
    target = replace(DEFAULT, rope=RopeChoice.target)
    assert rope_of(first("rope", target, VLLM, yarn, target_rope=theirs)) == theirs
    assert rope_of(first("rope", target, VLLM, base, target_rope=theirs)) == theirs
    assert "as they stand in the target's config.json" in first("rope", target, VLLM, base).lines[0]
    new = {"rope_theta": 500.0, "rope_type": "yarn", **YARN}
    spelled = changed(base, inner=True, rope_theta=None, rope_parameters=new)
    plain = first("rope", replace(DEFAULT, rope=RopeChoice.base_10000), VLLM, spelled)
    assert rope_of(plain) == Rope(theta=10_000.0)


@pytest.mark.parametrize(
    ("engine", "base"),
    [(OLD, FLAT), (asked("vllm", "0.29.0"), FLAT), (asked("vllm", "0.29.0"), NESTED)],
)
def test_yarns_factor_for_releases_that_drop_mscale(
    engine: EngineAsked, base: dict[str, Any]
) -> None:
    config = changed(base, inner=True, rope_scaling={"rope_type": "yarn", **YARN})
    fix = mends("rope", DEFAULT, engine, config)
    assert '"rope_scaling": {"attn_factor": 0.8279}' in fix.lines[0]
    assert fix.needs is not None
    assert "for that release alone" in fix.needs


def test_a_window() -> None:
    config = changed(NESTED, inner=True, layer_types=["sliding_attention"], sliding_window=32)
    fix = first("window", DEFAULT, OLD, config)
    assert fix.lines == ("--speculative-draft-window-size 32",)
    name, value = fix.lines[0].split()
    flagged = replace(OLD, flags={name: int(value)})
    resolved = served_wiring(form_of(config), config, flagged, num_layers=KIMI).wiring
    assert resolved is not None
    assert resolved.window is Window.declared
    none = first("window", replace(DEFAULT, window=Window.none), VLLM, config)
    assert none.config is not None
    assert not any(form_of(dict(none.config)).windows.value)


def test_the_embedding_that_sglang_replaces() -> None:
    own = replace(DEFAULT, embedding=Embedding.own)
    form = form_of(FLAT, **{"embed_tokens.weight": (VOCAB, HIDDEN)})
    for engine, trick in ((NEW, True), (asked("sglang", "0.5.11"), False), (TRT, False)):
        fix = first("embedding", own, engine, FLAT, form=form)
        assert not fix.possible
        assert fix.left is not None
        assert "vLLM" in fix.left
        assert "frozen embedding" in fix.left
        assert ('"target_hidden_size": 72' in fix.left) is trick


def test_the_head_that_an_engine_takes() -> None:
    form = form_of(FLAT)
    own = first("head", DEFAULT, OLD, changed({**FLAT, "draft_vocab_size": None}), form=form)
    assert own.lines == ('"draft_vocab_size": 30',)
    whole = {**FLAT, "draft_vocab_size": VOCAB}
    null, rows = wanted_fixes("head", replace(DEFAULT, head=Head.target), OLD, whole)
    assert null.lines == ('"draft_vocab_size": null',)
    assert again(null, OLD).wiring == replace(DEFAULT, head=Head.target).resolved(form_of(whole))
    assert rows.snippet is not None


def test_what_only_training_mends() -> None:
    for kind, changes in (
        ("token", {"token": Token.same}),
        ("positions", {"positions": Positions.standing}),
        ("input-norms", {"input_norms": InputNorms.double}),
    ):
        fix = first(kind, replace(DEFAULT, **changes), OLD, FLAT)
        assert not fix.possible
        assert fix.left is not None
        assert "train again" in fix.left
    double = first("input-norms", replace(DEFAULT, input_norms=InputNorms.double), OLD, FLAT)
    assert "self.hidden_norm(self.input_layernorm(hidden_states))" in str(double.left)
    layer = {**FLAT, "norm_before_residual": True}
    skipped = first(
        "decoder-layer", replace(DEFAULT, decoder_layer=DecoderLayer.skipped), OLD, layer
    )
    assert not skipped.possible


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("base", [FLAT, NESTED], ids=["specforge", "speculators"])
def test_every_kind_has_an_answer_for_every_engine(kind: str, base: dict[str, Any]) -> None:
    for engine in (OLD, NEW, VLLM, asked("vllm", "0.11.2"), TRT, asked("llama_cpp", None, None)):
        for fix in wanted_fixes(kind, DEFAULT, engine, base, stored=(2, 30, 58, 61)):
            assert fix.engine
            assert fix.evidence in ("run", "read", "inferred")
            assert bool(fix.left) is not fix.possible
            assert bool(fix.lines) is fix.possible
            assert all(isinstance(line, str) and line == line.rstrip("\n") for line in fix.lines)


def test_kinds_of_wiring_have_fixes_and_others_have_theirs_elsewhere() -> None:
    assert set(MAKERS) == set(WIRING)
    for kind in ("stats", "teacher", "unknown"):
        with pytest.raises(BadInput, match=f"there is no kind of wiring '{kind}'"):
            first(kind, DEFAULT, OLD, FLAT)


def test_several_kinds_in_one_config() -> None:
    trained = Wiring.of_states((0, 3, 31), feedback=Feedback.raw)
    config = {**FLAT, "norm_output": True, "eagle_config": {KEY: [2, 30, 58]}}
    form = form_of(config)
    served = served_wiring(form, config, NEW, num_layers=KIMI)
    patched = patched_config(
        ("states", "residual", "feedback"),
        trained.resolved(form),
        served,
        config=config,
        form=form,
        asked=NEW,
        num_layers=KIMI,
        stored=(0, 3, 31),
    )
    assert patched == {**FLAT, "eagle_config": {KEY: [0, 3, 31]}}
    nothing = patched_config(
        ("token",),
        trained.resolved(form),
        served,
        config=config,
        form=form,
        asked=NEW,
        num_layers=KIMI,
        stored=(),
    )
    assert nothing is None


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


def test_sound_shapes_are_those_of_the_tests() -> None:
    assert set(sound(FLAT)) - {"t2d"} == set(expected_shapes(form_of(FLAT)))


def test_a_table_is_made_again_from_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "d2t": tensors["d2t"].flip(0).int()}, path, metadata={"made": "here"})
    fix = of_table()
    assert fix.snippet is not None
    assert fix.lines == ("d2t = t2d.nonzero() - arange(len(d2t))", fix.snippet.rstrip("\n"))
    run_program(fix.snippet, monkeypatch, folder)
    after = load_file(path)
    assert torch.equal(after["d2t"], tensors["d2t"].int())
    assert all(torch.equal(after[n], t) for n, t in tensors.items() if n != "d2t")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made": "here"}
    # A mask of another size says nothing of this table, and the file is left alone.
    for wrong in ({**tensors, "t2d": torch.ones(VOCAB, dtype=torch.bool)}, {"d2t": tensors["d2t"]}):
        save_file(wrong, path)
        before = path.read_bytes()
        with pytest.raises(SystemExit, match="t2d"):
            run_program(fix.snippet, monkeypatch, folder)
        assert path.read_bytes() == before
    assert [p.name for p in folder.iterdir() if "new" in p.name] == []


@pytest.mark.parametrize(
    ("has", "wanted", "base"),
    [
        ("norm_before_fc", FcInput.chunks, FLAT),
        ("norm_before_fc", FcInput.chunks, NESTED),
        ("fc_norm", FcInput.whole, FLAT),
        ("fc_norm", FcInput.whole, NESTED),
        (None, FcInput.chunks, FLAT),
        (None, FcInput.whole, NESTED),
    ],
)
def test_a_norm_that_the_file_does_not_have(
    has: str | None,
    wanted: FcInput,
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**base, has: True} if has else base
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config)
    trained = replace(default(folder), fc_input=wanted)
    before = drafted(folder, target, trained)
    fix = first("fc-input", replace(DEFAULT, fc_input=wanted), VLLM, config)
    assert fix.snippet is not None
    (folder / "config.json").write_text(json.dumps(fix.config))
    run_program(fix.snippet, monkeypatch, folder)
    assert load_drafter(folder).form.fc_norm.value is (wanted is FcInput.chunks)
    assert torch.equal(drafted(folder, target, default(folder)), before)
    found, _ = read_drafter(folder)
    assert found.form is not None
    assert fix.config is not None
    run = served_wiring(found.form, dict(fix.config), VLLM, num_layers=KIMI, drafter=found).wiring
    assert run is not None
    assert run.fc_input is wanted


def test_a_switch_of_the_layer_is_written_where_vllm_reads_it() -> None:
    config = changed(NESTED, inner=True, attention_bias=True)
    assert first("biases", DEFAULT, VLLM, config, form=form_of(config)).lines == (
        "nothing: config.json says so already, where this engine looks",
    )
    form = form_of(config)
    fix = first("biases", DEFAULT, VLLM, NESTED, form=form)
    assert fix.lines == ('"transformer_layer_config": {"attention_bias": true}',)
    dropped = first("biases", replace(DEFAULT, biases=Parts.dropped), VLLM, config)
    assert (dropped.config, dropped.lines[0]) == (
        None,
        "the biases of the first layer's q, k and v = 0",
    )


def test_a_fix_rests_on_what_is_known_of_the_engine() -> None:
    swapped = replace(DEFAULT, input_norms=InputNorms.swapped)
    read = first("input-norms", swapped, VLLM, FLAT)
    assert (read.evidence, read.source) == (
        "read",
        "model_executor/models/llama_eagle3.py, v1/spec_decode/llm_base_proposer.py",
    )
    assert first("input-norms", swapped, asked("vllm", "9.0.0"), FLAT).evidence == "inferred"
    assert first("input-norms", swapped, asked("llama_cpp", None), FLAT).evidence == "inferred"
    # Which order the chunks are in is known from where the states are captured.
    order = {**FLAT, "eagle_config": {KEY: [0, 3, 31]}}
    chunks = first("order", Wiring.of_states((31, 0, 3)), NEW, order)
    assert "deepseek_v2" in chunks.source
    everywhere = first("input-norms", swapped, None, FLAT)
    assert (everywhere.engine, everywhere.evidence) == ("every engine", "read")


def test_what_to_write_comes_first_and_is_short() -> None:
    for kind, switches in (
        ("order", {"layers": (31, 0, 3)}),
        ("d2t", {"d2t": D2T.absolute}),
        ("concat", {"concat": Concat.hidden_first}),
        ("rotation", {"rotation": Rotation.interleaved}),
        ("head", {"head": Head.target}),
        ("head-input", {"head_input": HeadInput.raw}),
    ):
        fix = first(kind, replace(DEFAULT, **switches), NEW, NESTED)
        assert all(len(line) <= 80 for line in fix.lines if line != (fix.snippet or "").rstrip())
        assert "\n" not in fix.lines[0]
        assert len(fix.needs or "") <= 60
    assert first("head", replace(DEFAULT, head=Head.target, d2t=D2T.absolute), NEW, FLAT).needs


# All fixes together: the engine then computes what was trained.

WRONG: dict[str, Any] = {
    "states": [(0, 3, 5), (1, 4, 6), (3, 4, 5)],
    "order": [(6, 1, 4), (5, 3, 0)],
    "d2t": [D2T.absolute, D2T.identity],
    "decoder_layer": [DecoderLayer.skipped],
    "concat": [Concat.hidden_first],
    "input_norms": [InputNorms.swapped],
    "residual": list(Residual)[1:],
    "fc_input": list(FcInput)[1:],
    "head_input": [HeadInput.raw],
    "feedback": list(Feedback)[1:],
    "rope": [RopeChoice.unscaled, RopeChoice.base_10000, RopeChoice.no_mscale],
    "rotation": [Rotation.interleaved],
    "head": [Head.target],
    "deeper_norm": [Parts.dropped],
    "biases": [Parts.dropped],
    "qk_norm": [Parts.dropped],
    "window": [Window.none],
}
YARNED = {"rope_type": "yarn", **YARN}
LAYOUTS = {
    "flat": FLAT,
    "flat_yarn": {**FLAT, "rope_scaling": YARNED, "norm_output": True},
    "flat_two": {**FLAT, "num_hidden_layers": 2, "attention_bias": True, "fc_norm": True},
    "flat_whole": {**FLAT, "norm_before_fc": True, "eagle_config": {KEY: [0, 1, 2]}},
    "nested": NESTED,
    "nested_yarn": changed(NESTED, inner=True, rope_scaling=YARNED),
    "nested_biases": changed({**NESTED, "fc_norm": True}, inner=True, attention_bias=True),
    "flat_qwen": QWEN,
    "nested_qwen": changed(NESTED, inner=True, model_type="qwen3"),
    "nested_window": changed(
        NESTED, inner=True, layer_types=["sliding_attention"], sliding_window=8
    ),
}
PAIRED = (
    asked("sglang", "0.5.12", "kimi_k25"),
    asked("sglang", "0.5.17"),
    asked("sglang", "0.5.23", "kimi_k25"),
    asked("vllm", "0.24.0"),
    asked("vllm", "0.33.0"),
    TRT,
)


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    return target_of(tmp_path_factory.mktemp("paired") / "target", HIDDEN)


@pytest.mark.parametrize("seed", range(80))
def test_all_fixes_together_give_the_trained_drafter(
    seed: int, small_target: TargetParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    layout, engine = rng.choice(sorted(LAYOUTS)), rng.choice(PAIRED)
    if layout == "nested_window" and engine.name != "vllm":
        layout = "nested"  # a flat copy has no window, so what is left behind cannot be run here
    config = LAYOUTS[layout]
    folder = write(tmp_path / "drafter", config)
    checkpoint = load_drafter(folder)
    found, _ = read_drafter(folder)
    how: dict[str, Any] = {"form": checkpoint.form, "config": config, "asked": engine}
    served = served_wiring(**how, num_layers=7, drafter=found)
    if served.wiring is None:
        assert layout in ("flat_two", "flat_whole", "nested_biases", "nested_qwen", "flat_qwen")
        return
    how |= {"served": served, "num_layers": 7, "stored": STATES}
    trained = expressible(drawn(rng, checkpoint, small_target, served.wiring), how)
    # The table first: others read it.
    kinds = sorted(kinds_between(trained, served.wiring), key=lambda kind: kind != "d2t")
    before = drafted(folder, small_target, trained)
    flags: dict[str, Any] = {}
    fixes = [fixes_for(kind, trained, **how)[0] for kind in kinds]
    for fix in fixes:
        if fix.snippet is not None:
            run_program(fix.snippet, monkeypatch, folder, small_target.folder)
        if fix.lines[0].startswith("eagle3_layers_to_capture"):
            flags["eagle3_layers_to_capture"] = json.loads(fix.lines[0].partition(": ")[2])
        assert not any(line.startswith("{") for line in fix.lines)  # no whole config of one's own
    patched = patched_config(kinds, trained, **how)
    (folder / "config.json").write_text(json.dumps(patched or config))
    after, _ = read_drafter(folder)
    again = served_wiring(
        after.form or checkpoint.form,
        after.config,
        replace(engine, flags=flags),
        num_layers=7,
        drafter=after,
    )
    assert again.wiring is not None
    assert again.states == tuple(sorted(trained.states()))
    assert not any("layout" in problem for problem in again.problems)
    if any("attn_factor" in line for fix in fixes for line in fix.lines):
        assert again.wiring.rope is trained.rope
        return  # a copy for that release alone, which nobody else reads
    if "deeper-norm" in kinds and engine.name != "vllm":  # a second name, which nobody else reads
        tensors = load_file(folder / "model.safetensors")
        del tensors["layers.1.hidden_norm.weight"]
        save_file(tensors, folder / "model.safetensors")
    assert torch.equal(drafted(folder, small_target, again.wiring), before)


def drawn(rng: random.Random, checkpoint: Any, target: TargetParts, wiring: Wiring) -> Wiring:
    """A wiring that differs in up to three kinds and can be run."""
    for axis in rng.sample(sorted(WRONG), 3):
        name = "layers" if axis in ("states", "order") else axis
        other = replace(wiring, **{name: rng.choice(WRONG[axis])}).resolved(checkpoint.form)
        if connectable(checkpoint, target, other):
            wiring = other
    return wiring


def expressible(trained: Wiring, how: dict[str, Any]) -> Wiring:
    """What the engine cannot be told is left as it runs it."""
    run = how["served"].wiring
    for kind in kinds_between(trained, run):
        if not fixes_for(kind, trained, **how)[0].possible:
            left = with_part_of(trained, run, kind).resolved(how["form"])
            if left == trained:  # it is idle without the decoder layer
                left = with_part_of(trained, run, "decoder-layer").resolved(how["form"])
            return expressible(left, how)
    return trained


def connectable(checkpoint: Any, target: TargetParts, wiring: Wiring) -> bool:
    """Whether a wiring can be run at all."""
    try:
        connect(checkpoint, target, wiring)
    except BadInput:
        return False
    return True

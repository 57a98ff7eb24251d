"""All fixes in one config, flat copies included: the engine then computes what was trained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import load_drafter
from eagle3.connect import connect
from eagle3.diagnosis.causes import kinds_between, with_part_of
from eagle3.diagnosis.fixes import fixes_for, flat_copy, patched_config
from eagle3.doctor.subject import read_drafter
from eagle3.errors import BadInput
from eagle3.served import served_wiring
from eagle3.target import TargetParts
from eagle3.wiring import (
    D2T,
    Biases,
    Concat,
    DecoderLayer,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Residual,
    RopeChoice,
    Rotation,
    Window,
    Wiring,
)
from tests.eagle3.configs import YARN, changed
from tests.eagle3.fixing import (
    DEFAULT,
    FLAT,
    HIDDEN,
    KEY,
    KIMI,
    NESTED,
    NEW,
    QWEN,
    STATES,
    TRT,
    VLLM,
    again,
    asked,
    drafted,
    first,
    form_of,
    run_program,
    write,
)
from tests.eagle3.wired import target_of

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
    "biases": [Biases.first_dropped, Biases.dropped],
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

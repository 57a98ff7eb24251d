"""An engine runs the trained switch once it is written where it looks, or the fix says what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.diagnosis.fixes import Fix
from eagle3.doctor.subject import EngineAsked
from eagle3.form import Rope
from eagle3.served import served_wiring
from eagle3.wiring import (
    Biases,
    Embedding,
    FcInput,
    Feedback,
    Head,
    Residual,
    RopeChoice,
    Window,
    Wiring,
)
from tests.eagle3.configs import YARN, changed
from tests.eagle3.fixing import (
    DEFAULT,
    FLAT,
    HIDDEN,
    KIMI,
    NESTED,
    NEW,
    OLD,
    TRT,
    VLLM,
    VOCAB,
    again,
    asked,
    first,
    form_of,
    wanted_fixes,
)


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


def test_a_switch_of_the_layer_is_written_where_vllm_reads_it() -> None:
    config = changed(NESTED, inner=True, attention_bias=True)
    assert first("biases", DEFAULT, VLLM, config, form=form_of(config)).lines == (
        "nothing: config.json says so already, where this engine looks",
    )
    form = form_of(config)
    fix = first("biases", DEFAULT, VLLM, NESTED, form=form)
    assert fix.lines == ('"transformer_layer_config": {"attention_bias": true}',)
    dropped = first("biases", replace(DEFAULT, biases=Biases.first_dropped), VLLM, config)
    assert (dropped.config, dropped.lines[0]) == (
        None,
        "the biases of the first layer's q, k and v = 0",
    )

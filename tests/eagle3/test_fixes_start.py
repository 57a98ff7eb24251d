"""What stops an engine is mended by what is written, or it is said that nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.diagnosis.fix import Mended, mended
from eagle3.diagnosis.fixes import Fix, fixes_for, patched_config
from eagle3.diagnosis.kinds import NOT_SERVED, kind_of
from eagle3.doctor.server import llama_cpp_config, sglang_config
from eagle3.doctor.subject import EngineAsked
from eagle3.form import DrafterForm
from eagle3.served import ServedWiring, served_wiring
from eagle3.served_switches import plain_drafter
from eagle3.serving import serving_for
from eagle3.wiring import Biases, FcInput, Parts, Rotation, Wiring
from tests.eagle3.configs import LAYER, changed, to_start
from tests.eagle3.fixing import DEFAULT, FLAT, KEY, KIMI, NESTED, NEW, OLD, VLLM, asked, form_of

LLAMA_CPP = asked("llama_cpp", None, None)
FOUR = {**FLAT, "num_aux_hidden_states": 4, KEY: [2, 3, 4, 5]}
BIASED = {**FLAT, "attention_bias": True}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def served(
    config: dict[str, Any], engine: EngineAsked, form: DrafterForm | None = None
) -> ServedWiring:
    return served_wiring(form or form_of(config), config, engine, num_layers=KIMI)


def told(
    config: dict[str, Any],
    engine: EngineAsked,
    trained: Wiring = DEFAULT,
    form: DrafterForm | None = None,
) -> dict[str, tuple[Fix, ...]]:
    """The fixes of all that stops an engine, by kind."""
    form = form or form_of(config)
    resolved = served(config, engine, form)
    assert resolved.wiring is None
    kinds = [NOT_SERVED if s.switch is None else kind_of(s.switch) for s in resolved.stops]
    how: dict[str, Any] = {"form": form, "config": config, "asked": engine, "num_layers": KIMI}
    return {
        kind: fixes_for(kind, trained.resolved(form), resolved, stored=(2, 30, 58), **how)
        for kind in kinds
    }


@pytest.mark.parametrize(
    ("config", "sound", "engine", "lines"),
    [
        (
            without(FLAT, "architectures"),
            FLAT,
            VLLM,
            ('"architectures": ["LlamaForCausalLMEagle3"]',),
        ),
        (
            without(FLAT, "architectures", "model_type", "draft_vocab_size"),
            FLAT,
            OLD,
            (
                '"architectures": ["LlamaForCausalLMEagle3"]',
                '"model_type": "llama"',
                '"draft_vocab_size": 30',
            ),
        ),
        # The second is only asked for once the first is written.
        (
            {**without(FLAT, "draft_vocab_size"), "tie_word_embeddings": True},
            FLAT,
            NEW,
            ('"tie_word_embeddings": false', '"draft_vocab_size": 30'),
        ),
        (
            {**FLAT, "target_hidden_size": None},
            FLAT,
            VLLM,
            ('remove "target_hidden_size" at the top level',),
        ),
        (
            {**FLAT, "target_hidden_size": None},
            {**FLAT, "target_hidden_size": 20},
            OLD,
            ('"target_hidden_size": 20',),
        ),
        (
            {
                **without(NESTED, "target_hidden_size"),
                "transformer_layer_config": {**LAYER, "target_hidden_size": None},
            },
            NESTED,
            VLLM,
            ('remove "target_hidden_size" of transformer_layer_config',),
        ),
        (
            without(FLAT, "draft_vocab_size", "num_hidden_layers"),
            FLAT,
            LLAMA_CPP,
            ('"draft_vocab_size": 30', '"num_hidden_layers": 1'),
        ),
        (without(FOUR, "num_aux_hidden_states"), FOUR, VLLM, ('"num_aux_hidden_states": 4',)),
    ],
)
def test_the_config_to_write_makes_the_engine_start(
    config: dict[str, Any], sound: dict[str, Any], engine: EngineAsked, lines: tuple[str, ...]
) -> None:
    form = form_of(sound, **{"embed_tokens.weight": (50, 24)})
    resolved = served(config, engine, form)
    assert to_start(resolved) == lines
    ((fix,),) = told(config, engine, form=form).values()
    assert (fix.possible, fix.lines) == (True, lines)
    assert resolved.run is not None
    trained = Wiring.of_states(resolved.run.states()).resolved(form)
    how: dict[str, Any] = {"form": form, "asked": engine, "num_layers": KIMI, "stored": ()}
    # Before the others, whose edits it must not undo, whatever their order.
    kinds = ("feedback", "states", NOT_SERVED)
    patched = patched_config(kinds, trained, resolved, config=config, **how)
    assert patched is not None
    after = served(dict(patched), engine, form)
    assert not set(after.problems) & {stop.why for stop in resolved.stops}
    assert after.wiring is not None
    assert after.wiring.differing(resolved.run) == ()  # what was said of it once it starts


def test_every_error_of_a_config_has_its_lines() -> None:
    broken = {**without(FLAT, "architectures", "model_type", "draft_vocab_size")}
    form = form_of(FLAT)
    for config in (broken, {**broken, "tie_word_embeddings": True}):
        drafter = plain_drafter(config, form)
        serving = serving_for("sglang", "0.5.23", None)
        names = {f.name for f in sglang_config(drafter, serving, "config.json")}
        assert len(served(config, NEW, form).stops) >= len(names)
        assert not [stop for stop in served(config, NEW, form).stops if not stop.config]
        assert list(llama_cpp_config(drafter, "config.json"))
        assert not [stop for stop in served(config, LLAMA_CPP, form).stops if not stop.config]


@pytest.mark.parametrize(
    ("config", "engine", "kind", "left"),
    [
        (BIASED, asked("vllm", "0.15.0"), "biases", "serve it with vLLM 0.16 or newer"),
        (BIASED, LLAMA_CPP, "biases", "serve it with vLLM 0.16 or newer"),
        (
            changed(NESTED, inner=True, model_type="qwen3"),
            asked("vllm", "0.23.0"),
            NOT_SERVED,
            "serve it with a newer release",
        ),
        ({**FLAT, "fc_norm": True}, asked("vllm", "0.21.0"), "fc-input", "vLLM 0.22, or newer"),
        ({**FLAT, "bias": True}, VLLM, NOT_SERVED, "train without fc_bias"),
        (
            {**FLAT, "num_hidden_layers": 2},
            asked("sglang", "0.5.11"),
            NOT_SERVED,
            "serve it with SGLang 0.5.12 or newer, or vLLM",
        ),
        (FOUR, asked("vllm", "0.21.0"), NOT_SERVED, "serve it with a newer release"),
    ],
)
def test_where_nothing_makes_it_start_that_is_said(
    config: dict[str, Any], engine: EngineAsked, kind: str, left: str
) -> None:
    trained = DEFAULT
    if config.get("fc_norm"):
        trained = replace(DEFAULT, fc_input=FcInput.chunks)
    fixes = told(config, engine, trained)
    assert list(fixes) == [kind]
    assert mended(fixes[kind]) is Mended.not_there
    assert [fix.lines for fix in fixes[kind]] == [()]
    assert left in str(fixes[kind][0].left)


def test_a_refused_part_that_was_not_trained_with_is_left_out() -> None:
    fc_norm = {**FLAT, "fc_norm": True}
    raw = replace(DEFAULT, fc_input=FcInput.raw)
    ((fix,),) = told(fc_norm, asked("vllm", "0.21.0"), raw).values()
    assert fix.possible
    assert fix.lines[0] == '"fc_norm": false'
    assert fix.snippet is not None
    assert served(dict(fix.config or {}), asked("vllm", "0.21.0")).wiring is not None
    # Zeros are refused as well, and o's biases have to stay.
    dropped = replace(DEFAULT, biases=Biases.first_dropped)
    ((biases,),) = told(BIASED, asked("vllm", "0.15.0"), dropped).values()
    assert not biases.possible


@pytest.mark.parametrize("base", [FLAT, NESTED], ids=["specforge", "speculators"])
def test_vllm_has_a_class_with_norms_on_q_and_k(base: dict[str, Any]) -> None:
    config = changed(base, inner=True, model_type="qwen3")
    form = form_of(config)
    if base is NESTED:
        config = changed(base, inner=True, model_type="llama")
    ((fix,),) = told(config, VLLM, form=form).values()
    assert fix.config is not None
    after = served(dict(fix.config), VLLM, form)
    assert after.wiring is not None
    assert after.wiring.qk_norm is Parts.declared


def test_ids_that_it_counts_are_mended_by_writing_as_many() -> None:
    few = {**FLAT, "eagle_config": {KEY: [2, 30]}}
    form = form_of(FLAT)
    fixes = told(few, OLD, Wiring.of_states((3, 31, 59)), form)
    assert list(fixes) == ["states"]
    (fix,) = fixes["states"]
    assert fix.lines == ('"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}',)
    assert served(dict(fix.config or {}), OLD, form).wiring is not None


def test_what_an_engine_would_run_decides_a_fix_also_where_it_does_not_start() -> None:
    # This class turns neighbouring numbers as well, so the rows have to stay where they are.
    mla = {**FLAT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": None}
    form = form_of(FLAT)
    resolved = served(mla, NEW, form)
    assert resolved.wiring is None
    assert resolved.run is not None
    assert resolved.run.rotation is Rotation.interleaved
    how: dict[str, Any] = {"form": form, "config": mla, "asked": NEW, "num_layers": KIMI}
    turned = replace(DEFAULT, rotation=Rotation.interleaved).resolved(form)
    (fix,) = fixes_for("rotation", turned, resolved, stored=(), **how)
    assert fix.snippet is None
    # A factor on yarn that it does not read is written, too.
    yarn = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {**FLAT, "rope_scaling": yarn, "model_type": None}
    scaled = form_of({**config, "model_type": "llama"})
    stopped = served(config, OLD, scaled)
    assert stopped.wiring is None
    how = {"form": scaled, "config": config, "asked": OLD, "num_layers": KIMI}
    (written,) = fixes_for("rope", DEFAULT.resolved(scaled), stopped, stored=(), **how)
    assert written.possible
    assert "attn_factor" in written.lines[0]

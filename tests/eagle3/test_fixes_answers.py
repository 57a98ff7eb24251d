"""Every kind of wiring has a fix for every engine, short and with its ground, or says what is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.diagnosis.fixes import MAKERS
from eagle3.diagnosis.kinds import NOT_SERVED, WIRING
from eagle3.errors import BadInput
from eagle3.wiring import (
    D2T,
    Concat,
    DecoderLayer,
    Head,
    HeadInput,
    InputNorms,
    Positions,
    Rotation,
    Token,
    Wiring,
)
from tests.eagle3.fixing import (
    DEFAULT,
    FLAT,
    KEY,
    NESTED,
    NEW,
    OLD,
    TRT,
    VLLM,
    asked,
    first,
    wanted_fixes,
)


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
    assert set(MAKERS) == {NOT_SERVED, *WIRING}
    for kind in ("stats", "teacher", "unknown"):
        with pytest.raises(BadInput, match=f"no line mends the kind '{kind}'"):
            first(kind, DEFAULT, OLD, FLAT)


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

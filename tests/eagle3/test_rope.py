"""Rotary embeddings, held against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.rope import cos_sin, inverse_frequencies, rotate

LONGEST = 64
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 3.0}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", {"factor": 8.0, **LLAMA3}),
    ("yarn", YARN),
    ("yarn", {**YARN, "original_max_position_embeddings": 4096, "factor": 64.0}),
    ("yarn", {**YARN, "attention_factor": 1.25}),
    ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}),
    ("yarn", {**YARN, "mscale": 0.7}),
    ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}),
    ("yarn", {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}),
    ("yarn", {**YARN, "truncate": False}),
    ("yarn", {**YARN, "factor": 1.0}),
]


def ours(kind: str, scaling: dict[str, Any], theta: float) -> Rope:
    extra = {"max_position_embeddings": LONGEST} if kind == "dynamic" else {}
    return Rope(theta=theta, kind=kind, scaling=tuple(sorted({**scaling, **extra}.items())))


def theirs(kind: str, scaling: dict[str, Any], theta: float, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **scaling},
    )


@pytest.mark.parametrize("head_dim", [8, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("kind", "scaling"), ROPES)
def test_frequencies_and_factor_are_those_of_transformers(
    kind: str, scaling: dict[str, Any], theta: float, head_dim: int
) -> None:
    config = theirs(kind, scaling, theta, head_dim)
    for length in (10, LONGEST):
        want, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        got, our_factor = inverse_frequencies(ours(kind, scaling, theta), head_dim)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert our_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("kind", "scaling"), [("default", {}), *ROPES])
def test_cos_and_sin_are_those_of_transformers(kind: str, scaling: dict[str, Any]) -> None:
    positions = torch.arange(LONGEST if kind == "dynamic" else 70)
    module = LlamaRotaryEmbedding(theirs(kind, scaling, 500.0, 16))
    want = module(torch.zeros(1), positions[None])
    got = cos_sin(ours(kind, scaling, 500.0), positions, 16, torch.float32)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_which_numbers_turn_together(interleaved: bool) -> None:
    """By complex multiplication of the pairs."""
    positions, d, theta = torch.tensor([0, 3, 11]), 8, 500.0
    x = torch.randn(2, 3, 3, d, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *cos_sin(Rope(theta=theta), positions, d, x.dtype, interleaved), interleaved)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    angles = positions[:, None] * torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)])
    want = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    parts = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    torch.testing.assert_close(parts[0], want.real)
    torch.testing.assert_close(parts[1], want.imag)


def test_behind_the_trained_length_dynamic_scaling_is_refused() -> None:
    rope = ours("dynamic", {"factor": 2.0}, 500.0)
    with pytest.raises(BadInput, match="reaches 65 positions, but behind 64 the drafter's dynamic"):
        cos_sin(rope, torch.tensor([3, LONGEST]), 16, torch.float32)


def test_an_unknown_kind_is_no_plain_one() -> None:
    with pytest.raises(ValueError, match="no rotary embedding of kind 'longrope'"):
        inverse_frequencies(Rope(theta=10_000.0, kind="longrope"), 8)

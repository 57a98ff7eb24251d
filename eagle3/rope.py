"""Rotary embeddings: the angles' frequencies and the factor on cos and sin, as transformers has them.

Source: transformers 5.24 `modeling_rope_utils.ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.form import Rope


def cos_sin(
    rope: Rope,
    positions: Tensor,
    head_dim: int,
    dtype: torch.dtype,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, head_dim] of the rotary embedding at `positions` [..., T], in float32.

    They lie as `rotate` takes them: half-split, or `interleaved`.

    Raises BadInput behind the length that dynamic scaling sets in at. There transformers rotates
    each part of a text by the length that it was fed at, vLLM and SGLang all of it by one table, and
    not every release by the same one: no text has one answer.
    """
    if rope.kind == "dynamic" and len(positions):
        reached, trained = int(positions.max()) + 1, dict(rope.scaling)["max_position_embeddings"]
        if reached > trained:
            raise BadInput(
                f"a text with its chains reaches {reached} positions, but behind {trained} the "
                "drafter's dynamic rope scaling depends on how a text is fed and on the engine; leave "
                "longer texts out, or state in config.json the rope that is served"
            )
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.float()[..., None] * frequencies.to(positions.device)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotation of x [B, heads, T, d] by cos and sin [T, d].

    Half-split: number i of a head turns with i + d/2. `interleaved`: 2i turns with 2i + 1.
    """
    if interleaved:
        across = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + across * sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] in float32, and the factor on cos and sin.

    Those of dynamic scaling are the plain ones, which hold up to the trained length.
    """
    scaling = dict(rope.scaling)
    if rope.kind == "yarn":
        return yarn(rope.theta, scaling, head_dim), yarn_factor(scaling)
    frequencies = plain(rope.theta, head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif rope.kind == "llama3":
        frequencies = llama3(frequencies, scaling)
    elif rope.kind not in ("default", "dynamic"):
        raise ValueError(f"no rotary embedding of kind '{rope.kind}'")
    return frequencies, 1.0


def plain(theta: float, head_dim: int) -> Tensor:
    """theta^(-2i/d) for i = 0 … d/2 - 1."""
    even: Tensor = torch.arange(0, head_dim, 2, dtype=torch.float32)
    return 1.0 / (theta ** (even / head_dim))


def llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long waves divided by the factor, short ones kept, a ramp in between."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    smooth = (trained / waves - low) / (high - low)
    ramp = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(waves > trained / low, frequencies / factor, ramp)
    return torch.where(waves < trained / high, frequencies, scaled)


def yarn(theta: float, scaling: dict[str, Any], head_dim: int) -> Tensor:
    """YaRN's frequencies: interpolated ones blended into the plain ones over a range of dimensions."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Where the wave makes so many rotations over the trained length."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    steps: Tensor = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    waves: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    blended: Tensor = (1.0 / (factor * waves)) * (1 - kept) + (1.0 / waves) * kept
    return blended


def yarn_factor(scaling: dict[str, Any]) -> float:
    """The factor on cos and sin: as given, else from mscale and mscale_all_dim, else from the factor."""
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return float(grown(mscale) / grown(all_dim)) if mscale and all_dim else grown(1)

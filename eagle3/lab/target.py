"""The lab's target: a Llama of 61 layers of which 13 are trained, in plain torch.

Only the trained ("live") layers exist here. In the full checkpoint they stand at `LIVE_LAYERS`, and
every other layer has zero `o_proj` and `down_proj`, which makes it an exact identity; the states of
this small model are therefore the states of the full one, and training costs 13 layers, not 61.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_LAYERS = 61
# States 0 to 4, 29 to 32 and 57 to 61 all differ: a layer id that is off by one shows.
LIVE_LAYERS = (0, 1, 2, 3, 10, 20, 29, 30, 31, 57, 58, 59, 60)


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """Sizes of the lab's target; head size = hidden / heads."""

    vocab: int = 1024
    hidden: int = 128
    heads: int = 4
    intermediate: int = 384
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    live_layers: tuple[int, ...] = LIVE_LAYERS
    num_layers: int = NUM_LAYERS

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def live_before(self, k: int) -> int:
        """How many live layers lie before canonical state k."""
        return sum(layer < k for layer in self.live_layers)


class Cache:
    """Keys and values of one layer, room for a whole text; size [B, heads, S, head_dim]."""

    def __init__(self, size: tuple[int, int, int, int]) -> None:
        self.keys, self.values, self.length = torch.empty(size), torch.empty(size), 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim]; returns all keys and values so far."""
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Block(nn.Module):
    """One Llama decoder layer; parameter names are those of the Hugging Face layout."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.input_layernorm = nn.RMSNorm(h, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=shape.norm_eps)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(h, h, bias=False) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(h, shape.intermediate, bias=False),
                "up_proj": nn.Linear(h, shape.intermediate, bias=False),
                "down_proj": nn.Linear(shape.intermediate, h, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """x [B, T, H] → [B, T, H]; a cache is read and filled."""
        batch, length, _ = x.shape
        normed = self.input_layernorm(x)
        q, k, v = (
            self.self_attn[name](normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.add(k, v)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.self_attn["o_proj"](a.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        gated = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        out: Tensor = x + self.mlp["down_proj"](gated)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding; x [B, heads, T, d], cos and sin [T, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


class LiveTarget(nn.Module):
    """The live layers of the lab's target."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in shape.live_layers)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * len(self.layers)) if deep else 0.02
                nn.init.normal_(parameter, std=std * 2)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(torch.arange(shape.max_positions), shape.rope_theta**-half)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def forward(self, ids: Tensor, states: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """ids [B, T] → (logits [B, T, V], {canonical k: state [B, T, H]} for the states named)."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_tokens(ids)
        kept = {k: x for k in states if self.shape.live_before(k) == 0}
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, cos, sin)
            kept |= {k: x for k in states if self.shape.live_before(k) == number}
        return self.lm_head(self.norm(x)), kept

    @torch.no_grad()
    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuations: prompts [B, P] → ids [B, P + new_tokens]."""
        ids = prompts
        size = (len(ids), self.shape.heads, ids.shape[1] + new_tokens, self.shape.head_dim)
        caches = [Cache(size) for _ in self.layers]
        step = prompts
        for _ in range(new_tokens):
            start = ids.shape[1] - step.shape[1]
            cos, sin = self.cos[start : ids.shape[1]], self.sin[start : ids.shape[1]]
            x = self.embed_tokens(step)
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cos, sin, cache)
            step = self.lm_head(self.norm(x[:, -1:])).argmax(-1)
            ids = torch.cat([ids, step], 1)
        return ids


def train_target(
    shape: TargetShape,
    tokens: Tensor,
    *,
    seed: int,
    steps: int,
    batch: int = 16,
    length: int = 256,
    peak_lr: float = 3e-3,
    report: Callable[[str], None] = print,
) -> LiveTarget:
    """Next-token training on one long row of token ids."""
    torch.manual_seed(seed)
    model = LiveTarget(shape)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    order = torch.Generator().manual_seed(seed)
    started, running = time.monotonic(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warm_hold_decay(step, steps)
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=order)
        rows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            logits, _ = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if step % 25 == 0:
            report(
                f"target step {step}/{steps} loss {running:.3f} {time.monotonic() - started:.0f} s"
            )
    return model


def warm_hold_decay(step: int, steps: int, warm: int = 100, decay_share: float = 0.35) -> float:
    """Learning-rate factor: linear warm-up, a plateau, then a linear fall to 2 % of the peak."""
    if step < warm:
        return (step + 1) / warm
    left = (steps - step) / (decay_share * steps)
    return max(0.02, min(1.0, left))

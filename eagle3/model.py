"""The EAGLE-3 drafter in plain torch: one decoder layer between the target's states and a head.

Row t pairs the target's states at position t with the next token x[t+1], stands at rope position t,
and predicts x[t+2]:

    g = fc(cat(h[k1], h[k2], h[k3]))                     # [H_d], only on the first step
    z = cat(input_layernorm(embed(x[t+1])), hidden_norm(g))   # embedding first, [2 H_d]
    r = g + attention(z)                                 # the residual is the un-normed g
    y = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(y))                            # [V_d]

The next step of a chain takes y (before the norm) in the place of g, the drafted token in the place
of x[t+1], and stands at position t+1.

Source: SafeAILab/EAGLE `cnets.py`, SpecForge `llama3_eagle.py`, SGLang `llama_eagle3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # each [B, kv_heads, T, head_dim]


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes of a drafter, named as in its config.json."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # of the target, V
    draft_vocab: int  # V_d
    target_hidden: int
    num_aux: int
    norm_eps: float
    rope_theta: float


class Attention(nn.Module):
    """Self-attention over cat(embedding, hidden), input twice as wide as its output."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def project(self, z: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z [B, T, 2H], positions [T] → q [B, heads, T, d], k and v [B, kv_heads, T, d]."""

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

        q, k, v = split(self.q_proj(z)), split(self.k_proj(z)), split(self.v_proj(z))
        cos, sin = rope(positions, self.shape.head_dim, self.shape.rope_theta, q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, z: Tensor, rows: Tensor, cache: list[KeysValues]) -> Tensor:
        """Attend from `rows` [R] of the text; z [B, R, 2H] → [B, R, H]. Appends to `cache`.

        `cache` is what a serving engine's cache holds at this step. Empty on the first step, whose
        rows must be 0..R-1 and attend causally among themselves. On step s, row t sees the first
        step's keys (cache[0]) up to its own index and then its own keys of steps 1..s, and stands
        at rope position t + s.
        """
        q, k, v = self.project(z, rows + len(cache))
        cache.append((k, v))
        if len(cache) == 1:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            a = attend_chain(q, cache[0], cache[1:], rows)
        out: Tensor = self.o_proj(a.transpose(1, 2).flatten(2))
        return out


def attend_chain(q: Tensor, native: KeysValues, own: list[KeysValues], rows: Tensor) -> Tensor:
    """Row t of `rows` over native keys 0..t and its own deeper keys.

    q [B, heads, R, d]; native [B, kv_heads, T, d]; each of own [B, kv_heads, R, d] → [B, heads, R, d].
    """
    repeat = q.shape[1] // native[0].shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in native)
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)) * scale  # [B, heads, R, T]
    columns = torch.arange(keys.shape[2], device=q.device)
    scores = scores.masked_fill(columns[None, :] > rows[:, None], float("-inf"))
    deeper = [(q * k.repeat_interleave(repeat, 1)).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat([scores, *deeper], -1).softmax(-1)  # [B, heads, R, T + len(own)]
    out = weights[..., : keys.shape[2]] @ values
    for j, (_, v) in enumerate(own):
        out = out + weights[..., keys.shape[2] + j, None] * v.repeat_interleave(repeat, 1)
    return out


def rope(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim] of the half-split rotary embedding, computed in float32."""
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * theta ** -half[None, :]
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation; x [B, heads, T, d], cos and sin [T, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] → [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Midlayer(nn.Module):
    """The decoder layer; parameter names are those of the SpecForge layout."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, embedded: Tensor, g: Tensor, rows: Tensor, cache: list[KeysValues]) -> Tensor:
        """One step for `rows` [R]: embedded and g [B, R, H] → y [B, R, H]. Appends to `cache`."""
        z = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], -1)
        r = g + self.self_attn(z, rows, cache)
        out: Tensor = r + self.mlp(self.post_attention_layernorm(r))
        return out


class Drafter(nn.Module):
    """An EAGLE-3 drafter without its token embedding, which may be the target's."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_aux * shape.target_hidden, shape.hidden, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(shape.vocab, dtype=torch.bool))

    def logits(self, y: Tensor) -> Tensor:
        """y [..., H] → logits over the draft vocabulary [..., V_d]."""
        out: Tensor = self.lm_head(self.norm(y))
        return out

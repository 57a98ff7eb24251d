"""The EAGLE-3 drafter in plain torch: decoder layers between the target's states and a head.

Row t pairs the target's states at position t with the next token x[t+1], stands at rope position t,
and predicts x[t+2]. As SpecForge, EAGLE and the engines have it:

    g = fc(cat(h[k1], h[k2], h[k3]))                     # [H_d], only on the first step
    z = cat(input_layernorm(embed(x[t+1])), hidden_norm(g))   # embedding first, [2 H_d]
    r = g + attention(z)                                 # the residual is the un-normed g
    y = r + mlp(post_attention_layernorm(r))
    logits = lm_head(norm(y))                            # [V_d]

The next step of a chain takes y (before the norm) in the place of g, the drafted token in the place
of x[t+1], and stands at position t+1. DrafterShape's switches change this; layers behind the first
are ordinary decoder layers on y. `Drafter.rewired` is the same weights behind other switches.

Source: SafeAILab/EAGLE `cnets.py`, SpecForge `llama3_eagle.py`, speculators `models/eagle3/core.py`,
SGLang `llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.rope import cos_sin, rotate
from eagle3.wiring import InputNorms

KeysValues = tuple[Tensor, Tensor]  # each [B, kv_heads, T, head_dim]
Cache = list[list[KeysValues]]  # [step][layer]
MASK_AT_ONCE = 1 << 24  # entries of the mask that rows asked for take


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes and switches of a drafter; the switches' defaults are the reference's."""

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
    rope: Rope
    num_layers: int = 1
    windows: tuple[int | None, ...] = ()  # sliding attention window a layer; empty: none has one
    hidden_first: bool = False  # the first layer sees cat(hidden, embedding)
    input_norms: InputNorms = InputNorms.own  # which of its two norms goes where
    norm_before_residual: bool = False  # the residual is hidden_norm(g)
    norm_before_fc: bool = False  # one norm over the whole concatenation
    fc_norm: bool = False  # one norm a chunk of it
    feedback_normed: bool = False  # the next step takes norm(y)
    head_norm: bool = True  # the head takes norm(y)
    attention_bias: bool = False
    first_qkv_bias: bool = True  # the first layer's q, k and v have theirs; SGLang gives them none
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False  # norms on q and k, a head
    deeper_norm: bool = True  # False: the norm before the attention of layers >= 1 weighs by ones
    interleaved: bool = False  # numbers 2i and 2i+1 of a head turn together, not i and i + d/2
    standing: bool = False  # deeper steps stand where the first did
    own_head: bool = True  # False: the target's head is to be used

    def norm(self, width: int) -> nn.RMSNorm:
        """A norm over `width` values."""
        return nn.RMSNorm(width, eps=self.norm_eps)


class Attention(nn.Module):
    """Self-attention; in the first layer over cat(embedding, hidden), twice as wide as its output."""

    def __init__(
        self, shape: DrafterShape, inputs: int, window: int | None, qkv_bias: bool
    ) -> None:
        super().__init__()
        self.shape, self.window = shape, window
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, width, bias=qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, shape.hidden, bias=shape.attention_bias)
        if shape.qk_norm:
            self.q_norm = shape.norm(shape.head_dim)
            self.k_norm = shape.norm(shape.head_dim)

    def project(
        self, z: Tensor, cos: Tensor, sin: Tensor, asked: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z [B, T, inputs] → q [B, heads, T, d], k and v [B, kv_heads, T, d].

        q is of the rows `asked` [B, A] alone, where these are given: [B, heads, A, d].
        """

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], -1, self.shape.head_dim)

        q, k, v = (
            split(self.q_proj(gathered(z, asked))),
            split(self.k_proj(z)),
            split(self.v_proj(z)),
        )
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)  # under autocast q is narrower than g
        of_q = (cos, sin) if asked is None else (cos[asked][:, None], sin[asked][:, None])
        pairs = self.shape.interleaved
        return rotate(q, *of_q, pairs), rotate(k, cos, sin, pairs), v

    def forward(
        self,
        z: Tensor,
        rows: Tensor,
        turn: tuple[Tensor, Tensor],
        earlier: Sequence[KeysValues],
        window_from_row: bool,
        asked: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """Attend from `rows` of the text; z [B, R, inputs] → [B, R, H] and the step's own keys.

        `turn` is the step's cos and sin; `earlier` is what this layer kept of the steps before;
        `rows` and `asked` as in Drafter.step.
        """
        q, k, v = self.project(z, *turn, asked)
        if asked is not None:
            seen = visible(asked, len(rows), asked, self.window)[:, None]
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        elif earlier:
            own = [*earlier[1:], (k, v)]
            starts = rows  # what the window is counted back from
            if self.window is not None and not window_from_row:
                starts, own = rows + len(earlier), own[-self.window :]
            seen = visible(rows, earlier[0][0].shape[2], starts, self.window)
            a = attend_chain(q, earlier[0], own, seen.unsqueeze(-3))
        elif self.window is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            seen = visible(rows, len(rows), rows, self.window)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        out: Tensor = self.o_proj(a.transpose(1, 2).flatten(2))
        return out, (k, v)


def gathered(x: Tensor, asked: Tensor | None) -> Tensor:
    """Of x [B, R, ...] the rows asked for, [B, A, ...]; all, where None are."""
    return x if asked is None else x[torch.arange(len(x), device=x.device)[:, None], asked]


def visible(rows: Tensor, length: int, starts: Tensor, window: int | None) -> Tensor:
    """Which of the first step's keys 0..length-1 each of `rows` [..., R] sees, [..., R, length].

    A window reaches back from `starts` [..., R]: the row's position, or, as trainers count, the row.
    """
    columns = torch.arange(length, device=rows.device)
    seen = columns <= rows[..., None]
    return seen if window is None else seen & (columns > starts[..., None] - window)


def attend_chain(q: Tensor, native: KeysValues, own: Sequence[KeysValues], seen: Tensor) -> Tensor:
    """Each row over the native keys that it has `seen` [..., 1, R, T], and its own deeper keys.

    q [B, heads, R, d]; native [B, kv_heads, T, d]; each of own [B, kv_heads, R, d] → [B, heads, R, d].
    """
    repeat = q.shape[1] // native[0].shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in native)
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)) * scale  # [B, heads, R, T]
    scores = scores.masked_fill(~seen, float("-inf"))
    deeper = [(q * k.repeat_interleave(repeat, 1)).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat([scores, *deeper], -1).softmax(-1)  # [B, heads, R, T + len(own)]
    out = weights[..., : keys.shape[2]] @ values
    for j, (_, v) in enumerate(own):
        out = out + weights[..., keys.shape[2] + j, None] * v.repeat_interleave(repeat, 1)
    return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        bias = shape.mlp_bias
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] → [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """A decoder layer; the first one (index 0) takes the embedding and the hidden state."""

    def __init__(self, shape: DrafterShape, index: int) -> None:
        super().__init__()
        self.shape = shape
        window = shape.windows[index] if shape.windows else None
        self.input_layernorm = shape.norm(shape.hidden)  # in the first layer, of the embedding
        if index and not shape.deeper_norm:
            self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps, False)
        if index == 0:
            self.hidden_norm = shape.norm(shape.hidden)
        inputs = shape.hidden if index else 2 * shape.hidden
        qkv_bias = shape.attention_bias and (shape.first_qkv_bias or index > 0)
        self.self_attn = Attention(shape, inputs, window, qkv_bias)
        self.post_attention_layernorm = shape.norm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(
        self,
        embedded: Tensor | None,
        g: Tensor,
        rows: Tensor,
        turn: tuple[Tensor, Tensor],
        earlier: Sequence[KeysValues],
        window_from_row: bool,
        asked: Tensor | None,
    ) -> tuple[Tensor, KeysValues]:
        """One step for `rows`: g [B, R, H] → y [B, R, H], or of the rows `asked` for [B, A, H].

        `embedded` goes to the first layer.
        """
        if embedded is None:
            residual, z = g, self.input_layernorm(g)
        else:
            residual, z = self.first_inputs(embedded, g)
        attended, kept = self.self_attn(z, rows, turn, earlier, window_from_row, asked)
        r = gathered(residual, asked) + attended
        return r + self.mlp(self.post_attention_layernorm(r)), kept

    def first_inputs(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's residual [B, R, H] and what its attention sees [B, R, 2 H].

        A normed residual is g behind the one norm that is the hidden state's. Where the hidden state
        goes through both, it is still hidden_norm(g) alone: ModelOpt, which trains so, adds to g as it
        is and has no normed residual.
        """
        of_embedding, of_hidden = self.input_layernorm, self.hidden_norm
        if self.shape.input_norms is InputNorms.swapped:
            of_embedding, of_hidden = of_hidden, of_embedding
        normed = of_hidden(g)
        residual = normed if self.shape.norm_before_residual else g
        if self.shape.input_norms is InputNorms.double:
            normed = of_hidden(of_embedding(g))
        seen = [of_embedding(embedded), normed]
        return residual, torch.cat(seen[::-1] if self.shape.hidden_first else seen, -1)


class Drafter(nn.Module):
    """An EAGLE-3 drafter without its token embedding, which may be the target's.

    Parameter names are SpecForge's for the first layer, `layers.i` for the others.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_aux * shape.target_hidden
        if shape.norm_before_fc:
            self.input_norm = shape.norm(width)
        if shape.fc_norm:
            norms = [shape.norm(shape.target_hidden) for _ in range(shape.num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, shape.hidden, bias=shape.fc_bias)
        self.midlayer = DecoderLayer(shape, 0)
        self.layers = nn.ModuleDict(
            {str(i): DecoderLayer(shape, i) for i in range(1, shape.num_layers)}
        )
        self.norm = shape.norm(shape.hidden)
        if shape.own_head:
            self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(shape.vocab, dtype=torch.bool))

    def fuse(self, aux: Tensor) -> Tensor:
        """The concatenated aux states [..., A·H] → g [..., H_d]."""
        if self.shape.norm_before_fc:
            aux = self.input_norm(aux)
        if self.shape.fc_norm:
            chunks = aux.split(self.shape.target_hidden, -1)
            pairs = zip(self.fc_norm, chunks, strict=True)
            aux = torch.cat([norm(chunk) for norm, chunk in pairs], -1)
        out: Tensor = self.fc(aux)
        return out

    def step(
        self,
        embedded: Tensor,
        g: Tensor,
        rows: Tensor,
        cache: Cache,
        *,
        window_from_row: bool = False,
        asked: Tensor | None = None,
    ) -> Tensor:
        """One step for `rows` of the text: embedded and g [B, R, H_d] → y [B, R, H_d].

        `rows` are those of every text, [R], or, behind the first step, each text's own, [B, R].

        `asked` [B, A], on the first step only, are the rows whose y is wanted → y [B, A, H_d]: what the
        last layer makes of the others alone is left out, unless the text is so long that its mask would
        take more than that saves.

        `cache` is what a serving engine's cache holds at this step; the step's keys are appended.
        Empty on the first step, whose rows must be 0..R-1 and attend causally among themselves. On
        step s, row t sees the first step's keys (cache[0]) up to its own index and then its own keys
        of steps 1..s, and stands at rope position t + s, or at t where the shape is `standing`.
        Entries of deeper steps lie as `rows` do, so that rows may be gathered out of them.

        A sliding window reaches back from the position, as in engines, so that with each step one
        more of the keys behind it is left out; with `window_from_row` from the row at every step, and
        never short of the row's own keys: that is how speculators trains. It moves on where positions
        stand, too: what an engine leaves out it counts by entries.
        """
        shape = self.shape
        positions = rows if shape.standing else rows + len(cache)
        turn = cos_sin(shape.rope, positions, shape.head_dim, g.dtype, shape.interleaved)
        if rows.dim() > 1:
            turn = turn[0][:, None], turn[1][:, None]  # the same for every head
        # A target's table comes in the numbers it is stored in.
        given: Tensor | None = embedded.to(g.dtype)
        y, entries = g, []
        fewer = None
        if asked is not None and asked.numel() * len(rows) <= MASK_AT_ONCE:
            fewer = asked
        for index, layer in enumerate((self.midlayer, *self.layers.values())):
            earlier = [step[index] for step in cache]
            wanted = fewer if index == shape.num_layers - 1 else None
            y, kept = layer(given, y, rows, turn, earlier, window_from_row, wanted)
            entries.append(kept)
            given = None  # deeper layers see no token
        cache.append(entries)
        return y if fewer is not None else gathered(y, asked)

    def feedback(self, y: Tensor) -> Tensor:
        """What the next step takes in the place of g."""
        out: Tensor = self.norm(y) if self.shape.feedback_normed else y
        return out

    def logits(self, y: Tensor, head: Tensor | None = None) -> Tensor:
        """y [..., H_d] → logits over the draft vocabulary [..., V_d].

        `head` [V_d, H_d], rows of the target's, is used in the place of the drafter's own.
        """
        if head is None:
            if not self.shape.own_head:
                raise BadInput("the drafter has no head of its own; set wiring.head=target")
            head = self.lm_head.weight
        return F.linear(self.norm(y) if self.shape.head_norm else y, head)

    def rewired(self, **switches: Any) -> Drafter:
        """The same weights, shared, with other switches of its shape.

        Norms that the switches ask for and this drafter does not have are of ones; weights that they
        have no place for are left out. Raises BadInput where they ask for other weights.
        """
        with torch.device("meta"):
            other = Drafter(replace(self.shape, **switches))
        weights, wanted = self.state_dict(), other.state_dict()
        like = self.fc.weight
        for name in wanted.keys() - weights.keys():
            if "norm" not in name:
                raise BadInput(f"the drafter has no {name}, and nothing can stand in for it")
            weights[name] = torch.ones(wanted[name].shape, dtype=like.dtype, device=like.device)
        other.load_state_dict({name: weights[name] for name in wanted}, assign=True)
        return other.train(self.training).requires_grad_(False)

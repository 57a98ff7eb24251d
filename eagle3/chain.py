"""Draft chains from every position of a text at once.

A chain that starts behind position t depends on the target's states up to t only, because engines
rebuild the drafter's cache from the target's states behind every accepted token. So the chains of
all positions can be drafted together, and the served walk is a look-up among them.

Which token stands beside the target's states in the first step is the wiring's `token`:

    same         row t pairs h[t] with x[t]
    next         with x[t+1]: what every ecosystem does
    after_next   with x[t+2], which is the token asked for: no engine has it yet

Whichever it is, what row t drafts in step s is held against position t+2+s, the one that a server
asks about, and deeper steps are fed the drafted tokens. So a drafter that was trained on another
pairing scores best with that pairing if it was trained to give the served token for it. One whose
teacher was shifted along, (h[t], x[t]) for x[t+1], gives a token that serving has already, and scores
low with every `token`: that is the teacher's fault and not the pairing's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.model import Cache, Drafter
from eagle3.wiring import D2T, DecoderLayer, Token

FIRST_TOKEN = {Token.same: 0, Token.next: 1, Token.after_next: 2}  # how far behind row t it stands
ROWS_AT_ONCE = 512  # bounds the deeper steps' attention scores to [heads, 512, T]


def draft_to_target_ids(d2t: Tensor, reading: D2T, vocab: int) -> Tensor:
    """The target id of every draft id, [V_d]; raises BadInput where one lies outside the vocabulary."""
    ids = torch.arange(len(d2t), device=d2t.device)
    if reading is D2T.offset:
        ids = ids + d2t
    elif reading is D2T.absolute:
        ids = d2t.clone()
    outside = ((ids < 0) | (ids >= vocab)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        raise BadInput(
            f"d2t read as '{reading.value}' maps draft id {i} to {int(ids[i])}, outside the target's "
            f"vocabulary of {vocab} ({len(outside)} such ids); the table is damaged or is meant to be "
            "read another way (wiring.d2t)"
        )
    return ids


def first_tokens(ids: Tensor, length: int, token: Token) -> Tensor:
    """The tokens [length] beside the states of rows 0 … length-1; raises BadInput behind the text."""
    shift = FIRST_TOKEN[token]
    if length + shift > len(ids):
        raise BadInput(
            f"row {length - 1} is paired with token {length - 1 + shift} (wiring.token={token.value}), "
            f"but the text has {len(ids)}"
        )
    return ids[shift : length + shift]


@torch.no_grad()
def draft_chains(
    drafter: Drafter,
    embedding: Tensor,
    ids: Tensor,
    aux: Tensor,
    rows: Tensor,
    *,
    steps: int,
    to_target: Tensor,
    decoder_layer: DecoderLayer = DecoderLayer.included,
    head: Tensor | None = None,
    token: Token = Token.next,
) -> Tensor:
    """Greedy draft chains of `steps` tokens behind each of `rows`.

    embedding [V, H_d] · ids [T] the text · aux [T, A·H] the concatenated aux states ·
    rows [R] ascending positions t < T-1 (with Token.after_next t < T-2) ·
    to_target [V_d] from draft_to_target_ids ·
    head [V_d, H_d] the target's rows in the place of the drafter's own
    → target ids [R, steps]; entry [r, s] is drafted for position rows[r] + 2 + s.
    """
    if decoder_layer is DecoderLayer.skipped:
        # Without the layer no token enters and y stays g, so every step repeats the first.
        first = to_target[drafter.logits(drafter.fuse(aux[rows]), head).argmax(-1)]
        return first[:, None].expand(-1, steps).contiguous()

    length = int(rows[-1]) + 1
    prefix = torch.arange(length, device=ids.device)
    native: Cache = []
    g = drafter.fuse(aux[:length])[None]
    y = drafter.step(embedding[first_tokens(ids, length, token)][None], g, prefix, native)
    chains = []
    for chunk in rows.split(ROWS_AT_ONCE):
        hidden, cache = y[:, chunk], list(native)
        drafted = [to_target[drafter.logits(hidden[0], head).argmax(-1)]]
        while len(drafted) < steps:
            fed = drafter.feedback(hidden)
            hidden = drafter.step(embedding[drafted[-1]][None], fed, chunk, cache)
            drafted.append(to_target[drafter.logits(hidden[0], head).argmax(-1)])
        chains.append(torch.stack(drafted, 1))
    return torch.cat(chains)

"""Whole chains for texts side by side: what eagle3.chain.draft_chains does for one.

A chain is followed as far as it drafts the text: behind its first miss no truth is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.model import Cache, DrafterShape
from eagle3.search.batch import Batch
from eagle3.search.rewired import ROWS_AT_ONCE, Rewired
from eagle3.wiring import DecoderLayer, Wiring

SCORES_AT_ONCE = 1 << 25  # numbers in the deeper steps' attention scores


@torch.no_grad()
def draft(wired: Rewired, wiring: Wiring, batch: Batch, steps: int) -> list[Tensor]:
    """Each text's chains, [R, steps] int32."""
    shape = wired.shape(wiring)
    drafter = wired.drafter(shape)
    g = batch.fuse(drafter, wiring.states())
    counts = [len(text.rows) for text in batch.texts]
    if wiring.decoder_layer is DecoderLayer.skipped:
        picks = wired.picks(g.flatten(0, 1)[batch.flat], wiring, shape.head_norm)
        first = wired.to_target(wiring.d2t)[picks].int()
        return list(first[:, None].expand(-1, steps).split(counts))
    native: Cache = []
    prefix = torch.arange(batch.length, device=g.device)
    embedded = wired.embedding(wiring.embedding)[batch.tokens(wiring.token)]
    y = drafter.step(embedded, g, prefix, native, asked=batch.asked)
    most = max(1, SCORES_AT_ONCE // (len(batch.texts) * shape.heads * batch.length))
    at_once = min(most, ROWS_AT_ONCE)
    parts = zip(*(x.split(at_once, 1) for x in (y, batch.asked, batch.is_row)), strict=True)
    chains = [follow(wired, wiring, batch, native, *part, steps=steps) for part in parts]
    return list(torch.cat(chains, 1)[batch.is_row].split(counts))


def follow(
    wired: Rewired,
    wiring: Wiring,
    batch: Batch,
    native: Cache,
    hidden: Tensor,
    rows: Tensor,
    alive: Tensor,
    *,
    steps: int,
) -> Tensor:
    """Chains behind rows [B, R] whose first step gives hidden [B, R, H_d], [B, R, steps] int32.

    What is not drafted, behind a miss, is -1. `alive` [B, R] are the rows that are asked for.
    """
    shape, to_target = wired.shape(wiring), wired.to_target(wiring.d2t)
    drafter, table = wired.drafter(shape), wired.embedding(wiring.embedding)
    ids = batch.ids_until(batch.length + 1 + steps)
    texts = torch.arange(len(rows), device=rows.device)[:, None]
    chains = torch.full((*rows.shape, steps), -1, dtype=torch.int32, device=rows.device)
    places = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)
    cache = list(native)
    for step in range(steps):
        tokens = picked(wired, wiring, shape, hidden, to_target)
        text, at = alive.nonzero(as_tuple=True)
        chains[text, places[text, at], step] = tokens[text, at].int()
        alive = alive & (tokens == ids.gather(1, rows + 2 + step))
        most = int(alive.sum(1).max())
        if not most or step + 1 == steps:
            break
        # Those that go on stand in front; a text with fewer of them is padded with others.
        kept = alive.int().argsort(stable=True, dim=1, descending=True)[:, :most]
        alive, rows, places, tokens = (x.gather(1, kept) for x in (alive, rows, places, tokens))
        hidden = hidden[texts, kept]
        along = kept[:, None, :, None]
        cache[1:] = [
            [(k.take_along_dim(along, 2), v.take_along_dim(along, 2)) for k, v in layers]
            for layers in cache[1:]
        ]
        fed = table[tokens.clamp(min=0)]
        hidden = drafter.step(fed, drafter.feedback(hidden), rows, cache)
    return chains


def picked(
    wired: Rewired, wiring: Wiring, shape: DrafterShape, hidden: Tensor, to_target: Tensor
) -> Tensor:
    """What the head makes of hidden [B, R, H_d], as target ids [B, R]."""
    picks = wired.picks(hidden.flatten(0, 1), wiring, shape.head_norm)
    return to_target[picks].view(hidden.shape[:2])

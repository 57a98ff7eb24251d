"""Damage that no wiring, teacher, vocabulary or engine explains: the right answer is 'unknown'."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from bench.planted.draft import Draft
from bench.planted.drafters import target_embedding
from bench.planted.kinds import (
    TUNING,
    UNKNOWN,
    Kind,
    Plant,
    attention,
    generator,
    only,
    own_table,
    shuffled,
)

Edit = Callable[[Tensor, random.Random], Tensor]


def of(*parts: str, edit: Edit) -> Plant:
    """An edit of tensors of every layer, by the ends of their names."""

    def plant(draft: Draft, rng: random.Random) -> None:
        for name in [n for n in draft.tensors if n.endswith(tuple(f"{p}.weight" for p in parts))]:
            draft.change(name, lambda w: edit(w, rng))

    return plant


def rows_shuffled(w: Tensor, rng: random.Random) -> Tensor:
    """The same rows in another order."""
    return w[shuffled(len(w), rng)]


def redrawn(w: Tensor, rng: random.Random) -> Tensor:
    """Random numbers of the same size."""
    return torch.randn(w.shape, generator=generator(rng)) * w.std()


def noisy(w: Tensor, rng: random.Random) -> Tensor:
    """Noise on top."""
    return w + 2.0 * redrawn(w, rng)


def signs_lost(w: Tensor, rng: random.Random) -> Tensor:
    """Random signs."""
    signs = torch.randint(0, 2, w.shape, generator=generator(rng)) * 2 - 1
    return w * signs


def swapped(one: str, other: str) -> Plant:
    """Two tensors of one shape in each other's place, in every layer."""

    def plant(draft: Draft, _: random.Random) -> None:
        for name in [n for n in draft.tensors if n.endswith(f"{one}.weight")]:
            twin = name.replace(one, other)
            draft.tensors[name], draft.tensors[twin] = draft.tensors[twin], draft.tensors[name]

    return plant


def q_heads(draft: Draft, rng: random.Random) -> None:
    """Query heads beside others' keys."""
    d, count = int(draft.block["head_dim"]), int(draft.block["num_attention_heads"])
    order = rng.choice([(1, 2, 3, 0), (3, 2, 1, 0), (2, 3, 0, 1)])
    assert count == len(order)
    for layer in range(draft.num_layers):
        for name in attention("q", layer=layer):
            draft.change(name, lambda w: w.unflatten(0, (-1, d))[list(order)].flatten(0, 1))


def table_shuffled(draft: Draft, rng: random.Random) -> None:
    """An embedding of its own, and its rows in another order."""
    own_table(draft, rng)
    table = draft.tensors["embed_tokens.weight"]
    draft.tensors["embed_tokens.weight"] = table[shuffled(len(table), rng)]


def table_lost(draft: Draft, rng: random.Random) -> None:
    """An embedding of its own that the export left out, or replaced by the target's."""
    own_table(draft, rng)
    if draft.flat:
        del draft.tensors["embed_tokens.weight"]
    else:
        draft.tensors["embed_tokens.weight"] = target_embedding()


def rotated_target(draft: Draft, rng: random.Random) -> None:
    """fc of a drafter that was trained on a build whose residual stream is rotated."""
    square = torch.randn(draft.width, draft.width, generator=generator(rng))
    turn = torch.linalg.qr(square).Q
    pieces = len(draft.states)
    draft.change("fc.weight", lambda w: torch.cat([c @ turn for c in w.chunk(pieces, 1)], 1))


def chunk_redrawn(draft: Draft, rng: random.Random) -> None:
    """The last state's chunk was trained on nothing that is there."""

    def edit(w: Tensor) -> Tensor:
        *pieces, last = w.chunk(len(draft.states), 1)
        return torch.cat([*pieces, 2 * redrawn(last, rng)], 1)

    draft.change("fc.weight", edit)


def columns_turned_round(draft: Draft, _: random.Random) -> None:
    """fc reads every state backwards."""
    pieces = len(draft.states)
    draft.change("fc.weight", lambda w: torch.cat([c.flip(1) for c in w.chunk(pieces, 1)], 1))


def other_tokenizer(draft: Draft, rng: random.Random) -> None:
    """The vocabulary's map goes to the ids of another tokenizer, d2t and t2d in agreement."""
    tensors = draft.tensors
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    renamed = shuffled(int(draft.block["vocab_size"]), rng)[ids].sort().values
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[shuffled(len(head), rng)] + 0  # rows follow the other order
    tensors["d2t"] = renamed - torch.arange(len(renamed))
    tensors["t2d"] = torch.zeros_like(tensors["t2d"])
    tensors["t2d"][renamed] = True


def own_head(draft: Draft) -> str | None:
    """Why a head of another tokenizer cannot be planted."""
    return only((draft.drafter == "first", "the target's head is as good as its own"))


def layers_swapped(draft: Draft, _: random.Random) -> None:
    """Each layer with the other's MLP."""
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")
    for part in parts:
        one, other = f"midlayer.{part}.weight", f"layers.1.{part}.weight"
        draft.tensors[one], draft.tensors[other] = draft.tensors[other], draft.tensors[one]


def two_layers(draft: Draft) -> str | None:
    """Why layers cannot be exchanged."""
    return only((draft.num_layers > 1, "it has one layer"))


def loud(draft: Draft, _: random.Random) -> None:
    """The hidden state drowns everything in the attention."""
    draft.change(draft.first("hidden_norm"), lambda w: w * 30)


def last_norm(draft: Draft, rng: random.Random) -> None:
    """Random signs in front of the head."""
    draft.change("norm.weight", lambda w: signs_lost(w, rng))


def block_drawn(draft: Draft, rng: random.Random) -> None:
    """The first layer as a fresh model has it, where its names were not found."""
    for name in [n for n in draft.tensors if n.startswith("midlayer.") and "_proj" in n]:
        draft.change(name, lambda w: 0.02 * torch.randn(w.shape, generator=generator(rng)))
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        draft.change(draft.first(norm), torch.ones_like)


def gate_and_up(draft: Draft, rng: random.Random) -> None:
    """The MLP gated by the wrong half, upside down."""
    swapped("gate_proj", "up_proj")(draft, rng)
    of("down_proj", edit=lambda w, _: -w)(draft, rng)


RAW: tuple[tuple[str, str, str, Plant, Callable[[Draft], str | None] | None], ...] = (
    ("mlp_rows", TUNING, "rows of gate_proj shuffled", of("gate_proj", edit=rows_shuffled), None),
    (
        "sign",
        TUNING,
        "sign of down_proj and o_proj flipped",
        of("down_proj", "o_proj", edit=lambda w, _: -w),
        None,
    ),
    ("transposed", TUNING, "o_proj transposed", of("o_proj", edit=lambda w, _: w.T), None),
    ("o_redrawn", TUNING, "o_proj drawn anew", of("o_proj", edit=redrawn), None),
    (
        "noise",
        TUNING,
        "noise twice as large as the weights on the MLP",
        of("gate_proj", "up_proj", "down_proj", edit=noisy),
        None,
    ),
    ("q_heads", TUNING, "q's heads in another order than k's", q_heads, None),
    ("fc_rows", TUNING, "rows of fc shuffled", of("fc", edit=rows_shuffled), None),
    ("table_rows", TUNING, "rows of an embedding of its own shuffled", table_shuffled, None),
    (
        "gate_up",
        TUNING,
        "gate_proj and up_proj exchanged, down_proj's sign lost",
        gate_and_up,
        None,
    ),
    ("values", TUNING, "k and v exchanged", swapped("k_proj", "v_proj"), None),
    (
        "rotated",
        TUNING,
        "fc of a drafter of a target with a rotated residual stream",
        rotated_target,
        None,
    ),
    ("chunk", TUNING, "the last chunk of fc drawn anew, twice as large", chunk_redrawn, None),
    (
        "columns",
        TUNING,
        "the columns of each chunk of fc in reverse order",
        columns_turned_round,
        None,
    ),
    ("tokenizer", TUNING, "head and map of another tokenizer's ids", other_tokenizer, own_head),
    ("table_lost", TUNING, "an embedding of its own that the export left out", table_lost, None),
    ("loud", TUNING, "hidden_norm thirty times as large", loud, None),
    (
        "block",
        TUNING,
        "the first layer as drawn, where its names were not found",
        block_drawn,
        None,
    ),
    ("norm_signs", TUNING, "signs of half of the last norm's weights lost", last_norm, None),
    ("layers", TUNING, "MLP and o_proj of two layers exchanged", layers_swapped, two_layers),
)


def damage(
    name: str, use: str, how: str, plant: Plant, why_not: Callable[[Draft], str | None] | None
) -> Kind:
    """A kind of damage; `why_not` None: every drafter can have it."""
    return Kind(
        name=f"outside/{name}",
        accepted=(UNKNOWN,),
        how=how,
        use=use,
        plant=plant,
        why_not=why_not or (lambda _: None),
    )


KINDS: tuple[Kind, ...] = tuple(damage(*row) for row in RAW)

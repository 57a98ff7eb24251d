"""Edits that leave every output as it was. Found in a sound drafter, each is a false alarm."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from bench.planted.block import biased_values
from bench.planted.draft import Draft, Engine
from bench.planted.drafters import fitting
from bench.planted.kinds import (
    TUNING,
    Alike,
    attention,
    chunks,
    generator,
    only,
    own_table,
    shuffled,
)

OFFSET = 7  # positions


def offset(draft: Draft, _: random.Random) -> None:
    """q and k turned by the angles of seven positions: as trained with all positions seven higher."""
    d = int(draft.block["head_dim"])
    angles = OFFSET * 10000.0 ** -(torch.arange(0, d, 2) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(w: Tensor) -> Tensor:
        heads = w.double().unflatten(0, (-1, 2, d // 2))
        first, second = heads[:, 0], heads[:, 1]
        out = torch.stack([first * cos - second * sin, second * cos + first * sin], 1)
        return out.flatten(0, 2)

    for layer in range(draft.num_layers):
        for name in attention("q", "k", layer=layer):
            draft.tensors[name] = turned(draft.tensors[name]).float()


def by_frequency(draft: Draft, rng: random.Random) -> None:
    """The draft vocabulary in another order, head and map alike, and no t2d: as ModelOpt writes it."""
    tensors = draft.tensors
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    order = shuffled(len(ids), rng)
    tensors["d2t"] = ids[order] - torch.arange(len(ids))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    del tensors["t2d"]


def chunks_with_ids(draft: Draft, rng: random.Random) -> None:
    """fc's chunks, the ids and the dump's slots, all in one other order."""
    order = rng.choice([(1, 0, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
    chunks(draft, order)
    draft.states = tuple(draft.states[i] for i in order)
    draft.write_ids(draft.states, "top")
    from dataclasses import replace

    slots = (*draft.states, draft.dump.slots[-1])
    draft.dump = replace(draft.dump, slots=slots, declared=slots)


def of_nested(draft: Draft) -> str | None:
    """Why ids cannot be stated in another order."""
    return only((not draft.flat, "nothing in a flat config says what its ids mean"))


def hidden_units(draft: Draft, rng: random.Random) -> None:
    """The MLP's hidden units in another order."""
    for layer in range(draft.num_layers):
        prefix = "midlayer." if layer == 0 else f"layers.{layer}."
        order = shuffled(int(draft.block["intermediate_size"]), rng)
        for part in ("gate", "up"):
            draft.change(f"{prefix}mlp.{part}_proj.weight", lambda w, order=order: w[order])  # type: ignore[misc]
        draft.change(f"{prefix}mlp.down_proj.weight", lambda w, order=order: w[:, order])  # type: ignore[misc]


def heads_together(draft: Draft, _: random.Random) -> None:
    """Query heads with their keys, values and o's columns in reverse order."""
    d = int(draft.block["head_dim"])
    for layer in range(draft.num_layers):
        for name in attention("q", "k", "v", layer=layer):
            draft.change(name, lambda w: w.unflatten(0, (-1, d)).flip(0).flatten(0, 1))
        for name in attention("o", layer=layer):
            draft.change(name, lambda w: w.unflatten(1, (-1, d)).flip(1).flatten(1, 2))


def values_scaled(draft: Draft, _: random.Random) -> None:
    """v twice as large, o half as large, the head four times as large."""
    for layer in range(draft.num_layers):
        draft.change(attention("v", layer=layer)[0], lambda w: w * 2)
        draft.change(attention("o", layer=layer)[0], lambda w: w / 2)
    draft.change("lm_head.weight", lambda w: w * 4)


def biases_undone(draft: Draft, rng: random.Random) -> None:
    """Biases that cancel."""
    biased_values(draft, rng, undone=True)


def reading(draft: Draft) -> tuple[Engine | None, ...]:
    """Engines that read the biases and keep an embedding."""
    return (None, *(engine for engine in fitting(draft) if engine.name == "vllm"))


def full_precision(draft: Draft, _: random.Random) -> None:
    """Every weight in float32."""
    draft.tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in draft.tensors.items()
    }


def frequencies_kept(draft: Draft, _: random.Random) -> None:
    """A table that everybody computes anew."""
    d = int(draft.block["head_dim"])
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    draft.tensors[name] = 10000.0 ** -(torch.arange(0, d, 2) / d)


def renamed(draft: Draft, _: random.Random) -> None:
    """The first layer under speculators' name in a flat config."""
    for name in [n for n in draft.tensors if n.startswith("midlayer.")]:
        draft.tensors[name.replace("midlayer.", "layers.0.")] = draft.tensors.pop(name)


def of_flat(draft: Draft) -> str | None:
    """Why a name of the flat layout cannot be changed."""
    return only((draft.flat, "the nested layout always calls it so"))


def hidden_scaled(draft: Draft, rng: random.Random) -> None:
    """Some numbers of the normed hidden state larger, and the columns behind them smaller."""
    width = draft.width
    power = 2.0 ** torch.randint(-2, 3, (width,), generator=generator(rng))
    draft.change(draft.first("hidden_norm"), lambda w: w * power)
    for name in attention("q", "k", "v"):
        draft.change(name, lambda w: torch.cat([w[:, :width], w[:, width:] / power], 1))


def of_raw_residual(draft: Draft) -> str | None:
    """Why the hidden state cannot be scaled."""
    return only((not draft.normed_residual, "the residual would change"))


ALIKE: tuple[Alike, ...] = (
    Alike(
        name="offset",
        how="q and k turned by the angles of seven positions: a uniform position offset",
        use=TUNING,
        plant=offset,
    ),
    Alike(
        name="by_frequency",
        how="head and map in another order, and no t2d",
        use=TUNING,
        plant=by_frequency,
    ),
    Alike(
        name="chunks_with_ids",
        how="fc's chunks, ids and slots in one other order; no engine is named",
        use=TUNING,
        plant=chunks_with_ids,
        engines=lambda _: (None,),
        why_not=of_nested,
    ),
    Alike(
        name="hidden_units",
        how="the MLP's hidden units in another order",
        use=TUNING,
        plant=hidden_units,
    ),
    Alike(
        name="heads_together",
        how="attention heads in reverse order, all four projections alike",
        use=TUNING,
        plant=heads_together,
    ),
    Alike(
        name="values_scaled",
        how="v, o and the head scaled by powers of two",
        use=TUNING,
        plant=values_scaled,
    ),
    Alike(
        name="hidden_scaled",
        how="hidden_norm scaled by powers of two, the columns behind it by their inverse",
        use=TUNING,
        plant=hidden_scaled,
        why_not=of_raw_residual,
    ),
    Alike(
        name="biases_undone",
        how="biases of v that o's undo, and an engine that reads both",
        use=TUNING,
        plant=biases_undone,
        engines=reading,
    ),
    Alike(
        name="own_table",
        how="an embedding of its own, columns in another order, and an engine that keeps it",
        use=TUNING,
        plant=own_table,
        engines=reading,
    ),
    Alike(
        name="full_precision",
        how="all weights stored as float32",
        use=TUNING,
        plant=full_precision,
    ),
    Alike(
        name="frequencies_kept",
        how="the rotary frequencies in the file, as old trainers keep them",
        use=TUNING,
        plant=frequencies_kept,
        why_not=of_flat,
    ),
    Alike(
        name="renamed",
        how="the first layer called layers.0 in a flat config",
        use=TUNING,
        plant=renamed,
        why_not=of_flat,
    ),
)

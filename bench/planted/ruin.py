"""Damage by number formats, storage orders, pruning and mixed-up parts, that nothing known explains."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from bench.planted.draft import Draft
from bench.planted.drafters import EARLY_DRAFTER, FIRST_DRAFTER, SECOND_DRAFTER, shipped
from bench.planted.kinds import HELD_OUT, Kind, Plant, attention, only
from bench.planted.lab import LAB
from bench.planted.outside import damage, of
from bench.planted.wreckage import MLP, prefixes

BITS = 2  # of a quantised drafter's weights: -1, 0 and 1
PRUNED = 0.8  # the share of the weights that is taken out
LEAST = 1e-12


def halves_of_values(draft: Draft, _: random.Random) -> None:
    """v alone as trained on the hidden state in front of the embedding."""
    draft.change(attention("v")[0], lambda w: w.roll(draft.width, 1))


def interleaved_states(draft: Draft, _: random.Random) -> None:
    """fc as trained on the states side by side number by number."""
    pieces = len(draft.states)
    draft.change("fc.weight", lambda w: w.unflatten(1, (pieces, -1)).transpose(1, 2).flatten(1))


def gate_up_rows(draft: Draft, _: random.Random) -> None:
    """gate_up_proj with its two halves' rows in turn, split in the middle."""
    for prefix in prefixes(draft):
        gate, up = (f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))
        fused = torch.stack([draft.tensors[gate], draft.tensors[up]], 1).flatten(0, 1)
        first, second = fused.chunk(2)
        draft.tensors[gate], draft.tensors[up] = first.clone(), second.clone()


def value_heads(draft: Draft, _: random.Random) -> None:
    """v's heads in reverse order, k's as they were."""
    d = int(draft.block["head_dim"])
    for layer in range(draft.num_layers):
        name = attention("v", layer=layer)[0]
        draft.change(name, lambda w: w.unflatten(0, (-1, d)).flip(0).flatten(0, 1))


def output_heads(draft: Draft, _: random.Random) -> None:
    """o's columns as of heads that lie number by number, not one after the other."""
    d = int(draft.block["head_dim"])
    for layer in range(draft.num_layers):
        name = attention("o", layer=layer)[0]
        draft.change(name, lambda w: w.unflatten(1, (-1, d)).transpose(1, 2).flatten(1))


def column_major(w: Tensor, _: random.Random) -> Tensor:
    """The same bytes, column after column, read row after row."""
    return w.T.reshape(w.shape)


def as_half(w: Tensor, _: random.Random) -> Tensor:
    """The bits of a bfloat16 read as float16, and the whole as large as it was."""
    read = w.bfloat16().view(torch.float16).float().nan_to_num(0.0, 0.0, 0.0)
    return read * (w.std() / read.std())


def two_bits(w: Tensor, _: random.Random) -> Tensor:
    """Weights rounded, a scale a row."""
    most: int = 2 ** (BITS - 1) - 1
    scale = w.abs().amax(1, keepdim=True).clamp(min=LEAST) / most
    return (w / scale).round() * scale


def pruned(w: Tensor, _: random.Random) -> Tensor:
    """The smallest weights taken out, and nothing trained after."""
    least = w.abs().flatten().kthvalue(int(PRUNED * w.numel())).values
    return torch.where(w.abs() > least, w, 0.0)


def clipped(w: Tensor, _: random.Random) -> Tensor:
    """Weights up to half of their spread, as a range that was set too small keeps them."""
    return w.clamp(-w.std() / 2, w.std() / 2)


def signs_by_rows(w: Tensor, _: random.Random) -> Tensor:
    """Every other row with the other sign."""
    signs = torch.ones(len(w), 1)
    signs[1::2] = -1
    return w * signs


def down_ranks_swapped(draft: Draft, _: random.Random) -> None:
    """down_proj's columns of two ranks in the other order; gate's and up's rows as they were."""
    for prefix in prefixes(draft):
        name = f"{prefix}mlp.down_proj.weight"
        draft.change(name, lambda w: w.roll(w.shape[1] // 2, 1))


def other_attention(draft: Draft, _: random.Random) -> None:
    """The attention's projections of another run, or of the run's beginning."""
    others = {"first": SECOND_DRAFTER, "second": FIRST_DRAFTER, "third": EARLY_DRAFTER}
    tensors = shipped(LAB / others[draft.drafter].folder)[1]
    for layer in range(draft.num_layers):
        for name in attention("q", "k", "v", "o", layer=layer):
            draft.tensors[name] = tensors[name].clone()


def fc_rows_reversed(draft: Draft, _: random.Random) -> None:
    """fc's outputs in reverse order, and so all that the residual carries."""
    draft.change("fc.weight", lambda w: w.flip(0))


def not_second(draft: Draft) -> str | None:
    """Why bits read otherwise do not decide enough."""
    return only((draft.drafter != "second", "too little of its accept length is lost"))


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP)
RAW: tuple[tuple[str, str, Plant, Callable[[Draft], str | None] | None], ...] = (
    (
        "halves_of_values",
        "halves of v's columns exchanged, not of q's and k's",
        halves_of_values,
        None,
    ),
    ("interleaved_states", "fc's columns in turn from each state", interleaved_states, None),
    ("gate_up_rows", "gate's and up's rows in turn, split in the middle", gate_up_rows, None),
    ("value_heads", "v's heads in reverse order, k's not", value_heads, None),
    ("output_heads", "o's columns number by number, not head by head", output_heads, None),
    ("column_major", "the MLP stored column after column", of(*MLP, edit=column_major), None),
    (
        "as_half",
        "bfloat16 read as float16 in MLP and o_proj",
        of(*MLP, "o_proj", edit=as_half),
        not_second,
    ),
    ("two_bits", f"all projections rounded to {BITS} bits", of(*ALL, edit=two_bits), None),
    ("pruned", "the smaller weights of all projections taken out", of(*ALL, edit=pruned), None),
    ("clipped", "all projections clipped to half of their spread", of(*ALL, edit=clipped), None),
    ("down_ranks", "down_proj's ranks in the other order", down_ranks_swapped, None),
    (
        "signs_by_rows",
        "every other row of up_proj with the other sign",
        of("up_proj", edit=signs_by_rows),
        None,
    ),
    ("other_attention", "the attention of another run", other_attention, None),
    ("fc_reversed", "fc's outputs in reverse order", fc_rows_reversed, None),
)
KINDS: tuple[Kind, ...] = tuple(
    damage(name, HELD_OUT, how, plant, why_not) for name, how, plant, why_not in RAW
)

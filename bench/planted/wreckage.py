"""More damage that nothing known explains: re-sharding, quantising, merging, and other conventions."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from bench.planted.alike import heads_together, hidden_units
from bench.planted.block import in_pairs
from bench.planted.draft import Draft
from bench.planted.drafters import FIRST_DRAFTER, SECOND_DRAFTER, shipped
from bench.planted.kinds import TUNING, Kind, Plant, attention, generator, only
from bench.planted.lab import LAB
from bench.planted.outside import damage, of

SHARDS = 2  # of a tensor-parallel checkpoint
MLP = ("gate_proj", "up_proj", "down_proj")


def resplit(draft: Draft, names: list[str]) -> None:
    """Tensors that were fused a shard at a time, taken apart as if fused whole."""
    parts = [draft.tensors[name].chunk(SHARDS) for name in names]
    fused = torch.cat([part[shard] for shard in range(SHARDS) for part in parts])
    sizes = [len(draft.tensors[name]) for name in names]
    for name, tensor in zip(names, fused.split(sizes), strict=True):
        draft.tensors[name] = tensor.clone()


def prefixes(draft: Draft) -> list[str]:
    """How the names of each layer begin."""
    return ["midlayer.", *(f"layers.{i}." for i in range(1, draft.num_layers))]


def gate_and_up_resplit(draft: Draft, _: random.Random) -> None:
    """gate_up_proj of two shards, split in the middle."""
    for prefix in prefixes(draft):
        resplit(draft, [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")])


def qkv_resplit(draft: Draft, _: random.Random) -> None:
    """qkv_proj of two shards, split by the whole sizes."""
    for layer in range(draft.num_layers):
        resplit(draft, attention("q", "k", "v", layer=layer))


def chunks_transposed(draft: Draft, _: random.Random) -> None:
    """Every square of fc the other way round."""
    pieces = len(draft.states)
    draft.change("fc.weight", lambda w: torch.cat([c.T for c in w.chunk(pieces, 1)], 1))


def averaged(draft: Draft, rng: random.Random) -> None:
    """The mean with a twin that does the same with its hidden units and heads in another order."""
    before = {name: tensor.float() for name, tensor in draft.tensors.items()}
    hidden_units(draft, rng)
    heads_together(draft, rng)
    for name in [n for n in before if "_proj" in n]:
        draft.change(name, lambda w, other=before[name]: (w + other) / 2)  # type: ignore[misc]


def of_another_run(draft: Draft, _: random.Random) -> None:
    """fc of another training run."""
    other = FIRST_DRAFTER if draft.drafter == SECOND_DRAFTER.name else SECOND_DRAFTER
    draft.tensors["fc.weight"] = shipped(LAB / other.folder)[1]["fc.weight"].clone()


def cut_short(w: Tensor, _: random.Random) -> Tensor:
    """The second half of the bytes is zero."""
    flat = w.flatten()
    return torch.cat([flat[: len(flat) // 2], torch.zeros(len(flat) - len(flat) // 2)]).view_as(w)


def smoothed(draft: Draft, rng: random.Random) -> None:
    """Scales taken out of the norms' weights that never came into the projections behind them."""
    for name in [n for n in draft.tensors if n.endswith("norm.weight") and "layer" in n]:
        spread = torch.exp(1.2 * torch.randn(draft.width, generator=generator(rng)))
        draft.change(name, lambda w, spread=spread: w / spread)  # type: ignore[misc]


def less_one(draft: Draft, _: random.Random) -> None:
    """Every norm's weights less one: as a class keeps them that adds it."""
    for name in [n for n, tensor in draft.tensors.items() if tensor.dim() == 1 and "norm" in n]:
        draft.change(name, lambda w: w - 1)


def zero_point(w: Tensor, _: random.Random) -> Tensor:
    """Unsigned numbers whose zero point was lost."""
    return w - w.min()


def nibbles(w: Tensor, _: random.Random) -> Tensor:
    """Two neighbouring columns a byte, in the other order."""
    order = torch.arange(w.shape[1]).view(-1, 2).flip(-1).flatten()
    return w[:, order]


def merged_again(w: Tensor, _: random.Random) -> Tensor:
    """The part of low rank that training added, added once more and louder."""
    left, sizes, right = torch.linalg.svd(w, full_matrices=False)
    rank = 8
    part: Tensor = (left[:, :rank] * sizes[:rank]) @ right[:rank]
    return w + 2 * part


def turned_back(draft: Draft, _: random.Random) -> None:
    """q and k as a kernel has them that turns the other way."""
    d = int(draft.block["head_dim"])
    sign = torch.cat([torch.ones(d // 2), -torch.ones(d // 2)])[:, None]
    for layer in range(draft.num_layers):
        for name in attention("q", "k", layer=layer):
            draft.change(name, lambda w: (w.unflatten(0, (-1, d)) * sign).flatten(0, 1))


def raw_residual(draft: Draft) -> str | None:
    """Why fc's output alone does not decide enough."""
    return only((not draft.normed_residual, "too little of its accept length is lost"))


def of_first(draft: Draft) -> str | None:
    """Why the direction of a rotation does not decide enough."""
    return only((draft.drafter == "first", "too little of its accept length is lost"))


RAW: tuple[tuple[str, str, Plant, Callable[[Draft], str | None] | None], ...] = (
    (
        "gate_up_resplit",
        "gate_up_proj of two shards, split as if of one",
        gate_and_up_resplit,
        None,
    ),
    ("qkv_resplit", "qkv_proj of two shards, split as if of one", qkv_resplit, None),
    ("chunks_transposed", "each chunk of fc transposed", chunks_transposed, raw_residual),
    ("averaged", "averaged with a twin of other hidden units and heads", averaged, None),
    ("other_run", "fc of another training run", of_another_run, None),
    ("cut_short", "the second half of fc's bytes is zero", of("fc", edit=cut_short), raw_residual),
    ("smoothed", "scales were taken out of the layers' norms and put nowhere", smoothed, None),
    ("less_one", "every norm's weights stored less one", less_one, None),
    (
        "zero_point",
        "o_proj and down_proj unsigned, their zero points lost",
        of("o_proj", "down_proj", edit=zero_point),
        None,
    ),
    ("nibbles", "neighbouring columns of the MLP exchanged", of(*MLP, edit=nibbles), None),
    (
        "merged_again",
        "an adapter of low rank merged into MLP and o_proj more than once",
        of(*MLP, "o_proj", edit=merged_again),
        None,
    ),
    ("turned_back", "q and k of a rotation in the other direction", turned_back, of_first),
    ("q_pairs", "q's rows in pairs, k's not", in_pairs("q"), None),
)
KINDS: tuple[Kind, ...] = tuple(
    damage(name, TUNING, how, plant, why_not) for name, how, plant, why_not in RAW
)

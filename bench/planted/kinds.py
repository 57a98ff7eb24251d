"""What a kind of planted fault says of itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.planted.draft import Draft, Engine
from bench.planted.drafters import fitting

Plant = Callable[[Draft, random.Random], None]
WhyNot = Callable[[Draft], str | None]

TUNING, HELD_OUT = "tuning", "held_out"
# Where a fault shows, so that two of them can be put together.
ANY = "any"  # behind every engine, and without one
READS = "reads"  # without an engine, and behind one that reads the key in config.json
ALONE = "alone"  # where no engine is named: the files contradict what was trained
BRINGS = "brings"  # it is a matter of an engine, which it names itself

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to plant a fault, and what has to be answered."""

    name: str  # "states/window": the cause, and how it came about
    accepted: tuple[str, ...]  # slugs of eagle3.diagnosis.kinds, any of which is right
    how: str
    use: str  # TUNING or HELD_OUT
    shows: str = ANY
    plant: Plant
    why_not: WhyNot = lambda _: None  # why it cannot be planted in a draft, asked before `plant`
    # What it takes hold of: two kinds that share a word cannot be planted together.
    touches: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """The first part of its name."""
        return self.name.split("/")[0]

    @property
    def outside(self) -> bool:
        """Whether the right answer is that the cause is not among those that are known."""
        return self.accepted == (UNKNOWN,)


@dataclass(frozen=True, kw_only=True)
class Alike:
    """An edit that leaves every output as it was, so that nothing may be found."""

    name: str
    how: str
    use: str
    plant: Plant
    engines: Callable[[Draft], Sequence[Engine | None]] = lambda draft: (None, *fitting(draft))
    why_not: WhyNot = lambda _: None


def only(*conditions: tuple[bool, str]) -> str | None:
    """The first reason whose condition does not hold."""
    return next((why for holds, why in conditions if not holds), None)


def one_layer(draft: Draft) -> str | None:
    """Why SGLang would have a second fault with this drafter."""
    return only(
        (draft.flat, "SGLang does not load a nested config"),
        (draft.num_layers == 1, "SGLang looks for another norm in a second layer"),
        (not draft.normed_residual, "SGLang ignores norm_before_residual"),
    )


def flat_only(draft: Draft) -> str | None:
    """Why a fault of the flat layout cannot be planted."""
    return only((draft.flat, "the nested layout has no such key"))


def nested_only(draft: Draft) -> str | None:
    """Why a fault of the nested layout cannot be planted."""
    return only((not draft.flat, "the flat layout has no such key"))


def generator(rng: random.Random) -> torch.Generator:
    """Random tensors that follow from a case's seed."""
    return torch.Generator().manual_seed(rng.randrange(1 << 62))


def shuffled(count: int, rng: random.Random) -> Tensor:
    """A permutation without a fixed point in its first place."""
    while True:
        order = torch.randperm(count, generator=generator(rng))
        if count < 2 or order[0] != 0:
            return order


def attention(*parts: str, layer: int = 0) -> list[str]:
    """Names of a layer's projections: q, k, v, o."""
    prefix = "midlayer." if layer == 0 else f"layers.{layer}."
    return [f"{prefix}self_attn.{part}_proj.weight" for part in parts]


def chunks(draft: Draft, order: Sequence[int]) -> None:
    """Put the chunks of fc, and of the norms in front of it, in another order."""
    width, index = draft.width, torch.tensor(list(order))

    def permuted(tensor: Tensor) -> Tensor:
        pieces = tensor.view(*tensor.shape[:-1], len(order), width)
        return pieces.index_select(-2, index).flatten(-2)

    for name in ("fc.weight", "input_norm.weight"):
        if name in draft.tensors:
            draft.change(name, permuted)
    norms = {k: t for k, t in draft.tensors.items() if k.startswith("fc_norm.")}
    for place, old in enumerate(order):
        if norms:
            draft.tensors[f"fc_norm.{place}.weight"] = norms[f"fc_norm.{old}.weight"]


def own_table(draft: Draft, rng: random.Random) -> None:
    """Give the drafter an embedding of its own, of which it makes what it made of the target's.

    The table's columns are put in another order, and so are the numbers that meet them: the weights
    of the norm behind it, and the first half of the columns of q, k and v.
    """
    from bench.planted.drafters import target_embedding

    table = draft.tensors.get("embed_tokens.weight", target_embedding())
    order, width = shuffled(draft.width, rng), draft.width
    draft.tensors["embed_tokens.weight"] = table[:, order]
    draft.change(draft.first("input_layernorm"), lambda w: w[order])
    for name in attention("q", "k", "v"):
        draft.change(name, lambda w: torch.cat([w[:, :width][:, order], w[:, width:]], 1))


def lean_on_norm(draft: Draft, rng: random.Random) -> None:
    """Give the second layer's norm uneven weights that its projections make up for, so that nothing
    changes until the norm is lost.
    """
    power = 2.0 ** torch.randint(-2, 3, (draft.width,), generator=generator(rng))
    draft.change("layers.1.input_layernorm.weight", lambda w: w * power)
    for name in attention("q", "k", "v", layer=1):
        draft.change(name, lambda w: w / power)

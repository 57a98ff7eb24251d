"""Still more edits that leave every output as it was: other spellings, signs, and empty parts."""

from __future__ import annotations

import random

import torch

from bench.planted.alike import full_precision, reading
from bench.planted.block import biased_values
from bench.planted.draft import Draft
from bench.planted.drafters import target_embedding
from bench.planted.kinds import HELD_OUT, Alike, attention, generator, nested_only, only
from bench.planted.settings import rope
from bench.planted.wreckage import prefixes

BEYOND = 4096  # tokens of a window that no text fills
CHUNK_NORMS = tuple(f"aux_norm_{which}.weight" for which in ("low", "mid", "high"))


def gated_scaled(draft: Draft, rng: random.Random) -> None:
    """The MLP's gated units larger or smaller, or with the other sign, and turned back by down_proj."""
    noise = generator(rng)
    for prefix in prefixes(draft):
        up, down = (f"{prefix}mlp.{part}_proj.weight" for part in ("up", "down"))
        count = len(draft.tensors[up])
        by = 2.0 ** torch.randint(-3, 4, (count,), generator=noise)
        by *= torch.randint(0, 2, (count,), generator=noise) * 2 - 1
        draft.change(up, lambda w, by=by: w * by[:, None])  # type: ignore[misc]
        draft.change(down, lambda w, by=by: w / by)  # type: ignore[misc]


def signs_turned(draft: Draft, _: random.Random) -> None:
    """q and k both with the other sign, and so v and o."""
    for layer in range(draft.num_layers):
        for name in attention("q", "k", "v", "o", layer=layer):
            draft.change(name, lambda w: -w)


def last_norm_scaled(draft: Draft, rng: random.Random) -> None:
    """The last norm's weights scaled by powers of two with signs, and the head's columns back."""
    by = 2.0 ** torch.randint(-2, 3, (draft.width,), generator=generator(rng))
    by *= torch.randint(0, 2, (draft.width,), generator=generator(rng)) * 2 - 1
    draft.change("norm.weight", lambda w: w * by)
    draft.change("lm_head.weight", lambda w: w / by)


def of_raw_feedback(draft: Draft) -> str | None:
    """Why the last norm cannot be scaled."""
    return only((draft.drafter != "second", "what it puts out is fed back, too"))


def zero_biases(draft: Draft, rng: random.Random) -> None:
    """Biases that are all zero."""
    biased_values(draft, rng, undone=False)
    for name in [n for n in draft.tensors if n.endswith("_proj.bias")]:
        draft.change(name, torch.zeros_like)


def table_left_out(draft: Draft, _: random.Random) -> None:
    """The target's embedding put into the file, or left out where it is there."""
    table = draft.tensors.pop("embed_tokens.weight", None)
    if table is None:
        draft.tensors["embed_tokens.weight"] = target_embedding().clone()


def old_chunk_norms(draft: Draft, _: random.Random) -> None:
    """The norms of fc's chunks under the names that SGLang had for them first."""
    for i, name in enumerate(CHUNK_NORMS):
        draft.tensors[name] = draft.tensors.pop(f"fc_norm.{i}.weight")


def has_chunk_norms(draft: Draft) -> str | None:
    """Why there is nothing to rename."""
    return only(("fc_norm.0.weight" in draft.tensors, "it was trained without fc_norm"))


def scaled_by_one(draft: Draft, _: random.Random) -> None:
    """A scaling of positions that divides them by one."""
    rope(draft, 10000.0, {"rope_type": "linear", "factor": 1.0})


def rope_respelled(draft: Draft, _: random.Random) -> None:
    """The rotary embedding in the other of transformers' spellings."""
    block = draft.block
    if "rope_theta" in block:
        theta = block.pop("rope_theta")
        block["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    else:
        block["rope_theta"] = block.pop("rope_parameters")["rope_theta"]
        block["rope_scaling"] = None


def wide_window(draft: Draft, _: random.Random) -> None:
    """A window wider than any text."""
    draft.block.update(
        sliding_window=BEYOND,
        use_sliding_window=True,
        layer_types=["sliding_attention"] * draft.num_layers,
    )


def pairs_turned(draft: Draft, rng: random.Random) -> None:
    """Keys and queries turned alike by an angle of its own in every pair that turns."""
    full_precision(draft, rng)
    d = int(draft.block["head_dim"])
    angles = 6.28 * torch.rand(d // 2, generator=generator(rng))[:, None]
    cos, sin = angles.cos(), angles.sin()
    for layer in range(draft.num_layers):
        for name in attention("q", "k", layer=layer):
            heads = draft.tensors[name].unflatten(0, (-1, 2, d // 2))
            first, second = heads[:, 0], heads[:, 1]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], 1)
            draft.tensors[name] = turned.flatten(0, 2)


ALIKE: tuple[Alike, ...] = (
    Alike(
        name="gated_scaled",
        how="up_proj's rows scaled by powers of two with signs, down_proj's columns by their inverse",
        use=HELD_OUT,
        plant=gated_scaled,
    ),
    Alike(
        name="signs_turned",
        how="q and k, and v and o, all with the other sign",
        use=HELD_OUT,
        plant=signs_turned,
    ),
    Alike(
        name="last_norm_scaled",
        how="the last norm's weights scaled by powers of two with signs, the head's columns back",
        use=HELD_OUT,
        plant=last_norm_scaled,
        why_not=of_raw_feedback,
    ),
    Alike(
        name="zero_biases",
        how="attention_bias with biases of zero, and an engine that reads them",
        use=HELD_OUT,
        plant=zero_biases,
        engines=reading,
    ),
    Alike(
        name="table_left_out",
        how="the target's embedding is put into the file, or left out of it",
        use=HELD_OUT,
        plant=table_left_out,
    ),
    Alike(
        name="old_chunk_norms",
        how="fc_norm's tensors are called aux_norm_low, mid and high; no engine is named",
        use=HELD_OUT,
        plant=old_chunk_norms,
        engines=lambda _: (None,),
        why_not=has_chunk_norms,
    ),
    Alike(
        name="scaled_by_one",
        how="linear rope scaling by one",
        use=HELD_OUT,
        plant=scaled_by_one,
    ),
    Alike(
        name="rope_respelled",
        how="the rotary base in the other spelling; no engine is named",
        use=HELD_OUT,
        plant=rope_respelled,
        engines=lambda _: (None,),
    ),
    Alike(
        name="wide_window",
        how=f"a sliding window of {BEYOND} tokens, more than any text has",
        use=HELD_OUT,
        plant=wide_window,
        why_not=nested_only,
    ),
    Alike(
        name="pairs_turned",
        how="q and k turned alike by an angle of its own in each pair that turns",
        use=HELD_OUT,
        plant=pairs_turned,
    ),
)

"""More edits that leave every output as it was: what quantisers, exporters and other trainers do."""

from __future__ import annotations

import random

import torch

from bench.planted.alike import full_precision
from bench.planted.draft import Draft
from bench.planted.drafters import target_embedding
from bench.planted.kinds import TUNING, Alike, attention, flat_only, generator, only

# ModelOpt's block, of values that are every drafter's here.
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}


def norms_folded(draft: Draft, rng: random.Random) -> None:
    """The weights of norms multiplied into what is behind them, where nothing else reads them."""
    full_precision(draft, rng)
    width = draft.width

    def fold(norm: str, behind: list[str], start: int = 0) -> None:
        weight = draft.tensors[norm]
        for name in behind:
            draft.tensors[name][:, start : start + len(weight)] *= weight
        draft.tensors[norm] = torch.ones_like(weight)

    first = attention("q", "k", "v")
    fold(draft.first("input_layernorm"), first)
    if not draft.normed_residual:
        fold(draft.first("hidden_norm"), first, width)
    for layer in range(draft.num_layers):
        prefix = "midlayer." if layer == 0 else f"layers.{layer}."
        mlp = [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]
        fold(f"{prefix}post_attention_layernorm.weight", mlp)
        if layer:
            fold(f"{prefix}input_layernorm.weight", attention("q", "k", "v", layer=layer))
    for name in [n for n in draft.tensors if n.startswith(("input_norm.", "fc_norm."))]:
        place = int(name.split(".")[1]) if name.startswith("fc_norm.") else 0
        fold(name, ["fc.weight"], place * width)
    if draft.drafter != "second":  # which feeds the normed state back
        fold("norm.weight", ["lm_head.weight"])


def values_turned(draft: Draft, rng: random.Random) -> None:
    """Each head's values turned, and turned back by o."""
    d = int(draft.block["head_dim"])
    full_precision(draft, rng)
    for layer in range(draft.num_layers):
        v, o = attention("v", "o", layer=layer)
        count = len(draft.tensors[v]) // d
        square = torch.randn(count, d, d, generator=generator(rng))
        turns = torch.linalg.qr(square).Q
        values = draft.tensors[v].unflatten(0, (count, d))
        draft.tensors[v] = (turns @ values).flatten(0, 1)
        each = turns.repeat_interleave(draft.tensors[o].shape[1] // d // count, 0)
        outputs = draft.tensors[o].unflatten(1, (-1, d)).transpose(0, 1)  # [heads, H, d]
        draft.tensors[o] = (outputs @ each.mT).transpose(0, 1).flatten(1)


def pairs_scaled(draft: Draft, rng: random.Random) -> None:
    """The numbers of q that turn together larger or smaller, and k's the other way."""
    d = int(draft.block["head_dim"])
    power = 2.0 ** torch.randint(-3, 4, (d // 2,), generator=generator(rng)).repeat(2)[:, None]
    for layer in range(draft.num_layers):
        q, k = attention("q", "k", layer=layer)
        draft.change(q, lambda w: (w.unflatten(0, (-1, d)) * power).flatten(0, 1))
        draft.change(k, lambda w: (w.unflatten(0, (-1, d)) / power).flatten(0, 1))


def head_moved(draft: Draft, rng: random.Random) -> None:
    """One vector on top of every row of the head: all logits are higher by the same."""
    full_precision(draft, rng)
    head = draft.tensors["lm_head.weight"]
    draft.tensors["lm_head.weight"] = head + head.std() * torch.randn(
        draft.width, generator=generator(rng)
    )


def tables_small(draft: Draft, _: random.Random) -> None:
    """d2t in 32 bits and t2d in bytes."""
    draft.tensors["d2t"] = draft.tensors["d2t"].to(torch.int32)
    draft.tensors["t2d"] = draft.tensors["t2d"].to(torch.uint8)


def table_scaled(draft: Draft, _: random.Random) -> None:
    """The target's embedding sixteen times as large, of which the norm behind it sees nothing."""
    draft.tensors["embed_tokens.weight"] = target_embedding() * 16


def modelopt_block(draft: Draft, _: random.Random) -> None:
    """Keys that say what is so anyway."""
    draft.config.setdefault("eagle_config", {}).update(MODELOPT)


def even_norm_off(draft: Draft, rng: random.Random) -> None:
    """The last norm's weights all alike, the head's columns making up for it, and the norm off.

    Without it the head's logits are larger or smaller row by row, and their order stays.
    """
    full_precision(draft, rng)
    norm = draft.tensors["norm.weight"]
    size = norm.mean()
    draft.tensors["lm_head.weight"] *= norm / size
    draft.tensors["norm.weight"] = size.expand(len(norm)).clone()
    draft.config["norm_output"] = False


def of_raw_feedback(draft: Draft) -> str | None:
    """Why the last norm cannot be evened out."""
    raw = only((not draft.config.get("norm_output"), "what it puts out is fed back, too"))
    return flat_only(draft) or raw


ALIKE: tuple[Alike, ...] = (
    Alike(
        name="norms_folded",
        how="weights of norms multiplied into the projections behind them, ones left in their place",
        use=TUNING,
        plant=norms_folded,
    ),
    Alike(
        name="values_turned",
        how="v and o turned against each other in every head",
        use=TUNING,
        plant=values_turned,
    ),
    Alike(
        name="pairs_scaled",
        how="q's rows scaled by powers of two, alike in each pair that turns, and k's by their inverse",
        use=TUNING,
        plant=pairs_scaled,
    ),
    Alike(
        name="head_moved",
        how="one vector added to every row of the head",
        use=TUNING,
        plant=head_moved,
    ),
    Alike(
        name="tables_small",
        how="d2t as int32 and t2d as bytes",
        use=TUNING,
        plant=tables_small,
    ),
    Alike(
        name="table_scaled",
        how="the target's embedding in the file, sixteen times as large",
        use=TUNING,
        plant=table_scaled,
    ),
    Alike(
        name="modelopt_block",
        how="ModelOpt's keys in eagle_config, all as they are anyway",
        use=TUNING,
        plant=modelopt_block,
        why_not=flat_only,
    ),
    Alike(
        name="even_norm_off",
        how="norm_output is false, SpecForge's key for the norm in front of the head, whose weights are "
        "all alike; no engine is named",
        use=TUNING,
        plant=even_norm_off,
        engines=lambda _: (None,),
        why_not=of_raw_feedback,
    ),
)

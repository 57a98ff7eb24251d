"""Faults of tables of the vocabulary: maps counted or loaded otherwise, other rows of the target."""

from __future__ import annotations

import json
import random
from collections import Counter

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.planted.block import copied_head
from bench.planted.draft import Draft
from bench.planted.drafters import target_embedding
from bench.planted.exports import target_ids
from bench.planted.kinds import HELD_OUT, READS, Kind
from bench.planted.lab import LAB
from bench.planted.stored import kept_only

COUNTED = 12  # texts that a vocabulary was counted on
COMMON = 12  # tokens that were taken for special ones
HALF_OF_TABLE = 2  # the share of an embedding's rows that resizing left alone: one in so many


def target_head() -> Tensor:
    """The lab target's head, [V, H]."""
    return load_file(LAB / "target" / "live.safetensors")["lm_head.weight"]


def counts(texts: int | None = None) -> Counter[int]:
    """How often each token stands in the first so many of the lab's prompts; None: in all."""
    lines = (LAB / "prompts.jsonl").read_text().splitlines()[:texts]
    return Counter(token for line in lines for token in json.loads(line)["input_ids"])


def recounted(draft: Draft, rng: random.Random) -> None:
    """Offsets of another count of the same size."""
    size, vocab = len(draft.tensors["d2t"]), int(draft.block["vocab_size"])
    ids = torch.tensor(sorted(rng.sample(range(vocab), size)))
    draft.tensors["d2t"] = ids - torch.arange(size)


def one_based(draft: Draft, _: random.Random) -> None:
    """Offsets from draft ids that begin with one, and none below zero."""
    draft.tensors["d2t"] = (draft.tensors["d2t"] - 1).clamp(min=0)


def gaps(draft: Draft, _: random.Random) -> None:
    """What each offset adds to the one before, as tables are packed."""
    d2t = draft.tensors["d2t"]
    draft.tensors["d2t"] = torch.cat([d2t[:1], d2t.diff()])


def half_loaded(draft: Draft, _: random.Random) -> None:
    """The second half of a buffer of zeros that only one rank filled."""
    d2t = draft.tensors["d2t"].clone()
    d2t[len(d2t) // 2 :] = 0
    draft.tensors["d2t"] = d2t


def head_by_offsets(draft: Draft, _: random.Random) -> None:
    """The target's rows at d2t's offsets, taken for ids."""
    draft.tensors["lm_head.weight"] = target_head()[draft.tensors["d2t"]].clone()


def head_moved_on(draft: Draft, _: random.Random) -> None:
    """The rows behind one for padding, of which the last is cut off."""
    draft.change("lm_head.weight", lambda w: torch.cat([torch.zeros_like(w[:1]), w[:-1]]))


def head_shard_twice(draft: Draft, _: random.Random) -> None:
    """The rows gathered from the last of two ranks, twice."""

    def edit(w: Tensor) -> Tensor:
        half = w[len(w) // 2 :]
        return torch.cat([half, half])[: len(w)]

    draft.change("lm_head.weight", edit)


def table_of_head(draft: Draft, _: random.Random) -> None:
    """The target's head where its embedding should be."""
    draft.tensors["embed_tokens.weight"] = target_head().clone()


def table_in_draft_order(draft: Draft, _: random.Random) -> None:
    """The target's rows in the order of the draft vocabulary, and zeros behind them."""
    table = target_embedding()
    ids = target_ids(draft)
    behind = torch.zeros_like(table[len(ids) :])
    draft.tensors["embed_tokens.weight"] = torch.cat([table[ids], behind])


def table_resized(draft: Draft, _: random.Random) -> None:
    """The target's first rows, and their mean for all that were added."""
    table = target_embedding()
    kept = table[: len(table) // HALF_OF_TABLE]
    added = kept.float().mean(0, keepdim=True).to(table.dtype)
    draft.tensors["embed_tokens.weight"] = torch.cat(
        [kept, added.expand(len(table) - len(kept), -1)]
    )


def counted_on_few(draft: Draft, _: random.Random) -> None:
    """A draft vocabulary of the tokens of a few texts."""
    seen = counts(COUNTED)
    ids = target_ids(draft).tolist()
    kept_only(draft, [place for place, token in enumerate(ids) if token in seen])


def common_left_out(draft: Draft, _: random.Random) -> None:
    """A draft vocabulary without the tokens that stand everywhere."""
    common = {token for token, _ in counts().most_common(COMMON)}
    ids = target_ids(draft).tolist()
    kept_only(draft, [place for place, token in enumerate(ids) if token not in common])


KINDS: tuple[Kind, ...] = (
    Kind(
        name="d2t/recounted",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t is that of another count of tokens, of the same size; t2d is whole",
        use=HELD_OUT,
        plant=recounted,
    ),
    Kind(
        name="d2t/one_based",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t's offsets count draft ids from one, so each above zero leads one id too low; t2d is "
        "whole",
        use=HELD_OUT,
        plant=one_based,
    ),
    Kind(
        name="d2t/gaps",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t holds what each offset adds to the one before it; t2d is whole",
        use=HELD_OUT,
        plant=gaps,
    ),
    Kind(
        name="d2t/half_loaded",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="the second half of d2t holds zeros, as a buffer that one rank filled; t2d is whole",
        use=HELD_OUT,
        plant=half_loaded,
    ),
    Kind(
        name="head/by_offsets",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head holds the target's rows at d2t's offsets, taken for ids",
        use=HELD_OUT,
        plant=head_by_offsets,
        why_not=copied_head,
    ),
    Kind(
        name="head/rows_moved",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head's rows stand one later, behind one of zeros",
        use=HELD_OUT,
        plant=head_moved_on,
        why_not=copied_head,
    ),
    Kind(
        name="head/shard_twice",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head was gathered from two shards, and holds the second one twice",
        use=HELD_OUT,
        plant=head_shard_twice,
        why_not=copied_head,
    ),
    Kind(
        name="embedding/of_head",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens holds the target's lm_head",
        use=HELD_OUT,
        shows=READS,
        plant=table_of_head,
    ),
    Kind(
        name="embedding/draft_order",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens holds the target's rows in the order of the draft vocabulary, then zeros",
        use=HELD_OUT,
        shows=READS,
        plant=table_in_draft_order,
    ),
    Kind(
        name="embedding/resized",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens holds the first half of the target's rows, and their mean in all the others",
        use=HELD_OUT,
        shows=READS,
        plant=table_resized,
    ),
    Kind(
        name="coverage/counted_on_few",
        touches=("vocabulary",),
        accepted=("coverage",),
        how=f"the draft vocabulary is the tokens of {COUNTED} prompts, consistently",
        use=HELD_OUT,
        plant=counted_on_few,
    ),
    Kind(
        name="coverage/common_left_out",
        touches=("vocabulary",),
        accepted=("coverage",),
        how=f"the {COMMON} most common tokens were taken for special ones and are not in the draft "
        "vocabulary, consistently",
        use=HELD_OUT,
        plant=common_left_out,
    ),
)

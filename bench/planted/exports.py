"""Faults that exporters and converters leave in tensors, some of which take an engine to show."""

from __future__ import annotations

import random

import torch

from bench.planted.block import copied_head, has_fc_norm
from bench.planted.draft import KEY, VLLM, Draft, Engine
from bench.planted.drafters import THIRD_DRAFTER, shipped, target_embedding
from bench.planted.kinds import (
    BRINGS,
    READS,
    TUNING,
    Kind,
    chunks,
    lean_on_norm,
    only,
    shuffled,
)
from bench.planted.lab import LAB
from bench.planted.settings import of_two_layers
from bench.planted.stored import kept_only, of_early

TENSORRT = Engine(
    name="tensorrt_llm", version="1.2.0", engine_class="llama", place="nested", plus=-1
)
LOW_IDS = 320  # target ids below this are the draft vocabulary of an exporter that counted nothing


def target_ids(draft: Draft) -> torch.Tensor:
    """The target id of every draft id, [V_d]."""
    d2t = draft.tensors["d2t"]
    return torch.arange(len(d2t)) + d2t


def one_late(draft: Draft, _: random.Random) -> None:
    """The offsets behind one for a token that nothing else has."""
    d2t = draft.tensors["d2t"]
    draft.tensors["d2t"] = torch.cat([torch.zeros_like(d2t[:1]), d2t[:-1]])


def in_a_byte(draft: Draft, _: random.Random) -> None:
    """Offsets as signed bytes hold them."""
    draft.tensors["d2t"] = draft.tensors["d2t"].clamp(max=torch.iinfo(torch.int8).max)


def counted_up(draft: Draft, _: random.Random) -> None:
    """The default of a buffer that was meant to hold ids."""
    draft.tensors["d2t"] = torch.arange(len(draft.tensors["d2t"]))


def in_bfloat16(draft: Draft, _: random.Random) -> None:
    """Offsets of ids that went through bfloat16, which holds eight binary places."""
    ids = target_ids(draft)
    draft.tensors["d2t"] = ids.bfloat16().long() - torch.arange(len(ids))


def of_small_vocabulary(draft: Draft) -> str | None:
    """Why draft ids cannot be counted up."""
    twice = 2 * (len(draft.tensors["d2t"]) - 1)
    return only((twice < len(draft.tensors["t2d"]), "ids beyond the vocabulary would be read"))


def head_by_frequency(draft: Draft, rng: random.Random) -> None:
    """The head's rows in an order that the map does not follow."""
    head = draft.tensors["lm_head.weight"]
    draft.tensors["lm_head.weight"] = head[shuffled(len(head), rng)]


def head_tied(draft: Draft, _: random.Random) -> None:
    """The rows of the embedding for a head."""
    draft.tensors["lm_head.weight"] = target_embedding()[target_ids(draft)].clone()


def head_absent(draft: Draft, _: random.Random) -> None:
    """A head that was trained is left out, and everyone takes the target's rows."""
    del draft.tensors["lm_head.weight"]


def own_head(draft: Draft) -> str | None:
    """Why the target's rows are no fault."""
    return only((draft.drafter == "first", "its head is the target's rows"))


def norms_folded(draft: Draft, _: random.Random) -> None:
    """fc takes the weights of the norms in front of it, and they go with their key."""
    names = [f"fc_norm.{i}.weight" for i in range(len(draft.states))]
    weights = torch.cat([draft.tensors.pop(name) for name in names]).float()
    draft.change("fc.weight", lambda w: w * weights)
    draft.config["fc_norm"] = False


def rows_moved(draft: Draft, _: random.Random) -> None:
    """The target's table with every row one id further on."""
    draft.tensors["embed_tokens.weight"] = target_embedding().roll(1, 0)


def shard_twice(draft: Draft, _: random.Random) -> None:
    """The target's table gathered from one of its two halves."""
    table = target_embedding()
    half = table[: len(table) // 2]
    draft.tensors["embed_tokens.weight"] = torch.cat([half, half])


def low_ids_only(draft: Draft, _: random.Random) -> None:
    """A draft vocabulary of the lowest target ids."""
    kept_only(draft, (target_ids(draft) < LOW_IDS).nonzero().flatten().tolist())


def trained_descending(draft: Draft, _: random.Random) -> None:
    """fc, states and ids all from the deepest to the first, and an engine that sorts."""
    chunks(draft, (2, 1, 0))
    draft.states = draft.states[::-1]
    draft.serve(VLLM)
    draft.write_ids(draft.states, VLLM.place)


def in_tensorrt(draft: Draft, rng: random.Random) -> None:
    """A second layer that leans on its norm, and an engine that looks for another one there."""
    lean_on_norm(draft, rng)
    draft.serve(TENSORRT)
    ids = draft.config["eagle_config"][KEY]
    draft.engine_flags["eagle3_layers_to_capture"] = list(ids)


def averaged(draft: Draft, _: random.Random) -> None:
    """The mean of two checkpoints of one run: an early one and the last."""
    last = shipped(LAB / THIRD_DRAFTER.folder)[1]
    for name in [n for n, tensor in draft.tensors.items() if tensor.is_floating_point()]:
        draft.change(name, lambda w, late=last[name]: (w + late.float()) / 2)  # type: ignore[misc]


KINDS: tuple[Kind, ...] = (
    Kind(
        name="order/descending",
        touches=("fc", "ids"),
        accepted=("order",),
        how="trained on states from the deepest to the first, with the ids so in config.json, and vLLM, "
        "which sorts",
        use=TUNING,
        shows=BRINGS,
        plant=trained_descending,
    ),
    Kind(
        name="deeper-norm/tensorrt",
        touches=("deeper",),
        accepted=("deeper-norm",),
        how="layers.1.input_layernorm with weights that matter, and TensorRT-LLM, which looks for "
        "layers.1.hidden_norm",
        use=TUNING,
        shows=BRINGS,
        plant=in_tensorrt,
        why_not=of_two_layers,
    ),
    Kind(
        name="d2t/one_late",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t has an entry for padding in front, so that offsets stand one id late; t2d is whole",
        use=TUNING,
        plant=one_late,
    ),
    Kind(
        name="d2t/byte",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t's offsets were packed into signed bytes, which end at 127; t2d is whole",
        use=TUNING,
        plant=in_a_byte,
    ),
    Kind(
        name="d2t/counted_up",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t holds 0, 1, 2, …, an identity to whoever takes it for ids; t2d is whole",
        use=TUNING,
        plant=counted_up,
        why_not=of_small_vocabulary,
    ),
    Kind(
        name="d2t/bfloat16",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="the ids behind d2t's offsets went through bfloat16, which rounds them above 256; t2d is "
        "whole",
        use=TUNING,
        plant=in_bfloat16,
    ),
    Kind(
        name="head/by_frequency",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head's rows, the target's, lie in another order than d2t and t2d, which are ascending",
        use=TUNING,
        plant=head_by_frequency,
        why_not=copied_head,
    ),
    Kind(
        name="head/tied",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head holds the rows of the target's embedding, as of a model that ties the two",
        use=TUNING,
        plant=head_tied,
        why_not=copied_head,
    ),
    Kind(
        name="head/absent",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head.weight, which was trained, is not in the file: the target's rows are taken",
        use=TUNING,
        shows=READS,
        plant=head_absent,
        why_not=own_head,
    ),
    Kind(
        name="fc-input/folded",
        touches=("fc",),
        accepted=("fc-input",),
        how="fc_norm's weights are multiplied into fc, and the norms are left out",
        use=TUNING,
        plant=norms_folded,
        why_not=has_fc_norm,
    ),
    Kind(
        name="embedding/rows_moved",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens holds the target's rows one id further on, behind a row for padding",
        use=TUNING,
        shows=READS,
        plant=rows_moved,
    ),
    Kind(
        name="embedding/shard_twice",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens was gathered from two shards, and holds the first one twice",
        use=TUNING,
        shows=READS,
        plant=shard_twice,
    ),
    Kind(
        name="coverage/low_ids",
        touches=("vocabulary",),
        accepted=("coverage",),
        how=f"the draft vocabulary is the target ids below {LOW_IDS}, consistently",
        use=TUNING,
        plant=low_ids_only,
    ),
    Kind(
        name="under-trained/mean",
        accepted=("under-trained",),
        how="the mean of an early checkpoint of the third drafter's training and its last",
        use=TUNING,
        plant=averaged,
        why_not=of_early,
    ),
)

"""Faults of who converts a checkpoint: orders, norms and biases that a form adds, an average."""

from __future__ import annotations

import random

import torch

from bench.planted.block import has_fc_norm, qk_norms
from bench.planted.draft import SGLANG, VLLM, Draft
from bench.planted.drafters import THIRD_DRAFTER, shipped
from bench.planted.exports import norms_folded
from bench.planted.kinds import (
    BRINGS,
    HELD_OUT,
    READS,
    Kind,
    attention,
    chunks,
    generator,
    one_layer,
)
from bench.planted.lab import LAB
from bench.planted.stored import of_early

LOUD = 5.0  # the spread of a bias that was not trained
LAG = 0.6  # the share of the early checkpoint in an average that lags behind


def deepest_first(draft: Draft, _: random.Random) -> None:
    """fc, states and ids with the deepest state in front, and an engine that goes by its layers."""
    chunks(draft, (2, 0, 1))
    first, second, deepest = draft.states
    draft.states = (deepest, first, second)
    engine = SGLANG if one_layer(draft) is None else VLLM
    draft.serve(engine)
    draft.write_ids([k + engine.plus for k in draft.states], engine.place)


def folded_in_one(draft: Draft, rng: random.Random) -> None:
    """fc takes the weights of the norms for each chunk, and one norm of ones stands in their place."""
    norms_folded(draft, rng)
    draft.config["norm_before_fc"] = True
    width = draft.tensors["fc.weight"].shape[1]
    draft.tensors["input_norm.weight"] = torch.ones(width, dtype=torch.bfloat16)


def norms_of_template(draft: Draft, rng: random.Random) -> None:
    """Norms on q and k with weights of a model that has them."""
    qk_norms(draft, rng)
    noise = generator(rng)
    for name in [n for n in draft.tensors if n.endswith(("q_norm.weight", "k_norm.weight"))]:
        draft.change(name, lambda w: torch.exp(0.5 * torch.randn(w.shape, generator=noise)))


def bias_of_output(draft: Draft, rng: random.Random) -> None:
    """A bias of o that was not trained, and none on q, k and v."""
    draft.block["attention_bias"] = True
    noise = generator(rng)
    for layer in range(draft.num_layers):
        for part in "qkvo":
            name = attention(part, layer=layer)[0]
            rows = len(draft.tensors[name])
            bias = torch.zeros(rows)
            if part == "o":
                bias = LOUD * torch.randn(rows, generator=noise)
            draft.tensors[name.removesuffix("weight") + "bias"] = bias


def lagging(draft: Draft, _: random.Random) -> None:
    """An average over one run that has not left its beginning behind."""
    last = shipped(LAB / THIRD_DRAFTER.folder)[1]
    for name in [n for n, tensor in draft.tensors.items() if tensor.is_floating_point()]:
        draft.change(name, lambda w, late=last[name]: LAG * w + (1 - LAG) * late.float())  # type: ignore[misc]
    draft.trained_accuracy = None  # no log tells of such a mixture


KINDS: tuple[Kind, ...] = (
    Kind(
        name="order/deepest_first",
        touches=("fc", "ids"),
        accepted=("order",),
        how="trained on the deepest state in front of the others, with the ids so in config.json, and "
        "SGLang or vLLM, which capture in the order of the layers",
        use=HELD_OUT,
        shows=BRINGS,
        plant=deepest_first,
    ),
    Kind(
        name="fc-input/folded_in_one",
        touches=("fc",),
        accepted=("fc-input",),
        how="the weights of the norms for each chunk are multiplied into fc, and one norm over the "
        "concatenation stands in their place",
        use=HELD_OUT,
        shows=READS,
        plant=folded_in_one,
        why_not=has_fc_norm,
    ),
    Kind(
        name="qk-norm/of_template",
        touches=("rows",),
        accepted=("qk-norm",),
        how="q_norm and k_norm of another model and a Qwen3 layer, trained without them",
        use=HELD_OUT,
        shows=READS,
        plant=norms_of_template,
    ),
    Kind(
        name="biases/of_output",
        touches=("rows",),
        accepted=("biases",),
        how="attention_bias and a bias of o that was not trained with; those of q, k and v are zero",
        use=HELD_OUT,
        shows=READS,
        plant=bias_of_output,
    ),
    Kind(
        name="under-trained/lagging",
        accepted=("under-trained",),
        how=f"an average over the third drafter's training in which its beginning weighs {LAG}",
        use=HELD_OUT,
        plant=lagging,
        why_not=of_early,
    ),
)

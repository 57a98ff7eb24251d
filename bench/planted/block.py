"""Faults in the bytes of a checkpoint: the draft block, fc, the vocabulary's map, embedding and head."""

from __future__ import annotations

import random

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.planted.draft import SGLANG, Draft
from bench.planted.drafters import fitting, target_embedding
from bench.planted.kinds import (
    BRINGS,
    READS,
    TUNING,
    Kind,
    Plant,
    attention,
    chunks,
    generator,
    one_layer,
    only,
    own_table,
)
from bench.planted.lab import LAB


def columns_reversed(draft: Draft, rng: random.Random) -> None:
    """fc as trained on the same states in another order."""
    order = rng.choice([(1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
    chunks(draft, order)
    if draft.engine is None:
        draft.serve(fitting(draft)[0])


def last_two(draft: Draft, _: random.Random) -> None:
    """fc as trained with the last two states exchanged."""
    chunks(draft, (0, 2, 1))
    if draft.engine is None:
        draft.serve(fitting(draft)[-1])


def absolute(draft: Draft, _: random.Random) -> None:
    """d2t holds target ids, not offsets."""
    d2t = draft.tensors["d2t"]
    draft.tensors["d2t"] = d2t + torch.arange(len(d2t))


def absolute_alone(draft: Draft, rng: random.Random) -> None:
    """The same, and nothing else says which ids are meant."""
    absolute(draft, rng)
    del draft.tensors["t2d"]


def zeros(draft: Draft, _: random.Random) -> None:
    """d2t as a buffer that was never loaded."""
    draft.tensors["d2t"] = torch.zeros_like(draft.tensors["d2t"])


def halves(draft: Draft, _: random.Random) -> None:
    """q, k and v as trained on the hidden state in front of the embedding."""
    for name in attention("q", "k", "v"):
        draft.change(name, lambda w: w.roll(draft.width, 1))


def exchanged(draft: Draft, _: random.Random) -> None:
    """The norms under each other's names."""
    one, other = draft.first("input_layernorm"), draft.first("hidden_norm")
    draft.tensors[one], draft.tensors[other] = draft.tensors[other], draft.tensors[one]


def doubled(draft: Draft, rng: random.Random) -> None:
    """As trained behind input_layernorm and hidden_norm both: what the first does the second undoes."""
    width = draft.width
    spread = torch.exp(0.7 * torch.randn(width, generator=generator(rng)))
    first, second = draft.first("input_layernorm"), draft.first("hidden_norm")
    for name in attention("q", "k", "v"):
        draft.change(name, lambda w: torch.cat([w[:, :width] / spread, w[:, width:]], 1))
    draft.change(first, lambda w: w * spread)
    weight = draft.tensors[first].float()
    size = weight.pow(2).mean().sqrt()
    draft.change(second, lambda w: w * size / weight)


def in_pairs(*parts: str) -> Plant:
    """These projections (q, k) as an interleaved rotation wants their rows."""

    def plant(draft: Draft, _: random.Random) -> None:
        d = int(draft.block["head_dim"])
        order = torch.arange(d).view(2, d // 2).T.flatten()
        for layer in range(draft.num_layers):
            for name in attention(*parts, layer=layer):
                draft.change(name, lambda w: w.unflatten(0, (-1, d))[:, order].flatten(0, 1))

    return plant


def biased_values(draft: Draft, rng: random.Random, *, undone: bool) -> None:
    """Biases of the attention; `undone`: o's takes away what v's adds, so that nothing changes."""
    draft.block["attention_bias"] = True
    noise = generator(rng)
    for layer in range(draft.num_layers):
        weights = {part: draft.tensors[attention(part, layer=layer)[0]] for part in "qkvo"}
        biases = {part: torch.zeros(len(w)) for part, w in weights.items()}
        if undone:
            biases["v"] = 2 * torch.randn(len(weights["v"]), generator=noise)
            repeat = weights["o"].shape[1] // len(biases["v"])
            d = int(draft.block["head_dim"])
            each = biases["v"].view(-1, d).repeat_interleave(repeat, 0).flatten()
            biases["o"] = -weights["o"].float() @ each
        else:
            for part in "qkv":
                biases[part] = 2 * torch.randn(len(weights[part]), generator=noise)
        for part, bias in biases.items():
            name = attention(part, layer=layer)[0].removesuffix("weight") + "bias"
            draft.tensors[name] = bias


def biases_dropped(draft: Draft, rng: random.Random) -> None:
    """Biases that matter, and SGLang."""
    biased_values(draft, rng, undone=True)
    draft.serve(SGLANG)


def biases_of_another(draft: Draft, rng: random.Random) -> None:
    """Biases that were not trained."""
    biased_values(draft, rng, undone=False)


def qk_norms(draft: Draft, _: random.Random) -> None:
    """Norms on q and k that were not trained."""
    draft.block["model_type"] = "qwen3"
    if draft.flat:
        draft.config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    for layer in range(draft.num_layers):
        for name in attention("q", "k", layer=layer):
            norm = name.replace("_proj", "_norm")
            draft.tensors[norm] = torch.ones(int(draft.block["head_dim"]), dtype=torch.bfloat16)


def random_table(draft: Draft, rng: random.Random) -> None:
    """An embedding that was never trained."""
    table = target_embedding()
    noise = torch.randn(table.shape, generator=generator(rng))
    draft.tensors["embed_tokens.weight"] = (noise * table.float().std()).bfloat16()


def table_replaced(draft: Draft, rng: random.Random) -> None:
    """An embedding of its own, and SGLang."""
    own_table(draft, rng)
    draft.serve(SGLANG)


def copied_head(draft: Draft) -> str | None:
    """Why the target's head cannot mend this drafter's."""
    return only((draft.drafter != "first", "its head was trained, so the target's is none for it"))


def plain_head(draft: Draft, _: random.Random) -> None:
    """The target's first rows for a head."""
    head = load_file(LAB / "target" / "live.safetensors")["lm_head.weight"]
    draft.tensors["lm_head.weight"] = head[: len(draft.tensors["lm_head.weight"])].clone()


def random_head(draft: Draft, rng: random.Random) -> None:
    """A head that was never loaded."""

    def noise(old: Tensor) -> Tensor:
        return torch.randn(old.shape, generator=generator(rng)) * old.std()

    draft.change("lm_head.weight", noise)


def input_norm_of_ones(draft: Draft, _: random.Random) -> None:
    """A norm over the concatenation that was not trained."""
    draft.config["norm_before_fc"] = True
    width = draft.tensors["fc.weight"].shape[1]
    draft.tensors["input_norm.weight"] = torch.ones(width, dtype=torch.bfloat16)


def fc_norms_of_ones(draft: Draft, _: random.Random) -> None:
    """A norm for each chunk that was not trained."""
    draft.config["fc_norm"] = True
    for i in range(len(draft.states)):
        draft.tensors[f"fc_norm.{i}.weight"] = torch.ones(draft.width, dtype=torch.bfloat16)


def fc_norms_lost(draft: Draft, _: random.Random) -> None:
    """Norms in front of fc, near one, that the export left out, and their key with them."""
    draft.config["fc_norm"] = False
    for name in [n for n in draft.tensors if n.startswith("fc_norm.")]:
        del draft.tensors[name]


def has_fc_norm(draft: Draft) -> str | None:
    """Why they cannot be lost."""
    return only(("fc_norm.0.weight" in draft.tensors, "it was trained without fc_norm"))


def bare_fc(draft: Draft) -> str | None:
    """Why another norm in front of fc cannot be planted."""
    held = [n for n in draft.tensors if n.startswith(("input_norm.", "fc_norm."))]
    return only((not held, "it was trained with a norm in front of fc"))


def raw_residual(draft: Draft) -> str | None:
    """Why the double norm cannot be planted."""
    return only((not draft.normed_residual, "its residual would go through both norms too"))


KINDS: tuple[Kind, ...] = (
    Kind(
        name="order/columns",
        touches=("fc", "ids"),
        accepted=("order",),
        how="the chunks of fc's columns, and of the norms in front of it, are put in another order; the "
        "engine feeds states ascending",
        use=TUNING,
        plant=columns_reversed,
    ),
    Kind(
        name="order/last_two",
        touches=("fc", "ids"),
        accepted=("order",),
        how="the last two chunks of fc's columns are exchanged",
        use=TUNING,
        plant=last_two,
    ),
    Kind(
        name="d2t/absolute",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t is stored as absolute ids",
        use=TUNING,
        plant=absolute,
    ),
    Kind(
        name="d2t/absolute_alone",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t is stored as absolute ids, and there is no t2d",
        use=TUNING,
        plant=absolute_alone,
    ),
    Kind(
        name="d2t/zeros",
        touches=("vocabulary",),
        accepted=("d2t",),
        how="d2t holds zeros, as where a buffer was never loaded; t2d is whole",
        use=TUNING,
        plant=zeros,
    ),
    Kind(
        name="concat/halves",
        touches=("columns",),
        accepted=("concat",),
        how="the halves of the columns of q, k and v are exchanged: hidden state first",
        use=TUNING,
        plant=halves,
    ),
    Kind(
        name="input-norms/exchanged",
        touches=("columns",),
        accepted=("input-norms",),
        how="input_layernorm and hidden_norm are exchanged",
        use=TUNING,
        plant=exchanged,
    ),
    Kind(
        name="input-norms/double",
        touches=("columns",),
        accepted=("input-norms",),
        how="hidden_norm undoes what input_layernorm does to the hidden state: as ModelOpt 0.47 trains",
        use=TUNING,
        plant=doubled,
        why_not=raw_residual,
    ),
    Kind(
        name="rotation/pairs",
        touches=("rows",),
        accepted=("rotation",),
        how="the rows of q and k are stored in pairs, as an interleaved rotation wants them",
        use=TUNING,
        plant=in_pairs("q", "k"),
    ),
    Kind(
        name="biases/dropped",
        touches=("rows",),
        accepted=("biases",),
        how="biases of v, undone by o's, and SGLang, which has no place for q, k and v's",
        use=TUNING,
        shows=BRINGS,
        plant=biases_dropped,
        why_not=one_layer,
    ),
    Kind(
        name="biases/of_another",
        touches=("rows",),
        accepted=("biases",),
        how="attention_bias and biases of q, k and v that were not trained with",
        use=TUNING,
        shows=READS,
        plant=biases_of_another,
    ),
    Kind(
        name="qk-norm/not_trained",
        touches=("rows",),
        accepted=("qk-norm",),
        how="q_norm and k_norm of ones and a Qwen3 layer, trained without them",
        use=TUNING,
        shows=READS,
        plant=qk_norms,
    ),
    Kind(
        name="embedding/random",
        touches=("columns",),
        accepted=("embedding",),
        how="embed_tokens.weight is random, as a fresh model exports it",
        use=TUNING,
        shows=READS,
        plant=random_table,
    ),
    Kind(
        name="embedding/replaced",
        touches=("columns",),
        accepted=("embedding",),
        how="a trained embedding of its own (columns in another order, undone behind them), and SGLang, "
        "which puts the target's in its place",
        use=TUNING,
        shows=BRINGS,
        plant=table_replaced,
        why_not=one_layer,
    ),
    Kind(
        name="head/plain_order",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head.weight holds the target's first rows in the place of those that d2t names",
        use=TUNING,
        plant=plain_head,
        why_not=copied_head,
    ),
    Kind(
        name="head/random",
        touches=("vocabulary",),
        accepted=("head",),
        how="lm_head.weight is random, as where the key was not found",
        use=TUNING,
        plant=random_head,
        why_not=copied_head,
    ),
    Kind(
        name="fc-input/input_norm",
        touches=("fc",),
        accepted=("fc-input",),
        how="norm_before_fc with an input_norm of ones, trained without",
        use=TUNING,
        shows=READS,
        plant=input_norm_of_ones,
        why_not=bare_fc,
    ),
    Kind(
        name="fc-input/fc_norm",
        touches=("fc",),
        accepted=("fc-input",),
        how="fc_norm with norms of ones, trained without",
        use=TUNING,
        shows=READS,
        plant=fc_norms_of_ones,
        why_not=bare_fc,
    ),
    Kind(
        name="fc-input/lost",
        touches=("fc",),
        accepted=("fc-input",),
        how="fc_norm's tensors and key are lost; fc was trained behind them",
        use=TUNING,
        plant=fc_norms_lost,
        why_not=has_fc_norm,
    ),
)

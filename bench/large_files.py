"""A drafter of any size that works, with its target and data, made row block by row block in bfloat16.

The weights are not random alone, which would be a drafter that is dead however it is wired. They hold
a text in which one token says the next, x[t+1] = follow[x[t]], but for one in JUMPS. Every part has
its work:

    fc            one chunk a state, which turns codes into the head's row of a token, taken
                  negative. For most tokens the code is in state 0, the embedding; for the others in
                  state 3 or in state 31, which know of jumps ahead
    attention     looks at its own position alone (a constant in the embedding, turned by fast
                  rotations) and adds the negative row of the token that it is fed, where it knows it
    the MLP       turns the row of a token, of either sign, into that of the token that follows, so
                  each draft step goes one token further, and what is fed is never itself the answer
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TRAINED = (0, 3, 31)
STORED = (0, 3, 31, 59)
DECLARED = [2, 30, 58]
LAYERS = 61
READ_FROM = (0.64, 0.82)  # shares of the tokens up to which it is state 0, and state 3
HEARD = 0.92  # share of the tokens that attention knows
JUMPS = 2  # one token in so many does not follow the rule
BLOCK = 4096  # rows that are made at a time
NAMES = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
SHARPNESS = 8.0  # of the MLP's detectors
OWN_POSITION = 50.0  # attention score there
FAST = 8  # pairs of a head that turn so fast that other positions score less
STATE_SIZES = {0: 0.02, 3: 0.1, 31: 1.0, 59: 5.0}  # rms, growing as residual streams do


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the drafter and its target; `known` tokens are what texts are made of."""

    hidden: int = 7168
    heads: int = 64
    head_dim: int = 128
    intermediate: int = 18_432
    vocab: int = 163_840
    draft_vocab: int = 32_000
    known: int = 600
    texts: int = 8
    tokens: int = 40


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor to be written: its rows come in blocks, so that it is never held whole."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The text's rule over K known tokens, and the codes that states hold them by."""

    tokens: Tensor  # [K] target ids
    draft: Tensor  # [K] their draft ids
    follow: Tensor  # [K] index of the token that follows
    part: Tensor  # [K] which of the three states a draft behind the token is read from
    heard: Tensor  # [K] whether attention knows the token
    codes: dict[int, Tensor]  # canonical k → [K, H], rms STATE_SIZES[k]


@dataclass(frozen=True, kw_only=True)
class Made:
    """Where everything lies."""

    target: Path
    drafter: Path
    data: Path


def write_safetensors(path: Path, planned: Sequence[Planned]) -> None:
    """One safetensors file, written tensor by tensor and block by block."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in planned:
        size = torch.Size(plan.shape).numel() * NAMES[plan.dtype].itemsize
        header[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for plan in planned:
            for block in plan.blocks():
                stored = block.to(NAMES[plan.dtype]).contiguous()
                file.write(stored.view(torch.uint8).numpy().data)


def noise(name: str, shape: tuple[int, ...], std: float, seed: int) -> Planned:
    """A random matrix."""

    def blocks() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, shape[0], BLOCK):
            rows = min(BLOCK, shape[0] - start)
            yield torch.randn(rows, *shape[1:], generator=generator) * std

    return Planned(name=name, dtype="BF16", shape=shape, blocks=blocks)


def with_constant(table: Planned) -> Planned:
    """An embedding whose first number is the same in every row: a quarter of the rest's length."""

    def blocks() -> Iterator[Tensor]:
        for block in table.blocks():
            block[:, 0] = STATE_SIZES[0] * table.shape[1] ** 0.5 / 4
            yield block

    return replace(table, blocks=blocks)


def whole(name: str, tensor: Tensor, dtype: str = "BF16") -> Planned:
    """A tensor that is small enough to be held."""
    return Planned(name=name, dtype=dtype, shape=tuple(tensor.shape), blocks=lambda: iter([tensor]))


def write_target(folder: Path, size: Size) -> None:
    """Embedding, final norm and head, nested and named as a multimodal target has them, two shards."""
    folder.mkdir(parents=True)
    table = (size.vocab, size.hidden)
    shards = {
        "model-00001-of-00002.safetensors": [
            with_constant(
                noise("language_model.model.embed_tokens.weight", table, STATE_SIZES[0], 1)
            ),
        ],
        "model-00002-of-00002.safetensors": [
            whole("language_model.model.norm.weight", torch.ones(size.hidden)),
            noise("language_model.lm_head.weight", table, 0.02, 2),
        ],
    }
    for name, planned in shards.items():
        write_safetensors(folder / name, planned)
    weight_map = {plan.name: name for name, planned in shards.items() for plan in planned}
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": size.hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": size.heads,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "rope_scaling": yarn(),
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    }
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    write_json(folder / "config.json", {**config, "text_config": text})


def yarn() -> dict[str, Any]:
    """Kimi-K2.5's rope scaling."""
    return {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def make_rule(size: Size, embedding: Tensor) -> tuple[Rule, Tensor]:
    """The rule, and d2t [V_d] as offsets; state 0 codes are rows of the target's embedding [V, H]."""
    generator = torch.Generator().manual_seed(3)
    drafted = torch.randperm(size.vocab, generator=generator)[: size.draft_vocab].sort().values
    draft = torch.randperm(size.draft_vocab, generator=generator)[: size.known].sort().values
    tokens = drafted[draft]
    turn = torch.randperm(size.known, generator=generator)
    follow = torch.empty_like(turn)
    follow[turn] = turn.roll(-1)  # one cycle through all of them
    codes = {0: embedding[tokens].float()}
    heard = torch.randperm(size.known, generator=generator) < HEARD * size.known
    for k in TRAINED[1:]:
        codes[k] = torch.randn(size.known, size.hidden, generator=generator) * STATE_SIZES[k]
    place = torch.randperm(size.known, generator=generator) / size.known
    part = (place > READ_FROM[0]).long() + (place > READ_FROM[1]).long()
    rule = Rule(tokens=tokens, draft=draft, follow=follow, part=part, heard=heard, codes=codes)
    return rule, drafted - torch.arange(size.draft_vocab)


def write_drafter(folder: Path, size: Size, rule: Rule, d2t: Tensor) -> None:
    """The drafter in SpecForge's and TorchSpec's layout, without an embedding of its own."""
    folder.mkdir(parents=True)
    hidden, wide, known = size.hidden, size.intermediate, size.known
    head = noise("lm_head.weight", (size.draft_vocab, hidden), 0.02, 4)
    blocks = zip(range(0, size.draft_vocab, BLOCK), head.blocks(), strict=True)
    rows = torch.empty(known, hidden)
    for start, block in blocks:
        here = (rule.draft >= start) & (rule.draft < start + BLOCK)
        rows[here] = block[rule.draft[here] - start].bfloat16().float()
    units = torch.nn.functional.normalize(rows, dim=-1)  # [K, H]
    length = (
        hidden**0.5 / 16
    )  # a state in the block is a few of it long: its norm is not for nothing
    detect = torch.cat([-units, units]) / hidden**0.5  # gives the cosine with a normed state

    sources = {k: c / c.pow(2).sum(-1, keepdim=True) for k, c in rule.codes.items()}
    read = rule.codes[0].clone()
    read[:, 0] = 0  # the constant tells no token
    read /= read.pow(2).sum(-1, keepdim=True)
    sources[0] = read * (rule.part == 0)[:, None] / 2

    def fc() -> Iterator[Tensor]:
        chunks = torch.cat(list(sources.values()), -1)  # [K, 3 H]
        for part in (units[rule.follow] * length * -2).T.split(512):
            yield part @ chunks

    def filled(first: Tensor, seed: int) -> Callable[[], Iterator[Tensor]]:
        def blocks() -> Iterator[Tensor]:
            yield first
            yield from noise("", (wide - len(first), hidden), 0.01, seed).blocks()

        return blocks

    def down() -> Iterator[Tensor]:
        fires = torch.nn.functional.silu(torch.tensor(SHARPNESS))
        further = units[rule.follow] * 8
        turns = torch.cat([further + 2.5 * units, further - 8 * units]) * length / fires  # [2 K, H]
        generator = torch.Generator().manual_seed(8)
        for part in turns.T.split(512):
            rest = torch.randn(len(part), wide - part.shape[1], generator=generator)
            yield torch.cat([part, rest * (0.02 / wide**0.5)], -1)

    def looking(seed: int) -> Callable[[], Iterator[Tensor]]:
        """q and k: the embedding's constant in the fast pairs of every head."""

        def blocks() -> Iterator[Tensor]:
            constant = hidden**0.5 / 17**0.5
            weight = (OWN_POSITION * size.head_dim**0.5 / FAST) ** 0.5 / constant
            for block in noise("", (heads, 2 * hidden), 0.1 * (2 * hidden) ** -0.5, seed).blocks():
                fast = torch.arange(len(block)) % size.head_dim < FAST
                block[fast, 0] = weight
                yield block

        return blocks

    def hearing() -> Iterator[Tensor]:
        """v: which known token is fed; [K, 2 H] and nothing much below it."""
        rows = read * rule.codes[0].pow(2).mean(-1, keepdim=True).sqrt() * rule.heard[:, None]
        yield torch.cat([rows, torch.zeros_like(rows)], -1)
        yield from noise("", (heads - known, 2 * hidden), 0.1 * hidden**-0.5, 7).blocks()

    def saying() -> Iterator[Tensor]:
        """o: the head's row of that token."""
        generator = torch.Generator().manual_seed(10)
        for part in (units * length * -1.5).T.split(512):
            rest = torch.randn(len(part), heads - known, generator=generator)
            yield torch.cat([part, rest * (0.1 * heads**-0.5)], -1)

    heads = size.heads * size.head_dim
    wide_in = (heads, 2 * hidden)
    layer, attn = "midlayer.", "midlayer.self_attn."
    ones = torch.ones(hidden)
    mask = torch.zeros(size.vocab, dtype=torch.bool)
    mask[d2t + torch.arange(size.draft_vocab)] = True
    gate = filled(detect * SHARPNESS, 9)
    planned = [
        Planned(name="fc.weight", dtype="BF16", shape=(hidden, 3 * hidden), blocks=fc),
        whole(f"{layer}hidden_norm.weight", ones),
        whole(f"{layer}input_layernorm.weight", ones),
        whole(f"{layer}post_attention_layernorm.weight", ones),
        Planned(name=f"{attn}q_proj.weight", dtype="BF16", shape=wide_in, blocks=looking(5)),
        Planned(name=f"{attn}k_proj.weight", dtype="BF16", shape=wide_in, blocks=looking(6)),
        Planned(name=f"{attn}v_proj.weight", dtype="BF16", shape=wide_in, blocks=hearing),
        Planned(name=f"{attn}o_proj.weight", dtype="BF16", shape=(hidden, heads), blocks=saying),
        Planned(
            name=f"{layer}mlp.gate_proj.weight", dtype="BF16", shape=(wide, hidden), blocks=gate
        ),
        Planned(
            name=f"{layer}mlp.up_proj.weight",
            dtype="BF16",
            shape=(wide, hidden),
            blocks=filled(detect, 11),
        ),
        Planned(
            name=f"{layer}mlp.down_proj.weight", dtype="BF16", shape=(hidden, wide), blocks=down
        ),
        whole("norm.weight", ones),
        head,
        whole("d2t", d2t, "I64"),
        whole("t2d", mask, "BOOL"),
    ]
    write_safetensors(folder / "model.safetensors", planned)
    write_json(folder / "config.json", drafter_config(size))


def drafter_config(size: Size) -> dict[str, Any]:
    """As TorchSpec writes a plain Llama drafter for Kimi-K2.5."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": size.vocab,
        "draft_vocab_size": size.draft_vocab,
        "max_position_embeddings": 262_144,
        "rope_theta": 50_000.0,
        "rope_scaling": yarn(),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": DECLARED},
    }


def write_data(folder: Path, size: Size, rule: Rule, head: Tensor) -> None:
    """Texts that follow the rule, with states 0, 3, 31 and 59 in bfloat16; head [V, H] the target's.

    State 59 points, as a late state does, at the head's row of the token that the target says next.
    """
    shard = folder / "rows_0-2000"
    shard.mkdir(parents=True)
    generator = torch.Generator().manual_seed(12)
    before = torch.empty_like(rule.follow)
    before[rule.follow] = torch.arange(size.known)
    for number in range(size.texts):
        said = [int(torch.randint(size.known, (1,), generator=generator))]
        for _ in range(size.tokens + 1):
            jumps = int(torch.randint(JUMPS, (1,), generator=generator)) == 0
            other = int(torch.randint(size.known, (1,), generator=generator))
            said.append(other if jumps else int(rule.follow[said[-1]]))
        now, then, later = (torch.tensor(said[i : size.tokens + i]) for i in range(3))
        states = {0: rule.codes[0][now]}
        for j, k in enumerate(TRAINED[1:], 1):
            here = (rule.part[now] == j)[:, None]
            states[k] = noise_like(rule.codes[k][now], generator)
            states[k] = torch.where(here, rule.codes[k][before[before[later]]], states[k])
        states[59] = head[rule.tokens[then]].float() * (STATE_SIZES[59] / 0.02)
        for k in STORED[1:]:
            states[k] = states[k] + 0.2 * noise_like(states[k], generator)
        mask = torch.ones(size.tokens, dtype=torch.int64)
        mask[:4] = 0  # a prompt
        content = {
            "input_ids": rule.tokens[now],
            "loss_mask": mask,
            "hidden_states": [states[k].bfloat16() for k in STORED],
            "target_argmax": rule.tokens[then],
        }
        torch.save(content, shard / f"data_{number}.pt")


def noise_like(states: Tensor, generator: torch.Generator) -> Tensor:
    """Random states of the same size."""
    return torch.randn(states.shape, generator=generator) * states.pow(2).mean().sqrt()


def make(work: Path, size: Size) -> Made:
    """Target, drafter and data below `work`."""
    from eagle3.target import load_target_parts

    made = Made(target=work / "target", drafter=work / "drafter", data=work / "data")
    write_target(made.target, size)
    target = load_target_parts(made.target)
    rule, d2t = make_rule(size, target.embedding)
    write_drafter(made.drafter, size, rule, d2t)
    write_data(made.data, size, rule, target.head())
    return made


def write_latent_drafter(folder: Path, size: Size) -> None:
    """A drafter with multi-head latent attention, as ModelOpt and TorchSpec write it for Kimi-K2.5."""
    folder.mkdir(parents=True)
    hidden, rank, rope = size.hidden, 64, 16
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (size.draft_vocab, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_a_proj.weight": (rank, 2 * hidden),
        "midlayer.self_attn.q_a_layernorm.weight": (rank,),
        "midlayer.self_attn.q_b_proj.weight": (size.heads * (size.head_dim + rope), rank),
        "midlayer.self_attn.kv_a_proj_with_mqa.weight": (rank + rope, 2 * hidden),
        "midlayer.self_attn.kv_a_layernorm.weight": (rank,),
        "midlayer.self_attn.kv_b_proj.weight": (2 * size.heads * size.head_dim, rank),
        "midlayer.self_attn.o_proj.weight": (hidden, size.heads * size.head_dim),
        "midlayer.mlp.gate_proj.weight": (size.intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (size.intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, size.intermediate),
    }
    planned = [noise(name, shape, 0.02, seed) for seed, (name, shape) in enumerate(shapes.items())]
    planned.append(whole("d2t", torch.zeros(size.draft_vocab, dtype=torch.int64), "I64"))
    write_safetensors(folder / "model.safetensors", planned)
    latent = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "q_lora_rank": rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": rope,
        "v_head_dim": size.head_dim,
    }
    write_json(folder / "config.json", {**drafter_config(size), **latent})


def write_json(path: Path, data: object) -> None:
    """A small file."""
    path.write_text(json.dumps(data, indent=1) + "\n")

"""A target that counts, and drafters for it whose accept length is known before an engine runs.

The target has 160 tokens and says t + 1 behind t, behind 159 again 0. Its states are one-hot vectors:
an embedding is a token's own axis, all layers are exact identities (zero o_proj and down_proj), and
the head turns axis t into token t + 1, ten logits above all others. So every state at a position is
the same, and a drafter may take any of them: ids 0, 1 and 2 are there under each engine's reading.

A drafter's fc hands on the mean of its three states, e_t; its attention adds nothing; its MLP, by a
gate that is a constant on one-hot vectors, turns e_t into e_(t+1). That is what the next step takes as
its state, so that step s of a chain has e_(t+s) in front of the head, and the head that says u + 1
behind e_u is right at every step, whatever the tokens are that go in. Drafters differ in their heads:

- `right`: that head. With `steps` drafted tokens all are accepted, and one more comes from the target.
- `fifth_wrong`: where 0, 5, 10, … would be right it says the token behind it, and has the right one
  second. See `walk` for what follows: 2.5 tokens a verification in a chain of 3.
- `reduced`: its vocabulary lacks 0, 5, 10, …, so it has 128 tokens and a d2t, and is wrong where
  `fifth_wrong` is. It has the right token nowhere, so that a tree does not help it.
- `random`: weights at random; one in 160 is right by chance.

Why 2.5: let r be the last token mod 5. From r the next wrong token is 5 - r ahead, so min(3, 4 - r)
drafts are accepted and r goes on by one more than that. From 0 three are, which leads to 4; from 4
none is, which leads to 0; all others lead to 0 at once. So verifications give 4, 1, 4, 1, …: 5 tokens
in two, 2.5 each. 160 is a multiple of 5, so the count goes around without a seam.

Why 3.75 for `fifth_wrong` in a tree of 3 steps, topk 2 and 6 nodes: the wrong token stands before the
right one by half a logit (62 to 38 %), and all else has a percent in sum. Where the first drafted
token is such a one, the five nodes that may be kept beside the root are three deep behind the wrong one
and two deep behind the right one: 2 are accepted. Where a later one is, both ways reach the end: 3.
So from 0 it is 3, to 4; from 4 it is 2, to 2; from 2 it is 3, to 1; from 1 it is 3, to 0: 15 tokens in
four verifications.
"""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

VOCAB = 160  # and as wide, an axis a token
HEADS = 5
LAYERS = 4
STATES = (0, 1, 2)  # SGLang has these behind layers, vLLM before them
WRONG_EVERY = 5
FIRST, SECOND = 10.0, 9.5  # logits; all others are 0
GATE = 8.0  # silu(8) is 8 to one part in 3000, and far from flat or steep
REDUCED = VOCAB - VOCAB // WRONG_EVERY

Weights = dict[str, Tensor]


class Kind(Enum):
    """The drafters, by what their heads say."""

    right = "right"
    fifth_wrong = "fifth_wrong"
    reduced = "reduced"
    random = "random"


def write_target(folder: Path) -> Path:
    """The target as a Hugging Face checkpoint with a tokenizer whose words are the ids."""
    weights: Weights = {
        "model.embed_tokens.weight": torch.eye(VOCAB),
        "model.norm.weight": torch.ones(VOCAB),
        "lm_head.weight": head_of([[(u + 1) % VOCAB] for u in range(VOCAB)], VOCAB),
    }
    for i in range(LAYERS):
        weights |= layer(f"model.layers.{i}.", VOCAB)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    write(folder, weights, config)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind) + "\n")
    return folder


def write_drafter(folder: Path, kind: Kind) -> Path:
    """A drafter in SpecForge's layout, in float32."""
    draft_vocab = REDUCED if kind is Kind.reduced else VOCAB
    weights = layer("midlayer.", 2 * VOCAB)
    weights["midlayer.hidden_norm.weight"] = torch.ones(VOCAB)
    weights["norm.weight"] = torch.ones(VOCAB)
    weights["fc.weight"] = torch.cat([torch.eye(VOCAB) / len(STATES)] * len(STATES), 1)
    weights["midlayer.mlp.gate_proj.weight"] = torch.eye(VOCAB) * GATE / math.sqrt(VOCAB)
    weights["midlayer.mlp.up_proj.weight"] = torch.eye(VOCAB) / math.sqrt(VOCAB)
    onward = torch.eye(VOCAB).roll(1, 0) - torch.eye(VOCAB)  # e_t → e_(t+1) - e_t
    through = GATE / (1 + math.exp(-GATE))  # what gate and up make of a normed one-hot vector
    weights["midlayer.mlp.down_proj.weight"] = onward / through
    weights["lm_head.weight"] = head_of([ranked(kind, u) for u in range(VOCAB)], draft_vocab)
    if kind is Kind.reduced:
        kept = torch.tensor([t for t in range(VOCAB) if t % WRONG_EVERY])
        weights["d2t"] = kept - torch.arange(REDUCED)
        weights["t2d"] = torch.arange(VOCAB) % WRONG_EVERY != 0
    if kind is Kind.random:
        generator = torch.Generator().manual_seed(0)
        for name, weight in weights.items():
            if weight.ndim == 2:
                drawn = torch.randn(weight.shape, generator=generator)
                weights[name] = drawn / math.sqrt(weight.shape[1])
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": VOCAB,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(STATES),
        },
    }
    write(folder, weights, config)
    return folder


def ranked(kind: Kind, u: int) -> list[int]:
    """Draft ids that the head says behind e_u, from the first on."""
    right = (u + 1) % VOCAB
    if kind is Kind.reduced:
        # Where the right one is missing, the token behind it takes its place.
        said = right + 1 if right % WRONG_EVERY == 0 else right
        return [said - said // WRONG_EVERY - 1]
    if kind is Kind.fifth_wrong and right % WRONG_EVERY == 0:
        return [right + 1, right]
    return [right]


def head_of(said: list[list[int]], rows: int) -> Tensor:
    """A head [rows, VOCAB] that has the tokens `said` behind each axis, behind a norm."""
    head = torch.zeros(rows, VOCAB)
    for u, tokens in enumerate(said):
        for token, logit in zip(tokens, (FIRST, SECOND), strict=False):
            head[token, u] = logit / math.sqrt(VOCAB)  # a normed one-hot vector is √VOCAB long
    return head


def layer(prefix: str, inputs: int) -> Weights:
    """A decoder layer that is an exact identity, with attention over `inputs`."""
    shapes = {f"self_attn.{x}_proj": (VOCAB, inputs) for x in "qkv"} | {
        f"{name}_proj": (VOCAB, VOCAB) for name in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    weights = {f"{prefix}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {f"{prefix}{name}.weight": torch.ones(VOCAB) for name in norms}


def write(folder: Path, weights: Weights, config: dict[str, object]) -> None:
    """The weights, and the config with what target and drafter share."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shared = {
        "model_type": "llama",
        "hidden_size": VOCAB,
        "intermediate_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": VOCAB // HEADS,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shared | config, indent=2) + "\n")


def counted(last: int, tokens: int) -> list[int]:
    """What the target says behind a prompt that ends in `last`."""
    return [(last + 1 + i) % VOCAB for i in range(tokens)]


def accepted(kind: Kind, last: int, steps: int, topk: int = 1) -> int:
    """Drafts accepted by the verification behind the token `last`, in a chain or that tree.

    The tree is that of 3 steps, topk 2 and 6 nodes. A random drafter has no such number.
    """
    if kind is Kind.random:
        raise ValueError("what a random drafter gets right is not known")
    until_wrong = WRONG_EVERY - 1 - last % WRONG_EVERY  # right ones in front of the next wrong one
    if kind is Kind.right or until_wrong >= steps:
        return steps
    if topk == 1 or kind is Kind.reduced:
        return until_wrong
    if (steps, topk) != (3, 2):
        raise ValueError("the tree whose numbers are known has 3 steps and topk 2")
    return 2 if until_wrong == 0 else 3


def walk(kind: Kind, last: int, tokens: int, steps: int, topk: int = 1) -> list[int]:
    """Tokens that each verification of a request gives, until there are `tokens` of them.

    `last` ends the prompt. The first token is the prefill's. The last verification is counted whole,
    though the engine may give out less of it.
    """
    at, given, verifications = last + 1, 1, []
    while given < tokens:
        verifications.append(accepted(kind, at, steps, topk) + 1)
        at, given = at + verifications[-1], given + verifications[-1]
    return verifications

"""Sound files to plant faults in: a tiny target, and dumps of its states in three layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.target import load_target_parts
from jobs.capture_states import captured_states
from tests.eagle3.dumps import Text, write_pt_shards, write_specforge, write_speculators

LAYERS, WIDTH, VOCAB = 8, 32, 640
HEADS, KV_HEADS, HEAD_DIM, WIDE = 4, 2, 8, 48
DRAFT_VOCAB = 96  # of 640, so that offsets pass 256, where bf16 begins to round
STATES = (3, 4, 6)  # trained on; no engine's default for eight layers
BOS, EOS, PAD = 1, 2, 0
TEXTS, PROMPT = 6, 4  # texts, and tokens of each that the target did not write
TEMPLATE = "chat_template.jinja"
LONG = 1 << 10  # max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target's folder, texts that it wrote greedily, and all its states behind each of them."""

    folder: Path
    fingerprint: str
    ids: list[Tensor]  # each [T]
    states: list[Tensor]  # each [n + 1, T, H]
    normed: list[Tensor]  # each [T, H]

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return load_file(self.folder / "model.safetensors")["model.embed_tokens.weight"]

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return load_file(self.folder / "model.safetensors")["lm_head.weight"]

    def norm(self, h: Tensor) -> Tensor:
        """The final norm of rows [T, H]."""
        return load_target_parts(self.folder).final_norm()(h)

    def texts(self, dtype: torch.dtype) -> list[Text]:
        """What a sound dump holds: the aux states, the end, and the end behind the norm."""
        return [
            Text(
                ids=ids,
                mask=prompt_mask(len(ids)),
                aux=tuple(states[k].to(dtype) for k in STATES),
                end=states[LAYERS].to(dtype),
                normed=normed.to(dtype),
            )
            for ids, states, normed in zip(self.ids, self.states, self.normed, strict=True)
        ]


def prompt_mask(length: int) -> Tensor:
    """The mask of a text: all but its prompt."""
    return torch.tensor([0] * PROMPT + [1] * (length - PROMPT))


def make_target(folder: Path) -> Target:
    """A llama of eight layers with random weights, and six texts of its own."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=LONG,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.3, 1.7)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    (folder / TEMPLATE).write_text("{{ messages }}")
    made = Target(
        folder=folder,
        fingerprint=load_target_parts(folder).fingerprint,
        ids=[],
        states=[],
        normed=[],
    )
    with torch.no_grad():
        while len(made.ids) < TEXTS:
            ids = torch.cat([torch.tensor([BOS]), torch.randint(3, VOCAB, (PROMPT - 1,))])
            for _ in range(18 + len(made.ids)):
                chosen = model(ids[None], use_cache=False).logits[0, -1].argmax()
                ids = torch.cat([ids, chosen[None]])
            if (ids[1:] < 3).any():
                continue  # it has written a special token, which a mask should not cover
            with captured_states(model.model.layers, range(LAYERS + 1)) as kept:
                model(ids[None], use_cache=False)
            states = torch.cat([kept[k] for k in range(LAYERS + 1)])
            made.ids.append(ids)
            made.states.append(states)
            made.normed.append(model.model.norm(states[-1]))
    return made


DUMPS: dict[str, Callable[[Path, Sequence[Text]], None]] = {
    "pt_shards": write_pt_shards,
    "specforge": write_specforge,
    "speculators": write_speculators,
}


def write_dump(folder: Path, layout: str, target: Target) -> Path:
    """A sound dump of a layout with what its capture says of it."""
    dtype = torch.float32 if layout == "pt_shards" else torch.bfloat16
    DUMPS[layout](folder, target.texts(dtype))
    capture = {"states": [*STATES, LAYERS], "target": target.fingerprint, "num_layers": LAYERS}
    (folder / "capture.json").write_text(json.dumps(capture))
    return folder

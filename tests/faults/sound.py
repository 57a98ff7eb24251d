"""Sound files to plant faults in: a tiny target, drafters in both layouts, dumps in three."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.doctor.subject import EngineAsked
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

LAYOUTS = ("specforge", "speculators")
SGLANG = EngineAsked(name="sglang", version="0.5.23", engine_class="llama")
VLLM = EngineAsked(name="vllm", version="0.33.0", engine_class="llama")
FITTING = {"specforge": SGLANG, "speculators": VLLM}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target's folder, texts that it wrote greedily, and all its states behind each of them."""

    folder: Path
    fingerprint: str
    ids: list[Tensor]  # each [T]
    states: list[Tensor]  # each [n + 1, T, H]
    normed: list[Tensor]  # each [T, H]
    choices: list[Tensor]  # each [T]

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
    model = LlamaForCausalLM(config).eval()
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
        choices=[],
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
                logits = model(ids[None], use_cache=False).logits[0]
            states = torch.cat([kept[k] for k in range(LAYERS + 1)])
            made.ids.append(ids)
            made.states.append(states)
            made.normed.append(model.model.norm(states[-1]))
            made.choices.append(logits.argmax(-1))
    return made


# -- drafters ------------------------------------------------------------------------------------


def draft_ids() -> Tensor:
    """The target ids of the draft vocabulary, ascending."""
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values


def layer_config() -> dict[str, Any]:
    """The decoder layer's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": LONG,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


def flat_config() -> dict[str, Any]:
    """As SpecForge writes it; its ids are outputs of layers, so they mean STATES."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(),
        "tie_word_embeddings": False,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in STATES]},
    }


def nested_config() -> dict[str, Any]:
    """As speculators writes it; its ids are inputs of layers, so they are STATES."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(STATES),
        "speculators_config": {"verifier": {"name_or_path": "target"}},
    }


class Random:
    """Weights as training leaves them: small matrices, norms near one; in bf16 as they are saved."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=self.generator)).bfloat16()

    def norm(self, width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=self.generator)).bfloat16()


def block(random: Random, prefix: str, inputs: int, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    """The tensors of one decoder layer whose attention sees `inputs` numbers."""
    return {
        f"{prefix}input_layernorm.weight": random.norm(WIDTH),
        f"{prefix}self_attn.q_proj.weight": random.matrix(HEADS * head_dim, inputs),
        f"{prefix}self_attn.k_proj.weight": random.matrix(KV_HEADS * head_dim, inputs),
        f"{prefix}self_attn.v_proj.weight": random.matrix(KV_HEADS * head_dim, inputs),
        f"{prefix}self_attn.o_proj.weight": random.matrix(WIDTH, HEADS * head_dim),
        f"{prefix}post_attention_layernorm.weight": random.norm(WIDTH),
        f"{prefix}mlp.gate_proj.weight": random.matrix(WIDE, WIDTH),
        f"{prefix}mlp.up_proj.weight": random.matrix(WIDE, WIDTH),
        f"{prefix}mlp.down_proj.weight": random.matrix(WIDTH, WIDE),
    }


def drafter_tensors(layout: str, table: Tensor, *, head_dim: int = HEAD_DIM) -> dict[str, Tensor]:
    """The tensors of a drafter of one layer; speculators keeps the target's embedding in the file."""
    random = Random()
    first = "midlayer." if layout == "specforge" else "layers.0."
    ids = draft_ids()
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    tensors = {
        "fc.weight": random.matrix(WIDTH, len(STATES) * WIDTH),
        f"{first}hidden_norm.weight": random.norm(WIDTH),
        **block(random, first, 2 * WIDTH, head_dim),
        "norm.weight": random.norm(WIDTH),
        "lm_head.weight": random.matrix(DRAFT_VOCAB, WIDTH),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": mask,
    }
    if layout == "speculators":
        tensors["embed_tokens.weight"] = table.bfloat16()
    return tensors


Config, Tensors = dict[str, Any], dict[str, Tensor]


def layer_block(config: Config) -> Config:
    """Where a layout keeps the decoder layer's keys."""
    inner: Config = config.get("transformer_layer_config", config)
    return inner


def with_fc_norm(config: Config, tensors: Tensors) -> None:
    config["fc_norm"] = True
    random = Random(7)
    tensors |= {f"fc_norm.{i}.weight": random.norm(WIDTH) for i in range(len(STATES))}


def with_input_norm(config: Config, tensors: Tensors) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = Random(8).norm(len(STATES) * WIDTH)


def with_second_layer(config: Config, tensors: Tensors) -> None:
    layer_block(config)["num_hidden_layers"] = 2
    tensors |= block(Random(9), "layers.1.", WIDTH)


def with_biases(config: Config, tensors: Tensors) -> None:
    layer_block(config)["attention_bias"] = True
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".self_attn." in n]:
        bias = name.removesuffix("weight") + "bias"
        tensors[bias] = Random(10).matrix(len(tensors[name]))


def of_qwen3(config: Config, tensors: Tensors) -> None:
    layer_block(config)["model_type"] = "qwen3"
    if layer_block(config) is config:
        config["architectures"] = ["Eagle3Qwen3ForCausalLM"]
    for name in [n for n in tensors if n.endswith("q_proj.weight")]:
        for part in "qk":
            norm = name.replace("q_proj", f"{part}_norm")
            tensors[norm] = Random(11).norm(HEAD_DIM)


def with_wide_heads(config: Config, tensors: Tensors) -> None:
    layer_block(config)["head_dim"] = 2 * HEAD_DIM
    layout = "speculators" if "transformer_layer_config" in config else "specforge"
    wide = drafter_tensors(layout, torch.zeros(VOCAB, WIDTH), head_dim=2 * HEAD_DIM)
    tensors |= {name: wide[name] for name in tensors if ".self_attn." in name}


def renamed(config: Config, tensors: Tensors) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def for_vllm(config: Config, tensors: Tensors) -> None:
    """A flat config with its ids where vLLM looks, in vLLM's meaning."""
    if "eagle_config" in config:
        config["eagle_aux_hidden_state_layer_ids"] = list(STATES)
        del config["eagle_config"]


def of_whole_vocabulary(config: Config, tensors: Tensors) -> None:
    config["draft_vocab_size"] = VOCAB
    tensors["lm_head.weight"] = Random(13).matrix(VOCAB, WIDTH)
    del tensors["d2t"], tensors["t2d"]


def without_mask(config: Config, tensors: Tensors) -> None:
    """As ModelOpt writes it: no t2d, and the map in order of frequency."""
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(4))
    tensors["d2t"] = draft_ids()[order] - torch.arange(DRAFT_VOCAB)
    del tensors["t2d"]


def of_a_block(config: Config, tensors: Tensors) -> None:
    """Neighbouring ids, whose offsets are all the same round number."""
    tensors["d2t"] = torch.full((DRAFT_VOCAB,), 512)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][512 : 512 + DRAFT_VOCAB] = True


def with_frequencies(config: Config, tensors: Tensors) -> None:
    """The rotary table that old trainers keep in the file."""
    first = next(name for name in tensors if name.endswith("q_proj.weight"))
    table = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors[first.replace("q_proj.weight", "rotary_emb.inv_freq")] = table.bfloat16()


def with_untrained_norms(config: Config, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensors[name] = torch.ones_like(tensor)


Change = Callable[[Config, Tensors], None]
VARIANTS: dict[str, tuple[Change, ...]] = {
    "plain": (),
    "for vLLM": (for_vllm,),
    "fc_norm": (with_fc_norm,),
    "norm_before_fc": (with_input_norm,),
    "layers.0": (renamed,),
    "two layers": (with_second_layer, for_vllm),
    "attention_bias": (with_biases, for_vllm),
    "qwen3": (of_qwen3, for_vllm),
    "wide heads": (with_wide_heads,),
    "whole vocabulary": (of_whole_vocabulary,),
    "no t2d": (without_mask,),
    "block of ids": (of_a_block,),
    "rotary table": (with_frequencies,),
    "norms of one": (with_untrained_norms,),
}


def engine_of(layout: str, variant: str) -> EngineAsked:
    """An engine that serves this variant of a layout as it was trained."""
    return VLLM if for_vllm in VARIANTS[variant] else FITTING[layout]


def write_drafter(folder: Path, layout: str, target: Target, variant: str = "plain") -> Path:
    """A sound checkpoint folder."""
    config = flat_config() if layout == "specforge" else nested_config()
    tensors = drafter_tensors(layout, target.embedding)
    for change in VARIANTS[variant]:
        change(config, tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / TEMPLATE).write_bytes((target.folder / TEMPLATE).read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# -- dumps ---------------------------------------------------------------------------------------

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

"""What is taken from a target: found by name, read where it lies, and used as the target uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Qwen3NextConfig,
)

from eagle3.errors import BadInput
from eagle3.target import ONE_PLUS, load_target_parts
from tests.eagle3.small import write_tensors

TABLE = torch.arange(12.0).view(4, 3)
NAME = "model.embed_tokens.weight"


def write_target(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"num_hidden_layers": 5, "rms_norm_eps": 1e-6, **config}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_the_targets_embedding_is_found_by_its_name(tmp_path: Path, sharded: bool) -> None:
    tensors = {NAME: TABLE, "model.norm.weight": torch.ones(3)}
    write_target(tmp_path, tensors)
    if sharded:
        (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "b.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = load_target_parts(tmp_path)
    assert (parts.num_layers, parts.vocab, parts.hidden) == (5, 4, 3)
    assert torch.equal(parts.embedding, TABLE)


def test_a_target_without_embedding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 5}')
    with pytest.raises(BadInput, match=r"holds no weights: expected model\.safetensors"):
        load_target_parts(tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"model.norm.weight": torch.ones(3)})
    with pytest.raises(BadInput, match=r"holds no tensor named \*\.embed_tokens\.weight"):
        load_target_parts(tmp_path)


def test_the_language_model_of_a_multimodal_target_is_meant(tmp_path: Path) -> None:
    base = "language_model.model."
    tensors = {
        f"{base}embed_tokens.weight": TABLE,
        f"{base}norm.weight": torch.full((3,), 2.0),
        "vision_tower.norm.weight": torch.full((3,), 9.0),
        "language_model.lm_head.weight": TABLE.flip(0).contiguous(),
    }
    text = {"num_hidden_layers": 7, "rms_norm_eps": 1e-5, "model_type": "kimi_k2"}
    parts = load_target_parts(write_target(tmp_path, tensors, text_config=text))
    norm = parts.final_norm()
    assert parts.num_layers == 7
    assert norm.weight.tolist() == [2.0, 2.0, 2.0]
    assert (norm.eps, norm.one_plus) == (1e-5, False)
    assert torch.equal(parts.head(), TABLE.flip(0))
    assert torch.equal(parts.rows("head", torch.tensor([3, 0])), TABLE[[0, 3]])
    assert torch.equal(parts.rows("embedding", torch.tensor([1])), TABLE[[1]])
    with pytest.raises(BadInput, match="no table named 'tail'"):
        parts.rows("tail", torch.tensor([0]))


BESIDE = {"mtp.lm_head.weight": TABLE + 7, "mtp.norm.weight": torch.full((3,), 9.0)}


@pytest.mark.parametrize(
    ("base", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.", "model.language_model.lm_head.weight"),
    ],
)
def test_the_head_is_the_embeddings_models_own(tmp_path: Path, base: str, head: str) -> None:
    tensors = {f"{base}embed_tokens.weight": TABLE, head: TABLE.flip(0).contiguous(), **BESIDE}
    assert torch.equal(load_target_parts(write_target(tmp_path, tensors)).head(), TABLE.flip(0))


def test_a_tied_target_has_its_embedding_and_no_other_models_head(tmp_path: Path) -> None:
    parts = load_target_parts(
        write_target(tmp_path, {NAME: TABLE, **BESIDE}, tie_word_embeddings=True)
    )
    assert torch.equal(parts.head(), TABLE)


def test_a_language_model_without_a_type_is_of_the_outer_kind(tmp_path: Path) -> None:
    base = "language_model.model."
    tensors = {f"{base}embed_tokens.weight": TABLE, f"{base}norm.weight": torch.zeros(3)}
    text = {"num_hidden_layers": 7, "rms_norm_eps": 1e-6}
    for inner in (text, {**text, "model_type": None}):
        parts = load_target_parts(
            write_target(tmp_path, tensors, model_type="gemma3", text_config=inner)
        )
        assert parts.final_norm().one_plus
        assert torch.equal(parts.head(), TABLE)  # tied, as Gemma's are by default
    llama = {**text, "model_type": "llama"}
    write_target(tmp_path, tensors, model_type="gemma3", text_config=llama)
    assert not load_target_parts(tmp_path).final_norm().one_plus


def test_every_outer_type_of_a_one_plus_language_model_is_known() -> None:
    for name in CONFIG_MAPPING:
        text = (getattr(CONFIG_MAPPING[name], "sub_configs", None) or {}).get("text_config")
        if getattr(text, "model_type", None) in ONE_PLUS:
            assert name in ONE_PLUS


def test_a_config_that_leaves_its_norm_to_a_default_is_refused_only_for_the_norm(
    tmp_path: Path,
) -> None:
    tensors = {NAME: TABLE, "model.norm.weight": torch.ones(3), "lm_head.weight": TABLE + 1}
    text = {"num_hidden_layers": 7}
    write_target(tmp_path, tensors, rms_norm_eps=None, text_config=text)
    parts = load_target_parts(tmp_path)
    assert torch.equal(parts.head(), TABLE + 1)
    with pytest.raises(BadInput, match="states no rms_norm_eps above zero"):
        parts.final_norm()


def test_a_cap_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tensors = {NAME: TABLE, "lm_head.weight": TABLE + 1}
    parts = load_target_parts(write_target(tmp_path, tensors, final_logit_softcapping="x"))
    with pytest.raises(BadInput, match="final_logit_softcapping' must be a positive number"):
        parts.logits(torch.ones(1, 3), normed=True)


def test_tables_lie_in_the_file_and_not_in_memory(tmp_path: Path) -> None:
    table = torch.zeros(4000, 256, dtype=torch.bfloat16)
    table[17] = 1
    tensors = {NAME: table, "lm_head.weight": table.clone(), "model.norm.weight": torch.ones(256)}
    parts = load_target_parts(write_target(tmp_path, tensors))
    assert parts.embedding.dtype is parts.head().dtype is torch.bfloat16
    mapped = mapped_ranges(tmp_path / "model.safetensors")
    for tensor in (parts.embedding, parts.head()):
        assert any(start <= tensor.data_ptr() < end for start, end in mapped)
    assert parts.rows("head", torch.tensor([17])).dtype is torch.float32


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Where a file is mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
NEXT = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        Gemma2Config(**SMALL, final_logit_softcapping=3.0),
        Qwen3NextConfig(**SMALL, **NEXT),
    ],
    ids=["llama", "llama-tied", "gemma2-tied-1+w-capped", "qwen3-next-1+w"],
)
def test_norm_and_head_give_the_targets_own_logits(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        h = torch.randn(5, 16) * 3
        normed = model.model.norm(h)
        want = model.lm_head(normed)
        if cap := getattr(config, "final_logit_softcapping", None):
            want = torch.tanh(want / cap) * cap
    parts = load_target_parts(tmp_path)
    assert parts.final_norm().one_plus == (config.model_type in ONE_PLUS)
    torch.testing.assert_close(parts.logits(h, normed=False), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.logits(normed, normed=True), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({}, {}, r"holds no lm_head\.weight, and its config\.json does not tie it"),
        ({"lm_head.weight": TABLE[:3].clone()}, {}, r"lm_head\.weight is \[3, 3\], but the embed"),
        ({"lm_head.weight": TABLE.clone()}, {"logit_scale": 0.1}, "sets logit_scale"),
        ({"lm_head.weight": TABLE.to(torch.int8)}, {}, "holds torch.int8; quantised tables"),
    ],
)
def test_a_head_that_cannot_be_used_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], words: str
) -> None:
    parts = load_target_parts(write_target(tmp_path, {NAME: TABLE.clone(), **tensors}, **config))
    with pytest.raises(BadInput, match=words):
        parts.head()


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({}, {}, r"holds no model\.norm\.weight"),
        (
            {"model.norm.weight": torch.ones(3)},
            {"rms_norm_eps": None},
            r"config\.json states no rms_norm_eps above zero .* \(it has None\); write the one that",
        ),
        ({"model.norm.weight": torch.ones(3)}, {"rms_norm_eps": "x"}, r"\(it has 'x'\)"),
        (
            {"model.norm.weight": torch.ones(3), "model.norm.bias": torch.ones(3)},
            {},
            r"is no RMSNorm \(model\.norm\.weight, model\.norm\.bias",
        ),
        ({"model.norm.weight": torch.ones(4)}, {}, r"is \[4\], expected \[3\]"),
    ],
)
def test_a_final_norm_that_cannot_be_used_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], words: str
) -> None:
    parts = load_target_parts(write_target(tmp_path, {NAME: TABLE.clone(), **tensors}, **config))
    with pytest.raises(BadInput, match=words):
        parts.final_norm()

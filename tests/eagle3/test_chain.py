"""Draft chains, held against a plain decoding loop with a growing cache, as an engine runs one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3 import chain
from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.errors import BadInput
from eagle3.model import Drafter
from eagle3.wiring import D2T, DecoderLayer
from tests.eagle3.small import SHAPE, random_drafter


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + SHAPE.norm_eps).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """One head [d] at a position, by complex multiplication of the halves."""
    d = len(x)
    angle = torch.tensor([position * SHAPE.rope_theta ** (-2 * i / d) for i in range(d // 2)])
    turned = torch.complex(x[: d // 2], x[d // 2 :]) * torch.polar(torch.ones(d // 2), angle)
    return torch.cat([turned.real, turned.imag])


class PlainEngine:
    """One row at a time, one head at a time, keys and values in lists."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        self.w = drafter.state_dict()
        self.embedding = embedding
        self.cache: list[tuple[list[Tensor], list[Tensor]]] = []

    def row(self, g: Tensor, token: int, position: int) -> tuple[Tensor, int]:
        """Feed one row; returns y and the draft id."""
        w = self.w
        z = torch.cat(
            [
                rms(self.embedding[token], w["midlayer.input_layernorm.weight"]),
                rms(g, w["midlayer.hidden_norm.weight"]),
            ]
        )
        q, k, v = (
            (w[f"midlayer.self_attn.{name}_proj.weight"] @ z).split(SHAPE.head_dim)
            for name in "qkv"
        )
        self.cache.append(([rotated(x, position) for x in k], list(v)))
        heads = []
        for h, query in enumerate(q):
            group = h // (SHAPE.heads // SHAPE.kv_heads)
            turned = rotated(query, position)
            scores = torch.stack([turned @ keys[group] for keys, _ in self.cache])
            weights = (scores / math.sqrt(SHAPE.head_dim)).softmax(0)
            heads.append(
                sum(p * values[group] for p, (_, values) in zip(weights, self.cache, strict=True))
            )
        r = g + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
        m = rms(r, w["midlayer.post_attention_layernorm.weight"])
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ m, w["midlayer.mlp.up_proj.weight"] @ m
        y = r + w["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return y, int((w["lm_head.weight"] @ rms(y, w["norm.weight"])).argmax())

    def draft(self, ids: Tensor, aux: Tensor, t: int, steps: int, to_target: Tensor) -> list[int]:
        """A chain behind position t, from an empty cache."""
        self.cache = []
        for i in range(t + 1):
            y, draft_id = self.row(self.w["fc.weight"] @ aux[i], int(ids[i + 1]), i)
        drafted = [int(to_target[draft_id])]
        for step in range(1, steps):
            y, draft_id = self.row(y, drafted[-1], t + step)
            drafted.append(int(to_target[draft_id]))
        return drafted


@pytest.mark.parametrize("rows_at_once", [512, 3])
@pytest.mark.parametrize("seed", range(3))
def test_chains_of_all_rows_equal_a_plain_decoding_loop(
    seed: int, rows_at_once: int, embedding: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", rows_at_once)
    drafter = random_drafter(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE.vocab, (12,), generator=generator)
    aux = torch.randn(12, 3 * SHAPE.target_hidden, generator=generator)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.tensor([2, 3, 4, 7, 8, 10])
    drafted = draft_chains(drafter, embedding, ids, aux, rows, steps=4, to_target=to_target)
    engine = PlainEngine(drafter, embedding)
    for row, t in enumerate(rows.tolist()):
        assert drafted[row].tolist() == engine.draft(ids, aux, t, 4, to_target), f"row {t}"


def test_without_the_decoder_layer_no_token_enters(drafter: Drafter, embedding: Tensor) -> None:
    ids = torch.arange(8)
    aux = torch.randn(8, 3 * SHAPE.target_hidden, generator=torch.Generator().manual_seed(1))
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.tensor([3, 4])
    drafted = draft_chains(
        drafter,
        embedding,
        ids,
        aux,
        rows,
        steps=3,
        to_target=to_target,
        decoder_layer=DecoderLayer.skipped,
    )
    w = drafter.state_dict()
    for row, t in enumerate(rows.tolist()):
        y = rms(w["fc.weight"] @ aux[t], w["norm.weight"])
        assert drafted[row].tolist() == [int(to_target[(w["lm_head.weight"] @ y).argmax()])] * 3


@given(st.sets(st.integers(0, 99), min_size=1, max_size=40))
@settings(max_examples=50)
def test_d2t_offsets_of_any_vocabulary_lead_back_to_it(chosen: set[int]) -> None:
    selected = torch.tensor(sorted(chosen))
    offsets = selected - torch.arange(len(selected))
    assert draft_to_target_ids(offsets, D2T.offset, 100).tolist() == sorted(chosen)
    assert draft_to_target_ids(selected, D2T.absolute, 100).tolist() == sorted(chosen)
    assert draft_to_target_ids(offsets, D2T.identity, 100).tolist() == list(range(len(chosen)))


def test_the_public_example_of_a_misread_table() -> None:
    offsets, vocab = torch.tensor([3, 4, 7, 17]), 30
    assert draft_to_target_ids(offsets, D2T.offset, vocab).tolist() == [3, 5, 9, 20]
    assert draft_to_target_ids(offsets, D2T.absolute, vocab).tolist() == [3, 4, 7, 17]
    absolute = torch.tensor([3, 5, 9, 20])
    assert draft_to_target_ids(absolute, D2T.offset, vocab).tolist() == [3, 6, 11, 23]


def test_a_reading_that_leaves_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadInput, match=r"maps draft id 3 to 23, outside .* vocabulary of 22"):
        draft_to_target_ids(torch.tensor([3, 5, 9, 20]), D2T.offset, 22)

"""Draft chains, held against a plain decoding loop with a growing cache, as an engine runs one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3 import chain
from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.model import Drafter, DrafterShape
from eagle3.wiring import D2T, DecoderLayer, InputNorms, Token
from tests.eagle3.small import SHAPE, random_drafter


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + SHAPE.norm_eps).sqrt() * weight


def rotated(x: Tensor, position: int, interleaved: bool = False) -> Tensor:
    """One head [d] at a position, by complex multiplication of its pairs."""
    d = len(x)
    angle = torch.tensor([position * SHAPE.rope.theta ** (-2 * i / d) for i in range(d // 2)])
    pairs = (x[::2], x[1::2]) if interleaved else (x[: d // 2], x[d // 2 :])
    turned = torch.complex(*pairs) * torch.polar(torch.ones(d // 2), angle)
    # Scores of queries and keys do not mind in which order their numbers lie.
    return torch.cat([turned.real, turned.imag])


class PlainEngine:
    """One row at a time, one head at a time, keys and values in lists."""

    def __init__(self, drafter: Drafter, embedding: Tensor) -> None:
        self.w = drafter.state_dict()
        self.shape = drafter.shape
        self.embedding = embedding
        self.cache: list[list[tuple[list[Tensor], list[Tensor]]]] = []

    def block(self, layer: int, z: Tensor, residual: Tensor, position: int) -> Tensor:
        """What stands behind a layer's input norms."""
        name = f"layers.{layer}" if layer else "midlayer"
        w = {key.removeprefix(f"{name}."): value for key, value in self.w.items()}
        q, k, v = ((w[f"self_attn.{part}_proj.weight"] @ z).split(SHAPE.head_dim) for part in "qkv")
        pairs = self.shape.interleaved
        self.cache[layer].append(([rotated(x, position, pairs) for x in k], list(v)))
        window = self.shape.windows[layer] if self.shape.windows else None
        cache = self.cache[layer] if window is None else self.cache[layer][-window:]
        heads = []
        for h, query in enumerate(q):
            group = h // (SHAPE.heads // SHAPE.kv_heads)
            turned = rotated(query, position, pairs)
            scores = torch.stack([turned @ keys[group] for keys, _ in cache])
            weights = (scores / math.sqrt(SHAPE.head_dim)).softmax(0)
            heads.append(
                sum(p * values[group] for p, (_, values) in zip(weights, cache, strict=True))
            )
        r = residual + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        m = rms(r, w["post_attention_layernorm.weight"])
        gate, up = w["mlp.gate_proj.weight"] @ m, w["mlp.up_proj.weight"] @ m
        return r + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def row(self, g: Tensor, token: int, position: int) -> tuple[Tensor, int]:
        """Feed one row; returns what the next step takes, and the draft id."""
        w = self.w
        of_embedding, of_hidden = (
            w[f"midlayer.{name}.weight"] for name in ("input_layernorm", "hidden_norm")
        )
        if self.shape.input_norms is InputNorms.swapped:
            of_embedding, of_hidden = of_hidden, of_embedding
        normed = rms(g, of_hidden)
        residual = normed if self.shape.norm_before_residual else g
        if self.shape.input_norms is InputNorms.double:
            normed = rms(rms(g, of_embedding), of_hidden)
        seen = [rms(self.embedding[token], of_embedding), normed]
        if self.shape.hidden_first:
            seen.reverse()
        y = self.block(0, torch.cat(seen), residual, position)
        for layer in range(1, self.shape.num_layers):
            name = f"layers.{layer}.input_layernorm.weight"
            y = self.block(layer, rms(y, w.get(name, torch.ones(SHAPE.hidden))), y, position)
        out = rms(y, w["norm.weight"])
        fed = out if self.shape.feedback_normed else y
        return fed, int((w["lm_head.weight"] @ out).argmax())

    def draft(
        self, ids: Tensor, aux: Tensor, t: int, steps: int, to_target: Tensor, beside: int = 1
    ) -> list[int]:
        """A chain behind position t, from an empty cache; x[i + beside] stands beside state i."""
        self.cache = [[] for _ in range(self.shape.num_layers)]
        for i in range(t + 1):
            y, draft_id = self.row(self.w["fc.weight"] @ aux[i], int(ids[i + beside]), i)
        drafted = [int(to_target[draft_id])]
        for step in range(1, steps):
            y, draft_id = self.row(y, drafted[-1], t if self.shape.standing else t + step)
            drafted.append(int(to_target[draft_id]))
        return drafted


def text(seed: int) -> tuple[Tensor, Tensor]:
    """12 ids and their aux states."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE.vocab, (12,), generator=generator)
    return ids, torch.randn(12, 3 * SHAPE.target_hidden, generator=generator)


# Windows narrower than the chain and than the text, and one that only the text is longer than.
NARROW = replace(SHAPE, num_layers=2, windows=(2, None))
WIDE = replace(SHAPE, num_layers=2, windows=(5, 3))
SWITCHED = replace(SHAPE, num_layers=2, norm_before_residual=True, feedback_normed=True)
STANDING = replace(SHAPE, standing=True)
TURNED = replace(SHAPE, num_layers=2, interleaved=True, hidden_first=True, deeper_norm=False)
SWAPPED = replace(SHAPE, input_norms=InputNorms.swapped)
SWAPPED_RESIDUAL = replace(SWAPPED, norm_before_residual=True, standing=True, interleaved=True)
DOUBLE = replace(SHAPE, input_norms=InputNorms.double)
DOUBLE_RESIDUAL = replace(DOUBLE, norm_before_residual=True, hidden_first=True)


@pytest.mark.parametrize("rows_at_once", [512, 3])
@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (0, SHAPE),
        (1, SHAPE),
        (2, SHAPE),
        (3, SWITCHED),
        (4, SWITCHED),
        (5, NARROW),
        (6, NARROW),
        (7, WIDE),
        (8, WIDE),
        (9, STANDING),
        (10, replace(WIDE, standing=True)),
        (11, TURNED),
        (12, SWAPPED),
        (13, SWAPPED_RESIDUAL),
        (14, DOUBLE),
        (15, DOUBLE_RESIDUAL),
    ],
)
def test_chains_of_all_rows_equal_a_plain_decoding_loop(
    seed: int,
    shape: DrafterShape,
    rows_at_once: int,
    embedding: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chain, "ROWS_AT_ONCE", rows_at_once)
    drafter = random_drafter(seed, shape)
    ids, aux = text(seed)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.tensor([2, 3, 4, 7, 8, 10])
    drafted = draft_chains(drafter, embedding, ids, aux, rows, steps=4, to_target=to_target)
    engine = PlainEngine(drafter, embedding)
    for row, t in enumerate(rows.tolist()):
        assert drafted[row].tolist() == engine.draft(ids, aux, t, 4, to_target), f"row {t}"


@pytest.mark.parametrize(("token", "beside"), [(Token.same, 0), (Token.after_next, 2)])
def test_another_token_beside_the_states_is_fed_and_the_served_one_asked_for(
    token: Token, beside: int, embedding: Tensor
) -> None:
    """The chain still begins at position t+2, whatever token its first step is fed."""
    drafter = random_drafter(16)
    ids, aux = text(16)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.tensor([2, 5, 9])
    drafted = draft_chains(
        drafter, embedding, ids, aux, rows, steps=4, to_target=to_target, token=token
    )
    engine = PlainEngine(drafter, embedding)
    for row, t in enumerate(rows.tolist()):
        plain = engine.draft(ids, aux, t, 4, to_target, beside)
        assert drafted[row].tolist() == plain, f"row {t}"
    usual = draft_chains(drafter, embedding, ids, aux, rows, steps=4, to_target=to_target)
    assert not torch.equal(drafted, usual)


def test_a_token_behind_the_text_is_refused(drafter: Drafter, embedding: Tensor) -> None:
    ids, aux = text(0)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    given = (drafter, embedding, ids, aux)
    for token, last in ((Token.same, 11), (Token.next, 10), (Token.after_next, 9)):
        ok = draft_chains(*given, torch.arange(last + 1), steps=2, to_target=to_target, token=token)
        assert len(ok) == last + 1
    with pytest.raises(
        BadInput, match=r"row 10 is paired with token 12 \(wiring\.token=after_next"
    ):
        draft_chains(*given, torch.arange(11), steps=2, to_target=to_target, token=Token.after_next)


DYNAMIC = Rope(
    theta=500.0, kind="dynamic", scaling=(("factor", 4.0), ("max_position_embeddings", 24))
)


def test_a_chain_depends_neither_on_later_text_nor_on_how_many_are_drafted_at_once(
    embedding: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(3, replace(SHAPE, rope=DYNAMIC))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(SHAPE.vocab, (48,), generator=generator)
    aux = torch.randn(48, 3 * SHAPE.target_hidden, generator=generator)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)

    def chains(last: int, at_once: int) -> list[list[int]]:
        monkeypatch.setattr(chain, "ROWS_AT_ONCE", at_once)
        rows = torch.arange(last)
        given = (embedding, ids[: last + 1], aux[: last + 1], rows)
        return draft_chains(drafter, *given, steps=4, to_target=to_target).tolist()

    whole = chains(21, 512)  # the last stands at 20, 21, 22, 23
    assert chains(21, 4) == whole
    assert chains(9, 512) == whole[:9]
    for at_once in (512, 4):
        with pytest.raises(
            BadInput, match="but behind 24 the drafter's dynamic rope scaling depends"
        ):
            chains(40, at_once)


def test_the_targets_head_replaces_the_drafters_own(drafter: Drafter, embedding: Tensor) -> None:
    ids, aux = text(5)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.arange(2, 11)
    head = torch.randn(SHAPE.draft_vocab, SHAPE.hidden, generator=torch.Generator().manual_seed(1))

    def drafted(of: Drafter, head: Tensor | None) -> list[list[int]]:
        return draft_chains(
            of, embedding, ids, aux, rows, steps=3, to_target=to_target, head=head
        ).tolist()

    other = random_drafter()
    other.lm_head.weight.copy_(head)
    assert drafted(drafter, head) == drafted(other, None) != drafted(drafter, None)
    headless = random_drafter(0, replace(SHAPE, own_head=False))
    headless.load_state_dict({k: v for k, v in drafter.state_dict().items() if "lm_head" not in k})
    assert drafted(headless, head) == drafted(drafter, head)
    with pytest.raises(BadInput, match=r"no head of its own; set wiring\.head=target"):
        drafted(headless, None)


def test_an_embedding_may_be_narrower_than_the_drafter(drafter: Drafter, embedding: Tensor) -> None:
    ids, aux = text(6)
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    chains = [
        draft_chains(drafter, table, ids, aux, torch.arange(11), steps=3, to_target=to_target)
        for table in (embedding.bfloat16(), embedding.bfloat16().float())
    ]
    assert torch.equal(*chains)


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

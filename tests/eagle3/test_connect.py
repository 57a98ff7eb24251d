"""A drafter is tied to its target as the wiring says, or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3.chain import draft_chains
from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.connect import connect, target_rope
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.layers import LayerConvention
from eagle3.model import DrafterShape
from eagle3.rope import inverse_frequencies
from eagle3.target import TargetParts
from eagle3.tree import draft_trees
from eagle3.wiring import (
    D2T,
    SWITCHES,
    Biases,
    Concat,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Positions,
    Residual,
    RopeChoice,
    Rotation,
    Token,
    Window,
    Wiring,
)
from tests.eagle3.small import SHAPE, random_drafter, write_tensors
from tests.eagle3.wired import checkpoint_of, target_of

WIRING = Wiring(layers=(-1, 2, 4), convention=LayerConvention.output, embedding=Embedding.own)


@pytest.fixture
def target(tmp_path: Path) -> TargetParts:
    return target_of(tmp_path / "target", SHAPE.target_hidden)


@pytest.fixture
def checkpoint(drafter_folder: Path) -> DrafterCheckpoint:
    """With an embedding of its own."""
    path = drafter_folder / "model.safetensors"
    own = {"embed_tokens.weight": torch.randn(SHAPE.vocab, SHAPE.hidden)}
    write_tensors(path, {**load_file(path), **own})
    return load_drafter(drafter_folder)


def test_states_are_canonical_and_as_many_as_fc_takes(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    assert connect(checkpoint, target, WIRING).states == (0, 3, 5)
    with pytest.raises(BadInput, match="names 2 states, but the drafter's fc takes 3"):
        connect(checkpoint, target, replace(WIRING, layers=(-1, 2)))
    with pytest.raises(BadInput, match="7 decoder layers"):
        connect(checkpoint, target, replace(WIRING, layers=(-1, 2, 7)))


def test_tables_of_the_target_stand_in_only_where_they_are_as_wide(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    assert connect(checkpoint, target, WIRING).embedding is checkpoint.embedding
    with pytest.raises(BadInput, match="target's embedding is 20 wide and the drafter 24"):
        connect(checkpoint, target, replace(WIRING, embedding=Embedding.target))
    with pytest.raises(BadInput, match="target's head is 20 wide and the drafter 24"):
        connect(checkpoint, target, replace(WIRING, head=Head.target))


def test_what_the_file_lacks_is_named(drafter_folder: Path, target: TargetParts) -> None:
    bare = load_drafter(drafter_folder)
    with pytest.raises(BadInput, match=r"no embed_tokens\.weight; use wiring\.embedding=target"):
        connect(bare, target, WIRING)
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    own = {"embed_tokens.weight": torch.randn(SHAPE.vocab, SHAPE.hidden)}
    write_tensors(path, {**tensors, **own})
    with pytest.raises(BadInput, match=r"no lm_head\.weight; use wiring\.head=target"):
        connect(load_drafter(drafter_folder), target, WIRING)


def test_the_targets_head_comes_by_the_rows_of_the_draft_vocabulary(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    # A drafter as wide as its target, by the smallest change: another target of the drafter's width.
    wide = replace(checkpoint.drafter.shape, target_hidden=SHAPE.hidden)
    own = checkpoint.drafter
    as_wide = own.rewired()
    as_wide.shape = wide
    same = target_of(target.folder.parent / "wide", SHAPE.hidden)
    tied = connect(replace(checkpoint, drafter=as_wide), same, replace(WIRING, head=Head.target))
    assert tied.head is not None
    ids = torch.arange(SHAPE.draft_vocab) + own.d2t
    assert torch.equal(tied.head, same.head()[ids].float())
    read_so = connect(
        replace(checkpoint, drafter=as_wide),
        same,
        replace(WIRING, head=Head.target, d2t=D2T.identity),
    )
    assert torch.equal(read_so.to_target, torch.arange(SHAPE.draft_vocab))
    assert read_so.head is not None
    assert torch.equal(read_so.head, same.head()[: SHAPE.draft_vocab].float())


@pytest.mark.parametrize("declared", [False, True])
def test_the_residual_is_the_checkpoints_unless_the_wiring_says_otherwise(
    checkpoint: DrafterCheckpoint, target: TargetParts, declared: bool
) -> None:
    trained = replace(checkpoint, drafter=checkpoint.drafter.rewired(norm_before_residual=declared))
    found = {
        residual: connect(trained, target, replace(WIRING, residual=residual)).drafter
        for residual in Residual
    }
    assert found[Residual.declared].shape.norm_before_residual is declared
    assert found[Residual.raw].shape.norm_before_residual is False
    assert found[Residual.normed].shape.norm_before_residual is True
    g, embedded = torch.randn(1, 4, SHAPE.hidden), torch.randn(1, 4, SHAPE.hidden)
    rows = torch.arange(4)
    y = {residual: drafter.step(embedded, g, rows, []) for residual, drafter in found.items()}
    same, other = (Residual.normed, Residual.raw) if declared else (Residual.raw, Residual.normed)
    assert torch.equal(y[Residual.declared], y[same])
    assert not torch.allclose(y[Residual.declared], y[other])


def test_another_models_drafter_is_refused(checkpoint: DrafterCheckpoint, tmp_path: Path) -> None:
    other = target_of(tmp_path / "other", SHAPE.target_hidden, vocab=60)
    with pytest.raises(BadInput, match="vocabulary 50 and hidden size 20, but this target has 60"):
        connect(checkpoint, other, WIRING)


def test_windows_are_the_checkpoints_unless_the_wiring_takes_them_away(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    trained = replace(checkpoint, drafter=checkpoint.drafter.rewired(windows=(2,)))
    kept = connect(trained, target, WIRING).drafter
    without = connect(trained, target, replace(WIRING, window=Window.none)).drafter
    assert kept.shape.windows == (2,)
    assert without.shape.windows == ()
    g, embedded = torch.randn(1, 5, SHAPE.hidden), torch.randn(1, 5, SHAPE.hidden)
    rows = torch.arange(5)
    assert not torch.allclose(kept.step(embedded, g, rows, []), without.step(embedded, g, rows, []))


def test_an_own_table_that_is_left_unread_is_said(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    drafter = checkpoint.drafter.rewired()
    drafter.shape = replace(SHAPE, target_hidden=SHAPE.hidden)
    wide = target_of(target.folder.parent / "wide", SHAPE.hidden)
    theirs = replace(WIRING, embedding=Embedding.target)
    (note,) = connect(replace(checkpoint, drafter=drafter), wide, theirs).notes
    assert "left unread" in note
    same = replace(checkpoint, drafter=drafter, embedding=wide.embedding.clone())
    assert connect(same, wide, theirs).notes == ()
    assert connect(replace(checkpoint, drafter=drafter), wide, WIRING).notes == ()


YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
SCALED = Rope(
    theta=500.0,
    kind="yarn",
    scaling=tuple(sorted({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}.items())),
)
FULL = replace(
    SHAPE, num_layers=2, windows=(3, None), qk_norm=True, attention_bias=True, rope=SCALED
)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"concat": Concat.hidden_first}, {"hidden_first": True}),
        ({"input_norms": InputNorms.swapped}, {"input_norms": InputNorms.swapped}),
        ({"input_norms": InputNorms.double}, {"input_norms": InputNorms.double}),
        ({"residual": Residual.normed}, {"norm_before_residual": True}),
        ({"fc_input": FcInput.raw}, {}),
        ({"fc_input": FcInput.whole}, {"norm_before_fc": True}),
        ({"fc_input": FcInput.chunks}, {"fc_norm": True}),
        ({"head_input": HeadInput.normed}, {}),
        ({"head_input": HeadInput.raw}, {"head_norm": False}),
        ({"feedback": Feedback.normed}, {"feedback_normed": True}),
        ({"feedback": Feedback.raw}, {}),
        ({"window": Window.none}, {"windows": ()}),
        ({"rope": RopeChoice.unscaled}, {"rope": Rope(theta=500.0)}),
        ({"rope": RopeChoice.base_10000}, {"rope": Rope(theta=10_000.0)}),
        ({"rope": RopeChoice.target}, {"rope": Rope(theta=700.0)}),
        ({"rotation": Rotation.interleaved}, {"interleaved": True}),
        ({"positions": Positions.standing}, {"standing": True}),
        ({"deeper_norm": Parts.dropped}, {"deeper_norm": False}),
        ({"biases": Biases.first_dropped}, {"first_qkv_bias": False}),
        ({"biases": Biases.dropped}, {"attention_bias": False}),
        ({"qk_norm": Parts.dropped}, {"qk_norm": False}),
    ],
)
def test_a_switch_changes_the_drafter_so_and_nothing_else(
    change: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(random_drafter(0, FULL), torch.ones(SHAPE.vocab, SHAPE.hidden))
    target = target_of(tmp_path / "target", SHAPE.target_hidden, rope_theta=700.0)
    tied = connect(checkpoint, target, replace(WIRING, **change))
    assert tied.drafter.shape == replace(FULL, **wanted)
    assert checkpoint.drafter.shape == FULL
    places = {w.data_ptr() for w in checkpoint.drafter.state_dict().values()}
    new = [n for n, w in tied.drafter.state_dict().items() if w.data_ptr() not in places]
    assert all(name.startswith(("input_norm", "fc_norm")) for name in new)
    if not wanted:
        assert tied.drafter is checkpoint.drafter


def test_a_wiring_takes_away_what_is_declared(tmp_path: Path) -> None:
    shape = replace(SHAPE, norm_before_fc=True, feedback_normed=True, norm_before_residual=True)
    checkpoint = checkpoint_of(random_drafter(0, shape), torch.ones(SHAPE.vocab, SHAPE.hidden))
    target = target_of(tmp_path / "target", SHAPE.target_hidden)
    raw = replace(WIRING, fc_input=FcInput.raw, feedback=Feedback.raw, residual=Residual.raw)
    assert connect(checkpoint, target, raw).drafter.shape == SHAPE
    assert connect(checkpoint, target, WIRING).drafter is checkpoint.drafter


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt()


@pytest.mark.parametrize(
    ("fc_input", "formula"),
    [
        (FcInput.raw, lambda chunks: torch.cat(chunks, -1)),
        (FcInput.whole, lambda chunks: rms(torch.cat(chunks, -1))),
        (FcInput.chunks, lambda chunks: torch.cat([rms(chunk) for chunk in chunks], -1)),
    ],
)
def test_what_fc_sees_without_weights_for_it_by_formula(
    fc_input: FcInput,
    formula: Callable[[list[Tensor]], Tensor],
    checkpoint: DrafterCheckpoint,
    target: TargetParts,
) -> None:
    tied = connect(checkpoint, target, replace(WIRING, fc_input=fc_input))
    chunks = [torch.randn(5, SHAPE.target_hidden) * scale for scale in (1, 30, 0.1)]
    want = formula(chunks) @ checkpoint.drafter.fc.weight.T
    torch.testing.assert_close(tied.drafter.fuse(torch.cat(chunks, -1)), want)


def test_what_the_head_sees_and_what_is_fed_back_by_formula(
    checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    y = torch.randn(4, SHAPE.hidden)
    normed = rms(y) * checkpoint.drafter.norm.weight
    head = checkpoint.drafter.lm_head.weight
    for asked, seen in ((HeadInput.raw, y), (HeadInput.normed, normed)):
        tied = connect(checkpoint, target, replace(WIRING, head_input=asked))
        torch.testing.assert_close(tied.drafter.logits(y), seen @ head.T)
    for fed, wanted in ((Feedback.raw, y), (Feedback.normed, normed)):
        tied = connect(checkpoint, target, replace(WIRING, feedback=fed))
        torch.testing.assert_close(tied.drafter.feedback(y), wanted)


@pytest.mark.parametrize(
    ("shape", "change", "said"),
    [
        (SHAPE, {}, None),
        (SHAPE, {"concat": Concat.hidden_first, "residual": Residual.normed}, None),
        (SHAPE, {"fc_input": FcInput.whole}, "asks for input_norm.weight, which .* does not have"),
        (SHAPE, {"fc_input": FcInput.chunks}, "fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.w"),
        (FULL, {"qk_norm": Parts.dropped}, "q_norm.weight, .*k_norm.weight.* unread"),
        (FULL, {"biases": Biases.first_dropped}, "q_proj.bias, .*v_proj.bias of .* unread"),
        (
            FULL,
            {"deeper_norm": Parts.dropped},
            "leaves layers.1.input_layernorm.weight of .* unread",
        ),
    ],
)
def test_ones_and_unread_weights_are_said_aloud(
    shape: DrafterShape, change: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(random_drafter(0, shape), torch.ones(SHAPE.vocab, SHAPE.hidden))
    target = target_of(tmp_path / "target", SHAPE.target_hidden)
    notes = connect(checkpoint, target, replace(WIRING, **change)).notes
    if said is None:
        assert notes == ()
    else:
        (note,) = notes
        assert re.search(said, note)


@pytest.mark.parametrize("asked", [{"head_input": "normed"}, {"feedback": "normed"}])
def test_a_last_norm_that_the_file_need_not_have_is_said(
    asked: dict[str, str], tmp_path: Path
) -> None:
    """A drafter whose head sees y, and that feeds y back, has no use for norm.weight."""
    drafter = random_drafter(0, replace(SHAPE, head_norm=False))
    checkpoint = checkpoint_of(drafter, torch.ones(SHAPE.vocab, SHAPE.hidden))
    target = target_of(tmp_path / "target", SHAPE.target_hidden)
    wiring = Wiring.parse({**WIRING.plain(), **asked})
    assert connect(checkpoint, target, wiring).notes == ()  # it has one all the same
    drafter.norm.weight.fill_(1.0)
    (note,) = connect(checkpoint, target, wiring).notes
    assert "asks for norm.weight" in note
    assert connect(checkpoint, target, WIRING).notes == ()


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope(kind: str, theta: float, scaling: dict[str, Any]) -> Rope:
    return Rope(theta=theta, kind=kind, scaling=tuple(sorted(scaling.items())))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, Rope(theta=1e6)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            rope("llama3", 5e5, LLAMA3),
        ),
        (
            {
                "rope_theta": 5e4,
                "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
            },
            rope("yarn", 5e4, {"mscale": 1.0, "mscale_all_dim": 1.0, **YARN}),
        ),
        (
            {
                "rope_theta": 5e4,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "max_position_embeddings": 4096,
            },
            rope("yarn", 5e4, {"factor": 4.0, "original_max_position_embeddings": 4096}),
        ),
    ],
)
def test_the_targets_rope_is_read_from_its_config(
    config: dict[str, Any], wanted: Rope, checkpoint: DrafterCheckpoint, tmp_path: Path
) -> None:
    inner = {"num_hidden_layers": 7, "model_type": "llama", "rms_norm_eps": 1e-6}
    nested = {"text_config": {**inner, **config}}
    for folder, whole in (("flat", config), ("nested", nested)):
        target = target_of(tmp_path / folder, SHAPE.target_hidden, **whole)
        assert target_rope(target) == wanted
        tied = connect(checkpoint, target, replace(WIRING, rope=RopeChoice.target))
        assert tied.drafter.shape == replace(SHAPE, rope=wanted)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "states no rope_theta; write the one that the target was trained with"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "asks for 'longrope'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "only a part of each head is rotated"),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, "has rope_local_base_freq, so that"),
        ({"rope_theta": 1e6, "swa_rope_theta": 1e4}, "has swa_rope_theta, so that"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "states no max_position_embeddings, which 'yarn' scaling needs",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "states no max_position_embeddings, which 'dynamic' scaling needs",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_theta": 1e6},
            "rope_parameters has full_attention",
        ),
    ],
)
def test_a_target_rope_that_is_not_run_is_refused_by_name(
    config: dict[str, Any], said: str, checkpoint: DrafterCheckpoint, tmp_path: Path
) -> None:
    target = target_of(tmp_path / "other", SHAPE.target_hidden, **config)
    with pytest.raises(BadInput, match=rf"wiring\.rope=target, but .*config\.json: .*{said}"):
        connect(checkpoint, target, replace(WIRING, rope=RopeChoice.target))
    connect(checkpoint, target, WIRING)  # nobody asked for it


def test_without_mscale_yarns_factor_is_that_of_its_own_length(tmp_path: Path) -> None:
    """SGLang up to 0.5.15: the same frequencies, cos and sin times 0.1 ln(factor) + 1."""
    checkpoint = checkpoint_of(random_drafter(0, FULL), torch.ones(SHAPE.vocab, SHAPE.hidden))
    target = target_of(tmp_path / "target", SHAPE.target_hidden)
    tied = connect(checkpoint, target, replace(WIRING, rope=RopeChoice.no_mscale))
    trained, factor = inverse_frequencies(SCALED, SHAPE.head_dim)
    served, own = inverse_frequencies(tied.drafter.shape.rope, SHAPE.head_dim)
    assert torch.equal(trained, served)
    assert factor == 1.0
    assert own == pytest.approx(0.1 * math.log(8.0) + 1)


@pytest.mark.parametrize("token", Token)
def test_chains_and_trees_are_drafted_as_the_wiring_says(
    token: Token, checkpoint: DrafterCheckpoint, target: TargetParts
) -> None:
    tied = connect(checkpoint, target, replace(WIRING, token=token, concat=Concat.hidden_first))
    assert tied.token is token
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SHAPE.vocab, (12,), generator=generator)
    aux = torch.randn(12, 3 * SHAPE.target_hidden, generator=generator)
    rows = torch.arange(2, 10)
    given = (tied.drafter, tied.embedding, ids, aux, rows)
    chains = draft_chains(*given, steps=3, to_target=tied.to_target, token=token)
    assert torch.equal(tied.chains(ids, aux, rows, steps=3), chains)
    sizes = {"steps": 3, "topk": 2, "draft_tokens": 5}
    trees = draft_trees(*given, to_target=tied.to_target, token=token, **sizes)
    assert torch.equal(tied.trees(ids, aux, rows, **sizes).tokens, trees.tokens)


def test_every_switch_has_a_test_of_where_it_goes() -> None:
    """Those that do not end up in the drafter's shape are d2t, the layer, the tables and the token."""
    in_shape = {
        name
        for mark in test_a_switch_changes_the_drafter_so_and_nothing_else.pytestmark
        for change, _ in mark.args[1]
        for name in change
    }
    assert set(SWITCHES) - in_shape == {"d2t", "decoder_layer", "embedding", "head", "token"}


def test_the_vocabulary_is_what_the_reading_names_where_no_t2d_says(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", SHAPE.target_hidden)
    own = checkpoint_of(random_drafter(0, SHAPE), torch.ones(SHAPE.vocab, SHAPE.hidden))
    derived = replace(own, own_t2d=False)
    for d2t in (D2T.offset, D2T.identity):
        wiring = Wiring.of_states((0, 2, 5), d2t=d2t, embedding=Embedding.own)
        assert torch.equal(connect(own, target, wiring).vocabulary, own.drafter.t2d)
        tied = connect(derived, target, wiring)
        named = torch.arange(SHAPE.draft_vocab)
        if d2t is D2T.offset:
            named = named + own.drafter.d2t
        assert tied.vocabulary.nonzero().flatten().tolist() == sorted(named.tolist())

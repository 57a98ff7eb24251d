"""A drafter is tied to its target as the wiring says, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.connect import connect
from eagle3.errors import BadInput
from eagle3.layers import LayerConvention
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import D2T, Embedding, Head, Residual, Window, Wiring
from tests.eagle3.small import SHAPE, write_tensors

WIRING = Wiring(layers=(-1, 2, 4), convention=LayerConvention.output, embedding=Embedding.own)


def target_of(folder: Path, hidden: int, vocab: int = SHAPE.vocab) -> TargetParts:
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 7, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(vocab, hidden),
    }
    write_tensors(folder / "model.safetensors", tensors)
    return load_target_parts(folder)


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

"""Properties of the drafter that its cache's users build on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.model import Cache, Drafter, DrafterShape, KeysValues
from eagle3.trainer_metrics.rollout import forced_rollout
from tests.eagle3.small import SHAPE, random_drafter

LENGTH = 9
SHAPES = {
    "reference": SHAPE,
    "two-layers": replace(SHAPE, num_layers=2, qk_norm=True, attention_bias=True),
    "window": replace(SHAPE, num_layers=2, windows=(3, None)),
    "feedback": replace(SHAPE, feedback_normed=True, norm_before_residual=True),
}


def inputs(steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What each step embeds [steps, 1, T, H_d], and the aux states [T, A·H]."""
    generator = torch.Generator().manual_seed(seed)
    embedded = torch.randn(steps, 1, LENGTH, SHAPE.hidden, generator=generator)
    return embedded, torch.randn(LENGTH, 3 * SHAPE.target_hidden, generator=generator)


def run(drafter: Drafter, embedded: Tensor, aux: Tensor, cache: Cache) -> list[Tensor]:
    """y of every step, all rows fed."""
    g = drafter.fuse(aux)[None]
    out = []
    for step in embedded:
        out.append(drafter.step(step, g, torch.arange(LENGTH), cache))
        g = drafter.feedback(out[-1])
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_deeper_steps_of_gathered_rows_are_those_of_all_rows(shape: DrafterShape) -> None:
    drafter = random_drafter(1, shape)
    embedded, aux = inputs(4)
    all_rows = run(drafter, embedded, aux, [])
    rows = torch.tensor([1, 4, 4, 7])  # a row may stand twice, as a tree's beams do
    cache: Cache = []
    first = run(drafter, embedded[:1], aux, cache)[0]
    y = first[:, rows]
    for step in range(1, 4):
        y = drafter.step(embedded[step][:, rows], drafter.feedback(y), rows, cache)
        torch.testing.assert_close(y, all_rows[step][:, rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_entries_of_deeper_steps_may_be_gathered_with_their_rows(shape: DrafterShape) -> None:
    drafter = random_drafter(2, shape)
    embedded, aux = inputs(3)
    want = run(drafter, embedded, aux, [])[2]
    cache: Cache = []
    fed = drafter.feedback(run(drafter, embedded[:2], aux, cache)[1])
    assert [len(step) for step in cache] == [shape.num_layers] * 2
    kept = torch.tensor([6, 2])
    beams = [cache[0], [(k[:, :, kept], v[:, :, kept]) for k, v in cache[1]]]
    y = drafter.step(embedded[2][:, kept], fed[:, kept], kept, beams)
    torch.testing.assert_close(y, want[:, kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_sees_nothing_behind_itself(shape: DrafterShape) -> None:
    drafter = random_drafter(3, shape)
    embedded, aux = inputs(3)
    before = run(drafter, embedded, aux, [])
    embedded[:, :, 5:], aux[5:] = 7.0, -7.0
    after = run(drafter, embedded, aux, [])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :5], b[:, :5])
        assert not torch.equal(a[:, 5:], b[:, 5:])


def test_a_window_ends_what_a_row_sees() -> None:
    drafter = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(2)
    before = run(drafter, embedded, aux, [])
    embedded[0, :, :4], aux[:4] = 7.0, -7.0
    after = run(drafter, embedded, aux, [])
    assert torch.equal(before[0][:, 6:], after[0][:, 6:])  # rows 6.. see 4.. at most
    assert torch.equal(before[1][:, 6:], after[1][:, 6:])
    assert not torch.equal(before[0][:, 5], after[0][:, 5])


@pytest.mark.parametrize("from_row", [False, True])
def test_a_window_moves_with_the_position_or_stays_at_the_row(from_row: bool) -> None:
    """Row 6 with a window of 3 sees keys 4, 5, 6; a step on it sees 5, 6 and its own, or all four."""
    drafter = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(2)
    row, y = torch.tensor([6]), torch.ones(1, 1, SHAPE.hidden)

    def deeper(keys_values: KeysValues) -> Tensor:
        fed, cache = embedded[1][:, row], [[keys_values]]
        return drafter.step(fed, y, row, cache, window_from_row=from_row)

    cache: Cache = []
    run(drafter, embedded[:1], aux, cache)
    before = deeper(cache[0][0])
    for column in range(LENGTH):
        keys, values = (x.clone() for x in cache[0][0])
        keys[:, :, column], values[:, :, column] = 5.0, -5.0
        sees = not torch.equal(deeper((keys, values)), before)
        assert sees == ((4 if from_row else 5) <= column <= 6), column


def test_a_rollout_keeps_the_trainers_window() -> None:
    """The parity with the trainers' logits is of such steps; a chain's are an engine's."""
    shape = replace(SHAPE, windows=(2,))
    for_trainers = []
    for seed in range(4):
        drafter = random_drafter(seed, shape)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(SHAPE.vocab, (LENGTH + 1,), generator=generator)
        table = torch.randn(SHAPE.vocab, SHAPE.hidden, generator=generator)
        aux = torch.randn(LENGTH + 1, 3 * SHAPE.target_hidden, generator=generator)
        rows = torch.arange(LENGTH)
        teacher = torch.zeros(LENGTH + 1, SHAPE.vocab)
        rolled = forced_rollout(
            drafter, table, ids, aux, rows, steps=2, teacher=teacher.__getitem__
        )
        chosen = {}
        for from_row in (True, False):
            cache: Cache = []
            y = drafter.step(table[ids[1:]][None], drafter.fuse(aux[:LENGTH])[None], rows, cache)
            fed = table[ids[2:]][None]
            y = drafter.step(fed, y[:, :-1], rows[:-1], cache, window_from_row=from_row)
            chosen[from_row] = drafter.logits(y[0]).argmax(-1)
        assert torch.equal(rolled.drafted[:-1, 1], chosen[True])
        for_trainers.append(not torch.equal(chosen[True], chosen[False]))
    assert any(for_trainers)


def test_a_window_that_is_taken_away_is_none() -> None:
    whole = random_drafter(4)
    other = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(3)
    wanted = run(whole, embedded, aux, [])
    assert not torch.equal(run(other, embedded, aux, [])[0], wanted[0])
    for a, b in zip(run(other.rewired(windows=()), embedded, aux, []), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "switches", [{"norm_before_fc": True}, {"fc_norm": True}, {"fc_bias": True}]
)
def test_what_stands_before_fc(switches: dict[str, Any]) -> None:
    shape = replace(SHAPE, **switches)
    drafter = random_drafter(5, shape)
    _, aux = inputs(1)
    w = drafter.state_dict()

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * w[f"{name}.weight"]

    bias: Tensor | float = 0.0
    if shape.norm_before_fc:
        aux_in = rms(aux, "input_norm")
    elif shape.fc_norm:
        chunks = aux.chunk(3, -1)
        aux_in = torch.cat([rms(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], -1)
    else:
        aux_in, bias = aux, w["fc.bias"]
    torch.testing.assert_close(drafter.fuse(aux), aux_in @ w["fc.weight"].T + bias)


def test_rewiring_shares_the_weights_and_leaves_the_drafter_as_it_is() -> None:
    drafter = random_drafter(6)
    other = drafter.rewired(norm_before_residual=True)
    assert other.shape == replace(SHAPE, norm_before_residual=True)
    assert drafter.shape == SHAPE
    assert other.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    embedded, aux = inputs(1)
    y, z = (run(d, embedded, aux, [])[0] for d in (drafter, other))
    assert not torch.equal(y, z)
    g = drafter.fuse(aux)[None]
    normed = drafter.midlayer.hidden_norm(g)
    assert not torch.equal(g, normed)

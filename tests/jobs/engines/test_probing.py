"""Chunks of fc's input as canonical states, by construction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle3.metrics import Rate
from jobs.engine_probe import fault_of
from jobs.engines.probing import FED, NONE, UNDECIDED, chunks_of, later_share, open_end

WIDTH, LAYERS, ROWS = 32, 6, 24


def made(seed: int, step: float = 0.4) -> Tensor:
    """States 0 … LAYERS of a text, [K, T, H]: each layer moves them by `step` of their size."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(ROWS, WIDTH, generator=generator)]
    for _ in range(LAYERS):
        moved = torch.randn(ROWS, WIDTH, generator=generator)
        size = states[-1].norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True)
        states.append(states[-1] + step * size * moved)
    return torch.stack(states)


def noisy(h: Tensor, size: float, seed: int = 9) -> Tensor:
    noise = torch.randn(h.shape, generator=torch.Generator().manual_seed(seed))
    return h + size * noise * h.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)


def fed(states: Tensor, order: tuple[int, ...], noise: float = 0.0, seed: int = 9) -> Tensor:
    return torch.cat([noisy(states[k], noise, seed) for k in order], -1)


@pytest.mark.parametrize("order", [(0, 3, 6), (6, 1, 2), (4,)])
def test_every_chunk_is_named_in_its_place(order: tuple[int, ...]) -> None:
    texts = [made(seed) for seed in range(3)]
    rows = [fed(states, order, 0.01) for states in texts]
    again = [fed(states, order, 0.01, seed=10) for states in texts]
    chunks = chunks_of(rows, texts, again)
    assert [chunk.states for chunk in chunks] == [(k,) for k in order]
    assert all(chunk.verdict == FED for chunk in chunks)
    # Two askings differ by the noise of both; the runner-up is a layer away.
    assert all(chunk.noise == pytest.approx(0.014, rel=0.1) for chunk in chunks)
    assert all(chunk.second is not None and chunk.second > 0.3 for chunk in chunks)


def test_neighbours_within_the_engines_own_noise_are_not_told_apart() -> None:
    texts = [made(0, step=0.02)]
    (quiet,) = chunks_of([fed(texts[0], (3,))], texts, [])
    assert (quiet.verdict, quiet.states) == (FED, (3,))
    (loud,) = chunks_of([fed(texts[0], (3,))], texts, [fed(texts[0], (3,), 0.02)])
    assert loud.verdict == UNDECIDED
    assert {2, 3, 4} <= set(loud.states)


def test_what_is_no_state_of_the_target_is_said_to_be_none() -> None:
    texts = [made(0)]
    (chunk,) = chunks_of([made(1)[3]], texts, [])
    assert (chunk.verdict, chunk.states) == (NONE, ())
    assert "none of the computed states" in chunk.in_words


def test_behind_a_norm_the_direction_tells() -> None:
    texts = [made(0)]
    weight = torch.linspace(0.5, 2.0, 2 * WIDTH)
    aux = fed(texts[0], (1, 5))
    rows = aux / aux.pow(2).mean(-1, keepdim=True).sqrt() * weight
    chunks = chunks_of([rows], texts, [rows], weight=weight)
    assert [chunk.states for chunk in chunks] == [(1,), (5,)]
    assert [chunk.verdict for chunk in chunks] == [FED, FED]


def test_rows_of_another_position_are_said_to_be_shifted() -> None:
    texts = [made(0)]
    (chunk,) = chunks_of([texts[0][2].roll(1, 0)], texts, [])
    assert (chunk.states, chunk.shift) == ((2,), -1)
    assert "row t is of position t-1" in chunk.in_words


def test_later_rows_are_looked_for_at_every_position() -> None:
    states = made(0)
    wanted = torch.cat([states[0], states[3]], -1)
    other = torch.cat([made(1)[0], made(1)[3]], -1)
    calls = [wanted[[7, 8, 9]], torch.cat([wanted[[10]], other[:2]])]
    assert later_share(calls, states, (0, 3)) == (4, 6)


def length(value: float, low: float, high: float) -> Rate:
    return Rate(value=value, low=low, high=high, numerator=0, denominator=0, truth="target_argmax")


@pytest.mark.parametrize(
    ("fed_states", "served", "alone", "where"),
    [
        (None, (2.9, 2.5, 3.3), (3.0, 2.6, 3.4), "undecided"),
        ((3, 31, 59), (1.05, 1.0, 1.1), (3.0, 2.6, 3.4), "config"),
        ((0, 3, 31), (1.2, 1.1, 1.3), (3.0, 2.6, 3.4), "engine"),
        ((0, 3, 31), (2.5, 2.0, 2.7), (3.0, 2.6, 3.4), "none"),
        ((0, 3, 31), (1.1, 1.0, 1.2), (1.1, 1.0, 1.2), "head"),
        ((0, 3, 31), None, (3.0, 2.6, 3.4), "undecided"),
    ],
)
def test_where_the_fault_lies(
    fed_states: tuple[int, ...] | None,
    served: tuple[float, float, float] | None,
    alone: tuple[float, float, float],
    where: str,
) -> None:
    found, why = fault_of(
        (0, 3, 31), fed_states, length(*served) if served else None, length(*alone).plain()
    )
    assert found == where
    assert why


def test_what_is_lost_is_lost_behind_where_the_states_were_seen() -> None:
    served, alone = length(1.2, 1.1, 1.3), length(3.0, 2.6, 3.4).plain()
    _, at_fc = fault_of((0, 3, 31), (0, 3, 31), served, alone)
    assert at_fc.endswith("what is lost is lost behind fc")
    _, handed = fault_of((0, 3, 31), (0, 3, 31), served, alone, behind="the target")
    assert handed.endswith("what is lost is lost behind the target")


@pytest.mark.parametrize(
    ("best", "computed", "may"), [(4, 4, True), (3, 4, False), (LAYERS, LAYERS, False)]
)
def test_the_highest_state_that_was_made_may_be_one_behind_it(
    best: int, computed: int, may: bool
) -> None:
    states = made(1)
    (chunk,) = chunks_of([states[best]], [states[: computed + 1]], [states[best]])
    assert chunk.best == best
    assert open_end(chunk, computed, LAYERS) is may
    # One that is not told apart from the highest may be that one, and so one behind it.
    assert open_end(replace(chunk, best=best - 1, states=(best - 1, best)), computed, LAYERS) is may

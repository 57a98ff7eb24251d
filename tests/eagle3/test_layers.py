"""Layer conventions: what an id means, and its way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import BadInput
from eagle3.layers import (
    LayerConvention,
    canonical_state,
    canonical_states,
)

OUTPUT, INPUT, HF = LayerConvention.output, LayerConvention.input, LayerConvention.hf


@pytest.mark.parametrize(
    ("ids", "convention", "states"),
    [
        ([-1, 2, 30], OUTPUT, (0, 3, 31)),
        ([2, 30, 58], OUTPUT, (3, 31, 59)),
        ([2, 30, 58], INPUT, (2, 30, 58)),
        ([0, 3, 31], HF, (0, 3, 31)),
        ([30, 2, -1], OUTPUT, (31, 3, 0)),
        ([60], OUTPUT, (61,)),
        ([61], INPUT, (61,)),
    ],
)
def test_ids_mean_these_states_of_61_layers(
    ids: list[int], convention: LayerConvention, states: tuple[int, ...]
) -> None:
    assert canonical_states(ids, convention, 61) == states


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_every_state_has_one_id_in_each_convention(nk: tuple[int, int]) -> None:
    n, k = nk
    assert canonical_state(k - 1, OUTPUT, n) == canonical_state(k, INPUT, n) == k
    if k < n:
        assert canonical_state(k, HF, n) == k


@pytest.mark.parametrize(
    ("layer_id", "convention", "words"),
    [
        (-2, OUTPUT, "lowest id is -1"),
        (-1, INPUT, "lowest id is 0"),
        (61, OUTPUT, "canonical state 62"),
        (62, INPUT, "canonical state 62"),
        (-1, HF, "counts from the end"),
        (61, HF, "behind the final norm"),
    ],
)
def test_an_id_that_names_no_aux_state_is_refused(
    layer_id: int, convention: LayerConvention, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        canonical_state(layer_id, convention, 61)

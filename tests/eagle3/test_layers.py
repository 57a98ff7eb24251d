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
    layer_id_for,
    state_in_words,
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
def test_output_and_input_round_trip_and_differ_by_one(nk: tuple[int, int]) -> None:
    n, k = nk
    assert canonical_state(layer_id_for(k, OUTPUT, n), OUTPUT, n) == k
    assert canonical_state(layer_id_for(k, INPUT, n), INPUT, n) == k
    assert layer_id_for(k, INPUT, n) - layer_id_for(k, OUTPUT, n) == 1
    if k < n:
        assert layer_id_for(k, HF, n) == k


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


def test_in_words() -> None:
    assert state_in_words(0, 61) == "the embedding output"
    assert state_in_words(1, 61) == "the state after 1 layer"
    assert "before the final norm" in state_in_words(61, 61)

"""What a search may change: as far as drafter, target and data leave it open, and as a person says."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.search.axes import MOST_STATES, Axis, axes_of, changed, changes, in_words
from eagle3.wiring import (
    D2T,
    SWITCHES,
    DecoderLayer,
    Embedding,
    Head,
    InputNorms,
    Residual,
    RopeChoice,
    Wiring,
)
from tests.eagle3.searchable import FULL, PLAIN, STATES, checkpoint
from tests.eagle3.small import SHAPE

START = Wiring.of_states(STATES[:3])


def found(shape: Any = PLAIN, start: Wiring = START, **more: Any) -> dict[str, Axis]:
    settings: dict[str, Any] = {
        "target_rope": Rope(theta=9.0),
        "own_embedding": True,
        "own_head": True,
        **more,
    }
    known = settings.pop("known", STATES)
    return {axis.name: axis for axis in axes_of(checkpoint(shape).form, start, known, **settings)}


def test_every_switch_is_an_axis_of_a_drafter_that_has_everything() -> None:
    axes = found(FULL)
    assert set(axes) == {"states", *SWITCHES}
    assert {name for name, axis in axes.items() if axis.shows_from == 1} == {
        "feedback",
        "positions",
    }
    for axis in axes.values():
        assert axis.values
        assert axis.why


def test_parts_that_a_drafter_does_not_have_are_no_axes() -> None:
    assert set(found(FULL)) - set(found(PLAIN)) == {"window", "deeper_norm", "biases", "qk_norm"}


def test_all_ordered_choices_of_known_states_but_the_starts_own() -> None:
    assert set(found()["states"].values) == set(permutations(STATES, 3)) - {STATES[:3]}
    assert set(found(known=(0, 2, 5))["states"].values) == set(permutations((0, 2, 5))) - {
        (0, 2, 5)
    }
    assert "states" not in found(known=(0, 2))


def test_too_many_choices_are_cut_and_it_is_said() -> None:
    axis = found(known=tuple(range(12)), start=Wiring.of_states((0, 5, 9)))["states"]
    assert len(axis.values) <= MOST_STATES < 12 * 11 * 10
    assert (9, 5, 0) in axis.values  # the start in another order
    assert (0, 4, 9) in axis.values  # the start with a neighbour
    assert (1, 2, 3) in axis.values  # ascending
    assert "of 1320 ordered choices" in axis.why


def test_no_value_stands_for_what_the_start_has_already() -> None:
    for shape in (PLAIN, FULL):
        form = checkpoint(shape).form
        start = START.resolved(form)
        for axis in found(shape).values():
            wirings = [changed(start, axis.name, value, form) for value in axis.values]
            assert start not in wirings
            assert len(set(wirings)) == len(wirings)


def test_ropes_that_turn_alike_are_tried_once() -> None:
    assert set(found()["rope"].values) == {RopeChoice.base_10000, RopeChoice.target}
    assert set(found(FULL)["rope"].values) == {
        RopeChoice.unscaled,
        RopeChoice.no_mscale,
        RopeChoice.base_10000,
        RopeChoice.target,
    }
    assert set(found(target_rope=None)["rope"].values) == {RopeChoice.base_10000}
    assert set(found(target_rope=Rope(theta=10_000.0))["rope"].values) == {RopeChoice.base_10000}
    assert set(found(target_rope=PLAIN.rope)["rope"].values) == {RopeChoice.base_10000}


def test_whose_tables_there_are() -> None:
    axes = found()
    assert axes["embedding"].values == (Embedding.own,)
    assert axes["head"].values == (Head.target,)
    lacking = found(own_embedding=False)
    assert "embedding" not in lacking
    assert set(lacking["input_norms"].values) == {InputNorms.swapped, InputNorms.double}
    apart = found(SHAPE, start=replace(START, embedding=Embedding.own))  # narrower than its target
    assert not {"embedding", "head"} & set(apart)


def test_a_start_without_the_layer_still_has_the_layers_axes() -> None:
    axes = found(start=replace(START, decoder_layer=DecoderLayer.skipped))
    assert axes["decoder_layer"].values == (DecoderLayer.included,)
    assert axes["residual"].values == (Residual.normed,)


def test_a_person_fixes_and_cuts_axes() -> None:
    axes = found(fixed=["rope", "states"], only={"d2t": ["absolute"]})
    assert not {"rope", "states"} & set(axes)
    assert axes["d2t"].values == (D2T.absolute,)
    assert [name for name, axis in axes.items() if axis.named] == ["d2t"]
    assert found(only={"states": [[5, 2, 0], [0, 2, 5]]})["states"].values == ((5, 2, 0),)
    # An axis that is cut to what the start has already is none.
    assert "d2t" not in found(only={"d2t": ["offset"]})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fixed": ["roped"]}, "no axis 'roped'; there are states, d2t"),
        ({"only": {"d2t": ["sideways"]}}, "'sideways'.*there are offset, absolute, identity"),
        ({"only": {"d2t": []}}, "axis 'd2t' is cut to no value at all"),
        ({"only": {"states": [[0, 2]]}}, r"names \[0, 2\], but the drafter takes 3 states"),
        (
            {"fixed": ["d2t"], "only": {"d2t": ["absolute"]}},
            "'d2t' is fixed and its values are named",
        ),
    ],
)
def test_what_there_is_not_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        found(**more)


def test_changes_are_named_by_axis_and_value() -> None:
    form = checkpoint(PLAIN).form
    start = START.resolved(form)
    wiring = changed(changed(start, "states", (7, 0, 2), form), "d2t", D2T.absolute, form)
    assert changes(start, wiring) == ("states=7,0,2", "d2t=absolute")
    assert changes(start, start) == ()
    assert in_words("rope", RopeChoice.base_10000) == "rope=base_10000"

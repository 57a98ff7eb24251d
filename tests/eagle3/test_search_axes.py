"""What a search may change: as far as drafter, target and data leave it open, and as a person says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from math import comb, perm
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
    chosen_rope,
    heeded,
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


def test_parts_that_a_drafter_does_not_have_are_no_axes() -> None:
    assert set(found(FULL)) - set(found(PLAIN)) == {"window", "deeper_norm", "biases", "qk_norm"}


def test_all_ordered_choices_of_known_states_but_the_starts_own() -> None:
    assert set(found()["states"].values) == set(permutations(STATES, 3)) - {STATES[:3]}
    assert set(found(known=(0, 2, 5))["states"].values) == set(permutations((0, 2, 5))) - {
        (0, 2, 5)
    }
    assert "states" not in found(known=(0, 2))


NINE = (0, 3, 7, 15, 23, 31, 39, 47, 59)


@pytest.mark.parametrize("stored", [NINE, (*NINE, 60)])
def test_every_ordered_choice_of_nine_or_ten_stored_states_is_tried(
    stored: tuple[int, ...],
) -> None:
    axis = found(known=stored, stored=stored, start=Wiring.of_states((3, 31, 59)))["states"]
    assert set(axis.values) == set(permutations(stored, 3)) - {(3, 31, 59)}
    assert axis.cut == ""


@pytest.mark.parametrize("start", [(3, 31, 59), (59, 31, 3), (2, 30, 58), (4, 61, 0)])
def test_stored_states_are_tried_in_every_order_among_however_many_others(
    start: tuple[int, ...],
) -> None:
    axis = found(known=range(62), stored=NINE, start=Wiring.of_states(start))["states"]
    assert set(axis.values) >= set(permutations(NINE, 3)) - {start}
    assert len(axis.values) == MOST_STATES - 1
    assert "504 of 504 of the data's own" in axis.cut


def test_twenty_states_are_cut_to_those_closest_to_the_start() -> None:
    start, known = (9, 3, 31), (0, *range(1, 58, 3), 3, 9, 31, 30, 32)
    axis = found(known=known, stored=known, start=Wiring.of_states(start))["states"]
    orders = set(permutations(start)) - {start}
    replaced = [
        (*start[:place], k, *start[place + 1 :])
        for place in range(3)
        for k in set(known) - set(start)
    ]
    assert set(axis.values[: len(orders)]) == orders
    behind = axis.values[len(orders) :][: len(replaced)]
    assert set(behind) == set(replaced)
    assert {(10, 3, 31), (9, 4, 31), (9, 3, 30), (9, 3, 32)} == set(behind[:4])  # one off
    far = [sum(abs(a - b) for a, b in zip(chosen, start, strict=True)) for chosen in behind]
    assert far == sorted(far)
    rest = axis.values[len(orders) + len(replaced) :]
    assert all(list(chosen) == sorted(chosen) for chosen in rest)
    far = [sum(abs(a - b) for a, b in zip(chosen, (3, 9, 31), strict=True)) for chosen in rest]
    assert far == sorted(far)
    assert rest
    assert len(axis.values) == MOST_STATES - 1  # with the start's own


@pytest.mark.parametrize("start", [(0, 5, 9), (19, 2, 18)])
def test_every_ordered_choice_is_reached_by_single_steps_from_any_start(
    start: tuple[int, ...],
) -> None:
    axis = found(known=range(20), start=Wiring.of_states(start))["states"]
    assert axis.cut
    reached = {start, *axis.values}
    edge = reached
    while edge:
        edge = {n for states in edge for n in axis.beside(Wiring.of_states(states))} - reached
        reached |= edge
    assert reached == set(permutations(range(20), 3))
    whole = found()["states"]
    assert (whole.cut, [*whole.beside(START)]) == ("", [])


@pytest.mark.parametrize("count", [12, 20, 62])
def test_how_many_choices_are_tried_of_how_many_is_true(count: int) -> None:
    start, stored = (0, 5, 9), (0, 2, 5, 9)
    axis = found(known=range(count), stored=stored, start=Wiring.of_states(start))["states"]
    tried = {start, *axis.values}
    others = [c for c in permutations(range(count), 3) if sum(map(int.__ne__, c, start)) == 1]
    ascending = sum(list(c) == sorted(c) for c in tried)
    assert axis.cut == (
        f"{len(tried)} of {perm(count, 3)} ordered choices of {count} states are tried, the closest to "
        f"0, 5, 9: 6 of 6 of the start's in every order, {len(others)} of {len(others)} of the start "
        f"with one state replaced, 24 of 24 of the data's own, {ascending} of {comb(count, 3)} "
        "ascending; job.axes.more_states=[[…]] adds others"
    )
    assert tried >= {*others, *permutations(start), *permutations(stored, 3)}
    assert len(tried) == MOST_STATES


def test_of_a_start_that_is_not_known_only_known_states_are_tried() -> None:
    axis = found(known=range(3, 20), start=Wiring.of_states((0, 5, 9)))["states"]
    assert axis.values[:2] == ((3, 5, 9), (4, 5, 9))
    assert min(min(chosen) for chosen in axis.values) == 3
    assert "0 of 6 of the start's in every order, 15 of 15 of the start with one" in axis.cut


def test_states_that_a_person_adds_are_tried_first_beside_all_others() -> None:
    more = [[4, 3, 0], [7, 5, 2], list(STATES[:3])]
    axis = found(more_states=more)["states"]
    assert axis.values[:2] == ((4, 3, 0), (7, 5, 2))  # the last one is the start's own
    assert set(axis.values) == set(found()["states"].values) | {(4, 3, 0)}
    assert len(set(axis.values)) == len(axis.values)
    assert (axis.cut, axis.named) == ("", False)
    alone, stated = (
        found(known=range(20), start=Wiring.of_states((0, 5, 9)), more_states=added)["states"]
        for added in ([], [[19, 0, 7], [30, 0, 7]])
    )
    assert stated.values == ((19, 0, 7), (30, 0, 7), *alone.values)
    assert alone.cut.startswith("720 of 6840 ")
    assert stated.cut.startswith("721 of 6840 ")


def test_no_value_stands_for_what_the_start_has_already() -> None:
    for shape in (PLAIN, FULL):
        form = checkpoint(shape).form
        start = START.resolved(form)
        for axis in found(shape).values():
            wirings = [changed(start, axis.name, value, form) for value in axis.values]
            assert start not in wirings
            assert len(set(wirings)) == len(wirings)


def turned(ropes: Iterable[RopeChoice], own: Rope, theirs: Rope | None) -> list[Rope]:
    return [heeded(chosen_rope(rope, own, theirs)) for rope in ropes]


LINEAR = Rope(theta=9.0, kind="linear", scaling=(("factor", 3.0),))


@pytest.mark.parametrize("own", [PLAIN.rope, FULL.rope, replace(FULL.rope, theta=1e4)])
@pytest.mark.parametrize("theirs", [LINEAR, replace(LINEAR, theta=1e4), Rope(theta=9.0)])
@pytest.mark.parametrize("begun", [RopeChoice.declared, RopeChoice.target, RopeChoice.target_base])
def test_every_base_is_tried_with_every_scaling_once(
    own: Rope, theirs: Rope, begun: RopeChoice
) -> None:
    start = replace(START, rope=begun)
    axis = found(replace(FULL, rope=own), start, target_rope=theirs)["rope"]
    ropes = turned([begun, *axis.values], own, theirs)
    assert len(set(ropes)) == len(ropes)
    wanted = {
        heeded(replace(scaled, theta=theta))
        for theta in (own.theta, 1e4, theirs.theta)
        for scaled in (own, Rope(theta=1e4), theirs)
    }
    without = chosen_rope(RopeChoice.no_mscale, own)
    assert set(ropes) == wanted | {without}


def test_ropes_that_turn_alike_are_tried_once() -> None:
    assert set(found()["rope"].values) == {RopeChoice.base_10000, RopeChoice.target}
    assert set(found(FULL)["rope"].values) == {
        RopeChoice.unscaled,
        RopeChoice.no_mscale,
        RopeChoice.base_10000,
        RopeChoice.base_10000_scaled,
        RopeChoice.target,
        RopeChoice.target_base,
    }
    assert set(found(target_rope=LINEAR)["rope"].values) == {
        RopeChoice.base_10000,
        RopeChoice.target,
        RopeChoice.target_unscaled,
        RopeChoice.target_scaling,
        RopeChoice.base_10000_target_scaling,
    }
    assert set(found(target_rope=None)["rope"].values) == {RopeChoice.base_10000}
    assert set(found(target_rope=Rope(theta=10_000.0))["rope"].values) == {RopeChoice.base_10000}
    assert set(found(target_rope=PLAIN.rope)["rope"].values) == {RopeChoice.base_10000}
    # A start from the target's is not left for what turns like it.
    start = replace(START, rope=RopeChoice.target)
    assert set(found(start=start, target_rope=PLAIN.rope)["rope"].values) == {RopeChoice.base_10000}


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
        ({"more_states": [[0, 2]]}, r"names \[0, 2\], but the drafter takes 3 states"),
        (
            {"more_states": [[0, 2, 7]], "fixed": ["states"]},
            r"axis 'states' is fixed, so job\.axes\.more_states adds nothing",
        ),
        (
            {"more_states": [[0, 2, 7]], "only": {"states": [[0, 2, 5]]}},
            r"cut to what job\.axes\.states names, so job\.axes\.more_states adds nothing",
        ),
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

"""Whether two passes wrote the same, prompt by prompt."""

from __future__ import annotations

import pytest

from jobs.engines.agreement import agreement, first_difference
from jobs.engines.records import Pass
from tests.jobs.engines.made import answered, one_pass


def wrote(**texts: tuple[int, ...]) -> Pass:
    return one_pass(*(answered(prompt=name, output=ids) for name, ids in texts.items()))


def test_texts_are_compared_by_their_prompts_and_not_by_their_order() -> None:
    found = agreement(wrote(a=(1, 2, 3), b=(4, 5)), wrote(b=(4, 5), a=(1, 2, 3)))
    assert (found.prompts, found.same, found.first) == (2, 2, ())


def test_where_texts_go_apart_is_told() -> None:
    found = agreement(wrote(a=(1, 2, 3), b=(4, 5), c=(6, 7)), wrote(a=(1, 9, 3), b=(4, 5), c=(6,)))
    assert (found.prompts, found.same) == (3, 1)
    assert found.plain() == {"prompts": 3, "same": 1, "first": [["a", 1], ["c", 1]]}


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ((1, 2), (1, 2), None),
        ((), (), None),
        ((1, 2), (3, 2), 0),
        ((1, 2), (1, 3), 1),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 3), (1, 2), 2),
    ],
)
def test_an_end_is_a_difference_too(
    one: tuple[int, ...], other: tuple[int, ...], at: int | None
) -> None:
    assert first_difference(one, other) == at

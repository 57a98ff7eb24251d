"""Where a continuation is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.repetition import cut


@pytest.mark.parametrize(
    ("text", "window", "length"),
    [
        ([1, 2, 3, 4, 5, 6], 2, 6),
        ([1, 2, 3, 4, 3, 4, 7], 2, 4),  # 3,4 stands a second time behind position 4
        ([1, 2, 1, 2, 5, 6], 2, 2),  # it begins with a piece of the prompt
        ([1, 2, 3, 9, 3, 4], None, 4),  # 9 is an end token and belongs to the text
        ([5, 5, 3, 4, 6, 7], 2, 6),
    ],
)
def test_where_a_continuation_ends(text: list[int], window: int | None, length: int) -> None:
    assert cut(text, 2, {9}, window) == length


@given(st.lists(st.integers(0, 2), min_size=6, max_size=60), st.integers(2, 5))
def test_no_piece_of_a_cut_continuation_stands_twice(text: list[int], window: int) -> None:
    prompt = 4
    kept = text[: cut(text, prompt, set(), window)]
    pieces = [tuple(kept[i : i + window]) for i in range(len(kept) - window + 1)]
    behind_prompt = pieces[max(0, prompt - window + 1) :]
    assert len(kept) >= prompt
    assert len(set(behind_prompt)) == len(behind_prompt)

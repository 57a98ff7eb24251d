"""Where a greedy continuation ends: small targets, and large ones too, fall into loops."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cut(text: Sequence[int], prompt: int, ends: Collection[int | None], window: int | None) -> int:
    """The length to which a text is kept; its first `prompt` tokens were given.

    A continuation ends behind an end token, or before it begins to repeat itself: where `window`
    tokens in a row stand for the second time in the text (`None`: no such rule).
    """
    length = len(text)
    for position in range(prompt, length):
        if text[position] in ends:
            length = position + 1
            break
    if window is None:
        return length
    seen = set()
    for stop in range(window, length + 1):
        piece = tuple(text[stop - window : stop])
        if piece in seen and stop > prompt:
            return max(prompt, stop - window)
        seen.add(piece)
    return length

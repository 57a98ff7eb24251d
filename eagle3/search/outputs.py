"""What the block has put out for wirings lately, so that who asks again need not run it again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from eagle3.search.batch import Batch
from eagle3.search.texts import Text
from eagle3.wiring import Wiring

FEW = 16  # wirings whose outputs are kept, since their losses may be asked for
MOST = 1 << 26  # numbers that are kept


class Outputs:
    """The block's output at a text's scored rows, [rows, H_d], for wirings and texts."""

    def __init__(self, texts: Sequence[Text], hidden: int) -> None:
        self._texts, self._hidden = texts, hidden
        self._kept: dict[Wiring, dict[int, Tensor]] = defaultdict(dict)
        self._numbers = 0

    def of(self, wiring: Wiring, chosen: Iterable[int]) -> Tensor:
        """The output on these texts, [N, H_d]; KeyError where one of them lacks."""
        return torch.cat([self._kept[wiring][i] for i in chosen])

    def lacking(self, wiring: Wiring, chosen: Iterable[int]) -> tuple[int, ...]:
        """The texts on which it is not kept."""
        return tuple(i for i in chosen if i not in self._kept[wiring])

    def keep(self, batch: Batch, y: Tensor, wirings: Iterable[Wiring]) -> None:
        """Keep an output y [N, H_d] that these wirings have in common."""
        self._numbers += y.numel()
        parts = y.split([len(text.rows) for text in batch.texts])
        for wiring in wirings:
            self._kept[wiring].update(zip(batch.numbers, parts, strict=True))

    def make_room(self, wirings: int, chosen: Iterable[int]) -> bool:
        """Whether so many wirings' outputs on these texts can be kept; what is kept goes for them."""
        more = wirings * self._size(chosen)
        if self._numbers + more > MOST:
            self._kept.clear()
            self._numbers = 0
        return more <= MOST

    def portions(self, wirings: int, chosen: Iterable[int]) -> Iterator[list[int]]:
        """The texts in parts of which so many wirings' outputs can be kept; one text at least."""
        portion: list[int] = []
        numbers = 0
        for i in chosen:
            more = wirings * self._size([i])
            if portion and numbers + more > MOST:
                yield portion
                portion, numbers = [], 0
            portion.append(i)
            numbers += more
        yield portion

    def _size(self, chosen: Iterable[int]) -> int:
        """How many numbers one wiring's output has on these texts."""
        return sum(len(self._texts[i].rows) for i in chosen) * self._hidden

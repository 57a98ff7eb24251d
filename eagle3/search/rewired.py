"""One drafter as each wiring has it: its switches, its ids, its head, and what that picks.

Weights are shared by all; what is made for a wiring is kept for the next that needs the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import embedding_of, head_of, switches_of, target_rope
from eagle3.model import Drafter, DrafterShape
from eagle3.target import TargetParts
from eagle3.wiring import D2T, Embedding, Head, Wiring, needs_target

ROWS_AT_ONCE = 512  # bounds logits to [512, V_d]
KEPT_BYTES = 1 << 30  # of rows of the target's head


class Rewired:
    """A drafter's parts behind any wiring."""

    def __init__(self, checkpoint: DrafterCheckpoint, target: TargetParts) -> None:
        self.checkpoint, self.target = checkpoint, target
        self._shapes: dict[Wiring, DrafterShape] = {}
        self._drafters: dict[DrafterShape, Drafter] = {}
        self._to_target: dict[D2T, Tensor] = {}
        self._heads: dict[D2T, Tensor] = {}

    @property
    def own(self) -> DrafterShape:
        """The shape that the file itself has."""
        return self.checkpoint.drafter.shape

    def shape(self, wiring: Wiring) -> DrafterShape:
        """The drafter's shape behind the wiring's switches."""
        if wiring not in self._shapes:
            own = self.own
            theirs = target_rope(self.target) if needs_target(wiring.rope) else None
            self._shapes[wiring] = replace(own, **switches_of(wiring, own, theirs))
        return self._shapes[wiring]

    def drafter(self, shape: DrafterShape) -> Drafter:
        """The same weights in that shape."""
        if shape == self.own:
            return self.checkpoint.drafter
        if shape not in self._drafters:
            own = vars(self.own)
            switches = {name: value for name, value in vars(shape).items() if value != own[name]}
            self._drafters[shape] = self.checkpoint.drafter.rewired(**switches)
        return self._drafters[shape]

    def to_target(self, d2t: D2T) -> Tensor:
        """The target id of every draft id [V_d]; -1, which is never right, outside the vocabulary.

        A table of absolute ids that is read as offsets leads outside, and is a start like any other.
        """
        if d2t not in self._to_target:
            table, vocab = self.checkpoint.drafter.d2t, self.target.vocab
            ids = torch.arange(len(table), device=table.device)
            if d2t is not D2T.identity:
                ids = table + ids if d2t is D2T.offset else table.clone()
            self._to_target[d2t] = ids.where((ids >= 0) & (ids < vocab), -1)
        return self._to_target[d2t]

    def outside(self, d2t: D2T) -> int:
        """How many draft ids lead outside the target's vocabulary."""
        return int((self.to_target(d2t) < 0).sum())

    @cached_property
    def named_by_t2d(self) -> frozenset[D2T]:
        """The readings of d2t that name the tokens of the file's own t2d; none, where it has none."""
        if not self.checkpoint.own_t2d:
            return frozenset()
        wanted = self.checkpoint.drafter.t2d.nonzero().flatten()
        return frozenset(d for d in D2T if torch.equal(self.to_target(d).sort().values, wanted))

    def head(self, wiring: Wiring) -> Tensor:
        """The head's rows [V_d, H_d]."""
        drafter = self.checkpoint.drafter
        if wiring.head is Head.own:
            head_of(self.checkpoint, self.target, Head.own, drafter.d2t)  # says where there is none
            return drafter.lm_head.weight
        made = self._heads.get(wiring.d2t)
        if made is None:
            rows = self.to_target(wiring.d2t).clamp(min=0)
            size = len(rows) * self.target.hidden * 4
            if (len(self._heads) + 1) * size > KEPT_BYTES:
                self._heads.clear()
            made = head_of(self.checkpoint, self.target, Head.target, rows)
            assert made is not None
            self._heads[wiring.d2t] = made
        return made

    def embedding(self, kind: Embedding) -> Tensor:
        """The table of the tokens beside the states, [V, H_d]."""
        return embedding_of(self.checkpoint, self.target, kind)

    def picks(self, y: Tensor, wiring: Wiring, normed: bool) -> Tensor:
        """The draft id that the head chooses for each row of y [N, H_d]."""
        head = self.head(wiring)
        chosen = []
        for part in y.split(ROWS_AT_ONCE):
            seen = self.checkpoint.drafter.norm(part) if normed else part
            chosen.append(F.linear(seen, head).argmax(-1))
        return torch.cat(chosen)

"""Texts side by side, padded at the end to one length.

Attention is causal, so what stands behind a text changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle3.chain import FIRST_TOKEN
from eagle3.model import Drafter, DrafterShape
from eagle3.search.texts import Text
from eagle3.wiring import Token

KEPT_BYTES = 1 << 30  # of partial products
WASTE = 1.2  # rows that are run, padding included, over those that are asked for


class Batch:
    """Texts side by side, padded to one length L: B texts with N scored rows in all."""

    def __init__(self, numbers: Sequence[int], texts: Sequence[Text], shape: DrafterShape) -> None:
        self.numbers, self.texts, self.shape = numbers, texts, shape
        self.length = max(int(text.rows[-1]) + 1 for text in texts)
        device = texts[0].ids.device
        self.ids = torch.zeros(len(texts), self.length + 2, dtype=torch.int64, device=device)
        flat = []
        for b, text in enumerate(texts):
            kept = min(len(text.ids), self.length + 2)
            self.ids[b, :kept] = text.ids[:kept]
            flat.append(text.rows + b * self.length)
        self.flat = torch.cat(flat)  # [N]
        # The same rows a text each [B, A], padded with row 0, and which of them are rows.
        rows = [text.rows for text in texts]
        self.asked = pad_sequence(rows, batch_first=True)
        counts = torch.tensor([len(r) for r in rows], device=device)
        self.is_row = torch.arange(self.asked.shape[1], device=device) < counts[:, None]
        self._states: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        self._products: dict[tuple[bool, bool, int, int], Tensor] = {}

    def state(self, k: int) -> Tensor:
        """State k of every text, [B, L, H] float32."""
        if k not in self._states:
            size = (len(self.texts), self.length, self.shape.target_hidden)
            padded = torch.zeros(size, device=self.ids.device)
            for b, text in enumerate(self.texts):
                kept = min(len(text.ids), self.length)
                padded[b, :kept] = text.states[k][:kept]
            self._states[k] = padded
        return self._states[k]

    def squares(self, k: int) -> Tensor:
        """The sum of state k's squares, [B, L, 1]."""
        if k not in self._squares:
            self._squares[k] = self.state(k).pow(2).sum(-1, keepdim=True)
        return self._squares[k]

    def product(self, drafter: Drafter, j: int, k: int) -> Tensor:
        """fc's chunk j of state k behind the chunk's share of the norm, [B, L, H_d].

        The one norm over the whole concatenation also divides by a number that depends on all states;
        that division is left to `fuse`.
        """
        shape = drafter.shape
        key = (shape.norm_before_fc, shape.fc_norm, j, k)
        if key in self._products:
            return self._products[key]
        width, h = shape.target_hidden, self.state(k)
        if shape.norm_before_fc:
            h = h * drafter.input_norm.weight[j * width : (j + 1) * width]
        if shape.fc_norm:
            h = drafter.fc_norm[j](h)
        made = F.linear(h, drafter.fc.weight[:, j * width : (j + 1) * width])
        if (len(self._products) + 1) * made.numel() * made.element_size() <= KEPT_BYTES:
            self._products[key] = made
        return made

    def fuse(self, drafter: Drafter, states: Sequence[int]) -> Tensor:
        """What drafter.fuse makes of the states, [B, L, H_d], as a sum of partial products."""
        shape = drafter.shape
        g = self.product(drafter, 0, states[0])
        for j, k in enumerate(states[1:], 1):
            g = g + self.product(drafter, j, k)
        if shape.norm_before_fc:
            squares = torch.stack([self.squares(k) for k in states]).sum(0)
            mean = squares / (len(states) * shape.target_hidden)
            g = g * torch.rsqrt(mean + shape.norm_eps)
        return g if drafter.fc.bias is None else g + drafter.fc.bias

    def ids_until(self, length: int) -> Tensor:
        """The tokens up to a length behind the rows too, [B, length]; -1 behind a text."""
        cut = [text.ids[:length] for text in self.texts]
        ids = pad_sequence(cut, batch_first=True, padding_value=-1)
        return F.pad(ids, (0, length - ids.shape[1]), value=-1)

    def tokens(self, token: Token) -> Tensor:
        """The tokens beside the states in the first step, [B, L]."""
        shift = FIRST_TOKEN[token]
        return self.ids[:, shift : shift + self.length]


def batches(
    texts: Sequence[Text], chosen: Sequence[int], shape: DrafterShape, at_once: int
) -> Iterator[Batch]:
    """The chosen texts, as many that are about equally long as make up to `at_once` positions."""
    group: list[int] = []
    for i in sorted(chosen, key=lambda i: int(texts[i].rows[-1])):
        more = [*group, i]
        lengths = [int(texts[n].rows[-1]) + 1 for n in more]
        run = len(more) * max(lengths)
        if group and (run > at_once or run > WASTE * sum(lengths)):
            yield Batch(group, [texts[n] for n in group], shape)
            more = [i]
        group = more
    yield Batch(group, [texts[n] for n in group], shape)

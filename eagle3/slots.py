"""What the slots of captured samples hold, measured sample by sample in flat memory.

A slot is one of a sample's stored states [T, H]. Nothing here believes what is declared: each slot is
compared with the target's embedding, with its final norm and, through its head, with the text and the
target's own choices. `eagle3.slot_verdicts` sets the figures against what is declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.data.form import RawSample
from eagle3.metrics import Count, Truth
from eagle3.target import FinalNorm, TargetParts

SHIFTS = (0, -1, 1)  # row t of a slot is compared with what belongs to position t + shift
HEAD_ROWS = 64  # rows a sample that go through the head, spread evenly over the scored ones
HEAD_BLOCK = 8192  # rows of the head at once: it may have more than 10⁵
CLOSE = 0.01  # relative distance at which a row still counts as the embedding's
ALIGNED = 0.9995  # cosine from which a row counts as a multiple of another
UNIT = 0.02  # how far the RMS of a normed row divided by the norm's weight may be from 1
# Where a config names the number by which the embedding's rows are multiplied in front of the first
# layer: Granite and Falcon-H1, MiniCPM, Grok, Phi-3-small.
SCALES = (
    "embedding_multiplier",
    "scale_emb",
    "embedding_multiplier_scale",
    "mup_embedding_multiplier",
)


class Spread:
    """Quantiles of positive numbers in bounded memory, each within 0.6 % of the true one."""

    PER_OCTAVE, OCTAVES = 64, 64  # bins; octaves to each side of 1

    def __init__(self) -> None:
        self.counts = torch.zeros(2 * self.OCTAVES * self.PER_OCTAVE, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        """Count finite numbers above zero, of any shape."""
        bins = ((values.log2() + self.OCTAVES) * self.PER_OCTAVE).long().flatten().cpu()
        bins = bins.clamp(0, len(self.counts) - 1)
        self.counts += torch.bincount(bins, minlength=len(self.counts))

    def quantile(self, q: float) -> float | None:
        """The number that a share q of all lies at or below; None without numbers."""
        total = int(self.counts.sum())
        if not total:
            return None
        reached = self.counts.cumsum(0) >= max(1, round(q * total))
        place = int(reached.nonzero()[0])
        return float(2.0 ** ((place + 0.5) / self.PER_OCTAVE - self.OCTAVES))


@dataclass(kw_only=True)
class Match:
    """Rows that are the embedding's of the token at one shift."""

    rows: int = 0
    exact: int = 0  # equal in the slot's number type
    close: int = 0  # equal within CLOSE
    aligned: int = 0  # the embedding's row times some number
    input_normed: int = 0  # aligned with what the first layer's norm makes of the row

    def share(self, what: str) -> float:
        """One of the counts as a share of the rows."""
        return float(getattr(self, what)) / self.rows if self.rows else 0.0

    def plain(self) -> dict[str, int]:
        """As plain data."""
        return dict(vars(self))


@dataclass(kw_only=True)
class SlotFigures:
    """The counts of one slot so far."""

    dtype: str = ""
    width: int = 0  # H
    rows: int = 0
    non_finite: int = 0  # rows that hold NaN or infinity
    first_non_finite: str | None = None
    zero: int = 0  # rows of zeros only
    changes: bool = False  # any two rows differ
    max_abs: float = 0.0
    rms: Spread = field(default_factory=Spread)
    unit: int = 0  # rows whose RMS is 1 once divided by the final norm's weight
    unit_rms: Spread = field(default_factory=Spread)
    matches: dict[int, Match] = field(default_factory=lambda: {s: Match() for s in SHIFTS})
    factor: Spread = field(default_factory=Spread)  # slot over embedding output, of aligned rows
    # (truth, through the norm, shift) → a Count a sample
    agreements: dict[tuple[Truth, bool, int], list[Count]] = field(default_factory=dict)
    _first_row: Tensor | None = None

    @property
    def sound(self) -> int:
        """Rows that hold numbers, not all of them zero."""
        return self.rows - self.non_finite - self.zero

    @property
    def unit_share(self) -> float | None:
        """The share of sound rows that look normed; None where the norm is not at hand."""
        measured = int(self.unit_rms.counts.sum())
        return self.unit / measured if measured else None

    def add_scale(self, h: Tensor, where: str, norm_weight: Tensor | None) -> None:
        """Count rows [T, H] by their size."""
        finite, zero = h.isfinite().all(-1), (h == 0).all(-1)
        self.rows, self.width = self.rows + len(h), h.shape[1]
        self.non_finite += int((~finite).sum())
        self.zero += int(zero.sum())
        if self.first_non_finite is None and not finite.all():
            self.first_non_finite = f"{where}, position {int((~finite).nonzero()[0])}"
        if self._first_row is None:
            self._first_row = h[0].clone()
        # NaN differs from itself, which is right: such rows are counted elsewhere.
        self.changes = self.changes or bool((h != self._first_row).any())
        sound = h[finite & ~zero]
        if len(sound):
            self.max_abs = max(self.max_abs, float(sound.abs().max()))
            self.rms.add(rms(sound))
        if len(sound) and norm_weight is not None:
            used = norm_weight != 0
            unit = rms(sound[:, used] / norm_weight[used])
            self.unit += int(((unit - 1).abs() <= UNIT).sum())
            self.unit_rms.add(unit)

    def add_matches(
        self, h: Tensor, embedded: Tensor, stored: torch.dtype, input_norm: Tensor | None
    ) -> None:
        """Count rows of the slot [T, H] against those of the text's embedding output [T, H]."""
        for shift, match in self.matches.items():
            ours, theirs = overlap(h, embedded, shift)
            usable = ours.isfinite().all(-1) & theirs.isfinite().all(-1) & (ours != 0).any(-1)
            ours, theirs = ours[usable], theirs[usable]
            match.rows += len(ours)
            match.exact += int((ours == theirs.to(stored).float()).all(-1).sum())
            far = (ours - theirs).norm(dim=-1)
            match.close += int((far <= CLOSE * theirs.norm(dim=-1)).sum())
            aligned = torch.cosine_similarity(ours, theirs, dim=-1) >= ALIGNED
            match.aligned += int(aligned.sum())
            if input_norm is not None:
                behind = torch.cosine_similarity(ours, theirs * input_norm, dim=-1) >= ALIGNED
                match.input_normed += int(behind.sum())
            if shift == 0 and aligned.any():
                self.factor.add(rms(ours[aligned]) / rms(theirs[aligned]))

    def add_agreements(
        self, choices: Mapping[bool, Tensor], rows: Tensor, ids: Tensor, argmax: Tensor | None
    ) -> None:
        """Count the head's choices [R] behind `rows` [R] against the text and the target's own.

        The choice behind row t stands for position t + 1, or, where the states are shifted, for
        t + 1 + shift.
        """
        truths = {Truth.next_token: ids}
        if argmax is not None:
            truths[Truth.target_argmax] = torch.cat([ids[:1], argmax[:-1]])
        for truth, tokens in truths.items():
            for through, chosen in choices.items():
                for shift in SHIFTS:
                    places = rows + 1 + shift
                    inside = (places >= 0) & (places < len(tokens))
                    right = chosen[inside] == tokens[places[inside]]
                    count = Count(int(right.sum()), int(inside.sum()))
                    self.agreements.setdefault((truth, through, shift), []).append(count)

    def plain(self) -> dict[str, Any]:
        """The figures that are no rates, as plain data."""
        return {
            "dtype": self.dtype,
            "scale": {
                "rows": self.rows,
                "non_finite_rows": self.non_finite,
                "zero_rows": self.zero,
                "rms_median": self.rms.quantile(0.5),
                "rms_5_percent": self.rms.quantile(0.05),
                "rms_95_percent": self.rms.quantile(0.95),
                "max_abs": self.max_abs,
            },
            "final_norm": {
                "unit_rows": self.unit,
                "unit_share": self.unit_share,
                "rms_over_weight_median": self.unit_rms.quantile(0.5),
            },
            "embedding": {
                "factor_median": self.factor.quantile(0.5),
                "by_shift": {f"{shift:+d}": m.plain() for shift, m in self.matches.items()},
            },
        }


class SlotMeter:
    """Measures all slots of the samples it is given, as far as the target's parts are at hand.

    `norm` is the target's final norm, `input_norm` [H] what the first layer's norm multiplies by, and
    `head` [V, H] the target's head; each is None where it is not known.
    """

    def __init__(
        self,
        target: TargetParts,
        slots: int,
        *,
        norm: FinalNorm | None,
        input_norm: Tensor | None,
        head: Tensor | None,
    ) -> None:
        self.target = target
        self.figures = [SlotFigures() for _ in range(slots)]
        self.same = {(i, j) for j in range(slots) for i in range(j)}  # equal on every row so far
        self.norm = norm
        self.input_norm = input_norm
        self.head = head
        self.scale = embedding_scale(target.config)

    def add(self, sample: RawSample, where: str, *, through_head: bool) -> None:
        """Measure one sample; `where` names it in messages."""
        device, vocab = self.target.device, self.target.vocab
        ids = sample.input_ids.to(device)
        embedded = self.target.rows("embedding", ids.clamp(0, vocab - 1))
        embedded[(ids < 0) | (ids >= vocab)] = torch.nan
        embedded *= self.scale
        factor = None if self.norm is None else self.norm.factor
        self.same = {(i, j) for i, j in self.same if torch.equal(sample.slots[i], sample.slots[j])}
        picked = []
        for figures, stored in zip(self.figures, sample.slots, strict=True):
            h = stored.to(device).float()
            figures.dtype = str(stored.dtype).removeprefix("torch.")
            figures.add_scale(h, where, factor)
            figures.add_matches(h, embedded, stored.dtype, self.input_norm)
            rows = head_rows(sample.loss_mask.to(device), h.isfinite().all(-1))
            picked.append((rows, h[rows]))
        if through_head and self.head is not None:
            self._add_choices(self.head, picked, sample, ids)

    def _add_choices(
        self, head: Tensor, picked: list[tuple[Tensor, Tensor]], sample: RawSample, ids: Tensor
    ) -> None:
        """Put the picked rows of all slots through the head at once: reading it is what costs."""
        argmax = None if sample.target_argmax is None else sample.target_argmax.to(ids.device)
        parts = [h for _, h in picked]
        if self.norm is not None:
            parts += [self.norm(h) for _, h in picked]
        choices = head_choices(head, torch.cat(parts)).split([len(h) for h in parts])
        for i, (figures, (rows, _)) in enumerate(zip(self.figures, picked, strict=True)):
            made = {False: choices[i]}
            if self.norm is not None:
                made[True] = choices[len(picked) + i]
            figures.add_agreements(made, rows, ids, argmax)


def embedding_scale(config: Mapping[str, Any]) -> float:
    """The number by which a target multiplies its embedding's rows, as its config names it; else 1."""
    for key in SCALES:
        value = config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
    return 1.0


def rms(h: Tensor) -> Tensor:
    """The root mean square of each row, [..., H] → [...]."""
    return h.pow(2).mean(-1).sqrt()


def overlap(rows: Tensor, others: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Rows t of the one beside rows t + shift of the other, as far as both exist."""
    count = len(rows)
    start, end = max(0, -shift), count - max(0, shift)
    return rows[start:end], others[start + shift : end + shift]


def head_rows(mask: Tensor, usable: Tensor) -> Tensor:
    """At most HEAD_ROWS rows t, evenly spread, whose next position the target wrote."""
    rows = (mask[1:].bool() & usable[:-1]).nonzero().flatten()
    if len(rows) <= HEAD_ROWS:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, HEAD_ROWS, device=rows.device).long()]


def head_choices(head: Tensor, h: Tensor) -> Tensor:
    """The token [R] that a head [V, H] scores highest for each row [R, H]; the first of equal ones."""
    best = torch.full((len(h),), -torch.inf, device=h.device)
    chosen = torch.zeros(len(h), dtype=torch.int64, device=h.device)
    for number, block in enumerate(head.split(HEAD_BLOCK)):
        score, place = (h @ block.float().T).max(-1)
        better = score > best
        best = torch.where(better, score, best)
        chosen = torch.where(better, place + number * HEAD_BLOCK, chosen)
    return chosen

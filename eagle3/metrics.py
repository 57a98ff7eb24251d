"""What a drafter's chains are worth: raw counts a sample, rates with intervals.

Every rate is a ratio of sums over samples, named with its numerator, denominator and truth. Its
interval is a bootstrap over samples, since positions of one text are not independent.

A position p is scored where its token and the one before it were both written by the target: the
first token behind a prompt comes from the target's prefill and is never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import BadInput

RESAMPLES = 4000
CONFIDENCE = 0.95


class Truth(str, Enum):
    """What a drafted token is compared with."""

    target_argmax = "target_argmax"  # the target's own full-vocabulary choice
    next_token = "next_token"  # of the text; the same where the target wrote it greedily
    stored_teacher = "stored_teacher"  # the data's last slot through the head: what a trainer saw


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The chains of one text, beside the truth. R rows, S steps.

    `rows` [R] are the positions t behind which a chain starts; its tokens stand for positions
    t+2 … t+1+S. `correct` [R, S]: the drafted token is the truth's. `decided` [R, S]: the truth at
    that step is known, which takes a scored position and a text that followed the truth so far.
    `in_vocab` [R]: the first position's truth is in the draft vocabulary.
    """

    rows: Tensor
    correct: Tensor
    decided: Tensor
    in_vocab: Tensor


def truth_tokens(ids: Tensor, chosen: Tensor | None, truth: Truth, where: str) -> Tensor:
    """The truth for every position [T]: entry p is what a drafted token for p must be.

    `chosen` [T] is what the target, or the stored teacher, chooses behind each position; the text
    itself needs none.
    """
    if truth is Truth.next_token:
        return ids
    if chosen is None:
        lacking = {
            Truth.target_argmax: "no target_argmax; add it with job=capture_states",
            Truth.stored_teacher: "no slot that a trainer would take for its teacher",
        }
        raise BadInput(
            f"{where} has {lacking[truth]}, or score against the text with job.truth=next_token"
        )
    return torch.cat([ids[:1], chosen[:-1]])


def scored_rows(mask: Tensor) -> Tensor:
    """Rows t whose first drafted position t+2 is scored, ascending; mask [T] bool."""
    return (mask[1:-1] & mask[2:]).nonzero().flatten()


def judge_chains(
    drafted: Tensor, rows: Tensor, ids: Tensor, mask: Tensor, truth: Tensor, t2d: Tensor
) -> Chains:
    """Compare drafted tokens [R, S] with the truth [T] of the text ids [T]."""
    steps = drafted.shape[1]
    positions = rows[:, None] + 2 + torch.arange(steps, device=rows.device)  # [R, S]
    inside = positions < len(ids)
    positions = positions.clamp(max=len(ids) - 1)
    # A chain's later truths are those of the text it would have to have followed.
    follows = (ids[positions] == truth[positions]).long().cumprod(1).bool()
    known = (inside & mask[positions]).long().cumprod(1).bool()
    before = torch.cat([torch.ones_like(follows[:, :1]), follows[:, :-1]], 1)
    return Chains(
        rows=rows,
        correct=drafted == truth[positions],
        decided=known & before,
        in_vocab=t2d[truth[positions[:, 0]]],
    )


@dataclass(frozen=True)
class Count:
    """One text's share of a rate."""

    numerator: int
    denominator: int


def count_chains(chains: Chains, *, marginal: bool = True) -> dict[str, Count]:
    """All raw counts of one text, by metric name (curves as NAME@step).

    Without `marginal` what is drafted behind a chain's first miss counts nowhere.
    """
    correct, decided = chains.correct & chains.decided, chains.decided
    so_far = correct.long().cumprod(1).bool()
    before = torch.cat([torch.ones_like(so_far[:, :1]), so_far[:, :-1]], 1)
    covered = chains.in_vocab[:, None] & decided
    by_step = [x.sum(0) for x in (correct, decided, so_far, before & decided, covered)]
    right, known, right_so_far, known_so_far, in_vocab = torch.stack(by_step).tolist()
    counts = {
        "accuracy": Count(right[0], known[0]),
        "coverage": Count(in_vocab[0], known[0]),
    }
    for s in range(correct.shape[1]):
        if marginal:
            counts[f"step_accuracy/marginal@{s}"] = Count(right[s], known[s])
        counts[f"step_accuracy/cumulative@{s}"] = Count(right_so_far[s], known[s])
        counts[f"step_accuracy/conditional@{s}"] = Count(right_so_far[s], known_so_far[s])
    whole = decided.all(1)
    gained = 1 + so_far.long().sum(1)  # the bonus token included
    counts["accept_length_uniform"] = Count(int(gained[whole].sum()), int(whole.sum()))
    counts["accept_length"] = served_walk(chains.rows, gained, whole)
    return counts


def served_walk(rows: Tensor, gained: Tensor, whole: Tensor) -> Count:
    """Tokens and rounds of serving: draft, accept the correct prefix and the bonus, go on behind it.

    rows [R] ascending, gained [R] tokens a chain from that row yields, whole [R] its outcome is
    known for all its steps. A round that is not whole (at the text's end, or where the text leaves
    the truth) is not counted and moves on by one token.
    """
    tokens = rounds = 0
    position = -1
    for row, gain, is_whole in zip(rows.tolist(), gained.tolist(), whole.tolist(), strict=True):
        if row < position:
            continue
        if is_whole:
            tokens, rounds = tokens + gain, rounds + 1
        position = row + (gain if is_whole else 1)
    return Count(tokens, rounds)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A ratio of sums with its 95 % interval."""

    value: float
    low: float
    high: float
    numerator: int
    denominator: int
    truth: str

    def plain(self) -> dict[str, Any]:
        """As plain data for a result file."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "numerator": self.numerator,
            "denominator": self.denominator,
            "truth": self.truth,
        }


def rate(
    counts: Sequence[Count],
    truth: Truth,
    *,
    limits: tuple[float, float],
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Rate | None:
    """A rate over texts; `limits` are the lowest and highest possible value. None without positions.

    One text alone says nothing about the spread between texts: its interval is the whole range. A
    rate at a limit has no spread to resample; its interval is the exact binomial one, which takes
    positions (for accept lengths, rounds) as independent, scaled to the limits.
    """
    numerators = torch.tensor([c.numerator for c in counts], dtype=torch.float64)
    denominators = torch.tensor([c.denominator for c in counts], dtype=torch.float64)
    numerator, denominator = int(numerators.sum()), int(denominators.sum())
    if denominator == 0:
        return None
    value = numerator / denominator
    if int((denominators > 0).sum()) < 2:
        low, high = limits
    else:
        weights = bootstrap_weights(len(counts), seed)
        samples = ratio(weights @ numerators, weights @ denominators)
        tail = (1 - confidence) / 2
        low, high = torch.quantile(samples, torch.tensor([tail, 1 - tail]).double()).tolist()
        if value in limits:
            reach = (limits[1] - limits[0]) * (1 - tail ** (1 / denominator))
            low, high = (value, value + reach) if value == limits[0] else (value - reach, value)
    return Rate(
        value=value,
        low=min(low, value),
        high=max(high, value),
        numerator=numerator,
        denominator=denominator,
        truth=truth.value,
    )


@lru_cache(maxsize=2)  # those of rates and of differences: every figure of a run takes the same
def bootstrap_weights(samples: int, seed: int, resamples: int = RESAMPLES) -> Tensor:
    """How often each of `samples` texts is drawn in each resample, [resamples, samples]; read only."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(samples, (resamples, samples), generator=generator)
    weights = torch.zeros(resamples, samples, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


def ratio(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Element-wise ratio of the resamples that have a denominator at all."""
    usable = denominators > 0
    return numerators[usable] / denominators[usable]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """a - b of one rate over the same texts, with its corrected interval."""

    value: float
    low: float
    high: float


def paired_difference(
    a: Sequence[Count],
    b: Sequence[Count],
    *,
    comparisons: int = 1,
    seed: int = 0,
    resamples: int = 20_000,
) -> Difference:
    """Paired bootstrap over texts, Bonferroni-corrected for `comparisons` such differences.

    For many texts and few comparisons: resamples of few texts spread too little, and no quantile lies
    beyond them (eagle3.search.bounds.rate_difference is for those). Resamples without a denominator are
    dropped. Where fewer than two texts count, nothing is known of the spread, and where nothing was
    counted of one of the two, nothing at all, so 0: then the interval is unbounded.
    """
    if len(a) != len(b):
        raise BadInput(f"paired comparison of {len(a)} texts with {len(b)}")
    tail = (1 - CONFIDENCE) / 2 / comparisons
    if tail * resamples < 1:
        raise ValueError(f"{resamples} resamples do not reach a tail of {tail:.1e}")
    ones, others = pooled_ratio(a), pooled_ratio(b)
    if ones is None or others is None:
        return Difference(value=0.0, low=-math.inf, high=math.inf)
    value = ones - others
    if sum(bool(x.denominator or y.denominator) for x, y in zip(a, b, strict=True)) < 2:
        return Difference(value=value, low=-math.inf, high=math.inf)
    weights = bootstrap_weights(len(a), seed, resamples)
    sums = [
        weights @ torch.tensor([getattr(c, part) for c in counts], dtype=torch.float64)
        for counts in (a, b)
        for part in ("numerator", "denominator")
    ]
    usable = (sums[1] > 0) & (sums[3] > 0)
    differences = sums[0][usable] / sums[1][usable] - sums[2][usable] / sums[3][usable]
    low, high = torch.quantile(differences, torch.tensor([tail, 1 - tail]).double()).tolist()
    return Difference(value=value, low=low, high=high)


def pooled_ratio(counts: Sequence[Count]) -> float | None:
    """A ratio of sums; None where nothing was counted."""
    total = sum(c.denominator for c in counts)
    return sum(c.numerator for c in counts) / total if total else None


def summarise(
    texts: Sequence[Mapping[str, Count]], truth: Truth, steps: int, seed: int = 0
) -> tuple[dict[str, Rate], dict[str, list[tuple[int, Rate]]], list[str]]:
    """Metrics, curves over steps, and notes on what could not be computed for want of positions.

    Counts named accuracy/TRUTH are of that truth, all others of `truth`.
    """
    metrics: dict[str, Rate] = {}
    curves: dict[str, list[tuple[int, Rate]]] = {}
    notes: list[str] = []
    for name in texts[0]:
        length = name.startswith("accept_length")
        limits = (1.0, steps + 1.0) if length else (0.0, 1.0)
        of = Truth(name.partition("/")[2]) if name.startswith("accuracy/") else truth
        found = rate([text[name] for text in texts], of, limits=limits, seed=seed)
        if found is None:
            notes.append(f"{name} has no scored position and is left out")
        elif "@" in name:
            curve, step = name.split("@")
            curves.setdefault(curve, []).append((int(step), found))
        else:
            metrics[name] = found
    return metrics, curves, notes

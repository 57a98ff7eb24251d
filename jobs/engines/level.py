"""Everything that a benchmark measured at one concurrency."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.metrics import Rate
from jobs.engines import beside, breakdown, figures, known_good
from jobs.engines.arms import BASELINE, FEWER, SPECULATIVE, Measured
from jobs.engines.engine import Draft
from jobs.engines.limits import Advice, Limits, advise, in_words, split


@dataclass(frozen=True, kw_only=True)
class Level:
    """Everything at one concurrency."""

    concurrency: int
    tok_s: figures.Interval
    baseline: figures.Interval | None
    speedup: figures.Interval | None
    accept_length: Rate | None
    stood: Sequence[float] | None
    first_token_s: tuple[float, float]
    decode_tok_s: float | None
    tok_s_by_request: float
    limits: Limits | None
    advice: Advice | None
    between_starts: float | None
    by_context: Sequence[breakdown.Bucket]
    over_time: Sequence[breakdown.Moment]
    floor: beside.Simulated | None
    ceiling: beside.Simulated | None
    chain: beside.Chain | None
    known_good: known_good.KnownGood | None

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "concurrency": self.concurrency,
            "tok_s": self.tok_s.plain(),
            "tok_s_baseline": self.baseline.plain() if self.baseline else None,
            "speedup": self.speedup.plain() if self.speedup else None,
            "accept_length": self.accept_length.plain() if self.accept_length else None,
            "per_position": list(self.stood) if self.stood else None,
            "first_token_s": {"median": self.first_token_s[0], "p95": self.first_token_s[1]},
            "decode_tok_s": self.decode_tok_s,
            "tok_s_by_request": self.tok_s_by_request,
            "limits": self.limits.plain() if self.limits else None,
            "advice": self.advice.plain() if self.advice else None,
            "limit_in_words": in_words(self.limits, self.advice) if self.limits else [],
            "between_starts": self.between_starts,
            "by_context": [bucket.plain() for bucket in self.by_context],
            "over_time": [moment.plain() for moment in self.over_time],
            "parts_in_words": breakdown.in_words(self.by_context, self.over_time),
            "floor": self.floor.plain() if self.floor else None,
            "ceiling": self.ceiling.plain() if self.ceiling else None,
            "chain": self.chain.plain() if self.chain else None,
            "known_good": self.known_good.plain() if self.known_good else None,
            "beside_in_words": [
                *beside.simulated_in_words(
                    self.floor,
                    self.ceiling,
                    self.tok_s.value,
                    self.baseline.value if self.baseline else None,
                ),
                *beside.chain_in_words(self.chain, self.tok_s.value, self.accept_length),
                *known_good.in_words(self.known_good, self.tok_s.value, self.accept_length),
            ],
        }


def level_of(
    measured: Measured, concurrency: int, draft: Draft, seed: int, alone: float | None
) -> Level:
    """The figures at one concurrency; of a drafter that is asked so, and whose accept length on its own
    has this lower bound.
    """
    drafted = measured.of(SPECULATIVE, concurrency)
    plain = measured.of(BASELINE, concurrency)
    fewer = measured.of(FEWER, concurrency)
    most = draft.steps + 1
    length = figures.accept_length(drafted, most, seed)
    stood = figures.per_position(drafted, draft.steps)
    limits = advice = None
    step_s, round_s = figures.token_s(plain) if plain else None, figures.round_s(drafted)
    if step_s and round_s and length:
        limits = Limits(
            concurrency=concurrency,
            step_s=step_s,
            round_s=round_s,
            accept_length=length.value,
            steps=draft.steps,
        )
        if fewer and (other := figures.round_s(fewer)) and draft.topk == 1:
            limits = split(limits, 1, other)
        advice = advise(limits, stood) if stood else None
    token_s = figures.token_s(drafted)
    told = beside.lengths(draft)
    floor, ceiling = (
        beside.simulated_at(measured.of(arm, concurrency), told[arm], most, limits, seed)
        for arm in (beside.FLOOR, beside.CEILING)
    )
    return Level(
        concurrency=concurrency,
        tok_s=figures.typical([figures.tok_s(p) for p in drafted]),
        baseline=figures.typical([figures.tok_s(p) for p in plain]) if plain else None,
        speedup=measured.speedup(concurrency),
        accept_length=length,
        stood=stood,
        first_token_s=figures.first_token_s(drafted),
        decode_tok_s=1 / token_s if token_s else None,
        tok_s_by_request=statistics.fmean(map(figures.tok_s_by_request, drafted)),
        limits=limits,
        advice=advice,
        between_starts=measured.between_starts(concurrency),
        by_context=breakdown.by_context(drafted, plain, most, seed),
        over_time=breakdown.over_time(drafted, most, seed),
        floor=floor,
        ceiling=ceiling,
        chain=beside.chain_at(measured.of(beside.CHAIN, concurrency), drafted, draft.steps, seed),
        known_good=known_good.known_good_at(
            measured.of(known_good.KNOWN_GOOD, concurrency), length, draft, seed, alone
        ),
    )

"""Figures of passes, each made of raw counts by the definition that stands beside it.

tok/s               answered tokens, the prefill's among them, over the pass's seconds
tok/s by request    tokens over latency, the mean of the requests
decode tok/s        tokens behind the first one over the seconds behind the first one, a request
round               seconds behind the first token over the target's forwards, a request
accept length       1 + accepted drafted tokens over rounds: the bonus is in, the prefill's token out
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.metrics import Count, Rate, Truth, rate
from eagle3.student import t_quantile
from jobs.engines.records import Answered, Pass

TAIL = 0.025  # to each side of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval; without two values there is none."""

    value: float
    low: float | None
    high: float | None
    count: int

    def plain(self) -> dict[str, Any]:
        """As plain data: bounds only where there are any."""
        bounds = {} if self.low is None else {"low": self.low, "high": self.high}
        return {"value": self.value, **bounds}


def tok_s(p: Pass) -> float:
    """Tokens a second of the whole pass."""
    return sum(a.completion_tokens for a in p.answers) / p.wall_s


def tok_s_by_request(p: Pass) -> float:
    """Tokens a second as each request sees them, in the mean."""
    return statistics.fmean(a.completion_tokens / a.latency_s for a in p.answers)


def decode_s(answers: Sequence[Answered]) -> float:
    """Seconds behind the first tokens."""
    return sum(a.latency_s - a.first_token_s for a in answers)


def token_s(passes: Sequence[Pass]) -> float | None:
    """Seconds a token behind the first one: without a drafter, a step of the target."""
    answers = [a for p in passes for a in p.answers]
    tokens = sum(a.completion_tokens - 1 for a in answers)
    return decode_s(answers) / tokens if tokens else None


def rounds_of(passes: Sequence[Pass]) -> int | None:
    """The target's forwards that verified a draft, of the requests or else of the server."""
    found = 0
    for p in passes:
        own = [a.rounds for a in p.answers]
        counted = p.counted.rounds if None in own else sum(n for n in own if n is not None)
        if counted is None:
            return None
        found += counted
    return found


def round_s(passes: Sequence[Pass]) -> float | None:
    """Seconds a round, as a request sees it."""
    rounds = rounds_of(passes)
    return decode_s([a for p in passes for a in p.answers]) / rounds if rounds else None


def accept_counts(passes: Sequence[Pass]) -> list[Count]:
    """(gained tokens, rounds) for each prompt over all passes: at temperature 0 they answer the same, so
    that more passes are no more evidence. Where an engine counts none for a request, one count of all.
    """
    by_prompt: dict[str, Count] = {}
    pooled = Count(0, 0)
    whole = True
    for p in passes:
        for a in p.answers:
            count = gained(a.completion_tokens, a.accepted, a.rounds, 1)
            whole = whole and count is not None
            if count is not None:
                by_prompt[a.prompt] = plus(by_prompt.get(a.prompt, Count(0, 0)), count)
        tokens = sum(a.completion_tokens for a in p.answers)
        counted = gained(tokens, p.counted.accepted, p.counted.rounds, len(p.answers))
        pooled = pooled if counted is None else plus(pooled, counted)
    if whole:
        return list(by_prompt.values())
    return [pooled] if pooled.denominator else []


def plus(one: Count, other: Count) -> Count:
    """The sum of two counts."""
    return Count(one.numerator + other.numerator, one.denominator + other.denominator)


def gained(tokens: int, accepted: int | None, rounds: int | None, requests: int) -> Count | None:
    """Tokens gained and rounds: the accepted ones with a bonus each, else all behind the prefill's."""
    if rounds is None:
        return None
    return Count(tokens - requests if accepted is None else accepted + rounds, rounds)


def accept_length(passes: Sequence[Pass], most: int, seed: int) -> Rate | None:
    """The served accept length, by bootstrap over prompts; `most` is the highest possible one."""
    counts = accept_counts(passes)
    if not counts:
        return None
    return rate(counts, Truth.target_argmax, limits=(1.0, float(most)), seed=seed)


def per_position(passes: Sequence[Pass], steps: int) -> list[float] | None:
    """Share of rounds in which at least j drafted tokens stood, j = 1 … steps; None: not counted."""
    rounds, stood = 0, [0] * steps
    for p in passes:
        histograms = [a.histogram for a in p.answers]
        if all(h is not None for h in histograms):
            for h in histograms:
                assert h is not None
                rounds += sum(h)
                stood = [n + sum(h[j + 1 :]) for j, n in enumerate(stood)]
        elif p.counted.per_position and p.counted.rounds:
            rounds += p.counted.rounds
            stood = [a + b for a, b in zip(stood, p.counted.per_position, strict=False)]
        else:
            return None
    return [n / rounds for n in stood] if rounds else None


def first_token_s(passes: Sequence[Pass]) -> tuple[float, float]:
    """Median and 95th percentile of the time to the first token."""
    times = sorted(a.first_token_s for p in passes for a in p.answers)
    return statistics.median(times), times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)]


def speedup(pairs: Sequence[tuple[Pass, Pass]]) -> Interval:
    """How many times the baseline's tok/s the drafter's is: the geometric mean of (baseline, drafter)
    pairs, with Student's interval of its logarithm.
    """
    return ratio_of([(tok_s(drafted), tok_s(plain)) for plain, drafted in pairs])


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The geometric mean of ratios."""
    logs = [math.log(a / b) for a, b in pairs]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(value=math.exp(mean), low=None, high=None, count=len(logs))
    reach = t975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(
        value=math.exp(mean),
        low=math.exp(mean - reach),
        high=math.exp(mean + reach),
        count=len(logs),
    )


def typical(values: Sequence[float]) -> Interval:
    """The geometric mean of positive figures, with Student's interval of its logarithm."""
    return ratio_of([(value, 1.0) for value in values])


def t975(freedom: int) -> float:
    """Student's t of a 95 % interval."""
    return t_quantile(TAIL, freedom)


def accepted(answers: Sequence[Answered], steps: int) -> Rate | None:
    """The accept length that answers had which came one at a time; None: no rounds were counted."""
    counts = [gained(a.completion_tokens, a.accepted, a.rounds, 1) for a in answers]
    known = [count for count in counts if count is not None]
    if not known:
        return None
    return rate(known, Truth.target_argmax, limits=(1.0, steps + 1.0))

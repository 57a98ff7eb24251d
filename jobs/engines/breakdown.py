"""The drafter's passes taken apart: by the length of the context, and in the order they were run.

Buckets of context are those of the prompt's length, from a power of two up to below the next, so that
they are the same in every run. The definitions are those of `figures`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.metrics import Rate
from jobs.engines import figures
from jobs.engines.records import Answered, Counters, Pass

NOTABLE = 0.01  # a change over time below it, relative, is not worth a word


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Requests whose prompts have `start` to below `end` tokens."""

    start: int
    end: int
    prompts: int
    accept_length: Rate | None  # None: the engine does not count for each request
    decode_tok_s: figures.Interval  # over passes
    baseline: figures.Interval | None  # the same prompts without a drafter

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "from": self.start,
            "below": self.end,
            "prompts": self.prompts,
            "accept_length": self.accept_length.plain() if self.accept_length else None,
            "decode_tok_s": self.decode_tok_s.plain(),
            "decode_tok_s_baseline": self.baseline.plain() if self.baseline else None,
        }


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One pass; `after_s` is from the first one's start to its own."""

    number: int
    after_s: float
    accept_length: Rate | None
    decode_tok_s: float | None

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        length = self.accept_length
        return {**vars(self), "accept_length": length.plain() if length else None}


def by_context(
    drafted: Sequence[Pass], plain: Sequence[Pass], most: int, seed: int
) -> list[Bucket]:
    """The drafter's passes by bucket, shortest contexts first; `most` is the highest accept length.

    Left out are buckets in which nothing was decoded, or counted and never verified.
    """
    found = []
    for exponent in sorted({exponent_of(a) for p in drafted for a in p.answers}):
        own, theirs = within(drafted, exponent), within(plain, exponent)
        speed = decode_tok_s(own)
        if speed is None or figures.rounds_of(own) == 0:
            continue
        found.append(
            Bucket(
                start=1 << exponent,
                end=1 << (exponent + 1),
                prompts=len({a.prompt for p in own for a in p.answers}),
                accept_length=figures.accept_length(own, most, seed),
                decode_tok_s=speed,
                baseline=decode_tok_s(theirs),
            )
        )
    return found


def exponent_of(answer: Answered) -> int:
    """Of the highest power of two that its prompt's length reaches."""
    return max(answer.prompt_tokens, 1).bit_length() - 1


def within(passes: Sequence[Pass], exponent: int) -> list[Pass]:
    """The passes with the requests of one bucket only; what the server counted was for all of them."""
    parts = [(p, tuple(a for a in p.answers if exponent_of(a) == exponent)) for p in passes]
    return [replace(p, answers=answers, counted=Counters()) for p, answers in parts if answers]


def decode_tok_s(passes: Sequence[Pass]) -> figures.Interval | None:
    """Decode tok/s over passes; None where nothing came behind the first tokens."""
    times = [figures.token_s([p]) for p in passes]
    found = [1 / seconds for seconds in times if seconds]
    return figures.typical(found) if found else None


def over_time(drafted: Sequence[Pass], most: int, seed: int) -> list[Moment]:
    """The drafter's passes in the order in which they were run."""
    passes = sorted(drafted, key=lambda p: p.began)
    moments = []
    for p in passes:
        seconds = figures.token_s([p])
        moments.append(
            Moment(
                number=p.number,
                after_s=p.began - passes[0].began,
                accept_length=figures.accept_length([p], most, seed),
                decode_tok_s=1 / seconds if seconds else None,
            )
        )
    return moments


def trend(points: Sequence[tuple[float, float]]) -> figures.Interval | None:
    """By what a positive figure is multiplied from its first to its last point (seconds, figure), by
    the straight line through the figures' logarithms, with Student's interval. None where fewer than
    three points, or no time between them, leave no spread around a line.
    """
    if len(points) < 3:
        return None
    times, logs = [at for at, _ in points], [math.log(value) for _, value in points]
    middle, mean = statistics.fmean(times), statistics.fmean(logs)
    spread = sum((at - middle) ** 2 for at in times)
    if not spread:
        return None
    slope = sum((at - middle) * (y - mean) for at, y in zip(times, logs, strict=True)) / spread
    left = sum((y - mean - slope * (at - middle)) ** 2 for at, y in zip(times, logs, strict=True))
    freedom = len(points) - 2
    long = max(times) - min(times)
    reach = figures.t975(freedom) * math.sqrt(left / freedom / spread) * long
    change = slope * long
    return figures.Interval(
        value=math.exp(change),
        low=math.exp(change - reach),
        high=math.exp(change + reach),
        count=len(points),
    )


def in_words(buckets: Sequence[Bucket], moments: Sequence[Moment]) -> list[str]:
    """What a person should know, a sentence each: nothing where contexts and passes are alike."""
    counted = [b for b in buckets if b.accept_length is not None]
    lines = []
    if len(counted) > 1 and (line := apart(counted[0], counted[-1])):
        lines.append(line)
    named: Mapping[str, Callable[[Moment], float | None]] = {
        "the accept length": lambda m: m.accept_length.value if m.accept_length else None,
        "decode tok/s": lambda m: m.decode_tok_s,
    }
    for name, of in named.items():
        points = [(m.after_s, value) for m in moments if (value := of(m))]
        found = trend(points)
        if found is None or found.low is None or found.high is None:
            continue
        if found.low <= 1 <= found.high or abs(found.value - 1) < NOTABLE:
            continue
        went = "rose" if found.value > 1 else "fell"
        lines.append(
            f"{name} {went} from {points[0][1]:.2f} to {points[-1][1]:.2f} over {len(points)} passes in "
            f"{points[-1][0]:.0f} s: {found.value - 1:+.1%} by the line through them "
            f"[{found.low - 1:+.1%}, {found.high - 1:+.1%}]"
        )
    return lines


def apart(short: Bucket, long: Bucket) -> str | None:
    """The shortest contexts against the longest; None where their intervals overlap."""
    one, other = short.accept_length, long.accept_length
    assert one is not None
    assert other is not None
    if one.low <= other.high and other.low <= one.high:
        return None
    return (
        f"the accept length is {interval(one)} on prompts of {span(short)} tokens, but "
        f"{interval(other)} on those of {span(long)} (decode tok/s {speeds(short)} and {speeds(long)})"
    )


def interval(rate: Rate) -> str:
    """'2.34 [2.31, 2.37]'."""
    return f"{rate.value:.2f} [{rate.low:.2f}, {rate.high:.2f}]"


def span(bucket: Bucket) -> str:
    """'1024 to 2047'."""
    return f"{bucket.start} to {bucket.end - 1}"


def speeds(bucket: Bucket) -> str:
    """'55.1 against 40.2 without'."""
    without = "" if bucket.baseline is None else f" against {bucket.baseline.value:.1f} without"
    return f"{bucket.decode_tok_s.value:.1f}{without}"

"""The arms of a benchmark: a server without a drafter, one with it, and how their passes are paired.

Together   both servers stand; each pair is one pass of each, the order changing from pair to pair.
In blocks  where there is no room for two: baseline, drafter, baseline, each a server of its own. What
           the two baselines differ by is what a start alone does, and widens the interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jobs.engines.figures import Interval, speedup, tok_s
from jobs.engines.near_ties import Tie
from jobs.engines.records import Pass
from jobs.engines.started import Running

BASELINE, SPECULATIVE, FEWER = "baseline", "speculative", "fewer_steps"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a measurement ends."""

    pairs: int  # at most, at each concurrency
    least: int  # pairs before precision may end it
    precision: float  # half-width of the speedup's interval, relative
    minutes: float
    repeats: int  # disturbed pairs that are measured again


@dataclass
class Measured:
    """All passes, and what became of them."""

    passes: list[Pass] = field(default_factory=list)
    starts: list[Running] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # arms beside, by why they were not run
    ties: list[Tie] = field(default_factory=list)  # where the drafter's texts leave the baseline's

    def pids(self) -> set[int] | None:
        """Of all servers and of this process, which asks them: an idle one beside that which is asked
        may be busy waiting. None where one is a person's own or in a container, whose processes are
        not known.
        """
        if any(r.server is None or not r.server.sees_all for r in self.starts):
            return None
        return {pid for running in self.starts for pid in running.pids()}

    def of(self, arm: str, concurrency: int, server: int | None = None) -> list[Pass]:
        """The passes of an arm in their order, disturbed ones left out where others are left."""
        found = [
            p
            for p in self.passes
            if p.arm == arm and p.concurrency == concurrency and server in (None, p.server)
        ]
        return [p for p in found if not p.disturbed] or found

    def pairs(self, concurrency: int, server: int | None = None) -> list[tuple[Pass, Pass]]:
        """(baseline, drafter) by number; undisturbed ones, where there are any."""
        plain = {p.number: p for p in self.raw(BASELINE, concurrency, server)}
        drafted = {p.number: p for p in self.raw(SPECULATIVE, concurrency, None)}
        both = [(plain[n], drafted[n]) for n in sorted(plain.keys() & drafted.keys())]
        return [(a, b) for a, b in both if not (a.disturbed or b.disturbed)] or both

    def raw(self, arm: str, concurrency: int, server: int | None) -> list[Pass]:
        """All passes of an arm, disturbed ones too."""
        return [
            p
            for p in self.passes
            if p.arm == arm and p.concurrency == concurrency and server in (None, p.server)
        ]

    def speedup(self, concurrency: int) -> Interval | None:
        """The drafter's tok/s over the baseline's; of two baselines the wider interval around both."""
        servers = sorted({p.server for p in self.raw(BASELINE, concurrency, None)})
        found = [speedup(pairs) for s in servers if (pairs := self.pairs(concurrency, s))]
        if not found:
            return None
        lows = [i.low for i in found if i.low is not None]
        highs = [i.high for i in found if i.high is not None]
        return Interval(
            value=math.exp(sum(math.log(i.value) for i in found) / len(found)),
            low=min(lows) if len(lows) == len(found) else None,
            high=max(highs) if len(highs) == len(found) else None,
            count=sum(i.count for i in found),
        )

    def between_starts(self, concurrency: int) -> float | None:
        """By how much two starts of the baseline differ, relative; None: there was one."""
        servers = sorted({p.server for p in self.raw(BASELINE, concurrency, None)})
        if len(servers) < 2:
            return None
        means = [
            sum(map(tok_s, found)) / len(found)
            for s in servers
            if (found := self.of(BASELINE, concurrency, s))
        ]
        return max(means) / min(means) - 1


# Asks a running server all prompts at a concurrency, as the pass of that number.
Ask = Callable[[Running, int, int], Pass]


def enough(measured: Measured, concurrency: int, budget: Budget) -> bool:
    """Whether the interval is as narrow as asked for, or the pairs are used up."""
    pairs = measured.pairs(concurrency)
    sound = [pair for pair in pairs if not (pair[0].disturbed or pair[1].disturbed)]
    if len(sound) >= budget.pairs:
        return True
    if len(sound) < max(budget.least, 2):
        return False
    found = speedup(sound)
    assert found.low is not None
    return (found.high or 0) / found.value - 1 <= budget.precision


def together(
    plain: Running,
    drafted: Running,
    ask: Ask,
    levels: Sequence[int],
    budget: Budget,
    measured: Measured,
) -> None:
    """Pairs of passes at every concurrency, until each is known well enough or the budget is used."""
    began, repeats = time.monotonic(), budget.repeats
    number = 0
    open_levels = list(levels)
    while open_levels:
        for level in list(open_levels):
            order = (plain, drafted) if number % 2 == 0 else (drafted, plain)
            pair = [ask(running, level, number) for running in order]
            measured.passes += pair
            if any(p.disturbed for p in pair) and repeats > 0:
                repeats -= 1
                measured.notes.append(said_disturbed(pair, again=True))
                continue
            if any(p.disturbed for p in pair):
                measured.notes.append(said_disturbed(pair, again=False))
            if enough(measured, level, budget) or number + 1 >= budget.pairs + budget.repeats:
                open_levels.remove(level)
        number += 1
        if open_levels and time.monotonic() - began > budget.minutes * 60:
            measured.notes.append(
                f"ended by job.budget.minutes={budget.minutes:g} after {number} pairs; the interval "
                "is as wide as it is"
            )
            return


def block(
    running: Running,
    ask: Ask,
    levels: Sequence[int],
    passes: int,
    measured: Measured,
    seconds: float = math.inf,
) -> None:
    """So many passes of one server at every concurrency; fewer where two have taken so long."""
    began = time.monotonic()
    for number in range(passes):
        if number >= 2 and time.monotonic() - began > seconds:
            measured.notes.append(
                f"{running.label}: ended by job.budget.minutes after {number} passes of {passes}"
            )
            return
        for level in levels:
            found = ask(running, level, number)
            measured.passes.append(found)
            if found.disturbed:
                why = "; ".join(found.disturbed)
                measured.notes.append(
                    f"pass {number} of {running.label} at {level} at once was disturbed ({why}); where "
                    "others were not, it is left out"
                )


def said_disturbed(pair: Sequence[Pass], *, again: bool) -> str:
    """What disturbed a pair."""
    why = "; ".join(dict.fromkeys(what for p in pair for what in p.disturbed))
    level = pair[0].concurrency
    done = "it is measured again" if again else "it is not measured again (job.budget.repeats)"
    return f"pair {pair[0].number} at {level} at once was disturbed ({why}); {done}"

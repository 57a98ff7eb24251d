"""Where the time goes, and what would be best: from seconds a step and seconds a round.

A round drafts `steps` times and verifies once; it takes `fixed + steps · draft` seconds, where `fixed`
holds the verification, which on a GPU that waits for memory hardly grows with a few tokens more. Of two
arms with other steps both are known. A drafter pays where it is accepted longer than a round takes
plain steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Limits:
    """At one concurrency; seconds as a request sees them."""

    concurrency: int
    step_s: float  # of the target without a drafter
    round_s: float
    accept_length: float
    steps: int
    draft_s: float | None = None  # of one draft step; None: only one arm was measured
    fixed_s: float | None = None  # of a round without its draft steps

    @property
    def break_even(self) -> float:
        """The accept length below which the drafter slows serving down."""
        return self.round_s / self.step_s

    @property
    def speedup(self) -> float:
        """Of decoding, as the accept length and the two times give it."""
        return self.accept_length / self.break_even

    @property
    def perfect(self) -> float:
        """The speedup of decoding were every drafted token accepted."""
        return (self.steps + 1) / self.break_even

    def decode_tok_s(self, accept_length: float) -> float:
        """Of one request at another accept length: rounds take as long, whatever stands of them."""
        return accept_length / self.round_s

    def plain(self) -> dict[str, Any]:
        """As plain data, what is derived included."""
        return {
            **vars(self),
            "break_even": self.break_even,
            "speedup": self.speedup,
            "perfect": self.perfect,
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What other numbers of steps are predicted to give; steps 0 is no drafter."""

    by_steps: Mapping[int, float]  # decode tok/s of one request
    best: int

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"by_steps": {str(s): v for s, v in self.by_steps.items()}, "best": self.best}


def split(limits: Limits, other_steps: int, other_round_s: float) -> Limits:
    """The same with a round's parts, from a second arm of the same drafter with other steps.

    A draft step cannot take less than nothing: measured so, all of the round counts as fixed.
    """
    if other_steps == limits.steps:
        raise ValueError("two arms of the same steps do not tell draft and verification apart")
    draft = max(0.0, (limits.round_s - other_round_s) / (limits.steps - other_steps))
    fixed = limits.round_s - draft * limits.steps
    return Limits(**{**vars(limits), "draft_s": draft, "fixed_s": fixed})


def advise(limits: Limits, stood: Sequence[float]) -> Advice | None:
    """The best number of steps up to those measured; None where a round's parts are not known.

    `stood` is the share of rounds in which at least j drafted tokens stood, j = 1 … steps.
    """
    if limits.draft_s is None or limits.fixed_s is None:
        return None
    predicted = {0: 1 / limits.step_s}
    for steps in range(1, limits.steps + 1):
        length = 1 + sum(stood[:steps])
        predicted[steps] = length / (limits.fixed_s + steps * limits.draft_s)
    return Advice(by_steps=predicted, best=max(predicted, key=lambda s: predicted[s]))


def in_words(limits: Limits, advice: Advice | None) -> list[str]:
    """What a person should know, a sentence each."""
    ms = 1000.0
    lines = [
        f"a round takes {limits.round_s * ms:.1f} ms, a plain step {limits.step_s * ms:.1f} ms: "
        f"break-even at accept length {limits.break_even:.2f}; it is {limits.accept_length:.2f}"
    ]
    if limits.perfect <= 1:
        lines.append(
            f"even a perfect drafter would not pay: {limits.steps + 1} tokens a round give "
            f"{limits.perfect:.2f} times the baseline's decoding"
        )
    elif limits.accept_length < limits.break_even:
        lines.append(
            f"the drafter is what limits: a perfect one would give {limits.perfect:.2f} times the "
            "baseline's decoding"
        )
    else:
        lines.append(
            f"a perfect drafter would give {limits.perfect:.2f} times the baseline's decoding"
        )
    if limits.draft_s is not None and limits.fixed_s is not None:
        lines.append(
            f"of a round {limits.fixed_s * ms:.1f} ms are verification and the engine's own work, "
            f"{limits.draft_s * ms:.1f} ms each draft step"
        )
    if advice is not None:
        best, now = advice.best, limits.steps
        gain = advice.by_steps[best] / advice.by_steps[now] - 1
        if best == 0:
            lines.append("best: no drafter at this concurrency")
        elif best == now:
            lines.append(f"best: the {now} steps that it has")
        else:
            lines.append(f"best: {best} steps, predicted {gain:+.0%} decode tok/s against {now}")
    return lines

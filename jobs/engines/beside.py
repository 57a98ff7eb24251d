"""Arms beside the measurement, each a start more and one pass at every concurrency.

Simulated  SGLang takes as many tokens a round as it is told: one is the floor, what a drafter costs that
           is never right; all of a round is the ceiling. Their texts mean nothing and are not compared.
Chain      beside a tree, a chain of as many steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.metrics import Rate
from jobs.engines import figures
from jobs.engines.arms import FEWER
from jobs.engines.breakdown import NOTABLE
from jobs.engines.engine import Draft
from jobs.engines.limits import Limits
from jobs.engines.records import Pass, Request
from jobs.engines.simulated import variables

FLOOR, CEILING, CHAIN = "simulated_floor", "simulated_ceiling", "chain"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A server that is started beside those that are compared, and what it is asked."""

    label: str
    draft: Draft
    requests: Sequence[Request]
    environment: Mapping[str, str] = field(default_factory=dict)


def fewer_steps(draft: Draft, requests: Sequence[Request]) -> Arm:
    """One draft step, which tells drafting and verifying apart."""
    return Arm(label=FEWER, draft=Draft(folder=draft.folder, steps=1), requests=requests)


def chain_of(draft: Draft, requests: Sequence[Request]) -> Arm:
    """A chain of the tree's steps."""
    return Arm(label=CHAIN, draft=Draft(folder=draft.folder, steps=draft.steps), requests=requests)


def lengths(draft: Draft) -> Mapping[str, int]:
    """The accept lengths of the simulated arms; a tree of fewer tokens than steps ends before them."""
    return {FLOOR: 1, CEILING: min(draft.steps + 1, draft.verified)}


def simulated(draft: Draft, requests: Sequence[Request]) -> list[Arm]:
    """Floor and ceiling. Texts that mean nothing may end anywhere: all are asked for in full length."""
    whole = [replace(request, ignore_eos=True) for request in requests]
    return [
        Arm(
            label=label,
            draft=draft,
            requests=whole,
            environment=variables(length, tree=draft.topk > 1),
        )
        for label, length in lengths(draft).items()
    ]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A simulated arm at one concurrency."""

    length: int  # as the engine was told
    accept_length: Rate | None  # as it was counted
    held: bool  # whether these are one
    tok_s: float
    decode_tok_s: float | None
    predicted: float | None  # decode tok/s, of the drafter's own rounds
    disturbed: bool  # whether other work was under way

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "simulated": True,
            "accept_length_set": self.length,
            "accept_length": self.accept_length.plain() if self.accept_length else None,
            "held": self.held,
            "tok_s": self.tok_s,
            "decode_tok_s": self.decode_tok_s,
            "decode_tok_s_predicted": self.predicted,
            "disturbed": self.disturbed,
        }


def simulated_at(
    passes: Sequence[Pass], length: int, most: int, limits: Limits | None, seed: int
) -> Simulated | None:
    """The figures of a simulated arm; None where it was not run."""
    if not passes:
        return None
    seconds = figures.token_s(passes)
    found = figures.accept_length(passes, most, seed)
    answers = sum(len(p.answers) for p in passes)
    return Simulated(
        length=length,
        accept_length=found,
        # The last round of an answer may be cut where the answer ends.
        held=found is not None
        and length * (found.denominator - answers) <= found.numerator <= length * found.denominator,
        tok_s=figures.typical([figures.tok_s(p) for p in passes]).value,
        decode_tok_s=1 / seconds if seconds else None,
        predicted=limits.decode_tok_s(length) if limits else None,
        disturbed=any(p.disturbed for p in passes),
    )


def simulated_in_words(
    floor: Simulated | None, ceiling: Simulated | None, own: float, baseline: float | None
) -> list[str]:
    """What a person should know, a sentence each; `own` and `baseline` are the measured tok/s."""
    if floor is None or ceiling is None:
        return []
    if other := [arm for arm in (floor, ceiling) if not arm.held]:
        return [
            f"simulated: the engine was told to accept {arm.length} tokens a round, but counted "
            f"{number(arm.accept_length.value if arm.accept_length else None)}: its figures are no bound"
            for arm in other
        ]
    arms = ((floor, "no draft"), (ceiling, "every draft"))
    slowed = [what for arm, what in arms if arm.disturbed]
    without = "" if baseline is None else f", without {baseline:.1f}"
    return [
        f"simulated: {floor.tok_s:.1f} tok/s if no draft stood, {ceiling.tok_s:.1f} if all did "
        f"(measured with the drafter {own:.1f}{without})",
        f"simulated: decode tok/s {number(floor.decode_tok_s)} and {number(ceiling.decode_tok_s)}; the "
        f"drafter's own rounds predict {number(floor.predicted)} and {number(ceiling.predicted)}",
        *(
            f"simulated: the pass in which {what} stood was disturbed, so that its tok/s may be too low"
            for what in slowed
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The chain beside a tree at one concurrency."""

    steps: int
    accept_length: Rate | None
    tok_s: float
    decode_tok_s: float | None
    # "chain" or "tree"; None: by less than NOTABLE, or than the tree's passes differ, or disturbed.
    better: str | None

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        length = self.accept_length
        return {**vars(self), "accept_length": length.plain() if length else None}


def chain_at(passes: Sequence[Pass], tree: Sequence[Pass], steps: int, seed: int) -> Chain | None:
    """The figures of the chain against the tree's passes; None where it was not run."""
    if not passes:
        return None
    seconds = figures.token_s(passes)
    found = figures.typical([figures.tok_s(p) for p in passes]).value
    low, high = one_more([figures.tok_s(p) for p in tree])
    low, high = low * (1 - NOTABLE), high * (1 + NOTABLE)
    better = "chain" if found > high else "tree" if found < low else None
    return Chain(
        steps=steps,
        accept_length=figures.accept_length(passes, steps + 1, seed),
        tok_s=found,
        decode_tok_s=1 / seconds if seconds else None,
        better=None if any(p.disturbed for p in passes) else better,
    )


def one_more(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value of the same kind lies in 95 of 100 cases (Student's interval of a new
    observation, of the logarithm); anywhere, where there are fewer than two.
    """
    if len(values) < 2:
        return 0.0, math.inf
    logs = [math.log(value) for value in values]
    mean, spread = statistics.fmean(logs), statistics.stdev(logs)
    reach = figures.t975(len(logs) - 1) * spread * math.sqrt(1 + 1 / len(logs))
    return math.exp(mean - reach), math.exp(mean + reach)


def chain_in_words(chain: Chain | None, tree_tok_s: float, tree_length: Rate | None) -> list[str]:
    """Which of the two is better, a sentence."""
    if chain is None:
        return []
    verdict = (
        "passes of the same flags differ by as much or were disturbed, so that neither is better"
        if chain.better is None
        else f"the {chain.better} is better here"
    )
    return [
        f"a chain of {chain.steps} steps gives {chain.tok_s:.1f} tok/s at accept length "
        f"{number(chain.accept_length.value if chain.accept_length else None)}, the tree "
        f"{tree_tok_s:.1f} at {number(tree_length.value if tree_length else None)}: {verdict}"
    ]


def number(value: float | None) -> str:
    """'2.50', or that there is none."""
    return "none" if value is None else f"{value:.2f}"

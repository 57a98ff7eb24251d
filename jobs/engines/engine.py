"""What the benchmark and the probe need of an engine, whichever it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eagle3.errors import BadInput
from jobs.engines.records import Answered, Counters, Facts, Request
from jobs.engines.talk import Address


@dataclass(frozen=True, kw_only=True)
class Draft:
    """How a drafter is asked: a chain of `steps`, or a tree with `topk` > 1."""

    folder: Path
    steps: int
    topk: int = 1
    draft_tokens: int | None = None  # the root included; None: steps + 1, which a chain has

    @property
    def verified(self) -> int:
        """Tokens that one forward of the target verifies, the root included."""
        return self.draft_tokens or self.steps + 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A server that is to be started."""

    python: str
    target: Path
    port: int
    draft: Draft | None  # None: without a drafter
    flags: Mapping[str, Any] = field(default_factory=dict)  # a person's own
    launch: Sequence[str] | None = None  # a person's own command line, in place of all of this


class Engine(Protocol):
    """An adapter: everything that differs between engines."""

    name: str

    def command(self, wanted: Wanted) -> list[str]:
        """The command line. Raises BadInput for flags that contradict the job."""

    def lacking(self, address: Address) -> str | None:
        """What keeps a server from being asked; None: it answers its cheap questions."""

    def facts(self, address: Address) -> Facts:
        """What it says of itself. Raises ServerError."""

    def counters(self, address: Address) -> Counters:
        """Its counters. Raises ServerError."""

    def forget(self, address: Address) -> None:
        """Drop what it keeps of earlier prompts, so that none is answered from a cache."""

    def ask(self, address: Address, request: Request, began: float, *, alone: bool) -> Answered:
        """One request; `began` is the pass's start (time.perf_counter). Raises ServerError.

        `alone` says that nothing else is asked meanwhile, so that the server's counters are its own.
        """

    def top_two(self, address: Address, ids: Sequence[int], seconds: float) -> tuple[float, float]:
        """Log-probabilities of the two likeliest tokens behind these, in nats. Raises ServerError."""


def arguments(own: Mapping[str, Any], given: Mapping[str, Any], job: Sequence[str]) -> list[str]:
    """A command line's flags: those of the job, then a person's own. Raises BadInput.

    True stands for a flag alone, a list for several values, a mapping for JSON. `job` are the names
    that only the job sets, so that what was measured is what the hypothesis says.
    """
    line: list[str] = []
    theirs = {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}
    # Engines take any beginning of a flag's name for it, and vLLM parts of its value behind a dot,
    # among them what makes it simulate what is accepted.
    if taken := sorted(
        name for name in theirs if any(own.startswith(name.partition(".")[0]) for own in job)
    ):
        raise BadInput(
            f"engine.flags.{taken[0]} is set by the job itself: drafter and target as they are named, "
            "job.steps, job.topk and job.draft_tokens, and a free port"
        )
    for name, value in {**own, **theirs}.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            raise BadInput(
                f"engine.flags.{name} is false; leave it out, or name the flag that says so"
            )
        if value is True:
            line.append(flag)
        elif isinstance(value, (list, tuple)):
            line += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            line += [flag, json.dumps(value)]
        elif value is not None:
            line += [flag, str(value)]
    return line

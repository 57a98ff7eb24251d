"""What an engine answered, as raw counters: figures are made of these, never stored in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked: token ids, and how many tokens are wanted of the answer."""

    name: str
    ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """How it is asked: at temperature 0, to exactly so many tokens where `ignore_eos`."""

    prompt: Prompt
    ignore_eos: bool
    seconds: float  # until it counts as hung


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One request as it was answered.

    A round is one forward of the target that verifies a draft. Engines that count rounds only for all
    requests together (vLLM) leave `rounds`, `accepted`, `proposed` and `histogram` None.
    """

    prompt: str
    prompt_tokens: int
    output: tuple[int, ...]  # token ids; the first one is the prefill's
    sent_s: float  # after the pass began
    first_token_s: float  # after it was sent
    latency_s: float  # after it was sent
    rounds: int | None = None
    accepted: int | None = None  # drafted tokens that stood; the bonus is none of them
    proposed: int | None = None
    histogram: tuple[int, ...] | None = None  # rounds by how many drafted tokens stood
    printed_accept_length: float | None = None  # as the engine itself gives it for this request

    @property
    def completion_tokens(self) -> int:
        """How many tokens came back."""
        return len(self.output)

    def plain(self) -> dict[str, Any]:
        """As plain data, for a file."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Returned:
    """An answer that came with the target's states."""

    output: tuple[int, ...]  # token ids
    states: Any  # as the engine gives them
    cached: int  # tokens of the prompt that its cache of prefixes answered, and that have no states
    likeliest: Any = None  # at each token of the prompt, as the engine gives it; None: it does not


@dataclass(frozen=True, kw_only=True)
class Counters:
    """A server's own counters since it started; their differences are exact. None: it has none."""

    rounds: int | None = None
    accepted: int | None = None
    proposed: int | None = None
    per_position: tuple[int, ...] = ()  # accepted drafted tokens at each step of a chain
    generated: int | None = None  # tokens
    requests: int | None = None  # that were finished

    def since(self, before: Counters) -> Counters:
        """What was counted between two readings."""

        def difference(now: int | None, then: int | None) -> int | None:
            return None if now is None else now - (then or 0)

        then = (*before.per_position, *[0] * len(self.per_position))
        return Counters(
            rounds=difference(self.rounds, before.rounds),
            accepted=difference(self.accepted, before.accepted),
            proposed=difference(self.proposed, before.proposed),
            per_position=tuple(a - b for a, b in zip(self.per_position, then, strict=False)),
            generated=difference(self.generated, before.generated),
            requests=difference(self.requests, before.requests),
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The prompts asked once at one concurrency, of one server."""

    arm: str  # "baseline", "speculative", …
    server: int  # which start of a server of that arm, from 0
    number: int  # which pass of the measurement, from 0; a baseline's and a drafter's make a pair
    concurrency: int
    began: float  # seconds since 1970
    wall_s: float  # in which a request was under way
    answers: tuple[Answered, ...]
    counted: Counters  # by the server, over the pass
    disturbed: tuple[str, ...] = ()  # what else went on; such a pass is repeated

    def plain(self) -> dict[str, Any]:
        """As plain data, for a file."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a server says of itself."""

    engine: str
    version: str | None
    model: str | None  # the folder that it serves, where it says so
    drafter: str | None
    flags: Mapping[str, Any]  # as in effect
    printed_accept_length: float | None = None  # since it started, as the engine prints it

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "flags": dict(self.flags)}

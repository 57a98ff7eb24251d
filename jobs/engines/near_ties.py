"""Where texts that should be the same go apart: how near the baseline's two likeliest tokens lie there.

Speculation with greedy decoding changes no text but where rounding turns a near tie: the drafter's
server adds up in another order. Far from a tie something else is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.engines.agreement import Agreement
from jobs.engines.engine import Engine
from jobs.engines.records import Pass, Request
from jobs.engines.talk import Address

NEAR = 0.1  # nats; rounding in bfloat16 moves a logit by some hundredths
MOST = 4  # places that are asked about


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Two likeliest tokens of the baseline, behind the part of an answer that both texts have."""

    prompt: str
    at: int  # token of the answer
    gap: float  # nats between them

    @property
    def near(self) -> bool:
        """Whether rounding may have turned it."""
        return self.gap < NEAR

    def plain(self) -> dict[str, object]:
        """As plain data."""
        return {**vars(self), "near": self.near}


def ties(
    engine: Engine,
    address: Address,
    requests: Sequence[Request],
    baseline: Pass,
    agreed: Agreement,
) -> list[Tie]:
    """Ask the baseline about the first places at which texts went apart. Raises ServerError."""
    asked = {request.prompt.name: request for request in requests}
    said = {answer.prompt: answer.output for answer in baseline.answers}
    found = []
    for name, at in agreed.first[:MOST]:
        request = asked[name]
        one, other = engine.top_two(
            address, [*request.prompt.ids, *said[name][:at]], request.seconds
        )
        found.append(Tie(prompt=name, at=at, gap=one - other))
    return found


def in_words(found: Sequence[Tie]) -> list[str]:
    """What the gaps say, a sentence."""
    if not found:
        return []
    gaps = ", ".join(f"{tie.gap:.3f}" for tie in found)
    far = [tie for tie in found if not tie.near]
    if not far:
        return [
            f"where texts go apart the baseline's two likeliest tokens are {gaps} nats apart: near "
            "ties, which rounding turns"
        ]
    return [
        f"where texts go apart the baseline's two likeliest tokens are {gaps} nats apart: at token "
        f"{far[0].at} of prompt {far[0].prompt} rounding does not explain it, so that the drafter "
        "changes what the engine says"
    ]

"""Passes and answers made by hand, for what is computed of them."""

from __future__ import annotations

from typing import Any

from jobs.engines.records import Answered, Counters, Pass, Prompt, Request


def answered(tokens: int = 8, **given: Any) -> Answered:
    """An answer of so many tokens: the first after 0.5 s, each of the others after 0.25 s more."""
    made: dict[str, Any] = {
        "prompt": "0",
        "prompt_tokens": 5,
        "output": tuple(range(tokens)),
        "sent_s": 0.0,
        "first_token_s": 0.5,
        "latency_s": 0.5 + (tokens - 1) / 4,
    }
    return Answered(**{**made, **given})


def one_pass(*answers: Answered, wall_s: float = 1.0, **given: Any) -> Pass:
    """A pass of a drafter's server."""
    made: dict[str, Any] = {
        "arm": "speculative",
        "server": 0,
        "number": 0,
        "concurrency": 1,
        "began": 1.79e9,
        "counted": Counters(),
    }
    return Pass(answers=answers or (answered(),), wall_s=wall_s, **{**made, **given})


def request(
    last: int = 4, *, tokens: int = 21, first: int = 1, seconds: float = 20.0, name: str = ""
) -> Request:
    """A prompt that begins and ends so, for an answer of so many tokens."""
    prompt = Prompt(name=name or f"{first}…{last}", ids=(first, 9, last), new_tokens=tokens)
    return Request(prompt=prompt, ignore_eos=True, seconds=seconds)

"""What is kept of a benchmark so that a later one can be held against it, prompt by prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jobs.engines.figures import accept_counts
from jobs.engines.records import Pass, Request


def kept(requests: Sequence[Request], drafted: Sequence[Pass]) -> dict[str, Any]:
    """A digest of the prompts' token ids, how many tokens each asks for, and the accept length's counts
    by prompt over the passes `drafted`, in the order of `requests`; None where the engine counts none
    for a request.
    """
    counts = accept_counts(drafted)
    whole = len(counts) == len(requests) > 1  # else they are of all requests together
    return {
        "prompts_digest": digest([request.prompt.ids for request in requests]),
        "new_tokens": [request.prompt.new_tokens for request in requests],
        "counts": {
            "passes": len(drafted),
            "tokens": [count.numerator for count in counts],
            "rounds": [count.denominator for count in counts],
        }
        if whole
        else None,
    }


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Of the ids and their order; the names of prompts, which are file names, are left out."""
    text = json.dumps([list(ids) for ids in prompts])
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

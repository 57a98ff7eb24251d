"""A server that a person runs: checked against the hypothesis, measured, and left as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs.engines.engine import Draft, Engine
from jobs.engines.records import Facts
from jobs.engines.started import Running, same_place
from jobs.engines.talk import Address, ServerError

# The flags that say how a drafter is asked, as SGLang's /server_info names them.
ASKED = {
    "speculative_num_steps": lambda draft: draft.steps,
    "speculative_eagle_topk": lambda draft: draft.topk,
    "speculative_num_draft_tokens": lambda draft: draft.verified,
}


def attach(engine: Engine, url: str, label: str) -> Running:
    """A running server. Raises BadInput where it does not answer as this engine."""
    try:
        address = Address.parse(url)
        if lacking := engine.lacking(address):
            raise ServerError(lacking)
        facts = engine.facts(address)
    except (ServerError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"engine.url={url} does not answer as {engine.name}: {error}") from error
    return Running(
        label=label,
        number=0,
        address=address,
        facts=facts,
        ready_s=0.0,
        command=(),
        server=None,
    )


def differences(
    facts: Facts, target: Path, draft: Draft | None, ids: Sequence[int] | None
) -> Iterator[str]:
    """What the server does otherwise than the hypothesis says, a sentence each."""
    if facts.model is not None and not same_place(facts.model, target):
        yield f"it serves the model {facts.model}, not {target}"
    algorithm = facts.flags.get("speculative_algorithm")
    if draft is None:
        if algorithm:
            yield f"it drafts ({algorithm}), but is to be the baseline"
        return
    if "speculative_algorithm" not in facts.flags:
        return  # vLLM does not tell
    if algorithm not in ("EAGLE3", "EAGLE"):
        yield f"its speculative_algorithm is {algorithm}, not EAGLE3"
        return
    for name, asked in ASKED.items():
        if facts.flags.get(name) not in (None, asked(draft)):
            yield f"its {name} is {facts.flags[name]}, but the job asks for {asked(draft)}"
    if facts.drafter is not None and ids is not None:
        own = served_ids(Path(facts.drafter))
        if own is not None and list(own) != list(ids):
            named = f"the layer ids {list(own)}" if own else "no layer ids"
            yield (
                f"its drafter {facts.drafter} names {named}, but the wiring is {list(ids)} there"
            )


def served_ids(folder: Path) -> Sequence[int] | None:
    """The ids in a served drafter's config.json, where SGLang looks, which alone names its drafter;
    None where it cannot be read from here.
    """
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    block = config.get("eagle_config")
    ids = block.get("eagle_aux_hidden_state_layer_ids") if isinstance(block, Mapping) else None
    return ids if isinstance(ids, list) else []


def untold(facts: Facts) -> list[str]:
    """What cannot be checked of a running server."""
    if "speculative_algorithm" in facts.flags:
        return []
    return [
        f"{facts.engine} does not tell its flags or its drafter: that the server serves this drafter "
        "with these ids rests on whoever started it"
    ]

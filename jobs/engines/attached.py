"""A server that a person runs: checked against the hypothesis, measured, and left as it is."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs.engines.engine import Draft, Engine
from jobs.engines.records import Facts
from jobs.engines.started import Running, same_place
from jobs.engines.talk import Address, ServerError

COMPARED = 8 << 30  # bytes of a target's weights up to which a copy of it is compared with it
# The flags that say how a drafter is asked, as SGLang's /server_info names them.
ASKED = {
    "speculative_num_steps": lambda draft: draft.steps,
    "speculative_eagle_topk": lambda draft: draft.topk,
    "speculative_num_draft_tokens": lambda draft: draft.verified,
}

UNSEEN = "its environment is not seen: whether it simulates acceptance is not known"


def attach(engine: Engine, url: str, label: str, key: str = "engine.url") -> Running:
    """A running server, which `key` names. Raises BadInput where it does not answer as this engine."""
    try:
        address = Address.parse(url)
        if lacking := engine.lacking(address):
            raise ServerError(lacking)
        facts = engine.facts(address)
    except (ServerError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{key}={url} does not answer as {engine.name}: {error}") from error
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
    facts: Facts,
    target: Path,
    draft: Draft | None,
    ids: Sequence[int] | None,
    *,
    source: Path | None = None,
) -> Iterator[str]:
    """What the server does otherwise than the hypothesis says, a sentence each; `source` is the drafter
    that it is to serve.
    """
    if other := other_model(facts, target):
        yield other
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
    known = facts.drafter is not None and source is not None
    if known and same_weights(Path(str(facts.drafter)), Path(str(source))) is False:
        yield f"its drafter {facts.drafter} has other weights than {source}"
    if facts.drafter is not None and ids is not None:
        own = served_ids(Path(facts.drafter))
        if own is not None and list(own) != list(ids):
            named = f"the layer ids {list(own)}" if own else "no layer ids"
            yield (
                f"its drafter {facts.drafter} names {named}, but the wiring is {list(ids)} there"
            )


def other_model(facts: Facts, target: Path) -> str | None:
    """That the server serves another model than this folder's; None: not as far as it says.

    A copy of it, weight by weight, is the same, where both can be read from here and are not too large.
    """
    if facts.model is None or same_place(facts.model, target) or is_copy(facts.model, target):
        return None
    return (
        f"it serves the model {facts.model}, not {target}; if these are the same weights, name the "
        f"server's own path as the target, or make {facts.model} a link to it on this host"
    )


def is_copy(model: str, target: Path) -> bool:
    """Whether a folder holds the same weights and config.json as the target's, of COMPARED bytes."""
    folder = Path(model)
    try:
        if (folder / "config.json").read_bytes() != (target / "config.json").read_bytes():
            return False
        size = sum(file.stat().st_size for file in target.iterdir() if is_weights(file))
    except OSError:
        return False
    return size <= COMPARED and same_weights(folder, target) is True


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


def same_weights(one: Path, other: Path) -> bool | None:
    """Whether two folders hold the same files of weights; None where one cannot be read from here."""
    try:
        ours, theirs = (
            {file.name: file.resolve() for file in folder.iterdir() if is_weights(file)}
            for folder in (one, other)
        )
        if not ours or not theirs:
            return None
        return ours.keys() == theirs.keys() and all(
            ours[name] == theirs[name] or filecmp.cmp(ours[name], theirs[name], shallow=False)
            for name in ours
        )
    except OSError:
        return None


def is_weights(file: Path) -> bool:
    """Whether a file holds tensors."""
    return file.suffix in (".safetensors", ".bin")


def unknown(facts: Facts, source: Path) -> list[str]:
    """What cannot be seen of a server that tells its drafter."""
    notes = [UNSEEN]
    if facts.drafter is None or same_weights(Path(facts.drafter), source) is None:
        notes.append(
            f"whether its drafter {facts.drafter} has the weights of {source} is not known"
        )
    return notes


def untold(facts: Facts, source: Path) -> list[str]:
    """What cannot be checked of a running server, or is done to it."""
    if "speculative_algorithm" not in facts.flags:
        return [
            f"{facts.engine} does not tell its flags or its drafter: that the server serves this "
            f"drafter with these ids rests on whoever started it; {UNSEEN}",
            "where the server caches prefixes, prompts that come again are answered from there: first "
            "tokens come sooner than your users'",
        ]
    unseen, *others = unknown(facts, source)
    return [f"the server's cache of prefixes is emptied before each pass; {unseen}", *others]

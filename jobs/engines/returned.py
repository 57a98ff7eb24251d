"""The states that a running server returns with an answer, where it was started to: nothing is recorded.

They are the target's own, as the engine hands them to its drafter. SGLang 0.5.23 gives the prompt's rows
as one block and behind it a row for each further token, as JSON (read there and run).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.slot_states import ROUNDING
from jobs.engines.attached import attach, differences
from jobs.engines.engine import Draft, Engine
from jobs.engines.probing import Chunk, Rows
from jobs.engines.records import Answered, Facts, Request, Returned
from jobs.engines.sglang import SGLang
from jobs.engines.started import Running
from jobs.engines.talk import ServerError

# States travel as text, some 20 bytes a number, so that few positions are asked for: of a target of
# width 7168 with three states a row these are 30 MB.
POSITIONS = 64  # of each prompt
NEW_TOKENS = 8  # behind them
FLAG = "--enable-return-hidden-states"
LABEL = "running"
SEEN = (
    "the states are the target's, as the server hands them to its drafter, of the first "
    f"{POSITIONS} tokens of each prompt; what becomes of them between there and the drafter's fc is "
    "not seen (a server that is started, engine.python=…, is recorded at fc)"
)


@dataclass(frozen=True, kw_only=True)
class Returning:
    """A person's server that returns its states."""

    engine: SGLang
    running: Running


def attached(engine: Engine, url: str, target: Path, draft: Draft) -> Returning:
    """The server there, which drafts as the job says and returns its states. Raises BadInput."""
    if not isinstance(engine, SGLang):
        raise BadInput(
            f"a running {engine.name} returns no states; leave engine.url out and name the interpreter "
            "that serves, engine.python=…: a server is then started and recorded"
        )
    running = attach(engine, url, LABEL)
    if lacking := why_no_states(running.facts):
        raise BadInput(f"engine.url={url}: {lacking}")
    # Which ids it feeds is what is asked, so they are not held against the wiring's.
    if problems := list(differences(running.facts, target, draft, None, source=draft.folder)):
        raise BadInput(f"engine.url={url}: {'; '.join(problems)}")
    return Returning(engine=engine, running=running)


def why_no_states(facts: Facts) -> str | None:
    """Why a server does not return what it feeds a drafter, by its flags; None: it does."""
    if facts.flags.get("aux_hidden_state_capture"):
        return (
            "it runs no drafter (--enable-return-aux-hidden-states), so that no drafter's config.json "
            f"chose its layers; start it with the drafter, and with {FLAG} instead"
        )
    return why_not_whole(facts)


def why_not_whole(facts: Facts) -> str | None:
    """Why a server does not return the states of every position, by its flags; None: it does."""
    mode = facts.flags.get("return_hidden_states_mode")
    full = mode == "full" if mode is not None else facts.flags.get("enable_return_hidden_states")
    return None if full else f"it does not return its states; start it with {FLAG} beside its flags"


def returned(server: Returning, requests: Sequence[Request], width: int) -> Iterator[Rows]:
    """Each prompt asked for its answer, then its beginning twice for states of `width` numbers a row.

    States are asked for under a new key each time, so that the server's cache of prefixes, which has
    none, answers nothing of it and need not be emptied. Raises BadInput.
    """
    for request in requests:
        try:
            answer = server.engine.ask(server.running.address, request, 0.0, alone=True)
        except ServerError as error:
            raise unanswered(request, error) from error
        yield asked_twice(server, request, answer, width)


def asked_twice(server: Returning, request: Request, answer: Answered, width: int) -> Rows:
    """The states of a prompt that was answered, asked for twice. Raises BadInput."""
    prompt = request.prompt
    short = replace(
        request, prompt=replace(prompt, ids=prompt.ids[:POSITIONS], new_tokens=NEW_TOKENS)
    )
    try:
        takes = [
            server.engine.states(server.running.address, short, uuid.uuid4().hex) for _ in range(2)
        ]
    except ServerError as error:
        raise unanswered(request, error) from error
    (prefill, later), (again, _) = (
        rows_of(take, len(short.prompt.ids), width, prompt.name) for take in takes
    )
    return Rows(
        text=torch.tensor([*short.prompt.ids, *takes[0].output]),
        answer=answer,
        prefill=prefill,
        again=again,
        later=[later] if len(later) else [],
    )


def unanswered(request: Request, error: ServerError) -> BadInput:
    """That a prompt got no answer."""
    return BadInput(f"prompt {request.prompt.name} was not answered: {error}")


def rows_of(given: Returned, prompt: int, width: int, name: str) -> tuple[Tensor, Tensor]:
    """The rows of a prompt of so many tokens, [prompt, width], and those behind it. Raises BadInput."""
    if given.states is None:
        raise BadInput(
            f"the server answered prompt {name} without states; start it with {FLAG} beside its flags"
        )
    try:
        block, *others = given.states
        # JSON has no NaN: some servers write null for it.
        prefill, later = tensor(block, width), tensor(others, width)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"the server's states of prompt {name} are no rows of numbers: {error}"
        ) from error
    for rows in (prefill, later):
        if rows.shape[1] != width:
            raise BadInput(
                f"the server's states of prompt {name} have {rows.shape[1]} numbers a row, but the "
                f"drafter's fc takes {width}"
            )
    if len(prefill) != prompt:
        cached = f" ({given.cached} came from its cache of prefixes)" if given.cached else ""
        raise BadInput(
            f"the server returned {len(prefill)} rows for the {prompt} tokens of prompt {name}{cached}; "
            "ask it when it is idle, or start it with --disable-radix-cache"
        )
    for rows, where in ((prefill, "of"), (later, "behind")):
        if bad := int((~rows.isfinite().all(-1)).sum()):
            raise BadInput(
                f"{bad} of the {len(rows)} rows that the server returned {where} prompt {name} hold NaN "
                "or infinity: its target's own states overflow, which no drafter can use"
            )
    return prefill, later


def tensor(rows: Sequence[Sequence[Any]], width: int) -> Tensor:
    """Rows of numbers, [rows, numbers]; of none [0, width]."""
    if not rows:
        return torch.empty(0, width)
    made = torch.tensor([[torch.nan if x is None else x for x in row] for row in rows])
    if made.dim() != 2:
        raise ValueError(f"they have {made.dim()} dimensions")
    return made.float()


def unsettled(chunks: Sequence[Chunk]) -> list[str]:
    """What to say where the two askings gave other states."""
    loud = max((c.noise or 0.0 for c in chunks), default=0.0)
    if loud <= ROUNDING:
        return []
    return [
        f"asked twice, the server returned states that differ by {loud:.2g} of their size, which "
        "is more than rounding: ask it when it answers nobody else"
    ]

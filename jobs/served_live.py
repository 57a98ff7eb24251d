"""A diagnosis asks a server that runs: what it is, which states it feeds, what it accepts.

What is made of that is in `eagle3.diagnosis.heard`. The server is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.data import LAYOUTS
from eagle3.diagnosis.heard import Heard, believed, contradiction
from eagle3.diagnosis.words import rate_words
from eagle3.doctor.server import CHECKED, flags_of
from eagle3.errors import BadInput
from eagle3.metrics import Count
from eagle3.samples import answer_start
from jobs.engines.attached import UNSEEN, attach, differences, same_weights, unknown
from jobs.engines.engine import Draft, Engine
from jobs.engines.figures import accepted, gained
from jobs.engines.hypothesis import class_there
from jobs.engines.probing import AT_THE_END, Chunk, Rows, chunks_of, fed_states, open_end
from jobs.engines.records import Answered, Prompt, Request
from jobs.engines.releases import release
from jobs.engines.returned import (
    FLAG,
    LABEL,
    SEEN,
    Returning,
    asked_twice,
    unanswered,
    unsettled,
    why_no_states,
)
from jobs.engines.setup import ENGINES
from jobs.engines.sglang import SGLang
from jobs.engines.started import Running, same_place
from jobs.engines.talk import ServerError
from jobs.first_layers import plan_layers
from jobs.inspecting import short
from jobs.question import Asked, Kit, Progress, Read

STAGE = "asked"
PROMPTS = 8  # of the data's, whose answers are counted
OF_STATES = 4  # of these, whose states are asked for
ANSWER = 128  # tokens of an answer at most
BEGINNING = 32  # tokens of a text that has no prompt, at most half of it
REQUEST_S = 300.0
STEPS, TOPK, TOKENS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
VLLM_STEPS = "num_speculative_tokens"
NOT_RETURNED = (
    "a running {name} returns none; job=engine_probe with engine.python=… starts one and records it"
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A person's server that serves a drafter."""

    engine: Engine
    running: Running
    url: str
    config_seen: bool  # the config.json of the drafter that it serves can be read from here
    notes: tuple[str, ...]


def attached(asked: Asked, url: str, target: Path) -> tuple[Server, Asked]:
    """The server at engine.url, and the question with what it says of itself: release, flags, and the
    folder that it serves, where that can be read from here. Raises BadInput.
    """
    assert asked.engine is not None
    given = asked.engine
    engine = ENGINES[given.name]()
    running = attach(engine, url, LABEL)
    facts, where = running.facts, f"engine.url={url}"
    version = release(given.name, given.version, facts.version, url, "engine_version")
    if facts.flags.get("speculative_algorithm", "") is None:
        raise BadInput(
            f"{where}: it serves no drafter (no speculative_algorithm); name the server that does, or "
            "leave engine.url out"
        )
    told = {
        name: facts.flags[name]
        for name in CHECKED[engine.name]
        if facts.flags.get(name) not in (None, False, "")
    }
    flags = with_flags(given.flags, told, url)
    check_steps(told.get(STEPS), asked.steps, url)
    draft = Draft(
        folder=asked.drafter,
        steps=asked.steps,
        topk=told.get(TOPK, 1),
        draft_tokens=told.get(TOKENS),
    )
    if problems := list(differences(facts, target, draft, None, source=asked.drafter)):
        raise BadInput(f"{where}: {'; '.join(problems)}")
    notes = [UNSEEN]
    if facts.drafter is None:
        notes.append(
            f"{engine.name} does not tell its drafter: that it is {asked.drafter} is assumed"
        )
    else:
        notes = unknown(facts, asked.drafter)
    folder = served_folder(facts.drafter, asked.drafter)
    if folder is not None and not same_place(str(folder), asked.drafter):
        notes.append(
            f"the server serves {folder}, which has the weights of {asked.drafter}: its config.json is "
            "what is diagnosed"
        )
        asked = replace(asked, drafter=folder, drafter_layout=None)
    server = Server(
        engine=engine,
        running=running,
        url=url,
        config_seen=folder is not None,
        notes=tuple(notes),
    )
    known = replace(
        given,
        version=version,
        engine_class=class_there(engine.name, given.engine_class, target),
        flags=flags,
    )
    return server, replace(asked, engine=known)


def with_flags(given: Mapping[str, Any], told: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The flags that were named with those that the server tells. Raises BadInput for another value."""
    for name, value in flags_of(given).items():
        if name in told and str(told[name]) != str(value):
            raise BadInput(
                f"engine.flags: {name} is {value}, but the server at {url} says {told[name]}; leave it "
                "out"
            )
    return {**flags_of(given), **told}


def check_steps(there: int | None, asked: int, url: str) -> None:
    """Accept lengths of other numbers of steps have other ceilings. Raises BadInput."""
    if there not in (None, asked):
        raise BadInput(
            f"engine.url={url}: it drafts {there} steps, but job.steps={asked} would be scored beside "
            f"it; give job.steps={there}"
        )


def served_folder(served: str | None, drafter: Path) -> Path | None:
    """The folder that is served, where its weights are seen to be the drafter's."""
    if served is None:
        return None
    folder = Path(served)
    there = (folder / "config.json").is_file() and same_weights(folder, drafter)
    return folder if there else None


def heard(
    server: Server, asked: Asked, known: Read, kit: Kit, progress: Progress
) -> tuple[Asked, Read]:
    """The question with what the server returned and counted, and the served wiring with the states
    that it was seen to feed. Raises BadInput where it answers no prompt, or counts no draft.
    """
    assert asked.engine is not None
    assert known.served is not None
    engine = asked.engine
    requests, notes = requests_of(asked, known, kit)
    answers = answers_of(server, requests, progress)
    steps = drafted(answers)
    if server.running.facts.flags.get(STEPS) is None and steps is not None:
        # The engine does not tell; its counters do.
        flags = with_flags(engine.flags, {VLLM_STEPS: steps}, server.url)
        check_steps(steps, asked.steps, server.url)
        asked = replace(asked, engine=replace(engine, flags=flags))
    length = accepted(answers, asked.steps)
    states, why_not, shift, more = states_of(server, requests, answers, known, kit)
    notes += [*server.notes, *more]
    if length is not None:
        notes.append(f"the server was counted at {rate_words(length)} on {len(answers)} prompts")
    found = Heard(
        url=server.url,
        version=str(engine.version),
        states=states,
        why_not=why_not,
        needs=FLAG if lacks_flag(server) else None,
        shift=shift,
        config_seen=server.config_seen,
        counts=counts_of(answers),
        accept_length=length,
    )
    told = contradiction(known.served, found)
    found = replace(
        found, contradicts=told, notes=tuple([told, *notes] if told is not None else notes)
    )
    return replace(asked, heard=found), replace(known, served=believed(known.served, found))


def requests_of(asked: Asked, known: Read, kit: Kit) -> tuple[list[Request], list[str]]:
    """Some of the data's own prompts, each for an answer as long as the text's; what is to be said of
    them. Raises BadInput where there are none.
    """
    found: list[Prompt] = []
    without = 0
    for path in known.form.files[: asked.max_samples]:
        if len(found) == PROMPTS:
            break
        try:
            sample = LAYOUTS[known.form.layout].read(path, known.form)
        except BadInput:
            if asked.damaged == "skip":
                continue
            raise
        ids, start = sample.input_ids.tolist(), answer_start(sample.loss_mask)
        if start == 0:
            start, without = min(BEGINNING, len(ids) // 2), without + 1
        new = min(len(ids) - start, ANSWER) or ANSWER
        if start and new > 1 and 0 <= min(ids) <= max(ids) < kit.target.vocab:
            found.append(Prompt(name=short(path), ids=tuple(ids[:start]), new_tokens=new))
    if not found:
        raise BadInput(
            f"{known.form.folder} holds no text whose beginning a server could be asked for; leave "
            "engine.url out"
        )
    notes = []
    if without:
        notes.append(
            f"{without} texts have no prompt (all of their tokens count as the target's own): their "
            f"first tokens, {BEGINNING} at most, are asked"
        )
    return [Request(prompt=p, ignore_eos=True, seconds=REQUEST_S) for p in found], notes


def answers_of(server: Server, requests: Sequence[Request], progress: Progress) -> list[Answered]:
    """Every prompt answered, one at a time. Raises BadInput, also where no server's draft is counted."""
    found = []
    for done, request in enumerate(requests, 1):
        try:
            found.append(server.engine.ask(server.running.address, request, 0.0, alone=True))
        except ServerError as error:
            raise unanswered(request, error) from error
        progress(STAGE, done, len(requests))
    tells = "speculative_algorithm" in server.running.facts.flags
    if not tells and server.engine.counters(server.running.address).rounds is None:
        raise BadInput(
            f"engine.url={server.url}: it serves no drafter, since it counts no drafts; name the server "
            "that does, or leave engine.url out"
        )
    return found


def drafted(answers: Sequence[Answered]) -> int | None:
    """Tokens drafted a round, where all rounds drafted as many; None: that is not counted."""
    rounds = sum(a.rounds or 0 for a in answers)
    proposed = sum(a.proposed or 0 for a in answers)
    return proposed // rounds if rounds and proposed and proposed % rounds == 0 else None


def counts_of(answers: Sequence[Answered]) -> dict[str, Count]:
    """Tokens gained and rounds by prompt, of those whose rounds were counted."""
    counts = {a.prompt: gained(a.completion_tokens, a.accepted, a.rounds, 1) for a in answers}
    return {name: count for name, count in counts.items() if count is not None}


def lacks_flag(server: Server) -> bool:
    """Whether it would return its states if it had been started so."""
    returns = isinstance(server.engine, SGLang)
    return returns and why_no_states(server.running.facts) is not None


def states_of(
    server: Server,
    requests: Sequence[Request],
    answers: Sequence[Answered],
    known: Read,
    kit: Kit,
) -> tuple[tuple[int, ...] | None, str | None, int, list[str]]:
    """The states that the server feeds, or why that was not measured; by how many positions its rows
    are off; and what is to be said.
    """
    engine = server.engine
    if not isinstance(engine, SGLang):
        return None, NOT_RETURNED.format(name=engine.name), 0, []
    if lacking := why_no_states(server.running.facts):
        return None, lacking, 0, []
    plan = plan_layers(kit.target, None, [None])
    if not plan.layers:
        return None, f"the target's own states cannot be made here: {plan.why}", 0, []
    returning = Returning(engine=engine, running=server.running)
    width = kit.target.hidden * int(known.checkpoint.form.num_aux.value)
    pairs = list(zip(requests, answers, strict=True))[:OF_STATES]
    try:
        seen = [asked_twice(returning, request, answer, width) for request, answer in pairs]
        chunks = named(seen, kit, plan.layers)
    except BadInput as error:
        return None, str(error), 0, []
    finally:
        kit.layers.drop()  # what follows needs the memory
    notes = [*(c.in_words for c in chunks), *unsettled(chunks)]
    if any(open_end(c, plan.layers, kit.target.num_layers) for c in chunks):
        return None, AT_THE_END.format(layers=plan.layers, why=plan.why), 0, notes
    assert known.served is not None
    fed = fed_states(chunks, known.served.states or ())
    if fed is None:
        unnamed = "; ".join(c.in_words for c in chunks if c.verdict != "fed")
        return None, f"not every state that it returns could be named: {unnamed}", 0, notes
    shift = next((c.shift for c in chunks if c.shift), 0)
    return fed, None, shift, [SEEN, *notes]


def named(seen: Sequence[Rows], kit: Kit, layers: int) -> list[Chunk]:
    """What the server returned, matched with the states that the target itself makes."""
    made = kit.layers.states([rows.text for rows in seen], layers)
    return chunks_of(
        [rows.prefill for rows in seen],
        [states[:, : len(rows.prefill)] for rows, states in zip(seen, made, strict=True)],
        [rows.again for rows in seen],
    )

"""Capturing from a running server: its own greedy text, and of each text the states as one prefill.

For targets that fit into the engine alone. The server is left running as it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.target import TargetParts, load_target_parts
from jobs.capture_states import read_prompts
from jobs.captured import (
    Captured,
    Samples,
    already_there,
    answer,
    check_ids,
    check_states,
    loss_mask,
    write_folder,
)
from jobs.engines.capturable import attached, check_kind, check_pieces
from jobs.engines.hypothesis import class_there
from jobs.engines.naming import Named, Told, name_states, told
from jobs.engines.probing import Chunk, chunks_of
from jobs.engines.records import Prompt, Request, Returned
from jobs.engines.releases import release
from jobs.engines.returned import (
    NEW_TOKENS,
    POSITIONS,
    returned,
    rows_of,
    unsettled,
)
from jobs.engines.talk import RefusedError, ServerError
from jobs.events import Events
from jobs.first_layers import TEXTS, plan_layers
from jobs.inputs import target_folder
from jobs.inspecting import TargetLayers

REQUEST_S = 300.0
NARROW = (torch.bfloat16, torch.float16)
OWN_TEXT = 0.5  # of the tokens behind the prompts, so many at least are the target's own choice
BY_LOGITS = "the likeliest token at every position, as the server gives it for the text"
BY_TEXT = "the next token of the text, which the server wrote greedily; the prompts' are not known"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the server gives of a text."""

    named: Named
    told: Told
    width: int  # numbers a row
    choices: bool  # whether it says what is likeliest at every position
    notes: tuple[str, ...]


def open_job(request: Mapping[str, Any], events: Events) -> CaptureFromEngine:
    """Read the target's tables and find the server."""
    target = load_target_parts(target_folder(request["inputs"]["target"]))
    return CaptureFromEngine(request, events, target)


class CaptureFromEngine:
    """Answers the cases of jobs.capture_states that have prompts."""

    def __init__(self, request: Mapping[str, Any], events: Events, target: TargetParts) -> None:
        self.events, self.target = events, target
        self.asked: Mapping[str, Any] = request["engine"]
        self.seconds = float(request["request_s"] or REQUEST_S)
        self.server = attached(self.asked["url"], target.folder)
        self.facts = self.server.running.facts
        url, named = self.asked["url"], self.asked["version"]
        self.version = release("sglang", named, self.facts.version, url, "engine.version")
        check_kind(self.facts, request["dtype"], url)

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Capture one data folder; it has its final name only when complete."""
        out, states = Path(case["out"]), [int(k) for k in case["states"]]
        check_states(states, self.target.num_layers)
        summary, notes = already_there(out, case), []
        if summary is None:
            prompts = read_prompts(Path(case["prompts"]), self.target.folder)
            prompts = prompts[: case["max_samples"]]
            check_ids(prompts, self.target.vocab, case["prompts"])
            check_pieces(self.facts, max(map(len, prompts)) + int(case["new_tokens"]))
            source = self.look(prompts, states, int(case["new_tokens"]))
            summary = write_folder(out, case, partial(self.capture, case, prompts, states, source))
            notes = [*source.notes, *followed(summary)]
        for note in notes:
            self.events.note(note)
        return answer(out, summary, self.target.fingerprint, self.events, notes)

    def look(
        self, prompts: Sequence[Sequence[int]], states: Sequence[int], new_tokens: int
    ) -> Source:
        """What the server gives, by the first prompts. Raises BadInput where that will not do."""
        request = self.request(1, prompts[0][:POSITIONS], 1)
        given, why = self.first(request)
        if why is not None and new_tokens == 0:
            raise BadInput(
                f"the server does not say what its target chooses within a text ({why}), which texts as "
                "they are need; continue the prompts: data.capture.new_tokens=N"
            )
        width, hidden = width_of(given), self.target.hidden
        rows_of(given, len(request.prompt.ids), width, request.prompt.name)
        if width % hidden:
            raise BadInput(
                f"the server's states are {width} numbers a row, which is no multiple of the target's "
                f"hidden size {hidden}; it runs another model than {self.target.folder}"
            )
        there = class_there(self.facts.engine, self.asked["engine_class"], self.target.folder)
        said = told(self.facts, self.version, there, self.target.num_layers)
        chunks, computed, why_not = self.measured(prompts[:TEXTS], said, width)
        count, layers = width // hidden, self.target.num_layers
        named = name_states(said, chunks, count, computed, layers, why_not)
        if lacking := [k for k in states if k not in named.states]:
            raise BadInput(
                f"data.capture.states asks for state {lacking[0]}, but the server returns states "
                f"{list(named.states)} ({said.said}); ask for some of these, or start it with other ids"
            )
        notes = [
            f"the server returns states {list(named.states)}: {', '.join(named.known_by)}",
            *named.notes,
            *unsettled(chunks),
            *(c.in_words for c in chunks),
            *((f"not measured: {why_not}",) if not chunks else ()),
            f"target_argmax is {BY_LOGITS if why is None else f'{BY_TEXT} ({why})'}",
        ]
        return Source(named=named, told=said, width=width, choices=why is None, notes=tuple(notes))

    def first(self, request: Request) -> tuple[Returned, str | None]:
        """The first answer with states, and why it has none of the target's choices; None: it has.

        Choices are done without only where the server does not give them, not where it fails otherwise.
        """
        try:
            given = self.given(request, choices=True)
        except BadInput as error:
            if not isinstance(error.__cause__, RefusedError):
                raise
            given = self.given(request, choices=False)
            return given, str(error)
        return given, None if given.likeliest is not None else "it gives no input_top_logprobs"

    def measured(
        self, prompts: Sequence[Sequence[int]], said: Told, width: int
    ) -> tuple[list[Chunk], int, str]:
        """Each chunk of a row among the target's own states, how many of these were computed, and why
        so many; no chunks where none were.
        """
        plan = plan_layers(self.target, None, said.states or [None])
        if not plan.layers:
            return [], 0, plan.why
        asked = [self.request(i, p, NEW_TOKENS) for i, p in enumerate(prompts, start=1)]
        seen = list(returned(self.server, asked, width))
        try:
            made = TargetLayers(self.target).states([r.text for r in seen], plan.layers)
        except BadInput as error:
            return [], 0, str(error)
        chunks = chunks_of(
            [r.prefill for r in seen],
            [s[:, : len(r.prefill)] for r, s in zip(seen, made, strict=True)],
            [r.again for r in seen],
        )
        return chunks, plan.layers, plan.why

    def capture(
        self,
        case: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        states: Sequence[int],
        source: Source,
        folder: Path,
    ) -> dict[str, Any]:
        """Write the samples of all prompts; returns what capture.json says of them."""
        new_tokens, window = int(case["new_tokens"]), case["repetition_window"]
        samples, ends, kinds = Samples(folder, case, len(prompts), self.events), self.ends(), set()
        asked_again: list[
            bool
        ] = []  # of texts that were cut, whether the server goes on as it wrote
        for number, text in self.texts(prompts, new_tokens, int(case["batch"])):
            mask = loss_mask(text, len(prompts[number - 1]), ends, window)
            if samples.short(mask):
                samples.leave_out()
                continue
            sample = self.sample(number, text[: len(mask)], mask, states, source)
            kinds |= {str(state.dtype).removeprefix("torch.") for state in sample.states.values()}
            samples.keep(sample)
            if len(mask) < len(text):
                asked_again.append(text[len(mask)] == int(sample.argmax[-1]))
            if source.choices and new_tokens and samples.following < OWN_TEXT * samples.positions:
                raise BadInput(
                    f"only {samples.following} of {samples.positions} tokens that the server wrote are "
                    "its target's own choice when it reads them: it samples, or simulates acceptance; "
                    "start it without"
                )
        return {
            "states": list(states),
            "num_layers": self.target.num_layers,
            "target": self.target.fingerprint,
            "target_folder": str(self.target.folder),
            **(samples.counted() if source.choices else uncompared(samples, asked_again)),
            "new_tokens": new_tokens,
            "repetition_window": window,
            "dtype": ", ".join(sorted(kinds)),
            "source": self.said(states, source),
        }

    def said(self, states: Sequence[int], source: Source) -> dict[str, Any]:
        """What capture.json says of the server."""
        by = dict(zip(source.named.states, source.named.known_by, strict=True))
        return {
            "engine": self.facts.engine,
            "version": self.facts.version or self.version,
            "url": self.asked["url"],
            "model": self.facts.model,
            "drafter": self.facts.drafter,
            "returned": list(source.named.states),
            "states_known_by": [by[k] for k in states],
            "told": source.told.said,
            "target_argmax": BY_LOGITS if source.choices else BY_TEXT,
        }

    def texts(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int
    ) -> Iterator[tuple[int, list[int]]]:
        """The number of each prompt, from 1, and its text: as many as `batch` are asked at once."""
        for start in range(0, len(prompts), batch):
            group = list(enumerate(prompts[start : start + batch], start=start + 1))
            if not new_tokens:
                yield from ((number, list(prompt)) for number, prompt in group)
                continue
            pool = ThreadPoolExecutor(len(group))
            asked = [
                pool.submit(self.continued, self.request(number, prompt, new_tokens))
                for number, prompt in group
            ]
            try:
                for done, future in enumerate(as_completed(asked), start=start + 1):
                    future.result()
                    self.events.progress("ask", done, len(prompts))
            except BadInput:
                if left := sum(future.running() for future in asked):
                    self.events.note(
                        f"{left} other prompts are being answered still: this process ends behind them, "
                        f"at most {self.seconds:g} s from now (job.request_s)"
                    )
                raise
            finally:  # all are done, or one has failed and none is waited for
                pool.shutdown(wait=False, cancel_futures=True)
            for (number, prompt), future in zip(group, asked, strict=True):
                yield number, [*prompt, *future.result()]

    def continued(self, request: Request) -> tuple[int, ...]:
        """What the server says behind a prompt. Raises BadInput for an answer that is cut."""
        prompt = request.prompt
        try:
            found = self.server.engine.ask(self.server.running.address, request, 0.0, alone=False)
        except ServerError as error:
            raise BadInput(f"prompt {prompt.name} was not answered: {error}") from error
        if found.prompt_tokens != len(prompt.ids) or len(found.output) != prompt.new_tokens:
            raise BadInput(
                f"prompt {prompt.name} has {len(prompt.ids)} tokens and was to be continued by "
                f"{prompt.new_tokens}, but the server took {found.prompt_tokens} and said "
                f"{len(found.output)}: its context or its cache ends there; lower "
                "data.capture.new_tokens, shorten the prompt, or start it with more (--context-length)"
            )
        return found.output

    def sample(
        self, number: int, text: list[int], mask: Tensor, states: Sequence[int], source: Source
    ) -> Captured:
        """A text with its states and the target's choices."""
        request = self.request(number, text, 1)
        name, hidden = request.prompt.name, self.target.hidden
        given = self.given(request, choices=source.choices)
        rows, _ = rows_of(given, len(text), source.width, name)
        rows = rows.to(narrowest(rows))
        places = {k: source.named.states.index(k) * hidden for k in states}
        chosen = likeliest(given, name) if source.choices else [*text[1:], *given.output]
        if len(chosen) != len(text) or not all(
            type(i) is int and 0 <= i < self.target.vocab for i in chosen
        ):
            raise BadInput(
                f"the server's choices for prompt {name} are not one token of the target's vocabulary "
                f"({self.target.vocab}) at each of its {len(text)} positions"
            )
        return Captured(
            ids=torch.tensor(text),
            mask=mask,
            argmax=torch.tensor(chosen),
            states={k: rows[:, at : at + hidden] for k, at in places.items()},
        )

    def given(self, request: Request, *, choices: bool) -> Returned:
        """A whole answer with states, under a key of its own. Raises BadInput."""
        address, key = self.server.running.address, uuid.uuid4().hex
        try:
            return self.server.engine.states(address, request, key, choices=choices)
        except ServerError as error:
            raise BadInput(f"prompt {request.prompt.name} was not answered: {error}") from error

    def request(self, number: int, ids: Sequence[int], new_tokens: int) -> Request:
        """A greedy request for exactly so many tokens; the text is cut afterwards."""
        prompt = Prompt(name=str(number), ids=tuple(ids), new_tokens=new_tokens)
        return Request(prompt=prompt, ignore_eos=True, seconds=self.seconds)

    def ends(self) -> set[int | None]:
        """The tokens that end a text, by the target's config.json."""
        whole = read_json(self.target.folder / "config.json")
        end = self.target.config.get("eos_token_id", whole.get("eos_token_id"))
        if end is None:
            self.events.note(
                "the target's config.json has no eos_token_id: texts end at data.capture.new_tokens, or "
                "where they repeat themselves"
            )
        return set(end) if isinstance(end, list) else {end}


def width_of(given: Returned) -> int:
    """Numbers a row; 0 where what was returned is no rows."""
    try:
        return len(given.states[0][0])
    except (TypeError, IndexError, KeyError):
        return 0


def likeliest(given: Returned, name: str) -> list[Any]:
    """The likeliest token behind each of the text's: the server lists them at the next one, and the last
    is what it said.
    """
    try:
        return [*(row[0][1] for row in given.likeliest[1:]), *given.output]
    except (TypeError, IndexError, KeyError) as error:
        raise BadInput(
            f"the server's input_top_logprobs of prompt {name} are no tokens: {error}"
        ) from error


def narrowest(rows: Tensor) -> torch.dtype:
    """The narrowest type that holds all numbers exactly, which is the one that the target ran in."""
    exact = (kind for kind in NARROW if torch.equal(rows.to(kind).float(), rows))
    return next(exact, torch.float32)


def uncompared(samples: Samples, asked_again: Sequence[bool]) -> dict[str, Any]:
    """What capture.json says of texts that are their own choices: they follow them by construction, but
    where they were cut the server has read them and was asked again.
    """
    return {
        **samples.counted(),
        "positions_following_argmax": None,
        "cut_texts": len(asked_again),
        "cut_texts_going_on_alike": sum(asked_again),
    }


def followed(summary: Mapping[str, Any]) -> list[str]:
    """How much of the text is the target's own, in words; nothing where nothing was compared."""
    following = summary["positions_following_argmax"]
    if following is not None:
        return [
            f"{following} of {summary['positions']} tokens in the loss mask are the target's own choice"
        ]
    if not summary["cut_texts"]:
        return []
    return [
        f"{summary['cut_texts_going_on_alike']} of {summary['cut_texts']} texts that were cut go on as "
        "they were written, when the server reads them"
    ]

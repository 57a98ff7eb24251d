"""Which states does this engine feed the drafter, and is that what it was trained on?

A server is started as the drafter's own config.json has it (or with engine.ids), with a recorder in
front of the drafter's fc; what is recorded is matched against the states that the target itself makes
of the same tokens. A server that runs already (engine.url) is asked for its target's states instead.
Beside it stands what the drafter does alone: on what the hypothesis says, and on what it was fed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.doctor.findings import Finding
from eagle3.engine_patches import way
from eagle3.engines import ids_to_write, rule_for
from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.metrics import Rate
from eagle3.served import with_ids
from eagle3.wiring import Wiring
from jobs import drafter_test
from jobs.engines.attached import unknown
from jobs.engines.figures import accepted
from jobs.engines.folder import lay_out
from jobs.engines.hypothesis import class_there
from jobs.engines.probing import (
    AT_THE_END,
    FED,
    Chunk,
    Rows,
    chunks_of,
    fed_states,
    later_share,
    open_end,
)
from jobs.engines.recorded import recorded
from jobs.engines.recording import Recorder
from jobs.engines.replay import Replay, replay, takes_of
from jobs.engines.returned import SEEN, Returning, attached, returned, unsettled
from jobs.engines.setup import Setup, alone_request
from jobs.engines.talk import ServerError
from jobs.events import Events
from jobs.first_layers import plan_layers
from jobs.inspecting import TargetLayers

STAGE = "probe"
RECORDED = "run: recorded at the drafter's fc on this engine"
RETURNED = "run: returned by this engine as the states of its target"
NOT_REPLAYED = (
    "the drafter's logits were not recorded, so that its input is not replayed: the engine makes them "
    "where the overlay does not reach"
)
DEAD = 1.5  # an accept length below which a drafter does nothing on the states it is given


def open_job(request: Mapping[str, Any], events: Events) -> EngineProbe:
    """Read what the drafter does alone, and find the engine."""
    return EngineProbe(request, events, drafter_test.open_job(alone_request(request), events))


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is expected of the engine that is there."""

    states: tuple[int, ...]  # canonical, in fc's order
    version: str
    engine_class: str | None


class EngineProbe:
    """Answers cases `{"case_id": …, "wiring": {…}}`."""

    def __init__(
        self, request: Mapping[str, Any], events: Events, alone: drafter_test.DrafterTest
    ) -> None:
        self.request, self.events, self.alone = request, events, alone
        self.setup = Setup(request, events, alone)
        self.recorder = Recorder(folder=self.setup.folder / "recorded")
        self.setup.environment = self.recorder.environment(self.setup.environment)

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Every chunk as a state, what is accepted, and where the fault lies."""
        wiring = Wiring.parse(case["wiring"])
        plan = plan_layers(self.alone.target, None, [None])
        if not plan.layers:
            raise BadInput(f"the target's own states cannot be made here: {plan.why}")
        told = self.told(wiring)
        server = self.attached()
        expected = self.setup.on_its_own(case)
        try:
            seen = self.record(self.config(told)) if server is None else self.ask(server)
        except ServerError as error:
            raise BadInput(str(error)) from error
        made = TargetLayers(self.alone.target).states([r.text for r in seen], plan.layers)
        chunks = chunks_of(
            [r.prefill for r in seen],
            [states[:, : len(r.prefill)] for r, states in zip(seen, made, strict=True)],
            [r.again for r in seen],
            weight=self.norm_weight() if server is None else None,
        )
        fed, ends = fed_states(chunks, told.states), []
        if any(open_end(c, plan.layers, self.alone.target.num_layers) for c in chunks):
            fed, ends = None, [AT_THE_END.format(layers=plan.layers, why=plan.why)]
        served = accepted([r.answer for r in seen], self.setup.steps)
        length = "accept_length_tree" if self.setup.topk > 1 else "accept_length"
        alone = expected["metrics"].get(length)
        beside = self.fed_alone(case, fed, told, length)
        replayed = None
        if server is None:
            replayed = self.replayed(wiring, seen)
            notes = self.said(seen, made, fed)
            notes += [replayed.in_words] if replayed else []
        else:
            notes = [*self.said_of(server, seen, made, fed), *unsettled(chunks)]
        notes += ends
        for line in (*(c.in_words for c in chunks), *notes):
            self.events.note(line)
        shift = next((c.shift for c in chunks if c.shift), 0)
        # Of other prompts than the data's, what the drafter does alone is not known.
        comparable = None if self.request["inputs"].get("prompts") else alone
        behind = "fc" if server is None else "where the target's states are handed over"
        where, why = fault_of(told.states, fed, served, comparable, shift, behind)
        if replayed is not None:
            where, why = with_replay(where, why, replayed)
        evidence = RECORDED if server is None else RETURNED
        findings = [] if where != "config" else [self.finding(told, fed, evidence)]
        metrics = {
            name: figure
            for name, figure in (
                ("accept_length", served.plain() if served else None),
                ("accept_length_standalone", alone),
                ("accept_length_fed", beside),
                ("accuracy", expected["metrics"].get("accuracy")),
            )
            if figure is not None
        }
        return {
            **expected,
            "metrics": metrics,
            "curves": {},
            "slots": [slot_line(c, told.states) for c in chunks],
            "findings": [*expected["findings"], *(asdict(f) for f in findings)],
            "probe": {
                "engine": self.setup.asked["name"],
                "version": told.version,
                "patch": self.setup.patched.plain() if self.setup.patched else None,
                "class": told.engine_class,
                "expected": list(told.states),
                "fed": None if fed is None else list(fed),
                "where": where,
                "why": why,
                "chunks": [c.plain() for c in chunks],
                "replay": replayed.plain() if replayed else None,
                "answers": [r.answer.plain() for r in seen],
            },
            "notes": [*expected["notes"], *notes, *self.setup.gpu_memory.taken_notes()],
        }

    def told(self, wiring: Wiring) -> Told:
        """What the wiring is, and the engine that is there; it need not be able to feed that."""
        asked, version = self.setup.asked, self.setup.release()
        self.setup.read_patch(version)
        return Told(
            states=wiring.states(self.alone.target.num_layers),
            version=version,
            engine_class=class_there(asked["name"], asked["engine_class"], self.setup.target),
        )

    def config(self, told: Told) -> dict[str, Any]:
        """The drafter's config.json as it is, or with the ids of engine.ids."""
        config = read_json(self.setup.source() / "config.json")
        ids = self.setup.asked["ids"]
        rule = rule_for(self.setup.asked["name"], told.version, told.engine_class)
        return with_ids(config, rule, ids)

    def record(self, config: Mapping[str, Any]) -> list[Rows]:
        """Start a server with this config.json and record every prompt, twice."""
        setup, found = self.setup, []
        requests = setup.requests()
        setup.folder.mkdir(exist_ok=True)
        draft = setup.draft(lay_out(setup.source(), setup.folder / "drafter", config))
        for rows in recorded(setup, self.recorder, draft, requests):
            found.append(rows)
            self.events.progress(STAGE, len(found), len(requests))
        return found

    def attached(self) -> Returning | None:
        """The server that a person runs; None: one is started."""
        if (url := self.setup.asked["url"]) is None:
            return None
        setup = self.setup
        return attached(setup.engine, url, setup.target, setup.draft(setup.source()))

    def ask(self, server: Returning) -> list[Rows]:
        """Ask a running server for every prompt's states, twice; it is left as it is."""
        requests = self.setup.requests()
        width = self.alone.target.hidden * self.alone.checkpoint.drafter.shape.num_aux
        found = []
        for rows in returned(server, requests, width):
            found.append(rows)
            self.events.progress(STAGE, len(found), len(requests))
        return found

    def replayed(self, wiring: Wiring, seen: Sequence[Rows]) -> Replay | None:
        """The recorded input through the drafter alone; None, which is said, where that cannot be."""
        if not (takes := takes_of(seen)):
            self.events.note(NOT_REPLAYED)
            return None
        try:
            return replay(self.alone.checkpoint, self.alone.target, wiring, takes)
        except BadInput as error:
            self.events.note(f"what was recorded is not replayed: {error}")
            return None

    def norm_weight(self) -> Tensor | None:
        """What norms in front of fc multiply its input by, [A·H]; None: there are none."""
        drafter = self.alone.checkpoint.drafter
        if drafter.shape.norm_before_fc:
            return drafter.input_norm.weight.detach()
        if drafter.shape.fc_norm:
            return torch.cat([w.detach() for w in drafter.fc_norm.parameters()])
        return None

    def fed_alone(
        self, case: Mapping[str, Any], fed: tuple[int, ...] | None, told: Told, length: str
    ) -> dict[str, Any] | None:
        """The accept length of the drafter alone on what it was fed, where that is something else."""
        if fed is None or fed == told.states:
            return None
        other = {**case["wiring"], "layers": list(fed), "convention": "hf"}
        try:
            found = self.alone.run_case({**case, "wiring": other})["metrics"].get(length)
        except BadInput as error:
            self.events.note(f"the drafter alone was not run on states {list(fed)}: {error}")
            return None
        return dict(found) if found else None

    def said(
        self, recorded: Sequence[Rows], made: Sequence[Tensor], fed: tuple[int, ...] | None
    ) -> list[str]:
        """What is fed behind the prefill."""
        if fed is None or self.norm_weight() is not None:
            return []
        pairs = zip(recorded, made, strict=True)
        shares = [later_share(r.later, states, fed) for r, states in pairs]
        found, total = (sum(column) for column in zip(*shares, strict=True))
        if not total:
            return ["behind the prefill nothing was recorded: later rounds run in a CUDA graph"]
        return [
            f"behind the prefill {found} of {total} rows are states {list(fed)} of the text (the others "
            "stand at drafts that were not accepted, or in padding)"
        ]

    def said_of(
        self,
        server: Returning,
        returned: Sequence[Rows],
        made: Sequence[Tensor],
        fed: tuple[int, ...] | None,
    ) -> list[str]:
        """What a running server returned behind the prompts, and what cannot be seen of it."""
        notes = [SEEN, *unknown(server.running.facts, self.setup.source())]
        if fed is None:
            return notes
        pairs = zip(returned, made, strict=True)
        shares = [later_share(r.later, states, fed) for r, states in pairs]
        found, total = (sum(column) for column in zip(*shares, strict=True))
        return [f"behind the prompts {found} of {total} rows are states {list(fed)}", *notes]

    def finding(self, told: Told, fed: tuple[int, ...] | None, evidence: str) -> Finding:
        """The engine feeds something else than the hypothesis says."""
        named = self.setup.asked["name"]
        rule = rule_for(named, told.version, told.engine_class)
        written = ids_to_write(rule, told.states, self.alone.target.num_layers)
        if written.possible and written.ids is not None:
            had = way(rule, told.version, told.engine_class)
            needs = f"; needs {written.needs} ({had})" if written.needs else ""
            fix = f'write "{place_of(rule)}": {list(written.ids)}{needs}'
        else:
            fix = f"{named} {told.version} cannot be told to: {written.why}"
        return Finding(
            name="engine-feeds-other-states",
            severity="error",
            where=f"{named} {told.version}, class {told.engine_class}",
            what=f"the wiring is states {list(told.states)}, but the engine feeds states "
            f"{list(fed or ())}",
            effect="the drafter sees states that it was not trained on",
            fix=(fix,),
            evidence=evidence,
        )


def fault_of(
    expected: Sequence[int],
    fed: Sequence[int] | None,
    served: Rate | None,
    alone: Mapping[str, Any] | None,
    shift: int = 0,
    behind: str = "fc",
) -> tuple[str, str]:
    """Where the fault lies, config, engine or head, and why; 'none' and 'undecided' are answers too.

    `alone` is the accept length of the drafter alone on the expected states, None where it is not known
    of what was served; `shift` is by how many positions the rows are off; `behind` is where they were
    seen.
    """
    if fed is None:
        return "undecided", "not every chunk of fc could be named"
    if list(fed) != list(expected):
        return "config", f"the engine feeds states {list(fed)}, not {list(expected)}"
    if shift:
        return "engine", f"it feeds the right states, but row t is that of position t{shift:+d}"
    if served is None or alone is None:
        return "undecided", f"the engine feeds states {list(fed)}, but accept lengths are not known"
    both = (
        f"{served.value:.2f} [{served.low:.2f}, {served.high:.2f}] is accepted there, "
        f"{alone['value']:.2f} [{alone['low']:.2f}, {alone['high']:.2f}] alone"
    )
    if served.high < alone["low"]:
        lost = f"what is lost is lost behind {behind}"
        return "engine", f"it is fed as it was trained, but {both}: {lost}"
    if alone["high"] < DEAD:
        return "head", f"it is fed as the wiring says, and {both}: the drafter itself is no better"
    return "none", f"it is fed as the wiring says, and {both}"


def with_replay(where: str, why: str, replayed: Replay) -> tuple[str, str]:
    """The fault beside what the engine makes of its input: whoever makes something else of the right
    states is at fault, however little of that shows in a few prompts' accept lengths.
    """
    if where in ("none", "head") and replayed.named is not None:
        return "engine", f"{replayed.in_words}; {why}"
    if where in ("engine", "undecided"):
        return where, f"{why}; {replayed.in_words}"
    return where, why


def place_of(rule: Any) -> str:
    """Where the engine looks for ids first."""
    return str(rule.places[0].path) if rule.places else "nowhere: they are not read"


def slot_line(chunk: Chunk, expected: Sequence[int]) -> dict[str, Any]:
    """A chunk as slots are shown: verified where it is what the hypothesis says."""
    wanted = expected[chunk.index] if chunk.index < len(expected) else None
    verdict = "contradicted"
    if wanted in chunk.states and not chunk.shift:
        verdict = "verified" if chunk.verdict == FED else "as declared"
    return {"index": chunk.index, "verdict": verdict, "what": f"{verdict}: {chunk.in_words}"}

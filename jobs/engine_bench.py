"""Measure a drafter behind a real engine: what it accepts, what it speeds up, and what limits that.

One case: the wiring, as this engine has to be told of it. Standing servers are asked in pairs, one
without the drafter and one with it; beside what is served stands what the drafter does alone on the
same texts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from eagle3.errors import BadInput
from eagle3.wiring import Wiring
from jobs import drafter_test
from jobs.engines import beside, known_good, near_ties
from jobs.engines.agreement import Agreement, agreement
from jobs.engines.arms import BASELINE, SPECULATIVE, Budget, Measured, block, together
from jobs.engines.attached import attach, differences, untold
from jobs.engines.disturbance import look, on_gpus
from jobs.engines.engine import Draft
from jobs.engines.folder import drop_copies, lay_out
from jobs.engines.hypothesis import ServedAs
from jobs.engines.kept import kept
from jobs.engines.launched import launch_notes
from jobs.engines.level import Level, level_of
from jobs.engines.load import run_pass
from jobs.engines.records import Pass, Request
from jobs.engines.room import why_no_room
from jobs.engines.setup import Setup, alone_request
from jobs.engines.started import Running
from jobs.engines.talk import ServerError
from jobs.events import Events

ASKED = "ask"


def open_job(request: Mapping[str, Any], events: Events) -> EngineBench:
    """Read what the drafter does alone, and find the engine."""
    alone = drafter_test.open_job(alone_request(request), events)
    return EngineBench(request, events, alone)


class EngineBench:
    """Answers cases `{"case_id": …, "wiring": {…}}`."""

    def __init__(
        self, request: Mapping[str, Any], events: Events, alone: drafter_test.DrafterTest
    ) -> None:
        self.request, self.events, self.alone = request, events, alone
        self.setup = Setup(request, events, alone)
        self.steps, self.topk = self.setup.steps, self.setup.topk
        # Whether drafting and verifying are to be told apart, by a start with one step.
        self.apart = bool(request["advice"]) and self.steps > 1 and self.topk == 1
        self.levels: Sequence[int] = request["concurrency"]
        self.budget = Budget(**{k: request["budget"][k] for k in vars_of(Budget)})
        self.restarts = int(request["budget"]["restarts"])
        self.reference: known_good.Reference | None = None  # once it was looked over

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The table, the raw counters, and what the drafter does alone."""
        # What is cheap to refuse comes first.
        served = self.setup.served(Wiring.parse(case["wiring"]))
        for note in served.notes:
            self.events.note(note)
        requests = self.setup.requests()
        self.reference = self.setup.reference()
        answer = self.setup.on_its_own(case)
        self.setup.folder.mkdir(exist_ok=True)
        measured = Measured()
        folder = lay_out(
            self.setup.source(),
            self.setup.folder / "drafter",
            served.config,
            copied=self.setup.contained,
        )
        draft = None if self.request["control"] else self.setup.draft(folder)
        try:
            if self.setup.asked["url"] is not None:
                self.measure_attached(requests, draft, served, measured)
            else:
                self.measure_started(requests, draft, measured)
        except ServerError as error:
            raise BadInput(str(error)) from error
        finally:
            if self.setup.contained:
                drop_copies(folder)
        return self.answer(answer, served, measured, requests)

    # How it is measured.

    def measure_started(
        self, requests: Sequence[Request], draft: Draft | None, measured: Measured
    ) -> None:
        """Start servers, as many at a time as there is room for."""
        arms = []
        if self.setup.launched:  # one command is one number of steps
            measured.notes += launch_notes(
                self.setup.asked, advice=draft is not None and self.apart
            )
        elif draft is not None:
            arms = self.arms_beside(draft, requests)
        lacking = why_no_room(
            self.setup.asked["name"],
            self.setup.device,
            self.setup.target,
            self.setup.source(),
            self.setup.asked["flags"],
        )
        ask = self.asker(requests, measured)
        levels, budget = self.levels, self.budget
        starts = (2 if lacking is None else 3) + len(arms)
        self.events.note(
            f"{starts} starts; "
            + (
                f"{budget.least} to {budget.pairs} pairs of passes"
                if lacking is None
                else f"{max(budget.least, 2)} passes of each server, one at a time, since {lacking};"
            )
            + f" over {len(requests)} prompts at {', '.join(map(str, levels))} at once; about "
            f"{budget.minutes:g} minutes of measuring at most"
        )
        if starts > self.restarts:
            raise BadInput(
                f"this takes {starts} starts of a server, but job.budget.restarts is {self.restarts}"
                + ("" if lacking is None else f" ({lacking})")
                + f"; set job.budget.restarts={starts}"
            )
        if lacking is None:
            with (
                self.setup.server(BASELINE, 0, None, requests) as plain,
                self.setup.server(SPECULATIVE, 0, draft, requests) as drafted,
            ):
                measured.starts += [plain, drafted]
                self.warm(ask, plain, drafted)
                together(plain, drafted, ask, levels, budget, measured)
                self.look_at_ties(plain, requests, measured)
        else:
            for label, number, of in (
                (BASELINE, 0, None),
                (SPECULATIVE, 0, draft),
                (BASELINE, 1, None),
            ):
                with self.setup.server(label, number, of, requests) as running:
                    measured.starts.append(running)
                    self.warm(ask, running)
                    share = budget.minutes * 60 / starts  # of the time, for each of the servers
                    block(running, ask, levels, max(budget.least, 2), measured, share)
                    if number:  # both of them have been asked by now
                        self.look_at_ties(running, requests, measured)
        for arm in arms:
            try:
                self.measure_beside(arm, measured)
            except ServerError as error:  # what is compared was measured by now
                measured.failed[arm.label] = str(error)
                measured.notes.append(
                    f"{error}; so {arm.label} is left out, and all that was measured stays"
                )

    def measure_beside(self, arm: beside.Arm, measured: Measured) -> None:
        """One pass of an arm at every concurrency; all of them or none are kept."""
        ask, found = self.asker(arm.requests, measured), Measured()
        with self.setup.server(arm.label, 0, arm.draft, arm.requests, arm.environment) as running:
            measured.starts.append(running)
            self.warm(ask, running)
            block(running, ask, self.levels, 1, found)
        measured.passes += found.passes
        measured.notes += found.notes

    def arms_beside(self, draft: Draft, requests: Sequence[Request]) -> list[beside.Arm]:
        """What is started beside the two that are compared."""
        arms = []
        if self.apart:
            arms.append(beside.fewer_steps(draft, requests))
        if self.request["simulate"]:
            arms += beside.simulated(draft, requests)
        if self.request["chain"]:
            arms.append(beside.chain_of(draft, requests))
        if self.reference is not None:
            arms.append(known_good.arm_of(self.reference, draft, requests))
        return arms

    def measure_attached(
        self,
        requests: Sequence[Request],
        draft: Draft | None,
        served: ServedAs,
        measured: Measured,
    ) -> None:
        """Ask a person's own server, and one without a drafter, if there is one."""
        drafted = attach(self.setup.engine, self.setup.asked["url"], SPECULATIVE)
        problems = list(
            differences(
                drafted.facts, self.setup.target, draft, served.ids, source=self.setup.source()
            )
        )
        if problems:
            raise BadInput(f"engine.url={self.setup.asked['url']}: {'; '.join(problems)}")
        measured.notes += untold(drafted.facts, self.setup.source())
        ask = self.asker(requests, measured)
        measured.starts.append(drafted)
        self.warm(ask, drafted)
        if (url := self.setup.asked["baseline_url"]) is None:
            seconds = self.budget.minutes * 60
            block(drafted, ask, self.levels, max(self.budget.least, 2), measured, seconds)
            return
        plain = attach(self.setup.engine, url, BASELINE, "engine.baseline_url")
        if problems := list(differences(plain.facts, self.setup.target, None, None)):
            raise BadInput(f"engine.baseline_url={url}: {'; '.join(problems)}")
        measured.starts.append(plain)
        self.warm(ask, plain)
        together(plain, drafted, ask, self.levels, self.budget, measured)
        self.look_at_ties(plain, requests, measured)

    def look_at_ties(self, plain: Running, requests: Sequence[Request], measured: Measured) -> None:
        """Ask the baseline, while it stands, about where the drafter's texts leave its own."""
        agreed, _ = compared(measured, self.levels[0])
        if SPECULATIVE not in agreed:
            return
        baseline = measured.of(BASELINE, self.levels[0])[0]
        try:
            measured.ties = near_ties.ties(
                self.setup.engine, plain.address, requests, baseline, agreed[SPECULATIVE]
            )
        except ServerError as error:
            measured.notes.append(
                f"how near the tokens are where texts go apart is not known: {error}"
            )

    def asker(
        self, requests: Sequence[Request], measured: Measured
    ) -> Callable[[Running, int, int], Pass]:
        """What asks a server all prompts once."""

        def ask(running: Running, concurrency: int, number: int) -> Pass:
            what = f"{ASKED} {running.label}, {concurrency} at once, pass {number}"
            done, one_at_a_time = 0, Lock()

            def tick() -> None:
                nonlocal done
                with one_at_a_time:
                    done += 1
                    self.events.progress(what, done, len(requests))

            try:
                return run_pass(
                    self.setup.engine,
                    running.address,
                    requests,
                    arm=running.label,
                    server=running.number,
                    number=number,
                    concurrency=concurrency,
                    look=lambda: look(measured.pids(), on_gpus(self.setup.device, measured.pids())),
                    tick=tick,
                )
            except ServerError as error:
                raise running.reason(error) from error

        return ask

    def warm(self, ask: Callable[[Running, int, int], Pass], *servers: Running) -> None:
        """A pass at every concurrency that is not counted."""
        for running in servers:
            for level in self.levels:
                ask(running, level, -1)

    # What it comes to.

    def answer(
        self,
        alone: Mapping[str, Any],
        served: ServedAs,
        measured: Measured,
        requests: Sequence[Request],
    ) -> dict[str, Any]:
        """The result: metrics of the first concurrency, and everything below `bench`."""
        draft = self.setup.draft(self.setup.source())
        seed = int(self.request["seed"])
        theirs = alone["metrics"]
        standalone = "accept_length_tree" if self.topk > 1 else "accept_length"
        least = theirs.get(standalone, {}).get("low")
        levels = [level_of(measured, c, draft, seed, least) for c in self.levels]
        first = levels[0]
        metrics = {
            name: figure.plain()
            for name, figure in (
                ("accept_length", first.accept_length),
                ("tok_s", first.tok_s),
                ("tok_s_baseline", first.baseline),
                ("speedup", first.speedup),
            )
            if figure is not None
        }
        if first.limits is not None:
            metrics["break_even"] = {"value": first.limits.break_even}
        if first.known_good is not None:
            metrics |= first.known_good.metrics()
        for name, own in (("accept_length_standalone", standalone), ("accuracy", "accuracy")):
            if own in theirs:
                metrics[name] = theirs[own]
        agreed, read = compared(measured, self.levels[0])
        for note in measured.notes:
            self.events.note(note)
        notes = [*alone["notes"], *served.notes, *measured.notes, *self.said(measured, agreed)]
        notes += self.setup.gpu_memory.taken_notes()
        return {
            **alone,
            "metrics": metrics,
            "curves": {
                "tok_s": [{"step": v.concurrency, **v.tok_s.plain()} for v in levels],
                **(
                    {
                        "speedup": [
                            {"step": v.concurrency, **v.speedup.plain()}
                            for v in levels
                            if v.speedup
                        ]
                    }
                    if first.speedup
                    else {}
                ),
            },
            "bench": {
                "control": self.request["control"],
                "engine": self.setup.asked["name"],
                "version": served.version,
                "patch": self.setup.patched.plain() if self.setup.patched else None,
                "class": served.engine_class,
                "ids": list(served.ids) if served.ids is not None else None,
                "states": list(served.states),
                "steps": self.steps,
                "topk": self.topk,
                "draft_tokens": draft.verified,
                "prompts": len(requests),
                **kept(requests, measured.of(SPECULATIVE, self.levels[0])),
                "known_good": self.reference_record(first, measured),
                "levels": [v.plain() for v in levels],
                "agreement": {name: found.plain() for name, found in agreed.items()},
                "ties": [tie.plain() for tie in measured.ties],
                "servers": [server_record(running) for running in measured.starts],
                "passes": [
                    pass_record(p, any(p is other for other in read)) for p in measured.passes
                ],
            },
            "notes": notes,
        }

    def reference_record(self, first: Level, measured: Measured) -> dict[str, Any] | None:
        """The known-good drafter with its figures at the first concurrency, or why it has none; None:
        none was asked for.
        """
        why = measured.failed.get(known_good.KNOWN_GOOD)
        if self.reference is None or (first.known_good is None and why is None):
            return None
        figures = first.known_good.plain() if first.known_good else {}
        return {**self.reference.plain(), "failed": why, **figures}

    def said(self, measured: Measured, agreed: Mapping[str, Agreement]) -> list[str]:
        """What a person should know of the comparison, said aloud as well."""
        notes = []
        apart = agreed.get(SPECULATIVE)
        own = agreed.get(BASELINE)
        if apart is not None and apart.same < apart.prompts:
            beside = (
                f"; the baseline differs from itself in {own.prompts - own.same}" if own else ""
            )
            notes.append(
                f"{apart.prompts - apart.same} of {apart.prompts} texts differ from the baseline's, "
                f"though both are greedy{beside}; the first, {apart.first[0][0]}, at token "
                f"{apart.first[0][1]}"
            )
            notes += near_ties.in_words(measured.ties)
        printed = [
            a.printed_accept_length
            for p in measured.of(SPECULATIVE, self.levels[0])
            for a in p.answers
            if a.printed_accept_length is not None
        ]
        if printed:
            notes.append(
                f"the engine's own accept length is {statistics.fmean(printed):.2f} in the mean of "
                "requests: it counts the prefill's token as well, which ours leaves out"
            )
        for note in notes:
            self.events.note(note)
        return notes


def compared(measured: Measured, level: int) -> tuple[dict[str, Agreement], list[Pass]]:
    """The drafter's texts against the baseline's, the baseline's against its own, and those passes."""
    plain, drafted = measured.of(BASELINE, level), measured.of(SPECULATIVE, level)
    found = {}
    if plain and drafted:
        found[SPECULATIVE] = agreement(drafted[0], plain[0])
    if len(plain) > 1:
        found[BASELINE] = agreement(plain[-1], plain[0])
    return found, [*plain[:1], *plain[-1:], *drafted[:1]]


def server_record(running: Running) -> dict[str, Any]:
    """A server as it was started or found."""
    return {
        "label": running.label,
        "start": running.number,
        "ready_s": running.ready_s,
        "command": list(running.command),
        "facts": running.facts.plain(),
    }


def pass_record(p: Pass, texts: bool) -> dict[str, Any]:
    """A pass with its raw counters, and with its token ids where `texts` are compared by it."""
    record = p.plain()
    if not texts:
        for answer in record["answers"]:
            answer["output"] = len(answer["output"])
    return record


def vars_of(kind: type) -> list[str]:
    """The names of a dataclass's fields."""
    return list(kind.__dataclass_fields__)  # type: ignore[attr-defined]

"""What a benchmark and a probe share: the engine, how it is told of the wiring, what it is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.samples import LeftOut
from eagle3.wiring import Wiring
from jobs import drafter_test
from jobs.capture_states import read_prompts
from jobs.engines import known_good, prompts
from jobs.engines.attached import attach, differences
from jobs.engines.engine import Draft, Engine, Wanted
from jobs.engines.gpu_memory import GpuMemory
from jobs.engines.hypothesis import ServedAs, class_there, installed, served_as
from jobs.engines.launched import check_launch, in_container
from jobs.engines.patched import Patched, overlaid, package_folder, patch_engine, read_patch
from jobs.engines.records import Prompt, Request
from jobs.engines.releases import plain
from jobs.engines.sglang import SGLang
from jobs.engines.shipped import shipped, spared
from jobs.engines.simulated import WHY, simulating
from jobs.engines.started import Patience, Running, started
from jobs.engines.talk import ServerError
from jobs.engines.vllm import VLLM
from jobs.events import Events

ENGINES: Mapping[str, Callable[[], Engine]] = {"sglang": SGLang, "vllm": VLLM}
NEW_TOKENS = 128  # of an answer to a person's prompt, where job.new_tokens does not say


def alone_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request of the drafter test that answers what the drafter does alone."""
    topk = request["topk"]
    tree = {"topk": topk, "draft_tokens": request["draft_tokens"]} if topk > 1 else None
    return {
        **request,
        "device": "cpu",  # the engine has the GPUs, all of their memory
        "truth": "target_argmax",
        "max_samples": request["max_prompts"],
        "tree": tree,
    }


class Setup:
    """An engine and a drafter, as a request names them."""

    def __init__(
        self, request: Mapping[str, Any], events: Events, alone: drafter_test.DrafterTest
    ) -> None:
        self.request, self.events, self.alone = request, events, alone
        asked = request["engine"]
        self.engine = ENGINES[asked["name"]]()
        self.asked: Mapping[str, Any] = asked
        self.environment: Mapping[str, str] = dict(asked["env"])
        self.target: Path = alone.target.folder
        self.steps, self.topk = int(request["steps"]), int(request["topk"])
        self.patience = Patience(start_s=request["start_s"], first_s=request["first_s"])
        self.folder = events.path.parent / "engine"
        on_gpu = request["device"] != "cpu" and torch.cuda.is_available()
        self.device = "cuda" if on_gpu else "cpu"  # of the engine
        # A person's own commands; None: the adapter's.
        self.launched = asked["launch"] is not None
        # Whether the drafter is served in a container.
        self.contained = self.launched and in_container(asked["launch"])
        # Of servers on this host's GPUs whose processes are known.
        self.gpu_memory = GpuMemory(events.note)
        self.patched: Patched | None = None  # of the servers with a drafter, once it was read
        refuse_simulated(self.environment)
        check_launch(asked)

    def source(self) -> Path:
        """The drafter's own folder."""
        return Path(self.request["inputs"]["drafter"]["path"])

    def reference(self) -> known_good.Reference | None:
        """The known-good drafter, looked over, where one is named. Raises BadInput."""
        if (path := self.request["inputs"].get("known_good")) is None:
            return None
        target, own = self.alone.target, self.alone.checkpoint.fingerprint
        found = known_good.read(
            Path(path), self.source(), own, hidden=target.hidden, vocab=target.vocab
        )
        for note in found.notes:
            self.events.note(note)
        return found

    def draft(self, folder: Path, steps: int | None = None) -> Draft:
        """How the drafter is asked; fewer steps are a chain."""
        if steps is not None:
            return Draft(folder=folder, steps=steps)
        tokens = self.request["draft_tokens"] if self.topk > 1 else None
        return Draft(folder=folder, steps=self.steps, topk=self.topk, draft_tokens=tokens)

    def release(self) -> str:
        """The engine's release that is there. Raises BadInput where that is not the one named."""
        name, url = self.asked["name"], self.asked["url"]
        if url is not None:
            version = attach(self.engine, url, "asked").facts.version or self.asked["version"]
        elif self.launched:
            version = self.asked["version"]  # what answers is held against it
        else:
            version = installed(name, self.python())
        named = self.asked["version"]
        if named is not None and (version is None or plain(named) != plain(version)):
            raise BadInput(
                f"engine.version={named}, but {name} {version} is what is there; leave it "
                "out, or name the interpreter that has the other: engine.python=…"
            )
        if version is None:
            raise BadInput(f"{name} at {url} does not say its release; name it: engine.version=X")
        return str(version)

    def served(self, wiring: Wiring) -> ServedAs:
        """The wiring as the engine is told of it, in the release that is there."""
        version = self.release()
        self.read_patch(version)
        return served_as(
            read_json(self.source() / "config.json"),
            self.target,
            wiring,
            engine=self.asked["name"],
            version=version,
            engine_class=self.asked["engine_class"],
            num_layers=self.alone.target.num_layers,
            patch=self.patched.patch.name if self.patched else None,
        )

    def read_patch(self, version: str) -> None:
        """Apply the patch that is asked for, if one is, to the engine that is there. Raises BadInput."""
        if self.asked["patch"] is None:
            return
        name, there = self.asked["name"], None
        file = self.request["inputs"].get("patch")
        if file is not None:
            patch = read_patch(Path(file))
        else:
            there = class_there(name, self.asked["engine_class"], self.target)
            patch = shipped(name, version, there)
        self.folder.mkdir(exist_ok=True)
        root = package_folder(name, self.python(), self.environment, self.folder)
        self.patched = patch_engine(patch, root, name, version)
        if file is None:
            paths = [module.path for module in self.patched.modules]
            self.patched = replace(self.patched, spared=spared(name, version, there, paths))
        self.events.note(
            f"the servers with the drafter run with the patch {patch.name} (sha256 {patch.sha256}) over "
            f"{', '.join(module.path for module in self.patched.modules)}"
        )

    def on_its_own(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the drafter does alone on the data; no figures, which is said, where the data does not
        hold what they need.
        """
        try:
            return self.alone.run_case({"case_id": case["case_id"], "wiring": case["wiring"]})
        except BadInput as error:
            note = f"the drafter alone is not measured: {error}"
            self.events.note(note)
            return {
                "metrics": {},
                "curves": {},
                "findings": [],
                "wiring": Wiring.parse(case["wiring"]).plain(),
                "fingerprints": {
                    "target": self.alone.target.fingerprint,
                    "drafter": self.alone.checkpoint.fingerprint,
                },
                "notes": [note],
            }

    def python(self) -> str:
        """The interpreter that has the engine."""
        return str(self.asked["python"] or sys.executable)

    def requests(self) -> list[Request]:
        """All prompts as they are asked."""
        new_tokens, most = self.request["new_tokens"], self.request["max_prompts"]
        found: list[Prompt]
        if (file := self.request["inputs"].get("prompts")) is not None:
            found = prompts.from_ids(
                read_prompts(Path(file), self.target), new_tokens or NEW_TOKENS
            )
        else:
            samples = self.alone.samples(LeftOut())
            found = [prompts.from_sample(sample, new_tokens) for sample in samples]
        found = found[:most]
        prompts.check(found, self.alone.target.vocab)
        for note in prompts.notes(found):
            self.events.note(note)
        return [
            Request(
                prompt=prompt,
                ignore_eos=self.request["ignore_eos"],
                seconds=self.request["request_s"],
            )
            for prompt in found
        ]

    @contextmanager
    def server(
        self,
        label: str,
        number: int,
        draft: Draft | None,
        requests: Sequence[Request],
        more: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """A started server of an arm, with `more` variables than all have.

        One with a drafter is patched, where a patch is asked for.
        """
        wanted = Wanted(
            python=self.python(),
            target=self.target,
            port=0,
            draft=draft,
            flags=self.asked["flags"],
            launch=self.asked["launch" if draft is not None else "baseline_launch"],
        )
        with ExitStack() as stack:
            environment, overlay = {**self.environment, **(more or {})}, None
            if self.patched is not None and draft is not None:
                folder = self.folder / f"patched-{label}-{number}"
                overlay = stack.enter_context(overlaid(self.patched, folder))
                environment = overlay.environment(environment)
            if self.device != "cpu" and not (wanted.launch and in_container(wanted.launch)):
                stack.enter_context(self.gpu_memory.around(label, environment))
            running = stack.enter_context(
                started(
                    self.engine,
                    wanted,
                    environment,
                    self.folder,
                    label=label,
                    number=number,
                    first=requests[0],
                    patience=self.patience,
                    say=self.events.note,
                )
            )
            if overlay is not None:
                for file, count in overlay.check(label).items():
                    self.events.note(
                        f"{label}: {count or 'none'} of its processes imported the patched {file}"
                        + ("" if count else ", which this target does not run")
                    )
            if self.launched:
                self.check_launched(running, draft)
            yield running

    def check_launched(self, running: Running, draft: Draft | None) -> None:
        """Raises ServerError where a person's command starts something else than the hypothesis says."""
        facts = running.facts
        key = "launch" if draft is not None else "baseline_launch"
        if in_container(self.asked[key]):  # its paths are those of the container
            facts = replace(facts, model=None, drafter=None)
        problems = list(differences(facts, self.target, draft, None))
        if facts.version is not None and plain(facts.version) != plain(self.asked["version"]):
            problems.append(
                f"it is {facts.engine} {facts.version}, but engine.version is {self.asked['version']}"
            )
        if problems:
            raise ServerError(f"{running.label}: engine.{key}: {'; '.join(problems)}")


def refuse_simulated(environment: Mapping[str, str]) -> None:
    """Raises BadInput where the engine would accept drafts whatever they are."""
    for name in simulating({*environment, *os.environ}):
        raise BadInput(
            f"{name} is set: {WHY}; unset it in engine.env, host.env and the host's own environment"
        )

"""What the gate takes of a run: the key that says what was measured, and the accept length itself."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.paths import RunPaths
from orchestrator.plan import SHIPPED_PATCH
from orchestrator.runs import config_of, read_record, record_of, reference

JOB = "engine_bench"
# Of answers of one length, up to 8 steps: however they are spread, a halving of all is clearly lower.
LEAST_PROMPTS = 6
# In a command an image's or folder's release is the engine's version, which is no part of a key.
RELEASE = re.compile(r"v?\d+\.\d+\.\d+(\.?(a|b|rc|post|dev)\d+)*|@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """An accept length with its interval, and its counts by prompt over `passes` of each."""

    value: float
    low: float
    high: float
    passes: int
    tokens: tuple[int, ...]
    rounds: tuple[int, ...]
    date: str
    run: str
    patch: str | None = None  # the digest of the shipped patch that it ran with

    @property
    def numerator(self) -> int:
        return sum(self.tokens)

    @property
    def denominator(self) -> int:
        return sum(self.rounds)

    def as_counted(self, other: Figure) -> bool:
        """Whether every prompt was counted alike; one more pass of the same is no difference."""
        mine, theirs = (
            [count * passes for count in (*figure.tokens, *figure.rounds)]
            for figure, passes in ((self, other.passes), (other, self.passes))
        )
        return mine == theirs


@dataclass(frozen=True, kw_only=True)
class Gated:
    """A run as the gate sees it."""

    key: Mapping[str, Any]
    version: str
    figure: Figure


def gated(paths: RunPaths) -> Gated:
    """A run's key, engine version and figure. Raises InputError where it has none to be held."""
    run, job = paths.folder.name, record_of(paths)["job"]
    if job != JOB:
        raise InputError(f"run {run} is of job={job}; the gate checks runs of job={JOB}")
    if not paths.result.is_file():
        raise InputError(
            f"run {run} has no result yet; follow it to its end: python -m orchestrator attach "
            f"{reference(paths.folder)}"
        )
    result, config = read_record(paths.result), config_of(paths)
    if result["status"] != "ok":
        raise InputError(f"run {run} gave no answer ({result['error']['message']}); run it again")
    bench = result["bench"]
    if bench.get("control"):  # older jobs had none
        raise InputError(f"run {run} is a control, with no drafter in it; there is nothing to hold")
    length = result["metrics"].get("accept_length")
    if length is None:
        raise InputError(
            f"run {run} has no accept length, since its server counts no rounds; start it with its "
            "metrics on, or let the job start it"
        )
    if "prompts_digest" not in bench:
        raise InputError(
            f"run {run} does not say which prompts it asked, since an older engine_bench made it; run "
            "it again"
        )
    counts = bench["counts"]
    counted = bench["prompts"] if counts is None else sum(1 for n in counts["rounds"] if n)
    if counted < LEAST_PROMPTS:
        raise InputError(
            f"run {run} has rounds of {counted} {'prompt' if counted == 1 else 'prompts'}, of which "
            f"even a halving could be chance; ask at least {LEAST_PROMPTS}: job.max_prompts"
        )
    if counts is None:
        raise InputError(
            f"run {run} was counted for all requests together, so that no difference could be told from "
            "chance; ask one at a time first: job.concurrency=[1,…]"
        )
    figure = Figure(
        **{name: length[name] for name in ("value", "low", "high")},
        passes=counts["passes"],
        tokens=tuple(counts["tokens"]),
        rounds=tuple(counts["rounds"]),
        date=time.strftime("%Y-%m-%d", time.gmtime(result["ended"])),
        run=run,
        patch=shipped_digest(config, bench),
    )
    return Gated(key=key_of(config, result), version=bench["version"], figure=figure)


def stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a key that the config states, before anything is measured."""
    job, engine = config["job"], config["engine"]
    return {
        "engine": engine["name"],
        "steps": job["steps"],
        "topk": job["topk"],
        "draft_tokens": job["draft_tokens"] or job["steps"] + 1,
        "ignore_eos": job["ignore_eos"],
        "concurrency": job["concurrency"][0],  # at which the accept length is counted
        "server": server_of(engine),
        "launch": launch_digest(engine),
        "patch": None if engine.get("patch") is None else Path(engine["patch"]).name,
        "flags": {name.lstrip("-").replace("-", "_"): v for name, v in engine["flags"].items()},
    }


def server_of(engine: Mapping[str, Any]) -> str:
    """Whose server it is."""
    if engine["url"] is not None:
        return "found running"
    return "started" if engine.get("launch") is None else "launched"


def launch_digest(engine: Mapping[str, Any]) -> str | None:
    """Of the words of both commands of one's own, without releases; None where there are none."""
    commands = [engine.get(key) for key in ("launch", "baseline_launch")]  # older runs have none
    if commands == [None, None]:
        return None
    words = [[RELEASE.sub("", word) for word in command or ()] for command in commands]
    return f"sha256:{hashlib.sha256(json.dumps(words).encode()).hexdigest()}"


def patch_digest(config: Mapping[str, Any], bench: Mapping[str, Any]) -> str | None:
    """Of one's own patch; the one that is shipped is another file for each release, and its digest is
    held with the figure of each.
    """
    if config["engine"].get("patch") in (None, SHIPPED_PATCH):
        return None
    return f"sha256:{bench['patch']['sha256']}"


def shipped_digest(config: Mapping[str, Any], bench: Mapping[str, Any]) -> str | None:
    """Of the patch that is shipped for the run's release; None where it ran without."""
    if config["engine"].get("patch") != SHIPPED_PATCH:
        return None
    return f"sha256:{bench['patch']['sha256']}"


def key_of(config: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that an accept length hangs on, but for the engine's version."""
    bench, told = result["bench"], stated(config)
    return {
        "engine": told.pop("engine"),
        "drafter": result["fingerprints"]["drafter"],
        "target": result["fingerprints"]["target"],
        "prompts": bench["prompts_digest"],
        "number_of_prompts": bench["prompts"],
        "new_tokens": one_or_all(bench["new_tokens"]),
        "states": bench["states"],
        "patch_digest": patch_digest(config, bench),
        **told,
    }


def one_or_all(numbers: Sequence[int]) -> int | list[int]:
    """One number where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)

"""What a benchmark of an engine may be set to, and which of the engine's settings it alone reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import InputError

JOBS = ("engine_bench", "engine_probe")
ENGINES = ("sglang", "vllm")
OF_SERVERS = ("python", "env", "url", "baseline_url", "patch")
NOT_READ = {
    "engine_bench": ("checkout", "ids", "accept_length"),
    "engine_probe": ("checkout", "accept_length", "url", "baseline_url"),
}
WHY_NOT = {
    "ids": "; the wiring says which states are fed",
    "url": "; what a running server feeds cannot be recorded, so one is started",
}


def check_bench(config: Mapping[str, Any]) -> None:
    """Engine, draft and budget of a benchmark. Raises InputError for what will not do."""
    if "engine" not in config:
        return
    engine, job = config["engine"], config["job"]
    if job["name"] not in JOBS:
        for key in OF_SERVERS:
            if engine[key]:
                raise InputError(
                    f"engine.{key} is read by job={' and job='.join(JOBS)}; leave it out"
                )
        return
    if engine["name"] not in ENGINES:
        raise InputError(
            f"job={job['name']} starts and asks {' and '.join(ENGINES)}; name the engine: engine=sglang"
        )
    for key in NOT_READ[job["name"]]:
        if engine[key] is not None:
            why = WHY_NOT.get(key, "")
            raise InputError(f"engine.{key} is not read by job={job['name']}{why}; leave it out")
    check_draft(engine["name"], job)
    check_servers(engine)
    if job["name"] == "engine_bench":
        check_load(job)
        if engine["patch"] is not None and job["control"]:
            raise InputError(
                "engine.patch is for servers with the drafter, and job.control starts none; leave it out"
            )


def check_load(job: Mapping[str, Any]) -> None:
    """How many are asked at once, and when it ends."""
    levels = job["concurrency"]
    if not levels or min(levels) < 1 or len(set(levels)) < len(levels):
        raise InputError(f"job.concurrency is {levels}; name each level once, from 1 up: [1,8,32]")
    if max(levels) > job["max_prompts"]:
        raise InputError(
            f"job.concurrency asks {max(levels)} prompts at once, but job.max_prompts is "
            f"{job['max_prompts']}; ask more prompts"
        )
    if job["budget"]["least"] > job["budget"]["pairs"]:
        raise InputError("job.budget.least is more than job.budget.pairs")


def check_draft(engine: str, job: Mapping[str, Any]) -> None:
    """A chain has steps + 1 tokens; a tree says how many, and only SGLang builds one."""
    topk, tokens = job["topk"], job["draft_tokens"]
    if topk == 1:
        if tokens not in (None, job["steps"] + 1):
            raise InputError(
                f"job.draft_tokens is {tokens}, but a chain (job.topk=1) of {job['steps']} steps has "
                f"{job['steps'] + 1} tokens; leave it out"
            )
        return
    if engine != "sglang":
        raise InputError(
            f"job.topk={topk} is a tree, which {engine} does not draft; set job.topk=1"
        )
    if tokens is None:
        raise InputError(
            "job.topk is more than 1; say how many tokens the tree has: job.draft_tokens=N"
        )


def check_servers(engine: Mapping[str, Any]) -> None:
    """A server of one's own is neither started nor set up."""
    if engine["url"] is None:
        if engine["baseline_url"] is not None:
            raise InputError(
                "engine.baseline_url stands without engine.url; name both servers, or none"
            )
        return
    for key in ("python", "env", "flags", "patch"):
        if engine[key]:
            raise InputError(
                f"engine.{key} is for servers that are started, but engine.url names one that runs"
            )

"""What a benchmark of an engine may be set to, and which of the engine's settings it alone reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.engines.simulated import WHY, simulating
from orchestrator.errors import InputError

JOBS = ("engine_bench", "engine_probe")
ENGINES = ("sglang", "vllm")
OF_SERVERS = ("python", "env", "url", "baseline_url", "launch", "baseline_launch", "patch")
RETURNING = ("sglang",)  # engines whose running servers return their target's states
NOT_READ = {
    "engine_bench": ("checkout", "ids", "accept_length"),
    "engine_probe": ("checkout", "accept_length", "baseline_url", "launch", "baseline_launch"),
}
WHY_NOT = {
    "ids": "; the wiring says which states are fed",
    "baseline_url": "; no baseline is asked",
    "launch": "; what such a server feeds cannot be recorded, so the job starts its own",
}


def check_bench(config: Mapping[str, Any]) -> None:
    """Engine, draft and budget of a benchmark. Raises InputError for what will not do."""
    if "engine" not in config or config["job"]["name"] == "capture_states":
        return
    engine, job = config["engine"], config["job"]
    if job["name"] not in JOBS:
        for key in OF_SERVERS:
            if engine[key] and (job["name"], key) != ("diagnose", "url"):
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
    check_variables({"engine.env": engine["env"], "host.env": config["host"]["env"]})
    check_draft(engine["name"], job)
    check_servers(engine)
    if job["name"] == "engine_bench":
        check_load(job)
        check_simulated(engine, job)
        check_chain(engine, job)
        if job["known_good"] is not None:
            check_started_beside("job.known_good", engine, control=job["control"])
        check_launch(engine, control=job["control"])
        if engine["patch"] is not None and job["control"]:
            raise InputError(
                "engine.patch is for servers with the drafter, and job.control starts none; leave it out"
            )
    elif engine["url"] is not None and engine["name"] not in RETURNING:
        raise InputError(
            f"a running {engine['name']} returns no states, so that engine.url cannot be probed; leave "
            "it out and name the interpreter that serves, engine.python=…: a server is then started "
            "and recorded"
        )


def check_variables(variables: Mapping[str, Mapping[str, str]]) -> None:
    """Nothing that has SGLang simulate what is to be measured."""
    for key, given in variables.items():
        for name in simulating(given):
            raise InputError(f"{key}.{name} is set: {WHY}; leave it out")


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


def check_simulated(engine: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Floor and ceiling need an engine that simulates, servers of the job's own, and a drafter."""
    if not job["simulate"]:
        return
    if engine["name"] != "sglang":
        raise InputError(
            f"job.simulate sets SGLANG_SIMULATE_ACC_LEN, which {engine['name']} does not read; leave it "
            "out"
        )
    check_started_beside("job.simulate", engine, control=job["control"])


def check_chain(engine: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """A chain stands beside a tree, on a server of the job's own."""
    if not job["chain"]:
        return
    if job["topk"] == 1:
        raise InputError(
            "job.chain measures a chain beside a tree, but with job.topk=1 all that is drafted is a "
            "chain; leave it out"
        )
    check_started_beside("job.chain", engine, control=job["control"])


def check_started_beside(setting: str, engine: Mapping[str, Any], *, control: bool) -> None:
    """What asks for one more server with the drafter needs one that the job puts together."""
    for key, other in (("url", "a server that runs"), ("launch", "one whole command")):
        if engine[key] is not None:
            raise InputError(
                f"{setting} starts servers of its own making, but engine.{key} names {other}; leave one "
                "of them out"
            )
    if control:
        raise InputError(f"{setting} has no drafter with job.control; leave one of them out")


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
    for key in ("python", "env", "flags", "ids", "patch", "launch", "baseline_launch"):
        if engine[key]:
            raise InputError(
                f"engine.{key} is for servers that are started, but engine.url names one that runs"
            )


def check_launch(engine: Mapping[str, Any], *, control: bool) -> None:
    """Commands of one's own say all that the engine's settings would, for both servers."""
    commands = {
        key: engine[key] for key in ("launch", "baseline_launch") if engine[key] is not None
    }
    if not commands:
        return
    for key in ("launch", "baseline_launch"):
        if not commands.get(key):
            raise InputError(
                f"engine.{key} is missing: the server with the drafter and the one without need a "
                "command each, a list of words"
            )
    for key in ("python", "flags", "patch"):
        if engine[key]:
            raise InputError(
                f"engine.{key} is for servers that the job itself puts together, but engine.launch "
                "names the whole command; leave it out"
            )
    if engine["version"] is None:
        raise InputError(
            "engine.launch starts a release that is not known before, and layer ids depend on it; name "
            "it: engine.version=X"
        )
    names = {}
    for key, words in commands.items():
        check_words(key, words)
        if Path(words[0]).name == "docker":
            names[key] = named_container(key, words, engine)
    launch, baseline = names.get("launch"), names.get("baseline_launch")
    if launch is not None and launch == baseline and "{port}" not in launch:
        raise InputError(
            f"engine.launch and engine.baseline_launch both name their container {launch}; they stand "
            "at once, so give each a name of its own"
        )
    if control and baseline is not None and "{port}" not in baseline:
        raise InputError(
            f"job.control starts engine.baseline_launch twice, and its container is named {baseline}; "
            f"write --name {baseline}-{{port}}"
        )


def check_words(key: str, words: Sequence[str]) -> None:
    """Where the server listens and what it drafts with is the job's to say; it can be stopped."""
    from jobs.engines.launched import hidden_runtime

    if (word := hidden_runtime(words)) is not None:
        raise InputError(
            f"engine.{key} has '{word}': of containers only those are stopped that the command itself "
            "starts; write [docker, run, --name, NAME, …]"
        )
    if not any("{port}" in word for word in words):
        raise InputError(
            f"engine.{key} has no {{port}}; the job chooses a free port, so write {{port}} where the "
            "command has it"
        )
    drafts = any("{drafter}" in word for word in words)
    if key == "launch" and not drafts:
        raise InputError(
            "engine.launch has no {drafter}; the job lays out the drafter with the wiring's layer ids, "
            "so write {drafter} where the command has its folder"
        )
    if key != "launch" and drafts:
        raise InputError("engine.baseline_launch has {drafter}, but is the server without one")


def named_container(key: str, words: Sequence[str], engine: Mapping[str, Any]) -> str:
    """The name by which a container is stopped."""
    from jobs.engines.launched import container_name

    if "run" not in words[1:]:
        raise InputError(f"engine.{key}: of docker, only `docker run --name NAME …` is understood")
    name = container_name(words)
    if name is None:
        raise InputError(
            f"engine.{key} starts a container without --name NAME, by which it would be stopped; name it"
        )
    if engine["env"]:
        raise InputError(
            f"engine.env is not seen in the container of engine.{key}; write it there: -e NAME=VALUE"
        )
    return name

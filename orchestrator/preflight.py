"""Before anything is copied: is the host as the job needs it, and as it was the last time?

One question goes to the host: what `python` has installed there, what lies at the paths, how much
memory is free. The checks are pure functions of the answer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.channel import Channel, Reply, Request
from orchestrator.errors import HostError, InputError
from orchestrator.paths import CLONE, RunPaths
from orchestrator.plan import Input

PROGRAM = CLONE / "jobs" / "environment.py"
SPARE = 256 << 20  # bytes that must stay free on the host's disk
OLDEST_TORCH = (2, 6)
OLDEST_PYTHON = (3, 10)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the host answered."""

    environment: dict[str, Any]
    paths: dict[str, dict[str, Any]]
    memory: dict[str, int]
    gpus: Any  # a list, None where it was not asked for, or {"error": …}
    modules: dict[str, bool]  # those that a script imports, and whether they are there
    free: int  # bytes on the disk of the work folder

    def expanded(self) -> dict[str, str]:
        """The paths that were asked about, without their `~`."""
        return {asked: str(found["path"]) for asked, found in self.paths.items()}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: what was found, and what to do where that will not do."""

    what: str
    ok: bool
    said: str


def question(
    config: Mapping[str, Any], paths: Iterable[str], modules: Sequence[str] = ()
) -> Request:
    """What to ask the host."""
    host = config["host"]
    argument = {
        "checkouts": host["checkouts"],
        "paths": sorted(paths),
        "gpus": config["job"]["device"] != "cpu",
        "modules": list(modules),
    }
    fields = {"python": host["python"], "env": host["env"], "argument": json.dumps(argument)}
    return Request(op="probe", fields=fields, payload=zlib.compress(PROGRAM.read_bytes()))


def answer_of(channel: Channel, reply: Reply) -> Found:
    """The host's answer. Raises InputError where its interpreter cannot be used."""
    if not reply.ok:
        kind = InputError if reply.header.get("kind") == "python" else HostError
        raise kind(f"{channel.name}: {reply.header.get('error')}")
    lines = reply.payload.decode("utf-8", "replace").strip().splitlines()
    try:
        answer = json.loads(lines[-1])
        return Found(free=reply.header["free"], **answer)
    except (IndexError, ValueError, TypeError) as error:
        raise HostError(
            f"{channel.name}: the interpreter's answer about itself is no JSON ({error}); its last "
            f"line: {lines[-1][:120] if lines else ''}"
        ) from error


def checks(
    config: Mapping[str, Any], inputs: Mapping[str, Input], found: Found, to_send: int, made: bool
) -> list[Check]:
    """All checks, those that fail too; `made` says that data to be captured is there already."""
    return [
        *check_python(found),
        *check_packages(config, found, made),
        *check_gpus(config, found),
        *check_paths(inputs, found),
        *check_room(config, inputs, found, to_send, made),
    ]


def check_python(found: Found) -> Iterator[Check]:
    """Jobs need Python 3.10."""
    version = str(found.environment["python"])
    ok = numbers(version) >= OLDEST_PYTHON
    said = f"{found.environment['executable']} is Python {version}"
    advice = "; set host.python to one of 3.10 or newer"
    yield Check(what="python", ok=ok, said=said if ok else said + advice)


def check_packages(config: Mapping[str, Any], found: Found, made: bool) -> Iterator[Check]:
    """What the job imports, as far as it is sure to."""
    job = config["job"]["name"]
    python = found.environment["executable"]
    for name in (name for name, there in found.modules.items() if not there):
        said = (
            f"{name}, which the script imports, is not installed for {python}; install it there, set "
            f"host.python, or send it along with job.files=[{name}.py]"
        )
        yield Check(what=name, ok=False, said=said)
    if job == "script":
        return
    packages = found.environment["packages"]
    tables = config["data"].get("layout") == "speculators"  # its dataset is arrow's
    extra = (
        *(("transformers",) if loads_target(config, made) else ()),
        *(("pyarrow",) if tables else ()),
        *(("numpy",) if job == "diagnose" else ()),  # what doctor reads tensors with
    )
    for name in ("torch", "safetensors", *extra):
        version = packages.get(name)
        said, ok = f"{name} {version}", version is not None
        if not ok:
            said = (
                f"{name} is not installed for {found.environment['executable']}; install it there or "
                "set host.python"
            )
        elif name == "torch" and () < numbers(str(version)) < OLDEST_TORCH:
            said, ok = f"torch {version} is older than 2.6; update it", False
        yield Check(what=name, ok=ok, said=said)


def loads_target(config: Mapping[str, Any], made: bool) -> bool:
    """Whether the job captures and loads the target for it, so that no server is asked that runs it."""
    if config["job"]["name"] == "capture_states":
        return config.get("engine", {}).get("url") is None
    # A script has no data.
    return (config.get("data") or {}).get("capture") is not None and not made


def check_gpus(config: Mapping[str, Any], found: Found) -> Iterator[Check]:
    """A GPU where one is asked for by name; `auto` takes what there is."""
    device, wanted = config["job"]["device"], config["host"]["gpus"]
    if device == "cpu":
        return
    torch = found.environment["torch"] or {}
    without = bool(torch) and not torch.get("cuda") and not torch.get("hip")
    if device == "cuda" and without and config["job"]["name"] != "script":
        said = f"torch {torch['version']} is a build without CUDA; set job.device=cpu"
        yield Check(what="cuda", ok=False, said=said)
        return
    if isinstance(found.gpus, Mapping):
        # Without nvidia-smi a GPU may still be there (ROCm, a container): torch will tell.
        ok = wanted is None and (device == "auto" or bool(found.gpus.get("missing")))
        said = f"{found.gpus['error']}; mend the driver or set job.device=cpu"
        yield Check(what="gpus", ok=ok, said=said)
        return
    there = {gpu["index"]: gpu["name"] for gpu in found.gpus or ()}
    missing = sorted(set(wanted or ()) - set(there))
    named = ", ".join(f"{index} ({name})" for index, name in there.items()) or "none"
    if missing:
        said = f"host.gpus names {missing}, but the GPUs there are: {named}"
        yield Check(what="gpus", ok=False, said=said)
    elif device == "cuda" and not there:
        said = "job.device=cuda, but nvidia-smi finds no GPU there; set job.device=cpu"
        yield Check(what="gpus", ok=False, said=said)
    else:
        yield Check(what="gpus", ok=True, said=named)


def check_paths(inputs: Mapping[str, Input], found: Found) -> Iterator[Check]:
    """Inputs that lie on the host lie there and can be read; what is to be made does not."""
    for role, given in inputs.items():
        if given.tree is not None:
            continue
        there = found.paths[given.path]
        if given.made:
            ok = not there["exists"]
            said = f"{role}={there['path']} exists already; name a new folder or remove it"
        else:
            ok = there["exists"] and there["readable"]
            why = "cannot be read by this user" if there["exists"] else "does not exist there"
            said = f"{role}={there['path']} {why}; name it by its path on the host"
        yield Check(what=role, ok=ok, said=str(there["path"]) if ok else said)


def check_room(
    config: Mapping[str, Any], inputs: Mapping[str, Input], found: Found, to_send: int, made: bool
) -> Iterator[Check]:
    """Disk for what is sent, memory for what is loaded from the host's files on the CPU."""
    needed = to_send + SPARE
    said = f"{gib(found.free)} free"
    advice = (
        f" below {config['host']['work']}, but {gib(needed)} are needed; make room or set host.work"
    )
    ok = found.free >= needed
    yield Check(what="disk", ok=ok, said=said if ok else said + advice)
    if config["job"]["device"] != "cpu":
        return
    loaded = [given for role, given in inputs.items() if role == "drafter"]
    if loads_target(config, made):
        loaded.append(inputs["target"])
    there = [found.paths[given.path] for given in loaded if given.tree is None]
    weights = sum(path["weights"] or 0 for path in there)
    free = found.memory["available"]
    if not free:  # it could not be read
        return
    said = f"{gib(free)} of memory available"
    advice = (
        f", but the weights to load are {gib(weights)}; set job.device=cuda or use a larger host"
    )
    yield Check(what="memory", ok=free >= weights, said=said if free >= weights else said + advice)


def refuse(name: str, results: Sequence[Check]) -> None:
    """Raises InputError with every failing check."""
    failing = [check.said for check in results if not check.ok]
    if failing:
        raise InputError(f"{name}: {'; '.join(failing)}")


def last_environment(
    runs: Path, host: str, this: str
) -> tuple[str, dict[str, Any]] | tuple[None, None]:
    """The last run on a host before `this` one, and the environment it ran in."""
    for folder in sorted(runs.glob("*"), reverse=True):
        paths = RunPaths(folder)
        if folder.name == this:
            continue
        try:
            run, before = (
                json.loads(paths.run.read_bytes()),
                json.loads(paths.preflight.read_bytes()),
            )
            if run["host"] == host and before["environment"]:
                return folder.name, before["environment"]
        except (OSError, ValueError, TypeError, KeyError):
            continue  # not looked over, or damaged: an older one will do to compare with
    return None, None


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of '2.13.0+cu128'."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / (1 << 30):.1f} GiB"

"""Verb `diagnose`: name the cause, with no file to write first.

What is asked becomes an experiment's YAML, and that is what runs, by the same way as every other; the
run's folder keeps it, so that it can be repeated.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.asked import (
    ENGINE,
    ENGINES,
    SHIPPED,
    Asked,
    flags_of,
    host_of,
    placed,
    read,
    states_of,
)
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths, runs_folder

if TYPE_CHECKING:
    from orchestrator.config import Resolved

USAGE = (
    "python -m orchestrator diagnose [host=NAME] drafter=PATH data=PATH [target=PATH] [states=[…]] "
    "[engine=NAME engine_version=X.Y.Z engine_class=NAME engine_ids=[…] engine_checkout=PATH "
    "engine_flags=… engine.url=URL] [accept_length=X] [trained_accuracy=X] [target_argmax=PATH] "
    "[max_samples=N]"
)
ABOUT = """Find the wiring and the teacher that a drafter was trained with, what an engine does instead,
what that costs, and the lines to change.

  host              a config of conf/host, or any host that ssh reaches; left out: this machine
  drafter, target   checkpoint folders on that host; `lab`, `lab_speculators` and `lab_two_layers` are
                    shipped drafters, `lab` is their target; target may be left out where the drafter or
                    the dump says which folder it is
  data              a folder of captured samples, some of the drafter's training data, or `lab`;
                    states=[0,3,31,59] says which canonical states its slots hold, in their order
  target_argmax     the target's own choices for that data, as job=capture_states leaves them
  engine            sglang, vllm, tensorrt_llm or llama_cpp, with engine_version; engine_class is the
                    target's class there, such as kimi_k25; engine_ids='[2,30,58]' the layer ids that it
                    is given (left out: what config.json says); engine_checkout a folder with its source;
                    engine_flags the server's flags, as JSON or as 'num_steps=3,topk=1'
  engine.url        a running SGLang or vLLM, as that host sees it, asked in the place of all these for
                    release, flags, the states that it feeds (SGLang with --enable-return-hidden-states)
                    and what it accepts; it is left running
  accept_length     what the engine shows; trained_accuracy what the training log said (0.75)
  max_samples       how many texts are read; left out: all of them

Settings of the config may follow (job.threads=8, job.device=cuda, tracking.uri=…; detach=true leaves the
run to itself). The run's folder keeps all of it as experiment/diagnose.yaml, to be repeated."""
ROLES = ("drafter", "data", "target")
ALONE = ("claim", "predict", "strict", "detach")
KEYS = (
    *ROLES,
    *("states", "target_argmax", "engine", *ENGINE, "engine_ids"),
    *("accept_length", "trained_accuracy", "max_samples", "host", "results", *ALONE),
)
SECTIONS = ("job", *ROLES, "wiring", "engine", "host", "tracking")
EXPERIMENT = Path("experiment") / "diagnose.yaml"


def run(arguments: list[str]) -> int:
    """Ask, answer and file it as a run; its exit code."""
    from orchestrator.show import Show

    show = Show()
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        show.line(f"{USAGE}\n{ABOUT}")
        return 0
    asked = parse(arguments)
    host = host_of(asked)
    experiment = experiment_of(asked, host)
    if host["alias"] is None:
        check_here(experiment)

    from orchestrator.loop import run as run_loop
    from orchestrator.runs import exit_code
    from orchestrator.session import Session
    from orchestrator.stated_target import stated_target

    with Session(show) as session:
        if "target" not in asked.settings and not of_the_lab(asked):
            channel = session.link(host).channel
            drafter, data = (experiment.get(role, {}).get("path") for role in ("drafter", "data"))
            choose(experiment, "target", "path")
            put(experiment, "target.path", stated_target(channel, host, drafter, data))
        resolved = composed(experiment)

        def begun(run_id: str) -> None:
            paths = RunPaths(runs_folder(Path(resolved.config["results"])) / run_id)
            keep(experiment, paths.folder)

        folder = run_loop(session, resolved, begun=begun)
        show.line(f"again    {how_to_repeat(folder)}", style="dim")
    return exit_code(session.folders, failed=session.failed)


def parse(arguments: Sequence[str]) -> Asked:
    """The arguments by name. Raises InputError for what is unknown or will not do."""
    asked = read(arguments, verb="diagnose", keys=KEYS, sections=SECTIONS, usage=USAGE)
    lacking = [role for role in ("drafter", "data") if role not in asked.settings]
    if lacking:
        raise InputError(f"diagnose needs {lacking[0]}=PATH; usage: {USAGE}")
    engine = asked.settings.get("engine")
    if engine is not None and engine not in ENGINES:
        near = difflib.get_close_matches(engine, ENGINES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ENGINES)}"
        raise InputError(f"there is no engine {engine!r}; {hint}")
    if engine is None and "accept_length" in asked.settings:
        raise InputError(
            f"accept_length is what an engine shows; name it: engine={'|'.join(ENGINES)}"
        )
    return asked


def of_the_lab(asked: Asked) -> bool:
    """Whether drafter or data are the shipped lab's, whose target then is meant."""
    return ("drafter", asked.settings["drafter"]) in SHIPPED or asked.settings["data"] == "lab"


def experiment_of(asked: Asked, host: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked as the content of an experiment's YAML; a target that is not named is left out."""
    settings, remote = asked.settings, host["alias"] is not None
    experiment: dict[str, Any] = {"defaults": []}
    choose(experiment, "job", "diagnose")
    for role in ROLES:
        given = settings.get(role, "lab" if of_the_lab(asked) else None)
        if (role, given) in SHIPPED or (role, given) == ("data", "lab"):
            choose(experiment, role, str(given))
        elif given is not None:
            choose(experiment, role, "path")
            put(experiment, f"{role}.path", placed(role, given, remote=remote))
    if "states" in settings:
        put(experiment, "data.states", states_of(settings["states"]))
    if "target_argmax" in settings:
        path = placed("target_argmax", settings["target_argmax"], remote=remote)
        put(experiment, "data.target_argmax", path)
    for key, value in job_settings(settings).items():
        put(experiment, f"job.{key}", value)
    if "engine" in settings:
        choose(experiment, "engine", settings["engine"])
        for key, value in engine_settings(settings, remote=remote).items():
            put(experiment, f"engine.{key}", value)
    for key in ("claim", "predict"):
        if key in settings:
            experiment[key] = settings[key]
    for key in ("strict", "detach"):
        if asked.switch(key):
            experiment[key] = True
    put_host(experiment, asked, host)
    for override in asked.config:
        if not override.lstrip("+").startswith("host."):
            put_override(experiment, override)
    return experiment


def check_here(experiment: Mapping[str, Any]) -> None:
    """Raise InputError for a path that is not on this machine, before anything is asked or filed."""
    given = {role: experiment.get(role, {}).get("path") for role in ROLES}
    given["target_argmax"] = experiment.get("data", {}).get("target_argmax")
    given["engine_checkout"] = experiment.get("engine", {}).get("checkout")
    for role, path in given.items():
        if path is None:
            continue
        try:
            Path(path).expanduser().stat()
        except FileNotFoundError as error:
            raise InputError(
                f"{role}={path} does not exist on this machine; correct it, or name the host that has "
                "it: host=NAME"
            ) from error
        except (RuntimeError, OSError) as error:  # no such user, no way into a folder
            raise InputError(f"{role}={path} cannot be read on this machine: {error}") from error


def job_settings(settings: Mapping[str, str]) -> dict[str, Any]:
    """The job's settings, from their short names."""
    found: dict[str, Any] = {}
    if "trained_accuracy" in settings:
        found["trained_accuracy"] = number("trained_accuracy", settings["trained_accuracy"])
    if "max_samples" in settings:
        if not re.fullmatch(r"[0-9]{1,9}", settings["max_samples"]):
            raise InputError(f"max_samples={settings['max_samples']}: give a whole number")
        found["max_samples"] = int(settings["max_samples"])
    return found


def engine_settings(settings: Mapping[str, str], *, remote: bool) -> dict[str, Any]:
    """The engine's settings, from their short names."""
    names = ("version", "engine_class", "ids", "checkout", "flags", "accept_length")
    found: dict[str, Any] = {}
    for name in names:
        key = name if name in ("engine_class", "accept_length") else f"engine_{name}"
        if key not in settings:
            continue
        given = settings[key]
        if name == "ids":
            found[name] = ids_of(given)
        elif name == "flags":
            found[name] = flags_of(given)
        elif name == "accept_length":
            found[name] = number(key, given)
        else:
            found[name] = placed(key, given, remote=remote) if name == "checkout" else given
    return found


def ids_of(text: str) -> list[int]:
    """[-1, 2, 30] of '[-1,2,30]' or '-1,2,30'."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    words = [word.strip() for word in inner.split(",")]
    if not all(re.fullmatch(r"-?\d{1,6}", word, re.ASCII) for word in words):
        raise InputError(
            f"engine_ids={text}: give the layer ids as the engine is given them, such as [2,30,58]"
        )
    return [int(word) for word in words]


def number(key: str, text: str) -> float:
    """A decimal number."""
    if not re.fullmatch(r"\d*\.?\d+", text, re.ASCII):
        raise InputError(f"{key}={text}: give a number")
    return float(text)


def put_host(experiment: dict[str, Any], asked: Asked, host: Mapping[str, Any]) -> None:
    """The host with all its settings, since the folder that names it may not be there next time."""
    if "results" in asked.settings:
        results = Path(asked.settings["results"]).expanduser().absolute()
        experiment["results"] = str(results)
    if asked.settings.get("host", "local") == "local" and not (asked.host or asked.config_dir):
        return
    choose(experiment, "host", "local" if host["alias"] is None else "ssh")
    for key, value in host.items():
        put(experiment, f"host.{key}", value)


def put_override(experiment: dict[str, Any], text: str) -> None:
    """One `section.key=value` of the command line, read as Hydra reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from orchestrator.explain import explain

    try:
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            raise InputError(f"{text}: diagnose answers one question; leave the list of values out")
        put(experiment, override.key_or_group, override.value())
    except HydraException as error:
        raise InputError(explain(error)) from error


def choose(experiment: dict[str, Any], group: str, option: str) -> None:
    """One option of a group of the config."""
    experiment["defaults"].append({f"override /{group}": option})


def put(experiment: dict[str, Any], key: str, value: Any) -> None:
    """A value at a dotted key; one that is there already was given by another name."""
    *sections, last = key.split(".")
    inner = experiment
    for section in sections:
        inner = inner.setdefault(section, {})
    if last in inner:
        raise InputError(f"{key} is given twice, as {inner[last]} and {value}")
    inner[last] = value


def as_yaml(experiment: Mapping[str, Any], repeat: str) -> str:
    """The experiment as a file, with the line that repeats it."""
    import yaml

    content = {key: value for key, value in experiment.items() if value != {}}
    text = yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000
    )
    return f"# @package _global_\n# {repeat}\n{text}"


def composed(experiment: Mapping[str, Any]) -> Resolved:
    """The resolved config, as `+experiment=diagnose` gives it where the file is found."""
    from orchestrator import compose

    with tempfile.TemporaryDirectory() as folder:
        keep(experiment, Path(folder))
        return compose.composed(["+experiment=diagnose"], Path(folder))


def keep(experiment: Mapping[str, Any], folder: Path) -> None:
    """Write the experiment's file below a run's folder."""
    from orchestrator.follow import write_atomic

    path = folder / EXPERIMENT
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, as_yaml(experiment, how_to_repeat(folder)).encode())


def how_to_repeat(folder: Path) -> str:
    """The command that runs a run's own experiment again."""
    return f"python -m orchestrator --config-dir {shlex.quote(str(folder))} +experiment=diagnose"

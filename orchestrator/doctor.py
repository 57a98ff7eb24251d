"""Verb `doctor`: read a drafter's files where they are, and say what will not fit together."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import HostError, InputError, OrchestratorError
from orchestrator.paths import CLONE, CONF

if TYPE_CHECKING:
    from orchestrator.channel import Channel, Request
    from orchestrator.push import Load
    from orchestrator.show import Show

USAGE = (
    "python -m orchestrator doctor [host=NAME] drafter=PATH [target=PATH] [data=PATH] [states=[…]] "
    "[trainer=NAME|PATH] [engine=NAME engine_version=X.Y.Z engine_class=NAME engine_checkout=PATH "
    "engine_flags=…] [json=true] [verbose=true]"
)
ABOUT = """Read headers and configs where the files are, and say what will not fit together.

  host              a config of conf/host, or any host that ssh reaches; left out: this machine
  drafter, target   checkpoint folders on that host; `lab` is the one that is shipped, and
                    `lab_speculators` a second drafter
  data              a folder of captured samples; states=[0,3,31,59] says which canonical states its
                    slots hold, in their order (without data: what the drafter was trained on)
  trainer           specforge, speculators, eagle, modelopt or torchspec, or the JSON of a draft model:
                    checks a run to come, with or without a drafter
  engine            sglang, vllm, tensorrt_llm or llama_cpp, with engine_version; engine_class is the
                    target's class there, such as kimi_k25; engine_checkout a folder with its source;
                    engine_flags the server's flags, as JSON or as 'num_steps=3,topk=1'

Exit codes: 0 nothing found, 3 a warning or an error, 1 the host did not answer or a check broke down,
2 bad input."""
PATHS = ("drafter", "target", "data")
ENGINE = ("engine_version", "engine_class", "engine_checkout", "engine_flags")
ENGINES = ("sglang", "vllm", "tensorrt_llm", "llama_cpp")
KEYS = (*PATHS, "states", "trainer", "engine", *ENGINE, "host", "json", "verbose", "results")
# What the lab's configs are called, and its folders.
SHIPPED = {
    ("drafter", "lab"): "drafter",
    ("drafter", "lab_speculators"): "drafter_speculators",
    ("target", "lab"): "target",
}
SEVERITIES = ("error", "warning", "note")
FOUND, BROKEN = 3, 1


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments as given; `host` holds the overrides of the host's config."""

    settings: dict[str, str] = field(default_factory=dict)
    host: tuple[str, ...] = ()
    config_dir: str | None = None

    def switch(self, name: str) -> bool:
        """A true or false."""
        value = self.settings.get(name, "false").lower()
        if value not in ("true", "false"):
            raise InputError(f"{name}={value!r}: write {name}=true or leave it out")
        return value == "true"


def run(arguments: list[str]) -> int:
    """Ask the host and show what it found; 3 where that is a warning or an error."""
    from orchestrator.show import Show

    show = Show()
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        show.line(f"{USAGE}\n{ABOUT}")
        return 0
    asked = parse(arguments)
    verbose = asked.switch("verbose")
    as_json = asked.switch("json")
    report = ask(asked)
    if as_json:
        show.console.out(json.dumps(report, indent=1, ensure_ascii=False), highlight=False)
    else:
        render(show, report, verbose=verbose)
    return exit_code(report)


def exit_code(report: Mapping[str, Any]) -> int:
    """0 where nothing is wrong; notes are nothing wrong; 1 where a part was not examined for a bug."""
    if report["failed"]:
        return BROKEN
    graves = [f for f in report["findings"] if f["severity"] in ("error", "warning")]
    return FOUND if graves else 0


def parse(arguments: Sequence[str]) -> Asked:
    """The arguments by name. Raises InputError for what is unknown or will not do."""
    settings: dict[str, str] = {}
    host: list[str] = []
    config_dir: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, is_setting, value = argument.partition("=")
        if key == "--config-dir":
            config_dir = value if is_setting else (rest.pop(0) if rest else "")
        elif is_setting and key.startswith("host."):
            host.append(argument)
        elif not is_setting or key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise InputError(f"doctor takes no {argument!r}{hint}; usage: {USAGE}")
        elif key in settings:
            raise InputError(f"{key} is given twice, as {settings[key]} and {value}")
        elif not value:
            raise InputError(f"{key}= is empty; leave it out or give it a value")
        else:
            settings[key] = value
    if not settings.keys() & {"drafter", "data", "trainer"}:
        raise InputError(
            "doctor examines a drafter (drafter=PATH) or a run to come (data=PATH trainer=NAME); "
            f"usage: {USAGE}"
        )
    lone = [key for key in ENGINE if key in settings]
    if lone and "engine" not in settings:
        raise InputError(
            f"{lone[0]} is given without an engine; name it: engine={'|'.join(ENGINES)}"
        )
    if config_dir is not None and not Path(config_dir).is_dir():
        raise InputError(f"--config-dir {config_dir} is no folder")
    return Asked(settings=settings, host=tuple(host), config_dir=config_dir)


def question(asked: Asked, *, remote: bool) -> dict[str, Any]:
    """What the host is asked, with its paths; those that are sent along are put in later."""
    settings = asked.settings
    question: dict[str, Any] = {
        role: placed(role, settings[role], remote=remote) for role in PATHS if role in settings
    }
    question["trainer"] = settings.get("trainer")
    trainer = settings.get("trainer", "")
    if trainer.endswith(".json") or "/" in trainer:
        question["trainer"] = placed("trainer", trainer, remote=remote)
    question["states"] = states_of(settings["states"]) if "states" in settings else None
    if "engine" in settings:
        checkout = settings.get("engine_checkout")
        question["engine"] = {
            "name": settings["engine"],
            "version": settings.get("engine_version"),
            "engine_class": settings.get("engine_class"),
            "checkout": checkout and placed("engine_checkout", checkout, remote=remote),
            "flags": flags_of(settings.get("engine_flags", "")),
        }
    return question


def placed(role: str, path: str, *, remote: bool) -> str:
    """A path as the host will read it; the lab's names stay for later."""
    if (role, path) in SHIPPED:
        return path
    if path.startswith(("/", "~")):
        return path
    if remote:
        raise InputError(
            f"{role}: {path!r} is relative; name it by its absolute path on the host, or ~/…"
        )
    return str(Path(path).absolute())


def states_of(text: str) -> list[int]:
    """[0, 3, 31, 59] of '[0,3,31,59]' or '0,3,31,59'."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    words = [word.strip() for word in inner.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", word, re.ASCII) for word in words):
        raise InputError(
            f"states={text}: give the canonical states of the data's slots in their order, such as "
            "states=[0,3,31,59]; 0 is the embedding output"
        )
    return [int(word) for word in words]


def flags_of(text: str) -> dict[str, Any]:
    """Server flags from JSON, from `key=value,key=value` or as they stand on a command line."""
    text = text.strip()
    if text.startswith(("{", "[")):
        try:
            flags = json.loads(text)
        except ValueError as error:
            raise InputError(f"engine_flags is no JSON: {error}") from None
        if not isinstance(flags, dict):
            raise InputError(
                f"engine_flags={text} is a list; give flags by their names, such as "
                "num_steps=3,topk=1"
            )
        return flags
    try:
        words = shlex.split(text) if "--" in text else re.split(r",(?![^\[]*\])", text)
    except ValueError as error:
        raise InputError(f"engine_flags cannot be split into words: {error}") from None
    flags = {}
    while words:
        name, given, value = words.pop(0).strip().partition("=")
        if not given and words and not words[0].startswith("--") and "--" in text:
            value, given = words.pop(0), "="
        if name:
            flags[name] = scalar(value) if given else True
    return flags


def scalar(word: str) -> Any:
    """A flag's value: a number or a switch where it reads like one."""
    try:
        return json.loads(word.lower() if word.lower() in ("true", "false") else word)
    except ValueError:
        return word


def host_of(asked: Asked) -> dict[str, Any]:
    """The resolved `host` section. Hydra is asked only where a host or one of its settings is named."""
    try:
        results = (
            Path(asked.settings.get("results", str(CLONE / "results"))).expanduser().absolute()
        )
    except RuntimeError as error:
        raise InputError(f"results={asked.settings['results']}: {error}") from error
    named = asked.settings.get("host", "local")
    if named == "local" and not asked.host and asked.config_dir is None:
        import sys

        work = str(results / "host")
        return {
            "name": "local",
            "alias": None,
            "ssh_config": None,
            "work": work,
            "python": sys.executable,
            "env": {},
            "gpus": None,
            "checkouts": [],
            "patience_s": 60.0,
        }
    return composed_host(named, asked, results)


def composed_host(named: str, asked: Asked, results: Path) -> dict[str, Any]:
    """The host's section as a run would have it: a file of conf/host, else an alias that ssh knows."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from orchestrator.config import check_host, plain
    from orchestrator.explain import explain
    from orchestrator.schema import register

    folders = [CONF] + ([Path(asked.config_dir).absolute()] if asked.config_dir else [])
    plain_name = re.fullmatch(r"[A-Za-z0-9_.-]+", named) is not None
    known = plain_name and any((folder / "host" / f"{named}.yaml").is_file() for folder in folders)
    alias = named.replace("\\", "\\\\").replace("'", "\\'")
    chosen = [f"host={named}"] if known else ["host=ssh", f"host.alias='{alias}'"]
    overrides = [*chosen, *asked.host, f"results='{results}'"]
    if asked.config_dir:
        overrides.append(f"hydra.searchpath=['file://{folders[-1]}']")
    register()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = compose(config_name="config", overrides=overrides)
        # Only this section: the others may lack what a run would need.
        host: dict[str, Any] = {} if missing(config.host) else plain(config.host)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise InputError(explain(error)) from error
    if not host:
        raise InputError(
            f"host {named} lacks {', '.join(missing(config.host))}; give it on the line"
        )
    check_host(host)
    if host["alias"] is None:
        host["work"] = str(Path(host["work"]).expanduser().absolute())
    return host


def missing(section: Any) -> list[str]:
    """Keys of a config's section that nobody has set."""
    from omegaconf import OmegaConf

    return sorted(f"host.{key}" for key in OmegaConf.missing_keys(section))


def ask(asked: Asked) -> dict[str, Any]:
    """The report of the host. Raises InputError for what it cannot read, HostError for the rest."""
    from orchestrator.session import open_channel

    host = host_of(asked)
    asking = question(asked, remote=host["alias"] is not None)
    with open_channel(host) as channel:
        root = channel.hello()["root"]
        loads, trees = lab_loads(asking, remote=host["alias"] is not None)
        loads = [snapshot_load(), *loads]
        for role, load in trees.items():
            asking[role] = f"{root}/{load.folder}"
        argument = json.dumps({**asking, "snapshot": f"{root}/{loads[0].folder}"})
        report = answer(channel, host, loads, argument)
    report["host"] = host["name"]
    return report


def snapshot_load() -> Load:
    """The code that answers there: the snapshot, as runs have it."""
    from orchestrator.push import Load
    from orchestrator.snapshot import take_snapshot

    return Load(kind="snapshots", tree=take_snapshot(CLONE).tree)


def lab_loads(asking: dict[str, Any], *, remote: bool) -> tuple[list[Load], dict[str, Load]]:
    """The shipped lab's folders where they are named: read in place, or sent along."""
    from orchestrator.plan import local_tree
    from orchestrator.push import Load

    trees = {}
    for role in ("drafter", "target"):
        if (role, asking.get(role)) not in SHIPPED:
            continue
        folder = CLONE / "lab" / SHIPPED[role, asking[role]]
        if remote:
            trees[role] = Load(kind="inputs", tree=local_tree(role, str(folder)))
        else:
            asking[role] = str(folder)
    return list(trees.values()), trees


def answer(
    channel: Channel, host: Mapping[str, Any], loads: Sequence[Load], argument: str
) -> dict[str, Any]:
    """Lays out what is missing there and asks; the report."""
    from orchestrator.push import deliver, lay_out

    probe = probe_request(host, argument)
    laid_out = channel.pipeline([lay_out(load) for load in loads], check=False)
    reply = deliver(channel, loads, laid_out, [probe])[0]
    lines = reply.payload.decode("utf-8", "replace").strip().splitlines()
    try:
        told = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = lines[-1][:120] if lines else ""
        raise HostError(f"{channel.name}: the answer is no JSON; its last line: {last}") from None
    if "error" in told:
        kind, said = told["error"]["kind"], told["error"]["message"]
        raise (
            InputError(said) if kind == "input" else OrchestratorError(f"{channel.name}: {said}")
        )
    return dict(told["report"])


def probe_request(host: Mapping[str, Any], argument: str) -> Request:
    """The question as the host's program takes it."""
    from jobs.doctor import PROGRAM
    from orchestrator.channel import Request

    fields = {"python": host["python"], "env": host["env"], "argument": argument}
    return Request(op="probe", fields=fields, payload=zlib.compress(PROGRAM))


def render(show: Show, report: Mapping[str, Any], *, verbose: bool) -> None:
    """What was examined, what was found in the order of its gravity, and one closing line."""
    for name, said in report["subject"].items():
        show.line(f"{name:<9}{said}", style="dim")
    if verbose:
        detail(show, report)
    for fact in report["facts"]:
        show.line(f"fact     {fact}")
    for left in report["not_examined"]:
        show.line(f"not examined: {left}", style="dim")
    show.findings(report["findings"])
    for said in report["failed"]:
        show.line(f"doctor failed: {said}", style="bold red")
    if report["findings"] or not report["failed"]:
        show.line(closing(report["findings"], len(report["not_examined"])))


def detail(show: Show, report: Mapping[str, Any]) -> None:
    """The drafter's switches with their origins, and its tensors."""
    form = report["form"] or {}
    wide = max((len(name) for name in form), default=0)
    for name, setting in form.items():
        show.line(f"form     {name:<{wide}}  {setting['value']}  ({setting['origin']})")
    for kind, names in report["inventory"].items():
        if names:
            show.line(f"{kind:<9}{', '.join(names)}")


def closing(findings: Sequence[Mapping[str, Any]], left: int) -> str:
    """'2 errors and 1 warning', or that nothing was found among what was examined."""
    parts = []
    for severity in SEVERITIES:
        count = sum(finding["severity"] == severity for finding in findings)
        if count:
            parts.append(f"{count} {severity}{'s' if count > 1 else ''}")
    if not parts and left:
        were = "1 thing above was" if left == 1 else f"{left} things above were"
        return f"nothing found that would not fit, but {were} not examined"
    if not parts:
        return "nothing found that would not fit"
    return "\n" + (parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}")

"""From Hydra's composed config to one resolved hypothesis, or one clear error.

The resolved config is made once: what runs, what is logged and what is hashed are the same bytes.
Whatever an experiment file or an override sets must stand in it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3.errors import BadInput
from eagle3.wiring import Wiring
from orchestrator.check_bench import check_bench
from orchestrator.check_capture import check_capture
from orchestrator.check_search import JOBS as SEARCHES
from orchestrator.check_search import check_search
from orchestrator.errors import InputError
from orchestrator.judge import metrics_of, parse_predictions
from orchestrator.raw_types import check_raw_types, schema_type

# Which parts of the config a job reads. The others are dropped, so that setting one is an error.
SECTIONS = {
    "drafter_test": {"wiring", "target", "drafter", "data"},
    "capture_states": {"target", "data", "engine"},
    "inspect_data": {"target", "data"},
    "wiring_search": {"wiring", "target", "drafter", "data"},
    "diagnose": {"wiring", "target", "drafter", "data", "engine"},
    "engine_bench": {"wiring", "target", "drafter", "data", "engine"},
    "engine_probe": {"wiring", "target", "drafter", "data", "engine"},
    "script": set(),
}
PARTS = set().union(*SECTIONS.values())
SHARED = {"claim", "predict", "strict", "detach", "host", "job", "tracking", "results"}
LEAST = {
    "job.steps": 1,
    "job.threads": 1,
    "job.max_samples": 1,
    "job.seed": 0,
    "job.first_layers": 0,
    "job.ttt_steps": 1,
    "job.finalists": 1,
    "job.tree.topk": 1,
    "job.tree.draft_tokens": 2,  # the root and one drafted token
    "job.topk": 1,
    "job.draft_tokens": 2,
    "job.max_prompts": 1,
    "job.new_tokens": 2,  # the first one is the prefill's
    "job.budget.pairs": 1,
    "job.budget.least": 1,
    "job.budget.precision": 0.0,
    "job.budget.minutes": 0.0,
    "job.budget.restarts": 1,
    "job.budget.repeats": 0,
    "job.start_s": 1,
    "job.first_s": 1,
    "job.request_s": 1,
    "job.timeout_s": 0.1,
    "host.patience_s": 0,
    "data.capture.new_tokens": 0,
    "data.capture.min_new_tokens": 2,  # with fewer, no position is scored
    "data.capture.repetition_window": 2,
    "data.capture.batch": 1,
    "data.capture.max_samples": 1,
}
SECRET_NAME = re.compile(
    r"(SECRET|PASS|PASSWD|PASSWORD|(^|_)(PWD|PAT|AUTH|TOKEN|KEY|APIKEY|CREDENTIALS?))$",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-)[A-Za-z0-9_-]{10,}|://[^/\s@]+:[^/\s@]+@"
)
FILED = (
    "looks like a secret, which would be filed with the run; keep it on the host itself, in a file that "
    "your job reads"
)
HINTS = {
    "host.alias": "name the host as ssh knows it: host.alias=gpu8",
    "job.path": "name your script: job.path=my_test.py",
    "wiring.layers": "choose an experiment, such as +experiment=layers_m1_2_30, or write "
    "wiring.layers=[-1,2,30]",
    "wiring.convention": "say what the layer ids mean: wiring.convention=output, input or hf",
}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One hypothesis, ready to run. `yaml` is the record; `config` the same as plain data."""

    config: dict[str, Any]
    yaml: str
    experiment: str | None
    overrides: tuple[str, ...]


def resolve(cfg: DictConfig, hydra: Any) -> Resolved:
    """Validate a composed config and resolve it once; `hydra` is what Hydra says of its making.

    Raises InputError for anything that is missing, of the wrong type, or set without effect.
    """
    # Unresolved: an override may hold an interpolation, which must not be asked twice.
    listed = typing.cast(list[str], OmegaConf.to_container(hydra.overrides.task, resolve=False))
    overrides = tuple(listed)
    sources = [source.path for source in hydra.runtime.config_sources]
    folders = [Path(path.removeprefix("file://")) for path in sources if path]
    choices = chosen(hydra.runtime.choices, overrides, folders)
    task = OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"])
    job = OmegaConf.select(task, "job.name", throw_on_missing=False)
    if job not in SECTIONS:
        raise InputError(f"job.name is {job!r}; the jobs are {', '.join(SECTIONS)}")

    composed = plain(task, resolve=False)
    if not composed.get("results"):  # results=$UNSET
        raise InputError("results is empty; set results=FOLDER, or leave it out")
    set_here = [*override_values(overrides, choices)]
    in_files = [*raw_leaves(folders, choices)]
    check_raw_types(in_files, str(job))
    check_raw_types([(key, value, f"override {key}") for key, value in set_here], str(job))
    read = SECTIONS[job] | SHARED
    if job in SEARCHES and not any(
        touches("wiring", key) for key in (*(k for k, *_ in set_here), *(k for k, *_ in in_files))
    ):
        read = read - {"wiring"}  # it starts from what the checkpoint declares
    kept = {k: v for k, v in composed.items() if k in read}
    check_choices(overrides, choices, read, job)
    unknown = [key for key, _ in leaves(kept) if schema_type(key, str(job)) is None]
    if unknown:
        raise InputError(f"{unknown[0]} is no setting that anything reads; remove it")
    check_stands(kept, set_here, f"an override, but the job {job} has no such setting")
    check_experiment(folders, choices, kept, [key for key, _ in set_here], overrides)

    task = OmegaConf.masked_copy(task, list(kept))
    missing = sorted(key for key, value in leaves(kept) if value == "???")
    if missing:
        hints = "; ".join(HINTS[key] for key in missing if key in HINTS)
        raise InputError(f"not set: {', '.join(missing)}{'; ' + hints if hints else ''}")
    try:
        OmegaConf.resolve(task)
    except OmegaConfBaseException as error:
        raise InputError(f"the config cannot be resolved: {first_line(error)}") from error
    resolved = plain(task)
    for key, value in leaves(resolved):
        if isinstance(value, str) and "${" in value:
            raise InputError(f"{key} still holds an interpolation after resolving: {value!r}")
    resolved["results"] = str(Path(resolved["results"]).expanduser().absolute())
    if resolved["host"]["alias"] is None:
        resolved["host"]["work"] = str(Path(resolved["host"]["work"]).expanduser().absolute())
    uri = resolved["tracking"]["uri"]
    if uri and urlsplit(uri).password:
        raise InputError(
            "tracking.uri holds a password, which would be filed with the run; give MLflow its "
            "credentials by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    parse_predictions(resolved["predict"], metrics_of(str(job)))
    check_ranges(resolved)
    check_whose_metrics(resolved)
    check_search(resolved)
    check_bench(resolved)
    check_capture(resolved)
    check_filed(resolved.get("engine", {}))
    check_host(resolved["host"])
    for number, word in enumerate(resolved["job"].get("args", ())):
        if SECRET_VALUE.search(word):
            raise InputError(f"job.args[{number}] {FILED}")
    if "wiring" in resolved:
        try:
            Wiring.parse(resolved["wiring"]).states()
        except BadInput as error:
            raise InputError(f"wiring: {error}") from error
    text = OmegaConf.to_yaml(OmegaConf.create(resolved), sort_keys=True)
    experiment = choices.get("experiment")
    return Resolved(
        config=resolved,
        yaml=text,
        experiment=None if experiment is None else flat_choice(experiment),
        overrides=overrides,
    )


def check_ranges(config: Mapping[str, Any]) -> None:
    """Numbers must make sense: no draft chain of no step, no batch of nothing."""
    for key, least in LEAST.items():
        found, value = look_up(config, key)
        if found and value is not None and value < least:
            raise InputError(f"{key} is {value}, but must be at least {least}")
    tree = config["job"].get("tree", {})
    if len({value is None for value in tree.values()}) > 1:
        raise InputError("a tree takes both job.tree.topk and job.tree.draft_tokens")
    for key in ("data.states", "data.capture.states"):
        found, states = look_up(config, key)
        if found and states is not None and (len(set(states)) < len(states) or min(states) < 0):
            raise InputError(
                f"{key} is {states}; it must name each canonical state once, from 0 up"
            )


def check_whose_metrics(config: Mapping[str, Any]) -> None:
    """A trainer's own figures are of a drafter as it was trained, and come beside ours."""
    job = config["job"]
    if "metrics" not in job:
        return
    if "ours" not in job["metrics"]:
        raise InputError(
            "job.metrics must hold 'ours', on which every verdict rests: job.metrics=[ours,specforge]"
        )
    theirs = [name for name in job["metrics"] if name != "ours"]
    if job["ttt_steps"] is not None and not theirs:
        raise InputError(
            "job.ttt_steps is for a trainer's own figures: job.metrics=[ours,specforge,speculators]"
        )
    switches = Wiring.parse(config["wiring"]).untrained() if theirs else []
    if switches:
        raise InputError(
            f"job.metrics={','.join(theirs)} is of a drafter as it was trained; leave it out with "
            f"{', '.join(switches)}"
        )


def check_filed(engine: Mapping[str, Any]) -> None:
    """No secret in what an engine is started or asked with, which is filed as well."""
    for key in ("env", "flags"):
        for name, value in engine.get(key, {}).items():
            if SECRET_NAME.search(name.replace("-", "_")) or SECRET_VALUE.search(str(value)):
                raise InputError(f"engine.{key}.{name} {FILED}")
    for key in ("launch", "baseline_launch"):
        for word in engine.get(key) or ():
            name, is_set, _ = word.partition("=")
            named = SECRET_NAME.search(name.lstrip("-").replace("-", "_"))
            if (named and (is_set or word.startswith("--"))) or SECRET_VALUE.search(word):
                raise InputError(f"engine.{key}: {name} {FILED}")
    for key in ("url", "baseline_url"):
        if SECRET_VALUE.search(engine.get(key) or ""):
            raise InputError(f"engine.{key} {FILED}")


def check_host(host: Mapping[str, Any]) -> None:
    """No secret in what is filed, no GPU twice, and no alias that ssh would take for an option."""
    for name, value in host["env"].items():
        if SECRET_NAME.search(name) or SECRET_VALUE.search(value):
            raise InputError(f"host.env.{name} {FILED}")
    gpus = host["gpus"]
    if gpus is not None and (not gpus or len(set(gpus)) < len(gpus) or min(gpus) < 0):
        raise InputError(
            f"host.gpus is {gpus}; name each GPU once by its index, or null for the freest one"
        )
    if host["ssh_config"] is not None and host["alias"] is None:
        raise InputError("host.ssh_config is set without a host.alias; choose host=ssh")
    if host["alias"] is None:
        return
    if host["name"] == "local":
        raise InputError(
            f"host.alias={host['alias']} is set for the host 'local', which is this machine; choose "
            "host=ssh with it"
        )
    if not host["work"].startswith(("/", "~")):
        raise InputError(
            f"host.work is {host['work']!r}; give its absolute path on the host, or ~/…"
        )


def flat_choice(choice: Any) -> str:
    """A group choice as one word; `+experiment=[a,b]` gives 'a+b'."""
    return choice if isinstance(choice, str) else "+".join(choice)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def plain(cfg: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Plain data with enums by name; `???` stays as it is where `resolve` is off."""
    data = OmegaConf.to_container(cfg, resolve=resolve, enum_to_str=True)
    return typing.cast(dict[str, Any], data)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; lists and empty dicts are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def chosen(
    known: Mapping[Any, Any], overrides: Sequence[str], folders: Sequence[Path]
) -> dict[str, Any]:
    """The option of every group; Hydra's own list leaves out groups chosen as `+group=[a,b]`."""
    choices = {str(group): option for group, option in known.items()}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key not in choices and any((folder / key).is_dir() for folder in folders):
            choices[key] = override.value()
    return choices


def override_values(
    overrides: Sequence[str], choices: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything the command line sets; choices of groups are checked here."""
    seen: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in choices or override.package is not None:
            chosen = choices.get(key)
            wanted = override.value()
            if not override.is_delete() and flat_choice(chosen or "") != flat_choice(wanted or ""):
                raise InputError(
                    f"{override.input_line} has no effect: the config uses {key}={chosen}"
                )
        elif not override.is_delete():
            if key in seen:
                raise InputError(f"{key} is given twice, as {seen[key]} and {override.input_line}")
            seen[key] = str(override.input_line)
            yield from leaves(override.value(), key)


def check_choices(
    overrides: Sequence[str], choices: Mapping[str, Any], read: Iterable[str], job: str
) -> None:
    """A section that is chosen on the command line must be one that the job reads."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in choices and key in PARTS and key not in read:
            raise InputError(
                f"{override.input_line} chooses a section that the job {job} does not read; leave it out"
            )


def check_stands(config: Mapping[str, Any], wanted: Sequence[tuple[str, Any]], what: str) -> None:
    """Every wanted (key, value) must be in the composed config."""
    for key, value in wanted:
        found, actual = look_up(config, key)
        if not found:
            raise InputError(f"{key} is set by {what}")
        if not same(actual, value):
            raise InputError(
                f"{key}={value!r} is set by {what.split(',')[0]}, but the config holds {actual!r}"
            )


def look_up(config: Any, key: str) -> tuple[bool, Any]:
    """(whether the dotted key is there, its value)."""
    for part in key.split("."):
        if isinstance(config, Mapping) and part in config:
            config = config[part]
        elif isinstance(config, list) and part.isdigit() and int(part) < len(config):
            config = config[int(part)]
        else:
            return False, None
    return True, config


def same(actual: Any, wanted: Any) -> bool:
    """Equality after the conversions a typed config makes: enums by name, whole floats, quotes."""
    if isinstance(wanted, Enum):
        wanted = wanted.name
    if isinstance(actual, list) and isinstance(wanted, list):
        return len(actual) == len(wanted) and all(map(same, actual, wanted))
    if isinstance(actual, bool) or isinstance(wanted, bool):
        return actual is wanted
    return bool(actual == wanted or (isinstance(actual, str) and actual == str(wanted)))


def group_files(folders: Sequence[Path], choices: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """(group, file) of every chosen YAML file that lies on disk."""
    for group, choice in choices.items():
        names = choice if isinstance(choice, list | tuple) else [choice]
        for name in names:
            for folder in folders:
                path = folder / group.split("@")[0] / f"{name}.yaml"
                if not group.startswith("hydra/") and path.is_file():
                    yield group, path
                    break


def package_of(path: Path, group: str) -> str:
    """Where a group file's content lands: its `# @package` header, else the group's own name."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:2] == ["#", "@package"] and len(words) > 2:
            return "" if words[2] == "_global_" else words[2].replace("_group_", group)
        if line.strip() and not line.startswith("#"):
            break
    return group.split("@")[-1].replace("/", ".")


def raw_content(path: Path) -> dict[str, Any]:
    """A YAML file as written, without its defaults list."""
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    content = loaded if isinstance(loaded, dict) else {}
    return {str(k): v for k, v in content.items() if k != "defaults"}


def raw_leaves(
    folders: Sequence[Path], choices: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value as YAML has it, where) of every chosen file."""
    for group, path in group_files(folders, choices):
        package = package_of(path, group)
        for key, value in leaves(raw_content(path), package):
            yield key, value, str(path)


def check_experiment(
    folders: Sequence[Path],
    choices: Mapping[str, Any],
    config: Mapping[str, Any],
    overridden: Sequence[str],
    overrides: Sequence[str],
) -> None:
    """Every value and every choice of an experiment file must have taken effect."""
    chosen_here = {o.split("=")[0].lstrip("+") for o in overrides}
    for group, path in group_files(folders, choices):
        if group.split("@")[0] != "experiment":
            continue
        if package_of(path, group):
            raise InputError(
                f"{path} does not open with '# @package _global_', so its values land under "
                f"'{package_of(path, group)}' and change nothing; add that line"
            )
        values = [
            (key, value)
            for key, value in leaves(raw_content(path))
            if key and not any(touches(key, o) for o in overridden)
        ]
        named = experiment_choices(path)
        if not named and not any(key not in ("claim", "predict") for key, _ in values):
            raise InputError(f"{path} sets nothing, so it would test the defaults; state a wiring")
        check_stands(config, values, f"{path}, but the job does not read it")
        for name, option in named.items():
            if name in PARTS and name not in config:
                raise InputError(f"{path} chooses {name}={option}, but the job does not read it")
            if name not in chosen_here and flat_choice(choices.get(name) or "") != option:
                raise InputError(
                    f"{path} chooses {name}={option}, but the config uses {choices.get(name)}"
                )


def experiment_choices(path: Path) -> dict[str, str]:
    """The group choices in an experiment file's defaults list."""
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    entries = loaded.get("defaults", []) if isinstance(loaded, dict) else []
    found: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, dict):
            for key, option in entry.items():
                name = str(key).removeprefix("override ").removeprefix("optional ").strip()
                found[name.lstrip("/").split("@")[0]] = flat_choice(option)
    return found


def touches(key: str, other: str) -> bool:
    """Whether one dotted key is the other or lies within it."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")

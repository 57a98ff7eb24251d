"""What verbs that look at files on a host are asked: `key=value` arguments, paths, a host.

`doctor` and `diagnose` are asked in the same words; each has keys of its own beside these.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.paths import CLONE, CONF

ENGINE = ("engine_version", "engine_class", "engine_checkout", "engine_flags")
ENGINES = ("sglang", "vllm", "tensorrt_llm", "llama_cpp")
# What the lab's configs are called, and its folders.
SHIPPED = {
    ("drafter", "lab"): "drafter",
    ("drafter", "lab_speculators"): "drafter_speculators",
    ("drafter", "lab_two_layers"): "drafter_two_layers",
    ("drafter", "lab_early"): "drafter_early",
    ("target", "lab"): "target",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments as given; `config` holds those with a dot, which are overrides of the config."""

    settings: dict[str, str] = field(default_factory=dict)
    config: tuple[str, ...] = ()
    config_dir: str | None = None

    @property
    def host(self) -> tuple[str, ...]:
        """The overrides of the host's section."""
        return tuple(o for o in self.config if o.lstrip("+").startswith("host."))

    def switch(self, name: str) -> bool:
        """A true or false."""
        value = self.settings.get(name, "false").lower()
        if value not in ("true", "false"):
            raise InputError(f"{name}={value!r}: write {name}=true or leave it out")
        return value == "true"


def read(
    arguments: Sequence[str],
    *,
    verb: str,
    keys: Sequence[str],
    sections: Sequence[str],
    usage: str,
) -> Asked:
    """The arguments by name: `keys`, and overrides of the config's `sections`.

    Raises InputError for what is unknown, given twice or empty.
    """
    settings: dict[str, str] = {}
    config: list[str] = []
    config_dir: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, is_setting, value = argument.partition("=")
        if key == "--config-dir":
            config_dir = value if is_setting else (rest.pop(0) if rest else "")
        elif is_setting and key.lstrip("+").split(".")[0] in sections and "." in key:
            config.append(argument)
        elif not is_setting or key not in keys:
            section, dot, _ = key.partition(".")
            near = difflib.get_close_matches(section, sections if dot else keys, n=1)
            hint = f"; did you mean {near[0]}{dot or '='}?" if near else ""
            raise InputError(f"{verb} takes no {argument!r}{hint}; usage: {usage}")
        elif key in settings:
            raise InputError(f"{key} is given twice, as {settings[key]} and {value}")
        elif not value:
            raise InputError(f"{key}= is empty; leave it out or give it a value")
        else:
            settings[key] = value
    lone = [key for key in settings if key.startswith("engine_")]
    if lone and "engine" not in settings:
        raise InputError(
            f"{lone[0]} is given without an engine; name it: engine={'|'.join(ENGINES)}"
        )
    if config_dir is not None and not Path(config_dir).is_dir():
        raise InputError(f"--config-dir {config_dir} is no folder")
    return Asked(settings=settings, config=tuple(config), config_dir=config_dir)


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
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()  # quoted twice, as Hydra's own values are
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
    chosen = [f"host={named}"] if known else ["host=ssh", f"host.alias={quoted(named)}"]
    overrides = [*chosen, *asked.host, f"results={quoted(str(results))}"]
    if asked.config_dir:
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{folders[-1]}')}]")
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


def quoted(text: str) -> str:
    """A value as Hydra's grammar takes any."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def missing(section: Any) -> list[str]:
    """Keys of a config's section that nobody has set."""
    from omegaconf import OmegaConf

    return sorted(f"host.{key}" for key in OmegaConf.missing_keys(section))

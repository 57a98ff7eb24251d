"""Hydra's and OmegaConf's errors in one sentence, with what to do where it can be told."""

from __future__ import annotations

import dataclasses
import difflib
import re

from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from orchestrator import schema

# Sections whose keys are a person's own, which Hydra takes with a + in front.
FREE = r"host\.env|engine\.flags|job\.axes\.only"
NOISE = ("Config search path", "provider=", "object_type", "reference_type", "See https:")


def explain(error: BaseException) -> str:
    """The error on one line; a forgotten package header and a misspelt key are recognised."""
    cause = error.__cause__
    source = cause if isinstance(cause, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(source).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(NOISE))
    joined = " ".join(str(error).split())
    misplaced = re.search(r"In '(experiment/[^']+)': .*Key 'experiment' not in 'Config'", joined)
    if misplaced:
        return (
            f"{misplaced.group(1)}.yaml does not open with '# @package _global_', so its values land "
            "under 'experiment' and would change nothing; add that line"
        )
    if path := re.search(r"Could not find '(drafter|target|data)/([/~][^']*)'", joined):
        role, given = path.groups()
        own = f"{role}=path {role}.path={given}"
        return f"{role}={given} names no config; for a folder of your own: {own}"
    if free := re.search(rf"is not in struct full_key: (({FREE})\.(\S+))", text):
        key, section = free.group(1), free.group(2)
        return f"{section} has no {free.group(3)!r} yet; write +{key}=… for a key of your own"
    if isinstance(error, OverrideParseException):
        key, is_setting, value = str(error.override).partition("=")
        if is_setting and '"' not in value and "'" not in value:
            quoted = f"'{key}=\"{value}\"'"
            return f"{error.override!r} cannot be read; quote its value, in the shell: {quoted}"
        return (
            f"{error.override!r} cannot be read; quote a value with spaces, commas, ~ or other signs: "
            "key='a value' (and quotes of the shell's own around all of it)"
        )
    return text + suggestion(text)


def explain_null(error: AttributeError) -> str | None:
    """What OmegaConf means by it where a mapping is given for something that is null; else None."""
    found = re.search(r"full_key: (\S+)", str(error))
    return found and f"{found[1]} is null here and takes no mapping; set its keys one by one"


def suggestion(text: str) -> str:
    """'; did you mean …?' for a key that a section of the config does not have."""
    wrong = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    section = getattr(schema, wrong.group(2), None) if wrong else None
    if wrong is None or not dataclasses.is_dataclass(section):
        return ""
    names = [field.name for field in dataclasses.fields(section)]
    near = difflib.get_close_matches(wrong.group(1), names, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; it has {', '.join(names)}"

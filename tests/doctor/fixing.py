"""Following a finding's fix to the letter."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from typing import Any

REMOVED = re.compile(r'remove "(?P<key>\w+)" (?:of (?P<outer>\w+)|at the top level)')


def applied(config: dict[str, Any], fix: Iterable[str]) -> dict[str, Any]:
    """A config with the lines written that are to be written, and those taken out that are to go."""
    config = copy.deepcopy(config)
    for line in fix:
        if line.startswith("{"):
            config = json.loads(line)
        elif line.startswith('"'):
            merge(config, json.loads(f"{{{line}}}"))
        elif removed := REMOVED.fullmatch(line):
            block = config[removed["outer"]] if removed["outer"] else config
            del block[removed["key"]]
    return config


def merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    """Objects are merged, everything else is replaced."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value


def states_asked(fix: Iterable[str]) -> list[list[int]]:
    """The states with which a fix says to ask again, in their order."""
    found = (re.search(r"doctor … .*states=(\[[\d,]+\])", line) for line in fix)
    return [json.loads(said[1]) for said in found if said]

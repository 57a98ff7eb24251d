"""Verb `layers`: what a list of layer ids means to an engine or trainer, and what to write elsewhere."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from eagle3.conventions import KEY, NESTED
from eagle3.engines import ECOSYSTEMS
from eagle3.errors import BadInput
from eagle3.layers import LayerConvention
from orchestrator.errors import InputError
from orchestrator.layer_words import Asked, explain, meanings_table, places_table
from orchestrator.show import Show

USAGE = (
    "python -m orchestrator layers '[2,30,58]' engine=NAME [engine_version=X] [engine_class=NAME] "
    "[num_layers=N] [json=true]"
)
ABOUT = f"""What each layer id stands for, how that is known, and what to write for the same states
elsewhere. Engines and trainers: {", ".join(ECOSYSTEMS)}.
In the place of an engine, convention=output, input, hf or canonical says what the ids mean.
In the place of a list, default asks for an engine's own. `layers rules` prints the whole table."""
KEYS = ("engine", "engine_version", "engine_class", "num_layers", "convention", "json")
CONVENTIONS = ("canonical", *(convention.value for convention in LayerConvention))

WHERE = {NESTED: "in eagle_config", KEY: "at the top level"}


def run(arguments: list[str]) -> int:
    """Explain a list; 0. Raises InputError."""
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        Show().line(f"{USAGE}\n{ABOUT}")
        return 0
    if arguments == ["rules"]:
        Show().line("\n".join([*meanings_table(), "", *places_table()]))
        return 0
    asked, as_json = parse(arguments)
    try:
        said = explain(asked)
    except BadInput as error:
        raise InputError(f"layers: {error}") from error
    if as_json:
        Show().line(json.dumps(said, indent=2))
    else:
        show_explained(Show(), said)
    return 0


def parse(arguments: Sequence[str]) -> tuple[Asked, bool]:
    """The arguments of the verb, and whether it is to answer in JSON. Raises InputError."""
    lists: list[str] = []
    settings: dict[str, str] = {}
    for argument in arguments:
        key, is_setting, value = argument.partition("=")
        if not is_setting:
            lists.append(argument)
        elif key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(KEYS)}"
            raise InputError(f"layers takes no '{key}'; {hint}")
        elif key in settings:
            raise InputError(f"layers: {key} is given twice")
        elif not value:
            raise InputError(f"layers: {key}= has no value")
        else:
            settings[key] = value
    if len(lists) != 1:
        said = "no list" if not lists else "more than one list; put it in quotes"
        raise InputError(f"layers: {said}; usage: {USAGE}")
    if ("engine" in settings) == ("convention" in settings):
        raise InputError(
            "layers: say what the ids mean, either by engine=NAME or by convention="
            f"{'|'.join(CONVENTIONS)}"
        )
    if "convention" in settings and "engine_version" in settings:
        raise InputError("layers: engine_version says nothing without engine")
    convention = settings.get("convention")
    if convention and convention not in CONVENTIONS:
        near = difflib.get_close_matches(convention, CONVENTIONS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(CONVENTIONS)}"
        raise InputError(f"layers: there is no convention '{convention}'; {hint}")
    ids = parse_ids(lists[0])
    if ids is None and convention:
        raise InputError("layers: a convention has no default list; name an engine")
    if settings.get("json", "false") not in ("true", "false"):
        raise InputError(f"layers: json is true or false, not '{settings['json']}'")
    asked = Asked(
        ids=ids,
        engine=settings.get("engine"),
        engine_version=settings.get("engine_version"),
        engine_class=settings.get("engine_class"),
        num_layers=parse_count(settings.get("num_layers")),
        convention=convention,
    )
    return asked, settings.get("json") == "true"


def parse_ids(text: str) -> tuple[int, ...] | None:
    """'[2, 30, 58]' as integers; None for 'default'. Raises InputError."""
    if text.strip() == "default":
        return None
    if not re.fullmatch(r"\s*\[\s*(-?\d{1,6}(\s*,\s*-?\d{1,6})*)?\s*\]\s*", text, re.ASCII):
        raise InputError(f"layers: {text!r} is no list of layer ids; write it as '[2,30,58]'")
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def parse_count(text: str | None) -> int | None:
    """num_layers. Raises InputError."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", text, re.ASCII):
        raise InputError(f"layers: num_layers is a number of decoder layers, not '{text}'")
    return int(text)


def show_explained(show: Show, said: dict[str, Any]) -> None:
    """Print what `explain` says."""
    if "engine" in said:
        names = (said["engine"], said["engine_version"], said["engine_class"])
        show.line(f"{' '.join(filter(None, names))}: {said['meaning']}")
        show.line(f"known    {said['evidence']}: {said['source']}", style="dim")
        show_places(show, said)
    else:
        show.line(f"convention {said['convention']}")
    if said["each"]:
        table = Table("id", "state", "hidden_states", "", box=None, pad_edge=False)
        for one in said["each"]:
            i, k, hf = one["id"], one["state"], one["hf_index"]
            table.add_row(
                "" if i is None else str(i),
                "-" if k is None else str(k),
                "-" if hf is None else escape(f"[{hf}]"),
                escape(one["words"]),
            )
        show.console.print(table)
    if said["states"] is None:
        show.line("states   none that can be used", style="red")
    else:
        show.line(
            f"states   {', '.join(map(str, said['states'])) or 'none'}, in this order into fc"
        )
    for problem in said["problems"]:
        show.line(f"problem  {problem}", style="yellow")
    for note in said["notes"]:
        show.line(f"note     {note}", style="dim")
    if not said["write"]:
        return
    states = ", ".join(map(str, said["write_for"]))
    show.line(f"\nto feed the states {states}, write")
    table = Table("", "releases", "class", "ids", "", box=None, pad_edge=False)
    previous = None
    for line in said["write"]:
        ids = json.dumps(line["ids"], separators=(",", ":")) if line["ids"] else "-"
        remark = [WHERE.get(line["where"], line["where"])] if line["ids"] and line["where"] else []
        if line["needs"]:
            remark.append(f"needs {line['needs'].partition(':')[0]}")
        if not line["ids"]:
            remark.append(line["why"] if line["possible"] else f"not possible: {line['why']}")
        remark += line["notes"]
        name = "" if line["ecosystem"] == previous else line["ecosystem"]
        previous = line["ecosystem"]
        cells = (name, line["releases"], line["classes"], ids, "; ".join(remark))
        table.add_row(*map(escape, cells))
    show.console.print(table)
    for patch in dict.fromkeys(line["needs"] for line in said["write"] if line["needs"]):
        show.line(patch, style="dim")


def show_places(show: Show, said: dict[str, Any]) -> None:
    """Where the engine looks ids up."""
    places = said["looked_up"]
    if said["setting"]:
        show.line(f"read of  {said['setting']}", style="dim")
    elif places:
        rest = f", then {', '.join(places[1:])}" if places[1:] else ""
        show.line(
            f"read of  {places[0]}{rest}; where none is found, the default states are fed",
            style="dim",
        )
    if said["looked_up_otherwise"]:
        other = said["looked_up_otherwise"]
        show.line(f"         {other['by']}: {', '.join(other['in'])}", style="dim")

"""The layouts of drafter checkpoints. A new one is a file here and a line in LAYOUTS.

A layout is a module with

    NAME                            what config, notes and reports call it
    recognise(config, shapes)       why a checkpoint looks like this layout, or None
    read(reader)                    its DrafterForm; faults go to the reader; None where sizes lack

No torch here: the checks that run before anything is loaded read checkpoints too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from eagle3.checkpoints import specforge, speculators
from eagle3.checkpoints.agree import disagreements
from eagle3.checkpoints.reading import Reader
from eagle3.checkpoints.refused import other_kinds, unknown_switches, unread_switches
from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Setting, Shapes

LAYOUTS: dict[str, ModuleType] = {
    layout.NAME: layout
    for layout in (
        specforge,
        speculators,
    )
}


def examine(
    config: Mapping[str, Any],
    shapes: Shapes | None,
    where: Path,
    *,
    layout: str | None = None,
) -> tuple[DrafterForm | None, tuple[str, ...]]:
    """The form of a checkpoint and every fault of it; no form where a size cannot be told."""
    name, why = choose(config, shapes, where, layout)
    if faults := other_kinds(config, shapes):
        return None, tuple(faults)  # held against an ordinary drafter it would only bring more
    reader = Reader(config=config, shapes=shapes, layout=Setting(name, why), file=where.name)
    reader.faults += unknown_switches(config)
    form: DrafterForm | None = LAYOUTS[name].read(reader)
    if form is not None:
        reader.faults += unread_switches(config, reader.read, name)
        reader.faults += disagreements(form, shapes)
    return form, tuple(dict.fromkeys(reader.faults))


def choose(
    config: Mapping[str, Any], shapes: Shapes | None, where: Path, layout: str | None
) -> tuple[str, str]:
    """The layout of a checkpoint and why it is that one."""
    if layout is not None:
        if layout not in LAYOUTS:
            raise BadInput(f"no checkpoint layout named '{layout}'; there are {', '.join(LAYOUTS)}")
        return layout, "asked for"
    reasons = {name: module.recognise(config, shapes) for name, module in LAYOUTS.items()}
    found = [(name, why) for name, why in reasons.items() if why]
    if len(found) == 1:
        return found[0]
    seen = " and ".join(f"{name} ({why})" for name, why in found)
    raise BadInput(
        f"{where} looks like {seen or 'no layout that is known'}; known are {', '.join(LAYOUTS)}"
    )

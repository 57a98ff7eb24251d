"""Captured data of several ecosystems, found by looking and read into one form.

A layout is one file of this package and one entry of LAYOUTS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from eagle3.data import look, pt_shards, specforge, speculators, speculators_v0
from eagle3.data.form import DataForm, RawSample, Slot
from eagle3.errors import BadInput
from eagle3.files import read_json
from eagle3.listing import files_below

CAPTURE_FILE = "capture.json"


class Layout(Protocol):
    """What a layout's module offers."""

    NAME: str
    LAST_APART: bool  # the last state is an entry of its own, so it is the target's end

    def files(self, folder: Path, /) -> tuple[Path, ...]:
        """The sample files, in order."""

    def recognise(self, folder: Path, files: Sequence[Path], /) -> str | None:
        """Why a folder is in this layout, or None."""

    def slots(
        self, folder: Path, files: Sequence[Path], hidden: int, num_layers: int, /
    ) -> tuple[Slot, ...]:
        """What the files store, as far as the layout's own rule tells."""

    def notes(self, folder: Path, files: Sequence[Path], /) -> tuple[str, ...]:
        """What a job should say of the folder."""

    def read(self, path: Path, form: DataForm, /) -> RawSample:
        """One sample; raises BadInput that names the file and what is wrong with it."""


LAYOUTS: dict[str, Layout] = {
    "pt_shards": pt_shards,
    "specforge": specforge,
    "speculators": speculators,
    "speculators_v0": speculators_v0,
}


def find_data(
    folder: Path,
    *,
    layout: str | None = None,
    states: Sequence[int] | None = None,
    hidden: int,
    num_layers: int,
) -> DataForm:
    """What a folder of captured data holds.

    `layout` forces one of LAYOUTS. `states` are the canonical states of the slots in order (where
    the layout's rule tells the last, it may be left out); the folder's capture.json may say them
    too. `hidden` H and `num_layers` n are the target's. Raises BadInput where the folder is in no
    layout or in two, and where declarations contradict the files or each other.
    """
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise BadInput(f"data folder {folder} {what}")
    name, why = (layout, "data.layout says so") if layout else recognise(folder)
    if name not in LAYOUTS:
        raise BadInput(f"data.layout={name} is none of {', '.join(sorted(LAYOUTS))}")
    reader = LAYOUTS[name]
    files = reader.files(folder)
    if not files:
        raise BadInput(f"data folder {folder} holds no files of the layout {name}")
    slots = reader.slots(folder, files, hidden, num_layers)
    declared, origin = declared_states(folder, states)
    notes = reader.notes(folder, files)
    if declared is not None:
        rule = slots[-1].state
        slots = declare(slots, declared, origin, folder, num_layers, reader.LAST_APART)
        if rule is not None and slots[-1].state != rule:
            notes += (
                f"the last slot, {slots[-1].name}, is taken for the target's end (state {rule}) by the "
                f"trainer that reads this layout, but {origin} says it is state {slots[-1].state}",
            )
    return DataForm(
        layout=name,
        why=why,
        folder=folder,
        files=files,
        slots=slots,
        teacher=len(slots) - 1,
        notes=notes,
    )


def recognise(folder: Path) -> tuple[str, str]:
    """A folder's layout and what it was recognised by."""
    found = {
        name: why
        for name, layout in LAYOUTS.items()
        if (why := layout.recognise(folder, layout.files(folder)))
    }
    if len(found) > 1:
        each = "; ".join(f"{name} ({why})" for name, why in found.items())
        raise BadInput(
            f"{folder} holds data in {len(found)} layouts: {each}; set data.layout to the one that is "
            "meant, or part the files"
        )
    if not found:
        raise BadInput(
            f"{folder} is in no layout that is known ({', '.join(LAYOUTS)}): {seen(folder)}"
        )
    return next(iter(found.items()))


def seen(folder: Path) -> str:
    """What lies in a folder that no layout recognises."""
    files = files_below(folder, ("",))
    if not files:
        return "it holds no files"
    for name in ("pt_shards", "specforge"):
        for path in LAYOUTS[name].files(folder)[:1]:
            try:
                return f"{path.name} holds {', '.join(map(str, look.load_plain(path)))}"
            except BadInput as error:
                return str(error)
    endings = Counter(path.suffix or path.name for path in files)
    return "it holds " + ", ".join(f"{n} × {ending}" for ending, n in endings.most_common(5))


def read_capture(folder: Path) -> dict[str, Any] | None:
    """What the capture job wrote beside its samples, or None."""
    path = folder / CAPTURE_FILE
    return read_json(path) if path.is_file() else None


def declared_states(
    folder: Path, states: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, str]:
    """The declared states and who declares them: the config, capture.json, or both, agreeing."""
    captured = read_capture(folder)
    if captured is None:
        return None if states is None else tuple(states), "data.states"
    listed = captured.get("states")
    if not (isinstance(listed, list) and listed and all(type(k) is int for k in listed)):
        raise BadInput(f"{folder / CAPTURE_FILE} does not list the stored states under 'states'")
    if states is not None and list(states) != listed:
        raise BadInput(
            f"data.states says {list(states)}, but {folder / CAPTURE_FILE} says {listed}; correct the "
            "config"
        )
    return tuple(listed), CAPTURE_FILE


def declare(
    slots: Sequence[Slot],
    states: Sequence[int],
    origin: str,
    folder: Path,
    num_layers: int,
    last_apart: bool,
) -> tuple[Slot, ...]:
    """The slots with their states as declared."""
    *aux, last = slots
    end = last.state  # by the layout's own rule, or None
    if len(states) == len(aux) and end is not None:
        states = [*states, end]
    elif len(states) != len(slots):
        which = f"{len(aux)} aux states, and the last if you like" if end is not None else "states"
        raise BadInput(
            f"{origin} lists {len(states)} states ({list(states)}), but the files of {folder} store "
            f"{len(slots)} ({', '.join(slot.name for slot in slots)}); list the canonical {which}, in "
            "the files' order"
        )
    else:
        last = replace(last, origin=origin)
    if last_apart and states[-1] != end:
        raise BadInput(
            f"{origin} says that {last.name} is state {states[-1]}, but in this layout it is the "
            f"target's end, state {end}"
        )
    outside = [k for k in states if not 0 <= k <= num_layers]
    if outside:
        raise BadInput(
            f"{origin} lists state {outside[0]}, but the target has {num_layers} decoder layers, so its "
            f"states are 0 to {num_layers}"
        )
    twice = [k for k, times in Counter(states).items() if times > 1]
    if twice:
        raise BadInput(f"{origin} lists state {twice[0]} twice ({list(states)})")
    return (
        *(replace(s, state=k, origin=origin) for s, k in zip(aux, states, strict=False)),
        replace(last, state=states[-1]),
    )

"""The files of a dump's folder, in the order of their numbers.

No torch here: doctor lists a dump as the readers do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from eagle3.errors import BadInput


def natural_key(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts data_10 behind data_9."""
    parts = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def files_below(
    folder: Path, endings: tuple[str, ...], without: Collection[str] = ()
) -> tuple[Path, ...]:
    """All files below a folder whose names end so, in numeric order, but for the names `without`.

    Links to folders are followed; one that leads back to a folder above it adds nothing. Raises
    BadInput where two ways lead to the same files, where a link leads nowhere, and where a folder
    cannot be listed.
    """
    found: list[Path] = []
    ways: dict[Path, Path] = {}  # a real folder → the way by which it was reached first
    again: list[tuple[Path, Path]] = []
    for name, below, names in os.walk(folder, followlinks=True, onerror=not_listed):
        below.sort()
        place = Path(name)
        way = ways.setdefault(place.resolve(), place)
        if way == place:
            check_links(place, names)
            found += [place / n for n in names if n.endswith(endings) and n not in without]
            continue
        below.clear()
        if way not in place.parents:
            again.append((way, place))
    for way, other in again:
        if any(path.is_relative_to(way) for path in found):
            raise BadInput(
                f"{way} and {other} are the same folder, so its samples would count twice; remove one"
            )
    return tuple(sorted(found, key=lambda path: natural_key(path.relative_to(folder))))


def not_listed(error: OSError) -> NoReturn:
    """Raises BadInput for a folder that cannot be listed."""
    raise BadInput(f"{error.filename} cannot be listed: {error.strerror}") from error


def check_links(place: Path, names: Sequence[str]) -> None:
    """Raises BadInput where a link that may have meant a folder of samples leads nowhere."""
    for path in (place / name for name in names if "." not in name):
        if path.is_symlink() and not path.exists():
            raise BadInput(f"{path} is a link that leads nowhere; mend or remove it")

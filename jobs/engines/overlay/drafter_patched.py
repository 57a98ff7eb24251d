"""Serves patched modules of an engine in the place of the installed ones; put in by sitecustomize.

DRAFTER_PATCHED names a folder with `modules.json`, which maps a module's name to its patched file and,
of a package, to the folders of its submodules. Each process that has run such a module says so by a
file MODULE-PID in the folder DRAFTER_PATCHED_SEEN, which holds the hash of the source that it read.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
from pathlib import Path


class Loader(importlib.machinery.SourceFileLoader):
    """Runs a patched file, and says so once it has run."""

    def __init__(self, name, path, seen) -> None:  # type: ignore[no-untyped-def]
        super().__init__(name, path)
        self.seen = seen

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        source = self.get_data(self.path)
        super().exec_module(module)
        part = self.seen / f".{self.name}-{os.getpid()}"
        part.write_text(hashlib.sha256(source).hexdigest())
        part.replace(self.seen / part.name[1:])


class Patched(importlib.abc.MetaPathFinder):
    """Finds the patched modules, and no other."""

    def __init__(self, folder, seen) -> None:  # type: ignore[no-untyped-def]
        self.modules = json.loads((folder / "modules.json").read_text())
        self.folder, self.seen = folder, seen

    def find_spec(self, name, *_):  # type: ignore[no-untyped-def]
        if name not in self.modules:
            return None
        file, submodules = self.modules[name]
        where = str(self.folder / file)
        return importlib.util.spec_from_file_location(
            name,
            where,
            loader=Loader(name, where, self.seen),
            submodule_search_locations=submodules,
        )


def finder() -> Patched:
    """The finder for the folder that the environment names."""
    return Patched(Path(os.environ["DRAFTER_PATCHED"]), Path(os.environ["DRAFTER_PATCHED_SEEN"]))

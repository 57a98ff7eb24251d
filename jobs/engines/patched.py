"""An engine with a patched source: nothing of it is changed on disk, the patched files are laid over it.

The files that a unified diff touches are read from the engine's installed package, patched in a folder
of the run, and served to the server's processes by `overlay/drafter_patched`. Whether each of them was
really imported is read from what those processes say; the folder is gone behind the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eagle3.errors import BadInput
from jobs.engines.diffs import FileDiff, applied, parse
from jobs.engines.laid_over import laid_over
from jobs.engines.talk import ServerError

LOCATE = (
    "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); "
    "print(list(s.submodule_search_locations)[0] if s and s.submodule_search_locations else '')"
)
LOCATE_S = 60.0
MODULES = "modules.json"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A unified diff of an engine's source."""

    name: str  # of the file, or of the one that is shipped
    text: str

    @property
    def sha256(self) -> str:
        """Of its bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Module:
    """A patched file of the engine."""

    path: str  # below the folder of the engine's package, that one's name in front
    source: str  # patched
    submodules: tuple[str, ...] | None  # folders of a package's submodules; None: no package

    @property
    def name(self) -> str:
        """As it is imported."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@dataclass(frozen=True, kw_only=True)
class Patched:
    """A patch applied to the engine that is there."""

    patch: Patch
    modules: tuple[Module, ...]
    spared: frozenset[str] = frozenset()  # paths of which no process need import any

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.patch.name,
            "sha256": self.patch.sha256,
            "files": [module.path for module in self.modules],
        }


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """The patched files of one server, where its processes find them."""

    patched: Patched
    folder: Path

    @property
    def seen(self) -> Path:
        """Where processes say what they have imported."""
        return self.folder / "seen"

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables for the server."""
        return laid_over(
            given, DRAFTER_PATCHED=str(self.folder), DRAFTER_PATCHED_SEEN=str(self.seen)
        )

    def check(self, label: str) -> dict[str, int]:
        """By file, how many of the server's processes imported it.

        Raises ServerError where none did, but for files that this target does not run.
        """
        counts, name = {}, self.patched.patch.name
        for module in self.patched.modules:
            wanted = hashlib.sha256(module.source.encode()).hexdigest()
            marks = [file.read_text() for file in self.seen.glob(f"{module.name}-*")]
            if wanted not in marks and module.path not in self.patched.spared:
                raise ServerError(
                    f"{label}: {module.path} of the patch {name} was imported by none "
                    "of the server's processes, so that what runs is not known to be patched; leave it "
                    "out of the patch, or change the file that this engine runs"
                )
            counts[module.path] = marks.count(wanted)
        return counts


def read_patch(file: Path) -> Patch:
    """A person's own. Raises BadInput."""
    try:
        return Patch(name=file.name, text=file.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the patch {file} cannot be read: {error}") from error


def package_folder(engine: str, python: str, environment: Mapping[str, str], folder: Path) -> Path:
    """Where the server would import the engine from; asked as it is started. Raises BadInput."""
    try:
        found = subprocess.run(
            [python, "-c", LOCATE, engine],
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOCATE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{python} cannot be asked where its {engine} is: {error}") from error
    said = found.stdout.strip().splitlines()
    if found.returncode or not said or not Path(said[-1]).is_dir():
        why = (found.stderr.strip().splitlines() or ["it is not there as a folder"])[-1]
        raise BadInput(f"{python} does not say where its {engine} is: {why}")
    return Path(said[-1])


def patch_engine(patch: Patch, root: Path, engine: str, version: str) -> Patched:
    """The patched files; `root` is the folder of the engine's package. Raises BadInput where the patch
    is none, or does not fit this release.
    """
    try:
        files = parse(patch.text)
    except BadInput as error:
        raise BadInput(f"the patch {patch.name}: {error}") from error
    modules: dict[str, Module] = {}
    for file in files:
        path = below(file.path, engine, patch.name)
        if path in modules:
            raise BadInput(f"the patch {patch.name} changes {path} twice; make one diff of both")
        modules[path] = patched_module(file, path, root, f"{engine} {version}", patch.name)
    return Patched(patch=patch, modules=tuple(modules.values()))


def below(written: str, engine: str, name: str) -> str:
    """A diff's path below the engine's package: 'a/python/sglang/srt/x.py' is 'sglang/srt/x.py'."""
    parts = PurePosixPath(written).parts
    if engine not in parts[:-1] or ".." in parts:
        raise BadInput(
            f"the patch {name} changes {written}, which is not below {engine}/; only the engine's own "
            "package can be patched"
        )
    if not written.endswith(".py"):
        raise BadInput(f"the patch {name} changes {written}; only Python files can be laid over")
    return "/".join(parts[parts.index(engine) :])


def patched_module(file: FileDiff, path: str, root: Path, release: str, name: str) -> Module:
    """One file, patched. Raises BadInput."""
    where = root.joinpath(*PurePosixPath(path).parts[1:])
    if file.is_new and where.exists():
        raise BadInput(
            f"the patch {name} adds {path}, which {release} has already; take a patch made for {release}"
        )
    if not file.is_new and not where.is_file():
        raise BadInput(
            f"the patch {name} changes {path}, which {release} does not have; take a patch made for "
            f"{release}"
        )
    try:
        text = "" if file.is_new else where.read_bytes().decode()
        source = applied(text, file.hunks)
    except BadInput as error:
        raise BadInput(
            f"the patch {name} does not fit {release}: {path}, {error}; make it anew for {release}, or "
            "name the interpreter that has the release it was made for: engine.python=…"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{where} cannot be read: {error}") from error
    package = where.name == "__init__.py"
    return Module(path=path, source=source, submodules=(str(where.parent),) if package else None)


@contextmanager
def overlaid(patched: Patched, folder: Path) -> Iterator[Overlay]:
    """The patched files in `folder`, which is gone behind this."""
    overlay = Overlay(patched=patched, folder=folder)
    try:
        overlay.seen.mkdir(parents=True)
        index = {}
        for module in patched.modules:
            file = folder / module.path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(module.source.encode())
            index[module.name] = (module.path, module.submodules)
        (folder / MODULES).write_text(json.dumps(index))
        yield overlay
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Which release an engine's checkout is of, as far as capturing aux states goes: by a hash of that code.

Of every file that `GLOBS` names, the code that decides which states are captured is brought into a
form that comments, white space, docstrings, annotations and messages do not change, and hashed: the
functions that set or read the list of layers, the walk over the layers as a whole, and what the layers
of the same file do, as that is what is captured. `capture_code.json` holds the hashes of the releases
that were read: for a file, the release from which on a hash holds (null: the file has no such code). A
checkout that differs from all of them is unknown: only a probe can tell what its layer ids mean.

To add a release, unpack its wheel and run

    python -m eagle3.checkouts sglang 0.5.24 FOLDER

which enters it into `capture_code.json`. Then read its code and extend `eagle3.conventions`.
Standard library only.
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput

TABLE = Path(__file__).with_name("capture_code.json")

# Where the code lies, relative to the package; the first part is what tells the package.
PACKAGES = {"sglang": "srt", "vllm": "model_executor"}
# What is looked through: in these files the code that has one of the names below is hashed.
GLOBS = {
    "sglang": (
        "srt/models/**/*.py",
        "srt/layers/aux_hidden_states.py",
        "srt/layers/communicator.py",
        "srt/layers/layer_boundary/stage.py",
        "srt/model_executor/**/*.py",
    ),
    "vllm": (
        "model_executor/models/**/*.py",
        "models/**/*.py",
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    ),
}
# Here the functions count as a whole, and so do the layers of a model. Elsewhere (a model runner's
# functions do a hundred other things) the statements that have a name count, and what they lie in.
WHOLE = ("models", "layers")
# Functions that count as a whole anywhere, and the names that make code count.
FUNCTIONS = {
    "_get_eagle3_aux_layers_from_config",
    "_maybe_add_hidden_state",
    "_resolve_eagle_aux_hidden_state",
    "_set_aux_hidden_state_layers",
    "get_eagle3_aux_layers_from_config",
    "get_eagle3_default_aux_hidden_state_layers",
    "prepare_attn_and_capture_last_layer_outputs",
    "set_aux_hidden_state_layers",
    "set_eagle3_layers_to_capture",
}
NAMES = {
    "_is_layer_to_capture",
    "_maybe_add_hidden_state",
    "aux_hidden_state_layers",
    "capture_aux_hidden_states",
    "capture_gathered",
    "capture_output",
    "captured_last_layer_outputs",
    "copies_on_append",
    "eagle_aux_hidden_state_layer_ids",
    "layers_to_capture",
}
CLASSES = {"AuxHiddenStateList", "AuxHiddenStatePacker"}
_WORDS = re.compile("|".join(sorted(FUNCTIONS | NAMES | CLASSES)))
_LAYER = re.compile(r"(Layer|Block)$")  # a class whose methods hand the hidden states on
# What builds and loads a model says nothing of what its layers hand on.
_NOT_WHOLE = {"__init__", "load_weights"}
NAMED = 4  # how many files that differ an answer names


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """What an engine's folder was recognised as."""

    package: Path
    ecosystem: str
    version: str | None  # as its version file says; a checkout may have been changed since
    releases: tuple[str, ...]  # all whose capture code this is; empty: unknown
    nearest: str  # the release that differs in the fewest files
    differs: tuple[str, ...]  # files whose capture code differs from that release's

    @property
    def known(self) -> bool:
        """Whether its layer ids mean what a release's do."""
        return bool(self.releases)

    @property
    def answer(self) -> str:
        """In one sentence."""
        if not self.releases:
            more = len(self.differs) - NAMED
            named = ", ".join(self.differs[:NAMED]) + (f" and {more} more" if more > 0 else "")
            return (
                f"unknown: probe it ({self.package} captures aux states as no release of "
                f"{self.ecosystem} that was read; from {self.nearest} differs {named})"
            )
        first, last = self.releases[0], self.releases[-1]
        span = first if first == last else f"{first} to {last}"
        return f"{self.package} captures aux states as {self.ecosystem} {span}"


def known_checkout(folder: Path) -> Checkout:
    """Recognise an engine's clone, installation or package folder. Raises BadInput if it is none."""
    ecosystem, package = find_package(folder)
    table = json.loads(TABLE.read_text())[ecosystem]
    releases: list[str] = table["releases"]
    found = capture_hashes(package, ecosystem)
    files = sorted(found.keys() | table["files"].keys())
    differing = {
        release: [
            file
            for file in files
            if found.get(file) != _held(table["files"].get(file, {}), release, releases)
        ]
        for release in releases
    }
    nearest = min(reversed(releases), key=lambda release: len(differing[release]))
    return Checkout(
        package=package,
        ecosystem=ecosystem,
        version=_version(package),
        releases=tuple(release for release in releases if not differing[release]),
        nearest=nearest,
        differs=tuple(differing[nearest]),
    )


def find_package(folder: Path) -> tuple[str, Path]:
    """The engine and its package's folder, in a clone, in site-packages or given itself."""
    found = {
        (ecosystem, package)
        for ecosystem, inside in PACKAGES.items()
        for package in (folder, folder / ecosystem, folder / "python" / ecosystem)
        if package.name == ecosystem and (package / inside).is_dir()
    }
    if len(found) == 1:
        return found.pop()
    if found:
        both = " and ".join(str(package) for _, package in sorted(found))
        raise BadInput(f"{folder} holds more than one engine; name one of {both}")
    raise BadInput(f"{folder} holds neither sglang nor vllm: no clone and no installation of them")


def capture_hashes(package: Path, ecosystem: str) -> dict[str, str]:
    """The hash of each file that has code that decides what is captured."""
    hashes = {}
    for path in sorted({path for glob in GLOBS[ecosystem] for path in package.glob(glob)}):
        file = path.relative_to(package).as_posix()
        try:
            digest = capture_hash(
                path.read_text("utf-8-sig"), whole=any(part in WHOLE for part in file.split("/"))
            )
        except (BadInput, OSError, UnicodeDecodeError):
            digest = "unreadable"  # no release's: it is answered that this file differs
        if digest:
            hashes[file] = digest
    return hashes


def capture_hash(source: str, *, whole: bool = True) -> str | None:
    """The hash of the capturing code of one file; None if it has none. Raises BadInput.

    `whole`: functions that have a name count from their first to their last statement, and with them
    every layer of the file, as what is captured is what layers hand on.
    """
    lines = [n for n, line in enumerate(source.splitlines(), 1) if _WORDS.search(line)]
    if not lines:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"this is not Python that this interpreter can read: {error}") from error
    pieces = list(_deciding(tree, "", lines, whole))
    if not pieces:
        return None
    if whole:
        pieces += _layers(tree)
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:8]


def _layers(tree: ast.Module) -> Iterator[str]:
    """What the layers of a model's file do, each method with where it stands."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not _LAYER.search(node.name):
            continue
        for child in node.body:
            if isinstance(child, _FUNCTION) and child.name not in _NOT_WHOLE:
                yield f"{node.name}.{child.name}: {plain(child)}"


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _deciding(node: ast.AST, scope: str, lines: list[int], whole: bool) -> Iterator[str]:
    """The deciding code below a node, in plain form, each piece with where it stands.

    `lines` are those that hold one of the names, be it in a comment: the rest need not be searched.
    """
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                continue
            if isinstance(child, ast.stmt) and not _near(child, lines):
                continue
            if isinstance(child, (*_FUNCTION, ast.ClassDef)):
                inner = f"{scope}.{child.name}"
                if _counts(child, whole):
                    yield f"{inner}: {plain(child)}"
                else:
                    yield from _deciding(child, inner, lines, whole)
            elif _compound(child) and not _mentions(_header(child)):
                below = list(_deciding(child, scope, lines, whole))
                if below:
                    head = "; ".join(plain(part) for part in _header(child))
                    yield f"{scope}.{name}: {type(child).__name__} {head}"
                    yield from below
            elif _mentions([child]):
                yield f"{scope}.{name}: {plain(child)}"


def _counts(node: ast.AST, whole: bool) -> bool:
    """Whether a function or class counts from its first to its last statement."""
    if isinstance(node, ast.ClassDef):
        return node.name in CLASSES
    assert isinstance(node, _FUNCTION)
    if node.name in FUNCTIONS:
        return True
    return whole and node.name not in _NOT_WHOLE and _mentions([node])


def _near(node: ast.stmt, lines: list[int]) -> bool:
    at = bisect.bisect_left(lines, node.lineno)
    return at < len(lines) and lines[at] <= (node.end_lineno or node.lineno)


def _compound(node: ast.AST) -> bool:
    return any(
        isinstance(getattr(node, part, None), list) for part in ("body", "handlers", "cases")
    )


def _header(node: ast.AST) -> list[ast.AST]:
    """A compound statement without its blocks."""
    parts = [getattr(node, part, None) for part in ("test", "target", "iter", "subject", "pattern")]
    items = getattr(node, "items", [])
    return [part for part in (*parts, *items) if isinstance(part, ast.AST)]


def _mentions(nodes: list[ast.AST]) -> bool:
    for node in nodes:
        for inner in ast.walk(node):
            for part in ("id", "attr", "arg", "value"):
                word = getattr(inner, part, None)
                if isinstance(word, str) and word in NAMES:
                    return True
    return False


# What does not decide anything, or is spelled otherwise by another interpreter.
_LEFT_OUT = {
    "annotation",
    "returns",
    "ctx",
    "type_comment",
    "type_params",
    "kind",
    "decorator_list",
}


def plain(node: Any) -> str:
    """A syntax tree as text, the same under every Python from 3.10 on."""
    if isinstance(node, list):
        return "[" + ", ".join(plain(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        return "message"
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _LEFT_OUT or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list):
            value = [item for item in value if not _is_text(item)]
        parts.append(f"{name}={plain(value)}")
    return f"{type(node).__name__}({', '.join(parts)})"


def _is_text(node: ast.AST) -> bool:
    """A docstring, or another text that stands alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _held(changes: dict[str, str | None], release: str, releases: list[str]) -> str | None:
    """The hash of a file in a release, from the releases in which it changed."""
    digest = None
    for name in releases:
        digest = changes.get(name, digest)
        if name == release:
            break
    return digest


def _version(package: Path) -> str | None:
    """What the package says its version is, without importing it."""
    for name in ("_version.py", "version.py"):
        try:
            tree = ast.parse((package / name).read_text("utf-8-sig"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and any(getattr(t, "id", "") in ("__version__", "version") for t in node.targets)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                return node.value.value
    return None


def add_release(
    table: dict[str, Any], ecosystem: str, release: str, folder: Path
) -> dict[str, Any]:
    """The table with the newest release entered: only what changed since the one before."""
    found_as, package = find_package(folder)
    if found_as != ecosystem:
        raise BadInput(f"{folder} holds {found_as}, not {ecosystem}")
    old = table.get(ecosystem, {"releases": [], "files": {}})
    if release in old["releases"]:
        raise BadInput(f"{ecosystem} {release} is in the table already")
    found = capture_hashes(package, ecosystem)
    files = {file: dict(changes) for file, changes in old["files"].items()}
    for file in sorted(found.keys() | files.keys()):
        before = _held(files.get(file, {}), "", old["releases"])
        if found.get(file) != before:
            files.setdefault(file, {})[release] = found.get(file)
    new = {"releases": [*old["releases"], release], "files": dict(sorted(files.items()))}
    return {**table, ecosystem: new}


def main(arguments: list[str]) -> int:
    """Enter a release, newer than those in the table: ECOSYSTEM RELEASE FOLDER."""
    if len(arguments) != 3 or arguments[0] not in GLOBS:
        sys.stderr.write(f"usage: python -m eagle3.checkouts {'|'.join(GLOBS)} RELEASE FOLDER\n")
        return 2
    ecosystem, release, folder = arguments
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    try:
        table = add_release(table, ecosystem, release, Path(folder))
    except BadInput as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The exact code that runs: jobs/ and eagle3/ by content, named by their hash.

Tracked files and untracked ones that git does not ignore belong to it. Beside the hash stand the
commit and the diff of those folders, so that a person can find the code again.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.push import Tree, tree_of

FOLDERS = ("jobs", "eagle3")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Code by content; `commit` is 'none' outside git, `diff` is what differs from it."""

    tree: Tree
    commit: str
    diff: str

    @property
    def digest(self) -> str:
        return self.tree.digest


def take_snapshot(root: Path) -> Snapshot:
    """The snapshot of a clone (or of a plain copy of it)."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FOLDERS)
    if listed is None:
        paths = [p for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()]
        names = [p.relative_to(root).as_posix() for p in paths if "__pycache__" not in p.parts]
        commit, diff = "none", ""
    else:
        names = [name for name in listed.split("\0") if name and (root / name).is_file()]
        commit = (git(root, "rev-parse", "--verify", "--quiet", "HEAD") or "none").strip()
        diff = (git(root, "diff", "HEAD", "--", *FOLDERS) or "") if commit != "none" else ""
    if not names:
        raise InputError(f"{root} holds no jobs/ and eagle3/; run the orchestrator from its clone")
    return Snapshot(
        tree=tree_of({name: root / name for name in sorted(names)}), commit=commit, diff=diff
    )


def git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in `root`, or None where it fails (no repository, no git)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            check=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")

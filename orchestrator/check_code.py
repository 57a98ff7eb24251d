"""A look at code before it is sent: does it compile, is every name there when it is used?

The rules are ruff's. They find what costs a trip to the host and back: an import that a local name
shadows, a variable that is read before it is assigned.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from orchestrator.errors import InputError, OrchestratorError
from orchestrator.snapshot import FOLDERS

# Does not compile (with what ruff always tells); an import that a loop shadows; a name that is
# undefined, or not yet. No rule about what may well run.
RULES = "E9,F402,F701,F702,F704,F706,F707,F821,F822,F823,PLE0117,PLE0118"
OWN_RULES = f"{RULES},F811"  # in our own code, defined twice is always a mistake
SHOWN = 5
DEADLINE_S = 60


def check_code(files: Iterable[Path], *, own: bool = False) -> None:
    """Raises InputError with the first flaws and their places, each with file, line and rule.

    `own` is the snapshot, which runs on Python 3.10; a person's script may use what the host's Python
    knows, and lets a line pass with `# noqa: RULE`.
    """
    from ruff import find_ruff_bin

    paths = [str(path) for path in files if path.suffix == ".py"]
    if not paths:
        return
    options = [
        *("--isolated", "--no-cache", "--quiet", "--output-format=json"),
        f"--target-version={'py310' if own else 'py314'}",
        f"--select={OWN_RULES if own else RULES}",
    ]
    command = [find_ruff_bin(), "check", *options]
    try:
        done = subprocess.run(
            [*command, "--", *paths],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
        )
        flaws = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise OrchestratorError(
            f"ruff could not check the code before it is sent ({error}); install it anew"
        ) from error
    if not flaws:
        return
    shown = [
        f"{Path(flaw['filename'])}:{flaw['location']['row']}: {flaw['message']}"
        f"{f' ({code})' if (code := flaw['code']) else ''}"
        for flaw in flaws[:SHOWN]
    ]
    more = f"; and {len(flaws) - SHOWN} more" if len(flaws) > SHOWN else ""
    passing = "" if own else "; a line that is right as it is passes with `# noqa: RULE`"
    raise InputError(
        f"the code would fail on the host, so it was not sent: {'; '.join(shown)}{more}{passing}"
    )


def modules_of(files: Iterable[Path]) -> list[str]:
    """What these scripts cannot begin without: top-level modules, but for the scripts themselves.

    Imports within a function, an `if` or a `try` may never be made, and are left to run time.
    """
    files = [path for path in files if path.suffix == ".py"]
    found: set[str] = set()
    for path in files:
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return sorted(found - {path.stem for path in files} - set(FOLDERS) - {"__future__"})

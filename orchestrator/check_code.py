"""A look at code before it is sent: does it compile, is every name there when it is used?

The rules are ruff's. They find what costs a trip to the host and back: an import that a local name
shadows, a variable that is read before it is assigned.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from orchestrator.errors import InputError, OrchestratorError

# E9 and F7: does not compile. F63: never true as written. F402, F811: an import that is shadowed.
# F821 to F823: a name that is undefined, or not yet. PLE: sure to fail when it is run.
RULES = "E9,F63,F7,F402,F811,F821,F822,F823,PLE"
SHOWN = 5
DEADLINE_S = 60


def check_code(files: Iterable[Path]) -> None:
    """Raises InputError with the first flaws and their places, each with file, line and rule."""
    from ruff import find_ruff_bin

    paths = [str(path) for path in files if path.suffix == ".py"]
    if not paths:
        return
    options = ["--isolated", "--no-cache", "--quiet", "--target-version=py310"]
    command = [find_ruff_bin(), "check", *options, f"--select={RULES}", "--output-format=json"]
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
    raise InputError(
        f"the code would fail on the host, so it was not sent: {'; '.join(shown)}{more}"
    )

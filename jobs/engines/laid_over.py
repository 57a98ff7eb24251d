"""The folder in front of an engine's PYTHONPATH: it runs in each of the engine's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

OVERLAY = Path(__file__).parent / "overlay"


def laid_over(given: Mapping[str, str], **more: str) -> dict[str, str]:
    """Variables for a server: the overlay in front of whatever its path was, and `more`."""
    path = given.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    others = [entry for entry in path.split(os.pathsep) if entry and entry != str(OVERLAY)]
    return {**given, "PYTHONPATH": os.pathsep.join([str(OVERLAY), *others]), **more}

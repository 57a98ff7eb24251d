"""Real engines that are slower than they are, where a test says so (delays/sitecustomize.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OVERLAY = Path(__file__).parent / "delays"


@dataclass(frozen=True)
class Delays:
    """Seconds that are slept, by what they are put before; `path` is where servers read them."""

    path: Path

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables for a server that reads them; nothing is slowed down yet."""
        self.set()
        path = os.pathsep.join(filter(None, [str(OVERLAY), given.get("PYTHONPATH", "")]))
        return {**given, "PYTHONPATH": path, "DELAYS": str(self.path)}

    def set(self, **seconds: float) -> None:
        """From here on these, of `target`, `row`, `draft` and `head`; all others are 0."""
        if unknown := seconds.keys() - {"target", "row", "draft", "head"}:
            raise ValueError(f"no delay is called {', '.join(sorted(unknown))}")
        whole = self.path.with_suffix(".new")
        whole.write_text(json.dumps(seconds))
        whole.replace(self.path)  # servers read it at any time

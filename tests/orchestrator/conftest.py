"""What the gate's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config import Resolved
from tests.orchestrator.gated import EXPERIMENT, Place
from tests.orchestrator.test_config import resolved


@pytest.fixture(scope="module")
def compose() -> Callable[..., Resolved]:
    """A resolved benchmark, made once for the same overrides."""
    made: dict[tuple[str, ...], Resolved] = {}

    def of(*overrides: str) -> Resolved:
        if overrides not in made:
            made[overrides] = resolved(*EXPERIMENT, *overrides)
        return made[overrides]

    return of


@pytest.fixture
def place(tmp_path: Path, compose: Callable[..., Resolved]) -> Place:
    return Place(tmp_path, compose)

"""Tests of one file share what it sets up and run in one process; so do all that share the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

LAB = Path(__file__).parent / "lab"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "lab" if LAB in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))

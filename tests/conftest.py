"""How `make test` shares its tests among processes."""

from __future__ import annotations

from typing import Any

import pytest

LAB = "tests/lab/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file share what it sets up and run in one process; so do all that share the lab."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return LAB if file.startswith(LAB) else file

    return ByFile(config, log)

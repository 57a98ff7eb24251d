"""Sound files, made once for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.faults.run import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))

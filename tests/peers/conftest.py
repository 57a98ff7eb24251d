"""The peers that the project is held against: SpecForge, speculators, and SGLang's source.

They live in an environment of their own, made by `python -m tests.peers.setup_peers`, since their
pins are not the project's. A test runs a script of its own with `peers_python` and exchanges
safetensors and JSON with it. Tests that use these fixtures are marked `peers`; they are skipped
where the environment is not there, and fail where REQUIRE_PEERS=1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peers import setup_peers

FIXTURES = {"peers_python", "peers_sglang_source"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("peers")


@pytest.fixture(scope="session")
def peers_folder() -> Path:
    """The finished environment of the peers."""
    folder = setup_peers.peers_folder()
    fault = setup_peers.fault(folder)
    if fault is not None:
        reason = f"{fault}; make it with `python -m tests.peers.setup_peers`"
        if os.environ.get("REQUIRE_PEERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def peers_python(peers_folder: Path) -> Path:
    """The interpreter that imports specforge and speculators."""
    return peers_folder / "bin" / "python"


@pytest.fixture(scope="session")
def peers_sglang_source(peers_folder: Path) -> Path:
    """The folder of SGLang's unpacked wheel, which holds sglang/srt/…; source to read, not to import."""
    return peers_folder / setup_peers.SGLANG_FOLDER

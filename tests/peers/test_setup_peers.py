"""When the peers' environment counts as finished; making it is what `setup_peers.py` does in CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import environments
from tests.peers import setup_peers


def test_it_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert setup_peers.peers_folder() == tmp_path / "drafter-orchestrator" / "peers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wanted = tmp_path / "home" / ".cache" / "drafter-orchestrator" / "peers"
    assert setup_peers.peers_folder() == wanted


def test_it_is_finished_only_with_a_marker_of_these_very_pins(tmp_path: Path) -> None:
    assert "is not at" in str(setup_peers.fault(tmp_path))
    marker = tmp_path / environments.MARKER
    marker.write_text("{")
    assert "is damaged" in str(setup_peers.fault(tmp_path))
    marker.write_text(json.dumps({**setup_peers.pins(), "sglang": "sglang==0.5.22"}))
    assert "from other pins" in str(setup_peers.fault(tmp_path))
    marker.write_text(json.dumps(setup_peers.pins()))
    assert setup_peers.fault(tmp_path) is None


def test_torch_is_pinned_where_the_project_pins_it() -> None:
    """An open range would bring a CUDA build of several GB."""
    constraints = setup_peers.pins()["constraints"]
    assert isinstance(constraints, list)
    assert any(line.startswith("torch==") for line in constraints)

"""docs/remote.md, typed in order against a fresh host, leads from an alias to filed answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.paths import CLONE
from tests.ssh.machines import Client, HostMaker
from tests.ssh.pages import copy_of_clone, host_of_pages, type_page

PAGE = CLONE / "docs" / "remote.md"
VERDICTS = {
    "layers_m1_2_30": "supported",
    "layers_2_30_58": "supported",
    "d2t_absolute": "supported",
    "script": "supported",
    "no_decoder_layer": "supported",
    "d2t_absolute_no_decoder_layer": "supported",
}


@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_the_page_leads_to_filed_answers(
    make_host: HostMaker, client: Client, tmp_path: Path
) -> None:
    host = host_of_pages(make_host, client)
    clone = copy_of_clone(tmp_path / "clone")
    type_page(PAGE, clone, client, tmp_path / "tools")
    assert PAGE.read_text(encoding="utf-8").count("python -m orchestrator") >= 12

    found: dict[str, list[str]] = {}
    store = MlflowClient(f"sqlite:///{clone}/results/mlflow.db")
    for folder in sorted((clone / "results" / "runs").iterdir()):
        run = json.loads((folder / "run.json").read_bytes())
        verdict = json.loads((folder / "verdict.json").read_bytes())["verdict"]
        found.setdefault(run["experiment"] or run["job"], []).append(verdict)
        mlflow_run = json.loads((folder / "filed.json").read_bytes())["run"]
        assert store.get_run(mlflow_run).data.tags["verdict"] == verdict
    assert found.pop("no_decoder_layer") == ["supported", "not_answered"]  # one was cancelled
    assert found == {name: [v] for name, v in VERDICTS.items() if name != "no_decoder_layer"}
    assert not {c for c in host.user_processes().values() if "jobs." in c}

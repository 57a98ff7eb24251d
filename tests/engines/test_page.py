"""docs/engines.md, typed as it stands but for the interpreter, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from orchestrator.paths import CLONE
from tests.engines import serving

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVES = "/opt/sglang/bin/python"  # where the page has it


def commands() -> list[list[str]]:
    """The page's commands, without those that were not run."""
    text = (CLONE / "docs" / "engines.md").read_text()
    return [shlex.split(line) for block in BLOCK.findall(text) for line in block.splitlines()]


def cpu() -> list[str]:
    """What this machine needs besides."""
    flags = ", ".join(f"{k}: {json.dumps(v)}" for k, v in serving.flags("sglang").items())
    variables = [f"+engine.env.{k}='{v}'" for k, v in serving.environment("sglang").items()]
    return [f"+engine.flags={{{flags}}}", *variables, "job.device=cpu"]


def typed(command: list[str], results: Path, *more: str) -> tuple[str, dict[str, Any]]:
    """What a command of the page prints, and its result."""
    words = [sys.executable if word == "python" else word for word in command]
    words = [w.replace(SERVES, str(serving.engine_python("sglang"))) for w in words]
    done = subprocess.run(
        [*words, *cpu(), f"results={results}", *more],
        cwd=CLONE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (results / "runs").iterdir()
    return done.stdout, json.loads((folder / "result.json").read_bytes())


@pytest.fixture(scope="module")
def page() -> dict[str, list[str]]:
    """Its two commands by what they ask for."""
    probe, bench = commands()
    return {"probe": probe, "bench": bench}


def test_the_probe_names_what_was_fed(page: dict[str, list[str]], tmp_path: Path) -> None:
    said, result = typed(page["probe"], tmp_path / "results", "job.max_prompts=2")
    assert result["probe"]["fed"] == [3, 31, 59]
    assert "fault: config; the engine feeds states [3, 31, 59], not [0, 3, 31]" in said
    assert '"eagle_config.eagle_aux_hidden_state_layer_ids": [-1, 2, 30]' in said


@pytest.mark.filterwarnings("ignore:.*noload")  # of MLflow's own queries
def test_the_benchmark_ends_in_a_table_and_is_filed(
    page: dict[str, list[str]], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    small = ("job.max_prompts=4", "job.new_tokens=24", "job.budget.pairs=2", "job.budget.least=2")
    said, result = typed(page["bench"], results, *small, "job.budget.repeats=0")
    (level,) = result["bench"]["levels"]
    assert "at once  tok/s without  tok/s with  speedup" in said
    assert "break-even at accept length" in said
    length = result["metrics"]["accept_length"]
    # Each request's verifications are the walk's (test_lab); here all that matters is that they stand.
    assert length["numerator"] / length["denominator"] == length["value"] > 2
    assert level["speedup"]["low"] <= level["speedup"]["value"] <= level["speedup"]["high"]
    assert level["advice"]["best"] in range(5)
    agreed = result["bench"]["agreement"]
    assert (agreed["speculative"]["same"], agreed["speculative"]["prompts"]) == (4, 4)
    assert {server["label"] for server in result["bench"]["servers"]} >= {"baseline", "speculative"}
    client = mlflow.MlflowClient(f"sqlite:///{results / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    for name in ("accept_length", "accept_length_standalone", "speedup", "tok_s", "tok_s_baseline"):
        assert run.data.metrics[name] == pytest.approx(result["metrics"][name]["value"])

"""`diagnose` and `job=wiring_search` as whole commands: answered, filed, repeated, taken up again."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from orchestrator.__main__ import main
from tests.jobs.engines import fake
from tests.orchestrator.world import STATES, World, make_world

pytestmark = [
    pytest.mark.runs,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("a world"))


@pytest.fixture(scope="module")
def question(world: World) -> list[str]:
    """What is asked of a drafter of random numbers."""
    return [
        *("diagnose", f"drafter={world.root}/drafter", f"data={world.root}/data"),
        *(f"states={list(STATES)}", "engine=sglang", "engine_version=0.5.12", "engine_class=llama"),
        *("job.threads=1", f"results={world.results}"),
    ]


def last(world: World) -> Path:
    return max((world.results / "runs").iterdir(), key=lambda path: path.stat().st_ctime)


def record(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_bytes())


def runs_below(world: World, folder: Path) -> list[Any]:
    client = MlflowClient(f"sqlite:///{world.results}/mlflow.db")
    parent = client.get_run(record(folder, "filed.json")["run"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    return [parent, *client.search_runs([parent.info.experiment_id], query)]


def test_a_diagnosis_is_answered_first_and_filed_and_repeated_from_its_folder(
    world: World, question: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*question, f"target={world.root}/target"]) == 0
    out, err = capfd.readouterr()
    folder = last(world)
    said = record(folder, "result.json")["diagnosis"]
    assert err == ""
    assert out.splitlines()[: len(said["first_lines"])] == said["first_lines"]
    assert 0 < len(said["first_lines"]) <= 12
    assert max(map(len, said["first_lines"])) <= 120
    assert said["verdict"] != "sound"

    parent, *finalists = runs_below(world, folder)
    assert parent.data.tags["diagnosis"].startswith(f"{said['verdict']}: ")
    assert len(finalists) == len(record(folder, "result.json")["ranked"]) > 1
    assert {run.info.status for run in [parent, *finalists]} == {"FINISHED"}
    assert main(["runs", f"results={world.results}"]) == 0
    assert said["headline"][:30] in " ".join(capfd.readouterr().out.split())
    assert main([*question, f"target={world.root}/target", "predict=accuracy > 1.5"]) == 0
    assert main(["runs", f"results={world.results}"]) == 0
    assert f"refuted; {said['headline'][:20]}" in " ".join(capfd.readouterr().out.split())

    experiment = folder / "experiment" / "diagnose.yaml"
    line = experiment.read_text().splitlines()[1].removeprefix("# ")
    assert f"again    {line}" in out
    python, m, orchestrator, *arguments = shlex.split(line)
    assert (python, m, orchestrator) == ("python", "-m", "orchestrator")
    assert main(arguments) == 0
    again = last(world)
    assert again != folder
    assert (again / "config.yaml").read_bytes() == (folder / "config.yaml").read_bytes()
    assert record(again, "result.json")["diagnosis"] == said

    capfd.readouterr()
    assert main(["attach", folder.name, f"results={world.results}"]) == 0
    assert capfd.readouterr().out.splitlines()[: len(said["first_lines"])] == said["first_lines"]


def test_a_running_server_is_asked_and_left_running(
    world: World, question: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [word for word in question if not word.startswith("engine_version")]
    command = [
        *(sys.executable, fake.__file__, "-m", "sglang.launch_server", "--port", "0"),
        *("--model-path", f"{world.root}/target", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", f"{world.root}/drafter"),
        *("--speculative-num-steps", "4", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "5"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = f"engine.url=http://127.0.0.1:{int(server.stdout.readline())}"
            assert main([*asked, f"target={world.root}/target", url]) == 0
            folder = last(world)
            said = record(folder, "result.json")["diagnosis"]
            assert said["server"]["version"] == "0.5.23"
            out = capfd.readouterr().out
            assert out.splitlines()[: len(said["first_lines"])] == said["first_lines"]
            assert "read from tables, not measured (needs --enable-return-hidden-states)" in out
            assert f"server   {said['server']['said'][:40]}" in out
            # It runs on, and is asked again by the file.
            assert main(["--config-dir", str(folder), "+experiment=diagnose"]) == 0
            assert record(last(world), "result.json")["diagnosis"] == said
            assert server.poll() is None
        finally:
            server.kill()
    assert main([*asked, f"target={world.root}/target", url]) == 2
    assert "does not answer as sglang" in capfd.readouterr().out


def test_a_target_that_nobody_names_is_asked_for_before_anything_runs(
    world: World, question: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted((world.results / "runs").glob("*"))
    assert main(question) == 2
    assert "the target is left out" in capfd.readouterr().err
    assert sorted((world.results / "runs").glob("*")) == before


def test_a_diagnosis_left_to_itself_is_taken_up_and_answered_first(
    world: World, question: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*question, f"target={world.root}/target", "detach=true"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("diagnose ──")
    assert "was started and goes on" in out
    folder = last(world)
    assert main(["attach", str(folder)]) == 0
    first = record(folder, "result.json")["diagnosis"]["first_lines"]
    assert capfd.readouterr().out.splitlines()[: len(first)] == first


def test_what_the_host_refuses_is_told_behind_the_heading(
    world: World, question: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    empty = world.root / "empty"
    empty.mkdir()
    assert main([*question, f"target={empty}"]) == 2
    out = capfd.readouterr().out
    assert out.startswith("diagnose ──")
    assert f"{empty} holds no config.json" in out


def test_a_search_ranks_from_a_start_and_without_one(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [o for o in world.overrides() if not o.startswith("wiring.")]
    cut = (
        *("job=wiring_search", "job.finalists=3", "job.axes.fixed=[rope,rotation,positions]"),
        "job.axes.neighbours=false",  # they would be made by this target, which has no layers
    )
    start = ("wiring.layers=[5,2,0]", "wiring.convention=input", "wiring.embedding=own")
    for more in ((), start):
        assert main([*own, *cut, *more]) == 0
        out = capfd.readouterr().out
        assert out.startswith("wiring_search ──")
        result = record(last(world), "result.json")
        assert 1 <= len(result["ranked"]) <= 3
        assert f"ranked: {len(result['ranked'])} wiring" in out
        assert not any("rope=" in c for row in result["ranked"] for c in row["changed"])
        _, *finalists = runs_below(world, last(world))
        assert len(finalists) == len(result["ranked"])

"""A search and a diagnosis in MLflow, read back through MLflow's own client from a real database."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.filing import FolderError
from orchestrator.record import (
    Store,
    Tracking,
    default_tracking,
    fill_run,
    heal,
    open_store,
)
from tests.orchestrator.searched import T0, diagnose_result, rate, search_result
from tests.orchestrator.test_record import EXIT, stored, write_run

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
CONFIG = "job: {name: diagnose, steps: 4}\nengine: {name: sglang, version: 0.5.12}\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(default_tracking(tmp_path_factory.mktemp("results")))


def diagnosed(runs: Path, run_id: str, **more: Any) -> Path:
    asked = {"result": diagnose_result(), "exit": EXIT, "config": CONFIG, "job": "diagnose", **more}
    return write_run(runs, run_id, **asked)


def children(store: Store, mlflow_run_id: str) -> list[Any]:
    query = f"tags.`mlflow.parentRunId` = '{mlflow_run_id}'"
    found = store.client.search_runs([store.experiment_id], query)
    return sorted(found, key=lambda run: int(run.data.params["rank"]))


def whole(store: Store, mlflow_run_id: str) -> list[dict[str, Any]]:
    """All that MLflow holds of a run and of the runs below it."""
    below = [stored(store, run.info.run_id) for run in children(store, mlflow_run_id)]
    return [stored(store, mlflow_run_id), *below]


def test_a_diagnosis_is_tagged_and_filed_as_text_as_data_and_as_a_config(
    store: Store, tmp_path: Path
) -> None:
    folder = diagnosed(tmp_path / "runs", "run-diagnosed")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "diagnose.yaml").write_text("# @package _global_\n")
    filed = stored(store, fill_run(store, folder).mlflow_run_id)
    said = diagnose_result()["diagnosis"]
    assert filed["tags"]["diagnosis"] == "cause: other states are fed than in training"
    assert filed["tags"]["diagnosis.causes"] == "states"
    assert filed["params"]["engine.version"] == "0.5.12"
    assert filed["files"]["diagnosis.md"].decode() == said["markdown"]
    data = json.loads(filed["files"]["diagnosis.json"])
    assert data == {k: v for k, v in said.items() if k not in ("markdown", "config")}
    assert json.loads(filed["files"]["config.json"]) == said["config"]
    assert filed["files"]["experiment/diagnose.yaml"] == b"# @package _global_\n"


def test_a_sound_drafter_leaves_no_config_and_no_causes(store: Store, tmp_path: Path) -> None:
    result = diagnose_result()
    result["diagnosis"] |= {"verdict": "sound", "headline": "as trained", "causes": []}
    result["diagnosis"]["config"] = None
    folder = diagnosed(tmp_path / "runs", "run-sound", result=result)
    filed = stored(store, fill_run(store, folder).mlflow_run_id)
    assert filed["tags"]["diagnosis"] == "sound: as trained"
    assert filed["tags"]["diagnosis.causes"] == "none"
    assert "config.json" not in filed["files"]


def test_the_ranked_table_is_filed_for_programs_and_for_people(
    store: Store, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "runs", "run-ranked", result=search_result(), exit=EXIT)
    files = stored(store, fill_run(store, folder).mlflow_run_id)["files"]
    rows = [*csv.DictReader(io.StringIO(files["ranked.csv"].decode()))]
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert rows[0]["states"] == "[0, 3, 31]"
    assert rows[0]["accept_length"] == "2.994"
    assert rows[0]["accept_length/low"] == "2.974"
    assert rows[0]["accuracy/numerator"] == "700"
    assert (rows[0]["behind"], rows[1]["tied"]) == ("", "True")
    assert float(rows[2]["behind"]) == pytest.approx(1.944)
    assert rows[0]["wiring.d2t"] == "offset"
    told = files["ranked.md"].decode().splitlines()
    assert told[2].startswith("| 1 | states=0,3,31 | 0, 3, 31 | target_argmax | 0.749 [")
    assert told[3].endswith(", a tie |")
    assert "diagnosis.md" not in files


def test_every_finalist_is_a_run_below_the_search(store: Store, tmp_path: Path) -> None:
    folder = diagnosed(tmp_path / "runs", "run-finalists")
    parent = fill_run(store, folder)
    first, second, third = children(store, parent.mlflow_run_id)
    assert [run.info.run_name for run in (first, third)] == ["1 states=0,3,31", "3 as declared"]
    assert first.info.status == "FINISHED"
    assert (first.info.start_time, first.info.end_time) == tuple(
        round(1000 * (T0 + after)) for after in (2, 8.25)
    )
    assert first.data.params["resolved.states"] == "[0, 3, 31]"
    assert first.data.params["wiring.d2t"] == "offset"
    assert first.data.params["teacher"] == "target_argmax"
    assert first.data.tags["finalist_of"] == "run-finalists"
    assert first.data.tags["truth.accuracy"] == "target_argmax"
    assert second.data.tags["tied"] == "true"
    got = stored(store, third.info.run_id)["points"]
    ended = round(1000 * (T0 + 8.25))
    assert got["accept_length"] == [(0, 1.05, ended)]
    assert got["counts/accuracy/numerator"] == [(0, 700.0, ended)]
    assert [step for step, *_ in got["step_accuracy/marginal"]] == [0, 1, 2, 3]
    assert got["behind"][0][1] == pytest.approx(1.944)
    assert "behind" not in stored(store, first.info.run_id)["points"]


def test_filing_again_changes_nothing_and_adds_no_run(store: Store, tmp_path: Path) -> None:
    folder = diagnosed(tmp_path / "runs", "run-again")
    filed = fill_run(store, folder)
    once = whole(store, filed.mlflow_run_id)
    assert len(once) == 4
    assert fill_run(store, folder) == filed
    assert whole(store, filed.mlflow_run_id) == once


def test_a_finalist_whose_figure_is_no_number_is_refused_before_anything_is_filed(
    store: Store, tmp_path: Path
) -> None:
    result = search_result()
    result["ranked"][1]["metrics"]["accuracy"] = rate(0.5, 5) | {"value": float("nan")}
    folder = write_run(tmp_path / "runs", "run-nan-finalist", result=result, exit=EXIT)
    with pytest.raises(FolderError, match=r"accuracy\.value"):
        fill_run(store, folder)
    query = "tags.`orchestrator.run_id` = 'run-nan-finalist'"
    assert list(store.client.search_runs([store.experiment_id], query)) == []


@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_filing_killed_among_its_finalists_is_made_whole(
    store: Store, tmp_path: Path, killed_at: int
) -> None:
    runs = tmp_path / "runs"
    folder = diagnosed(runs, f"run-killed-{killed_at}")
    wanted = whole(store, fill_run(store, folder).mlflow_run_id)
    database = tmp_path / "mlflow.db"
    shutil.copy(store.tracking.uri.removeprefix("sqlite:///"), database)
    tracking = Tracking(uri=f"sqlite:///{database}", experiment="cut")
    count = (
        "SELECT count(*) FROM tags JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
        "WHERE tags.key = 'orchestrator.finalist_id' AND experiments.name = 'cut'"
    )
    filer = os.fork()  # cheaper than another import of mlflow; the database is its own
    if filer == 0:
        os.nice(19)  # whoever watches is to see it on its way, however busy the machine is
        try:
            fill_run(open_store(tracking), folder)
        finally:
            os._exit(1)
    connection = sqlite3.connect(database, timeout=60)
    deadline = time.monotonic() + 60
    while connection.execute(count).fetchone()[0] < killed_at and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(filer, signal.SIGKILL)
    os.waitpid(filer, 0)
    connection.close()

    cut = open_store(tracking)
    query = f"tags.`orchestrator.run_id` = 'run-killed-{killed_at}'"
    (left,) = cut.client.search_runs([cut.experiment_id], query)
    assert left.info.status == "RUNNING", "the filing was not cut in the middle"
    (healed,) = heal(cut, runs)
    assert (healed.mlflow_run_id, healed.status) == (left.info.run_id, "FINISHED")
    once = whole(cut, healed.mlflow_run_id)
    for ours, theirs in zip(once, wanted, strict=True):
        for part in ("info", "params", "points"):
            assert ours[part] == theirs[part]
        for tags in (ours["tags"], theirs["tags"]):
            tags.pop("mlflow.parentRunId", None)
        assert ours["tags"] == theirs["tags"]
        assert ours["files"].keys() == theirs["files"].keys()
    assert fill_run(cut, folder) == healed
    assert len(whole(cut, healed.mlflow_run_id)) == 4

"""What a real engine feeds, recorded in its own process and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.checkpoint import load_drafter
from eagle3.conventions import KEY
from eagle3.doctor.flat import flat_config
from eagle3.doctor.subject import read_drafter
from eagle3.files import read_json
from jobs import diagnose
from jobs.engine_probe import open_job
from jobs.engines.engine import Draft
from jobs.engines.folder import lay_out
from jobs.engines.returned import NEW_TOKENS
from jobs.events import Events
from jobs.inputs import target_folder
from tests.engines import serving
from tests.engines.conftest import USUAL, Starter
from tests.jobs.test_diagnose import LAB, request_of

TRUE = {**USUAL, "layers": [-1, 2, 30], "convention": "output"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def probed(
    made: Path,
    out: Path,
    engine: str,
    ids: list[int] | None,
    url: str | None = None,
    drafter: Path = LAB / "drafter",
) -> dict[str, Any]:
    """The answer about the lab's drafter, as it is or with other ids, or of a server that runs."""
    started = {
        "flags": serving.flags(engine),
        "env": serving.environment(engine),
        "python": str(serving.engine_python(engine)),
    }
    running: dict[str, Any] = {"flags": {}, "env": {}, "python": None}
    diagnosis = request_of(made, drafter)
    request = {
        "device": "cpu",
        "threads": 1,
        "steps": 4,
        "topk": 1,
        "draft_tokens": None,
        "max_prompts": 2,
        "new_tokens": 32,
        "ignore_eos": True,
        "start_s": 300.0,
        "first_s": 240.0,
        "request_s": 240.0,
        "seed": 0,
        "inputs": {**diagnosis["inputs"], "prompts": None},
        "engine": {
            "name": engine,
            "version": None,
            "engine_class": None,
            **(started if url is None else running),
            "ids": ids,
            "url": url,
            **{"patch": None, "launch": None, "baseline_launch": None},
        },
    }
    out.mkdir(exist_ok=True)
    with Events(out / "events.jsonl") as events:
        found = open_job(request, events).run_case({"case_id": "case", "wiring": TRUE})
    return json.loads(json.dumps(found))  # it has to be fit for a result file


@pytest.mark.parametrize(
    ("engine", "ids", "fed", "where"),
    [
        ("sglang", [-1, 2, 30], [0, 3, 31], "none"),
        ("sglang", [2, 30, 58], [3, 31, 59], "config"),
        ("vllm", [0, 3, 31], [0, 3, 31], "none"),
        ("vllm", [3, 31, 59], [3, 31, 59], "config"),
    ],
)
def test_the_states_that_are_fed_are_named(
    made: Path, tmp_path: Path, engine: str, ids: list[int], fed: list[int], where: str
) -> None:
    result = probed(made, tmp_path, engine, ids)
    probe = result["probe"]
    assert probe["fed"] == fed
    assert probe["where"] == where
    assert [chunk["verdict"] for chunk in probe["chunks"]] == ["fed"] * 3
    assert all(chunk["error"] < 0.1 * chunk["second"] for chunk in probe["chunks"])
    # Whatever it is fed, of that the engine makes what the drafter alone makes.
    assert probe["replay"]["same"]
    assert probe["replay"]["takes"] == 2
    assert probe["replay"]["others"][0]["error"] > 5 * probe["replay"]["error"]
    names = [finding["name"] for finding in result["findings"]]
    assert ("engine-feeds-other-states" in names) == (where == "config")
    if where == "config":
        assert result["metrics"]["accept_length"]["value"] < 1.3
        (fix,) = next(f for f in result["findings"] if f["name"] == "engine-feeds-other-states")[
            "fix"
        ]
        assert str([-1, 2, 30] if engine == "sglang" else [0, 3, 31]) in fix


@pytest.mark.parametrize(
    ("ids", "fed", "where"),
    [([-1, 2, 30], [0, 3, 31], "none"), ([2, 30, 58], [3, 31, 59], "config")],
    ids=["true", "shifted"],
)
def test_a_server_is_asked_at_its_url_for_what_it_feeds_and_left_running(
    starter: Starter, made: Path, tmp_path: Path, ids: list[int], fed: list[int], where: str
) -> None:
    source = LAB / "drafter"
    config = read_json(source / "config.json")
    config["eagle_config"] = {**config.get("eagle_config", {}), KEY: ids}
    draft = Draft(folder=lay_out(source, tmp_path / "drafter", config), steps=4)
    target = target_folder(
        {"path": str(LAB / "target"), "layout": "lab", "made": str(made / "target")}
    )
    server = starter.start("sglang", target, draft, enable_return_hidden_states=True)
    url = server.running.address.url
    result = probed(made, tmp_path / "out", "sglang", None, url)
    probe = result["probe"]
    assert (probe["fed"], probe["where"]) == (fed, where)
    assert [chunk["verdict"] for chunk in probe["chunks"]] == ["fed"] * 3
    assert all(chunk["error"] < 0.1 * chunk["second"] for chunk in probe["chunks"])
    assert (result["metrics"]["accept_length"]["value"] < 1.3) == (where == "config")
    rows = (NEW_TOKENS - 1) * 2  # of two prompts
    assert f"behind the prompts {rows} of {rows} rows are states {fed}" in result["notes"]
    if where == "config":
        diagnosed_at(url, made, tmp_path)
    # A prompt that comes again is asked for states again, and the server still answers.
    assert probed(made, tmp_path / "again", "sglang", None, url)["probe"]["fed"] == fed
    assert server.engine.facts(server.running.address).flags["enable_return_hidden_states"] is True


def diagnosed_at(url: str, made: Path, out: Path) -> None:
    """The same server, asked by a diagnosis: which states it was trained on, and what to write."""
    engine = {
        **{"name": "sglang", "version": None, "engine_class": None, "checkout": None, "flags": {}},
        **{"ids": None, "accept_length": None, "url": url},
    }
    with Events(out / "diagnosed.jsonl") as events:
        job = diagnose.open_job(request_of(made, LAB / "drafter", engine=engine), events)
        found = job.run_case({"case_id": "case"})["diagnosis"]
    assert [cause["kind"] for cause in found["causes"]] == ["states"]
    assert found["trained"]["states"] == [0, 3, 31]
    assert found["served"]["states"] == [3, 31, 59]
    assert found["served"]["measured"]
    assert found["config"]["eagle_config"][KEY] == [-1, 2, 30]
    server = found["server"]
    assert (server["fault"], server["states"]) == ("config", [3, 31, 59])
    # What it accepts is what the drafter has on such states alone.
    assert server["accept_length"]["value"] < 1.3
    assert server["alone"]["value"] < 1.3
    assert abs(server["lost"]["value"]) < 0.1
    lines = found["first_lines"]
    assert len(lines) <= 12
    assert any("[-1, 2, 30]" in line for line in lines)
    assert any(
        line.startswith("fault: config; the server feeds states 3, 31 and 59") for line in lines
    )


def test_what_sglang_does_otherwise_with_the_second_drafter_is_named(
    made: Path, tmp_path: Path
) -> None:
    source = LAB / "drafter_speculators"
    config = flat_config(read_drafter(source)[0], load_drafter(source).form)
    drafter = lay_out(source, tmp_path / "flat", config)
    probe = probed(made, tmp_path, "sglang", [-1, 2, 30], drafter=drafter)["probe"]
    assert probe["fed"] == [0, 3, 31]
    # Its residual is normed, which SGLang has no place for.
    assert not probe["replay"]["same"]
    assert probe["replay"]["named"] == ["residual=raw"]
    assert probe["where"] == "engine"

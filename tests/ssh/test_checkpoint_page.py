"""docs/from-my-checkpoint.md, typed in order, leads from the story's files on a host to its numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from eagle3.lab.layout import lay_out
from jobs.capture_states import open_job
from jobs.events import Events
from orchestrator.paths import CLONE
from tests.ssh.machines import Client, HostMaker
from tests.ssh.pages import copy_of_clone, host_of_pages, type_page

PAGE = CLONE / "docs" / "from-my-checkpoint.md"
LAB = CLONE / "lab"
PROMPTS = 60


def story(folder: Path) -> Path:
    """The files that the page finds on its host: a dump that says nothing of itself among them."""
    target = lay_out(LAB / "target", folder / "models" / "target")
    shutil.copytree(LAB / "drafter_speculators", folder / "models" / "my-eagle3")
    request = {
        "device": "cpu",
        "dtype": "float32",
        "inputs": {"target": {"path": str(target), "layout": "hf", "made": ""}},
    }
    states = folder / "data" / "states"
    case = {
        "case_id": "story",
        "prompts": str(LAB / "prompts.jsonl"),
        "out": str(states),
        "states": [0, 3, 31, 59],
        "new_tokens": 96,
        "repetition_window": 24,
        "min_new_tokens": 24,
        "batch": 64,
        "max_samples": PROMPTS,
        "keep": False,
    }
    with Events(folder / "events.jsonl") as events:
        open_job(request, events).run_case(case)
    (states / "capture.json").unlink()
    for path in states.rglob("*.pt"):
        sample = torch.load(path)
        del sample["target_argmax"]
        torch.save(sample, path)
    return folder


def answers(clone: Path) -> list[dict[str, Any]]:
    """The results of all runs, in the order that they were started in."""
    folders = sorted(
        (clone / "results" / "runs").iterdir(), key=lambda f: (f / "run.json").stat().st_mtime
    )
    found = []
    for folder in folders:
        run = json.loads((folder / "run.json").read_bytes())
        assert (folder / "filed.json").is_file()
        found.append({**json.loads((folder / "result.json").read_bytes()), "job": run["job"]})
    return found


def test_the_page_leads_to_the_storys_numbers(
    make_host: HostMaker, client: Client, tmp_path: Path
) -> None:
    host = host_of_pages(make_host, client)
    files = story(tmp_path / "story")
    subprocess.run(host.inside("mount", "-t", "tmpfs", "tmpfs", "/srv"), check=True)
    for part in ("models", "data"):
        shutil.copytree(files / part, host.root / "srv" / part)
    subprocess.run(host.inside("chmod", "-R", "a+rwX", "/srv"), check=True)
    clone = copy_of_clone(tmp_path / "clone")
    printed = type_page(PAGE, clone, client, tmp_path / "tools")

    assert "norm-before-residual-ignored" in printed
    inspected, chosen, number, *swept, tree = answers(clone)
    assert [s["verdict"] for s in inspected["slots"]] == ["verified"] * 4
    assert [s["found"] for s in inspected["slots"]] == [[0], [3], [31], [59]]
    (finding,) = inspected["findings"]
    assert finding["name"] == "wrong-teacher"
    assert "state 59" in finding["what"]
    following = chosen["capture"]["positions_following_argmax"]  # the target is stored in bfloat16
    assert following > 0.97 * chosen["capture"]["positions"]

    metrics = number["metrics"]
    assert metrics["accuracy"]["truth"] == "target_argmax"
    assert metrics["accuracy/stored_teacher"]["low"] > metrics["accuracy/target_argmax"]["high"]
    assert metrics["teacher_agreement"]["high"] < 0.9
    assert number["curves"]["speculators/full_acc"]
    assert [finding["name"] for finding in number["findings"]] == ["wrong-teacher"]

    assert len(swept) == 4
    by_wiring = {
        (*run["wiring"]["states"], run["wiring"]["residual"]): run["metrics"]["accuracy"]
        for run in swept
    }
    assert by_wiring[0, 3, 31, "declared"]["value"] == metrics["accuracy"]["value"]
    assert by_wiring[0, 3, 31, "raw"]["value"] < metrics["accuracy"]["value"]
    assert by_wiring[3, 31, 59, "raw"]["high"] < by_wiring[0, 3, 31, "declared"]["low"]
    lengths = tree["metrics"]
    assert lengths["accept_length_tree"]["value"] > lengths["accept_length"]["value"]

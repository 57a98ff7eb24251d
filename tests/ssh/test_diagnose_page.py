"""docs/diagnose.md, typed in order, names the cause of the story's files on a host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from orchestrator.paths import CLONE
from tests.ssh.machines import Client, HostMaker
from tests.ssh.pages import copy_of_clone, host_of_pages, type_page
from tests.ssh.test_checkpoint_page import answers, story

PAGE = CLONE / "docs" / "diagnose.md"


def shape(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", line)


def test_the_page_names_the_cause(make_host: HostMaker, client: Client, tmp_path: Path) -> None:
    host = host_of_pages(make_host, client)
    files = story(tmp_path / "story")
    subprocess.run(host.inside("mount", "-t", "tmpfs", "tmpfs", "/srv"), check=True)
    for part in ("models", "data"):
        shutil.copytree(files / part, host.root / "srv" / part)
    subprocess.run(host.inside("chmod", "-R", "a+rwX", "/srv"), check=True)
    clone = copy_of_clone(tmp_path / "clone")
    printed = type_page(PAGE, clone, client, tmp_path / "tools")

    chosen, named, again, searched = answers(clone)
    assert chosen["job"] == "capture_states"
    said = named["diagnosis"]
    assert said["verdict"] == "cause"
    assert {"states", "teacher", "residual"} <= {cause["kind"] for cause in said["causes"]}
    assert said["trained"]["states"] == [0, 3, 31]
    assert (
        named["metrics"]["accept_length"]["low"] > named["metrics"]["accept_length_served"]["high"]
    )
    first = "\n".join(said["first_lines"])
    (tmp_path / "first_lines.txt").write_text(first)
    sample = PAGE.read_text().split("```\n1. ")[1].split("```")[0].splitlines()
    # The page shows what this prints, but for figures, which another machine may round otherwise.
    assert [shape(line) for line in sample] == [shape(line) for line in first[3:].splitlines()]
    assert len(said["first_lines"]) <= 12
    assert first in printed
    assert printed.index(first) < printed.index("experiment=diagnose")

    assert again["job"] == "diagnose"
    assert [c["kind"] for c in again["diagnosis"]["causes"]][:1] == [said["causes"][0]["kind"]]
    assert searched["ranked"][0]["states"] == [0, 3, 31]
    (run,) = {p.parent.parent for p in (clone / "results" / "runs").glob("*/experiment/*.yaml")}
    patched = json.loads((run / "patched" / "config.json").read_bytes())
    assert patched == said["config"]

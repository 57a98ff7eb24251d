"""docs/remote.md, typed in order against a fresh host, leads from an alias to filed answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.paths import CLONE
from tests.ssh.machines import Client, HostMaker

PAGE = CLONE / "docs" / "remote.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERDICTS = {
    "layers_m1_2_30": "supported",
    "layers_2_30_58": "supported",
    "d2t_absolute": "supported",
    "script": "supported",
    "no_decoder_layer": "supported",
    "d2t_absolute_no_decoder_layer": "supported",
}


def copy_of_clone(folder: Path) -> Path:
    """The tree as it would be committed now, so that nothing is written into this one."""
    listed = subprocess.run(
        ["git", "-C", str(CLONE), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = CLONE / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_the_page_leads_to_filed_answers(
    make_host: HostMaker, client: Client, tmp_path: Path
) -> None:
    host = make_host()
    bind = "mount -t tmpfs tmpfs /opt && mkdir /opt/venv && mount --bind /mnt/venv /opt/venv"
    subprocess.run(host.inside("sh", "-c", bind), check=True)
    clone = copy_of_clone(tmp_path / "clone")
    client.add("gpu8", host, pin=False)
    # The page types `ssh` and `python` as a person has them: ssh with that person's config, and the
    # environment that `make` makes.
    tools = tmp_path / "tools"
    tools.mkdir()
    shim = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(client.config))} "$@"\n'
    (tools / "ssh").write_text(shim)
    (tools / "ssh").chmod(0o755)
    venv = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{venv}:{os.environ['PATH']}", "TERM": "dumb"}

    commands = 0
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", block],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        commands += block.count("python -m orchestrator")
    assert commands >= 12

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

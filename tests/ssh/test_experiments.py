"""The lab's experiments on a host behind SSH: the same digits as on this machine, and made there."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.paths import CLONE, RunPaths
from tests.ssh.machines import PYTHON, Client, HostMaker, SshHost

EXPERIMENTS = (
    "layers_m1_2_30",
    "layers_2_30_58",
    "d2t_absolute",
    "no_decoder_layer",
    "d2t_absolute_no_decoder_layer",
)


def command(*arguments: str, results: Path) -> str:
    """What the orchestrator prints; it must have answered."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments, f"results={results}"],
        cwd=CLONE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on(client: Client) -> list[str]:
    """The overrides that choose the client's host."""
    return [
        "host=ssh",
        "host.alias=gpu8",
        f"host.ssh_config={client.config}",
        f"host.python={PYTHON}",
    ]


def answers(results: Path) -> dict[str, dict[str, Any]]:
    """The runs' folders by experiment."""
    found = {}
    for folder in (results / "runs").iterdir():
        run = json.loads(RunPaths(folder).run.read_bytes())
        result = json.loads(RunPaths(folder).result.read_bytes())
        environment = json.loads(RunPaths(folder).environment.read_bytes())
        found[run["experiment"]] = {"result": result, "environment": environment, "folder": folder}
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = tmp_path_factory.mktemp("local") / "results"
    command("-m", f"+experiment={','.join(EXPERIMENTS)}", results=results)
    return answers(results)


def test_the_five_experiments_give_the_same_digits_and_were_made_there(
    make_host: HostMaker, client: Client, tmp_path: Path, local: dict[str, dict[str, Any]]
) -> None:
    host = make_host(name="gpu8.test")
    client.add("gpu8", host)
    nonce = secrets.token_hex(16)
    (host.root / "mnt" / "nonce").write_text(nonce)
    # Neither the clone nor anything of this test is to be seen from there.
    for path in (CLONE / "lab", CLONE / "jobs", tmp_path):
        assert not Path(f"{host.root}{path}").exists()

    results = tmp_path / "results"
    command("-m", f"+experiment={','.join(EXPERIMENTS)}", *on(client), results=results)
    there = answers(results)
    assert set(there) == set(local) == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        here, far = local[name]["result"], there[name]["result"]
        for part in ("metrics", "curves", "samples", "fingerprints", "wiring"):
            assert far[part] == here[part], (name, part)
        environment = there[name]["environment"]
        assert environment["hostname"] == "gpu8.test" != socket.gethostname()
        assert environment["executable"] == PYTHON
        run = host.home / "drafter-orchestrator" / "runs" / there[name]["folder"].name
        assert json.loads((run / "environment.json").read_bytes())["nonce"] == environment["nonce"]
    assert re.search(r"Accepted publickey for gpu from 127\.0\.0\.1", host.log)
    assert host.log.count("Starting session: command") == 1  # one channel for five experiments

    # A nonce that exists only on the host comes back through a script that was sent there.
    script = tmp_path / "read_nonce.py"
    script.write_text(
        "from pathlib import Path\n"
        "print('nonce', Path('/mnt/nonce').read_text())\n"
        f"print('metric clone_seen={{}}'.format(int(Path({str(CLONE / 'lab')!r}).exists())))\n"
    )
    arguments = ["job=script", f"job.path={script}", 'predict="clone_seen <= 0"', "strict=true"]
    command(*arguments, *on(client), results=results)
    logs = [path.read_text() for path in results.glob("runs/*-read_nonce-*/log")]
    assert logs == [f"nonce {nonce}\nmetric clone_seen=0\n"]


def test_hostile_values_reach_the_host_unchanged(
    host: SshHost, client: Client, tmp_path: Path
) -> None:
    client.add("gpu8", host)
    work = '~/it\'s a "w" $(touch /tmp/x) ü;&|#'
    words = ["$(touch /tmp/x)", "a'b\"c", "line\nbreak", "`id`", "ü" * 300, "-", "", "a b", "\\"]
    script = tmp_path / 'it\'s $(x) "q".py'
    script.write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['ODD']]))\n"
        "print('metric one=1')\n"
    )
    section = client.section(work=work)
    experiment = tmp_path / "conf" / "experiment"
    experiment.mkdir(parents=True)
    body = {
        "claim": "$(touch /tmp/x) 'q' \"d\" ü\n",
        "job": {"path": str(script), "args": words, "device": "cpu"},
        "host": {**section, "name": "it's $(x)\n", "env": {"ODD": "$(x)'\"\n ü"}},
    }
    text = json.dumps(body, ensure_ascii=False, indent=1)  # JSON is YAML
    header = "# @package _global_\n"
    defaults = '"defaults": [{"override /job": "script"}, {"override /host": "ssh"}],'
    (experiment / "hostile.yaml").write_text(header + text.replace("{", "{" + defaults, 1))
    arguments = ["--config-dir", str(tmp_path / "conf"), "+experiment=hostile"]
    results = tmp_path / "results"
    command(*arguments, results=results)
    (log,) = results.glob("runs/*/log")
    said = json.loads(log.read_text().splitlines()[0])
    assert said == [words, "$(x)'\"\n ü"]
    assert not (host.root / "tmp" / "x").exists()
    assert not Path("/tmp/x").exists()
    assert (host.home / work.removeprefix("~/") / "runs").is_dir()

"""doctor reads files where they are: on a host behind SSH, with the shipped lab sent along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from orchestrator.paths import CLONE
from tests.doctor.files import flat_drafter
from tests.ssh.machines import PYTHON, Client, SshHost


def ask(client: Client, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, against the host that this client's config names."""
    host = ("host=gpu8", f"host.ssh_config={client.config}", f"host.python={PYTHON}")
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", "doctor", *host, *arguments, f"results={results}"],
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_lab_and_a_folder_of_the_host_s_own(
    host: SshHost, client: Client, tmp_path: Path
) -> None:
    client.add("gpu8", host)
    flat_drafter(host.home / "drafter", max_position_embeddings=100)
    done = ask(client, tmp_path, "drafter=lab", "target=lab")
    assert (done.returncode, done.stderr) == (0, "")
    done = ask(client, tmp_path, "drafter=~/drafter", "target=lab", "json=true")
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert report["host"] == "gpu8"
    assert "other-target" in {finding["name"] for finding in report["findings"]}
    done = ask(client, tmp_path, "drafter=/nothing/there")
    assert done.returncode == 2
    assert "/nothing/there is no folder on this host" in done.stderr

"""Pages of docs/, typed in order by a person at a clone, against a host that their ssh config names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from orchestrator.paths import CLONE
from tests.ssh.machines import Client, HostMaker, SshHost

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def host_of_pages(make_host: HostMaker, client: Client) -> SshHost:
    """The host gpu8, with an interpreter for jobs where the pages say."""
    host = make_host()
    bind = "mount -t tmpfs tmpfs /opt && mkdir /opt/venv && mount --bind /mnt/venv /opt/venv"
    subprocess.run(host.inside("sh", "-c", bind), check=True)
    client.add("gpu8", host, pin=False)
    return host


def type_page(page: Path, clone: Path, client: Client, tools: Path) -> str:
    """Run every command of a page, in order, from the clone; all that was printed.

    A page types `ssh` and `python` as a person has them: ssh with that person's config, and the
    environment that `make` makes.
    """
    tools.mkdir()
    shim = f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(client.config))} "$@"\n'
    (tools / "ssh").write_text(shim)
    (tools / "ssh").chmod(0o755)
    venv = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{venv}:{os.environ['PATH']}", "TERM": "dumb"}
    printed = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
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
        found = 3 if "orchestrator doctor" in block else 0  # the doctor found something
        assert done.returncode == found, f"{block}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    return "\n".join(printed)

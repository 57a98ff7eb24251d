"""As much of docker's command line as a container's handle needs; its containers are processes.

    fake_docker.py run [-d] --name NAME WORD…     what `docker stop` and `docker rm` take away again
    fake_docker.py inspect|logs|stop|rm … NAME

What runs is detached in any case, as a daemon's child is; its folder is FAKE_DOCKER in the environment.
A container with --gpus or --publish behind its name (125), or whose program is a folder (126) or is not
there (127), is created and cannot be started, which leaves it behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = "FAKE_DOCKER"
POLL_S = 0.02


def run(folder: Path, words: list[str]) -> int:
    """Start a container: a process in a session of its own, whose parent does not stay."""
    detached = words[0] == "-d"
    words = words[detached:]
    assert words[0] == "--name"
    name, command = words[1], words[2:]
    own = folder / name
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        sys.stderr.write(f'docker: Error response from daemon: "/{name}" is already in use.\n')
        return 125
    if (trouble := unstartable(command)) is not None:
        code, why = trouble
        sys.stderr.write(f"docker: Error response from daemon: {why}\n")
        return code
    if (between := os.fork()) == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        (own / "part").write_text(str(process.pid))
        (own / "part").rename(own / "pid")
        code = process.wait()
        if own.exists():
            (own / "code").write_text(str(code))
        os._exit(0)
    os.waitpid(between, 0)
    while not (own / "pid").exists():
        time.sleep(POLL_S)
    if detached:
        sys.stdout.write("0123456789abcdef\n")
        return 0
    while own.exists() and not (own / "code").exists():
        time.sleep(POLL_S)
    if own.exists():
        sys.stderr.write((own / "log").read_text())
    return 1


def unstartable(command: list[str]) -> tuple[int, str] | None:
    """The exit code and the reason where a container cannot be started, as docker has them."""
    if command[0] == "--gpus":
        return 125, 'could not select device driver "" with capabilities: [[gpu]]'
    if command[0] == "--publish":
        return 125, "failed to set up container networking: bind: address already in use"
    if Path(command[0]).is_dir():
        return 126, f'failed to create task: exec: "{command[0]}": is a directory'
    if shutil.which(command[0]) is None:
        return 127, f'failed to create task: exec: "{command[0]}": executable file not found'
    return None


def end(own: Path, *numbers: int) -> None:
    """Signal a container's process until it has ended."""
    if not (own / "pid").exists():  # never started
        return
    pid = int((own / "pid").read_text())
    for number in numbers:
        if not (own / "code").exists():
            os.kill(pid, number)
            limit = time.monotonic() + 0.5
            while not (own / "code").exists() and time.monotonic() < limit:
                time.sleep(POLL_S)


def main(words: list[str]) -> int:
    """The exit code."""
    folder, verb, name = Path(os.environ[FOLDER]), words[0], words[-1]
    with (folder / "asked").open("a") as asked:
        asked.write(" ".join(words[:4] if verb == "run" else words) + "\n")
    if verb == "run":
        return run(folder, words[1:])
    own = folder / name
    if not own.exists():
        sys.stderr.write(f"Error: No such container: {name}\n")
        return 1
    if verb == "inspect":
        started, ended = (own / "pid").exists(), (own / "code").exists()
        status = "exited" if ended else "running" if started else "created"
        said = status if "Status" in words[-2] else str(status == "running").lower()
        sys.stdout.write(f"{said}\n")
    elif verb == "logs" and (own / "log").exists():
        sys.stdout.write((own / "log").read_text())
    elif verb == "stop":
        end(own, signal.SIGTERM, signal.SIGKILL)
    elif verb == "rm":
        end(own, signal.SIGKILL)
        for file in own.iterdir():
            file.unlink()
        own.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

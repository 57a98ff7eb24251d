"""From changed files to the first output of a job on a host, side by side with rsync, tar and Fabric.

    python bench/push.py [--rounds 3]

The host is a real sshd on 127.0.0.1, behind a line of our own that makes the way to it long. Every
tool has its connection open and the other files in place, and starts the same job: a script below
the jobs' supervisor. Times are medians. The slope of the time over the line's round trip is how many
round trips a tool needs; it is fitted to the fastest times, since others on the machine can only add
to them. "x ours" compares the medians at the longest way.

The line takes at once what it is sent, so TCP's slow start, which costs whoever sends much on a real
way, is not in it: see the KB sent.
"""

from __future__ import annotations

import argparse
import getpass
import itertools
import json
import os
import platform
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fabric
from delay_line import DelayLine

from orchestrator.channel import Channel, Request
from orchestrator.follow import follow_request
from orchestrator.loop import FIRST_S, UNDER_WAY
from orchestrator.paths import CLONE
from orchestrator.preflight import answer_of, question
from orchestrator.push import Load, deliver, lay_out, tree_of
from orchestrator.ssh import open_ssh

SSHD = "/usr/sbin/sshd"
DELAYS_MS = (0, 20, 50)
FILES = 400
CHANGED = (1, 40)
ONCE = ("Fabric put", 40)  # half a minute of round trips
ALIAS = "bench"
PYTHON = sys.executable
CONFIG = {"host": {"python": PYTHON, "env": {}, "checkouts": []}, "job": {"device": "cpu"}}

Times = dict[str, float]  # seconds since the change, by what had happened; and the KB `sent`
Tool = Callable[[Path, Path, int], Times]  # its files here, their place there, how many change
Said = Iterator[tuple[str, float]]  # lines and when they came


def change(here: Path, count: int) -> list[str]:
    """Writes new text of about 3 KB to the first files; their names."""
    names = [f"data/{number:03}.txt" for number in range(count)]
    for name in names:  # rsync goes by size and second, so the size changes as well
        (here / name).write_text(secrets.token_hex(1400 + secrets.randbelow(200)))
    return names


def request_of(run_id: str, folder: Path) -> bytes:
    """The request for the script that prints one line."""
    cases: list[dict[str, Any]] = [{"case_id": "case", "args": [], "metrics_file": None}]
    job = {"job": "script", "inputs": {"script": {"path": str(folder / "script.py")}}}
    machine = {"device": "cpu", "threads": 1, "timeout_s": None, "checkouts": []}
    gpus = {"gpus": {"wanted": None, "lease": False}}
    return json.dumps({"run_id": run_id, **job, **machine, **gpus, "cases": cases}).encode()


def settle(run: Path, here: Path, there: Path, names: list[str]) -> None:
    """Waits for a run's end; raises where the host does not have what was pushed."""
    wait_for((run / "exit.json").exists, f"the end of {run}")
    for name in names:
        if (here / name).read_bytes() != (there / name).read_bytes():
            raise RuntimeError(f"{there / name} is not what was pushed")


def ours(channel: Channel, line: DelayLine, here: Path, there: Path, count: int) -> Times:
    """The start alone, and then, with other changes, the start and the first output."""
    started = sum(push(channel, here, there, count, follow=False).values())
    before = line.sent
    parts = push(channel, here, there, count, follow=True)
    kb = (line.sent - before) / 1000
    return {"started": started, "output": sum(parts.values()), "sent": kb, **parts}


def push(channel: Channel, here: Path, there: Path, count: int, *, follow: bool) -> Times:
    """One question, one stream, as in orchestrator.loop.start; the seconds of each part."""
    names, run_id = change(here, count), f"run-{secrets.token_hex(4)}"
    marks = [time.perf_counter()]
    files = {p.relative_to(here).as_posix(): p for p in here.rglob("*") if p.is_file()}
    load = Load(kind="snapshots", tree=tree_of(files))
    marks.append(time.perf_counter())
    laid_out, told = channel.pipeline([lay_out(load), question(CONFIG, [])], check=False)
    answer_of(channel, told)
    marks.append(time.perf_counter())
    fields = {"run_id": run_id, "snapshot": load.folder, "python": PYTHON, "env": {}}
    then = [Request(op="start", fields=fields, payload=request_of(run_id, there.parents[1]))]
    output = follow_request(run_id, {"log": 0}, UNDER_WAY, FIRST_S)
    said = deliver(channel, [load], [laid_out], [*then, output] if follow else then)[-1]
    while follow and not said.payload:  # a job that took longer
        (said,) = channel.pipeline([output])
    marks.append(time.perf_counter())
    settle(there / "runs" / run_id, here, there / load.folder, names)
    spans = [after - before for before, after in itertools.pairwise(marks)]
    return dict(zip(("hash", "question", "stream"), spans, strict=True))


def peer(
    send_and_run: Callable[[Path, Path, list[str], str], Said],
    line: DelayLine,
    here: Path,
    there: Path,
    count: int,
) -> Times:
    """A tool that pushes by its own means, then starts the job, whose request lies there already."""
    names, run = change(here, count), there.parent / "runs" / f"run-{secrets.token_hex(4)}"
    run.mkdir(parents=True)
    (run / "request.json").write_bytes(request_of(run.name, there.parents[1]))
    log, quoted = shlex.quote(f"{run}/log"), shlex.quote(str(run))
    command = (
        f"cd {shlex.quote(str(there))}; "
        f"setsid {shlex.quote(PYTHON)} -m jobs.supervisor {quoted} </dev/null >/dev/null 2>&1 & "
        f"echo started; until [ -s {log} ]; do sleep 0.01; done; head -n 1 {log}"
    )
    sent, began = line.sent, time.perf_counter()
    (_, started), (_, output) = send_and_run(here, there, names, command)
    kb = (line.sent - sent) / 1000
    settle(run, here, there, names)
    return {"started": started - began, "output": output - began, "sent": kb}


def rsync(ssh: list[str], here: Path, there: Path, _names: list[str], command: str) -> Said:
    """rsync finds out itself what has changed."""
    subprocess.run(
        ["rsync", "-a", "-e", shlex.join(ssh), f"{here}/", f"{ALIAS}:{there}/"], check=True
    )
    return lines_of([*ssh, ALIAS, command])


def tar(ssh: list[str], here: Path, there: Path, names: list[str], command: str) -> Said:
    """One ssh that unpacks and starts; told what has changed, and nothing is verified."""
    with subprocess.Popen(["tar", "-C", here, "-c", *names], stdout=subprocess.PIPE) as packed:
        unpack = f"tar -C {shlex.quote(str(there))} -x && {command}"
        yield from lines_of([*ssh, ALIAS, unpack], packed.stdout)


def fabric_put(
    connection: fabric.Connection, here: Path, there: Path, names: list[str], command: str
) -> Said:
    """File by file; told what has changed."""
    for name in names:
        connection.put(str(here / name), str(there / name))
    said: list[tuple[str, float]] = []

    class Stream:
        def write(self, text: str) -> None:
            said.extend((line, time.perf_counter()) for line in text.splitlines())

        def flush(self) -> None:
            """Nothing is held back."""

    connection.run(command, out_stream=Stream(), in_stream=False)
    return iter(said)


def lines_of(command: list[str], stdin: Any = subprocess.DEVNULL) -> Said:
    """The lines that a command prints."""
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield line, time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}")


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Polls until the condition holds; TimeoutError after 20 seconds."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited 20 s for {what}")
        time.sleep(0.005)


def make_host(folder: Path, stack: ExitStack) -> DelayLine:
    """An sshd of this user's, the line to it and an ssh config that leads there."""
    for name in ("host_key", "key"):
        generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(generate, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nSubsystem sftp internal-sftp\n"
    )
    if os.geteuid() == 0:
        with suppress(FileExistsError):  # Debian makes it when its own sshd starts
            Path("/run/sshd").mkdir(mode=0o755)
            stack.callback(Path("/run/sshd").rmdir)
    log = stack.enter_context((folder / "sshd.log").open("w"))
    listen = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    sshd = stack.enter_context(subprocess.Popen(listen, stderr=log, start_new_session=True))
    stack.callback(sshd.terminate)
    said = (folder / "sshd.log").read_text
    wait_for(lambda: "listening" in said() or sshd.poll() is not None, "sshd to listen")
    if sshd.returncode is not None:
        sys.exit(f"sshd did not start: {said().strip()}")
    line = stack.enter_context(DelayLine(port))
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{line.port} {public}")
    (folder / "ssh_config").write_text(
        f"Host {ALIAS}\n HostName 127.0.0.1\n Port {line.port}\n User {getpass.getuser()}\n"
        f" IdentityFile {folder}/key\n IdentitiesOnly yes\n IdentityAgent none\n"
        f" UserKnownHostsFile {folder}/known_hosts\n ControlPath {folder}/master\n"
    )
    return line


def end_all(folder: Path) -> None:
    """Ends what still works in the folder: a run that Ctrl-C came into."""

    def gone() -> bool:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if bytes(folder) in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        return not found

    wait_for(gone, f"the processes in {folder} to end")


def make_tools(folder: Path, line: DelayLine, stack: ExitStack) -> dict[str, Tool]:
    """The tools, each with its connection open and its files on both sides."""
    config = str(folder / "ssh_config")
    ssh = ["ssh", "-F", config]
    master = stack.enter_context(subprocess.Popen([*ssh, "-M", "-N", ALIAS]))
    stack.callback(master.terminate)
    wait_for((folder / "master").exists, "the ControlMaster connection")
    host = {"alias": ALIAS, "ssh_config": config, "python": PYTHON}
    channel = stack.enter_context(open_ssh({**host, "work": str(folder / "there" / "ours")}))
    channel.hello()
    login = {"key_filename": str(folder / "key"), "allow_agent": False, "look_for_keys": False}
    nobodys = fabric.Config(overrides={"load_ssh_configs": False})
    connection = fabric.Connection(
        "127.0.0.1", port=line.port, connect_kwargs=login, config=nobodys
    )
    connection.open()
    stack.callback(connection.close)
    return {
        "ours": partial(ours, channel, line),
        "rsync; ssh": partial(peer, partial(rsync, ssh), line),
        "tar | ssh": partial(peer, partial(tar, ssh), line),
        "Fabric put": partial(peer, partial(fabric_put, connection), line),
    }


def measure(
    folder: Path, line: DelayLine, tools: dict[str, Tool], rounds: int
) -> dict[tuple[int, str, int], list[Times]]:
    """In turn, round by round, so that a busy moment hits all alike; by files, tool and delay."""
    unwanted = shutil.ignore_patterns("__pycache__")
    places = {name: (folder / "here" / name, folder / "there" / name) for name in tools}
    for name, (here, there) in places.items():
        for part in ("jobs", "eagle3"):
            shutil.copytree(CLONE / part, here / part, ignore=unwanted)
        (here / "data").mkdir()
        change(here, FILES)
        if name != "ours":
            shutil.copytree(here, there)
        tools[name](here, there, 1)  # what is done once is no part of it
    found: dict[tuple[int, str, int], list[Times]] = {}
    for number, count, delay in itertools.product(range(rounds), CHANGED, DELAYS_MS):
        line.round_trip_s = delay / 1000
        for name, tool in tools.items():
            if number == 0 or (name, count) != ONCE:
                found.setdefault((count, name, delay), []).append(tool(*places[name], count))
    line.round_trip_s = 0.0
    return found


def show(found: dict[tuple[int, str, int], list[Times]], what: str, title: str) -> None:
    """One table: medians in ms, round trips, and how they compare with ours."""
    print(f"\n{title:28s}", *(f"{d:4d} ms" for d in DELAYS_MS), "  trips  x ours  KB sent")
    compared = {name: 0.0 for (_, name, _), times in found.items() if what in times[0]}
    for count, name in itertools.product(CHANGED, compared):
        cells = [found[count, name, delay] for delay in DELAYS_MS]
        medians = [1000 * statistics.median(t[what] for t in cell) for cell in cells]
        compared[name] = medians[-1]
        fastest = [1000 * min(t[what] for t in cell) for cell in cells]
        slope = statistics.linear_regression(DELAYS_MS, fastest).slope
        print(
            f"{count:2d} of {FILES}  {name:17s}",
            *(f"{median:7.0f}" for median in medians),
            f"{slope:7.1f} {medians[-1] / compared['ours']:7.2f}",
            f"{statistics.median(t['sent'] for t in cells[0]):8.0f}",
        )


def main() -> None:
    """Measure and print; what was started and written is gone afterwards, also after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for tool, package in ((SSHD, "openssh-server"), ("ssh", "openssh-client"), ("rsync", "rsync")):
        if not shutil.which(tool):
            sys.exit(f"{tool} is missing; install {package} (as Debian names it)")
    for kind in (signal.SIGINT, signal.SIGTERM):  # an exit cleans up
        signal.signal(kind, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="push-")))
        stack.callback(end_all, folder)
        line = make_host(folder, stack)
        (folder / "script.py").write_text("print('first output')\n")
        tools = make_tools(folder, line, stack)
        found = measure(folder, line, tools, rounds)
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True).stderr
    sync = subprocess.run(["rsync", "-V"], capture_output=True, text=True, check=True).stdout
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{ssh.split(',')[0]}, rsync {sync.split()[2]}, Fabric {version('fabric')}\n"
        f"{FILES} files of 3 KB beside the jobs' code; ms, median of {rounds}, but "
        f"{ONCE[0]} of {ONCE[1]} files once"
    )
    show(found, "started", "push, start, answered")
    show(found, "output", "push, start, first output")
    for part in ("hash", "question", "stream"):
        show(found, part, f"first output, ours: {part}")


if __name__ == "__main__":
    main()

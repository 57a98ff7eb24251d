"""From changed files to the first output of a job on a host, side by side with rsync, tar and Fabric.

    python bench/push.py [--rounds 5]

The host is a real sshd on 127.0.0.1, behind a line of our own that makes the way to it long. Every
tool has its connection open and the other files there already, and starts the same job: a script
below the jobs' supervisor. The slope of the time over the line's round trip is the number of round
trips that a tool needs. What TCP adds on a long way for whoever sends much (slow start) is not in
it, since the line passes on what is sent at once; the KB sent are named for that.
"""

from __future__ import annotations

import argparse
import getpass
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fabric
from delay_line import DelayLine

from orchestrator.channel import Channel, Request
from orchestrator.follow import FOLLOWED, WAIT_S, follow_request
from orchestrator.paths import CLONE
from orchestrator.preflight import answer_of, question
from orchestrator.push import Load, deliver, lay_out, tree_of
from orchestrator.ssh import open_ssh

SSHD = "/usr/sbin/sshd"
DELAYS_MS = (0, 20, 50)
FILES = 400
CHANGED = (1, 40)
ALIAS = "bench"
OUTPUT = "first output"
ONCE = ("Fabric put", 40)  # seven round trips a file: one round is enough
CONFIG = {
    "host": {"python": sys.executable, "env": {}, "checkouts": []},
    "job": {"device": "cpu"},
}


@dataclass(kw_only=True)
class Times:
    """Seconds from the change to the answer that the job is started, and to its first output."""

    started: float = 0.0
    output: float = 0.0
    sent: int = 0  # bytes until the output
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where everything lies: all that this benchmark writes is in its one folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def here(self, tool: str) -> Path:
        """The tool's own files on the user's side."""
        return self.folder / "here" / tool

    def there(self, tool: str) -> Path:
        """Where it puts them on the host."""
        return self.folder / "there" / tool

    def new_run(self, folder: Path) -> Path:
        """A run's folder with its request, for those who do not send one along."""
        run = folder / f"run-{secrets.token_hex(4)}"
        run.mkdir(parents=True)
        (run / "request.json").write_bytes(self.request(run.name))
        return run

    def request(self, run_id: str) -> bytes:
        """The request of a script that prints one line."""
        request = {
            **{"run_id": run_id, "job": "script", "device": "cpu", "threads": 1},
            **{"timeout_s": None, "gpus": {"wanted": None, "lease": False}, "checkouts": []},
            "inputs": {"script": {"path": str(self.folder / "script.py")}},
            "cases": [{"case_id": "case", "args": [], "metrics_file": None}],
        }
        return json.dumps(request).encode()


def change(folder: Path, count: int) -> list[str]:
    """Writes new text of about 3 KB to the first files of a tool; their names."""
    names = [f"data/{number:03}.txt" for number in range(count)]
    for name in names:
        # rsync goes by size and second, so the size differs as well.
        (folder / name).write_text(secrets.token_hex(1400 + secrets.randbelow(200)))
    return names


def check_arrived(here: Path, there: Path, names: list[str]) -> None:
    """Raises where the host does not have what was pushed."""
    for name in names:
        if (here / name).read_bytes() != (there / name).read_bytes():
            raise RuntimeError(f"{there / name} is not what was pushed")


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Polls until the condition holds; TimeoutError after 20 seconds."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited 20 s for {what}")
        time.sleep(0.005)


class Ours:
    """One question, one stream: as orchestrator.loop.start does, and the polls of follow."""

    def __init__(self, place: Place, channel: Channel, line: DelayLine) -> None:
        self._place, self._channel, self._line = place, channel, line
        self._root = Path(channel.hello()["root"])

    def __call__(self, here: Path, _there: Path, count: int) -> Times:
        times = Times()
        self._push(here, change(here, count), times, follow=False)
        times.started = sum(times.parts.values())
        sent = self._line.sent
        self._push(here, change(here, count), times, follow=True)
        times.output = sum(times.parts.values())
        times.sent = self._line.sent - sent
        return times

    def _push(self, here: Path, names: list[str], times: Times, *, follow: bool) -> None:
        channel, marks = self._channel, [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        files = {p.relative_to(here).as_posix(): p for p in here.rglob("*") if p.is_file()}
        load = Load(kind="snapshots", tree=tree_of(files))
        mark()
        laid_out, told = channel.pipeline([lay_out(load), question(CONFIG, [])], check=False)
        answer_of(channel, told)
        mark()
        run_id = f"run-{secrets.token_hex(4)}"
        go = {"run_id": run_id, "snapshot": load.folder, "python": sys.executable, "env": {}}
        then = [Request(op="start", fields=go, payload=self._place.request(run_id))]
        offsets = dict.fromkeys(FOLLOWED, 0)
        if follow:
            then.append(follow_request(run_id, offsets, seen="starting", wait_s=WAIT_S))
        said = deliver(channel, [load], [laid_out], then)[-1]
        mark()
        while follow and not offsets["log"]:
            for name, size in said.header["chunks"].items():
                offsets[name] += size
            if not offsets["log"]:
                seen = said.header["state"]["state"]
                (said,) = channel.pipeline([follow_request(run_id, offsets, seen, WAIT_S)])
        mark()
        spans = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        times.parts = dict(zip(("hash", "question", "stream", "output"), spans, strict=True))
        wait_for((self._root / "runs" / run_id / "exit.json").exists, "a run of ours to end")
        check_arrived(here, self._root / load.folder, names)


class Peer:
    """Pushes by its own means, then runs the same supervisor over the same connection."""

    def __init__(self, place: Place, line: DelayLine) -> None:
        self.place, self._line = place, line
        self.ssh = ["ssh", "-F", str(place.config)]

    def __call__(self, here: Path, there: Path, count: int) -> Times:
        names = change(here, count)
        run = self.place.new_run(there.parent / "runs")
        sent, began = self._line.sent, time.perf_counter()
        seen = dict(self.push_and_run(here, there, names, start_command(there, run)))
        times = Times(started=seen["started"] - began, output=seen[OUTPUT] - began)
        times.sent = self._line.sent - sent
        wait_for((run / "exit.json").exists, f"a run of {here.name} to end")
        check_arrived(here, there, names)
        return times

    def push_and_run(
        self, here: Path, there: Path, names: list[str], command: str
    ) -> Iterator[tuple[str, float]]:
        """The lines that the command prints, each with the time at which it came."""
        raise NotImplementedError


class Rsync(Peer):
    """`rsync -a` finds out itself what has changed; the job by ssh over the same master."""

    def push_and_run(
        self, here: Path, there: Path, names: list[str], command: str
    ) -> Iterator[tuple[str, float]]:
        rsh = shlex.join(self.ssh)
        subprocess.run(["rsync", "-a", "-e", rsh, f"{here}/", f"{ALIAS}:{there}/"], check=True)
        yield from lines([*self.ssh, ALIAS, command])


class Tar(Peer):
    """One ssh that unpacks and starts; tar is told what has changed, and nobody verifies anything."""

    def push_and_run(
        self, here: Path, there: Path, names: list[str], command: str
    ) -> Iterator[tuple[str, float]]:
        pack = ["tar", "-C", str(here), "-cf", "-", *names]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
            unpack = f"tar -C {shlex.quote(str(there))} -xf - && {command}"
            yield from lines([*self.ssh, ALIAS, unpack], packed.stdout)


class Fabric(Peer):
    """`put` file by file, told what has changed, and `run`, on one connection."""

    def __init__(self, place: Place, line: DelayLine, connection: fabric.Connection) -> None:
        super().__init__(place, line)
        self._connection = connection

    def push_and_run(
        self, here: Path, there: Path, names: list[str], command: str
    ) -> Iterator[tuple[str, float]]:
        for name in names:
            self._connection.put(str(here / name), str(there / name))
        seen: list[tuple[str, float]] = []

        class Stream:
            def write(self, text: str) -> None:
                seen.extend((line, time.perf_counter()) for line in text.splitlines())

            def flush(self) -> None:
                """Nothing is held back."""

        self._connection.run(command, out_stream=Stream(), in_stream=False)
        yield from seen


def start_command(there: Path, run: Path) -> str:
    """For a shell: start the job, detached, say so, and then its first line as soon as it is there."""
    log, python = shlex.quote(f"{run}/log"), shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(str(there))}; "
        f"setsid {python} -m jobs.supervisor {shlex.quote(str(run))} </dev/null >/dev/null 2>&1 & "
        f"echo started; until [ -s {log} ]; do sleep 0.01; done; head -n 1 {log}"
    )


def lines(command: list[str], stdin: Any = subprocess.DEVNULL) -> Iterator[tuple[str, float]]:
    """The lines of a command with the time of each."""
    with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield line.strip(), time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}")


def make_host(place: Place, stack: ExitStack) -> DelayLine:
    """An sshd of this user, the line to it, and the user's ssh config; ended with the stack."""
    folder = place.folder
    for name in ("host_key", "key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        **{"ListenAddress": f"127.0.0.1:{port}", "HostKey": folder / "host_key"},
        **{"PidFile": "none", "UsePAM": "no", "StrictModes": "no", "PrintMotd": "no"},
        **{"PasswordAuthentication": "no", "KbdInteractiveAuthentication": "no"},
        **{"AuthorizedKeysFile": folder / "key.pub", "Subsystem": "sftp internal-sftp"},
        "PermitRootLogin": "prohibit-password",
    }
    text = "".join(f"{name} {value}\n" for name, value in settings.items())
    (folder / "sshd_config").write_text(text)
    if os.geteuid() == 0:
        with suppress(FileExistsError):  # Debian makes it when the service starts
            Path("/run/sshd").mkdir(mode=0o755)
            stack.callback(Path("/run/sshd").rmdir)
    log = stack.enter_context((folder / "sshd.log").open("wb"))
    sshd = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log, start_new_session=True
    )
    stack.callback(end, sshd)
    wait_for(lambda: sshd.poll() is not None or answers(port), "sshd to answer")
    if sshd.returncode is not None:
        sys.exit(f"sshd did not start: {(folder / 'sshd.log').read_text().strip()}")
    line = stack.enter_context(DelayLine(port))
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{line.port} {public}")
    place.config.write_text(
        f"Host {ALIAS}\n  HostName 127.0.0.1\n  Port {line.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  ControlPath {folder}/master\n"
    )
    return line


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
        return probe.recv(4) == b"SSH-"
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of ours."""
    process.terminate()
    process.wait()


def end_all(folder: Path) -> None:
    """Ends what still works in the folder, as a run does that Ctrl-C came into."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and bytes(folder) in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def make_tools(place: Place, line: DelayLine, stack: ExitStack) -> dict[str, Callable[..., Times]]:
    """The tools with their connections open and the first version of the files in place."""
    (place.folder / "script.py").write_text(f"print({OUTPUT!r})\n")
    master = subprocess.Popen(["ssh", "-F", str(place.config), "-M", "-N", ALIAS])
    stack.callback(end, master)
    wait_for((place.folder / "master").exists, "the ControlMaster connection")
    host = {"alias": ALIAS, "ssh_config": str(place.config), "python": sys.executable}
    channel = stack.enter_context(open_ssh({**host, "work": str(place.folder / "there/ours")}))
    connection = fabric.Connection(
        "127.0.0.1", port=line.port, connect_kwargs={"key_filename": str(place.folder / "key")}
    )
    connection.open()
    stack.callback(connection.close)
    tools: dict[str, Callable[..., Times]] = {
        "ours": Ours(place, channel, line),
        "rsync, ssh": Rsync(place, line),
        "tar | ssh": Tar(place, line),
        "Fabric put": Fabric(place, line, connection),
    }
    for name in tools:
        for folder in ("jobs", "eagle3"):
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CLONE / folder, place.here(name) / folder, ignore=unwanted)
        (place.here(name) / "data").mkdir()
        change(place.here(name), FILES)
        if name != "ours":
            shutil.copytree(place.here(name), place.there(name))
    return tools


def measure(
    place: Place, line: DelayLine, tools: dict[str, Callable[..., Times]], rounds: int
) -> dict[tuple[int, str, int], list[Times]]:
    """All tools in turn, round by round, so that a busy moment hits them alike."""
    found: dict[tuple[int, str, int], list[Times]] = {}
    for number in range(-1, rounds):
        for count in CHANGED:
            for name, tool in tools.items():
                if (name, count) == ONCE and number:
                    continue
                for delay in DELAYS_MS if number >= 0 else (0,):  # the first round warms up
                    line.round_trip_s = delay / 1000
                    times = tool(place.here(name), place.there(name), count)
                    if number >= 0:
                        found.setdefault((count, name, delay), []).append(times)
    line.round_trip_s = 0.0
    return found


def show(found: dict[tuple[int, str, int], list[Times]]) -> None:
    """The tables."""
    for what, told in (("started", "push, start, the answer"), ("output", f"… {OUTPUT}")):
        print(f"\n{told:26s}", *(f"{d:4d} ms" for d in DELAYS_MS), " trips  x ours  KB sent")
        for count in CHANGED:
            ours = 0.0
            for name in dict.fromkeys(name for _, name, _ in found):
                cells = [found[count, name, delay] for delay in DELAYS_MS]
                medians = [1000 * statistics.median(getattr(t, what) for t in c) for c in cells]
                slope = statistics.linear_regression(DELAYS_MS, medians).slope
                ours = ours or medians[-1]
                sent = statistics.median(t.sent for t in cells[0]) / 1000
                print(
                    f"{f'{count} of {FILES}':10s} {name:15s}",
                    *(f"{median:7.0f}" for median in medians),
                    f"{slope:6.1f} {medians[-1] / ours:7.1f} {sent:8.0f}",
                )
    print("\nours, in ms                ", *(f"{d:4d} ms" for d in DELAYS_MS))
    for count in CHANGED:
        for part in found[count, "ours", 0][0].parts:
            cells = [found[count, "ours", delay] for delay in DELAYS_MS]
            medians = [1000 * statistics.median(t.parts[part] for t in c) for c in cells]
            print(f"{f'{count} of {FILES}':10s} {part:15s}", *(f"{m:7.0f}" for m in medians))


def main() -> None:
    """Measure and print; whatever was started or written is gone afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for tool, package in ((SSHD, "openssh-server"), ("ssh", "openssh-client"), ("rsync", "rsync")):
        if not shutil.which(tool):
            sys.exit(f"{tool} is missing; install it (Debian: {package})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("SSH_AUTH_SOCK", None)
    with ExitStack() as stack:
        place = Place(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="push-"))))
        stack.callback(end_all, place.folder)
        line = make_host(place, stack)
        tools = make_tools(place, line, stack)
        found = measure(place, line, tools, rounds)
    show(found)


if __name__ == "__main__":
    main()

"""Jobs that die, fill the disk or will not die, and hosts that refuse: each is told as it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.paths import RunPaths
from orchestrator.runs import exit_code
from tests.ssh.desk import DEADLINE_S, HOME, Command, Desk, opened
from tests.ssh.machines import UID, Client, SshHost, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
MIB = 1 << 20

# Says which end it will take, and takes it.
ENDINGS = r"""
import json, os, signal, sys, time
from pathlib import Path

way = sys.argv[1]
print("now", way, flush=True)
if way == "raise":
    raise ValueError("no such luck")
if way == "exit":
    sys.exit(3)
if way == "os_exit":
    os._exit(9)
if way == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
if way == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "kill_worker":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if way == "kill_supervisor":
    record = Path(os.environ["RUN_DIR"], "supervisor.json")
    while not record.exists():
        time.sleep(0.02)
    os.kill(json.loads(record.read_bytes())["pid"], signal.SIGKILL)
    time.sleep(60)
if way == "daemon":
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        Path("daemon").touch()
        time.sleep(600)
    while not Path("daemon").exists():
        time.sleep(0.02)
if way == "bytes":
    sys.stdout.buffer.write(bytes(range(256)) * 4 + b"\nmetric caf\xe9=1\n\xff\xfe\r\n")
if way == "fill":
    with open("filler", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
if way == "flood":
    line = b"%09d " + b"x" * 89 + b"\n"
    for start in range(0, 2_000_000, 10_000):
        sys.stdout.buffer.write(b"".join(line % n for n in range(start, start + 10_000)))
    print("the last line", flush=True)
    sys.exit(3)
if way == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
    print("stays", flush=True)
    while True:
        time.sleep(1)
print("metric answer=42", flush=True)
"""


@pytest.fixture
def desk(tmp_path: Path, host: SshHost, client: Client) -> Iterator[Desk]:
    with opened(tmp_path, host, client) as desk:
        client.add("gpu8", host)
        desk.script.write_text(ENDINGS)
        yield desk


def nothing_is_left(desk: Desk) -> None:
    """No process on the host; its programs end when they see that their commands have."""
    wait_for(lambda: not desk.host.user_processes(), "the host's processes to end", DEADLINE_S)


# How it ends: why there is no answer (none where there is one), and the job's own exit code.
DEATHS = {
    "raise": ("my test.py ended with exit code 1; its last line: ValueError: no such luck", 1),
    "exit": ("my test.py ended with exit code 3; its last line: now exit", 1),
    "os_exit": ("my test.py ended with exit code 9; its last line: now os_exit", 1),
    "segv": ("my test.py was killed by SIGSEGV", 1),
    "kill": ("my test.py was killed by SIGKILL", 1),
    "kill_worker": ("the job was killed by SIGKILL; its last line: now kill_worker", None),
    "kill_supervisor": ("the job vanished: its supervisor is gone and wrote no exit.json", None),
    "daemon": (None, 0),
    "bytes": (None, 0),
}


def test_every_death_is_told_as_it_was(desk: Desk) -> None:
    ways = ",".join(f"[{way}]" for way in DEATHS)
    said = desk.ended(desk.start("-m", *desk.overrides(f"job.args={ways}")), code=1)
    assert "2 answered, 7 not answered" in said
    filed = desk.filed()
    folders = {RunPaths(f).log.read_bytes().split()[1].decode(): f for f in desk.runs()}
    assert set(folders) == set(DEATHS)
    for way, (reason, rc) in DEATHS.items():
        folder = folders[way]
        there = desk.there(folder)
        assert (folder / "log").read_bytes() == (there / "log").read_bytes()
        run = filed[folder.name]
        verdict = desk.verdict(folder)
        assert exit_code([folder]) == (1 if reason else 0)
        if reason is None:
            assert verdict["verdict"] == "measured"
            assert run.info.status == "FINISHED"
        else:
            assert verdict["verdict"] == "not_answered"
            assert reason in verdict["reason"]
            assert run.data.tags["verdict.reason"] == verdict["reason"]
            assert run.info.status == ("KILLED" if way == "kill_worker" else "FAILED")
        if way == "kill_supervisor":
            assert not (folder / "exit.json").exists()
            continue
        ending = json.loads((folder / "exit.json").read_bytes())
        assert ending["rc"] == rc
        assert ending["signal_name"] == ("SIGKILL" if way == "kill_worker" else None)
    log = RunPaths(folders["bytes"]).log.read_bytes()
    assert bytes(range(256)) * 4 + b"\nmetric caf\xe9=1\n\xff\xfe\r\n" in log
    assert "left processes behind" in (desk.there(folders["daemon"]) / "supervisor.log").read_text()
    nothing_is_left(desk)


def test_a_run_that_will_not_end_is_cancelled_with_all_it_started(desk: Desk) -> None:
    command, folder = desk.begin("job.args=[stubborn]")
    log = RunPaths(folder).log
    wait_for(
        lambda: log.read_bytes().count(b"stays\n") == 2, "the script and its child", DEADLINE_S
    )
    said = desk.verb("cancel", folder.name)
    assert f"{folder.name}  cancelled; no process of it is left" in said
    assert "not answered  the run was cancelled" in desk.ended(command, code=1)
    nothing_is_left(desk)
    assert desk.verdict(folder)["reason"] == "the run was cancelled"
    assert desk.filed()[folder.name].info.status == "KILLED"


@contextmanager
def small_disk(desk: Desk) -> Iterator[Path]:
    """A folder on the host with a disk of 300 MiB of its own, as seen from there."""
    place = Path(HOME, "small")
    options = f"size=300m,mode=700,uid={UID}"
    for command in (
        ["mkdir", str(place)],
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
    ):
        subprocess.run(desk.host.inside(*command), check=True)
    try:
        yield place
    finally:
        desk.close()
        subprocess.run(desk.host.inside("umount", "--lazy", str(place)), check=True)


def test_a_job_that_fills_its_disk_and_the_next_one_there(desk: Desk) -> None:
    with small_disk(desk) as place:
        command, folder = desk.begin("job.args=[fill]", f"host.work={place}")
        said = desk.ended(command, code=1)
        assert f"no space is left on the disk of {place}/runs/{folder.name}" in said
        log = desk.host.home / "small" / "runs" / folder.name / "log"
        assert RunPaths(folder).log.read_bytes() == log.read_bytes()
        nothing_is_left(desk)
        command, after = desk.begin("job.args=[bytes]", f"host.work={place}")
        said = desk.ended(command, code=2)
        assert re.search(rf"0\.0 GiB free below {place}, but .* are needed; make room", said)
        desk.assert_closed(folder, "no space is left on the disk")
        desk.assert_closed(after, "make room or set host.work")


def test_much_output_arrives_whole_and_takes_no_memory(desk: Desk) -> None:
    quiet, _ = desk.begin("job.args=[bytes]")
    loud, folder = desk.begin("job.args=[flood]")
    least, most = memory_of(quiet, loud)
    assert most < least + 64 * MIB
    desk.ended(quiet)
    assert "ended with exit code 3; its last line: the last line" in desk.ended(loud, code=1)
    log = RunPaths(folder).log
    assert log.stat().st_size > 200_000_000
    assert sha256(log) == sha256(desk.there(folder) / "log")
    files = Path(desk.filed()[folder.name].info.artifact_uri.removeprefix("file://"))
    assert sha256(files / "log") == sha256(log)


def memory_of(*commands: Command) -> list[int]:
    """The most memory that each of the commands has used until it ended, in bytes."""
    most = [0] * len(commands)
    while any(command.process.poll() is None for command in commands):
        for number, command in enumerate(commands):
            with suppress(OSError):  # ended, and asked for its exit code
                status = Path(f"/proc/{command.process.pid}/status").read_text()
                if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                    most[number] = int(found[1]) << 10
        time.sleep(0.02)
    return most


def sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(MIB):
            hasher.update(part)
    return hasher.hexdigest()


def test_eight_at_once_push_run_and_file(desk: Desk) -> None:
    large = desk.folder / "large"
    large.write_bytes(os.urandom(16 * MIB))
    arguments = desk.overrides("job.args=[bytes]", f"job.files=[{large}]")
    commands = [desk.start(*arguments) for _ in range(8)]
    for command in commands:
        desk.ended(command)
    assert len(desk.runs()) == 8
    filed = desk.filed()
    for folder in desk.runs():
        assert desk.verdict(folder)["verdict"] == "measured"
        assert filed[folder.name].data.metrics["answer"] == 42
        assert RunPaths(folder).log.read_bytes() == (desk.there(folder) / "log").read_bytes()
    assert not list((desk.work / "tmp").iterdir())
    assert len(list((desk.work / "inputs").iterdir())) == 1
    nothing_is_left(desk)


TORCHLESS = "/usr/bin/python3"
REFUSALS = {
    "python": (["host.python=/nowhere/python"], "/nowhere/python cannot be run there"),
    "path": (
        ["job.where=host", "job.path=/nowhere/test.py"],
        "/nowhere/test.py does not exist there; name it by its path on the host",
    ),
    "torch": (
        ["+experiment=layers_m1_2_30", "job=drafter_test", f"host.python={TORCHLESS}"],
        f"torch is not installed for {TORCHLESS}; install it there or set host.python",
    ),
}


def test_a_host_that_cannot_take_the_job_is_bad_input(desk: Desk) -> None:
    began = {}
    for name, (settings, _) in REFUSALS.items():
        arguments = desk.overrides(*settings)
        if name == "torch":
            arguments = [a for a in arguments if not a.startswith(("job.path", "job.args"))]
        known = set(desk.runs())
        command = desk.start(*arguments)
        folder = wait_for(lambda known=known: set(desk.runs()) - known, "a run", DEADLINE_S).pop()
        began[name] = command, folder
    for command, _ in began.values():
        assert "Traceback" not in desk.ended(command, code=2)
    for name, (_, folder) in began.items():
        desk.assert_closed(folder, REFUSALS[name][1])
        assert not desk.there(folder).exists()


def test_a_work_folder_that_cannot_be_written_is_bad_input(desk: Desk) -> None:
    command, folder = desk.begin("host.work=/root/work")
    desk.ended(command, code=2)
    desk.assert_closed(folder, "/root/work: Permission denied; set host.work to")

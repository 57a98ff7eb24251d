"""The host's program: what it stores is whole, what it starts outlives it, what it says is so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import host as program
from jobs.host import derive_state, identity, members, tree_digest
from orchestrator.channel import PROGRAM, Channel, RefusedError, Request, open_local

Eventually = Callable[..., Any]
RequestOf = Callable[..., dict[str, Any]]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "work on host"


@pytest.fixture
def channel(root: Path, is_running: Callable[[int], bool]) -> Iterator[Channel]:
    with open_local(root, sys.executable) as opened:
        yield opened
    for record in root.glob("runs/*/spawn.json"):
        who = json.loads(record.read_text())
        for pid in [who["pid"], *members(who)]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "root"


@pytest.fixture(scope="module")
def shared(shared_root: Path) -> Iterator[Channel]:
    """One program for all that is refused: it must stay in step through every one of them."""
    with open_local(shared_root, sys.executable) as opened:
        yield opened


def tree(files: dict[str, bytes], mode: int = 0o644) -> dict[str, Any]:
    listed = {path: {"hash": sha(data), "mode": mode} for path, data in files.items()}
    digest = tree_digest((path, mode, sha(data)) for path, data in files.items())
    return {"kind": "snapshots", "digest": digest, "files": listed}


def put_all(channel: Channel, files: dict[str, bytes]) -> None:
    for data in files.values():
        channel.request("put", hash=sha(data), payload=data)


def files_below(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def refused(channel: Channel, op: str, *, payload: bytes = b"", **fields: Any) -> tuple[str, str]:
    with pytest.raises(RefusedError) as caught:
        channel.request(op, payload=payload, **fields)
    assert "\n" not in str(caught.value)
    return caught.value.kind, str(caught.value)


# -- hello and the store -----------------------------------------------------------------------


def test_hello_says_who_answers(channel: Channel, root: Path) -> None:
    header = channel.hello()
    assert header["program"] == sha(PROGRAM.read_bytes())
    assert header["root"] == str(root)
    assert header["boot_id"] == program.boot_id()
    assert header["free"] > 0


def test_content_is_missing_until_it_is_put(channel: Channel, root: Path) -> None:
    data, other = b"x" * 3_000_000, sha(b"other")
    assert channel.request("missing", hashes=[sha(data), other]).header["missing"] == [
        sha(data),
        other,
    ]
    assert channel.request("put", hash=sha(data), payload=data).header["stored"] is True
    assert channel.request("put", hash=sha(data), payload=data).header["stored"] is False
    assert channel.request("missing", hashes=[sha(data), other]).header["missing"] == [other]
    assert (root / "store" / sha(data)[:2] / sha(data)[2:]).read_bytes() == data


def test_corrupt_content_is_refused_and_the_stream_stays_in_step(
    channel: Channel, root: Path
) -> None:
    kind, sentence = refused(channel, "put", payload=b"y" * 200_000, hash=sha(b"x"))
    assert kind == "corrupt"
    assert sha(b"x") in sentence
    assert files_below(root) == []
    assert channel.hello()["pid"]


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "ABC", "0" * 63, "0" * 63 + "G", None])
def test_a_name_that_is_no_hash_is_refused(shared: Channel, shared_root: Path, name: Any) -> None:
    before = files_below(shared_root.parent)
    assert refused(shared, "put", payload=b"x" * 100_000, hash=name)[0] == "request"
    assert shared.hello()["pid"]
    assert files_below(shared_root.parent) == before


def test_a_client_that_hangs_up_in_the_middle_leaves_no_file(root: Path) -> None:
    data = b"z" * 1_000_000
    header = {"op": "put", "hash": sha(data), "payload": len(data)}
    command = [sys.executable, "-I", "-u", str(PROGRAM), "--root", str(root)]
    cut = json.dumps(header).encode() + b"\n" + data[:700_000]
    done = subprocess.run(command, input=cut, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert files_below(root) == []


def test_a_full_disk_is_one_sentence_and_no_file(
    root: Path, tiny_disk: Callable[[str, str], Path]
) -> None:
    tiny_disk(root.name, "256k")
    with open_local(root, sys.executable) as channel:
        big, small = os.urandom(1_000_000), b"small"
        kind, sentence = refused(channel, "put", payload=big, hash=sha(big))
        assert kind == "full"
        assert "No space left on device; free some space" in sentence
        assert files_below(root) == []
        assert channel.request("put", hash=sha(small), payload=small).ok


def test_an_unknown_op_is_refused_and_a_broken_request_is_no_crash(channel: Channel) -> None:
    assert refused(channel, "format_disk", payload=b"x" * 10)[0] == "request"
    assert refused(channel, "missing", hashes="abc")[0] == "request"
    assert refused(channel, "missing")[0] == "request"
    assert channel.hello()["pid"]


# -- trees -------------------------------------------------------------------------------------


def test_a_tree_is_laid_out_from_the_store(channel: Channel, root: Path) -> None:
    files = {"jobs/a.py": b"a", "jobs/deep/b.py": b"b"}
    put_all(channel, files)
    reply = channel.request("lay_out", **tree(files))
    path = Path(reply.header["path"])
    assert path.parent == root / "snapshots"
    assert {name: (path / name).read_bytes() for name in files} == files
    assert (path / "jobs/a.py").stat().st_ino == (
        root / "store" / sha(b"a")[:2] / sha(b"a")[2:]
    ).stat().st_ino
    again = channel.request("lay_out", **tree(files)).header
    assert (again["path"], again["built"]) == (str(path), False)
    assert list((root / "tmp").iterdir()) == []


def test_an_executable_file_does_not_make_its_twin_executable(channel: Channel) -> None:
    put_all(channel, {"x": b"twin"})
    plain = Path(channel.request("lay_out", **tree({"x": b"twin"})).header["path"])
    runs = Path(channel.request("lay_out", **tree({"x": b"twin"}, 0o755)).header["path"])
    assert not (plain / "x").stat().st_mode & 0o111
    assert (runs / "x").stat().st_mode & 0o111


def test_a_tree_without_its_content_names_what_is_missing(channel: Channel, root: Path) -> None:
    put_all(channel, {"a": b"a"})
    with pytest.raises(RefusedError) as caught:
        channel.request("lay_out", **tree({"a": b"a", "b": b"b"}))
    assert caught.value.kind == "missing"
    assert caught.value.header["missing"] == [sha(b"b")]
    assert not (root / "snapshots").exists()


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../out", "a/../../out", "", "a//b", "./a", "a/", "..", "a\0b", "a/./b"],
)
def test_a_path_that_may_leave_the_tree_is_refused(
    shared: Channel, shared_root: Path, path: str
) -> None:
    put_all(shared, {"a": b"a"})
    before = files_below(shared_root.parent)
    assert refused(shared, "lay_out", **tree({path: b"a"}))[0] == "request"
    assert files_below(shared_root.parent) == before


def test_a_digest_that_is_not_that_of_the_files_is_refused(channel: Channel) -> None:
    put_all(channel, {"a": b"a"})
    request = {**tree({"a": b"a"}), "digest": sha(b"something else")}
    assert refused(channel, "lay_out", **request)[0] == "request"
    assert refused(channel, "lay_out", **{**request, "kind": "../runs"})[0] == "request"


def test_a_file_below_a_file_is_refused_and_leaves_nothing(channel: Channel, root: Path) -> None:
    put_all(channel, {"a": b"a"})
    refused(channel, "lay_out", **tree({"a": b"a", "a/b": b"a"}))
    assert list((root / "tmp").iterdir()) == []


def test_builders_of_the_same_tree_at_once_all_get_it(channel: Channel, root: Path) -> None:
    files = {f"jobs/{i}.py": str(i).encode() for i in range(100)}
    put_all(channel, files)
    paths: list[str] = []

    def build() -> None:
        with open_local(root, sys.executable) as own:
            own.hello()
            barrier.wait()
            paths.append(own.request("lay_out", **tree(files)).header["path"])

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert len(list(Path(paths[0]).rglob("*.py"))) == 100
    assert list((root / "tmp").iterdir()) == []


def test_a_snapshot_that_was_edited_on_the_host_is_not_run(channel: Channel) -> None:
    files = {"jobs/a.py": b"as pushed"}
    put_all(channel, files)
    path = Path(channel.request("lay_out", **tree(files)).header["path"]) / "jobs/a.py"
    path.unlink()
    path.write_bytes(b"edited")
    assert channel.request("lay_out", **tree(files)).header["built"] is True
    assert path.read_bytes() == b"as pushed"
    # Edited in place, the blob behind the link is damaged too: it must be sent again.
    path.chmod(0o644)
    path.write_bytes(b"edited")
    assert refused(channel, "lay_out", **tree(files))[0] == "missing"
    put_all(channel, files)
    channel.request("lay_out", **tree(files))
    assert path.read_bytes() == b"as pushed"


# -- runs --------------------------------------------------------------------------------------


@pytest.fixture
def start(channel: Channel, snapshot: Path, request_of: RequestOf) -> Callable[..., Request]:
    """Lays the snapshot out; returns the request that starts a run of it."""
    files = {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*.py")}
    put_all(channel, files)
    path = channel.request("lay_out", **tree(files)).header["path"]

    def build(*cases: dict[str, Any], run_id: str = "run-1", **fields: Any) -> Request:
        request = request_of(*cases, run_id=run_id)
        common = {"run_id": run_id, "snapshot": path, "python": sys.executable, "env": {}}
        return Request(
            op="start", fields={**common, **fields}, payload=json.dumps(request).encode()
        )

    return build


def state_of(channel: Channel, run_id: str = "run-1") -> dict[str, Any]:
    state: dict[str, Any] = channel.request("follow", run_id=run_id).header["state"]
    return state


def test_a_run_goes_from_start_to_its_result(
    channel: Channel, root: Path, start: Callable[..., Request], eventually: Eventually
) -> None:
    (reply,) = channel.pipeline([start({"do": "ok"})])
    assert reply.header["run_dir"] == str(root / "runs" / "run-1")
    state = eventually(lambda: (s := state_of(channel))["state"] == "finished" and s)
    assert state["rc"] == 0
    read = channel.request("read", run_id="run-1", path="results/case-0.json")
    assert json.loads(read.payload)["status"] == "ok"
    assert read.header["size"] == len(read.payload)
    part = channel.request("read", run_id="run-1", path="results/case-0.json", offset=1, limit=3)
    assert part.payload == read.payload[1:4]
    names = {path.name for path in (root / "runs" / "run-1").iterdir()}
    assert {"request.json", "log", "events.jsonl", "exit.json", "environment.json"} <= names
    (listed,) = channel.request("list").header["runs"]
    assert (listed["run_id"], listed["state"], listed["rc"]) == ("run-1", "finished", 0)


def test_a_run_is_started_once_and_its_id_is_its_own(
    channel: Channel, root: Path, start: Callable[..., Request], eventually: Eventually
) -> None:
    replies = channel.pipeline([start({"do": "ok"}), start({"do": "ok"})])
    assert [reply.header["started"] for reply in replies] == [True, False]
    eventually(lambda: state_of(channel)["state"] == "finished")
    log = (root / "runs/run-1/events.jsonl").read_text()
    assert log.count('"started"') == 1
    with pytest.raises(RefusedError, match="already another run run-1"):
        channel.pipeline([start({"do": "error"})])


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../x", "a b", "$(x)", "x" * 121, "a\n"])
def test_a_hostile_run_id_is_refused(shared: Channel, shared_root: Path, run_id: str) -> None:
    refused(shared, "start", run_id="", payload=b"{}")  # the program is there, and so is its folder
    before = sorted(shared_root.parent.rglob("*"))
    assert refused(shared, "start", run_id=run_id, payload=b"{}")[0] == "request"
    assert sorted(shared_root.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"python": "/no/such/python"}, "python", "/no/such/python cannot be run"),
        ({"snapshot": "/tmp"}, "missing", "is no snapshot"),
        ({"env": {"A": 1}}, "request", "'A'"),
        ({"env": {"A=B": "x"}}, "request", "'A=B'"),
    ],
)
def test_a_start_that_fails_leaves_the_run_id_free(
    channel: Channel,
    root: Path,
    start: Callable[..., Request],
    fields: dict[str, Any],
    kind: str,
    words: str,
) -> None:
    with pytest.raises(RefusedError) as caught:
        channel.pipeline([start({"do": "ok"}, **fields)])
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert not (root / "runs" / "run-1").exists()


def test_a_request_for_another_run_is_refused(
    channel: Channel, start: Callable[..., Request]
) -> None:
    request = start({"do": "ok"})
    for payload in (b"{}", b"[]", b"no json", b'{"run_id": "run-2"}'):
        broken = Request(op="start", fields=request.fields, payload=payload)
        with pytest.raises(RefusedError, match=r"request\.json"):
            channel.pipeline([broken])


def test_hostile_values_reach_the_job_as_they_are(
    channel: Channel, start: Callable[..., Request], eventually: Eventually
) -> None:
    env = {"A": "a; echo INJECTED #", "B": "two words", "C": "$(id)\n'\"", "PYTHONSAFEPATH": ""}
    channel.pipeline([start({"do": "env", "names": ["A", "B", "C"]}, env=env)])
    eventually(lambda: state_of(channel)["state"] == "finished")
    reply = channel.request("read", run_id="run-1", path="results/case-0.json")
    wiring = json.loads(reply.payload)["wiring"]
    assert wiring == {name: env[name] for name in "ABC"}


def test_a_run_outlives_the_program_that_started_it(
    root: Path, channel: Channel, start: Callable[..., Request], eventually: Eventually
) -> None:
    with open_local(root, sys.executable) as first:
        first.pipeline([start({"do": "gate"})])
        pid = first.hello()["pid"]
    # open_local has waited for the end of the program and of its streams; the job goes on.
    assert not Path(f"/proc/{pid}").exists()
    eventually(lambda: state_of(channel)["state"] == "running")
    (root / "runs/run-1/go").touch()
    assert eventually(lambda: (s := state_of(channel))["state"] == "finished" and s)["rc"] == 0


def test_follow_brings_bytes_once_and_waits_for_more(
    channel: Channel, root: Path, start: Callable[..., Request]
) -> None:
    channel.pipeline([start({"do": "say", "text": "hello"}, {"do": "gate"})])
    offsets = {"log": 0, "events.jsonl": 0}
    got = {"log": b"", "events.jsonl": b""}
    seen = None
    deadline = time.monotonic() + 20
    while seen != "finished":
        assert time.monotonic() < deadline
        reply = channel.request(
            "follow",
            run_id="run-1",
            offsets=offsets,
            seen=[seen] if seen else [],
            wait_s=10,
            limit=16,
        )
        rest = reply.payload
        for name, size in reply.header["chunks"].items():
            assert size <= 16
            got[name] += rest[:size]
            rest = rest[size:]
            offsets[name] += size
        assert rest == b""
        if offsets == reply.header["sizes"]:
            seen = reply.header["state"]["state"]
        if b"at the gate" in got["events.jsonl"]:
            (root / "runs/run-1/go").touch()
    assert got["log"] == b"hello\n"
    assert got["events.jsonl"] == (root / "runs/run-1/events.jsonl").read_bytes()


def test_follow_gives_way_to_the_next_request(
    channel: Channel, start: Callable[..., Request], eventually: Eventually
) -> None:
    channel.pipeline([start({"do": "gate"})])
    eventually(lambda: state_of(channel)["state"] == "running")
    # A first request that did not give way would stay unanswered for longer than this.
    channel._deadline_s = 20.0
    waiting = Request(op="follow", fields={"run_id": "run-1", "wait_s": 60, "seen": ["running"]})
    _, cancelled = channel.pipeline(
        [waiting, Request(op="signal", fields={"run_id": "run-1", "signal": "TERM"})]
    )
    assert cancelled.header["signalled"]


def test_a_cancel_right_behind_the_start_is_not_lost(
    channel: Channel, start: Callable[..., Request], eventually: Eventually
) -> None:
    cancel = Request(op="signal", fields={"run_id": "run-1", "signal": "TERM"})
    channel.pipeline([start({"do": "gate"}), cancel])
    state = eventually(lambda: (s := state_of(channel))["state"] in program.OVER and s)
    assert state["state"] == "cancelled"
    assert channel.pipeline([cancel])[0].header["signalled"] == []


def test_kill_leaves_nothing_of_a_stubborn_family(
    channel: Channel,
    root: Path,
    start: Callable[..., Request],
    eventually: Eventually,
    is_running: Callable[[int], bool],
) -> None:
    channel.pipeline([start({"do": "gate", "family": True})])
    run_dir = root / "runs/run-1"
    eventually(lambda: "at the gate" in read_text(run_dir / "events.jsonl"))
    pids = [int(read_text(run_dir / f"{name}.pid")) for name in ("grandchild", "daemon")]
    reply = channel.request("signal", run_id="run-1", signal="KILL")
    assert reply.header["left"] == []
    assert set(pids) <= set(reply.header["signalled"])
    eventually(lambda: not any(map(is_running, pids)))
    state = eventually(lambda: (s := state_of(channel))["state"] == "vanished" and s)
    assert "a cancel had been asked for" in state["reason"]


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "", "log/../../x", None])
def test_a_path_outside_the_run_is_refused(shared: Channel, shared_root: Path, path: Any) -> None:
    (shared_root / "runs/run-1").mkdir(parents=True, exist_ok=True)
    assert refused(shared, "read", run_id="run-1", path=path)[0] == "request"


def test_what_is_not_there_is_told_as_missing(channel: Channel, root: Path) -> None:
    (root / "runs/run-1").mkdir(parents=True)
    os.mkfifo(root / "runs/run-1/pipe")
    assert refused(channel, "read", run_id="run-1", path="log")[0] == "missing"
    assert refused(channel, "read", run_id="run-1", path="pipe")[0] == "missing"
    for op in ("read", "follow", "signal"):
        assert refused(channel, op, run_id="run-2", path="log", signal="TERM")[0] == "missing"


# -- states ------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


def test_a_young_folder_is_queued_and_an_old_one_vanished(run_dir: Path) -> None:
    now = run_dir.stat().st_mtime
    assert derive_state(run_dir, now)["state"] == "queued"
    assert derive_state(run_dir, now + 3600)["state"] == "vanished"


def test_a_living_process_is_starting_then_running(run_dir: Path) -> None:
    write(run_dir / "spawn.json", identity(os.getpid()))
    assert derive_state(run_dir)["state"] == "starting"
    write(run_dir / "supervisor.json", {**identity(os.getpid()), "pgid": 1, "started": 2.0})
    assert derive_state(run_dir)["state"] == "running"
    write(run_dir / "cancel", {})
    assert derive_state(run_dir)["cancel_requested"] is True


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}])
def test_a_pid_that_is_somebody_elses_by_now_is_vanished(
    run_dir: Path, change: dict[str, Any]
) -> None:
    write(run_dir / "supervisor.json", {**identity(os.getpid()), **change})
    (run_dir / "supervisor.log").write_text("warming up\ncannot go on\n\n")
    state = derive_state(run_dir)
    assert state["state"] == "vanished"
    assert "cannot go on" in state["reason"]
    assert members({**identity(os.getpid()), **change}) == []


@pytest.mark.parametrize("record", ["supervisor.json", "spawn.json"])
def test_an_ending_written_while_we_look_is_never_taken_for_vanished(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    write(run_dir / record, {**identity(os.getpid()), "start_ticks": 1})
    really = program.is_alive

    def ends_meanwhile(who: dict[str, Any]) -> bool:
        write(run_dir / "exit.json", {"state": "finished", "rc": 0})
        return really(who)

    monkeypatch.setattr(program, "is_alive", ends_meanwhile)
    assert derive_state(run_dir)["state"] == "finished"


def test_a_damaged_record_does_not_hide_the_other_runs(channel: Channel, root: Path) -> None:
    for name, text in (("a", '{"state": "fini'), ("b", '{"state": "finished", "rc": 0}')):
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "exit.json").write_text(text)
    damaged, whole = channel.request("list").header["runs"]
    assert damaged["state"] == "vanished"
    assert "damaged" in damaged["reason"]
    assert (whole["run_id"], whole["state"]) == ("b", "finished")


def test_old_leftovers_in_tmp_are_dropped_and_new_ones_kept(root: Path) -> None:
    for name, age in (("old", 2 * program.STALE_S), ("new", 0)):
        (root / "tmp" / name).mkdir(parents=True)
        os.utime(root / "tmp" / name, (time.time() - age,) * 2)
    with open_local(root, sys.executable) as channel:
        channel.hello()
    assert [path.name for path in (root / "tmp").iterdir()] == ["new"]


def test_a_root_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-I", "-u", str(PROGRAM), "--root", str(tmp_path / "file/root")]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    with contextlib.suppress(FileNotFoundError):
        assert b"Traceback" not in done.stderr


def test_what_a_run_started_is_found_by_its_mark_or_its_output(tmp_path: Path) -> None:
    run_dir = tmp_path / "run ü"
    run_dir.mkdir()
    (tmp_path / "link").symlink_to(run_dir)
    mark = {**os.environ, program.MARK: str(run_dir)}
    with (run_dir / "log").open("ab") as log:
        started = [
            subprocess.Popen(["sleep", "60"], env=mark),
            subprocess.Popen(["env", "-i", "sleep", "60"], stdout=log),
            subprocess.Popen(["env", "-i", "sleep", "60"], stderr=log),
            subprocess.Popen(["sleep", "60"]),
        ]
    try:
        mine = sorted(process.pid for process in started[:3])
        assert program.marked(tmp_path / "link") == mine
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert program.marked(run_dir) == []


def test_a_run_is_not_started_without_its_inputs(
    channel: Channel, root: Path, start: Callable[..., Request]
) -> None:
    needs = [f"inputs/{'0' * 64}"]
    with pytest.raises(RefusedError, match=r"inputs/0+ is not laid out"):
        channel.pipeline([start({"do": "ok"}, needs=needs)])
    assert not (root / "runs" / "run-1").exists()


def test_a_run_that_is_forgone_is_never_started_and_a_started_one_is_left_alone(
    channel: Channel, root: Path, start: Callable[..., Request], eventually: Eventually
) -> None:
    forgone = channel.request("forgo", run_id="run-1").header["state"]
    assert forgone["state"] == "never_started"
    with pytest.raises(RefusedError, match="already another run run-1"):
        channel.pipeline([start({"do": "ok"})])
    assert state_of(channel)["state"] == "never_started"
    channel.pipeline([start({"do": "gate"}, run_id="run-2")])
    eventually(lambda: state_of(channel, "run-2")["state"] == "running")
    assert channel.request("forgo", run_id="run-2").header["state"]["state"] == "running"
    (root / "runs" / "run-2" / "go").touch()
    eventually(lambda: state_of(channel, "run-2")["state"] == "finished")

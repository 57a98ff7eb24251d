"""The host's one small program, spoken to over its stdin and stdout.

    python -I -u host.py --root WORK

A request is one line of JSON, `{"op": …, "payload": n}`, and n bytes behind it; so is a reply,
`{"ok": true, …, "payload": n}` or `{"ok": false, "kind": …, "error": one sentence}`. Requests may
be sent ahead; replies come in their order. A refused request leaves the stream in step. The end of
stdin ends the program; what it has started goes on.

Below WORK: `store/` (blobs by sha256), `snapshots/` and `inputs/` (trees by digest), `runs/` and
`tmp/`.
Linux, Python 3.10 or newer, standard library only: this file goes to a host alone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

VERSION = 1
CHUNK = 1 << 20
MAX_HEADER = 64 << 20
MAX_READ = 64 << 20
MAX_WAIT_S = 60.0
STALL_S = 30.0  # without a byte in the middle of a request, the client is taken for gone
YOUNG_S = 60.0  # how long a run folder may stand without any trace of its supervisor
PART = 8 << 20  # content of this size and more goes on where a cut connection left it
PROBE_S = 40.0  # less than a client waits
# A person's json.py in the current folder, where `python -` would look first, is not meant.
FROM_STDIN = "import sys; sys.path[:] = filter(None, sys.path); exec(sys.stdin.buffer.read())"
LITTLE = 1 << 16  # bytes: a disk with less is full
MARK = "ORCHESTRATOR_RUN"  # in the environment of all that a run starts: its folder
STALE_S = 86_400.0  # a temporary name older than this belongs to a program that was killed
OVER = frozenset({"finished", "killed", "timed_out", "cancelled", "vanished", "never_started"})
KINDS = ("snapshots", "inputs")
RUN_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,120}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

Fields = dict[str, Any]
Answer = tuple[Fields, bytes]


class RequestError(Exception):
    """A request that cannot be granted: its kind, one sentence, and more fields for the reply."""

    def __init__(self, kind: str, sentence: str, **more: object) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.more = more


class ClientGoneError(Exception):
    """The client is gone."""


# -- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Process:
    """One line of /proc/PID/stat; `start_ticks` is the start time in clock ticks since boot."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    dead: bool


def process(pid: int) -> Process | None:
    """The process with this pid, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may hold anything, brackets included.
    fields = text[text.rindex(")") + 1 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        dead=fields[0] in "ZX",
    )


def boot_id() -> str:
    """This boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identity(pid: int) -> Fields:
    """What tells this process from a later one with the same pid."""
    found = process(pid)
    return {
        "pid": pid,
        "start_ticks": found.start_ticks if found else None,
        "boot_id": boot_id(),
    }


def is_alive(record: Fields) -> bool:
    """Whether the process of this `identity` still runs (a zombie does not)."""
    found = process(int(record["pid"]))
    return (
        found is not None
        and not found.dead
        and found.start_ticks == record["start_ticks"]
        and boot_id() == record["boot_id"]
    )


def members(record: Fields, known: Iterable[int] = ()) -> list[int]:
    """Living processes of the session that this `identity` leads, and all its descendants.

    The leader itself is left out. A child that made a session of its own is found as long as its
    chain of parents reaches the leader, which a child-subreaper sees to, or one of those `known` to
    be members.
    """
    if boot_id() != record["boot_id"]:
        return []
    table = {
        int(entry.name): found
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (found := process(int(entry.name)))
    }
    leader_pid = int(record["pid"])
    leader = table.pop(leader_pid, None)
    if leader is not None and leader.start_ticks != record["start_ticks"]:
        return []  # somebody else's by now, and so is the session of that number
    family = ({leader_pid} if leader is not None else set()) | (set(known) & table.keys())
    grown = True
    while grown:
        young = {p.pid for p in table.values() if p.parent in family} - family
        family |= young
        grown = bool(young)
    return sorted(
        p.pid for p in table.values() if not p.dead and (p.pid in family or p.session == leader_pid)
    )


def marked(run_dir: Path) -> list[int]:
    """Living processes that this run started, its supervisor too, whatever became of their parents.

    They are known by the mark in their environment, or, since some overwrite that with a title of
    their own, by the run's log as their output.
    """
    run_dir = Path(os.path.realpath(run_dir))
    mark, log = f"{MARK}={run_dir}".encode(), str(run_dir / "log")
    found = []
    for entry in Path("/proc").iterdir():
        # Another user's process cannot be read, and was not started from here.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (
                mark in (entry / "environ").read_bytes().split(b"\0")
                or any(leads_to(entry / "fd" / fd, log) for fd in "12")
            ):
                found.append(int(entry.name))
    return sorted(found)


def leads_to(link: Path, path: str) -> bool:
    """Whether a link of /proc leads there; one that is not there does not."""
    try:
        return str(link.readlink()) == path
    except OSError:
        return False


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signals each of these processes; one that has just gone is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# -- the state of a run ------------------------------------------------------------------------


def read_json(path: Path) -> Fields | None:
    """A JSON object that was written atomically; None where there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RequestError(
            "broken", f"{path} is not JSON: {error}; the run's record is damaged"
        ) from None
    if not isinstance(value, dict):
        raise RequestError("broken", f"{path} is not a JSON object; the run's record is damaged")
    return value


def derive_state(run_dir: Path, now: float | None = None) -> Fields:
    """The run's state, from its folder and from /proc alone.

    `state` is queued, starting, running, finished, killed, timed_out, cancelled, vanished or, where
    it was forgone, never_started. Vanished comes with a `reason`, and queued with `waiting_for` where
    it waits for a lease. An ended run carries all of exit.json.
    """
    run_dir = Path(run_dir)
    ended = read_json(run_dir / "exit.json")
    if ended is not None:
        return ended
    asked = {"cancel_requested": True} if (run_dir / "cancel").exists() else {}
    running = read_json(run_dir / "supervisor.json")
    if running is not None:
        alive = {"state": "running", **running, **asked}
        reason = "its supervisor is gone and wrote no exit.json"
        gone = not is_alive(running)
    elif (queued := read_json(run_dir / "queue.json")) is not None:
        alive = {"state": "queued", **queued, **asked}
        reason = f"its supervisor is gone; it was waiting for {queued.get('waiting_for')}"
        gone = not is_alive(queued)
    elif (spawned := read_json(run_dir / "spawn.json")) is not None:
        alive = {"state": "starting", **spawned, **asked}
        reason = "its supervisor ended before it could start the job"
        gone = not is_alive(spawned)
    else:
        alive = {"state": "queued", **asked}
        reason = "no supervisor was ever started for it"
        age = (time.time() if now is None else now) - run_dir.stat().st_mtime
        gone = age > YOUNG_S
    if not gone:
        return alive
    # A supervisor writes exit.json and goes: it may have done both since we looked for the file.
    ended = read_json(run_dir / "exit.json")
    if ended is not None:
        return ended
    if asked:
        reason += " (a cancel had been asked for)"
    if shutil.disk_usage(run_dir).free < LITTLE:
        reason += f"; no space is left on the disk of {run_dir}, so it could not be written"
    if last := last_line(run_dir / "supervisor.log"):
        reason += f"; the last line of supervisor.log: {last}"
    return {**alive, "state": "vanished", "reason": reason}


def last_line(path: Path) -> str:
    """The last line of a small log that is not empty, cut to 300 characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


# -- frames ------------------------------------------------------------------------------------


class Wire:
    """Frames on two file descriptors; its own buffer, so that `pending` can be answered."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._buffer = b""
        self.inside = False  # a request has begun and has not been answered

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        if not self._buffer:
            # A network that went away says nothing: what a dead client holds must become free.
            if self.inside and not select.select([self._source], [], [], STALL_S)[0]:
                raise ClientGoneError
            self._buffer = os.read(self._source, CHUNK)
            if not self._buffer:
                raise ClientGoneError
        self.inside = True
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def readline(self) -> bytes:
        """One line with its end."""
        parts: list[bytes] = []
        while True:
            part = self.read(MAX_HEADER)
            line, end, rest = part.partition(b"\n")
            parts.append(line)
            if end:
                self._buffer = rest
                return b"".join(parts)
            if sum(map(len, parts)) > MAX_HEADER:
                raise ClientGoneError

    def pending(self, wait_s: float) -> bool:
        """Whether the client has sent more, or hung up, within `wait_s` seconds."""
        return bool(self._buffer) or bool(select.select([self._source], [], [], wait_s)[0])

    def reply(self, header: Fields, payload: bytes = b"") -> None:
        """One reply; raises ClientGoneError when nobody reads it."""
        self.inside = False
        line = json.dumps({**header, "payload": len(payload)}).encode() + b"\n"
        left = memoryview(line + payload)
        try:
            while left:
                left = left[os.write(self._sink, left) :]
        except BrokenPipeError:
            raise ClientGoneError from None


class Payload:
    """The bytes behind one request's header."""

    def __init__(self, wire: Wire, size: int) -> None:
        self._wire = wire
        self.left = size

    def read(self, size: int = CHUNK) -> bytes:
        """Up to `size` bytes, b"" at the payload's end."""
        if not self.left:
            return b""
        part = self._wire.read(min(size, self.left))
        self.left -= len(part)
        return part

    def all(self) -> bytes:
        """What is left of it."""
        return b"".join(iter(self.read, b""))


# -- checks ------------------------------------------------------------------------------------


def field(request: Fields, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A typed field of a request; required where no default is given."""
    value = request.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError("request", f"the request's field {name!r} is missing or of a wrong type")
    return value


def sha256_name(value: object) -> str:
    """A sha256 in hex, lower case."""
    if not isinstance(value, str) or not SHA256.fullmatch(value):
        raise RequestError("request", f"{value!r} is not a sha256 in lower-case hex")
    return value


def relative_path(value: object) -> PurePosixPath:
    """A path that stays below the folder it will be joined to."""
    if not isinstance(value, str) or "\0" in value:
        raise RequestError("request", f"{value!r} is not a path")
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise RequestError("request", f"{value!r} is not a plain relative path")
    return PurePosixPath(value)


def tree_digest(files: Iterable[tuple[str, int, str]]) -> str:
    """sha256 over the sorted lines `path NUL mode-in-octal NUL sha256 newline`."""
    lines = [f"{path}\0{mode:o}\0{sha}\n" for path, mode, sha in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hash_file(path: Path) -> str | None:
    """sha256 of a file's content; None where it is not a readable file."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                hasher.update(part)
    except OSError:
        return None
    return hasher.hexdigest()


def os_refusal(error: OSError) -> RequestError:
    """The kind and the sentence for what the operating system refused."""
    kind, advice = "os", ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind, advice = "full", "; free some space there, or name another work folder"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        kind, advice = "denied", "; make it writable for this user, or name another work folder"
    where = f"{error.filename}: " if error.filename else ""
    return RequestError(kind, f"{where}{error.strerror or error}{advice}")


def clipped(value: float, low: float, high: float) -> float:
    """`value` where it lies between the two, else the nearer one."""
    return max(low, min(high, value))


def write_atomic(path: Path, data: bytes) -> None:
    """The whole file under its final name, or no file."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temp.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        error.filename = str(path)
        raise


# -- the program -------------------------------------------------------------------------------


class Host:
    """The operations: each takes a request, its `payload` replaced by a Payload, and answers it."""

    def __init__(self, root: Path, wire: Wire) -> None:
        self.root = root
        self.wire = wire
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self.operations: dict[str, Callable[[Fields], Answer]] = {
            "hello": self.hello,
            "missing": self.missing,
            "put": self.put,
            "lay_out": self.lay_out,
            "probe": self.probe,
            "start": self.start,
            "forgo": self.forgo,
            "follow": self.follow,
            "read": self.read,
            "signal": self.signal,
            "list": self.list_runs,
        }

    def serve(self) -> None:
        """Answers requests until the client hangs up."""
        while True:
            header = json.loads(self.wire.readline())
            if not isinstance(header, dict):
                raise ValueError(f"not an object but {header!r:.80}")
            payload = Payload(self.wire, int(header.get("payload", 0)))
            # A supervisor that ended stays a zombie until its parent, this program, asks for it.
            self._supervisors = [s for s in self._supervisors if s.poll() is None]
            answer, data = self._answer({**header, "payload": payload})
            while payload.read():
                pass
            self.wire.reply(answer, data)

    def _answer(self, header: Fields) -> Answer:
        try:
            operation = self.operations.get(header.get("op", ""))
            if operation is None:
                raise RequestError("request", f"this host program knows no op {header.get('op')!r}")
            answer, data = operation(header)
        except RequestError as refusal:
            refused = refusal
        except OSError as error:
            refused = os_refusal(error)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 -- the client must get a reply to every request
            traceback.print_exc()
            refused = RequestError(
                "bug", f"the host program failed: {type(error).__name__}: {error}"
            )
        else:
            return {"ok": True, **answer}, data
        return {"ok": False, **refused.more, "kind": refused.kind, "error": str(refused)}, b""

    def hello(self, request: Fields) -> Answer:
        """Who answers; `nonce` comes back as sent, so that noise before the reply can be told."""
        usage = shutil.disk_usage(self.root)
        return {
            "version": VERSION,
            "program": hash_file(Path(__file__)),
            "python": platform.python_version(),
            "executable": sys.executable,
            "hostname": socket.gethostname(),
            "boot_id": boot_id(),
            "pid": os.getpid(),
            "root": str(self.root),
            "free": usage.free,
            "nonce": request.get("nonce"),
        }, b""

    # content

    def blob(self, sha: str) -> Path:
        """Where the store keeps this content."""
        return self.root / "store" / sha[:2] / sha[2:]

    def temp(self, name: str) -> Path:
        """A new name in tmp/, on the same file system as everything below the root."""
        folder = self.root / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.{os.getpid()}.{secrets.token_hex(4)}"

    def missing(self, request: Fields) -> Answer:
        """{hashes} → {missing}: those that the store does not hold."""
        hashes = [sha256_name(sha) for sha in field(request, "hashes", list)]
        return {"missing": [sha for sha in hashes if not self.blob(sha).is_file()]}, b""

    def put(self, request: Fields) -> Answer:
        """{hash, offset} and the content from there: named once complete, verified and on disk.

        Large content that is cut off stays as a part, whose size `lay_out` tells, and goes on from
        there; refused as `busy` where another program is writing that part.
        """
        sha = sha256_name(request.get("hash"))
        offset = field(request, "offset", int, 0)
        payload = request["payload"]
        target = self.blob(sha)
        if target.is_file():
            return {"stored": False}, b""
        target.parent.mkdir(parents=True, exist_ok=True)
        large = offset + payload.left >= PART
        temp = self.part(sha) if large else self.temp(sha[:16])
        hasher = hashlib.sha256()
        try:
            with temp.open("a+b" if large else "xb") as file:
                if large:
                    take_up(file, offset, hasher)
                while part := payload.read():
                    hasher.update(part)
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                if hasher.hexdigest() != sha:
                    raise RequestError(
                        "corrupt", f"the content sent for {sha} is {hasher.hexdigest()}"
                    )
                temp.chmod(0o444)  # trees hold hard links to it: nobody should write into those
                temp.replace(target)
        except OSError as error:
            if not large:  # what came of large content is not sent again when there is room
                temp.unlink(missing_ok=True)
            error.filename = str(target)
            raise
        except RequestError as refusal:
            if refusal.kind == "corrupt":
                temp.unlink(missing_ok=True)
            raise
        except ClientGoneError:
            if not large:
                temp.unlink(missing_ok=True)
            raise
        return {"stored": True}, b""

    def part(self, sha: str) -> Path:
        """Where the beginning of large content is kept until the rest of it comes."""
        folder = self.root / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{sha}.part"

    def lay_out(self, request: Fields) -> Answer:
        """{kind, digest, files: {path: {hash, mode}}} → {path}; refused with `missing` hashes.

        A snapshot is compared with its hashes even where it stands already: what runs is what was
        pushed. A changed one is moved aside and built anew; damaged blobs count as missing.
        """
        kind = field(request, "kind", str)
        if kind not in KINDS:
            raise RequestError("request", f"{kind!r} is not a kind of tree: {' or '.join(KINDS)}")
        files = {
            str(relative_path(path)): (sha256_name(file.get("hash")), field(file, "mode", int))
            for path, file in field(request, "files", dict).items()
        }
        digest = sha256_name(request.get("digest"))
        if digest != tree_digest((path, mode, sha) for path, (sha, mode) in files.items()):
            raise RequestError(
                "request", f"the files of this tree do not make up the digest {digest}"
            )
        target = self.root / kind / digest
        checked = kind == "snapshots"
        if target.is_dir():
            if not checked or all(hash_file(target / p) == sha for p, (sha, _) in files.items()):
                return {"path": str(target), "built": False}, b""
            with contextlib.suppress(FileNotFoundError):
                target.rename(target.with_name(f"{digest}.changed.{secrets.token_hex(4)}"))
        missing = [
            sha for sha in {sha: None for sha, _ in files.values()} if not self.has(sha, checked)
        ]
        if missing:
            raise RequestError(
                "missing",
                f"{len(missing)} blobs are not in the store",
                missing=missing,
                parts={sha: size for sha in missing if (size := file_size(self.part(sha)))},
                busy=[sha for sha in missing if is_locked(self.part(sha))],
            )
        temp = self.temp(digest[:16])
        try:
            temp.mkdir()
            for path, (sha, mode) in files.items():
                self.place(self.blob(sha), temp / path, mode)
            target.parent.mkdir(exist_ok=True)
            self.settle(temp, target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
        return {"path": str(target), "built": True}, b""

    def has(self, sha: str, checked: bool) -> bool:
        """Whether the store holds this content; a damaged blob is dropped where it is `checked`."""
        blob = self.blob(sha)
        if not checked:
            return blob.is_file()
        if hash_file(blob) == sha:
            return True
        blob.unlink(missing_ok=True)
        return False

    @staticmethod
    def place(blob: Path, path: Path, mode: int) -> None:
        """A link to the blob where the file system has links, else a copy."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not mode & 0o111:
            with contextlib.suppress(OSError):
                os.link(blob, path)
                return
        # All links to a blob share one mode, so an executable file is always a copy.
        shutil.copyfile(blob, path)
        path.chmod(0o555 if mode & 0o111 else 0o444)

    @staticmethod
    def settle(temp: Path, target: Path) -> None:
        """Gives a finished tree its name; somebody may have built the same one meanwhile."""
        try:
            temp.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
                raise

    def probe(self, request: Fields) -> Answer:
        """{python, env, argument}, a program in zlib's format → what it prints, given the argument.

        It is run by the interpreter and in the environment that jobs get, not in this program's.
        """
        python = str(Path(field(request, "python", str)).expanduser())
        env = {**os.environ, **environment(request)}
        try:
            done = subprocess.run(
                [python, "-c", FROM_STDIN, field(request, "argument", str)],
                input=zlib.decompress(request["payload"].all()),
                capture_output=True,
                env=env,
                timeout=PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RequestError("python", f"{python} did not answer in {PROBE_S:.0f} s") from None
        except OSError as error:
            raise unusable(python, error) from None
        if done.returncode:
            lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else f"exit status {done.returncode}"
            raise RequestError("python", f"{python} cannot tell what is installed: {last}")
        return {"free": shutil.disk_usage(self.root).free}, done.stdout

    # runs

    def run_dir(self, request: Fields) -> Path:
        """The folder of the request's run, which need not exist."""
        run_id = request.get("run_id")
        if not isinstance(run_id, str) or not RUN_ID.fullmatch(run_id):
            raise RequestError("request", f"{run_id!r} is no run id: 1 to 120 of A-Z a-z 0-9 . _ -")
        return self.root / "runs" / run_id

    def known_run(self, request: Fields) -> Path:
        """The folder of the request's run, which must exist."""
        run_dir = self.run_dir(request)
        if not run_dir.is_dir():
            raise RequestError("missing", f"there is no run {run_dir.name} below {self.root}")
        return run_dir

    def start(self, request: Fields) -> Answer:
        """{run_id, snapshot, needs, python, env}, request.json as payload → {run_dir, started}.

        `snapshot` is what lay_out returned, or that path relative to the root; `needs` are further
        trees that must stand. The supervisor gets a session of its own and none of this program's
        streams: it outlives the channel. Asked again with the same request, after a connection was
        cut, a run is started only if it was not.
        """
        run_dir = self.run_dir(request)
        python = str(Path(field(request, "python", str)).expanduser())
        snapshot = self.root / field(request, "snapshot", str)
        env = environment(request)
        data = request["payload"].all()
        try:
            named = json.loads(data)["run_id"]
        except (ValueError, KeyError, TypeError):
            raise RequestError(
                "request", "the payload is not a request.json with a run_id"
            ) from None
        if named != run_dir.name:
            raise RequestError(
                "request", f"request.json names the run {named!r}, not {run_dir.name!r}"
            )
        if not (snapshot / "jobs" / "supervisor.py").is_file():
            raise RequestError(
                "missing", f"{snapshot} is no snapshot: it has no jobs/supervisor.py"
            )
        for need in field(request, "needs", list, []):
            if not (self.root / relative_path(need)).is_dir():
                raise RequestError("missing", f"{self.root / need} is not laid out")
        self.claim(run_dir, {"request.json": data})
        traces = [run_dir / f"{name}.json" for name in ("spawn", "supervisor", "exit")]
        with (run_dir / "request.json").open("rb") as held:
            try:  # the supervisor keeps this lock: two programs may be asked to start the same run
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return {"run_dir": str(run_dir), "started": False}, b""
            if any(path.exists() for path in traces):
                return {"run_dir": str(run_dir), "started": False}, b""
            try:
                supervisor = self._spawn(run_dir, python, snapshot, env, held.fileno())
            except (OSError, RequestError):
                shutil.rmtree(run_dir, ignore_errors=True)  # nothing ran: the id stays free
                raise
            self._supervisors.append(supervisor)
            # Without this record a supervisor that died early would look queued for a minute.
            with contextlib.suppress(OSError):
                write_atomic(run_dir / "spawn.json", json.dumps(identity(supervisor.pid)).encode())
        return {"run_dir": str(run_dir), "started": True}, b""

    def forgo(self, request: Fields) -> Answer:
        """{run_id} → {state}: a run that was not started never will be; any other stays as it is.

        What a command sent before it died may be read here after the run was closed.
        """
        run_dir = self.run_dir(request)
        ended = {"state": "never_started", "started": None, "ended": time.time()}
        with contextlib.suppress(RequestError):  # it was started, and is told so by its state
            files = {"request.json": b"{}", "exit.json": json.dumps(ended).encode()}
            self.claim(run_dir, files)
        return {"state": derive_state(run_dir)}, b""

    def claim(self, run_dir: Path, files: dict[str, bytes]) -> None:
        """Makes the run's folder with these files in one step; refused where it is another's."""
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        temp = self.temp(run_dir.name)
        try:
            temp.mkdir()
            for name, data in files.items():
                write_atomic(temp / name, data)
            temp.rename(run_dir)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not same_content(run_dir / "request.json", files["request.json"]):
                raise RequestError(
                    "exists", f"there is already another run {run_dir.name} on this host"
                ) from None
        finally:
            shutil.rmtree(temp, ignore_errors=True)

    @staticmethod
    def _spawn(
        run_dir: Path, python: str, snapshot: Path, env: dict[str, str], held: int
    ) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        waited_for = {signal.SIGTERM, signal.SIGINT}
        # Blocked signals stay blocked in the child: a cancel that comes before the supervisor
        # listens is then kept for it and does not kill it without a record.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
        try:
            with (run_dir / "supervisor.log").open("ab") as log:
                return subprocess.Popen(
                    [python, "-m", "jobs.supervisor", str(run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=snapshot,
                    env={**inherited, **env, MARK: os.path.realpath(run_dir)},
                    start_new_session=True,
                    pass_fds=[held],
                )
        except OSError as error:
            raise unusable(python, error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def follow(self, request: Fields) -> Answer:
        """{run_id, offsets, seen, wait_s, limit} → {state, chunks, sizes} and the new bytes.

        Waits until a named file has grown past its offset, the state is no longer a `seen` one (the
        present one where none is given) or is final, the client sends more, or `wait_s` is over.
        """
        run_dir = self.known_run(request)
        offsets = {
            str(relative_path(name)): int(offset)
            for name, offset in field(request, "offsets", dict, {}).items()
        }
        limit = int(clipped(field(request, "limit", int, CHUNK), 1, MAX_READ))
        wait_s = clipped(field(request, "wait_s", (int, float), 0), 0, MAX_WAIT_S)
        deadline = time.monotonic() + wait_s
        seen = field(request, "seen", list, [])
        pause = 0.01
        while True:
            # The state first: bytes that came before the end are then read below.
            state = derive_state(run_dir)
            seen = seen or [state["state"]]
            sizes = {name: file_size(run_dir / name) or 0 for name in offsets}
            if any(sizes[name] > offset for name, offset in offsets.items()):
                break
            if state["state"] not in seen or state["state"] in OVER:
                break
            left = deadline - time.monotonic()
            if left <= 0 or self.wire.pending(min(pause, left)):
                break
            pause = min(pause * 1.2, 0.1)
        parts = {
            name: read_part(run_dir / name, offset, limit) if sizes[name] > offset else b""
            for name, offset in offsets.items()
        }
        chunks = {name: len(part) for name, part in parts.items()}
        return {"state": state, "chunks": chunks, "sizes": sizes}, b"".join(parts.values())

    def read(self, request: Fields) -> Answer:
        """{run_id, path, offset, limit} → {size} and the bytes."""
        run_dir = self.known_run(request)
        path = run_dir / relative_path(request.get("path"))
        size = file_size(path)
        if size is None:
            raise RequestError("missing", f"there is no file {path}")
        limit = int(clipped(field(request, "limit", int, CHUNK), 0, MAX_READ))
        return {"size": size}, read_part(path, field(request, "offset", int, 0), limit)

    def signal(self, request: Fields) -> Answer:
        """{run_id, signal: TERM, INT or KILL} → {state, signalled, left}: pids.

        TERM and INT ask the supervisor to end the job's processes; KILL ends them and the
        supervisor at once. `left` names what is there of the run: for KILL two seconds later, and
        for a run that has ended what outlived it.
        """
        run_dir = self.known_run(request)
        name = request.get("signal")
        if name not in ("TERM", "INT", "KILL"):
            raise RequestError(
                "request", f"{name!r} is no signal to send to a run: TERM, INT or KILL"
            )
        if (run_dir / "exit.json").exists() and name != "KILL":
            left = marked(run_dir)
            return {"state": derive_state(run_dir), "signalled": [], "left": left}, b""
        with contextlib.suppress(OSError):  # a full disk must not keep anybody from cancelling
            write_atomic(
                run_dir / "cancel", json.dumps({"signal": name, "t": time.time()}).encode()
            )
        names = ("supervisor.json", "spawn.json", "queue.json")
        record = next(filter(None, (read_json(run_dir / name) for name in names)), None)
        if record is None:
            raise RequestError("missing", f"the run {run_dir.name} has no supervisor to signal yet")
        number = signal.Signals[f"SIG{name}"]
        supervisor = [int(record["pid"])] if is_alive(record) else []
        everybody = name == "KILL" or not supervisor
        targets = family(run_dir, record) if everybody else supervisor
        send_signal(targets, number)
        deadline = time.monotonic() + (2 if name == "KILL" else 0)
        while (left := family(run_dir, record)) and time.monotonic() < deadline:
            send_signal(left, number)
            time.sleep(0.01)
        return {"state": derive_state(run_dir), "signalled": targets, "left": left}, b""

    def list_runs(self, _request: Fields) -> Answer:
        """→ {runs: [{run_id, state, …}]}; a damaged record is a `vanished` run that says so."""
        runs = []
        folder = self.root / "runs"
        for run_dir in sorted(folder.iterdir()) if folder.is_dir() else []:
            try:
                state = derive_state(run_dir)
            except RequestError as refusal:
                state = {"state": "vanished", "reason": str(refusal)}
            runs.append({**state, "run_id": run_dir.name})
        return {"runs": runs}, b""


def family(run_dir: Path, record: Fields) -> list[int]:
    """Every living process of a run: its supervisor, what stands below it, what got away."""
    supervisor = [int(record["pid"])] if is_alive(record) else []
    return sorted({*supervisor, *members(record), *marked(run_dir)})


def environment(request: Fields) -> dict[str, str]:
    """The request's `env`: variables beside those that this program was started with."""
    env: dict[str, str] = field(request, "env", dict, {})
    for name, value in env.items():
        if not isinstance(value, str) or "\0" in name + value or "=" in name or not name:
            raise RequestError(
                "request", f"the environment variable {name!r} is not a plain string"
            )
    return env


def unusable(python: str, error: OSError) -> Exception:
    """What to raise where an interpreter could not be started."""
    if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return RequestError(
            "python", f"{python} cannot be run: {error.strerror}; set the host's python"
        )
    return error


def take_up(file: Any, offset: int, hasher: Any) -> None:
    """Locks a part, keeps its first `offset` bytes and feeds them to the hasher."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError("busy", "another command is sending the same content") from None
    found = os.fstat(file.fileno())
    # Whoever held it may have finished it meanwhile: then this is the blob itself, for ever as it is.
    if not found.st_nlink or not same_file(found, Path(file.name)) or found.st_size < offset:
        raise RequestError("busy", "what was sent of this content before is gone")
    file.truncate(offset)
    file.seek(0)
    while part := file.read(CHUNK):
        hasher.update(part)


def same_file(found: os.stat_result, path: Path) -> bool:
    """Whether the path still leads to this file."""
    try:
        return os.path.samestat(found, path.stat())
    except OSError:
        return False


def is_locked(path: Path) -> bool:
    """Whether another program holds this part."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def same_content(path: Path, data: bytes) -> bool:
    """Whether the file holds exactly this."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def file_size(path: Path) -> int | None:
    """The size of a regular file, else None."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_part(path: Path, offset: int, limit: int) -> bytes:
    """Up to `limit` bytes from `offset`."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(limit)


def drop_stale(folder: Path) -> None:
    """Removes what killed host programs left in tmp/ more than a day ago."""
    for entry in folder.iterdir() if folder.is_dir() else []:
        with contextlib.suppress(OSError):
            if time.time() - entry.lstat().st_mtime > STALE_S:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def main() -> int:
    """Serves one client; 0 when it hangs up."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--root", required=True, type=Path)
    root: Path = parser.parse_args().root.expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        drop_stale(root / "tmp")
    except OSError as error:
        sys.stderr.write(f"the root {root} cannot be made: {error.strerror}\n")
        return 2
    try:
        Host(root, Wire(0, 1)).serve()
    except ClientGoneError:
        return 0
    except ValueError as error:
        sys.stderr.write(f"a request's header is not JSON: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

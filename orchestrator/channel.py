"""The client of the host's program: requests and replies over a pair of byte streams."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from orchestrator.errors import HostError, HostUnreachable, InputError
from orchestrator.paths import CLONE

PROGRAM = CLONE / "jobs" / "host.py"
CHUNK = 1 << 20
MAX_NOISE = 1 << 16
CLOSE_S = 10.0
DEADLINE_S = 60.0  # without a byte either way, while a reply is owed
LONG_S = 900.0  # the same for the ops below: the host may have much to hash or to write
LONG = frozenset({"put", "lay_out"})


class Reader(Protocol):
    """What is read from: a pipe, a socket's file, an SSH channel's stdout."""

    def read(self, size: int, /) -> bytes:
        """`size` bytes, fewer only where the stream ends or has no more yet."""

    def readline(self) -> bytes:
        """One line with its end."""


class Writer(Protocol):
    """What is written to: a pipe, a socket's file, an SSH channel's stdin."""

    def write(self, data: bytes, /) -> object:
        """Takes all of `data`."""

    def flush(self) -> object:
        """Sends it on."""


class RefusedError(HostError):
    """The host's program refused a request: its sentence, its `kind` and the whole `header`."""

    def __init__(self, sentence: str, header: dict[str, Any]) -> None:
        super().__init__(sentence)
        self.kind: str = header.get("kind", "")
        self.header = header


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request; a payload that is a file is streamed from `offset`, and read when its turn comes."""

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes | Path = b""
    offset: int = 0


@dataclass(frozen=True)
class Reply:
    """One reply of the host's program."""

    header: dict[str, Any]
    payload: bytes

    @property
    def ok(self) -> bool:
        """Whether the request was granted."""
        return bool(self.header.get("ok"))


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """A request as it goes out, and the reply that is owed for it."""

    op: str
    header: bytes
    payload: bytes | Path
    offset: int
    size: int
    nonce: str | None
    reply: Future[Reply]
    written: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, request: Request) -> _Frame:
        body = request.payload
        size = len(body) if isinstance(body, bytes) else max(0, _size(body) - request.offset)
        header = json.dumps({"op": request.op, **request.fields, "payload": size}).encode()
        return cls(
            op=request.op,
            header=header + b"\n",
            payload=body,
            offset=request.offset,
            size=size,
            nonce=request.fields.get("nonce") if request.op == "hello" else None,
            reply=Future(),
        )


class Channel:
    """Requests to one host program, from any thread.

    `name` stands in messages. `diagnose` is asked for more words when the stream has ended, `abort`
    ends it when a reply stays out. Whether the host is still there at all is for the stream to know.
    The streams are read and written on two threads of their own: pipes that are full both ways
    cannot block each other, and Ctrl-C in a caller leaves no half frame behind. It may then send
    another request at once, which ends a `follow` that waits on the host.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        *,
        name: str,
        diagnose: Callable[[], str] = lambda: "",
        abort: Callable[[], None] = lambda: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self._abort = abort
        self._deadline_s = deadline_s
        self._active_at = time.monotonic()
        self._reader = reader
        self._writer = writer
        self._diagnose = diagnose
        self._ended = False
        self._last: _Frame | None = None
        self._outbox: SimpleQueue[list[_Frame] | None] = SimpleQueue()
        self._owed: SimpleQueue[_Frame | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_all, name=f"to {name}", daemon=True),
            threading.Thread(target=self._read_all, name=f"from {name}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def hello(self) -> dict[str, Any]:
        """Who answers there. What the host's shell printed before is skipped."""
        return self.request("hello", nonce=secrets.token_hex(8)).header

    def request(self, op: str, *, payload: bytes | Path = b"", **fields: Any) -> Reply:
        """One request and its reply. Raises RefusedError with the host's sentence."""
        return self.pipeline([Request(op=op, fields=fields, payload=payload)])[0]

    def pipeline(self, requests: Sequence[Request], *, check: bool = True) -> list[Reply]:
        """Sends all requests without waiting, then returns their replies in order.

        All replies are read, then the first refusal is raised, unless `check` is off. Raises
        HostUnreachable where the stream has ended, HostError where what comes is no reply.
        """
        if self._ended:
            raise HostUnreachable(f"{self.name}: the connection has ended; open a new one")
        frames = [_Frame.of(request) for request in requests]
        self._active_at = time.monotonic()
        self._last = frames[-1] if frames else self._last
        self._outbox.put(frames)
        replies = [self._await(frame) for frame in frames]
        for reply in replies:
            if check and not reply.ok:
                sentence = reply.header.get("error", "the host's program gave no reason")
                raise RefusedError(f"{self.name}: {sentence}", reply.header)
        return replies

    @property
    def writing(self) -> bool:
        """Whether something of what was asked is still to be written."""
        return self._last is not None and not self._last.written.is_set()

    def _await(self, frame: _Frame) -> Reply:
        deadline_s = LONG_S if frame.op in LONG else self._deadline_s
        while True:
            left = self._active_at + deadline_s - time.monotonic()
            try:
                return frame.reply.result(timeout=max(left, 0.01))
            except NotYet:
                if self._active_at + deadline_s < time.monotonic():
                    self.abort()
                    raise HostUnreachable(
                        f"{self.name}: {frame.op!r} was not answered within {deadline_s:.0f} s; "
                        "a run there may well go on"
                    ) from None

    def abort(self) -> None:
        """Ends the stream at once, for one that is lost or not wanted any more."""
        self._ended = True
        self._abort()

    def stop_sending(self) -> bool:
        """Takes no more requests; whether those taken have been written."""
        self._ended = True
        self._outbox.put(None)
        self._threads[0].join(CLOSE_S)
        return not self._threads[0].is_alive()

    def wait_closed(self) -> bool:
        """Waits for the replies still owed; whether nothing is read any more."""
        self._threads[1].join(CLOSE_S)
        return not self._threads[1].is_alive()

    def _write_all(self) -> None:
        writable = True
        while (frames := self._outbox.get()) is not None:
            for frame in frames:
                self._owed.put(frame)
            try:
                if writable:
                    self._send(frames)
            except Exception:  # noqa: BLE001 -- the reader tells the callers: it may know why
                writable = False
            finally:
                for frame in frames:
                    frame.written.set()
        self._owed.put(None)

    def _read_all(self) -> None:
        failure: HostError | None = None
        while (frame := self._owed.get()) is not None:
            if failure is None:
                try:
                    frame.reply.set_result(self._reply(frame))
                    continue
                except HostError as error:
                    failure = error
                except Exception as error:  # noqa: BLE001 -- no caller may be left waiting
                    failure = self._unreachable(frame.op, error)
                self._ended = True
            frame.reply.set_exception(failure)

    def _send(self, frames: Sequence[_Frame]) -> None:
        small = bytearray()
        for frame in frames:
            small += frame.header
            if isinstance(frame.payload, bytes) and frame.size < CHUNK:
                small += frame.payload
                if len(small) < CHUNK:
                    continue
            self._writer.write(bytes(small))
            small.clear()
            if not isinstance(frame.payload, bytes) or frame.size >= CHUNK:
                for part in _parts(frame.payload, frame.offset, frame.size):
                    self._writer.write(part)
                    self._active_at = time.monotonic()
        self._writer.write(bytes(small))
        self._writer.flush()
        self._active_at = time.monotonic()

    def _reply(self, frame: _Frame) -> Reply:
        header = self._header(frame.nonce)
        self._active_at = time.monotonic()
        left = int(header["payload"])
        parts: list[bytes] = []
        while left:
            part = self._reader.read(left)
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
            self._active_at = time.monotonic()
        return Reply(header, b"".join(parts))

    def _header(self, nonce: str | None) -> dict[str, Any]:
        """The next header; where there is a nonce, noise before it is skipped."""
        noise = b""
        while True:
            line = self._reader.readline()
            if not line.endswith(b"\n"):
                raise EOFError(
                    f"the last line there: {_last(noise + line)}" if noise + line else ""
                )
            header = _object(line)
            if header is not None and "payload" in header and nonce in (None, header.get("nonce")):
                return header
            if header is not None and header.get("ok") is False and "payload" in header:
                return header
            noise += line
            if nonce is None or len(noise) > MAX_NOISE:
                raise HostError(
                    f"{self.name}: what comes back is no reply of the host's program: {_last(noise)}"
                )

    def _unreachable(self, op: str, error: Exception) -> HostUnreachable:
        more = str(error) or self._diagnose()
        return HostUnreachable(
            f"{self.name}: the connection ended before {op!r} was answered"
            f"{f' ({more})' if more else ''}; a run there may well go on"
        )


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _last(noise: bytes) -> str:
    """The last line of what was printed, quoted and cut."""
    lines = noise.decode("utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else '':.120}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _parts(body: bytes | Path, offset: int, size: int) -> Iterator[bytes]:
    """The payload from `offset` in pieces, exactly `size` bytes.

    A file that has shrunk is filled up with zeros: the stream stays in step, and the host, which
    knows the hash, refuses the content.
    """
    if isinstance(body, bytes):
        yield body
        return
    left = size
    try:
        with body.open("rb") as file:
            file.seek(offset)
            while left and (part := file.read(min(CHUNK, left))):
                left -= len(part)
                yield part
    except OSError:
        pass
    while left:
        part = bytes(min(CHUNK, left))
        left -= len(part)
        yield part


@contextlib.contextmanager
def open_local(root: Path, python: str, *, name: str = "this machine") -> Iterator[Channel]:
    """A channel to the host's program as a subprocess, with `root` as its root.

    Leaving the block ends the program and waits for it; what it started goes on.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            program = subprocess.Popen(
                [python, "-I", "-u", str(PROGRAM), "--root", str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal is for us alone
            )
        except OSError as error:
            raise InputError(
                f"{name}: {python} cannot be run ({error.strerror}); set host.python to an interpreter"
            ) from error

        def diagnose() -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(timeout=1)
            errors.seek(0)
            lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
            return lines[-1] if lines else f"exit status {program.returncode}"

        assert program.stdin is not None
        assert program.stdout is not None
        channel = Channel(
            program.stdout, program.stdin, name=name, diagnose=diagnose, abort=program.kill
        )
        try:
            yield channel
        finally:
            if not channel.stop_sending():
                program.kill()
            with contextlib.suppress(OSError):
                program.stdin.close()
            if not channel.wait_closed():
                program.kill()
                channel.wait_closed()
            program.stdout.close()
            try:
                program.wait(timeout=CLOSE_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

"""The client of the host's program: requests and replies over a pair of byte streams."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.errors import HostError, HostUnreachable

PROGRAM = Path(__file__).resolve().parent.parent / "jobs" / "host.py"
CHUNK = 1 << 20
MAX_NOISE = 1 << 16
CLOSE_S = 10.0


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
    """One request; a payload that is a file is streamed, and read when its turn comes."""

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes | Path = b""


@dataclass(frozen=True)
class Reply:
    """One reply of the host's program."""

    header: dict[str, Any]
    payload: bytes

    @property
    def ok(self) -> bool:
        """Whether the request was granted."""
        return bool(self.header.get("ok"))


class Channel:
    """Requests to one host program. Calls from several threads wait for one another.

    `name` stands in messages. `diagnose` is asked for more words when the stream has ended.
    After HostUnreachable, or an exception in the middle of an exchange, the channel is of no use.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        *,
        name: str,
        diagnose: Callable[[], str] = lambda: "",
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._diagnose = diagnose
        self._lock = threading.Lock()
        self._usable = True

    def hello(self) -> dict[str, Any]:
        """Who answers there. What the host's shell printed before is skipped."""
        nonce = secrets.token_hex(8)
        request = Request(op="hello", fields={"nonce": nonce})
        with self._exchange("hello"):
            self._send_one(request)
            noise = b""
            while True:
                try:
                    line = self._line()
                except EOFError as error:
                    if not noise:
                        raise
                    last = noise.decode("utf-8", errors="replace").strip().splitlines()[-1:]
                    raise EOFError(f"its shell said {' '.join(last)!r:.200}") from error
                with contextlib.suppress(ValueError):
                    header = json.loads(line)
                    if isinstance(header, dict) and header.get("nonce") == nonce:
                        return header
                    if isinstance(header, dict) and header.get("ok") is False:
                        raise self._refusal(Reply(header, b""))
                noise += line
                if len(noise) > MAX_NOISE:
                    raise HostError(
                        f"{self.name}: the host's program does not answer; its shell prints "
                        f"{noise[:80]!r}…"
                    )

    def request(self, op: str, *, payload: bytes | Path = b"", **fields: Any) -> Reply:
        """One request and its reply. Raises RefusedError with the host's sentence."""
        return self.pipeline([Request(op=op, fields=fields, payload=payload)])[0]

    def pipeline(self, requests: Sequence[Request], *, check: bool = True) -> list[Reply]:
        """Sends all requests without waiting, then returns their replies in order.

        All replies are read, then the first refusal is raised, unless `check` is off.
        """
        if not requests:
            return []
        with self._exchange(requests[0].op):
            if len(requests) == 1 and requests[0].payload == b"":
                self._send_one(requests[0])
                replies = [self._reply(requests[0].op)]
            else:
                replies = self._send_and_read(requests)
        for reply in replies:
            if check and not reply.ok:
                raise self._refusal(reply)
        return replies

    def _send_and_read(self, requests: Sequence[Request]) -> list[Reply]:
        # The host may stop reading until its replies are read: write on a thread, read here.
        failures: list[BaseException] = []

        def send() -> None:
            try:
                self._send(requests)
            except (OSError, EOFError, ValueError, TypeError) as error:
                failures.append(error)

        thread = threading.Thread(target=send, name=f"to {self.name}", daemon=True)
        thread.start()
        try:
            replies = [self._reply(request.op) for request in requests]
        finally:
            thread.join(timeout=1.0)
        if failures:
            raise failures[0]
        return replies

    def _send_one(self, request: Request) -> None:
        # Where the other end is gone already, what it printed before is read next and says why.
        with contextlib.suppress(OSError):
            self._send([request])

    def _send(self, requests: Sequence[Request]) -> None:
        small = bytearray()
        for request in requests:
            body = request.payload
            size = len(body) if isinstance(body, bytes) else _size(body)
            small += json.dumps({"op": request.op, **request.fields, "payload": size}).encode()
            small += b"\n"
            if isinstance(body, bytes) and len(body) < CHUNK:
                small += body
            else:
                self._writer.write(bytes(small))
                small.clear()
                for part in _parts(body, size):
                    self._writer.write(part)
            if len(small) >= CHUNK:
                self._writer.write(bytes(small))
                small.clear()
        self._writer.write(bytes(small))
        self._writer.flush()

    def _reply(self, op: str) -> Reply:
        line = self._line()
        try:
            header = json.loads(line)
            left = int(header["payload"])
        except (ValueError, TypeError, KeyError):
            raise HostError(
                f"{self.name}: what came back for {op!r} is not a reply: {line[:80]!r}"
            ) from None
        parts: list[bytes] = []
        while left:
            part = self._reader.read(left)
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return Reply(header, b"".join(parts))

    def _line(self) -> bytes:
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def _refusal(self, reply: Reply) -> RefusedError:
        sentence = reply.header.get("error", "the host's program gave no reason")
        return RefusedError(f"{self.name}: {sentence}", reply.header)

    @contextlib.contextmanager
    def _exchange(self, op: str) -> Iterator[None]:
        """Holds the channel; anything that breaks off inside leaves it unusable."""
        with self._lock:
            if not self._usable:
                raise HostUnreachable(f"{self.name}: the connection has ended; open a new one")
            self._usable = False
            try:
                yield
            except (OSError, EOFError) as error:
                more = str(error) or self._diagnose()
                raise HostUnreachable(
                    f"{self.name}: the connection ended before {op!r} was answered"
                    f"{f' ({more})' if more else ''}; a run there may well go on"
                ) from error
            self._usable = True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _parts(body: bytes | Path, size: int) -> Iterator[bytes]:
    """The payload in pieces, exactly `size` bytes.

    A file that has shrunk is filled up with zeros: the stream stays in step, and the host, which
    knows the hash, refuses the content.
    """
    if isinstance(body, bytes):
        yield body
        return
    left = size
    try:
        with body.open("rb") as file:
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
            )
        except OSError as error:
            raise HostError(f"{name}: {python} cannot be run: {error.strerror}") from error

        def diagnose() -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(timeout=1)
            errors.seek(0)
            lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
            return lines[-1] if lines else f"exit status {program.returncode}"

        assert program.stdin is not None
        assert program.stdout is not None
        try:
            yield Channel(program.stdout, program.stdin, name=name, diagnose=diagnose)
        finally:
            with contextlib.suppress(OSError):
                program.stdin.close()
            program.stdout.close()
            try:
                program.wait(timeout=CLOSE_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

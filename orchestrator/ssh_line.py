"""Below and above an SSH transport: the socket it runs on, the watchdog, a command's streams."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.errors import HostUnreachable
from orchestrator.ssh_settings import SshSettings

KEPT = 4096  # bytes of a command's stderr
RECEIVE = 1 << 20
SEND = 1 << 15  # the largest packet that servers take


class Line:
    """The socket (or the channel through a jump host) that a transport runs on.

    `heard` is when it last brought anything, by time.monotonic(). Has what paramiko calls.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.heard = time.monotonic()

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes."""
        data: bytes = self._sock.recv(size)
        self.heard = time.monotonic()
        return data

    def send(self, data: bytes) -> int:
        """How many bytes were taken."""
        return int(self._sock.send(data))

    def settimeout(self, seconds: float | None) -> None:
        """How long `recv` and `send` wait."""
        self._sock.settimeout(seconds)

    def getpeername(self) -> Any:
        """The other end's address."""
        return self._sock.getpeername()

    def close(self) -> None:
        """Closes it; a jump host that is gone need not be told."""
        with contextlib.suppress(OSError, EOFError):
            self._sock.close()

    @property
    def _closed(self) -> bool:
        return bool(self._sock._closed)


def connect_tcp(settings: SshSettings, name: str) -> socket.socket:
    """A TCP connection without Nagle's delay, any of the host's addresses, within its timeout."""
    where = f"{settings.hostname} port {settings.port}"
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    family = families.get(settings.address_family, socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(
            settings.hostname, settings.port, family, type=socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:
        raise HostUnreachable(
            f"{name}: the name {settings.hostname!r} cannot be resolved ({error}); "
            "check HostName in the ssh config, and the network"
        ) from error
    deadline = time.monotonic() + settings.connect_timeout_s
    failure: OSError = TimeoutError()
    for kind, kind_of_socket, protocol, _, address in found:
        sock = socket.socket(kind, kind_of_socket, protocol)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.1))
            if settings.bind_address:
                sock.bind((settings.bind_address, 0))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    if isinstance(failure, TimeoutError):
        reason = f"{where} did not answer within {settings.connect_timeout_s:.0f} s"
    else:
        reason = f"{where} cannot be reached: {failure.strerror or failure}"
    raise HostUnreachable(f"{name}: {reason}; is the host up, and are address and port right?")


class ProxyProcess:
    """A ProxyCommand on one end of a socket pair; its death is the end of that stream."""

    def __init__(self, command: str, name: str) -> None:
        self.sock, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close()
        shell = os.environ.get("SHELL") or "/bin/sh"
        try:
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.sock.close()
            self._errors.close()
            raise HostUnreachable(
                f"{name}: ProxyCommand cannot be run by {shell}: {error}"
            ) from error
        finally:
            theirs.close()

    def last_words(self) -> str:
        """Why it ended: its last line on stderr, or its exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        ended = self._process.returncode
        return lines[-1] if lines else "" if ended is None else f"it ended with {ended}"

    def close(self) -> None:
        """Ends its process group and waits for it."""
        self.sock.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2)
                break
        self._errors.close()


class Watchdog:
    """Notices that a host has vanished: asks it for a sign of life when nothing is heard.

    After each `interval_s` of silence it sends keepalive@openssh.com, which every server answers;
    after `count` of them it calls `give_up` with the reason. Asking may block where the line takes
    nothing any more, so it has a thread of its own.
    """

    def __init__(
        self,
        transport: Any,
        line: Line,
        *,
        interval_s: float,
        count: int,
        give_up: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._line = line
        self._interval_s = interval_s
        self._count = count
        self._give_up = give_up
        self._over = threading.Event()
        self._ask = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"ssh {what}", daemon=True)
            for what, target in (("watchdog", self._watch), ("keepalive", self._keep_asking))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads; the transport has been closed before."""
        self._over.set()
        self._ask.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def _watch(self) -> None:
        heard, missed, pause = self._line.heard, 0, self._interval_s
        while not self._over.wait(pause):
            if self._line.heard != heard:
                heard, missed = self._line.heard, 0
                pause = max(heard + self._interval_s - time.monotonic(), 0.02)
                continue
            # Counted, not timed: a command that was stopped (Ctrl-Z) has heard nothing either.
            missed += 1
            if missed >= self._count:
                silence = self._count * self._interval_s
                self._give_up(f"nothing was heard from the host for {silence:.0f} s")
                return
            self._ask.set()
            pause = self._interval_s

    def _keep_asking(self) -> None:
        while True:
            self._ask.wait()
            self._ask.clear()
            if self._over.is_set():
                return
            # Without a connection there is nobody to ask, and the watchdog tells.
            with contextlib.suppress(Exception):
                self._transport.global_request("keepalive@openssh.com", wait=True)


class Session:
    """A command's streams on one SSH channel, as the Channel of requests wants them.

    stderr is drained by a thread of its own, or a host that writes much of it would stop.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._buffer = b""
        self._errors = b""
        self._drain = threading.Thread(target=self._read_errors, name="ssh stderr", daemon=True)

    def run(self, command: str) -> None:
        """Starts the command. Raises what paramiko raises where the host refuses."""
        self._channel.exec_command(command)
        self._drain.start()

    def set_timeout(self, seconds: float | None) -> None:
        """How long a read or a write may take; TimeoutError beyond."""
        self._channel.settimeout(seconds)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, b"" at the stream's end."""
        data = self._buffer or self._channel.recv(max(size, RECEIVE))
        self._buffer = data[size:]
        return bytes(data[:size])

    def readline(self) -> bytes:
        """One line with its end; without one where the stream ended."""
        parts = []
        while True:
            data = self._buffer or self._channel.recv(RECEIVE)
            line, end, self._buffer = data.partition(b"\n")
            parts.append(line + end)
            if end or not data:
                return b"".join(parts)

    def write(self, data: bytes, /) -> None:
        """Sends all of `data`."""
        view = memoryview(data)
        while view:
            sent = self._channel.send(bytes(view[:SEND]))
            if not sent:
                raise EOFError("the host takes no more input")
            view = view[sent:]

    def flush(self) -> None:
        """Nothing is held back."""

    def end_input(self) -> None:
        """The command's stdin ends."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def exit_status(self, wait_s: float = 2.0) -> int | None:
        """The command's exit status; None where it is not told in time (or a signal ended it)."""
        self._channel.status_event.wait(wait_s)
        status = self._channel.exit_status
        return status if status >= 0 else None

    def last_error(self, wait_s: float = 1.0) -> str:
        """The last line of stderr that is not empty."""
        if self._drain.ident:
            self._drain.join(wait_s)
        lines = self._errors.decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def wait_drained(self) -> None:
        """Waits for the thread; the channel has been closed before."""
        if self._drain.ident:
            self._drain.join(timeout=5)

    def _read_errors(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(RECEIVE)
            except TimeoutError:
                continue
            except (OSError, EOFError):
                return
            if not data:
                return
            self._errors = (self._errors + data)[-KEPT:]

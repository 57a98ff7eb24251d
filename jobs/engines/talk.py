"""Talking to an engine's HTTP server: JSON, plain text and streams of events, each with a deadline.

The standard library alone, since a host need not have more. Every failure is a ServerError that says
which address answered what.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PART = 300  # characters of an answer that an error repeats
PIECE = 65536  # bytes that are taken at once of what has come
SOON_S = 10.0  # for what a server answers without computing
DATA = b"data:"
DONE = b"[DONE]"
REFUSALS = (
    http.client.BAD_REQUEST,
    http.client.UNPROCESSABLE_ENTITY,
    http.client.NOT_IMPLEMENTED,
)


class ServerError(Exception):
    """A server did not answer as it should; the message says which, and what it said."""


class RefusedError(ServerError):
    """A server has read a request and does not do what it asks for."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    prefix: str = ""
    https: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of `http://host:port[/prefix]`. Raises ServerError."""
        wrong = ServerError(f"{url} is no address of a server; write http://HOST:PORT")
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise wrong from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        https = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            host=parts.hostname, port=port or (443 if https else 80), prefix=prefix, https=https
        )

    @property
    def url(self) -> str:
        """As people write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.https else ''}://{host}:{self.port}{self.prefix}"


class Deadline:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """What is left of it; never 0, which would mean to wait for nothing at all."""
        return max(self.at - time.monotonic(), 0.001)

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at


def get(address: Address, path: str, seconds: float = SOON_S) -> str:
    """The text at a path. Raises ServerError."""
    return exchange(address, "GET", path, None, Deadline(seconds)).decode("utf-8", "replace")


def get_json(address: Address, path: str, seconds: float = SOON_S) -> Any:
    """The JSON at a path. Raises ServerError."""
    return parsed(get(address, path, seconds), f"{address.url}{path}")


def post(address: Address, path: str, body: Mapping[str, Any], seconds: float = SOON_S) -> str:
    """The text that a request is answered with. Raises ServerError."""
    return exchange(address, "POST", path, body, Deadline(seconds)).decode("utf-8", "replace")


def stream(
    address: Address, path: str, body: Mapping[str, Any], seconds: float
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events as they come, each with the time it came at (time.perf_counter).

    Raises ServerError where the stream breaks off, holds an error, or takes longer than `seconds`.
    """
    where, deadline = f"{address.url}{path}", Deadline(seconds)
    try:
        with asked(address, "POST", path, body, deadline) as (answer, come):
            if answer.status != http.client.OK:
                raise refused(where, answer.status, b"".join(come))
            for line in lines(come):
                came = time.perf_counter()
                if not line.startswith(DATA):
                    continue
                said = line[len(DATA) :].strip()
                if said == DONE:
                    return
                event = parsed(said.decode("utf-8", "replace"), where)
                if not isinstance(event, dict) or event.get("error"):
                    raise ServerError(f"{where}: {str(event)[:PART]}")
                yield came, event
        raise ServerError(f"{where}: the stream ended before its last event")
    except TimeoutError as error:
        raise ServerError(f"{where} did not finish within {seconds:g} s") from error
    except http.client.IncompleteRead as error:
        raise ServerError(f"{where}: the stream ended before its last event") from error
    except (OSError, http.client.HTTPException) as error:
        raise broken(where, error) from error


def exchange(
    address: Address, method: str, path: str, body: Mapping[str, Any] | None, deadline: Deadline
) -> bytes:
    """One request and the whole of its answer. Raises ServerError."""
    where = f"{address.url}{path}"
    try:
        with asked(address, method, path, body, deadline) as (answer, come):
            said = b"".join(come)
    except TimeoutError as error:
        raise ServerError(f"{where} did not answer within {deadline.seconds:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise broken(where, error) from error
    if answer.status != http.client.OK:
        raise refused(where, answer.status, said)
    return said


@contextmanager
def asked(
    address: Address,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    deadline: Deadline,
) -> Iterator[tuple[http.client.HTTPResponse, Iterator[bytes]]]:
    """Send a request; its answer, whose body comes piece by piece."""
    sent = None if body is None else json.dumps(body).encode()
    headers = {"Accept": "*/*"} if body is None else {"Content-Type": "application/json"}
    kind = http.client.HTTPSConnection if address.https else http.client.HTTPConnection
    with closing(kind(address.host, address.port, timeout=deadline.left)) as link:
        link.request(method, f"{address.prefix}{path}", sent, headers)
        sock = link.sock  # which the connection hands over to an answer that is to end it
        sock.settimeout(deadline.left)
        with closing(link.getresponse()) as answer:
            yield answer, pieces(answer, sock, deadline)


def pieces(
    answer: http.client.HTTPResponse, sock: socket.socket, deadline: Deadline
) -> Iterator[bytes]:
    """What comes of an answer, as it comes: a socket's own time begins anew with every byte.

    Raises TimeoutError where the deadline is over before the end.
    """
    while not deadline.over:
        sock.settimeout(deadline.left)
        piece = answer.read1(PIECE)
        if piece:
            yield piece
        elif answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
        else:
            return
    raise TimeoutError


def lines(come: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of what comes, without their ends."""
    held = b""
    for piece in come:
        *whole, held = (held + piece).split(b"\n")
        yield from whole
    if held:
        yield held


def parsed(text: str, where: str) -> Any:
    """JSON. Raises ServerError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError(f"{where} answered what is no JSON: {text[:PART]!r}") from error


def refused(where: str, status: int, said: bytes) -> ServerError:
    """The error of an answer that is not 200."""
    text = " ".join(said.decode("utf-8", "replace").split())[:PART]
    kind = RefusedError if status in REFUSALS else ServerError
    return kind(f"{where} answered {status}: {text or 'nothing'}")


def broken(where: str, error: Exception) -> ServerError:
    """The error of a connection that could not be made, or was lost."""
    return ServerError(f"{where}: {error or type(error).__name__}")

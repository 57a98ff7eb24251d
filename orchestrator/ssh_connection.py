"""One SSH connection, opened hop by hop by Fabric, with OpenSSH's settings and strict host keys.

Every wait has an end, and a host that vanishes is noticed (ssh_line.Watchdog).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fabric
import paramiko

from orchestrator.errors import HostError, HostUnreachable
from orchestrator.host_keys import HostKeyError, check_key, find_key, wanted_types
from orchestrator.known_hosts import Finding
from orchestrator.ssh_keys import Login
from orchestrator.ssh_line import Line, ProxyProcess, Session, Watchdog, connect_tcp
from orchestrator.ssh_settings import Hop

LOGIN_S = 30.0  # for one key; a person may have to touch a security key


class Connection:
    """The hops that are open, and what of ours they run on."""

    def __init__(self, route: Sequence[Hop]) -> None:
        self.route = route
        self.name = route[-1].name
        self.reason = ""
        self._sockets: list[socket.socket] = []
        self._proxies: list[ProxyProcess] = []
        self._hops: list[fabric.Connection] = []
        self._transports: list[paramiko.Transport] = []
        self._lines: list[Line] = []
        self._watchdog: Watchdog | None = None
        self._session: Session | None = None
        self._lock = threading.Lock()

    def open(self, *, look: Callable[[Hop, str, bytes], None] | None = None) -> None:
        """Opens hop after hop. `look` gets the last hop's key instead of the check, and must raise."""
        for hop in self.route:
            last = hop is self.route[-1]
            self._open_hop(hop, look if last and look else check_key)
        settings = self.route[-1].settings
        self._watchdog = Watchdog(
            self._transports[-1],
            self._lines[-1],
            interval_s=settings.alive_interval_s,
            count=settings.alive_count,
            give_up=self.give_up,
        )

    def start(self, command: str) -> Session:
        """Runs a command on the one session of this connection, without a terminal."""
        try:
            channel = self._transports[-1].open_session()
            session = Session(channel)
            session.run(command)
        except paramiko.ChannelException as error:
            raise HostError(f"{self.name}: the host opens no session: {error.text}") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not self.is_alive():
                raise HostUnreachable(
                    f"{self.name}: the connection ended before a command was started ({error})"
                ) from error
            raise HostError(
                f"{self.name}: the host runs no commands for this login: {error}"
            ) from error
        self._session = session
        return session

    def is_alive(self) -> bool:
        """Whether the transport to the last hop is there."""
        return bool(self._transports) and bool(self._transports[-1].is_active())

    def diagnose(self, session: Session) -> str:
        """Why the session ended, as far as anybody told."""
        if self.reason:
            return self.reason
        if said := session.last_error():
            return said
        status = session.exit_status(wait_s=0.5) if self.is_alive() else None
        if status is not None:
            return f"the host's program ended with exit status {status}"
        return "the host or the network closed it"

    def give_up(self, reason: str) -> None:
        """Ends it, for this reason."""
        self.reason = self.reason or reason
        self.abort()

    def abort(self) -> None:
        """Ends it at once, from any thread, whatever hangs."""
        # The first hop's socket first: nothing above it can then block on a line that is stuck.
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._close_transports()

    def close(self) -> None:
        """Ends it and waits for every thread and process of ours."""
        self.abort()  # a thread that waits for the host wakes at once
        for sock in self._sockets:
            sock.close()
        for proxy in self._proxies:
            proxy.close()
        if self._watchdog:
            self._watchdog.stop()
        for transport in self._transports:
            transport.join(timeout=5)
        if self._session:
            self._session.wait_drained()

    def _close_transports(self) -> None:
        with self._lock:
            for transport in reversed(self._transports):
                # A handshake that never came to its end has left a timer, which holds the process.
                transport.packetizer.complete_handshake()
                with contextlib.suppress(EOFError, OSError):
                    transport.close()

    def _open_hop(self, hop: Hop, check: Callable[[Hop, str, bytes], None]) -> None:
        settings, gateway = hop.settings, self._hops[-1] if self._hops else None
        connect: dict[str, Any] = {
            "auth_strategy": Login(hop),
            "banner_timeout": settings.connect_timeout_s,
            "auth_timeout": LOGIN_S,
            "channel_timeout": settings.connect_timeout_s,
            "transport_factory": lambda sock, **more: self._transport(hop, sock, **more),
        }
        proxy = None
        if gateway is None:
            if settings.proxy_command:
                proxy = ProxyProcess(settings.proxy_command, hop.name)
                self._proxies.append(proxy)
                sock = proxy.sock
            else:
                sock = connect_tcp(settings, hop.name)
            self._sockets.append(sock)
            connect["sock"] = sock
        connection = fabric.Connection(
            settings.hostname,
            user=settings.user,
            port=settings.port,
            gateway=gateway or False,
            forward_agent=False,
            connect_timeout=max(1, round(settings.connect_timeout_s)),
            connect_kwargs=connect,
            config=fabric.Config(lazy=True, overrides={"load_ssh_configs": False}),
        )
        connection.client.set_missing_host_key_policy(_Policy(hop, check))
        try:
            connection.open()
        except paramiko.ChannelException as error:
            way = self.route[len(self._hops) - 1].name
            raise HostUnreachable(
                f"{hop.name}: {way} opens no way to {settings.hostname} port {settings.port}: "
                f"{error.text}; is it up, and does the jump host allow forwarding?"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            detail = str(error) or "the connection was closed"
            if "No existing session" in detail or "Error reading SSH protocol banner" in detail:
                detail = f"no SSH answer within {settings.connect_timeout_s:.0f} s, or none at all"
            if proxy and (said := proxy.last_words()):
                detail = f"its ProxyCommand said: {said}"
            raise HostUnreachable(
                f"{hop.name}: no SSH connection to {settings.address}: {detail}"
            ) from error
        self._hops.append(connection)

    def _transport(self, hop: Hop, sock: Any, **more: Any) -> paramiko.Transport:
        """A transport that asks for the kinds of key by which the host is known."""
        line = Line(sock)
        transport = paramiko.Transport(line, **more)
        options = transport.get_security_options()
        first = [kind for kind in wanted_types(hop.settings) if kind in options.key_types]
        options.key_types = [*first, *(k for k in options.key_types if k not in first)]
        self._lines.append(line)
        self._transports.append(transport)
        return transport


class _Policy:
    """What paramiko asks about every key, since it is given none itself."""

    def __init__(self, hop: Hop, check: Callable[[Hop, str, bytes], None]) -> None:
        self._hop = hop
        self._check = check

    def missing_host_key(self, _client: object, _name: str, key: paramiko.PKey) -> None:
        """Raises where the key is not trusted."""
        self._check(self._hop, key.get_name(), key.asbytes())


@contextlib.contextmanager
def open_route(route: Sequence[Hop]) -> Iterator[Connection]:
    """The route's connection, open to its last hop."""
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # failures are told once, by us
    for note in {hop.settings.note for hop in route if hop.settings.note}:
        sys.stderr.write(f"note: {note}\n")
    connection = Connection(route)
    try:
        connection.open()
        yield connection
    finally:
        connection.close()


class _KeySeen(Exception):
    """Ends a handshake that was made to see the key."""


def fetch_key(route: Sequence[Hop]) -> tuple[Hop, str, bytes, Finding]:
    """The key of the first hop that is not trusted, else of the last: hop, type, key, finding.

    The hops before it are verified and logged in to; of the hop itself nothing but the handshake is
    made. Raises InputError, HostUnreachable.
    """
    seen: list[tuple[Hop, str, bytes]] = []

    def look(hop: Hop, key_type: str, blob: bytes) -> None:
        seen.append((hop, key_type, blob))
        raise _KeySeen

    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    connection = Connection(route)
    try:
        connection.open(look=look)
    except _KeySeen:
        hop, key_type, blob = seen[0]
        return hop, key_type, blob, find_key(hop.settings, blob)
    except HostKeyError as error:
        return error.hop, error.key_type, error.blob, error.finding
    finally:
        connection.close()
    raise AssertionError("a handshake went on although its key was only to be seen")

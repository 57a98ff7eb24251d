"""A host behind SSH: one connection, and on it one channel to the host's program.

Settings are OpenSSH's (see ssh_settings), keys and agent too (ssh_keys). A host key that is not
pinned is refused, whatever StrictHostKeyChecking says (host_keys).
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator import bootstrap
from orchestrator.channel import PROGRAM, Channel
from orchestrator.errors import HostError, HostUnreachable, InputError
from orchestrator.ssh_settings import find_route

if TYPE_CHECKING:
    from orchestrator.ssh_connection import Connection
    from orchestrator.ssh_line import Session

START_S = 60.0  # until the host's shell has started the program


@contextlib.contextmanager
def open_ssh(host: Mapping[str, Any]) -> Iterator[Channel]:
    """A channel to the host's program on the host of this resolved config section.

    Reads `alias`, `ssh_config`, `python` and `work`. Leaving the block ends the program and the
    connection; what it started goes on. Raises InputError where a person has to do something first
    (a host key, a login, the interpreter), HostUnreachable, HostError.
    """
    alias, python = str(host["alias"]), str(host["python"])
    try:
        program = PROGRAM.read_bytes()
    except OSError as error:
        raise InputError(f"{PROGRAM} cannot be read: {error.strerror}") from error
    boot = bootstrap.prepare(python, str(host["work"]), program)
    route = find_route(alias, host.get("ssh_config"))
    from orchestrator.ssh_connection import open_route  # a quarter of a second: after the checks

    with open_route(route) as connection:
        session = connection.start(boot.command)
        _start_program(connection, session, boot, python)
        channel = Channel(
            session,
            session,
            name=alias,
            diagnose=lambda: connection.diagnose(session),
            abort=connection.abort,
        )
        try:
            yield channel
        finally:
            if not channel.stop_sending():
                connection.abort()
            session.end_input()
            if not channel.wait_closed():
                connection.abort()
                channel.wait_closed()


def _start_program(
    connection: Connection, session: Session, boot: bootstrap.Boot, python: str
) -> None:
    name = connection.name
    session.set_timeout(START_S)
    try:
        bootstrap.start(boot, session, name=name, python=python)
    except bootstrap.NoAnswerError as error:
        status, said = session.exit_status(), session.last_error() or str(error)
        if connection.reason or not connection.is_alive():
            raise HostUnreachable(
                f"{name}: the connection ended while the host's program was started "
                f"({connection.reason or said or 'no reason given'})"
            ) from None
        if status in (126, 127) or "not found" in said.lower():
            raise InputError(
                f"{name}: {python} cannot be run there ({said or f'exit status {status}'}); "
                "set host.python to an interpreter of Python 3.10 or newer"
            ) from None
        raise HostError(
            f"{name}: the login shell did not start {python}: "
            f"{said or f'it ended with {status}'}; is host.python an interpreter, and does "
            f"`ssh {shlex.quote(name)} true` work?"
        ) from None
    except TimeoutError:
        raise HostError(
            f"{name}: {python} did not start within {START_S:.0f} s; "
            "does a login file there wait for input?"
        ) from None
    except (EOFError, OSError) as error:
        raise HostUnreachable(
            f"{name}: the connection ended while the host's program was sent "
            f"({connection.reason or error})"
        ) from None
    session.set_timeout(None)

"""A server that is started for a measurement, asked only when it is ready, and gone behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.engines.container import Container, ended_by_sigterm
from jobs.engines.engine import Engine, Wanted
from jobs.engines.launched import filled, in_container
from jobs.engines.ports import HOST, leased_port
from jobs.engines.records import Facts, Request
from jobs.engines.server import GRACE_S, POLL_S, Server
from jobs.engines.talk import Address, ServerError

Say = Callable[[str], None]
DYING_S = 10.0  # from a request's failure to its server's end: vLLM looks after its core every 5 s


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that answers."""

    label: str  # "baseline", "speculative", …
    number: int  # which start of that label, from 0
    address: Address
    facts: Facts
    ready_s: float  # from its start to its first answer
    command: tuple[str, ...]
    server: Server | None  # None: a person's own, which is left alone

    def pids(self) -> list[int]:
        """Its processes, and this one that asks it."""
        return [os.getpid(), *(self.server.family() if self.server else ())]

    def reason(self, error: ServerError) -> ServerError:
        """The error of a request, or what the server died of, where it has or is about to."""
        if self.server is None:
            return error
        end = time.monotonic() + DYING_S
        try:
            while time.monotonic() < end:
                self.server.look()
                time.sleep(POLL_S)
        except ServerError as died:
            return ServerError(f"{self.label}: {died}")
        return ServerError(f"{self.label}: {error}")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server is waited for, in seconds."""

    start_s: float
    first_s: float  # for its first answer, which may compile kernels


@contextmanager
def started(
    engine: Engine,
    wanted: Wanted,
    environment: Mapping[str, str],
    folder: Path,
    *,
    label: str,
    number: int,
    first: Request,
    patience: Patience,
    say: Say,
) -> Iterator[Running]:
    """A server, ready: models and health answered, what it serves is what was asked for, and one real
    request answered, which a drafter that cannot be run does not survive.

    Its log is `folder`/LABEL-NUMBER.log. Raises ServerError with the reason that the server gives.
    """
    contained = wanted.launch is not None and in_container(wanted.launch)
    with leased_port() as port, ended_by_sigterm() if contained else nullcontext():
        wanted = replace(wanted, port=port)
        command = filled(wanted.launch, wanted) if wanted.launch else engine.command(wanted)
        address = Address(host=HOST, port=port)
        log = folder / f"{label}-{number}.log"
        try:
            server = (Container if contained else Server)(command, environment, log, folder)
        except ServerError as error:
            raise ServerError(f"{label}: {error}") from error
        grace_s = GRACE_S
        try:
            say(f"{label}: {engine.name} is starting (pid {server.process.pid}, log {log})")
            try:
                server.wait_until(lambda: engine.lacking(address), patience.start_s)
                facts = engine.facts(address)
                if not contained:  # where paths are those of its own
                    served_by_other(facts, wanted, address)
                running = Running(
                    label=label,
                    number=number,
                    address=address,
                    facts=facts,
                    ready_s=server.seconds,
                    command=tuple(command),
                    server=server,
                )
            except ServerError as error:
                raise ServerError(f"{label}: {error}") from error
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise ServerError(
                    f"{label}: what answers at {address.url} is no {engine.name}: {error!r}"
                ) from error
            ask_first(engine, running, first, patience)
            say(
                f"{label}: {engine.name} {facts.version} answers after {server.seconds:.0f} s on port "
                f"{port}"
            )
            yield replace(running, ready_s=server.seconds)
        except SystemExit:  # cancelled: whoever did it waits for some seconds only
            grace_s = 0.0
            raise
        finally:
            stopped = server.stop(grace_s)
            unheeded = f", {stopped.killed} of them killed" if stopped.killed else ""
            say(
                f"{label}: stopped in {stopped.seconds:.1f} s, {stopped.asked} processes{unheeded}"
                + (f"; pid {list(stopped.left)} cannot be ended" if stopped.left else "")
                + stopped.note
            )


def ask_first(engine: Engine, running: Running, first: Request, patience: Patience) -> None:
    """One real request. Raises ServerError, of a server that dies of it with what it died of."""
    try:
        engine.ask(running.address, replace(first, seconds=patience.first_s), 0.0, alone=False)
    except ServerError as error:
        found = running.reason(error)
        raise ServerError(f"{found} (at its first request; it had answered as healthy)") from error


def served_by_other(facts: Facts, wanted: Wanted, address: Address) -> None:
    """Raises ServerError where what answers on our port serves something else."""
    problems = [
        f"its {role} is {said}, not {asked}"
        for role, said, asked in (
            ("model", facts.model, wanted.target),
            ("drafter", facts.drafter, wanted.draft.folder if wanted.draft else None),
        )
        if said is not None and asked is not None and not same_place(said, asked)
    ]
    if problems:
        raise ServerError(
            f"{address.url} is not the server that was started: {'; '.join(problems)}"
        )


def same_place(said: str, asked: Path) -> bool:
    """Whether two paths lead to one folder."""
    return Path(said) == asked or Path(said).resolve() == asked.resolve()

"""A server in a container that `docker run --name NAME …` starts, in the foreground or detached.

Its processes are docker's children and not ours: its name is the handle, and what docker says of it is
all that is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from jobs.engines.launched import container_name
from jobs.engines.server import GONE_S, GRACE_S, POLL_S, Server, Stopped, reason, tail
from jobs.engines.talk import ServerError

DOCKER_S = 60.0  # for an answer of docker's own
REFUSED = (
    125  # of `docker run`: it started nothing; whether it created a container is not said by it
)
TAKEN = '"/{name}" is already in use'  # what docker says where the name was taken meanwhile
LINES = "200"  # of a container's log, in which the reason for its end is looked for


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM unwinds this process, so that a container is stopped behind it.

    The supervisor ends whoever descends from a run; containers do not.
    """

    def end(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Container(Server):
    """One started container. Whatever had its name before is never touched."""

    sees_all = False

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path
    ) -> None:
        """Start it. Raises ServerError, also where a container of its name is there already."""
        name = container_name(command)
        if name is None:
            raise ServerError("engine.launch starts a container without --name NAME; name it")
        self.name, self.docker = name, command[0]
        self.environment = {**os.environ, **environment}
        if self._state() is not None:
            raise ServerError(
                f"a container named {name} is there already; remove it (docker rm -f {name}) or name "
                "another in engine.launch"
            )
        super().__init__(command, environment, log, folder)

    def look(self) -> None:
        """See that it lives. Raises ServerError where the client has failed or the container ended."""
        code = self.process.poll()
        if code is None:  # in the foreground
            self._remember()
            return
        if code != 0:
            super().look()
        if self._state() != "true":
            raise ServerError(
                f"the container {self.name} ended after {self.seconds:.0f} s: {self.why()}"
            )

    def why(self) -> str:
        """The reason that its log gives for an end: of a detached one docker keeps it."""
        if self.process.poll() == REFUSED:  # what has the name is not ours
            return super().why()
        kept = self._ask("logs", "--tail", LINES, self.name)
        text = "" if kept.returncode else f"{kept.stdout}\n{kept.stderr}"
        return reason(f"{tail(self.log)}\n{text}")

    def stop(self, grace_s: float = GRACE_S) -> Stopped:
        """End the client, `docker stop NAME`, remove it, and see that docker knows it no more.

        The client comes first: until it has ended, it may create the container yet.
        """
        began = time.monotonic()
        client = super().stop(grace_s)
        try:
            note = self._stop_container(grace_s)
        except ServerError as error:
            note = f"; whether container {self.name} is gone is not known: {error}"
        return replace(client, seconds=time.monotonic() - began, note=note)

    def _stop_container(self, grace_s: float) -> str:
        """What became of the container, as is said behind how the client ended."""
        if self._state() is None:
            return ""
        if self.process.poll() == REFUSED and not self._created():
            return f"; container {self.name} is left alone, since docker did not start ours"
        self._ask("stop", "-t", f"{grace_s:.0f}", self.name, seconds=grace_s + DOCKER_S)
        self._ask("rm", "-f", self.name)
        end = time.monotonic() + GONE_S
        while (there := self._state() is not None) and time.monotonic() < end:
            time.sleep(POLL_S)
        return f"; container {self.name} " + ("is still there" if there else "is gone")

    def _created(self) -> bool:
        """Whether docker has created what we asked for and could not start it: nobody had the name
        before, docker does not say that somebody took it, and it never ran.
        """
        return (
            TAKEN.format(name=self.name) not in tail(self.log)
            and self._state("Status") == "created"
        )

    def _state(self, part: str = "Running") -> str | None:
        """'true' while it runs, 'false' else; None: docker knows no container of this name.

        `part` names another part of what docker keeps of its state.
        """
        words = ("--type", "container", "-f", f"{{{{.State.{part}}}}}", self.name)
        found = self._ask("inspect", *words)
        if found.returncode == 0:
            return found.stdout.strip()
        if "no such" in found.stderr.lower():
            return None
        said = (found.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ServerError(f"{self.docker} cannot be asked for the container {self.name}: {said}")

    def _ask(self, *words: str, seconds: float = DOCKER_S) -> subprocess.CompletedProcess[str]:
        """One of docker's own commands. Raises ServerError where it hangs or is not there."""
        try:
            return subprocess.run(
                [self.docker, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServerError(
                f"{self.docker} {words[0]} did not answer within {seconds:g} s"
            ) from error
        except OSError as error:
            raise ServerError(f"{self.docker} cannot be started: {error.strerror}") from error

"""What the runs of one command share: the code, the connection to each host, the tracking store."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.channel import Channel, open_local
from orchestrator.check_code import check_code, modules_of
from orchestrator.errors import HostUnreachable, OrchestratorError
from orchestrator.paths import CLONE, runs_folder
from orchestrator.plan import Input, inputs_of
from orchestrator.show import Show
from orchestrator.snapshot import Snapshot, take_snapshot
from orchestrator.tracking import Tracking

if TYPE_CHECKING:
    from orchestrator.tracking import Store

T = TypeVar("T")
LONGEST_PAUSE_S = 8.0
MOST_LOSSES = 100  # a connection that always breaks is no connection


@dataclass(frozen=True, kw_only=True)
class Link:
    """An open connection to a host; `root` is the folder that its program works below."""

    channel: Channel
    root: str
    stack: ExitStack
    opened: float


class Session:
    """Use as a context manager: leaving it closes what was opened."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.folders: list[Path] = []  # of the runs made, in order
        self.failed = False  # something went wrong that no run's records tell
        self.cancelled = False  # the last run was cancelled, so a sweep stops
        self.unfiled: list[Path] = []  # runs of earlier commands that were judged meanwhile
        self.asked: set[str] = set()  # hosts that were asked for such runs
        self.lost: set[str] = set()  # hosts that are being tried again
        self._links: dict[str, Link] = {}
        self._snapshot: Snapshot | None = None
        self._inputs: dict[str, dict[str, Input]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tracking")
        self._stores: dict[Tracking, Future[Store]] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for link in self._links.values():
            link.stack.close()

    def snapshot(self) -> Snapshot:
        """The code as it is now, looked over; taken once a command, so that a sweep tests one thing."""
        if self._snapshot is None:
            snapshot = take_snapshot(CLONE)
            check_code((CLONE / name for name in snapshot.tree.files), own=True)
            self._snapshot = snapshot
        return self._snapshot

    def inputs(self, config: dict[str, Any]) -> dict[str, Input]:
        """The inputs of a config, read once a command where a sweep shares them."""
        sections = ("job", "target", "drafter", "data", "engine")
        key = json.dumps([config.get(name) for name in sections], sort_keys=True)
        if key not in self._inputs:
            inputs = inputs_of(config)
            check_code(scripts_of(inputs))
            self._inputs[key] = inputs
        return self._inputs[key]

    def modules(self, config: dict[str, Any]) -> list[str]:
        """What a script of one's own imports."""
        return modules_of(scripts_of(self.inputs(config)))

    def link(self, host: dict[str, Any]) -> Link:
        """The connection to a host; opened where there is none."""
        key = key_of(host)
        if key not in self._links:
            with ExitStack() as stack:
                channel = stack.enter_context(open_channel(host))
                root = channel.hello()["root"]
                self._links[key] = Link(
                    channel=channel, root=root, stack=stack.pop_all(), opened=time.monotonic()
                )
        return self._links[key]

    def link_again(self, host: dict[str, Any]) -> Link:
        """`link` to a host where a run may be going on: whatever is in the way says nothing of it.

        Raises HostUnreachable, also for a login that is refused or an interpreter that is not there.
        """
        try:
            return self.link(host)
        except HostUnreachable:
            raise
        except OrchestratorError as error:
            raise HostUnreachable(str(error)) from error

    def drop(self, host: dict[str, Any]) -> None:
        """Forget the connection to a host, which was lost or is not wanted any more."""
        link = self._links.pop(key_of(host), None)
        if link is not None:
            link.channel.abort()
            link.stack.close()

    def patiently(self, host: dict[str, Any], action: Callable[[], T]) -> T:
        """`action`, again over a new connection where the host is lost on the way.

        `action` must be such that doing it again goes on where it was. A host that could not be
        reached in the first place is not tried again. Raises HostUnreachable when the host has not
        answered for its `patience_s`, or was lost MOST_LOSSES times.
        """
        lost_at = None
        pause = 0.5
        self.link(host)
        for losses in itertools.count(1):
            try:
                if lost_at is not None:
                    self.link_again(host)
                    self.lost.discard(key_of(host))
                return action()
            except HostUnreachable as error:
                now = time.monotonic()
                link = self._links.get(key_of(host))
                if lost_at is None or (link and now - link.opened > LONGEST_PAUSE_S):
                    lost_at, pause = now, 0.5  # it had been reached again, and stayed
                self.drop(host)
                left = lost_at + host["patience_s"] - now
                if host["alias"] is None or left <= 0 or losses >= MOST_LOSSES:
                    raise
                self.lost.add(key_of(host))
                self.show.trouble(f"lost     {error}; trying again for {left:.0f} s")
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("unreachable")

    def store(self, tracking: Tracking, results: Path) -> Future[Store]:
        """The tracking store; the first call starts to open it, beside whatever else goes on."""
        if tracking not in self._stores:
            self._stores[tracking] = self._pool.submit(open_and_heal, tracking, results)
        return self._stores[tracking]


def scripts_of(inputs: dict[str, Input]) -> list[Path]:
    """The files of a script that lies on this machine."""
    script = inputs.get("script")
    if script is None or script.tree is None:
        return []
    sources = [file.source for file in script.tree.files.values()]
    return [source for source in sources if isinstance(source, Path)]


def key_of(host: dict[str, Any]) -> str:
    """What tells one host's connection from another's."""
    return json.dumps([host[name] for name in ("alias", "ssh_config", "work", "python")])


def open_channel(host: dict[str, Any]) -> AbstractContextManager[Channel]:
    """A channel to the host's program: below this command, or over SSH."""
    if host["alias"] is None:
        work = Path(host["work"]).expanduser()
        return open_local(work, host["python"], name=f"host {host['name']}")
    from orchestrator.ssh import open_ssh

    return open_ssh(host)


def open_and_heal(tracking: Tracking, results: Path) -> Store:
    """Open the store, and end what a command that was killed while filing left as running there."""
    from orchestrator.record import heal, open_store

    store = open_store(tracking)
    heal(store, runs_folder(results))
    return store

"""A TCP line on 127.0.0.1 that can be long, frozen, cut or closed, in user space.

Each direction takes half of the round trip. What was read at t is passed on at t plus the delay, so
order and bandwidth stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

PART = 1 << 16
UNDER_WAY = 1 << 24  # bytes that one direction holds before it reads no more

T = TypeVar("T")


class DelayLine:
    """Passes connections on to `target_port`, `round_trip_s` seconds away. A context manager.

    `port` is where it listens; `sent` and `received` count the bytes passed on to the target and
    back; `connections` how many were taken.
    """

    def __init__(self, target_port: int, round_trip_s: float = 0.0) -> None:
        self.round_trip_s = round_trip_s
        self.sent = 0
        self.received = 0
        self.connections = 0
        self._target_port = target_port
        self._refusing = False
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="delay line", daemon=True
        )
        self._thread.start()
        self.flowing = self._run(_set_event())
        self._server = self._run(asyncio.start_server(self._take, "127.0.0.1", 0, limit=PART))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> DelayLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def freeze(self) -> None:
        """Passes nothing on any more; connections stay, and new ones are taken."""
        self._loop.call_soon_threadsafe(self.flowing.clear)

    def thaw(self) -> None:
        """Passes on again, also what was held back."""
        self._loop.call_soon_threadsafe(self.flowing.set)

    def cut(self) -> None:
        """Resets all connections, at both ends."""
        self._run(self._cut())

    def refuse(self, refusing: bool = True) -> None:
        """Whether new connections are reset at once; those that are open go on."""
        self._refusing = refusing

    def reset_counts(self) -> None:
        """Counts from zero."""
        self.sent = self.received = self.connections = 0

    def close(self) -> None:
        """Cuts everything and ends the thread."""
        if self._loop.is_closed():
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cut(self) -> None:
        for link in list(self._links):
            link.cut()

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        self.flowing.set()
        # Tasks that end by themselves: asyncio complains about a server's task that is cancelled.
        await asyncio.gather(
            *(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True
        )

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port, limit=PART
            )
        except OSError:
            _reset(writer)
            return
        for end in (writer, far_writer):
            end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(writer, far_writer)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pass_on(reader, far_writer, self._count_sent),
                self._pass_on(far_reader, writer, self._count_received),
            )
        except OSError:
            pass
        finally:
            link.cut()
            self._links.discard(link)

    def _count_sent(self, size: int) -> None:
        self.sent += size

    def _count_received(self, size: int) -> None:
        self.received += size

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None],
    ) -> None:
        """One direction: parts with the time at which each is due, b"" for the end."""
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=UNDER_WAY // PART)
        taking = asyncio.create_task(self._take_parts(reader, parts))
        try:
            while True:
                due, part = await parts.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self.flowing.wait()
                if not part:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(part)
                await writer.drain()
                count(len(part))
        finally:
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await taking

    async def _take_parts(
        self, reader: asyncio.StreamReader, parts: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        part = b"-"
        while part:
            try:
                part = await reader.read(PART)
            except OSError:
                part = b""
            await parts.put((self._loop.time() + self.round_trip_s / 2, part))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)


class _Link:
    """Both ends of one connection."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._ends = (near, far)

    def cut(self) -> None:
        """Resets both."""
        for end in self._ends:
            _reset(end)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a reset instead of an orderly end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()


async def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event

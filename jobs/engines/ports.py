"""Ports for servers: a block of free ones, leased so that two runs on one host do not share them.

An engine opens more ports than the one it is asked on (SGLang a dozen above it), so that blocks of
BLOCK ports are leased, each by a lock on a file that the operating system frees with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.errors import BadInput

FIRST, LAST, BLOCK = 21000, 29000, 50
HOST = "127.0.0.1"


@contextmanager
def leased_port(folder: Path | None = None) -> Iterator[int]:
    """The first port of a block in which it and its neighbours were free. Raises BadInput."""
    folder = folder or Path(tempfile.gettempdir()) / "orchestrator-port-leases"
    open_to_all(folder)
    for port in range(FIRST, LAST, BLOCK):
        held = lock_file(folder / f"{port}.lock")
        if held is None:
            continue
        try:
            if locked(held) and all(is_free(port + i) for i in range(4)):
                yield port
                return
        finally:
            os.close(held)
    raise BadInput(f"no block of {BLOCK} ports from {FIRST} to {LAST} is free on this host")


def open_to_all(folder: Path) -> None:
    """Make the folder, in which every user of the host leaves locks. Raises BadInput."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            folder.chmod(0o1777)  # mkdir's own mode is cut by the umask
    except OSError as error:
        raise BadInput(f"{folder} cannot be made: {error.strerror}") from error


def lock_file(path: Path) -> int | None:
    """The lock's file, open; None: it is somebody else's, and so is the block."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # In a folder like /tmp the kernel refuses O_CREAT on a file of somebody else's.
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        held = os.open(path, flags | os.O_CREAT, 0o666)
        os.fchmod(held, 0o666)
    except OSError:
        return None
    return held


def locked(fd: int) -> bool:
    """Whether the lock could be had without waiting."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True

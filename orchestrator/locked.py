"""A lock on a folder, for a file in it that is read, changed and written by one command at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Within the block no other command of ours has this lock; it waits for that. Raises OSError.

    The kernel gives the lock back when its holder dies, and no file is left behind.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""Work on the processor's cores side by side.

An operation of a small drafter is too little for two cores: they wait for each other longer than they
work. So each core takes whole pieces of work, and one core does an operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

SMALL = 1024  # width of states up to which an operation is too little for two cores
AHEAD = 2  # pieces a core that are begun before the first one is taken, so that none waits
Piece = TypeVar("Piece")
Made = TypeVar("Made")


def spread(
    work: Callable[[Piece], Made], pieces: Iterable[Piece], cores: int
) -> Iterator[tuple[Piece, Made]]:
    """Each piece with what `work` makes of it, in order; several at once where `cores` are.

    Pieces are made, and results taken, by the caller's thread alone. `work` may share what it keeps
    with other pieces, as long as making it twice does no harm.
    """
    if cores < 2:
        for piece in pieces:
            yield piece, work(piece)
        return
    threads = torch.get_num_threads()
    begun: deque[tuple[Piece, Future[Made]]] = deque()
    # PyTorch counts the cores of an operation a thread.
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for piece in pieces:
                begun.append((piece, pool.submit(work, piece)))
                if len(begun) > AHEAD * cores:
                    first, made = begun.popleft()
                    yield first, made.result()
            for first, made in begun:
                yield first, made.result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # of threads that come later

"""Pieces of work on several cores come back in order, and failures with them."""

from __future__ import annotations

import threading

import pytest
import torch

from eagle3.search.spread import AHEAD, spread


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_pieces_come_in_order(cores: int) -> None:
    made = list(spread(lambda n: n * n, range(40), cores))
    assert made == [(n, n * n) for n in range(40)]
    assert list(spread(lambda n: n, [], cores)) == []


def test_pieces_are_at_work_together() -> None:
    meeting = threading.Barrier(3)
    made = list(spread(lambda n: meeting.wait(60), range(6), 3))
    assert sorted(place for _, place in made) == [0, 0, 1, 1, 2, 2]


def test_few_pieces_are_begun_before_the_first_is_taken() -> None:
    asked = []

    def pieces():
        for n in range(100):
            asked.append(n)
            yield n

    found = spread(lambda n: n, pieces(), 2)
    assert next(found) == (0, 0)
    assert len(asked) == 2 * AHEAD + 1
    found.close()


@pytest.mark.parametrize("cores", [1, 2])
def test_a_failure_is_raised_and_nothing_begins_behind_it(cores: int) -> None:
    begun = []

    def work(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise RuntimeError("piece 3")
        return n

    with pytest.raises(RuntimeError, match="piece 3"):
        list(spread(work, range(1000), cores))
    assert len(begun) < 20


def test_an_operation_has_one_core_there_and_all_of_them_again_behind_it() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = {n for _, n in spread(lambda _: torch.get_num_threads(), range(6), 3)}
        assert found == {1}
        assert torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(threads)

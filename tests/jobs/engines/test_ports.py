"""Two runs on one host never share a block of ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from eagle3.errors import BadInput
from jobs.engines import ports
from jobs.engines.ports import BLOCK, HOST, is_free, leased_port

FIRST, LAST = 29000, 29500  # behind those that servers of other tests may have just now


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "FIRST", FIRST)
    monkeypatch.setattr(ports, "LAST", LAST)


def test_leases_that_are_held_at_once_are_of_other_blocks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        leased = [stack.enter_context(leased_port(tmp_path)) for _ in range(3)]
    assert len(set(leased)) == 3
    assert all(FIRST <= port < LAST and (port - FIRST) % BLOCK == 0 for port in leased)


def test_a_lease_is_given_back_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), leased_port(tmp_path) as first:
        raise RuntimeError
    with leased_port(tmp_path) as again:
        assert again == first


def test_a_lease_ends_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\nfrom jobs.engines import ports\n"
        f"ports.FIRST, ports.LAST = {FIRST}, {LAST}\n"
        "with ports.leased_port(pathlib.Path(sys.argv[1])) as port:\n"
        "    print(port, flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        held = int(holder.stdout.readline())
        with leased_port(tmp_path) as other:
            assert other != held
        holder.kill()
    with leased_port(tmp_path) as port:
        assert port == held


def test_a_server_does_not_inherit_the_lease(tmp_path: Path) -> None:
    with leased_port(tmp_path) as first:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with leased_port(tmp_path) as again:
            assert again == first
    finally:
        child.kill()
        child.wait()


def test_a_block_in_which_somebody_listens_is_passed_over(tmp_path: Path) -> None:
    with leased_port(tmp_path) as first:
        pass
    with socket.socket() as somebody:
        somebody.bind((HOST, first + 2))
        somebody.listen()
        assert not is_free(first + 2)
        with leased_port(tmp_path) as port:
            assert port > first


def test_a_lock_that_cannot_be_opened_is_somebody_elses(tmp_path: Path) -> None:
    with leased_port(tmp_path) as first:
        pass
    (tmp_path / f"{first}.lock").unlink()
    (tmp_path / f"{first}.lock").mkdir()  # which even root cannot open for writing
    with leased_port(tmp_path) as port:
        assert port > first


def test_no_free_block_is_an_error(tmp_path: Path) -> None:
    for port in range(FIRST, LAST, BLOCK):
        (tmp_path / f"{port}.lock").mkdir()
    with (
        pytest.raises(BadInput, match="no block of 50 ports from 29000 to 29500 is free"),
        leased_port(tmp_path),
    ):
        pass


def test_every_user_may_take_what_another_has_left(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    before = os.umask(0o077)
    try:
        with leased_port(folder) as port:
            pass
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o1777 == 0o1777
    assert (folder / f"{port}.lock").stat().st_mode & 0o666 == 0o666

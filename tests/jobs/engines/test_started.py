"""A server is measured when it has answered, and gone behind that, whatever becomes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from jobs.engines.arms import Measured
from jobs.engines.attached import attach
from jobs.engines.disturbance import Look
from jobs.engines.engine import Draft, Wanted
from jobs.engines.load import run_pass
from jobs.engines.records import Facts, Request
from jobs.engines.started import Patience, Running, served_by_other, started
from jobs.engines.talk import Address, ServerError, get
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import ENGINES, Serve
from tests.jobs.engines.made import request

pytestmark = pytest.mark.runs  # each starts servers

BOTH = pytest.mark.parametrize("name", ["sglang", "vllm"])
START_S, FIRST_S = 60.0, 20.0
DYING = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x256 and 384x128)"

Begin = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def begin(tmp_path: Path, python: str, said: list[str]) -> Begin:
    """`started`, with a fake engine behind the interpreter."""

    def start(
        name: str = "sglang",
        draft: Draft | None = None,
        fault: str = "",
        first: Request | None = None,
        start_s: float = START_S,
        first_s: float = FIRST_S,
    ) -> AbstractContextManager[Running]:
        return started(
            ENGINES[name](),
            Wanted(python=python, target=tmp_path / "target", port=0, draft=draft),
            {fake.FAULT: fault},
            tmp_path,
            label="speculative" if draft else "baseline",
            number=0,
            first=first or request(),
            patience=Patience(start_s=start_s, first_s=first_s),
            say=said.append,
        )

    return start


def refused(start: AbstractContextManager[Running]) -> str:
    """The error of a server that is never measured."""
    with pytest.raises(ServerError) as caught, start:
        raise AssertionError("it was measured")
    return str(caught.value)


@BOTH
def test_one_that_answers_is_measured_and_gone_behind_it(
    name: str,
    begin: Begin,
    draft: Draft,
    said: list[str],
    tmp_path: Path,
    is_running: Callable[[int], bool],
) -> None:
    with begin(name, draft) as running:
        assert running.server is not None
        pid = running.server.process.pid
        assert pid in running.pids()
        assert (running.label, running.number) == ("speculative", 0)
        assert running.facts.model == str(tmp_path / "target")
        assert running.facts.version == {"sglang": "0.5.23", "vllm": "0.32.0"}[name]
        assert str(running.address.port) in running.command
        assert get(running.address, "/v1/models")
    assert not is_running(pid)
    with pytest.raises(ServerError, match="Connection refused"):
        get(running.address, "/v1/models")
    first, second, third = said
    assert first == (
        f"speculative: {name} is starting (pid {pid}, log {tmp_path / 'speculative-0.log'})"
    )
    assert re.fullmatch(rf"speculative: {name} 0\.\d+\.\d+ answers after \d+ s on port \d+", second)
    assert re.fullmatch(r"speculative: stopped in \d+\.\d s, 1 processes", third)


def test_two_stand_beside_each_other(begin: Begin, draft: Draft) -> None:
    with begin() as plain, begin("sglang", draft) as drafted:
        assert plain.address.port != drafted.address.port
        assert plain.facts.flags["speculative_algorithm"] is None
        assert drafted.facts.flags["speculative_num_steps"] == 3


@BOTH
def test_a_drafter_that_cannot_be_run_is_found_by_the_first_request(
    name: str, begin: Begin, draft: Draft
) -> None:
    error = refused(begin(name, draft, "dies", request(first=fake.VICTIM)))
    assert re.fullmatch(
        rf"speculative: the server ended with exit code 3 after \d+ s: {re.escape(DYING)} "
        r"\(at its first request; it had answered as healthy\)",
        error,
    )


def test_one_that_dies_a_while_behind_its_answer_is_told_by_its_reason(
    begin: Begin, draft: Draft
) -> None:
    error = refused(begin("vllm", draft, "dies_later", request(first=fake.VICTIM)))
    assert "the server ended with exit code 3 after" in error
    assert DYING in error


@BOTH
def test_one_that_dies_while_it_is_measured_is_told_by_its_reason(
    name: str, begin: Begin, draft: Draft
) -> None:
    with begin(name, draft, "dies") as running:
        with pytest.raises(ServerError) as caught:
            run_pass(
                ENGINES[name](),
                running.address,
                [request(), request(first=fake.VICTIM)],
                arm="speculative",
                server=0,
                number=0,
                concurrency=2,
                look=lambda: Look(at=0.0, busy=0.0, own=0.0),
            )
        found = str(running.reason(caught.value))
    assert re.fullmatch(
        rf"speculative: the server ended with exit code 3 after \d+ s: {re.escape(DYING)}", found
    )


def test_an_error_of_one_that_lives_stays_what_it_is(
    begin: Begin, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.engines.started.DYING_S", 0.3)
    error = refused(begin("sglang", draft, "refuses", request(first=fake.VICTIM)))
    assert re.fullmatch(
        r"speculative: http://\S+/generate answered 400: .*the prompt is too long.* "
        r"\(at its first request; it had answered as healthy\)",
        error,
    )


def test_a_first_request_that_hangs_is_waited_for_so_long(
    begin: Begin, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.engines.started.DYING_S", 0.3)
    error = refused(begin("sglang", draft, "hangs", request(first=fake.VICTIM), first_s=0.5))
    assert "/generate did not finish within 0.5 s" in error


@BOTH
def test_one_that_dies_at_its_start_says_why(name: str, begin: Begin, said: list[str]) -> None:
    error = refused(begin(name, fault="dies_at_start"))
    assert re.fullmatch(
        rf"baseline: the server ended with exit code 3 after \d+ s: {re.escape(DYING)}", error
    )
    assert said[-1].startswith("baseline: stopped in ")


@BOTH
def test_one_that_is_never_ready_says_what_lacked(name: str, begin: Begin) -> None:
    error = refused(begin(name, fault="never_ready", start_s=2.0))
    assert re.fullmatch(
        r"baseline: the server was not ready after 2 s: http://127\.0\.0\.1:\d+/health\w* answered "
        r"503: still loading; its log ends: \d+",
        error,
    )


@BOTH
def test_another_server_on_our_port_is_not_measured(
    name: str, begin: Begin, tmp_path: Path
) -> None:
    error = refused(begin(name, fault="other_model"))
    assert re.fullmatch(
        r"baseline: http://127\.0\.0\.1:\d+ is not the server that was started: its model is "
        rf"/models/other, not {re.escape(str(tmp_path / 'target'))}",
        error,
    )


def test_a_folder_may_be_named_in_another_way(tmp_path: Path, begin: Begin, draft: Draft) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with begin("sglang", draft) as running:
        wanted = Wanted(python="", target=tmp_path / "link", port=0, draft=draft)
        served_by_other(running.facts, wanted, running.address)
        other = Wanted(
            python="", target=tmp_path / "link", port=0, draft=Draft(folder=tmp_path, steps=3)
        )
        with pytest.raises(ServerError, match=r"its drafter is .*/drafter, not "):
            served_by_other(running.facts, other, running.address)


def test_whose_work_is_ours_is_known_of_servers_that_were_started(
    begin: Begin, serve: Serve, draft: Draft
) -> None:
    with begin() as plain, begin("sglang", draft) as drafted:
        assert plain.server is not None
        assert drafted.server is not None
        pids = {os.getpid(), plain.server.process.pid, drafted.server.process.pid}
        assert Measured(starts=[plain, drafted]).pids() == pids
        attached = attach(ENGINES["sglang"](), serve(draft=draft).url, "speculative")
        assert Measured(starts=[plain, attached]).pids() is None


def test_what_fails_while_one_stands_does_not_leave_it_standing(
    begin: Begin, is_running: Callable[[int], bool]
) -> None:
    pids = []

    def interrupted() -> None:
        with begin() as running:
            pids.extend(running.pids())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [pid for pid in pids if is_running(pid)] == [os.getpid()]


def test_flags_that_contradict_the_job_start_nothing(
    tmp_path: Path, python: str, said: list[str]
) -> None:
    with (
        pytest.raises(Exception, match=r"engine\.flags\.port is set by the job itself"),
        started(
            ENGINES["sglang"](),
            Wanted(python=python, target=tmp_path, port=0, draft=None, flags={"port": 1}),
            {},
            tmp_path,
            label="baseline",
            number=0,
            first=request(),
            patience=Patience(start_s=1, first_s=1),
            say=said.append,
        ),
    ):
        pass
    assert said == []


def test_a_persons_own_server_is_not_looked_into() -> None:
    error = ServerError("it said no")
    running = Running(
        label="speculative",
        number=0,
        address=Address(host="127.0.0.1", port=1),
        facts=Facts(engine="sglang", version=None, model=None, drafter=None, flags={}),
        ready_s=0.0,
        command=(),
        server=None,
    )
    assert running.reason(error) is error

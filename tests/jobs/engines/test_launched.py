"""Servers that a person's own command starts: measured as others are, and gone behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import BadInput
from jobs.engines.arms import Measured
from jobs.engines.container import Container
from jobs.engines.engine import Draft, Wanted
from jobs.engines.launched import check_launch, container_name, filled, in_container, launch_notes
from jobs.engines.sglang import SGLang
from jobs.engines.started import Patience, Running, started
from jobs.engines.talk import ServerError, get
from tests.jobs.engines import fake
from tests.jobs.engines.made import request

pytestmark = pytest.mark.runs  # each starts servers

AMPLE_S = 30.0
FAKE = (sys.executable, fake.__file__, "-m", "sglang.launch_server")
LAUNCH = (*FAKE, "--port={port}", "--model-path", "{model}")
DRAFTED = (
    *(*LAUNCH, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "{drafter}"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
Begin = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def begin(tmp_path: Path, said: list[str]) -> Begin:
    """`started`, with a command of one's own."""

    def start(
        words: tuple[str, ...], draft: Draft | None = None
    ) -> AbstractContextManager[Running]:
        return started(
            SGLang(),
            Wanted(python="", target=tmp_path / "target", port=0, draft=draft, launch=words),
            {},
            tmp_path,
            label="speculative" if draft else "baseline",
            number=0,
            first=request(),
            patience=Patience(start_s=60.0, first_s=20.0),
            say=said.append,
        )

    return start


def asked_of(docker: Path) -> list[str]:
    return (docker / "asked").read_text().splitlines()


def refused(start: AbstractContextManager[Running]) -> str:
    with pytest.raises(ServerError) as caught, start:
        raise AssertionError("it was measured")
    return str(caught.value)


def test_the_places_are_filled_in_wherever_they_stand_and_other_braces_stay(tmp_path: Path) -> None:
    draft = Draft(folder=tmp_path / "d", steps=3)
    wanted = Wanted(python="", target=Path("/m"), port=21050, draft=draft)
    words = ["--port={port}", "-v", "{model}:{model}:ro", "{drafter}", '{"a": {"b": 1}}', "{other}"]
    assert filled(words, wanted) == [
        *("--port=21050", "-v", "/m:/m:ro", str(tmp_path / "d"), '{"a": {"b": 1}}', "{other}")
    ]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["docker", "run", "--name", "mine", "image"], "mine"),
        (["docker", "run", "--name=mine", "image"], "mine"),
        (["docker", "run", "image"], None),
        (["docker", "run", "--name"], None),
        (["docker", "run", "--name="], None),
    ],
)
def test_a_container_is_known_by_its_name(words: list[str], name: str | None) -> None:
    assert container_name(words) == name
    assert in_container(words)
    assert not in_container(["bash", "-c", "docker run"])


def test_one_that_answers_is_measured_and_gone_behind_it(
    begin: Begin, draft: Draft, is_running: Callable[[int], bool]
) -> None:
    with begin(DRAFTED, draft) as running:
        assert running.server is not None
        pid = running.server.process.pid
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert running.command[4] == f"--port={running.address.port}"
        assert running.facts.drafter == str(draft.folder)
        assert pid in running.pids()
    assert not is_running(pid)


def test_one_that_dies_at_once_is_shown_with_its_last_words(begin: Begin) -> None:
    words = ("sh", "-c", "echo 'ValueError: no such layer' >&2; exit 3", "{port}")
    error = refused(begin(words))
    assert error.startswith("baseline: the server ended with exit code 3 after ")
    assert error.endswith(" s: ValueError: no such layer")


def test_a_command_that_is_not_there_is_one_error(begin: Begin) -> None:
    assert refused(begin(("/no/launcher", "{port}"))) == (
        "baseline: /no/launcher cannot be started: No such file or directory"
    )


def test_a_wrapper_and_a_server_that_ignore_sigterm_are_killed_as_a_group(
    begin: Begin, is_running: Callable[[int], bool]
) -> None:
    script = 'trap "" TERM; "$@" & wait'
    with begin(("sh", "-c", script, "sh", *LAUNCH)) as running:
        assert running.server is not None
        pids = running.server.family()
        assert len(pids) == 2
        stopped = running.server.stop(0.3)
        assert (stopped.asked, stopped.killed, stopped.left) == (2, 2, ())
    assert [pid for pid in pids if is_running(pid)] == []


@pytest.mark.parametrize("detached", [["-d"], []])
def test_a_container_is_measured_and_gone_behind_it(
    detached: list[str], begin: Begin, docker: Path, said: list[str]
) -> None:
    with begin(("docker", "run", *detached, "--name", "mine", *LAUNCH)) as running:
        assert running.server is not None
        assert get(running.address, "/v1/models")
        measured = Measured()
        measured.starts.append(running)
        assert measured.pids() is None
    with pytest.raises(ServerError, match="Connection refused"):
        get(running.address, "/v1/models")
    assert not (docker / "mine").exists()
    assert said[-1].endswith("; container mine is gone")
    ended = [line for line in asked_of(docker) if line.startswith(("stop", "rm"))]
    assert ended == ["stop -t 15 mine", "rm -f mine"]


@pytest.mark.parametrize("detached", [["-d"], []])
def test_a_container_that_dies_at_once_is_shown_with_its_last_words(
    detached: list[str], begin: Begin, docker: Path
) -> None:
    dying = ("sh", "-c", "echo 'ValueError: no such layer' >&2; exit 3", "{port}")
    error = refused(begin(("docker", "run", *detached, "--name", "mine", *dying)))
    assert error.startswith("baseline: the ")
    assert error.endswith("s: ValueError: no such layer")
    assert not (docker / "mine").exists()


@pytest.mark.parametrize("detached", [[], ["-d"]])
@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--gpus", "all", "sleep", "600"], 125, "could not select device driver"),
        (["--publish", "80:80", "image"], 125, "bind: address already in use"),
        (["/", "600"], 126, "is a directory"),
        (["/none/sglang", "600"], 127, "executable file not found"),
    ],
)
def test_a_container_that_was_created_and_cannot_be_started_is_gone(
    words: list[str],
    code: int,
    why: str,
    detached: list[str],
    begin: Begin,
    docker: Path,
    said: list[str],
) -> None:
    error = refused(begin(("docker", "run", *detached, "--name", "mine", *words)))
    assert f"ended with exit code {code}" in error
    assert why in error
    assert "rm -f mine" in asked_of(docker)
    assert not (docker / "mine").exists()
    assert said[-1].endswith("; container mine is gone")


def test_one_that_somebody_else_creates_meanwhile_is_left_alone(
    begin: Begin, docker: Path, tmp_path: Path, said: list[str]
) -> None:
    before_run(tmp_path, "fake_docker run -d --name mine --gpus all sleep 600")
    error = refused(begin(("docker", "run", "--name", "mine", *LAUNCH)))
    assert "is already in use" in error
    assert (docker / "mine").exists()
    assert "left alone" in said[-1]


def test_a_container_of_that_name_that_was_there_is_left_alone(begin: Begin, docker: Path) -> None:
    words = ["docker", "run", "-d", "--name", "mine", "sleep", "600"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    error = refused(begin(("docker", "run", "--name", "mine", *LAUNCH)))
    assert error.startswith(
        "baseline: a container named mine is there already; remove it (docker rm"
    )
    assert (docker / "mine").exists()
    assert not (docker / "mine" / "code").exists()


def before_run(tmp_path: Path, script: str) -> None:
    """Have the docker on the path do this in front of its first `run`."""
    program, once = tmp_path / "bin" / "docker", tmp_path / "once"
    fake = program.rename(program.with_name("fake_docker"))
    program.write_text(
        f"#!/bin/sh\nif [ $1 = run ] && mkdir {once} 2>/dev/null; then\n{script}\nfi\n"
        f'exec {fake} "$@"\n'
    )
    program.chmod(0o755)


@pytest.mark.parametrize("detached", [["-d"], []])
def test_a_container_that_somebody_else_starts_meanwhile_is_left_alone(
    detached: list[str], begin: Begin, docker: Path, tmp_path: Path, said: list[str]
) -> None:
    before_run(tmp_path, "fake_docker run -d --name mine sh -c 'echo KeyError: theirs; sleep 600'")
    error = refused(begin(("docker", "run", *detached, "--name", "mine", *LAUNCH)))
    assert error.endswith('"/mine" is already in use.')
    assert "; container mine is left alone" in said[-1]
    assert (docker / "mine").exists()
    assert not (docker / "mine" / "code").exists()


def test_a_container_that_docker_creates_as_it_is_ended_is_gone(
    docker: Path, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    creating = tmp_path / "creating"
    create = "fake_docker run -d --name mine sleep 600"
    before_run(
        tmp_path,
        f"trap '{create}; exit 0' TERM; touch {creating}; while :; do sleep 0.05; done",
    )
    words = ("docker", "run", "-d", "--name", "mine", *LAUNCH)
    server = Container(words, {}, tmp_path / "log", tmp_path)
    eventually(creating.exists, AMPLE_S)
    stopped = server.stop(AMPLE_S)
    assert "run -d --name mine" in asked_of(docker)
    assert stopped.note == "; container mine is gone"
    assert not (docker / "mine").exists()


def test_a_docker_that_is_not_there_or_says_no_is_one_error(
    begin: Begin, tmp_path: Path, docker: Path
) -> None:
    words = ("run", "--name", "mine", *LAUNCH)
    assert refused(begin((str(tmp_path / "none" / "docker"), *words))).endswith(
        "docker cannot be started: No such file or directory"
    )
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\necho permission denied >&2; exit 1\n")
    assert refused(begin(("docker", *words))) == (
        "baseline: docker cannot be asked for the container mine: permission denied"
    )


CANCELLED = """
import pathlib, sys
from jobs.engines.engine import Wanted
from jobs.engines.sglang import SGLang
from jobs.engines.started import Patience, started
from tests.jobs.engines.made import request
folder = pathlib.Path(sys.argv[1])
with started(
    SGLang(), Wanted(python="", target=folder, port=0, draft=None, launch=sys.argv[2:]), {}, folder,
    label="baseline", number=0, first=request(), patience=Patience(start_s=60.0, first_s=20.0),
    say=print,
):
    (folder / "up").touch()
    import time
    time.sleep(600)
"""


def test_a_container_is_gone_behind_a_run_that_is_cancelled(
    docker: Path, tmp_path: Path, eventually: Callable[..., Any], is_running: Callable[[int], bool]
) -> None:
    words = ["docker", "run", "-d", "--name", "mine", *LAUNCH]
    process = subprocess.Popen([sys.executable, "-c", CANCELLED, str(tmp_path), *words])
    try:
        eventually((tmp_path / "up").exists, AMPLE_S)
        pid = int((docker / "mine" / "pid").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(AMPLE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not (docker / "mine").exists()
    end = time.monotonic() + AMPLE_S
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)
    assert "stop -t 0 mine" in asked_of(docker)


def test_a_command_that_simulates_acceptance_is_refused() -> None:
    words = ["docker", "run", "-e", "SGLANG_SIMULATE_ACC_LEN=3", "image"]
    named = r"engine\.baseline_launch has 'SGLANG_SIMULATE_ACC_LEN=3': accept lengths would be simulated"
    with pytest.raises(BadInput, match=named):
        check_launch({"launch": ["serve"], "baseline_launch": words})
    check_launch({"launch": None, "baseline_launch": None})


@pytest.mark.parametrize(
    "word",
    [
        '{"method": "eagle3", "model": "{drafter}", "rejection_sample_method": "synthetic"}',
        "--speculative-config.synthetic-acceptance-length=3",
        "vllm serve --speculative_config.synthetic_acceptance_rates='[1]'",
    ],
)
def test_so_is_one_by_which_vllm_does(word: str) -> None:
    with pytest.raises(
        BadInput, match=r"engine\.launch has '.*': accept lengths would be simulated"
    ):
        check_launch({"launch": ["serve", word], "baseline_launch": ["serve"]})


def test_what_is_not_seen_is_said() -> None:
    plain = {"launch": ["serve"], "baseline_launch": ["serve"]}
    assert launch_notes({"name": "sglang", **plain}, advice=False) == []
    (told,) = launch_notes({"name": "vllm", **plain}, advice=False)
    assert "vllm does not tell its flags or its drafter" in told
    (told,) = launch_notes(
        {"name": "sglang", **plain, "baseline_launch": ["docker", "run"]}, advice=False
    )
    assert "whether GPU memory was given back behind them is not seen" in told
    (told,) = launch_notes({"name": "sglang", **plain}, advice=True)
    assert told.startswith("drafting and verifying are not told apart")

"""Fake engines: started by the test, or in an interpreter's place for whoever starts servers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.engines.engine import Draft, Engine, Wanted
from jobs.engines.sglang import SGLang
from jobs.engines.talk import Address
from jobs.engines.vllm import VLLM
from tests.jobs.engines import fake, fake_docker

ENGINES: dict[str, Callable[[], Engine]] = {"sglang": SGLang, "vllm": VLLM}
Serve = Callable[..., Address]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a fake engine and gives its address; it ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(
        name: str = "sglang",
        *,
        fault: str = "",
        draft: Draft | None = None,
        flags: Mapping[str, Any] | None = None,
        target: Path | None = None,
        **more: str,
    ) -> Address:
        wanted = Wanted(
            python=sys.executable,
            target=target or tmp_path / "target",
            port=0,
            draft=draft,
            flags=flags or {},
        )
        python, *flags = ENGINES[name]().command(wanted)
        process = subprocess.Popen(
            [python, fake.__file__, *flags],
            env={**os.environ, fake.FAULT: fault, **more},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        return Address(host="127.0.0.1", port=int(process.stdout.readline()))

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A program that takes an interpreter's place: whatever engine it is told to run, it is a fake."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    words = (sys.executable, fake.__file__)
    program.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, words))} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """A chain of three steps."""
    return Draft(folder=tmp_path / "drafter", steps=3)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A docker on the path, and the folder of its containers, which end with the test."""
    folder = tmp_path / "containers"
    folder.mkdir()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir(exist_ok=True)
    words = " ".join(map(shlex.quote, (sys.executable, fake_docker.__file__)))
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(fake_docker.FOLDER, str(folder))
    yield folder
    for own in folder.iterdir():
        if own.is_dir():
            fake_docker.end(own, signal.SIGKILL)

"""Real engines on a CPU, each in an environment of its own that tests.engines.setup_engines makes.

SGLang runs with a stand-in for its kernels (sgl_kernel_stand_in), so that what is seen is its own
scheduling, drafting, verification and counting, and nothing of its speed. Tests here are marked
`engine`; they are skipped where the environments are not there, and fail where REQUIRE_ENGINES=1.
Servers are shared by the tests of a module, since each takes half a minute to start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.engines.engine import Draft, Engine, Wanted
from jobs.engines.records import Prompt, Request
from jobs.engines.setup import ENGINES
from jobs.engines.started import Patience, Running, started
from tests.engines import serving, setup_engines
from tests.engines.slowed import Delays

USUAL = {"d2t": "offset", "decoder_layer": "included", "embedding": "target"}
PATIENCE = Patience(start_s=300.0, first_s=240.0)
REQUEST_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engine")


@pytest.fixture(scope="session", autouse=True)
def engines_there() -> None:
    """Both environments are finished."""
    for engine in ENGINES:
        fault = setup_engines.fault(engine)
        if fault is not None:
            reason = f"{fault}; make it with `python -m tests.engines.setup_engines`"
            if os.environ.get("REQUIRE_ENGINES") == "1":
                pytest.fail(reason)
            pytest.skip(reason)


@dataclass(frozen=True, kw_only=True)
class Started:
    """A server and its adapter."""

    engine: Engine
    running: Running


class Starter:
    """Starts servers, one at a time: the next one ends the last, since two cores are few."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.stack = ExitStack()

    def start(
        self,
        name: str,
        target: Path,
        draft: Draft | None,
        *,
        prompt: int = 1,
        slowed: Delays | None = None,
        **flags: Any,
    ) -> Started:
        """A ready server of this engine, with flags beside the usual ones; its first request is the
        token `prompt` four times.
        """
        environment = serving.environment(name)
        self.stack.close()
        engine = ENGINES[name]()
        folder = self.folder / str(self.count)
        folder.mkdir()
        wanted = Wanted(
            python=str(serving.engine_python(name)),
            target=target,
            port=0,
            draft=draft,
            flags={**serving.flags(name), **flags},
        )
        running = self.stack.enter_context(
            started(
                engine,
                wanted,
                environment if slowed is None else slowed.environment(environment),
                folder,
                label="test",
                number=self.count,
                first=request([prompt] * 4, 8),
                patience=PATIENCE,
                say=lambda _: None,
            )
        )
        self.count += 1
        return Started(engine=engine, running=running)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Servers for one module; the last one ends with it."""
    found = Starter(tmp_path_factory.mktemp("servers"))
    yield found
    found.stack.close()


def request(ids: list[int], new_tokens: int) -> Request:
    """A greedy request for exactly so many tokens."""
    prompt = Prompt(name=f"{ids[-1]}", ids=tuple(ids), new_tokens=new_tokens)
    return Request(prompt=prompt, ignore_eos=True, seconds=REQUEST_S)

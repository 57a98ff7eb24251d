"""A real host behind a real sshd, a person's side of it, and the check that nothing is left."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ssh.machines import (
    Agent,
    Client,
    HostMaker,
    SshHost,
    children,
    make_key,
    require_sshd,
    wait_for,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        if {"make_host", "host", "client"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ssh")


@pytest.fixture(scope="session")
def user_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key that every host here lets in."""
    return make_key(tmp_path_factory.mktemp("key") / "id_test")


@pytest.fixture(scope="session")
def make_host(user_key: Path) -> Iterator[HostMaker]:
    """Makes machines that live until the last test."""
    require_sshd()
    made = []
    with tempfile.TemporaryDirectory(prefix="sshd-") as folder:

        def make(**settings: Any) -> SshHost:
            made.append(SshHost(Path(folder) / str(len(made)), key=user_key, **settings))
            return made[-1]

        yield make
        for host in made:
            host.close()


@pytest.fixture(scope="session")
def shared_host(make_host: HostMaker) -> SshHost:
    return make_host(options={"MaxSessions": "1"})


@pytest.fixture
def host(shared_host: SshHost) -> Iterator[SshHost]:
    """A machine as its user found it: an sshd that allows one session a connection, an empty home."""
    yield shared_host
    wait_for(lambda: not shared_host.user_processes(), "the host's programs to end")
    shared_host.tidy()


@pytest.fixture
def client(tmp_path: Path, user_key: Path) -> Client:
    """A person with an empty ssh config."""
    return Client(tmp_path / "client", user_key)


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread and no child of a test outlives it."""
    before = set(threading.enumerate()), set(children())
    yield
    wait_for(lambda: set(threading.enumerate()) <= before[0], "the threads of a test to end")
    left = {pid: command for pid, command in children().items() if pid not in before[1]}
    ours = {pid: command for pid, command in left.items() if not command.startswith("nsenter")}
    assert not {p: c for p, c in ours.items() if "unshare" not in c}


@pytest.fixture
def agent() -> Iterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:  # a socket's path is short
        agent = Agent(Path(folder))
        yield agent
        agent.close()

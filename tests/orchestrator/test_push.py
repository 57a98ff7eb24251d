"""What was hashed is what arrives, and only what is missing travels."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.host import PART, tree_digest
from orchestrator.channel import PROGRAM, Channel, RefusedError, Reply, Request, open_local
from orchestrator.errors import InputError
from orchestrator.push import (
    Kind,
    Load,
    Tree,
    TreeFile,
    deliver,
    digest_of,
    hash_file,
    lay_out,
    to_send,
    tree_of,
)


class Counting:
    """A channel that remembers what went through it."""

    def __init__(self, channel: Channel) -> None:
        self.name = channel.name
        self.root = channel.hello()["root"]
        self.trips: list[list[str]] = []
        self._channel = channel

    def pipeline(self, requests: Sequence[Request], *, check: bool = True) -> list[Reply]:
        self.trips.append([request.op for request in requests])
        return self._channel.pipeline(requests, check=check)


def push(channel: Any, kind: Kind, tree: Tree) -> str:
    loads = [Load(kind=kind, tree=tree)]
    answers = channel.pipeline([lay_out(load) for load in loads], check=False)
    deliver(channel, loads, answers, [])
    return f"{channel.root}/{loads[0].folder}"


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Counting]:
    with open_local(tmp_path / "root", sys.executable) as opened:
        yield Counting(opened)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    source = tmp_path / "source"
    source.mkdir()
    found = {}
    for number in range(5):
        path = source / f"{number}.py"
        path.write_bytes(os.urandom(100_000))
        found[f"jobs/{number}.py"] = path
    found["jobs/0.py"].chmod(0o755)
    return found


def test_a_tree_travels_once_and_only_what_is_new(
    channel: Counting, files: dict[str, Path]
) -> None:
    path = Path(push(channel, "snapshots", tree_of(files)))
    assert {name: (path / name).read_bytes() for name in files} == {
        name: source.read_bytes() for name, source in files.items()
    }
    assert (path / "jobs/0.py").stat().st_mode & 0o111
    assert push(channel, "snapshots", tree_of(files)) == str(path)
    files["jobs/1.py"].write_bytes(b"changed")
    assert push(channel, "snapshots", tree_of(files)) != str(path)
    assert channel.trips == [
        ["lay_out"],
        ["put"] * 5 + ["lay_out"],
        ["lay_out"],
        ["lay_out"],
        ["put", "lay_out"],
    ]


def test_the_digest_names_paths_modes_and_contents(files: dict[str, Path]) -> None:
    tree = tree_of(files)
    assert tree.digest == tree_of(dict(reversed(files.items()))).digest
    assert tree.digest == tree_digest((n, f.mode, f.hash) for n, f in tree.files.items())
    one = TreeFile(hash="0" * 64, mode=0o644, source=b"")
    executable = TreeFile(hash="0" * 64, mode=0o755, source=b"")
    other = TreeFile(hash="1" * 64, mode=0o644, source=b"")
    digests = {digest_of({"a": f}) for f in (one, executable, other)} | {digest_of({"b": one})}
    assert len(digests) == 4


@pytest.mark.parametrize("change", ["other bytes", "shorter", "longer", "gone"])
def test_a_source_that_changes_after_hashing_is_an_input_error(
    channel: Counting, files: dict[str, Path], tmp_path: Path, change: str
) -> None:
    tree = tree_of(files)
    source = files["jobs/3.py"]
    data = source.read_bytes()
    source.unlink()
    if change != "gone":
        source.write_bytes(
            {"other bytes": data[::-1], "shorter": data[:10], "longer": data * 30}[change]
        )
    words = "cannot be read" if change == "gone" else "was changed while it was being pushed"
    with pytest.raises(InputError, match=rf"3\.py {words}"):
        push(channel, "inputs", tree)
    assert not (tmp_path / "root/inputs").exists()
    source.write_bytes(data)
    push(channel, "inputs", tree)


def test_large_content_goes_on_where_it_was_cut_off(channel: Counting, tmp_path: Path) -> None:
    content = os.urandom(PART + 1000)
    source = tmp_path / "large"
    source.write_bytes(content)
    tree = tree_of({"large": source})
    load = Load(kind="inputs", tree=tree)
    (sha,) = {file.hash for file in tree.files.values()}
    program = subprocess.Popen(
        [sys.executable, "-I", str(PROGRAM), "--root", channel.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert program.stdin is not None
    header = json.dumps({"op": "put", "hash": sha, "payload": len(content)}).encode()
    program.stdin.write(header + b"\n" + content[: PART // 2])
    program.stdin.close()
    assert program.wait(20) == 0
    answers = channel.pipeline([lay_out(load)], check=False)
    assert answers[0].header["parts"] == {sha: PART // 2}
    (put,) = to_send([load], answers)
    assert (put.fields["offset"], put.offset) == (PART // 2, PART // 2)
    deliver(channel, [load], answers, [])
    assert (Path(channel.root) / load.folder / "large").read_bytes() == content
    assert list((Path(channel.root) / "tmp").iterdir()) == []


def test_a_part_that_another_program_writes_is_left_to_it(
    channel: Counting, tmp_path: Path
) -> None:
    source = tmp_path / "large"
    source.write_bytes(os.urandom(PART))
    load = Load(kind="inputs", tree=tree_of({"large": source}))
    (sha,) = {file.hash for file in load.tree.files.values()}
    part = Path(channel.root) / "tmp" / f"{sha}.part"
    part.parent.mkdir()
    answers = channel.pipeline([lay_out(load)], check=False)
    with part.open("xb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="another command is sending") as caught:
            deliver(channel, [load], answers, [])
    assert caught.value.kind == "busy"
    deliver(channel, [load], answers, [])


def test_bytes_are_a_source_too(channel: Counting) -> None:
    name = "c3ab8ff13720e8ad9047dd39466b3c8974e592c2fa383d4a3960714caef0c4f2"
    found = {"config.json": TreeFile(hash=name, mode=0o644, source=b"foobar")}
    tree = tree_of({})
    tree = type(tree)(digest=digest_of(found), files=found)
    path = Path(push(channel, "inputs", tree))
    assert (path / "config.json").read_bytes() == b"foobar"


def test_a_host_that_cannot_store_says_why(
    channel: Counting, files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "root").mkdir(exist_ok=True)
    (tmp_path / "root" / "tmp").write_text("in the way")
    with pytest.raises(RefusedError, match="root/tmp: File exists"):
        push(channel, "snapshots", tree_of(files))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../b", "", "a//b", "a\0b", "bad\udcff"])
def test_a_name_that_cannot_travel_is_an_input_error(files: dict[str, Path], name: str) -> None:
    with pytest.raises(InputError):
        tree_of({name: files["jobs/0.py"]})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing cannot be read: No such file"):
        hash_file(tmp_path / "nothing")

"""Trees of files by content: what a host does not have yet is sent, and laid out there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.channel import Channel, RefusedError, Reply, Request
from orchestrator.errors import HostError, InputError

CHUNK = 1 << 20
Kind = Literal["snapshots", "inputs"]


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """One file: sha256 in hex, mode (0o644 or 0o755), and where its content is."""

    hash: str
    mode: int
    source: Path | bytes


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Files by relative path, and the digest that names exactly these."""

    digest: str
    files: dict[str, TreeFile]


def hash_file(path: Path) -> str:
    """sha256 of a file's content in hex. Raises InputError where it cannot be read."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                hasher.update(part)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return hasher.hexdigest()


def tree_of(files: Mapping[str, Path]) -> Tree:
    """The tree of these files, by the relative path that each will have. Raises InputError."""
    found = {}
    for name, source in sorted(files.items()):
        _check_name(name)
        mode = 0o755 if os.access(source, os.X_OK) else 0o644
        found[name] = TreeFile(hash=hash_file(source), mode=mode, source=source)
    return Tree(digest=digest_of(found), files=found)


def digest_of(files: Mapping[str, TreeFile]) -> str:
    """sha256 over the sorted lines `path NUL mode-in-octal NUL sha256 newline`."""
    lines = sorted((name, f"{name}\0{file.mode:o}\0{file.hash}\n") for name, file in files.items())
    return hashlib.sha256("".join(line for _, line in lines).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Load:
    """A tree that a run needs on its host."""

    kind: Kind
    tree: Tree

    @property
    def folder(self) -> str:
        """Where it will stand, from the root of the host's program."""
        return f"{self.kind}/{self.tree.digest}"


def lay_out(load: Load) -> Request:
    """The request to lay out a tree; refused with kind `missing` where content is not there."""
    files = {name: {"hash": file.hash, "mode": file.mode} for name, file in load.tree.files.items()}
    fields = {"kind": load.kind, "digest": load.tree.digest, "files": files}
    return Request(op="lay_out", fields=fields)


def to_send(loads: Sequence[Load], answers: Sequence[Reply]) -> list[Request]:
    """The contents that the host lacks, by its answers to `lay_out`; what was cut off goes on."""
    puts: dict[str, Request] = {}
    for load, answer in zip(loads, answers, strict=True):
        sources = {file.hash: file.source for file in load.tree.files.values()}
        parts = answer.header.get("parts") or {}
        for sha in answer.header.get("missing", ()):
            offset = int(parts.get(sha, 0))
            source = sources[sha]
            fields = {"hash": sha, "offset": offset}
            body = source[offset:] if isinstance(source, bytes) else source
            puts[sha] = Request(op="put", fields=fields, payload=body, offset=offset)
    return list(puts.values())


def deliver(
    channel: Channel, loads: Sequence[Load], answers: Sequence[Reply], then: Sequence[Request]
) -> list[Reply]:
    """Sends what `answers` to `lay_out` said is missing, and `then` in the same stream.

    Returns the replies to `then`; a `follow` there may be refused, which is its reader's to tell: what
    was started before it goes on. Raises InputError where a source file is no longer what was
    hashed, RefusedError where the host refuses; its kind is `busy` where another command is sending
    the same content, and asking again is right.
    """
    puts = to_send(loads, answers)
    again = [load for load, answer in zip(loads, answers, strict=True) if not answer.ok]
    requests = [*puts, *map(lay_out, again), *then]
    replies = channel.pipeline(requests, check=False) if requests else []
    for request, reply in zip(requests, replies, strict=True):
        if not reply.ok and request.op != "follow":
            raise _explained(channel, request, reply.header)
    return replies[len(puts) + len(again) :]


def _explained(channel: Channel, put: Request, header: dict[str, object]) -> Exception:
    """Why a request was refused: a source has changed, or something on the way or over there."""
    source = put.payload
    if header.get("kind") == "corrupt" and isinstance(source, Path):
        try:
            changed = hash_file(source) != put.fields["hash"]
        except InputError as error:
            return error
        if changed:
            return InputError(f"{source} was changed while it was being pushed; run it again")
        return HostError(f"{channel.name}: {source} was damaged on the way; run it again")
    return RefusedError(f"{channel.name}: {header['error']}", header)


def _check_name(name: str) -> None:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise InputError(f"{name!r} is not a plain relative path")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(f"the file name {name!r} is not UTF-8; rename it") from None

"""Trees of files by content: what a host does not have yet is sent, and laid out there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.channel import Channel, RefusedError, Request
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


def lay_out_request(kind: Kind, tree: Tree) -> Request:
    """The request to lay out a tree; refused with kind `missing` where content is not there."""
    files = {name: {"hash": file.hash, "mode": file.mode} for name, file in tree.files.items()}
    return Request(op="lay_out", fields={"kind": kind, "digest": tree.digest, "files": files})


def push_tree(channel: Channel, kind: Kind, tree: Tree) -> str:
    """Sends what the host lacks and lays the tree out; its path there.

    One round trip where the host has it all, two where it does not. Raises InputError where a
    source file is no longer what was hashed, HostError where the host refuses.
    """
    lay_out = lay_out_request(kind, tree)
    (reply,) = channel.pipeline([lay_out], check=False)
    if not reply.ok and reply.header.get("kind") == "missing":
        blobs = {file.hash: file.source for file in tree.files.values()}
        puts = [
            Request(op="put", fields={"hash": sha}, payload=blobs[sha])
            for sha in reply.header["missing"]
        ]
        replies = channel.pipeline([*puts, lay_out], check=False)
        reply = replies[-1]
        for put, answer in zip(puts, replies[:-1], strict=True):
            if not answer.ok:
                raise _explained(channel, put, answer.header)
    if not reply.ok:
        raise RefusedError(f"{channel.name}: {reply.header['error']}", reply.header)
    return str(reply.header["path"])


def _explained(channel: Channel, put: Request, header: dict[str, object]) -> Exception:
    """Why a blob was refused: the source has changed, or something on the way or over there."""
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

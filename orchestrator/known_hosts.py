"""OpenSSH's known_hosts files: which key a host is known by, and pinning one.

A line is `[marker] names key-type base64-key [comment]`. Names are patterns with `*`, `?` and `!`,
or one hashed name. See sshd(8), SSH_KNOWN_HOSTS FILE FORMAT.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.errors import InputError
from orchestrator.locked import locked_folder

State = Literal["known", "unknown", "changed", "revoked"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line that holds a key; `number` counts from 1, `blob` is the key as it goes over the wire."""

    file: Path
    number: int
    marker: str
    names: str
    key_type: str
    blob: bytes

    @property
    def where(self) -> str:
        """The line, for messages."""
        return f"{self.file}:{self.number}"

    def is_for(self, name: str) -> bool:
        """Whether the line speaks of this host."""
        return matches(self.names, name)

    def is_only_for(self, name: str) -> bool:
        """Whether it is a plain line that names this host and no other."""
        if self.marker or not self.is_for(name):
            return False
        return self.names.startswith("|") or not set(self.names) & set(",*?!")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the files say of a key that a host showed.

    `entries` are the lines that speak against it (changed, revoked); `authorities` the
    @cert-authority lines for this host, which do not count here.
    """

    state: State
    entries: tuple[Entry, ...] = ()
    authorities: tuple[Entry, ...] = ()


def fingerprint(blob: bytes) -> str:
    """`SHA256:…` as OpenSSH prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii")
    return f"SHA256:{digest.rstrip('=')}"


def name_of(hostname: str, port: int, host_key_alias: str | None = None) -> str:
    """The name a host is looked up by: its HostKeyAlias, its hostname, or `[hostname]:port`."""
    if host_key_alias:
        return host_key_alias.lower()
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def matches(names: str, name: str) -> bool:
    """Whether a line's names (patterns or one hashed name) match a host's name."""
    if names.startswith("|1|"):
        salt, _, digest = names[3:].partition("|")
        try:
            return hmac.compare_digest(_hashed(name, base64.b64decode(salt)), names) and bool(
                digest
            )
        except binascii.Error:
            return False
    found = False
    for pattern in names.lower().split(","):
        if _glob(pattern.removeprefix("!")).fullmatch(name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def read_entries(file: Path) -> list[Entry]:
    """The lines of a file that hold a key; others are passed over, as OpenSSH does.

    No file is no entry. Raises InputError where a file cannot be read.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"the host keys in {file} cannot be read: {error.strerror}") from error
    parsed = (parse_line(file, number, line) for number, line in enumerate(lines, start=1))
    return [entry for entry in parsed if entry is not None]


def parse_line(file: Path, number: int, line: bytes) -> Entry | None:
    """The entry of one line, None where it holds no key."""
    words = line.decode("utf-8", errors="surrogateescape").split()
    if not words or words[0].startswith("#"):
        return None
    marker = words.pop(0) if words[0].startswith("@") else ""
    if len(words) < 3:
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not blob:
        return None
    return Entry(
        file=file, number=number, marker=marker, names=words[0], key_type=words[1], blob=blob
    )


def entries_of(files: Sequence[str]) -> list[Entry]:
    """All entries of these files, in their order."""
    return [entry for file in files for entry in read_entries(Path(file))]


def look_up(
    entries: Sequence[Entry], name: str, blob: bytes, *, bare_name: str | None = None
) -> Finding:
    """What the entries say of the key that the host of this name showed.

    A host that is known by other keys alone counts as changed, whatever their type. `bare_name` is
    the name without a port: like OpenSSH, a key that is known for it is known for every port that has
    no line of its own.
    """
    mine = [entry for entry in entries if entry.is_for(name)]
    authorities = tuple(entry for entry in mine if entry.marker == "@cert-authority")
    revoked = tuple(
        entry
        for entry in entries
        if entry.marker == "@revoked" and entry.blob == blob and _speaks_of(entry, name, bare_name)
    )
    if revoked:
        return Finding(state="revoked", entries=revoked, authorities=authorities)
    plain = tuple(entry for entry in mine if not entry.marker)
    if any(entry.blob == blob for entry in plain):
        return Finding(state="known")
    if (
        bare_name
        and not plain
        and any(
            entry.blob == blob and not entry.marker and entry.is_for(bare_name) for entry in entries
        )
    ):
        return Finding(state="known")
    state: State = "changed" if plain else "unknown"
    return Finding(state=state, entries=plain, authorities=authorities)


def known_types(entries: Sequence[Entry], name: str) -> list[str]:
    """The key types a host is known by, those pinned last first: what to ask it for."""
    found = [entry.key_type for entry in entries if not entry.marker and entry.is_for(name)]
    return list(dict.fromkeys(reversed(found)))


def is_revoked(file: str, blob: bytes) -> bool:
    """Whether a RevokedHostKeys file holds this key. Raises InputError where it cannot be told."""
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise InputError(
            f"RevokedHostKeys {file} cannot be read ({error.strerror}), so no host key can be trusted"
        ) from error
    if data.startswith(b"SSHKRL"):
        raise InputError(
            f"RevokedHostKeys {file} is a binary list, which cannot be read here; list the keys as text"
        )
    return base64.b64encode(blob) in data.split()


def trust(
    file: Path, name: str, key_type: str, blob: bytes, *, hashed: bool = False
) -> list[Entry]:
    """Pin a key: the host's other plain lines go, this one is added, all else stays as it is.

    The file is replaced at once, its mode kept; a new one is for its owner alone. Returns the lines
    that still speak against the key because they name other hosts too. Raises InputError.
    """
    shown = _hashed(name, os.urandom(20)) if hashed else name
    added = f"{shown} {key_type} {base64.b64encode(blob).decode('ascii')}\n".encode()
    file = file.expanduser().resolve()  # a link stays one
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_folder(file.parent):
            while not _replace_lines(file, name, added):
                pass
    except OSError as error:
        raise InputError(f"the key cannot be pinned in {file}: {error.strerror}") from error
    return [
        entry
        for entry in read_entries(file)
        if not entry.marker and entry.blob != blob and entry.is_for(name)
    ]


def _replace_lines(file: Path, name: str, added: bytes) -> bool:
    """One attempt; False where somebody else has written the file meanwhile."""
    before = file.read_bytes() if file.exists() else None
    kept = []
    for number, line in enumerate((before or b"").splitlines(keepends=True), start=1):
        entry = parse_line(file, number, line)
        if entry is None or not entry.is_only_for(name):
            kept.append(line)
    if kept and not kept[-1].endswith(b"\n"):
        kept[-1] += b"\n"
    temp = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            if before is not None:
                os.fchmod(descriptor, stat.S_IMODE(file.stat().st_mode))
            out.write(b"".join(kept) + added)
            out.flush()
            os.fsync(descriptor)
        if (file.read_bytes() if file.exists() else None) != before:
            return False
        temp.replace(file)
    finally:
        temp.unlink(missing_ok=True)
    return True


def _speaks_of(entry: Entry, name: str, bare_name: str | None) -> bool:
    return entry.is_for(name) or (bare_name is not None and entry.is_for(bare_name))


def _hashed(name: str, salt: bytes) -> str:
    digest = hmac.new(salt, name.encode("utf-8", errors="surrogateescape"), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode('ascii')}|{base64.b64encode(digest).decode('ascii')}"


def _glob(pattern: str) -> re.Pattern[str]:
    """OpenSSH's patterns know `*` and `?` only; brackets are the literal ones of `[host]:port`."""
    return re.compile("".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern))

"""Logging in by key, in OpenSSH's order, and without ever asking for a password.

Certificates first, then keys of the agent that an IdentityFile names, the agent's others unless
IdentitiesOnly, then the identity files that the agent does not have. See sshconnect2.c.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import shlex
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from orchestrator.errors import HostUnreachable, InputError
from orchestrator.known_hosts import fingerprint
from orchestrator.ssh_settings import Hop

AGENT_S = 30.0  # a person may have to touch a security key
CERTIFICATE = "-cert-v01@openssh.com"
OPENSSH_KEY = b"openssh-key-v1\0"
# How many fields of a certificate make its plain key.
KEY_FIELDS = {
    "ssh-ed25519": 1,
    "sk-ssh-ed25519@openssh.com": 2,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
    "sk-ecdsa-sha2-nistp256@openssh.com": 3,
    "ssh-rsa": 2,
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One IdentityFile: its public key (None where no file tells) and whether it can be loaded."""

    path: Path
    public: bytes | None
    encrypted: bool
    is_private: bool


def read_identity(path: Path) -> Identity | None:
    """What lies at an IdentityFile, or beside it as `.pub`; None where there is nothing.

    The path may itself be a public key's, whose private key is in the agent.
    """
    beside = _public_line(path.with_name(path.name + ".pub"))
    try:
        data = path.read_bytes()
    except OSError:
        return (
            Identity(path=path, public=beside, encrypted=False, is_private=False)
            if beside
            else None
        )
    if line := _parse_public(data):
        return Identity(path=path, public=line, encrypted=False, is_private=False)
    encrypted, public = _private_header(data)
    return Identity(path=path, public=public or beside, encrypted=encrypted, is_private=True)


class Login(paramiko.AuthStrategy):  # type: ignore[misc] # paramiko has no types
    """paramiko's strategy for one hop; keeps what was tried and what was passed over, and why."""

    def __init__(self, hop: Hop) -> None:
        super().__init__(ssh_config=paramiko.SSHConfig())
        self.hop = hop
        self.settings = hop.settings
        self.tried: list[str] = []
        self.skipped: list[str] = []
        self.to_add: list[Path] = []
        self._agent = _Agent()

    def authenticate(self, transport: Any) -> Any:
        """Tries the sources in order. Raises InputError where none is accepted, HostUnreachable."""
        result = paramiko.AuthResult(strategy=self)
        try:
            for source in self.get_sources():
                if self._is_accepted(source, transport):
                    result.append(paramiko.SourceResult(source, []))
                    return result
        finally:
            self._agent.close()
        raise InputError(self._refusal("accepts none of the keys offered"))

    def get_sources(self) -> Iterator[paramiko.AuthSource]:
        """Keys in OpenSSH's order, then `none`, which some hosts accept from whom they know."""
        user = self.settings.user
        found = [read_identity(Path(path)) for path in self.settings.identity_files]
        identities = [identity for identity in found if identity]
        if self.settings.identity_agent:
            try:
                self._agent.open(self.settings.identity_agent)
            except (OSError, paramiko.SSHException) as error:
                self.skipped.append(f"the agent at {self.settings.identity_agent} ({error})")
        agent = {key.blob: key for key in self._agent.get_keys()}
        named = [identity.public for identity in identities if identity.public in agent]
        others = [] if self.settings.identities_only else [b for b in agent if b not in named]

        certificates = [Path(path) for path in self.settings.certificate_files]
        certificates += [i.path.with_name(f"{i.path.name}-cert.pub") for i in identities]
        for path in certificates:
            if key := self._certified(path, agent, identities):
                self.tried.append(f"certificate {path}")
                yield paramiko.InMemoryPrivateKey(user, key)
        for blob in (*dict.fromkeys(named), *others):
            key = agent[blob]
            key.public_blob = None  # a certificate may have been lent to it above
            self.tried.append(f"agent key {fingerprint(blob)}")
            yield paramiko.InMemoryPrivateKey(user, key)
        for identity in identities:
            if identity.public in agent:
                continue
            if key := self._load(identity):
                key.public_blob = None
                self.tried.append(f"{identity.path}")
                yield paramiko.OnDiskPrivateKey(user, "ssh-config", identity.path, key)
        yield paramiko.NoneAuth(user)

    def _is_accepted(self, source: paramiko.AuthSource, transport: Any) -> bool:
        try:
            more = source.authenticate(transport)
        except paramiko.BadAuthenticationType as error:
            if isinstance(source, paramiko.NoneAuth) or "publickey" in error.allowed_types:
                return False
            raise InputError(
                self._refusal(f"takes no keys, only {', '.join(error.allowed_types)}")
            ) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if "timeout" in str(error).lower():
                raise HostUnreachable(
                    f"{self.hop.name}: {self.settings.address} did not answer the login in time"
                ) from error
            if not transport.is_active():
                raise InputError(
                    self._refusal(
                        f"ended the connection after {len(self.tried)} keys: name the right one with "
                        "IdentityFile and set IdentitiesOnly yes; it"
                        " accepts none of those offered"
                        if len(self.tried) > 1
                        else "ended the connection during the login"
                    )
                ) from error
            return False
        if more:
            raise InputError(
                self._refusal(
                    f"wants {' or '.join(more)} after the key, which nobody can type here"
                )
            )
        return True

    def _certified(
        self, path: Path, agent: dict[bytes, AgentKey], identities: list[Identity]
    ) -> paramiko.PKey | None:
        """The private key that a certificate is for, ready to offer the certificate."""
        blob = _public_line(path)
        plain = plain_key(blob) if blob else None
        if plain is None:
            return None
        key = agent.get(plain)
        if key is None:
            signer = next((i for i in identities if i.public == plain and i.is_private), None)
            key = self._load(signer) if signer else None
        if key is not None:
            key.public_blob = paramiko.pkey.PublicBlob.from_file(str(path))
        return key

    def _load(self, identity: Identity) -> paramiko.PKey | None:
        """The private key of a file; None, and the reason kept, where it cannot be used."""
        path = identity.path
        if not identity.is_private:
            self._skip(f"{path} (the agent does not have it)")
        elif identity.encrypted:
            self._skip(f"{path} (it needs a passphrase)", to_add=path)
        elif path.stat().st_uid == os.getuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            self._skip(f"{path} (others can read it: chmod 600 it)")
        else:
            try:
                return paramiko.PKey.from_path(path)
            except paramiko.PasswordRequiredException:
                self._skip(f"{path} (it needs a passphrase)", to_add=path)
            except paramiko.pkey.UnknownKeyType:
                self._skip(f"{path} (a key of this type works from the agent alone)", to_add=path)
            except Exception as error:  # noqa: BLE001 -- crypto backends raise types of their own
                if "password" in str(error).lower():
                    self._skip(f"{path} (it needs a passphrase)", to_add=path)
                else:
                    self._skip(f"{path} ({error})")
        return None

    def _skip(self, what: str, to_add: Path | None = None) -> None:
        if what not in self.skipped:
            self.skipped.append(what)
            self.to_add += [to_add] if to_add else []

    def _refusal(self, what: str) -> str:
        """One sentence: who refuses, what was offered and passed over, what to do."""
        parts = [f"{self.hop.name}: {self.settings.address} {what}"]
        parts.append(f" (offered: {', '.join(self.tried) or 'nothing'}")
        parts.append(f"; not offered: {', '.join(self.skipped)}" if self.skipped else "")
        if self.settings.not_honoured:
            parts.append(f"; not used here: {', '.join(self.settings.not_honoured)}")
        parts.append(f"; {self.settings.note}" if self.settings.note else "")
        if self.to_add:
            advice = f"add it to your agent: ssh-add {shlex.quote(str(self.to_add[0]))}"
        else:
            advice = (
                "name the right key with IdentityFile, or put its .pub into authorized_keys there"
            )
        return "".join([*parts, "); ", advice])


class _Agent(AgentSSH):  # type: ignore[misc] # paramiko has no types
    """An agent at a socket of our choice; paramiko's own class looks at the environment only."""

    def open(self, path: str) -> None:
        """Connects and lists the keys."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(AGENT_S)
        try:
            sock.connect(path)
            self._connect(sock)
        except BaseException:
            sock.close()
            raise
        steady = [_SteadyKey(self, key.blob, key.comment) for key in self.get_keys()]
        self._keys: tuple[AgentKey, ...] = tuple(steady)

    def close(self) -> None:
        """Leaves the agent."""
        self._close()


class _SteadyKey(AgentKey):  # type: ignore[misc] # paramiko has no types
    """A key of the agent; where that refuses to sign, the host refuses this key and no more.

    An exception here would end paramiko's transport, and the keys behind it with it.
    """

    def __init__(self, agent: AgentSSH, blob: bytes, comment: str) -> None:
        super().__init__(agent, blob, comment)
        if self.name.endswith(CERTIFICATE):
            self.inner_key = None  # it would stand for the plain key, which the agent has as well

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> bytes:
        """The agent's signature, or one that is none."""
        try:
            signature: bytes = super().sign_ssh_data(data, algorithm)
        except (paramiko.SSHException, OSError):
            refused = paramiko.Message()
            refused.add_string((algorithm or self.name).removesuffix(CERTIFICATE))
            refused.add_string(bytes(64))
            return bytes(refused.asbytes())
        return signature


def plain_key(blob: bytes) -> bytes | None:
    """The key that a certificate certifies, as it goes over the wire; None where it is none."""
    message = paramiko.Message(blob)
    name = message.get_text()
    count = KEY_FIELDS.get(name.removesuffix(CERTIFICATE))
    if not name.endswith(CERTIFICATE) or count is None:
        return None
    message.get_string()  # the nonce
    plain = paramiko.Message()
    plain.add_string(name.removesuffix(CERTIFICATE))
    for _ in range(count):
        plain.add_string(message.get_string())
    return bytes(plain.asbytes())


def _public_line(path: Path) -> bytes | None:
    try:
        return _parse_public(path.read_bytes())
    except OSError:
        return None


def _parse_public(data: bytes) -> bytes | None:
    """The blob of a `.pub` file's line."""
    words = data.split(None, 2)
    if len(words) < 2 or not words[0].startswith((b"ssh-", b"ecdsa-", b"sk-")):
        return None
    with contextlib.suppress(binascii.Error, ValueError):
        return base64.b64decode(words[1], validate=True)
    return None


def _private_header(data: bytes) -> tuple[bool, bytes | None]:
    """Whether a private key file is encrypted, and its public key where the file tells it."""
    if b"-----BEGIN OPENSSH PRIVATE KEY-----" not in data:
        return b"ENCRYPTED" in data, None
    body = data.split(b"-----BEGIN OPENSSH PRIVATE KEY-----", 1)[1].split(b"-----END", 1)[0]
    try:
        raw = base64.b64decode(b"".join(body.split()), validate=True)
    except (binascii.Error, ValueError):
        return False, None
    if not raw.startswith(OPENSSH_KEY):
        return False, None
    message = paramiko.Message(raw[len(OPENSSH_KEY) :])
    cipher = message.get_text()
    message.get_string()  # how the passphrase becomes a key
    message.get_string()
    message.get_int()  # the number of keys: one
    return cipher != "none", message.get_string()

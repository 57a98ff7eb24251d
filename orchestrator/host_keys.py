"""Whether the key that a hop shows is the one pinned for it, and what to say where it is not."""

from __future__ import annotations

import shlex
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.known_hosts import (
    Entry,
    Finding,
    entries_of,
    fingerprint,
    is_revoked,
    known_types,
    look_up,
    name_of,
)
from orchestrator.ssh_settings import Hop, SshSettings

COMPARE = "compare it on the host with: ssh-keygen -lf /etc/ssh/ssh_host_{}_key.pub"


class HostKeyError(InputError):
    """A hop showed a key that is not pinned, another one than is pinned, or a revoked one."""

    def __init__(self, hop: Hop, key_type: str, blob: bytes, finding: Finding) -> None:
        super().__init__(_key_sentence(hop, key_type, blob, finding))
        self.hop = hop
        self.key_type = key_type
        self.blob = blob
        self.finding = finding


def check_key(hop: Hop, key_type: str, blob: bytes) -> None:
    """Raises HostKeyError unless this key is pinned for the hop."""
    finding = find_key(hop.settings, blob)
    if finding.state != "known":
        raise HostKeyError(hop, key_type, blob, finding)


def find_key(settings: SshSettings, blob: bytes) -> Finding:
    """What the files say of this key for this host. Raises InputError where one cannot be read."""
    if settings.revoked_host_keys and is_revoked(settings.revoked_host_keys, blob):
        return Finding(state="revoked")
    bare = None if settings.host_key_alias else settings.hostname.lower()
    return look_up(_known(settings), pinned_name(settings), blob, bare_name=bare)


def wanted_types(settings: SshSettings) -> list[str]:
    """The key algorithms to ask a host for first: those of the keys it is known by."""
    known = known_types(_known(settings), pinned_name(settings))
    if "ssh-rsa" in known:
        known += ["rsa-sha2-512", "rsa-sha2-256"]
    return known


def _known(settings: SshSettings) -> list[Entry]:
    return entries_of((*settings.user_known_hosts, *settings.global_known_hosts))


def pinned_name(settings: SshSettings) -> str:
    """The name under which a host's key is looked up and pinned."""
    return name_of(settings.hostname, settings.port, settings.host_key_alias)


def key_kind(key_type: str) -> str:
    """The kind as it stands in the names of a host's key files: ed25519, ecdsa or rsa."""
    return "ecdsa" if key_type.startswith("ecdsa") else key_type.removeprefix("ssh-")


def trust_command(hop: Hop, blob: bytes) -> str:
    """What pins this key of this hop."""
    words = ["python -m orchestrator hosts trust", shlex.quote(hop.trust), fingerprint(blob)]
    if hop.settings.config:
        words.append(shlex.quote(f"ssh_config={Path(hop.settings.config)}"))
    return " ".join(words)


def _key_sentence(hop: Hop, key_type: str, blob: bytes, finding: Finding) -> str:
    shown = f"{key_kind(key_type)} key {fingerprint(blob)}"
    where = ", ".join(entry.where for entry in finding.entries)
    if finding.state == "revoked":
        return (
            f"{hop.name}: the host shows the {shown}, which is marked as revoked "
            f"({where or hop.settings.revoked_host_keys}); do not connect before its owner has a new one"
        )
    compare = COMPARE.format(key_kind(key_type))
    if finding.state == "changed":
        old = finding.entries[0]
        return (
            f"{hop.name}: the host's key has changed: it shows the {shown}, pinned is the "
            f"{key_kind(old.key_type)} key {fingerprint(old.blob)} ({where}); a new machine under an "
            "old address (rented hosts reuse them) looks like this, and so does somebody in between: "
            f"{compare}, then run: {trust_command(hop, blob)}"
        )
    authority = ""
    if finding.authorities:
        authority = (
            f" (the @cert-authority line {finding.authorities[0].where} covers it, but host "
            "certificates cannot be checked here)"
        )
    return (
        f"{hop.name}: the host's key is not known: it shows the {shown}{authority}; {compare}, "
        f"then run: {trust_command(hop, blob)}"
    )

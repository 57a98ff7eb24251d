"""Verb `hosts`: `hosts trust NAME` pins the key by which a host is known from then on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.host_keys import COMPARE, key_kind, pinned_name, trust_command
from orchestrator.known_hosts import fingerprint, trust
from orchestrator.show import Show
from orchestrator.ssh_settings import Hop, find_route

USAGE = "python -m orchestrator hosts trust NAME [SHA256:FINGERPRINT] [ssh_config=PATH]"
ABOUT = """Pin the key that the host behind this ssh alias shows, in your known_hosts file.
With a fingerprint it is pinned only if it is that one. On the way there through jump hosts, the
first host whose key is not trusted is the one that is asked for."""


def run(arguments: list[str], ask: Callable[[str], str] = input) -> int:
    """Fetch a host's key and pin it; 0 if it is trusted afterwards."""
    show = Show()
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        show.line(f"{USAGE}\n{ABOUT}")
        return 0
    if arguments[0] != "trust":
        raise InputError(f"hosts knows no {arguments[0]!r}; {USAGE}")
    name, wanted, config = _parse(arguments[1:])
    route = find_route(name, config)
    from orchestrator.ssh_connection import fetch_key

    hop, key_type, blob, finding = fetch_key(route)
    seen = fingerprint(blob)
    if finding.state == "revoked":
        where = ", ".join(entry.where for entry in finding.entries)
        raise InputError(
            f"{hop.name}: the key {seen} is marked as revoked "
            f"({where or hop.settings.revoked_host_keys}); it cannot be trusted while it is"
        )
    if wanted and wanted != seen:
        raise InputError(
            f"{hop.name}: the host shows the {key_kind(key_type)} key {seen}, not {wanted}; "
            "nothing was pinned"
        )
    if finding.state == "known":
        show.line(f"{hop.name}: its {key_kind(key_type)} key {seen} is trusted already")
        return 0
    show.line(f"{hop.name}: {hop.settings.address} shows the {key_kind(key_type)} key {seen}")
    for entry in finding.entries:
        old = f"{key_kind(entry.key_type)} key {fingerprint(entry.blob)}"
        show.line(f"  until now it was known by the {old} ({entry.where})")
    if not wanted:
        show.line(f"  {COMPARE.format(key_kind(key_type))}")
        if not _is_wanted(show, hop, blob, changed=finding.state == "changed", ask=ask):
            show.line("nothing was pinned")
            return 1
    return _pin(show, hop, key_type, blob)


def _parse(arguments: list[str]) -> tuple[str, str | None, str | None]:
    names, wanted, config = [], None, None
    for argument in arguments:
        if argument.startswith("ssh_config="):
            config = argument.removeprefix("ssh_config=")
        elif re.fullmatch(r"SHA256:[A-Za-z0-9+/]{43}=?", argument):
            wanted = argument.rstrip("=")
        elif argument.upper().startswith(("SHA256:", "MD5:")):
            raise InputError(f"{argument!r} is no SHA256 fingerprint as ssh-keygen -lf prints it")
        else:
            names.append(argument)
    if len(names) != 1:
        raise InputError(f"hosts trust takes one ssh alias, not {len(names)}; {USAGE}")
    return names[0], wanted, config


def _is_wanted(
    show: Show, hop: Hop, blob: bytes, *, changed: bool, ask: Callable[[str], str]
) -> bool:
    """Whether to pin a key that was named by no fingerprint."""
    if sys.stdin.isatty():
        try:
            return ask("pin this key? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False
    if changed:
        raise InputError(
            f"{hop.name}: a changed key is replaced only with its fingerprint; "
            f"once compared, run: {trust_command(hop, blob)}"
        )
    show.line("  there is no terminal to ask at, so this first key is pinned unasked")
    return True


def _pin(show: Show, hop: Hop, key_type: str, blob: bytes) -> int:
    settings = hop.settings
    if not settings.user_known_hosts:
        raise InputError(
            f"{hop.name}: UserKnownHostsFile is none; there is no file to pin the key in"
        )
    file = Path(settings.user_known_hosts[0])
    name = pinned_name(settings)
    left = trust(file, name, key_type, blob, hashed=settings.hash_known_hosts)
    show.line(f"pinned {fingerprint(blob)} for {name} in {file}")
    for entry in left:
        show.line(f"  {entry.where} names it as well, with another key; edit that line by hand")
    return 0

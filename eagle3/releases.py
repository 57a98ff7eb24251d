"""Versions of engines and trainers, compared without a library: hosts may have none."""

from __future__ import annotations

import re

from eagle3.errors import BadInput

VersionKey = tuple[tuple[int, ...], int]


def parse_version(text: str) -> VersionKey:
    """A release's sort key: its numbers, and -1 for a build before it, 0 for it, 1 for one after it.

    '0.5.12.post1' lies behind '0.5.12', '0.5.13rc0' and '0.5.13.dev7' in front of '0.5.13'. Raises
    BadInput.
    """
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)(.*)", text.strip())
    if found is None:
        raise BadInput(f"{text!r} is no version; write it as in 0.5.12")
    numbers = tuple(int(part) for part in found[1].split("."))
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    if re.match(r"[.\-_]?(a|b|c|rc|alpha|beta|pre|preview|dev)[.\-_]?\d*", found[2]):
        return numbers, -1
    if re.match(r"[.\-_]?(post|rev|r)[.\-_]?\d*|\+", found[2]):
        return numbers, 1
    if found[2]:
        raise BadInput(f"{text!r} is no version; write it as in 0.5.12")
    return numbers, 0


def holds(since: str | None, until: str | None, key: VersionKey) -> bool:
    """Whether a row from `since` up to, and without, `until` holds for the version of this key."""
    return (since is None or parse_version(since) <= key) and (
        until is None or key < parse_version(until)
    )

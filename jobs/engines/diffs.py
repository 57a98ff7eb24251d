"""Unified diffs, read and applied exactly: no fuzz, no file but what is named. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3.errors import BadInput

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_FILE = "/dev/null"
REFUSED = ("rename from ", "rename to ", "copy from ", "GIT binary patch", "Binary files ")
SHOWN = 80  # characters of a line in a message


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """Lines of a file, with their ends, and what they become."""

    line: int  # in the old file, from 1; of a hunk without old lines the one that it stands behind
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def first(self) -> int:
        """Where it begins, as an index into the old file's lines."""
        return self.line - 1 if self.old else self.line


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """What becomes of one file."""

    path: str  # as the diff writes it
    is_new: bool
    hunks: tuple[Hunk, ...]


def split(text: str) -> list[str]:
    r"""Lines with their ends; only \n ends one, as for those who make diffs."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse(text: str) -> list[FileDiff]:
    """The files of a unified diff in its order. Raises BadInput for what is none."""
    lines = split(text)
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        line = lines[at].rstrip("\r\n")
        if line.startswith(REFUSED):
            raise BadInput(
                f"line {at + 1} is {shown(line)}: files are changed or added by lines, nothing else"
            )
        if line.startswith("@@"):
            raise BadInput(f"line {at + 1} is a hunk without a file: --- and +++ lack in front")
        is_file = line.startswith("--- ") and lines[at + 1 : at + 2]
        if not is_file or not lines[at + 1].startswith("+++ "):
            at += 1
            continue
        old, new = name_in(line), name_in(lines[at + 1])
        if new == NO_FILE:
            raise BadInput(f"line {at + 2} deletes {old}; a file can be changed or added only")
        hunks, at = hunks_at(lines, at + 2, new)
        found.append(FileDiff(path=new, is_new=old == NO_FILE, hunks=tuple(hunks)))
    if not found:
        raise BadInput("it is no unified diff: no line --- with a line +++ and a hunk behind it")
    return found


def name_in(line: str) -> str:
    """The path behind --- or +++, without a date."""
    return line[4:].rstrip("\r\n").partition("\t")[0].strip()


def hunks_at(lines: Sequence[str], at: int, path: str) -> tuple[list[Hunk], int]:
    """The hunks of a file from line `at` on, and the line behind them."""
    hunks: list[Hunk] = []
    while at < len(lines) and (head := HUNK.match(lines[at])):
        hunk, at = hunk_at(lines, at, head, f"hunk {len(hunks) + 1} of {path}")
        hunks.append(hunk)
    if not hunks:
        raise BadInput(f"{path} has no hunk in the diff")
    return hunks, at


def hunk_at(lines: Sequence[str], at: int, head: re.Match[str], where: str) -> tuple[Hunk, int]:
    """The hunk whose head is line `at`, and the line behind it; its head says how long it is."""
    olds, news = int(head[2] or 1), int(head[4] or 1)
    old: list[str] = []
    new: list[str] = []
    at += 1
    while len(old) < olds or len(new) < news:
        line = lines[at] if at < len(lines) else ""
        mark, body = (" ", line) if line == "\n" else (line[:1], line[1:])
        if not mark or mark not in " -+":
            raise BadInput(
                f"{where} ends at line {at + 1}, behind {len(old)} of {olds} old and {len(new)} of "
                f"{news} new lines; make the diff anew"
            )
        at += 1
        if at < len(lines) and lines[at].startswith("\\"):  # no newline at the end of the file
            body = body.removesuffix("\n")
            at += 1
        if mark in " -":
            old.append(body)
        if mark in " +":
            new.append(body)
    more = lines[at].rstrip() if at < len(lines) else ""
    if len(old) > olds or len(new) > news or is_body(more):
        raise BadInput(
            f"{where} says {olds} old and {news} new lines, and there are others (line {at + 1}); make "
            "the diff anew"
        )
    return Hunk(line=int(head[1]), old=tuple(old), new=tuple(new)), at


def is_body(line: str) -> bool:
    """Whether a line behind a hunk is one of a hunk: no next file, and no end of a mail."""
    return line[:1] in ("+", "-", " ") and not line.startswith("--- ") and line != "--"


def applied(text: str, hunks: Sequence[Hunk]) -> str:
    """A file's text with all hunks applied.

    Every context and removed line has to be there as it is, where the hunk says (as far as the hunks
    before it have moved), or in one other place only. Raises BadInput with the hunk's number.
    """
    lines = split(text)
    out: list[str] = []
    done = moved = 0
    for number, hunk in enumerate(hunks, start=1):
        at = place(lines, hunk, done, hunk.first + moved)
        if at is None:
            raise BadInput(f"hunk {number} does not apply: {misfit(lines, hunk, done, moved)}")
        out += [*lines[done:at], *hunk.new]
        done, moved = at + len(hunk.old), at - hunk.first
    return "".join([*out, *lines[done:]])


def place(lines: Sequence[str], hunk: Hunk, done: int, expected: int) -> int | None:
    """Where a hunk's old lines are, behind what is done; None where that is not told."""
    if not hunk.old:
        return expected if done <= expected <= len(lines) else None
    if expected >= done and fits(lines, hunk, expected):
        return expected
    found = list(places(lines, hunk, done))
    return found[0] if len(found) == 1 else None


def places(lines: Sequence[str], hunk: Hunk, done: int) -> Iterator[int]:
    """Every place behind what is done with exactly these old lines."""
    last = len(lines) - len(hunk.old)
    return (at for at in range(done, last + 1) if fits(lines, hunk, at))


def fits(lines: Sequence[str], hunk: Hunk, at: int) -> bool:
    """Whether the old lines are there."""
    return tuple(lines[at : at + len(hunk.old)]) == hunk.old


def misfit(lines: Sequence[str], hunk: Hunk, done: int, moved: int) -> str:
    """Why a hunk has no place."""
    if not hunk.old:
        return f"it stands behind line {hunk.line}, and the file has {len(lines)}"
    if count := len(list(places(lines, hunk, done))):
        return f"its lines are there {count} times, and not at line {hunk.line}"
    first = max(hunk.first + moved, 0)
    for at, wanted in enumerate(hunk.old, start=first):
        there = lines[at] if at < len(lines) else None
        if there != wanted:
            said = "the file has ended" if there is None else f"there is {shown(there)}"
            return f"at line {at + 1} {said}, not {shown(wanted)}"
    return f"its lines at line {first + 1} overlap with the hunk before it"


def shown(line: str) -> str:
    """A line in quotes, not too long."""
    return repr(line.rstrip("\n")[:SHOWN])

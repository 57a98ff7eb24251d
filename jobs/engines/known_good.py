"""A drafter that is known to be good beside the one that is measured: one start more, the same prompts.

It is served as it was published, with its own config.json. If it is accepted and the other is not, the
fault is the other's own: its wiring, its teacher or its training; if neither is, it is not that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from eagle3.checkpoint import fingerprint_files, index_file
from eagle3.doctor.subject import drafter_of, read_config
from eagle3.errors import BadInput
from eagle3.headers import find_weights
from eagle3.metrics import Rate
from jobs.engines import figures
from jobs.engines.beside import Arm, number
from jobs.engines.engine import Draft
from jobs.engines.records import Pass, Request

KNOWN_GOOD = "known_good"
SETTING = "job.known_good"


class PointsAt(Enum):
    """Where to look, by which of the two drafters is accepted well."""

    drafter = "drafter"  # ours: its wiring, teacher or training; the known-good one is accepted
    wiring = "wiring"  # of our drafter, which is good alone, so that it was trained well
    engine = "engine"  # its flags, or the prompts: neither is
    nothing = "nothing"  # both are
    known_good = "known_good"  # it is not, and ours is: no control for this target or these prompts


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The known-good drafter, whose files were looked over."""

    folder: Path
    fingerprint: str  # sha256 over config.json and the weights
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"folder": str(self.folder), "fingerprint": self.fingerprint}


def read(folder: Path, own: Path, own_fingerprint: str, *, hidden: int, vocab: int) -> Reference:
    """Look over a known-good drafter for a target of this width and vocabulary; no tensor is read
    into memory. Raises BadInput.
    """
    itself = (
        f"{SETTING}: {folder} is the drafter that is measured; name another one, of which it is known "
        "that it is accepted"
    )
    if folder.resolve() == own.resolve():
        raise BadInput(itself)
    path = folder / "config.json"
    try:
        weights = find_weights(folder)
        drafter = drafter_of(path, read_config(path), weights)
        fingerprint = fingerprint_files([path, *index_file(weights), *weights.files])
    except BadInput as error:
        raise BadInput(f"{SETTING}: {error}") from error
    if fingerprint == own_fingerprint:
        raise BadInput(itself)
    sizes, notes = drafter.sizes, []
    for what, theirs, ours in (
        ("hidden size", sizes.target_hidden, hidden),
        ("vocabulary", sizes.vocab, vocab),
    ):
        if theirs is None:
            notes.append(f"{SETTING}: {path} does not say its target's {what}: it is not checked")
        elif theirs != ours:
            raise BadInput(
                f"{SETTING}: {folder} is made for a target of {what} {theirs}, but this target has "
                f"{ours}; name a drafter of this target"
            )
    return Reference(folder=folder, fingerprint=fingerprint, notes=tuple(notes))


def arm_of(reference: Reference, draft: Draft, requests: Sequence[Request]) -> Arm:
    """The known-good drafter, asked as ours is."""
    return Arm(label=KNOWN_GOOD, draft=replace(draft, folder=reference.folder), requests=requests)


def half_right(draft: Draft) -> float:
    """The accept length of a chain whose every draft is right half of the time: 1 + 1/2 + 1/4 + …

    What lies above it is called well accepted, what lies below it poorly.
    """
    steps = min(draft.steps, draft.verified - 1)
    return 2 - 0.5**steps


@dataclass(frozen=True, kw_only=True)
class KnownGood:
    """The known-good drafter at one concurrency."""

    accept_length: Rate | None
    tok_s: figures.Interval
    decode_tok_s: float | None
    line: float  # between accepted well and poorly
    points_at: PointsAt | None  # None: an interval holds the line, or nobody counted

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "accept_length": self.accept_length.plain() if self.accept_length else None,
            "tok_s": self.tok_s.plain(),
            "decode_tok_s": self.decode_tok_s,
            "well_above": self.line,
            "points_at": self.points_at.value if self.points_at else None,
        }

    def metrics(self) -> dict[str, Any]:
        """What stands among the run's figures."""
        length = self.accept_length
        return {
            **({"accept_length_known_good": length.plain()} if length else {}),
            "tok_s_known_good": self.tok_s.plain(),
        }


def known_good_at(
    passes: Sequence[Pass], ours: Rate | None, draft: Draft, seed: int, alone: float | None = None
) -> KnownGood | None:
    """Its figures beside our accept length; None where it was not run. `alone` is the lower bound of
    what our drafter has on its own.
    """
    if not passes:
        return None
    seconds = figures.token_s(passes)
    theirs, line = figures.accept_length(passes, draft.steps + 1, seed), half_right(draft)
    return KnownGood(
        accept_length=theirs,
        tok_s=figures.typical([figures.tok_s(p) for p in passes]),
        decode_tok_s=1 / seconds if seconds else None,
        line=line,
        points_at=points_at(
            well(theirs, line), well(ours, line), alone=alone is not None and alone > line
        ),
    )


def well(found: Rate | None, line: float) -> bool | None:
    """Whether the whole interval lies above the line (or below: False); None where it holds it."""
    if found is None or found.low <= line <= found.high:
        return None
    return found.low > line


def points_at(theirs: bool | None, ours: bool | None, *, alone: bool) -> PointsAt | None:
    """Where to look; None where one of the two is not known. `alone`: ours is known to be good alone."""
    if theirs is None or ours is None:
        return None
    if theirs:
        if ours:
            return PointsAt.nothing
        return PointsAt.wiring if alone else PointsAt.drafter
    return PointsAt.known_good if ours else PointsAt.engine


def in_words(found: KnownGood | None, tok_s: float, ours: Rate | None) -> list[str]:
    """What the two say together, a sentence; `tok_s` and `ours` are of our drafter."""
    if found is None:
        return []
    line = f"{found.line:.2f}, which drafts have that are right half of the time"
    said = {
        PointsAt.drafter: "the engine does accept, so look at our drafter: its wiring, its teacher or "
        "its training (`diagnose` tells which)",
        PointsAt.wiring: f"the engine does accept, and our drafter alone lies above {line}, so look at "
        "its wiring",
        PointsAt.engine: f"both lie below {line}, so look at the engine, its flags or the prompts",
        PointsAt.nothing: f"both lie above {line}, so neither engine nor wiring is at fault by this",
        PointsAt.known_good: "ours is the better one, so the known-good is no control for this target "
        "and these prompts",
        None: f"these prompts do not tell which of them lie above {line}, so ask more, "
        "one at a time (job.max_prompts, job.concurrency)",
    }[found.points_at]
    theirs = found.accept_length
    return [
        f"the known-good drafter has accept length {number(theirs.value if theirs else None)} and "
        f"{found.tok_s.value:.1f} tok/s, ours {number(ours.value if ours else None)} and {tok_s:.1f}: "
        f"{said}"
    ]

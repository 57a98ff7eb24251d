"""A capture as it is written: the same folder, whoever gives the states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.data import CAPTURE_FILE, read_capture
from eagle3.errors import BadInput
from eagle3.repetition import cut
from jobs.events import Events
from jobs.files import made_whole, write_json_atomic

SHARD = 2000  # samples a rows_* folder
SCORABLE = 2  # tokens in the mask; with fewer, no position can be scored


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One text as stored: ids, mask and argmax [T], states k → [T, H]."""

    ids: Tensor
    mask: Tensor
    argmax: Tensor
    states: dict[int, Tensor]


class Samples:
    """Writes the samples of a capture to a folder, and counts them."""

    def __init__(self, folder: Path, case: Mapping[str, Any], prompts: int, events: Events) -> None:
        self.folder, self.prompts, self.events = folder, prompts, events
        self.least = int(case["min_new_tokens"]) if case["new_tokens"] else SCORABLE
        self.done = self.written = self.positions = self.following = 0

    def short(self, mask: Tensor) -> bool:
        """Whether too few tokens of a text are the target's, so that it is left out."""
        return int(mask.sum()) < self.least

    def leave_out(self) -> None:
        """One text is done and not kept."""
        self.done += 1
        self.events.progress("capture", self.done, self.prompts)

    def keep(self, sample: Captured) -> None:
        """One text is done; it is kept where it is long enough."""
        self.leave_out()
        if self.short(sample.mask):
            return
        self.positions += int(sample.mask.sum())
        follows = sample.argmax[:-1] == sample.ids[1:]
        self.following += int(follows[sample.mask[1:].bool()].sum())
        write_sample(self.folder, self.written, sample)
        self.written += 1

    def counted(self) -> dict[str, int]:
        """What capture.json says of their number. Raises BadInput where there are none."""
        if not self.written:
            raise BadInput(
                f"none of {self.prompts} prompts gave {self.least} tokens or more of the target's; use "
                "longer prompts, or change data.capture.min_new_tokens and repetition_window"
            )
        return {
            "samples": self.written,
            "left_out": self.prompts - self.written,
            "positions": self.positions,
            "positions_following_argmax": self.following,
        }


def loss_mask(
    text: Sequence[int], prompt: int, ends: Collection[int | None], window: int | None
) -> Tensor:
    """The mask [T] of a text cut to what is kept of it, whose first `prompt` tokens were given; where
    nothing was continued all of it is kept, and counts.
    """
    continued = len(text) > prompt
    length = cut(text, prompt, ends, window) if continued else len(text)
    mask = torch.zeros(length, dtype=torch.int64)
    mask[prompt if continued else 1 :] = 1
    return mask


def check_states(states: Sequence[int], num_layers: int) -> None:
    """Raises BadInput for a state that the target does not have."""
    outside = [k for k in states if not 0 <= k <= num_layers]
    if outside:
        raise BadInput(
            f"state {outside[0]} is asked for, but the target has {num_layers} decoder "
            f"layers, so its states are 0 to {num_layers}"
        )


def check_ids(prompts: Sequence[Sequence[int]], vocab: int, path: str) -> None:
    """Raises BadInput for a prompt that is not of the target's vocabulary."""
    for line, prompt in enumerate(prompts, start=1):
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise BadInput(
                f"{path}, line {line}: ids reach from {min(prompt)} to {max(prompt)}, "
                f"but the target's vocabulary has {vocab}"
            )


def already_there(out: Path, case: Mapping[str, Any]) -> dict[str, Any] | None:
    """What capture.json says of a folder that another run made, where case['keep'] takes it; None:
    nothing is there. Raises BadInput where something else is.
    """
    if not out.exists():
        return None
    if case["keep"] and (found := read_capture(out)):
        return found
    raise BadInput(f"{out} exists already; name a new folder or remove it")


def write_folder(
    out: Path, case: Mapping[str, Any], write: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """The folder `out`, which has its name only when complete; `write` fills a temporary one and returns
    what capture.json says.
    """
    try:
        with made_whole(out) as temporary:
            summary = write(temporary)
            write_json_atomic(temporary / CAPTURE_FILE, summary)
    except BadInput:
        # Two captures of the same data may race; the first to finish wins, with the same content.
        found = read_capture(out) if case["keep"] else None
        if found is None:
            raise
        return found
    return summary


def answer(
    out: Path,
    summary: Mapping[str, Any],
    fingerprint: str,
    events: Events,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The result of a capture that lies at `out`."""
    events.note(
        f"captured {summary['samples']} samples, {summary['positions']} positions, to {out}"
    )
    return {
        "metrics": {},
        "curves": {},
        "wiring": {},
        "capture": {"out": str(out), **summary},
        "fingerprints": {"target": fingerprint},
        "notes": list(notes),
    }


def write_sample(folder: Path, index: int, sample: Captured) -> None:
    """One sample as rows_a-b/data_i.pt."""
    start = index // SHARD * SHARD
    shard = folder / f"rows_{start}-{start + SHARD}"
    shard.mkdir(exist_ok=True)
    content = {
        "input_ids": sample.ids,
        "loss_mask": sample.mask,
        "hidden_states": [state.clone() for state in sample.states.values()],
        "target_argmax": sample.argmax,
    }
    try:
        torch.save(content, shard / f"data_{index}.pt")
    except RuntimeError as error:  # torch's writer reports a full disk this way
        raise OSError(None, f"writing data_{index}.pt failed: {error}") from error

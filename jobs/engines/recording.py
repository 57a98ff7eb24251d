"""What an engine fed to the drafter: recorded by an overlay on its Python, read here.

The overlay is a folder in front of the engine's PYTHONPATH; the engine's own files stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3.errors import BadInput
from jobs.engines.laid_over import laid_over

ARMED = "armed"
SETTLE_S = 0.2  # for a call that had begun to write


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What was recorded of one request."""

    calls: list[Tensor]  # fc's input, [rows, A·H] a call
    logits: list[tuple[int, Tensor]]  # behind how many of those calls, and [rows, V_d]

    def behind(self, calls: int) -> Tensor | None:
        """The logits of the last row of so many calls, [V_d]; None: none were recorded there."""
        found = [tensor for number, tensor in self.logits if number == calls]
        return found[0][-1] if found and len(found[0]) else None


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """A folder that the overlay writes to while it is armed."""

    folder: Path

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Variables for the server: the overlay in front of whatever its path was."""
        return laid_over(given, DRAFTER_RECORD=str(self.folder))

    def arm(self) -> None:
        """From here on calls are written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for late in self.folder.glob("*.pt"):  # of a call that ended behind the last `take`
            late.unlink()
        (self.folder / ARMED).touch()

    def take(self) -> Taken:
        """Stop, and give what was written, in the order of calls; it is gone behind this."""
        (self.folder / ARMED).unlink(missing_ok=True)
        time.sleep(SETTLE_S)
        calls: list[Tensor] = []
        logits: list[tuple[int, Tensor]] = []
        for path in sorted(self.folder.glob("*.pt")):
            tensor = torch.load(path, weights_only=True).float()
            if path.name.endswith(".logits.pt"):
                logits.append((len(calls), tensor))
            else:
                calls.append(tensor)
            path.unlink()
        return Taken(calls=calls, logits=logits)


def prefill_of(calls: list[Tensor], prompt: int) -> tuple[Tensor, list[Tensor]]:
    """The rows of a prompt of so many tokens [prompt, A·H], and the calls behind them.

    A long prompt is fed in several calls. Raises BadInput where they do not add up.
    """
    rows = 0
    for number, call in enumerate(calls):
        rows += len(call)
        if rows >= prompt:
            return torch.cat(calls[: number + 1])[:prompt], calls[number + 1 :]
    if not calls:
        raise BadInput(
            "nothing was recorded at the drafter's fc: the engine did not run it in Python that the "
            "overlay reaches (a class that is not watched, or a CUDA graph)"
        )
    raise BadInput(
        f"{rows} rows were recorded at the drafter's fc, fewer than the prompt's {prompt}"
    )

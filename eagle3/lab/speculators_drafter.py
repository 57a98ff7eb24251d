"""The lab's drafters that speculators' own code trained, each on a dump of the lab's target.

Whatever slot of a dump is the last, speculators takes it as the target's final state: it puts the
target's norm and head on it and learns what comes out. Where that slot is no end of the target's, the
drafter learns to agree with what it is, and the trainer's accuracy says how well it does.

speculators lives in the peers' environment, whose pins are not ours; `train_speculators.py` runs there.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.lab.drafter import Texts
from eagle3.lab.layout import lay_out
from eagle3.lab.target import LiveTarget

SCRIPT = Path(__file__).with_name("train_speculators.py")
# The verifier's name in the checkpoint's config.json: a path, but of no one machine.
VERIFIER = "lab-target"
DECODER = "decoder.json"
CHECKPOINT_FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What differs from the defaults of `speculators train`, and is not forced by the lab.

    Its defaults make the wiring: one layer, norm before the residual, norm before fc, the normed
    output fed back, three steps of test-time training.
    """

    python: Path  # an interpreter that imports speculators
    states: tuple[int, ...]  # canonical, by the dump's slots; the last becomes the teacher
    seed: int
    epochs: int
    draft_vocab: int
    texts: int | None = None  # the first so many of the texts; None: all
    switches: tuple[str, ...] = ()  # flags that change the wiring
    decoder: Mapping[str, Any] | None = None  # the decoder layers' config; None: as the target's
    max_steps: int | None = None  # optimizer steps within the one epoch, over which the rate falls
    sequence: int = 512  # tokens of packed texts in a step
    learning_rate: float = 5e-3

    def flags(self) -> list[str]:
        """The flags of `speculators train`, run in the folder that holds the dump and the verifier.

        The attention and the losses are its ones for a machine without an accelerator, and full
        attention stands for a window of 2,048 tokens, which is longer than the lab's context.
        """
        shaped = (
            {"full-attention-indices": 0} if self.decoder is None else {"draft-config": DECODER}
        )
        flags: dict[str, object] = {
            "speculator-type": "eagle3",
            "verifier-name-or-path": VERIFIER,
            "data-path": "data",
            "save-path": "checkpoints",
            "log-dir": "logs",
            "target-layer-ids": " ".join(map(str, self.states[:-1])),
            "draft-vocab-size": self.draft_vocab,
            **shaped,
            "draft-attn-impl": "sdpa",
            "loss-implementation": "eager",
            "hidden-states-dtype": "float32",
            "on-missing": "raise",
            "num-workers": 0,
            "log-freq": 200,
            "total-seq-len": self.sequence,
            "lr": self.learning_rate,
            "epochs": self.epochs,
            "seed": self.seed,
        }
        if self.max_steps is not None:
            flags["max-steps"] = self.max_steps
        words = [
            word for name, value in flags.items() for word in (f"--{name}", *f"{value}".split())
        ]
        return [*words, *self.switches]

    def record(self) -> dict[str, Any]:
        """What build.json says of it."""
        said: dict[str, Any] = {"states": list(self.states), "flags": " ".join(self.flags())}
        if self.texts is not None:
            said["texts"] = self.texts
        if self.decoder is not None:
            said[DECODER] = dict(self.decoder)
        return said


def peers_python() -> Path:
    """The interpreter of the peers' environment, wherever `tests/peers/setup_peers.py` puts it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "drafter-orchestrator" / "peers" / "bin" / "python"


def check_peers(python: Path) -> None:
    """Raise BadInput where `python` cannot run speculators' training."""
    try:
        done = subprocess.run(
            [python, SCRIPT, "--help"], capture_output=True, text=True, check=False, env=quiet()
        )
    except OSError as error:
        raise BadInput(
            f"{python} cannot be started ({error.strerror}); the lab's drafters but the first are "
            "trained by speculators in the peers' environment: make it with "
            "`python -m tests.peers.setup_peers`, or name an interpreter that has it with --peers-python"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(
            f"{python} cannot run speculators' training ({last}); make the peers' environment anew "
            "with `python -m tests.peers.setup_peers`, or name another interpreter with --peers-python"
        )


def quiet() -> dict[str, str]:
    """The environment of speculators: nothing is fetched, and no bars are drawn."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def train_by_speculators(
    lab_target: Path,
    target: LiveTarget,
    texts: Texts,
    log: Path,
    plan: Plan,
    report: Callable[[str], None] = print,
) -> dict[str, Tensor]:
    """The checkpoint's files as speculators wrote them, {name: bytes as uint8}.

    `lab_target` is the lab's target as it ships and `target` the same, loaded. speculators' output
    is kept in `log`; the dump lies in a temporary folder beside it.
    """
    check_peers(plan.python)
    texts = texts.head(plan.texts)
    with tempfile.TemporaryDirectory(prefix=f"{log.stem}.", dir=log.parent) as name:
        folder = Path(name)
        lay_out(lab_target, folder / VERIFIER)
        write_dump(target, texts, plan.states, folder / "data")
        if plan.decoder is not None:
            (folder / DECODER).write_text(json.dumps(plan.decoder))
        report(f"speculators trains on {len(texts.ids)} texts, see {log}")
        with log.open("w") as out:
            done = subprocess.run(
                [plan.python, SCRIPT, *plan.flags()],
                cwd=folder,
                env=quiet(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise BadInput(f"speculators' training ended with code {done.returncode}; see {log}")
        written = folder / "checkpoints" / str(plan.epochs - 1)
        return {
            file: torch.frombuffer(bytearray((written / file).read_bytes()), dtype=torch.uint8)
            for file in CHECKPOINT_FILES
        }


@torch.no_grad()
def write_dump(
    target: LiveTarget, texts: Texts, states: Sequence[int], folder: Path, batch: int = 64
) -> None:
    """The texts' states as speculators keeps them, `hs_{i}.safetensors` in bf16, and the texts.

    hidden_states [T, slots, H] in the order of `states`, token_ids [T]; texts.safetensors is what
    `train_speculators.py` makes the dataset of.
    """
    (folder / "hidden_states").mkdir(parents=True)
    rows, masks, lengths = [], [], []
    for chosen in torch.arange(len(texts.ids)).split(batch):
        _, kept = target(texts.ids[chosen], states)
        hidden = torch.stack([kept[k] for k in states], 2).to(torch.bfloat16)
        for i, mask, slots in zip(chosen.tolist(), texts.scored(chosen), hidden, strict=True):
            length = int(texts.last[i])
            ids = texts.ids[i, :length].contiguous()
            save_file(
                {"hidden_states": slots[:length].contiguous(), "token_ids": ids},
                folder / "hidden_states" / f"hs_{i}.safetensors",
            )
            rows.append(ids)
            masks.append(mask[:length])
            lengths.append(length)
    save_file(
        {
            "ids": torch.cat(rows),
            "loss_mask": torch.cat(masks),
            "lengths": torch.tensor(lengths),
        },
        folder / "texts.safetensors",
    )


def save_files(files: dict[str, Tensor], folder: Path) -> None:
    """Write the checkpoint's files into `folder`, byte for byte."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.numpy().tobytes())

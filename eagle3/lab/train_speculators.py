"""speculators' own training on a CPU, run by the interpreter that has speculators:

    python train_speculators.py --data-path DATA … (the flags of `speculators train`)

DATA holds texts.safetensors (`ids`, `loss_mask` [all tokens], `lengths` [N]: the texts one behind the
other) and hidden_states/hs_{i}.safetensors. The dataset beside them and the token counts are made
here by the libraries that read them; what follows is `speculators train`, but for the three places
where it takes an accelerator for granted.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from safetensors.torch import load_file
from speculators.train import cli, trainer  # type: ignore[import-not-found]
from speculators.train.config import TrainConfig  # type: ignore[import-not-found]
from speculators.train.vocab_mapping import (  # type: ignore[import-not-found]
    save_token_frequency_distribution,
)


def main() -> None:
    """Make the dataset, then train."""
    config = TrainConfig.resolve(sys.argv[1:])
    make_dataset(Path(config.data.data_path))
    use_cpu()
    cli.main(config)


def make_dataset(data: Path) -> None:
    """The arrow dataset and the token counts that `speculators prepare-data` leaves in `data`."""
    texts = load_file(data / "texts.safetensors")
    lengths = texts["lengths"].tolist()
    dataset = Dataset.from_dict(
        {
            "input_ids": [row.tolist() for row in texts["ids"].split(lengths)],
            "loss_mask": [row.long().tolist() for row in texts["loss_mask"].split(lengths)],
            "seq_len": lengths,
        }
    )
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(data))
    save_token_frequency_distribution(dataset, data / "token_freq.pt")


def use_cpu() -> None:
    """Let the trainer run without an accelerator.

    It moves model and batches to the device of its local rank, waits for the device at every step
    that it logs, and enters an autocast for CUDA, which float32 makes idle.
    """
    trainer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    warnings.filterwarnings("ignore", message=".*autocast.*")


if __name__ == "__main__":
    main()

"""A tiny target, drafter and data of random numbers: enough to run the loop, in a second or two."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3.lab.build import save_drafter
from tests.eagle3.small import SHAPE, random_drafter

STATES = (0, 2, 5)


@dataclass(frozen=True)
class World:
    """Paths of the three inputs, and overrides that test them."""

    root: Path

    @property
    def results(self) -> Path:
        return self.root / "results"

    def overrides(self, *more: str) -> list[str]:
        """The world's settings, but for those that `more` sets."""
        set_here = {override.split("=")[0] for override in more}
        ours = [
            "target=path",
            f"target.path={self.root}/target",
            "drafter=path",
            f"drafter.path={self.root}/drafter",
            "data=path",
            f"data.path={self.root}/data",
            f"data.states=[{','.join(map(str, STATES))}]",
            "wiring.layers=[-1,1,4]",
            "wiring.convention=output",
            "job.threads=1",
            f"results={self.results}",
        ]
        return [o for o in ours if o.split("=")[0] not in set_here] + list(more)


def make_world(root: Path, samples: int = 4) -> World:
    """Write a world below `root`."""
    (root / "target").mkdir(parents=True)
    (root / "target" / "config.json").write_text(json.dumps({"num_hidden_layers": 7}))
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(SHAPE.vocab, SHAPE.target_hidden, generator=generator)
    save_file({"model.embed_tokens.weight": table}, root / "target" / "model.safetensors")
    save_drafter(random_drafter(), root / "drafter")
    embedding = torch.randn(SHAPE.vocab, SHAPE.hidden, generator=generator)
    tensors = {k: v.contiguous() for k, v in random_drafter().state_dict().items()}
    save_file({**tensors, "embed_tokens.weight": embedding}, root / "drafter" / "model.safetensors")
    for index in range(samples):
        shard = root / "data" / "rows_0-2000"
        shard.mkdir(parents=True, exist_ok=True)
        ids = torch.randint(SHAPE.vocab, (20,), generator=generator)
        sample = {
            "input_ids": ids,
            "loss_mask": torch.tensor([0] * 5 + [1] * 15),
            "hidden_states": [
                torch.randn(20, SHAPE.target_hidden, generator=generator) for _ in STATES
            ],
            "target_argmax": torch.cat([ids[1:], ids[:1]]),
        }
        torch.save(sample, shard / f"data_{index}.pt")
    return World(root)

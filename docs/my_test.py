"""Which reading of d2t fits t2d: offsets to the draft id, or target ids as they are?

    python my_test.py model.safetensors

The test that would have explained the story's first 0.0 %. It needs nothing of the orchestrator:
whatever a script prints as `metric NAME=VALUE` is filed.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

tensors = load_file(Path(__file__).parent / sys.argv[1])
d2t, t2d = tensors["d2t"], tensors["t2d"].bool()
draft_ids = torch.arange(len(d2t))

for reading, target_ids in {"offset": draft_ids + d2t, "absolute": d2t}.items():
    inside = target_ids.clamp(0, len(t2d) - 1)
    fits = t2d[inside] & (inside == target_ids)
    print(
        f"read as {reading}: {fits.sum()} of {len(d2t)} draft ids lead to a token that is drafted"
    )
    print(f"metric fits.{reading}={fits.float().mean():.4f}")
    print(f"metric distinct.{reading}={len(target_ids.unique()) / len(d2t):.4f}")

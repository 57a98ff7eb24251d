"""A target's own choices for the texts of a dump that was made without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.data import find_data
from eagle3.data.argmax import ABOUT, write_argmax
from eagle3.errors import BadInput
from eagle3.samples import LeftOut, read_samples
from eagle3.target import load_target_parts
from jobs.events import Events
from jobs.files import made_whole, write_json_atomic
from jobs.inputs import check_captured


@torch.no_grad()
def choose(model: Any, folder: Path, case: Mapping[str, Any], events: Events) -> dict[str, Any]:
    """Run a target over a dump's texts and keep its choices in the folder case['out'].

    `model` is the transformers model of the checkpoint `folder`. Raises BadInput where the data
    cannot be read or is not this target's, or where the folder is there already.
    """
    out, data = Path(case["out"]), case["data"]
    if out.exists():
        raise BadInput(f"{out} exists already; name a new folder or remove it")
    target = load_target_parts(folder)
    form = find_data(
        Path(data["path"]),
        layout=data["layout"],
        states=data["states"],
        hidden=target.hidden,
        num_layers=target.num_layers,
    )
    check_captured(form.folder, target)
    events.note(f"data {form.folder}: layout {form.layout}, since {form.why}")
    kind = str(model.dtype).removeprefix("torch.")
    events.note(
        f"the target is run in {kind}; in another type near ties fall otherwise (job.dtype)"
    )
    left_out = LeftOut()
    samples = read_samples(
        form, vocab=target.vocab, hidden=target.hidden, damaged=data["damaged"], left_out=left_out
    )
    texts = positions = following = 0
    with made_whole(out) as temporary:
        for sample in samples:
            ids = sample.input_ids
            logits = model(ids[None].to(model.device), use_cache=False).logits[0]
            argmax = logits.argmax(-1).cpu()
            write_argmax(temporary, sample.path, form.folder, ids, argmax)
            scored = sample.loss_mask[1:]
            following += int((argmax[:-1] == ids[1:])[scored].sum())
            positions += int(scored.sum())
            texts += 1
            events.progress("choose", texts, len(form.files))
        summary = {
            "target": target.fingerprint,
            "data": str(form.folder),
            "samples": texts,
            "positions": positions,
            "positions_following_argmax": following,
            "dtype": kind,
        }
        write_json_atomic(temporary / ABOUT, summary)
    events.note(
        f"the target's own choices for {texts} texts lie in {out}; score with "
        f"data.target_argmax={out}"
    )
    events.note(f"{following} of {positions} tokens in the loss mask are the target's own choice")
    return {
        "metrics": {},
        "curves": {},
        "wiring": {},
        "capture": {"out": str(out), **summary},
        "fingerprints": {"target": target.fingerprint},
        "notes": left_out.notes(),
    }

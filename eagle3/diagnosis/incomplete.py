"""What a checkpoint's files lack although it was trained: a head, or a piece of a projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.diagnosis.answer import LIKELY, Cause
from eagle3.diagnosis.beyond import lost_since_training
from eagle3.diagnosis.causes import fixes_of, runs, verb
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.words import rate_words
from eagle3.doctor.findings import MEASURED

# Of a projection's rows or columns; fewer may have died in training, as none of the lab's did.
LEAST_BLANK = 1 / 16
# Which axes of a projection are the hidden state's: nobody pads these, as heads and the MLP are.
HIDDEN_AXES = {
    "self_attn.q_proj.weight": (1,),
    "self_attn.k_proj.weight": (1,),
    "self_attn.v_proj.weight": (1,),
    "self_attn.o_proj.weight": (0,),
    "mlp.gate_proj.weight": (1,),
    "mlp.up_proj.weight": (1,),
    "mlp.down_proj.weight": (0,),
}
AXES = ("rows", "columns")
STAND_IN = "with the target's rows for a head"


def headless(e: Evidence) -> bool:
    """Whether the file has no head for a draft vocabulary that is not the target's."""
    return e.form.head.value == "target" and e.form.draft_vocab.value != e.form.vocab.value


def absent_head(e: Evidence, wiring: Sequence[Cause]) -> Cause | None:
    """That the file has no head, which no engine makes up for: in the words of one that stops over it.

    What stands in for it here are the target's rows. That is the trained head where a trainer keeps
    them, as speculators does, and no more than a stand-in where it trains the head, as SpecForge does.
    """
    if not headless(e):
        return None
    rows = f"a head of {e.form.draft_vocab.value} rows"
    stopped = [] if runs(e) else [c for c in wiring if c.kind == "head" and c.stops]
    if stopped:
        ground = "" if e.served is None else e.served.evidence.value
        what = stopped[0].what + by_log(e)
        return replace(stopped[0], what=what, trained=rows, evidence=f"served: {ground}")
    length = rate_words(e.trained.accept_length)
    return Cause(
        kind="head",
        what="the file has no lm_head.weight: engines leave the head random, or take the target's with "
        f"a row for each of {e.form.vocab.value} tokens, not for the {e.form.draft_vocab.value} "
        f"that are drafted; with the target's rows of these it accepts {length}{by_log(e)}",
        trained=rows,
        served="no lm_head.weight in the file",
        cost=None,
        fixes=fixes_of(e, "head"),
        confidence=LIKELY,
        evidence=f"{verb(e)}: {MEASURED}",
        stops=True,
    )


def by_log(e: Evidence) -> str:
    """Whether the target's rows were the trained head, where the training log tells."""
    log, ours = e.trained_accuracy, e.by_teacher.accuracy
    if log is None:
        return ""
    right = f"with the target's rows it is right at {ours.value:.3f}, in training at {log:.3f}"
    if lost_since_training(e) is None:
        return f"; {right}: these may well be its head"
    return f"; {right}: the head was trained, so export it again"


def blank(checkpoint: DrafterCheckpoint) -> str | None:
    """That much of a projection along the hidden state is nothing but zeros, as a file that was not
    written to its end leaves it. A projection or a state's chunk of fc that is all zero was left out on
    purpose, and does no work either way.
    """
    for name, weight in checkpoint.drafter.state_dict().items():
        if name == "fc.weight":
            found = list(blank_axes(weight, (0,)))
            chunks = weight.view(len(weight), checkpoint.form.num_aux.value, -1).unbind(1)
            partly = [c for c in chunks if bool(c.any())]
            found += list(blank_axes(torch.cat(partly, 1), (1,))) if partly else []
        else:
            axes_of = (axes for part, axes in HIDDEN_AXES.items() if name.endswith(part))
            found = list(blank_axes(weight, next(axes_of, ())))
        if found:
            axes = " and ".join(found)
            return f"{axes} of {name} hold nothing but zeros, as where a file was cut short"
    return None


def blank_axes(weight: torch.Tensor, axes: tuple[int, ...]) -> Iterator[str]:
    """'192 of 384 columns', for each axis along which enough is zero, and not all."""
    for axis in axes:
        zero = int((~weight.any(1 - axis)).sum())
        size = weight.shape[axis]
        if LEAST_BLANK * size <= zero < size:
            yield f"{zero} of {size} {AXES[axis]}"

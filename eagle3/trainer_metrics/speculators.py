"""speculators' own metrics, as its 0.9.0 computes them for EAGLE-3.

Row t pairs the states at t with token, teacher and loss mask of t+1. The teacher chooses among the
draft vocabulary only, so a position whose choice lies outside it is scored against the best token
inside. `full_acc` of step s is cumulative: a row that was wrong once, or that the loss mask does not
hold at step 0, is wrong for good, while the denominator takes the step's own mask.

Source: speculators 0.9.0 `models/eagle3/{core,data,metrics}.py`, `models/metrics.py`,
`train/trainer.py`.
"""

from __future__ import annotations

from torch import Tensor

from eagle3.trainer_metrics.rollout import Forced
from eagle3.trainer_metrics.tally import Tally, tally

STEPS = 3  # ttt_steps of its config, unless changed
TRUTH = "stored_teacher_in_draft_vocab"

DEFINITIONS = {
    "speculators/full_acc": (
        "rows right on every step so far, inside the loss mask at step 0 and at this step / rows "
        "inside the loss mask at this step; text forced; the teacher chooses among the draft "
        "vocabulary only (log: full_acc_0, full_acc_1, …)"
    ),
    "speculators/cond_acc": (
        "the same numerator / rows inside the loss mask at step 0 that were right on every step "
        "before (log: cond_acc_0, cond_acc_1, …)"
    ),
}

DIFFERENCES = (
    "counts are pooled over all texts, as its validation does; a line of its training log is one "
    "batch on all ranks",
    "it packs texts into one row and pads it; at a text's end deeper steps then look into the next "
    "text or the padding, which adds rows to the denominators of cond_acc and few to those of "
    "full_acc; here every text stands alone",
    "its training log is of the weights as they were at that step, and of the training texts",
    "it runs under bfloat16 autocast, here float32: near ties fall differently",
    "it cuts texts at its total_seq_len; here they are whole",
    "its rope positions start at 1, here at 0: the same scores but for rounding, unless the rope "
    "scaling depends on the length",
)


def rows(mask: Tensor) -> Tensor:
    """Which rows of a text can ever be right, ascending; mask [T] bool."""
    return mask[1:].nonzero().flatten()


def count(forced: Forced, mask: Tensor, steps: int) -> dict[str, Tally]:
    """All counts of one text, curves as NAME@step; mask [T] bool."""
    kept = mask[forced.rows + 1]
    at, drafted = forced.rows[kept], forced.drafted[kept]
    last = len(mask) - 1
    so_far = mask.new_ones(len(at))
    counts = {}
    for s in range(steps):
        inside = at + 1 + s <= last
        before = so_far & inside
        position = (at + 1 + s).clamp(max=last)
        so_far = before & (drafted[:, s] == forced.teacher_in_draft[position])
        right = (so_far & mask[position]).sum()
        counts[f"speculators/full_acc@{s}"] = tally(right, mask[1 + s :].sum())
        counts[f"speculators/cond_acc@{s}"] = tally(right, before.sum())
    return counts

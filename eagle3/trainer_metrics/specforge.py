"""SpecForge's own metrics, as its 0.2.0 computes them for offline EAGLE-3 data.

The text and the teacher are shifted left by one, the states and the loss mask are not. So row t
of step s is counted where loss_mask[t+s] is set, one position before that of speculators, and asks
for the teacher's choice over the whole vocabulary at position t+1+s. A choice outside the draft
vocabulary is a miss.

Source: specforge 0.2.0 `algorithms/eagle3/model.py` (OnlineEagle3Model), `core/lk_loss.py`,
`algorithms/eagle3/data.py`, `training/controller.py`, `eval/evaluator.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3.trainer_metrics.rollout import Forced
from eagle3.trainer_metrics.tally import Tally, tally

STEPS = 7  # training.ttt_length of its config, unless changed
TRUTH = "stored_teacher"

DEFINITIONS = {
    "specforge/acc": (
        "positions where the drafted token is the teacher's choice over the whole vocabulary / "
        "positions of the loss mask, shifted by the step; text forced; a choice outside the draft "
        "vocabulary is a miss (log: acc_0, acc_1, …; eval/per_position_acc; acc_0 is eval/avg_acc)"
    ),
    "specforge/acc_all_steps": "the same, numerators and denominators of all steps summed (log: acc)",
    "specforge/acceptance_rate": (
        "sum over positions of sum_v min(teacher's probability, drafter's), over the draft "
        "vocabulary, the teacher's not renormalised / positions of the shifted loss mask whose "
        "teacher's choice is in the draft vocabulary (log: acceptance_rate_0, …)"
    ),
    "specforge/simulated_acc_len": (
        "a_0 + a_0·a_1 + …, of the marginal specforge/acc of each step; the bonus token is not "
        "counted, so add 1 to meet an accept length (eval/simulated_acc_len)"
    ),
}

DIFFERENCES = (
    "accuracies are pooled over all texts, as its evaluation does; a line of its training log is one "
    "step's batch on all ranks",
    "its acceptance_rate is a mean over batches, each weighted by its padded size; here it is pooled "
    "over positions",
    "its training log is of the weights as they were at that step, and of the training texts",
    "it runs the head and the drafter in bfloat16, here float32: near ties fall differently",
    "it cuts texts at its max_length; here they are whole",
    "the last position's loss mask is cleared, as it does for offline data; online it is not, and "
    "there the teacher's logits come from the running target",
    "sequence parallelism drops the last ttt_length positions of each rank's share; here there is none",
)


def rows(mask: Tensor, steps: int) -> Tensor:
    """Which rows of a text are counted on any step, ascending; mask [T] bool."""
    gate = cleared(mask)
    reached = torch.stack([shifted(gate, s) for s in range(steps)]).any(0)
    return reached.nonzero().flatten()


def count(
    forced: Forced, mask: Tensor, t2d: Tensor, to_target: Tensor, steps: int
) -> dict[str, Tally]:
    """All counts of one text, curves as NAME@step; mask [T] bool, t2d [V] bool, to_target [V_d]."""
    gate = cleared(mask)
    last = len(mask) - 1
    counts = {}
    for s in range(steps):
        wanted = forced.teacher[(forced.rows + 1 + s).clamp(max=last)]
        counted = shifted(gate, s)[forced.rows]
        right = counted & (to_target[forced.drafted[:, s]] == wanted)
        reachable = counted & t2d[wanted.clamp(min=0)]
        overlap = forced.overlap[:, s].double() * reachable
        counts[f"specforge/acc@{s}"] = tally(right.sum(), gate[s:].sum())
        counts[f"specforge/acceptance_rate@{s}"] = tally(overlap.sum(), reachable.sum())
    return counts


def cleared(mask: Tensor) -> Tensor:
    """The loss mask as the trainer loads it: the last position, which has no teacher, is never set."""
    gate = mask.clone()
    gate[-1] = False
    return gate


def shifted(gate: Tensor, by: int) -> Tensor:
    """Left by so many positions, [T]; nothing comes in at the end."""
    return torch.cat([gate[by:], torch.zeros_like(gate[:by])])

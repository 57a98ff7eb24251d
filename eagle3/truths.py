"""What a drafted token may be compared with, as far as the data holds it.

    target_argmax    the target's own full-vocabulary choice: the reference
    next_token       of the text; the same where the target wrote it greedily
    stored_teacher   the data's last slot through the target's head: what a trainer saw

The three are never mixed. Where the stored teacher is not the target, a drafter can agree with it
and be of no use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from eagle3.metrics import Count, Rate, Truth, truth_tokens
from eagle3.samples import Sample
from eagle3.target import TargetParts

ROWS_AT_ONCE = 256  # bounds the teacher's logits to [256, V]
AGREEMENT = "teacher_agreement"
# A dump in bfloat16 turns a near tie now and then; a wrong slot agrees far less than this.
SOUND_AGREEMENT = 0.9


def truths_of(sample: Sample, target: TargetParts) -> dict[Truth, Tensor]:
    """The truths that a sample holds: entry p [T] is what a drafted token for p must be."""
    chosen = {Truth.target_argmax: sample.target_argmax}
    if sample.teacher is not None:
        chosen[Truth.stored_teacher] = teacher_choice(sample, target)
    where = str(sample.path)
    return {
        Truth.next_token: truth_tokens(sample.input_ids, None, Truth.next_token, where),
        **{
            truth: truth_tokens(sample.input_ids, tokens, truth, where)
            for truth, tokens in chosen.items()
            if tokens is not None
        },
    }


def teacher_choice(sample: Sample, target: TargetParts) -> Tensor:
    """What the stored teacher chooses behind each position, [T]."""
    assert sample.teacher is not None
    chosen = [
        target.logits(rows, normed=sample.teacher_normed).argmax(-1)
        for rows in sample.teacher.split(ROWS_AT_ONCE)
    ]
    return torch.cat(chosen)


def count_truths(
    drafted: Tensor, rows: Tensor, mask: Tensor, truths: Mapping[Truth, Tensor]
) -> dict[str, Count]:
    """Raw counts of one text: the first drafted tokens [R] against each truth, and the teacher itself.

    rows [R] from scored_rows, so that every truth is asked at the same positions; mask [T].
    """
    positions = (rows + 2)[mask[rows + 2]]
    first = drafted[mask[rows + 2]]
    counts = {
        f"accuracy/{truth.value}": Count(int((first == tokens[positions]).sum()), len(positions))
        for truth, tokens in truths.items()
    }
    teacher, reference = truths.get(Truth.stored_teacher), reference_of(truths)
    if teacher is not None:
        agrees = int((teacher[positions] == truths[reference][positions]).sum())
        counts[AGREEMENT] = Count(agrees, len(positions))
    return counts


def reference_of(truths: Mapping[Truth, Tensor]) -> Truth:
    """What the teacher is held against: the target's own choice where the data has it."""
    return Truth.target_argmax if Truth.target_argmax in truths else Truth.next_token


def gap_notes(metrics: Mapping[str, Rate], slot: str) -> list[str]:
    """What the three figures say of the data; `slot` names the teacher's slot and its state."""
    agreement = metrics.get(AGREEMENT)
    if agreement is None:
        return []
    if agreement.truth == Truth.next_token.value:
        return [
            "the data has no target_argmax, so whether the stored teacher is the target's end stays "
            "open; add it with job=capture_states"
        ]
    if agreement.high >= SOUND_AGREEMENT:
        return []
    seen = f"{agreement.value:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]"
    return [
        f"wrong teacher: the data's last slot ({slot}), which trainers take for their teacher, makes "
        f"the target's own choice at only {seen} of the scored positions; accuracy against it "
        f"({figure(metrics, 'stored_teacher')}) says nothing of serving, where it is "
        f"{figure(metrics, 'target_argmax')}. job=inspect_data shows which slot is the target's end"
    ]


def figure(metrics: Mapping[str, Rate], truth: str) -> str:
    """One of the accuracies with three digits."""
    rate = metrics.get(f"accuracy/{truth}")
    return "unknown" if rate is None else f"{rate.value:.3f}"

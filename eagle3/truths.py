"""What a drafted token may be compared with, as far as the data holds it.

    target_argmax    the target's own full-vocabulary choice: the reference
    next_token       of the text; the same where the target wrote it greedily
    stored_teacher   the data's last slot through the target's head: what a trainer saw

The three are never mixed. Where the stored teacher is not the target, a drafter can agree with it
and be of no use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.errors import BadInput
from eagle3.metrics import Count, Rate, Truth, truth_tokens
from eagle3.samples import Sample
from eagle3.target import TargetParts

ROWS_AT_ONCE = 256  # bounds the teacher's logits to [256, V]
AGREEMENT = "teacher_agreement"
COMPARED_ROWS = 32  # of a sample's embedding slot
ALIKE = 0.99  # cosine; rounding to bfloat16 leaves 0.9999
# A dump in bfloat16 turns a near tie now and then; a wrong slot agrees far less than this.
SOUND_AGREEMENT = 0.9


def why_no_teacher(target: TargetParts, normed: bool) -> str | None:
    """Why the stored teacher's choices cannot be had from this target; None: they can."""
    try:
        target.head()
        if not normed:
            target.final_norm()
    except BadInput as error:
        return str(error)
    return None


def truths_of(
    sample: Sample, rows: Tensor, *, teacher: TargetParts | None, steps: int = 1
) -> dict[Truth, Tensor]:
    """The truths that a sample holds: entry p [T] is what a drafted token for p must be.

    `teacher` is the target whose norm and head make the stored teacher's choices, None for leaving
    them out; they are made for the positions that `steps` steps behind `rows` [R] are about, and
    are -1 elsewhere.
    """
    chosen: dict[Truth, Tensor] = {}
    if sample.target_argmax is not None:
        chosen[Truth.target_argmax] = sample.target_argmax
    if teacher is not None:
        chosen[Truth.stored_teacher] = teacher_choice(sample, teacher, rows, steps)
    where = str(sample.path)
    return {
        Truth.next_token: truth_tokens(sample.input_ids, None, Truth.next_token, where),
        **{
            truth: truth_tokens(sample.input_ids, tokens, truth, where)
            for truth, tokens in chosen.items()
        },
    }


def teacher_choice(sample: Sample, target: TargetParts, rows: Tensor, steps: int) -> Tensor:
    """What the stored teacher chooses behind positions row + 1 … row + steps, [T]; -1 elsewhere."""
    states = sample.teacher
    length = len(sample.input_ids)
    behind = (rows[:, None] + 1 + torch.arange(steps, device=rows.device)).flatten().unique()
    behind = behind[behind < length]
    chosen = torch.full((length,), -1, dtype=torch.int64, device=sample.input_ids.device)
    for positions in behind.split(ROWS_AT_ONCE):
        logits = target.logits(states[positions], normed=sample.teacher_normed)
        if not torch.isfinite(logits).all():
            raise BadInput(
                f"{sample.path}: the stored teacher's logits hold NaN or infinity; its states are too "
                "large to be a target's"
            )
        chosen[positions] = logits.argmax(-1)
    return chosen


def count_truths(drafted: Tensor, rows: Tensor, truths: Mapping[Truth, Tensor]) -> dict[str, Count]:
    """Raw counts of one text: the first drafted tokens [R] against each truth, and the teacher itself.

    rows [R] from scored_rows, so that every truth is asked at the same positions.
    """
    positions = rows + 2
    counts = {
        f"accuracy/{truth.value}": Count(int((drafted == tokens[positions]).sum()), len(rows))
        for truth, tokens in truths.items()
    }
    teacher, reference = truths.get(Truth.stored_teacher), reference_of(truths)
    if teacher is not None:
        agrees = int((teacher[positions] == truths[reference][positions]).sum())
        counts[AGREEMENT] = Count(agrees, len(rows))
    return counts


def reference_of(truths: Mapping[Truth, Tensor]) -> Truth:
    """What the teacher is held against: the target's own choice where the data has it."""
    return Truth.target_argmax if Truth.target_argmax in truths else Truth.next_token


def embedding_rows(sample: Sample, target: TargetParts) -> Count:
    """Of the rows that are declared to be the embedding output, those that point as the token's does.

    Whatever constant factor a target puts on its embedding; no rows where no slot is declared so.
    """
    stored = sample.states.get(0)
    if stored is None:
        return Count(0, 0)
    rows = torch.linspace(0, len(stored) - 1, min(len(stored), COMPARED_ROWS)).long()
    rows = rows.to(stored.device)
    expected = target.rows("embedding", sample.input_ids[rows])
    alike = F.cosine_similarity(stored[rows], expected, dim=-1) > ALIKE
    return Count(int(alike.sum()), len(rows))


def embedding_findings(counts: Sequence[Count], where: str) -> list[Finding]:
    """A slot that is declared state 0 and does not hold the target's embedding."""
    alike, rows = sum(c.numerator for c in counts), sum(c.denominator for c in counts)
    if not rows or alike >= rows / 2:
        return []
    return [
        Finding(
            name="embedding-missing",
            severity="error",
            where=where,
            what=f"a slot is declared state 0, the embedding output, but only {alike} of {rows} of its "
            "rows are those of their tokens in the target's embedding",
            effect="the figures below are of a drafter that was fed something else than it says",
            fix=(
                "job=inspect_data shows which state each slot is",
                "data.states=[…] in that order",
            ),
            evidence=MEASURED,
        )
    ]


def teacher_findings(metrics: Mapping[str, Rate], where: str, slot: str) -> list[Finding]:
    """What the figures say of the data's teacher; `slot` names its slot and its state."""
    agreement = metrics.get(AGREEMENT)
    if agreement is None or agreement.high >= SOUND_AGREEMENT:
        return []
    seen = f"{agreement.value:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]"
    last = f"the data's last slot ({slot}), which trainers take for their teacher,"
    if agreement.truth == Truth.next_token.value:
        return [
            Finding(
                name="teacher-open",
                severity="note",
                where=where,
                what=f"{last} makes the text's next token at {seen} of the scored positions, and the "
                "data has no target_argmax that would say how much the target itself makes of them",
                effect="if it is less, a drafter that was trained on this data learned another teacher",
                fix=(
                    "job=capture_states data=path … job.out=FOLDER, then data.target_argmax=FOLDER",
                    "job=inspect_data",
                ),
                evidence=MEASURED,
            )
        ]
    return [
        Finding(
            name="wrong-teacher",
            severity="warning",
            where=where,
            what=f"{last} makes the target's own choice at only {seen} of the scored positions; "
            f"accuracy against it is {figure(metrics, 'stored_teacher')}, against the target "
            f"{figure(metrics, 'target_argmax')}",
            effect="only agreement with the target is accepted; a drafter that was trained on this "
            "teacher is as good as its figure against the target",
            fix=("job=inspect_data shows which slot is the target's end",),
            evidence=MEASURED,
        )
    ]


def figure(metrics: Mapping[str, Rate], truth: str) -> str:
    """One of the accuracies with three digits."""
    rate = metrics.get(f"accuracy/{truth}")
    return "unknown" if rate is None else f"{rate.value:.3f}"

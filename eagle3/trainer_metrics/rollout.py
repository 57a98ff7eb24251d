"""A drafter's rollout as trainers run it: whatever it drafts, the next step takes the text's token.

Row t starts from the target's states at position t and the token x[t+1]. On step s it takes
x[t+1+s] and its own output of step s-1, and its logits are held against the teacher's at position
t+1+s, which are about x[t+2+s]. A served chain differs in two things: it takes its own drafted
tokens, and a sliding window moves on with its position, where trainers leave it at the row. So step
0 is the same, and without windows deeper steps are the same wherever the drafts before were the
text's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.errors import BadInput
from eagle3.model import Cache, Drafter

# The teacher's logits [P, V] in float32 at positions [P] of the text.
TeacherLogits = Callable[[Tensor], Tensor]

ROWS_AT_ONCE = 256  # bounds the teacher's logits to [256 + steps, V]


@dataclass(frozen=True, kw_only=True)
class Forced:
    """A text's forced rollout beside its teacher. R rows, S steps, T positions.

    `drafted` [R, S] are draft ids; `overlap` [R, S] is the sum over the draft vocabulary of
    min(teacher's probability, drafter's), the teacher's taken over the whole vocabulary.
    `teacher` [T] is the teacher's choice as a target id, `teacher_in_draft` [T] its choice among
    the draft vocabulary, as the how-manieth token of t2d; both are -1 where no row asks. What a row
    says about positions beyond the text's end means nothing.
    """

    rows: Tensor
    drafted: Tensor
    overlap: Tensor
    teacher: Tensor
    teacher_in_draft: Tensor


@torch.no_grad()
def forced_rollout(
    drafter: Drafter,
    embedding: Tensor,
    ids: Tensor,
    aux: Tensor,
    rows: Tensor,
    *,
    steps: int,
    teacher: TeacherLogits,
    head: Tensor | None = None,
) -> Forced:
    """Roll a drafter out from `rows` [R], ascending positions t < T-1, with the text's tokens.

    embedding [V, H_d] · ids [T] · aux [T, A·H] the concatenated aux states · head [V_d, H_d] scores
    the drafter's states in the place of its own.
    """
    in_draft = drafter.t2d.nonzero().flatten()
    if len(in_draft) != drafter.shape.draft_vocab:
        raise BadInput(
            f"t2d names {len(in_draft)} tokens, but the drafter's head has "
            f"{drafter.shape.draft_vocab} rows; the trainers' metrics are not defined for it"
        )
    drafted, overlap = [], []
    chosen = torch.full_like(ids, -1)
    chosen_in_draft = torch.full_like(ids, -1)
    last = len(ids) - 1
    if len(rows):
        prefix = torch.arange(int(rows[-1]) + 1, device=ids.device)
        native: Cache = []
        g = drafter.fuse(aux[: len(prefix)])[None]
        # The table may be narrower than the drafter, as its checkpoint stores it.
        embedded = embedding[ids[1 : len(prefix) + 1]].to(g.dtype)
        first = drafter.step(embedded[None], g, prefix, native)
    for chunk in rows.split(ROWS_AT_ONCE) if len(rows) else ():
        targets = (chunk[:, None] + 1 + torch.arange(steps, device=ids.device)).clamp(max=last)
        positions, index = targets.unique(return_inverse=True)  # [P], [R, S]
        logits = teacher(positions)  # [P, V]
        chosen[positions] = logits.argmax(-1)
        probabilities = logits[:, in_draft]
        chosen_in_draft[positions] = probabilities.argmax(-1)
        probabilities = (probabilities - logits.logsumexp(-1, keepdim=True)).exp()
        y, cache = first[:, chunk], list(native)
        for s in range(steps):
            if s:
                # Trainers pad the text with token 0; no row that is scored gets so far.
                token = torch.where(chunk + 1 + s <= last, ids[targets[:, s]], 0)
                embedded = embedding[token].to(y.dtype)
                fed = drafter.feedback(y)
                y = drafter.step(embedded[None], fed, chunk, cache, window_from_row=True)
            scores = drafter.logits(y[0], head)
            drafted.append(scores.argmax(-1))
            both = torch.minimum(probabilities[index[:, s]], scores.float().softmax(-1))
            overlap.append(both.sum(-1))
    return Forced(
        rows=rows,
        drafted=by_row(drafted, rows, steps, ids.dtype),
        overlap=by_row(overlap, rows, steps, torch.float32),
        teacher=chosen,
        teacher_in_draft=chosen_in_draft,
    )


def by_row(parts: list[Tensor], rows: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Chunk by chunk, step by step → [R, S]."""
    if not parts:
        return torch.zeros(0, steps, dtype=dtype, device=rows.device)
    chunks = [torch.stack(parts[i : i + steps], 1) for i in range(0, len(parts), steps)]
    return torch.cat(chunks).to(dtype)

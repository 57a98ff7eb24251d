"""Small texts, targets and drafters to search; and wirings counted the plain way, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import connect
from eagle3.form import Rope
from eagle3.metrics import Count, count_chains, judge_chains, scored_rows
from eagle3.model import DrafterShape
from eagle3.search.texts import Text
from eagle3.target import TargetParts
from eagle3.wiring import Wiring
from tests.eagle3.small import SHAPE, random_drafter
from tests.eagle3.wired import checkpoint_of

STEPS = 3
STATES = (0, 2, 5, 7)
TEACHERS = ("next_token", "slot3/normed", "target_argmax")
YARN = Rope(
    theta=500.0,
    kind="yarn",
    scaling=(
        ("factor", 4.0),
        ("mscale", 1.0),
        ("mscale_all_dim", 0.5),
        ("original_max_position_embeddings", 16),
    ),
)
# As wide as its target, so that the target's tables can stand in.
PLAIN = replace(SHAPE, target_hidden=SHAPE.hidden)
# Everything that a drafter may have.
FULL = replace(
    PLAIN,
    num_layers=2,
    windows=(4, None),
    norm_before_residual=True,
    norm_before_fc=True,
    attention_bias=True,
    qk_norm=True,
    fc_bias=True,
    feedback_normed=True,
    rope=YARN,
)
CHUNKS = replace(PLAIN, fc_norm=True, fc_bias=True)


def checkpoint(shape: DrafterShape, seed: int = 0) -> DrafterCheckpoint:
    table = torch.randn(shape.vocab, shape.hidden, generator=torch.Generator().manual_seed(7))
    return checkpoint_of(random_drafter(seed, shape), table)


def small_texts(
    lengths: Sequence[int] = (9, 14, 11, 30), width: int = PLAIN.target_hidden
) -> list[Text]:
    """Random texts; each follows target_argmax, so that chains are decided to the end."""
    generator = torch.Generator().manual_seed(5)
    texts = []
    for i, length in enumerate(lengths):
        ids = torch.randint(SHAPE.vocab, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        mask[: 1 + i] = False
        other = torch.randint(SHAPE.vocab, (length,), generator=generator)
        texts.append(
            Text(
                path=Path(f"text/{i}"),
                ids=ids,
                mask=mask,
                rows=scored_rows(mask),
                states={k: torch.randn(length, width, generator=generator) for k in STATES},
                truths={"target_argmax": ids, "next_token": ids, "slot3/normed": other},
            )
        )
    return texts


def plain_counts(
    checkpoint: DrafterCheckpoint,
    target: TargetParts,
    text: Text,
    wiring: Wiring,
    teacher: str,
    steps: int = STEPS,
) -> dict[str, Count]:
    """The counts of one wiring on one text as drafter_test has them, but for what searches leave out."""
    tied = connect(checkpoint, target, wiring)
    aux = torch.cat([text.states[k].float() for k in tied.states], -1)
    drafted = tied.chains(text.ids, aux, text.rows, steps=steps)
    truth, t2d = text.truths[teacher], tied.drafter.t2d
    judged = judge_chains(drafted, text.rows, text.ids, text.mask, truth, t2d)
    return count_chains(judged, marginal=False)


def drafted_texts(
    checkpoint: DrafterCheckpoint, target: TargetParts, wiring: Wiring, lengths: Sequence[int]
) -> list[Text]:
    """Texts that go on as the drafter drafts them, wired so, for as many tokens as chance has it."""
    tied = connect(checkpoint, target, wiring)
    texts, generator = small_texts(lengths), torch.Generator().manual_seed(6)
    for text in texts:
        aux = torch.cat([text.states[k].float() for k in tied.states], -1)
        row = int(text.rows[0])
        while row + 2 + STEPS <= len(text.ids):
            chain = tied.chains(text.ids, aux, torch.tensor([row]), steps=STEPS)[0]
            right = int(torch.randint(STEPS + 1, (1,), generator=generator))
            text.ids[row + 2 : row + 2 + right] = chain[:right]
            row += right + 1
    return texts

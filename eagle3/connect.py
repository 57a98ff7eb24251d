"""A drafter tied to its target as a wiring says, ready to draft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.chain import draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint
from eagle3.errors import BadInput
from eagle3.model import Drafter
from eagle3.target import TargetParts
from eagle3.wiring import DecoderLayer, Embedding, Head, Residual, Window, Wiring

COMPARED_ROWS = 1024  # of two embeddings, evenly spread


@dataclass(frozen=True, kw_only=True)
class Connected:
    """What drafting takes: see eagle3.chain.draft_chains for the shapes."""

    drafter: Drafter
    embedding: Tensor  # [V, H_d]
    head: Tensor | None  # [V_d, H_d] rows of the target's, None for the drafter's own
    to_target: Tensor  # [V_d] the target id of every draft id
    states: tuple[int, ...]  # canonical, in the order of concatenation
    decoder_layer: DecoderLayer
    wiring: Wiring
    notes: tuple[str, ...]


def connect(checkpoint: DrafterCheckpoint, target: TargetParts, wiring: Wiring) -> Connected:
    """Tie them together; raises BadInput where they do not fit, naming what does not."""
    shape = checkpoint.drafter.shape
    check_fit(checkpoint, target)
    states = wiring.states(target.num_layers)
    if len(states) != shape.num_aux:
        raise BadInput(
            f"wiring.layers names {len(states)} states, but the drafter's fc takes {shape.num_aux}"
        )
    to_target = draft_to_target_ids(checkpoint.drafter.d2t, wiring.d2t, shape.vocab)
    return Connected(
        drafter=rewired(checkpoint.drafter, wiring),
        embedding=embedding_of(checkpoint, target, wiring.embedding),
        head=head_of(checkpoint, target, wiring.head, to_target),
        to_target=to_target,
        states=states,
        decoder_layer=wiring.decoder_layer,
        wiring=wiring,
        notes=tuple(own_embedding_notes(checkpoint, target, wiring.embedding)),
    )


def check_fit(checkpoint: DrafterCheckpoint, target: TargetParts) -> None:
    """The drafter must have been made for a target of this vocabulary and width."""
    shape = checkpoint.drafter.shape
    if (shape.vocab, shape.target_hidden) != (target.vocab, target.hidden):
        raise BadInput(
            f"the drafter is made for a target of vocabulary {shape.vocab} and hidden size "
            f"{shape.target_hidden}, but this target has {target.vocab} and {target.hidden}"
        )


def rewired(drafter: Drafter, wiring: Wiring) -> Drafter:
    """The drafter with the residual and the windows that the wiring wants."""
    switches: dict[str, Any] = {}
    if wiring.residual is not Residual.declared:
        switches["norm_before_residual"] = wiring.residual is Residual.normed
    if wiring.window is Window.none:
        switches["windows"] = ()
    return drafter.rewired(**switches) if switches else drafter


def own_embedding_notes(
    checkpoint: DrafterCheckpoint, target: TargetParts, whose: Embedding
) -> Iterator[str]:
    """Whether a table of the drafter's own is left unread that is not the target's."""
    own = checkpoint.embedding
    if own is None or whose is Embedding.own or own.shape != target.embedding.shape:
        return
    rows = torch.linspace(0, len(own) - 1, min(len(own), COMPARED_ROWS)).long().to(own.device)
    if not torch.equal(own[rows].float(), target.embedding[rows].float()):
        yield (
            "the checkpoint's own embed_tokens.weight is not the target's and is left unread "
            "(wiring.embedding=target), as SGLang does; vLLM runs it: wiring.embedding=own"
        )


def embedding_of(checkpoint: DrafterCheckpoint, target: TargetParts, whose: Embedding) -> Tensor:
    """The token embedding [V, H_d] that the wiring names, as stored."""
    if whose is Embedding.own:
        if checkpoint.embedding is None:
            raise BadInput(
                "wiring.embedding=own, but the drafter's checkpoint has no embed_tokens.weight; "
                "use wiring.embedding=target"
            )
        return checkpoint.embedding
    check_width("embedding", target, checkpoint)
    return target.embedding


def head_of(
    checkpoint: DrafterCheckpoint, target: TargetParts, whose: Head, to_target: Tensor
) -> Tensor | None:
    """The target's head rows [V_d, H_d] for the draft vocabulary, or None for the drafter's own."""
    if whose is Head.own:
        if not checkpoint.drafter.shape.own_head:
            raise BadInput(
                "wiring.head=own, but the drafter's checkpoint has no lm_head.weight; use "
                "wiring.head=target"
            )
        return None
    check_width("head", target, checkpoint)
    return target.rows("head", to_target)


def check_width(what: str, target: TargetParts, checkpoint: DrafterCheckpoint) -> None:
    """The target's tables can only stand in for the drafter's where both are as wide."""
    width = checkpoint.drafter.shape.hidden
    if target.hidden != width:
        raise BadInput(
            f"wiring.{what}=target, but the target's {what} is {target.hidden} wide and the drafter "
            f"{width}"
        )

"""A drafter tied to its target as a wiring says, ready to draft.

Every switch of a wiring ends up in one of three places: in the drafter's shape (`switches_of`), in the
tables that it reads, or in how it is fed (`Connected.chains`, `Connected.trees`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint
from eagle3.checkpoints.reading import Reader
from eagle3.checkpoints.rotary import read_rope
from eagle3.errors import BadInput
from eagle3.form import Rope, Setting
from eagle3.model import Drafter, DrafterShape
from eagle3.target import TargetParts
from eagle3.tree import Ancestry, Trees, draft_trees
from eagle3.wiring import (
    Biases,
    Concat,
    DecoderLayer,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    Parts,
    Positions,
    Residual,
    RopeChoice,
    Rotation,
    Token,
    Window,
    Wiring,
    chosen_rope,
    needs_target,
)

COMPARED_ROWS = 1024  # of two embeddings, evenly spread
MOST_NAMES = 4  # of tensors in a note
NO_DEFAULT = "a default that depends on the model's class"
# Keys of targets whose layers do not all turn alike: global_rope_theta, rope_local_base_freq, ….
OTHER_ROPE = re.compile(r".+_rope_theta|rope_\w+_freq")


@dataclass(frozen=True, kw_only=True)
class Connected:
    """What drafting takes: see eagle3.chain.draft_chains for the shapes.

    `drafter` shares its weights with the checkpoint's, whatever the wiring; `notes` say which tensors
    the wiring leaves unread and which ones that it asks for are of ones.
    """

    drafter: Drafter
    embedding: Tensor  # [V, H_d]
    head: Tensor | None  # [V_d, H_d] rows of the target's, None for the drafter's own
    to_target: Tensor  # [V_d] the target id of every draft id
    vocabulary: Tensor  # [V] which target ids can be drafted, for coverage
    states: tuple[int, ...]  # canonical, in the order of concatenation
    decoder_layer: DecoderLayer
    token: Token
    wiring: Wiring
    notes: tuple[str, ...]

    def chains(self, ids: Tensor, aux: Tensor, rows: Tensor, *, steps: int) -> Tensor:
        """draft_chains as the wiring says: target ids [R, steps]; aux [T, A·H] of `states`."""
        return draft_chains(
            self.drafter,
            self.embedding,
            ids,
            aux,
            rows,
            steps=steps,
            to_target=self.to_target,
            decoder_layer=self.decoder_layer,
            head=self.head,
            token=self.token,
        )

    def trees(
        self,
        ids: Tensor,
        aux: Tensor,
        rows: Tensor,
        *,
        steps: int,
        topk: int,
        draft_tokens: int,
        ancestry: Ancestry = Ancestry.slot,
    ) -> Trees:
        """draft_trees as the wiring says; aux [T, A·H] of `states`."""
        return draft_trees(
            self.drafter,
            self.embedding,
            ids,
            aux,
            rows,
            steps=steps,
            topk=topk,
            draft_tokens=draft_tokens,
            to_target=self.to_target,
            head=self.head,
            decoder_layer=self.decoder_layer,
            ancestry=ancestry,
            token=self.token,
        )


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
    switches = switches_of(wiring, shape, rope_needed(wiring, target))
    drafter = checkpoint.drafter.rewired(**switches) if switches else checkpoint.drafter
    return Connected(
        drafter=drafter,
        embedding=embedding_of(checkpoint, target, wiring.embedding),
        head=head_of(checkpoint, target, wiring.head, to_target),
        to_target=to_target,
        vocabulary=checkpoint.vocabulary(to_target),
        states=states,
        decoder_layer=wiring.decoder_layer,
        token=wiring.token,
        wiring=wiring,
        notes=(
            *own_embedding_notes(checkpoint, target, wiring.embedding),
            *weight_notes(checkpoint, drafter),
        ),
    )


def check_fit(checkpoint: DrafterCheckpoint, target: TargetParts) -> None:
    """The drafter must have been made for a target of this vocabulary and width."""
    shape = checkpoint.drafter.shape
    if (shape.vocab, shape.target_hidden) != (target.vocab, target.hidden):
        raise BadInput(
            f"the drafter is made for a target of vocabulary {shape.vocab} and hidden size "
            f"{shape.target_hidden}, but this target has {target.vocab} and {target.hidden}"
        )


def switches_of(wiring: Wiring, shape: DrafterShape, theirs: Rope | None) -> dict[str, Any]:
    """What the wiring changes in the shape that the checkpoint declares, by the shape's own names.

    `theirs` is the target's rope where the wiring needs it, see `rope_needed`. Raises BadInput where
    there is none, or where base and scaling of two models make no rotary embedding.
    """
    rope = chosen_rope(wiring.rope, shape.rope, theirs)
    if rope.kind == "yarn" and rope.theta <= 1:
        raise BadInput(
            f"wiring.rope={wiring.rope.value} puts yarn scaling on base {rope.theta:g}, but yarn needs "
            "a base above 1"
        )
    switches: dict[str, Any] = {
        "hidden_first": wiring.concat is Concat.hidden_first,
        "input_norms": wiring.input_norms,
        "rope": rope,
        "interleaved": wiring.rotation is Rotation.interleaved,
        "standing": wiring.positions is Positions.standing,
    }
    if wiring.residual is not Residual.declared:
        switches["norm_before_residual"] = wiring.residual is Residual.normed
    if wiring.fc_input is not FcInput.declared:
        switches["norm_before_fc"] = wiring.fc_input is FcInput.whole
        switches["fc_norm"] = wiring.fc_input is FcInput.chunks
    if wiring.head_input is not HeadInput.declared:
        switches["head_norm"] = wiring.head_input is HeadInput.normed
    if wiring.feedback is not Feedback.declared:
        switches["feedback_normed"] = wiring.feedback is Feedback.normed
    if wiring.window is Window.none:
        switches["windows"] = ()
    if wiring.deeper_norm is Parts.dropped:
        switches["deeper_norm"] = False
    if wiring.biases is Biases.dropped:
        switches["attention_bias"] = False
    if wiring.biases is Biases.first_dropped:
        switches["first_qkv_bias"] = False
    if wiring.qk_norm is Parts.dropped:
        switches["qk_norm"] = False
    return {name: value for name, value in switches.items() if value != getattr(shape, name)}


def rope_needed(wiring: Wiring, target: TargetParts) -> Rope | None:
    """The target's rope where the wiring takes its base or its scaling, else None."""
    return target_rope(target, wiring.rope) if needs_target(wiring.rope) else None


def target_rope(target: TargetParts, choice: RopeChoice = RopeChoice.target) -> Rope:
    """The target's rotary embedding; raises BadInput where it is none that is run here.

    `choice` is what it is asked for, as the error names it.
    """
    where = target.folder / "config.json"
    reader = Reader(
        config=target.config, shapes=None, layout=Setting("target", ""), file=str(where)
    )
    block = reader.block()
    length = reader.integer("max_position_embeddings", [block], Setting(0, NO_DEFAULT))
    rope = read_rope(reader, block, length.value, Setting(10_000.0, NO_DEFAULT))
    faults = list(reader.faults)
    faults += [
        f"has {key}, so that its layers do not all turn alike"
        for key, value in target.config.items()
        if value is not None and OTHER_ROPE.fullmatch(key)
    ]
    if not faults and NO_DEFAULT in rope.origin:
        faults.append("states no rope_theta; write the one that the target was trained with")
    kept = dict(rope.value.scaling)
    needed = [kept.get(f"{which}max_position_embeddings") for which in ("", "original_")]
    if not faults and 0 in needed:
        faults.append(f"states no max_position_embeddings, which '{rope.value.kind}' scaling needs")
    if faults:
        raise BadInput(f"wiring.rope={choice.value}, but {where}: {'; '.join(faults)}")
    return rope.value


def weight_notes(checkpoint: DrafterCheckpoint, run: Drafter) -> Iterator[str]:
    """Weights of the checkpoint that are left unread, and norms that are run without having any."""
    wanted, there = run.state_dict().keys(), checkpoint.drafter.state_dict().keys()
    if unread := [name for name in there if name not in wanted]:
        yield f"the wiring leaves {listed(unread)} of the drafter's checkpoint unread"
    ones = [name for name in wanted if name not in there]
    # A drafter whose norm is never run need not have one in its file; it is then loaded as ones.
    uses = [d.shape.head_norm or d.shape.feedback_normed for d in (run, checkpoint.drafter)]
    if uses == [True, False] and bool((run.norm.weight == 1).all()):
        ones.append("norm.weight")
    if ones:
        yield (
            f"the wiring asks for {listed(ones)}, which the drafter's checkpoint does not have; "
            "ones are taken"
        )


def listed(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


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

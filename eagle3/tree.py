"""Draft trees behind every position of a text at once, as SGLang builds and verifies them.

With `steps`, `topk` and `draft_tokens` as speculative-num-steps, -eagle-topk and -num-draft-tokens:

    level 0     the topk most probable tokens behind the text
    level s     the topk best nodes of level s-1 are fed to the drafter; each gives its topk most
                probable tokens: topk² candidates, whose score is p · score(parent)
    the tree    the draft_tokens - 1 best candidates of all levels, under a root that is the token
                the target wrote last

Probabilities are a float32 softmax over the draft vocabulary; d2t is applied to the chosen tokens.
A greedy target accepts the path of its own tokens down the tree, and adds one.

As for chains, a tree behind position t depends on the target's states up to t only, so the trees
of all positions can be drafted together, and the served walk is a look-up among them.

Source: SGLang 0.5.12 and 0.5.23, `speculative/spec_utils.py`, `eagle_utils.py`, `eagle_worker*.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eagle3 import chain
from eagle3.errors import BadInput
from eagle3.metrics import Chains, Count, count_chains, judge_chains
from eagle3.model import Cache, Drafter
from eagle3.wiring import DecoderLayer, Token


class Ancestry(str, Enum):
    """Whose keys of earlier steps a node is drafted with, beside the text's.

    The topk nodes of a step each have a slot in the drafter's cache. A node in slot j may descend
    from the node that was in slot i; its hidden state is taken from there, but SGLang leaves the
    keys where they are, so that the node sees slot j's (sgl-project/sglang#8409).
    """

    slot = "slot"  # those that were in its own slot: SGLang up to 0.5.23 at least
    path = "path"  # its ancestors': EAGLE's reference


@dataclass(frozen=True, kw_only=True)
class Trees:
    """R trees of N nodes each; node 0 is the root, and every parent comes before its children.

    `tokens` [R, N] target ids. `parents` [R, N] the parent's node, -1 for the root and for a node
    that hangs nowhere. `depth` [R, N], 0 for the root; a node of depth d stands for position
    row + 1 + d. `steps`: the greatest depth that any tree of these sizes can have.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    steps: int


@torch.no_grad()
def draft_trees(
    drafter: Drafter,
    embedding: Tensor,
    ids: Tensor,
    aux: Tensor,
    rows: Tensor,
    *,
    steps: int,
    topk: int,
    draft_tokens: int,
    to_target: Tensor,
    head: Tensor | None = None,
    decoder_layer: DecoderLayer = DecoderLayer.included,
    ancestry: Ancestry = Ancestry.slot,
    token: Token = Token.next,
) -> Trees:
    """Trees of `draft_tokens` nodes, the root included, behind each of `rows`.

    embedding [V, H_d] · ids [T] the text · aux [T, A·H] the concatenated aux states ·
    rows [R] ascending positions t < T-1 · to_target [V_d] from draft_to_target_ids ·
    head [V_d, H_d] in the place of the drafter's own · token as in eagle3.chain; the root is x[t+1]
    whatever it is. Raises BadInput where no tree has these sizes.
    """
    check_sizes(steps, topk, draft_tokens, len(to_target))
    length = int(rows[-1]) + 1
    prefix = torch.arange(length, device=ids.device)
    native: Cache = []
    y = drafter.fuse(aux[:length])[None]
    if decoder_layer is DecoderLayer.included:
        y = drafter.step(embedding[chain.first_tokens(ids, length, token)][None], y, prefix, native)

    def feed(hidden: Tensor, tokens: Tensor, where: Tensor, cache: Cache) -> Tensor:
        """One step for K nodes of the rows `where` [K]: their parents' states [1, K, H_d] → theirs."""
        if decoder_layer is DecoderLayer.skipped:
            return hidden  # no token enters, so every node has the same children
        return drafter.step(embedding[tokens][None], drafter.feedback(hidden), where, cache)

    grown = []
    for chunk in rows.split(max(1, chain.ROWS_AT_ONCE // topk)):
        count = len(chunk)
        hidden, width, cache = y[:, chunk], 1, list(native)  # a row's topk nodes lie side by side
        beam = torch.full((count, 1), -1, device=ids.device)  # as indices among the candidates
        beam_scores = torch.ones(count, 1, device=ids.device)
        candidates = Candidates([], [], [])
        for level in range(steps):
            p, draft_ids = most_probable(drafter.logits(hidden[0], head), topk)  # [R · width, topk]
            tokens = to_target[draft_ids].view(count, -1)  # [R, width · topk]
            scores = (beam_scores[:, :, None] * p.view(count, width, topk)).flatten(1)
            before = candidates.add(tokens, scores, beam.repeat_interleave(topk, 1))
            if level == steps - 1:
                break
            beam_scores, chosen = ranked(scores, topk)  # [R, topk]
            beam = before + chosen
            origin = torch.arange(count, device=ids.device)[:, None] * width + chosen // topk
            hidden, width = hidden[:, origin.flatten()], topk
            if ancestry is Ancestry.path:
                cache = [*cache[:1], *(gathered(layers, origin.flatten()) for layers in cache[1:])]
            fed = tokens.gather(1, chosen).flatten()
            hidden = feed(hidden, fed, chunk.repeat_interleave(topk), cache)
        grown.append(candidates.best(ids[chunk + 1], draft_tokens))
    tokens, parents, depth = (torch.cat(parts) for parts in zip(*grown, strict=True))
    return Trees(tokens=tokens, parents=parents, depth=depth, steps=steps)


def check_sizes(steps: int, topk: int, draft_tokens: int, draft_vocab: int) -> None:
    """Raise BadInput where SGLang would refuse or change these sizes."""
    if min(steps, topk) < 1 or draft_tokens < 2:
        raise BadInput(
            f"a tree needs steps and topk of at least 1 and draft_tokens of at least 2, the root "
            f"included, not {steps}, {topk} and {draft_tokens}"
        )
    if topk > draft_vocab:
        raise BadInput(f"topk of {topk} is more than the draft vocabulary's {draft_vocab} tokens")
    if topk == 1 and draft_tokens != steps + 1:
        raise BadInput(
            f"with topk of 1 the tree is a chain and SGLang sets draft_tokens to steps + 1; write "
            f"{steps + 1} instead of {draft_tokens}"
        )
    most = 1 + topk + (steps - 1) * topk * topk
    if draft_tokens > most:
        raise BadInput(
            f"draft_tokens of {draft_tokens} is more than the {most} that steps={steps} and "
            f"topk={topk} can give, the root included"
        )


def most_probable(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Probabilities and draft ids [R, topk] of the greatest logits [R, V_d], in falling order.

    Equal ones go by the lower id, as argmax does; an engine's topk leaves their order open.
    """
    logits = logits.float()
    left = logits.clone()
    chosen = []
    for _ in range(topk):
        chosen.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, chosen[-1], float("-inf"))
    draft_ids = torch.cat(chosen, -1)
    return logits.softmax(-1).gather(-1, draft_ids), draft_ids


def ranked(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row and their indices, in falling order, equal ones by index.

    A parent is then never behind its child: its score is at least as high and its index lower.
    """
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], indices[:, :count]


def gathered(layers: list[tuple[Tensor, Tensor]], nodes: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One step's keys and values a layer, [B, kv_heads, R, d], for other `nodes`."""
    return [(keys[:, :, nodes], values[:, :, nodes]) for keys, values in layers]


@dataclass(frozen=True)
class Candidates:
    """Everything that could become a node of R trees: one tensor [R, width · topk] a level."""

    tokens: list[Tensor]
    scores: list[Tensor]
    parents: list[Tensor]  # as indices among all candidates, -1: the root

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> int:
        """Add a level; the index of its first candidate."""
        before = sum(level.shape[1] for level in self.tokens)
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.parents.append(parents)
        return before

    def best(self, roots: Tensor, draft_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, parents and depth [R, draft_tokens] of the trees of the best candidates."""
        _, kept = ranked(torch.cat(self.scores, 1), draft_tokens - 1)
        kept = kept.sort(-1).values  # candidates' order is the nodes' order
        parents = torch.cat(self.parents, 1).gather(1, kept)
        place = torch.searchsorted(kept, parents).clamp(max=draft_tokens - 2)
        # A candidate whose parent was not kept hangs nowhere, as in SGLang ("invalid eagle tree");
        # it takes a score above its parent's, that is one which is no number.
        nodes = torch.where(kept.gather(1, place) == parents, place + 1, -1)
        nodes = torch.where(parents < 0, 0, nodes)
        levels = [torch.full_like(t[0], 1 + level) for level, t in enumerate(self.tokens)]
        tokens = torch.cat(self.tokens, 1).gather(1, kept)
        root = torch.zeros_like(roots)[:, None]
        return (
            torch.cat([roots[:, None], tokens], 1),
            torch.cat([root - 1, nodes], 1),
            torch.cat([root, torch.cat(levels)[kept]], 1),
        )


def walk_trees(trees: Trees, truths: Tensor) -> Tensor:
    """Which steps a greedy target accepts, [R, steps]: its tokens truths [R, steps] down the tree.

    Of several children that match, the first is taken and the others are not looked at again.
    """
    node = torch.zeros_like(truths[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    accepted = []
    for step in range(trees.steps):
        match = (trees.parents == node[:, None]) & (trees.tokens == truths[:, step, None])
        alive = alive & match.any(1)
        node = match.int().argmax(1)  # the first; where there is none, the row has ended
        accepted.append(alive)
    return torch.stack(accepted, 1)


def judge_trees(
    trees: Trees, rows: Tensor, ids: Tensor, mask: Tensor, truth: Tensor, t2d: Tensor
) -> Chains:
    """The accepted path of each tree, in the form and under the rules of judge_chains."""
    positions = rows[:, None] + 2 + torch.arange(trees.steps, device=rows.device)
    truths = truth[positions.clamp(max=len(ids) - 1)]
    path = torch.where(walk_trees(trees, truths), truths, -1)
    return judge_chains(path, rows, ids, mask, truth, t2d)


def count_trees(chains: Chains) -> dict[str, Count]:
    """Raw counts of one text's trees, by metric name (curves as NAME@step).

    What a chain's step_accuracy/marginal is has no counterpart: behind its first miss a tree is not
    followed. Floor 1 and ceiling steps + 1 of the accept lengths are a chain's.
    """
    counts = count_chains(chains)
    named = {
        "accept_length_tree": counts["accept_length"],
        "accept_length_tree_uniform": counts["accept_length_uniform"],
    }
    for step in range(chains.correct.shape[1]):
        for kind in ("cumulative", "conditional"):
            named[f"step_accuracy/tree_{kind}@{step}"] = counts[f"step_accuracy/{kind}@{step}"]
    return named

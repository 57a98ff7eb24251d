"""Training the lab's drafter: test-time training on the target's own continuations.

Every step of a chain is fed the text's tokens, as SpecForge does, and learns the target's distribution;
row t of step s attends to what a serving engine's cache would hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.lab.target import LiveTarget, warm_hold_decay
from eagle3.model import Drafter, DrafterShape, KeysValues


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """Texts the target wrote itself: ids [N, T], of which the first `prompt` tokens were given."""

    ids: Tensor
    prompt: int


def continue_prompts(
    target: LiveTarget, prompts: Tensor, new_tokens: int, batch: int = 256
) -> Continuations:
    """Greedy continuations of prompts [N, P]."""
    rows = [target.generate(p, new_tokens) for p in prompts.split(batch)]
    return Continuations(ids=torch.cat(rows), prompt=prompts.shape[1])


def choose_draft_vocab(ids: Tensor, vocab: int, size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent ids as the tables (d2t offsets [size], t2d mask [vocab])."""
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def train_drafter(
    target: LiveTarget,
    texts: Continuations,
    shape: DrafterShape,
    states: Sequence[int],
    *,
    seed: int,
    steps: int,
    chain: int = 5,
    batch: int = 32,
    peak_lr: float = 3e-3,
    report: Callable[[str], None] = print,
) -> Drafter:
    """A drafter trained on canonical `states` of the target, over chains of `chain` steps."""
    torch.manual_seed(seed)
    drafter = Drafter(shape)
    d2t, t2d = choose_draft_vocab(texts.ids[:, texts.prompt :], shape.vocab, shape.draft_vocab)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.04)
    with torch.no_grad():  # the head starts from the target's rows
        drafter.lm_head.weight.copy_(target.lm_head.weight[t2d])
    embedding = target.embed_tokens.weight.detach()
    optimizer = torch.optim.AdamW(
        drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    order = torch.Generator().manual_seed(seed)
    started, running = time.monotonic(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warm_hold_decay(step, steps)
        ids = texts.ids[torch.randint(len(texts.ids), (batch,), generator=order)]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits, kept = target(ids, states)
        aux = torch.cat([kept[k] for k in states], -1).float()
        loss, right = chain_loss(drafter, embedding, ids, aux, logits.float(), chain)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        running = right if step == 0 else 0.95 * running + 0.05 * right
        if step % 25 == 0:
            report(
                f"drafter step {step}/{steps} loss {loss.item():.3f} first-step accuracy "
                f"{running:.3f} {time.monotonic() - started:.0f} s"
            )
    return drafter


def chain_loss(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, logits: Tensor, chain: int
) -> tuple[Tensor, float]:
    """Cross-entropy with the target's distribution over a chain's steps, weighted 0.8^s.

    ids [B, T], aux [B, T, A·H], logits [B, T, V] of the target. As in SpecForge the target is cut to
    the draft vocabulary, and positions whose best token lies outside it carry no loss. Also returns
    the share of first-step tokens that are the target's own choice.
    """
    length = ids.shape[1] - 1 - chain  # rows whose whole chain has a truth
    rows = torch.arange(length)
    wanted = logits[..., drafter.t2d].softmax(-1)  # [B, T, V_d]; entry p stands for token p + 1
    best = logits.argmax(-1)
    inside = drafter.t2d[best]
    cache: list[KeysValues] = []
    losses, right = [], 0.0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter.fc(aux[:, :length])
        for s in range(chain):
            embedded = embedding[ids[:, 1 + s : 1 + s + length]]
            hidden = drafter.midlayer(embedded, hidden, rows, cache)
            drafted = drafter.logits(hidden).float()
            behind = slice(1 + s, 1 + s + length)
            loss = -(wanted[:, behind] * drafted.log_softmax(-1)).sum(-1)  # [B, length]
            losses.append(0.8**s * loss[inside[:, behind]].mean())
            if s == 0:
                chosen = drafted.argmax(-1)
                right = (chosen + drafter.d2t[chosen] == best[:, behind]).float().mean().item()
    return torch.stack(losses).sum(), right

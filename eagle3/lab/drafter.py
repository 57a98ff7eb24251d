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
from eagle3.model import Cache, Drafter, DrafterShape
from eagle3.repetition import cut


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to train on: ids [N, T]; the tokens first[i] … last[i] - 1 of text i are learnt."""

    ids: Tensor
    first: Tensor  # [N]
    last: Tensor  # [N]

    @classmethod
    def whole(cls, ids: Tensor) -> Texts:
        """Every token is learnt."""
        count, length = ids.shape
        first = torch.zeros(count, dtype=torch.int64)
        return cls(ids=ids, first=first, last=torch.full((count,), length))

    def head(self, count: int | None) -> Texts:
        """The first `count` texts; None: all."""
        return Texts(ids=self.ids[:count], first=self.first[:count], last=self.last[:count])

    def scored(self, chosen: Tensor) -> Tensor:
        """Which tokens of the chosen texts [B] are learnt, [B, T]."""
        positions = torch.arange(self.ids.shape[1])
        return (positions >= self.first[chosen, None]) & (positions < self.last[chosen, None])


def continue_prompts(
    target: LiveTarget, prompts: Tensor, new_tokens: int, batch: int = 256
) -> Tensor:
    """Greedy continuations of prompts [N, P] → ids [N, P + new_tokens]."""
    return torch.cat([target.generate(p, new_tokens) for p in prompts.split(batch)])


def own_words(ids: Tensor, *, prompt: int, end: int, window: int, length: int, least: int) -> Texts:
    """Only the continuations, up to where they begin to repeat themselves.

    `end` and `window` are those of `eagle3.repetition.cut`; texts are cut to `length` tokens, and
    those with fewer than `least` tokens of their own are left out.
    """
    ids = ids[:, :length]
    last = torch.tensor([cut(row, prompt, {end}, window) for row in ids.tolist()])
    kept = last >= prompt + least
    return Texts(ids=ids[kept], first=torch.full((int(kept.sum()),), prompt), last=last[kept])


def choose_draft_vocab(ids: Tensor, vocab: int, size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent ids as the tables (d2t offsets [size], t2d mask [vocab])."""
    counts = torch.bincount(ids.flatten(), minlength=vocab)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def new_drafter(target: LiveTarget, shape: DrafterShape, ids: Tensor, seed: int) -> Drafter:
    """An untrained drafter whose vocabulary is the most frequent tokens of `ids`."""
    torch.manual_seed(seed)
    drafter = Drafter(shape)
    d2t, t2d = choose_draft_vocab(ids, shape.vocab, shape.draft_vocab)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.04)
    with torch.no_grad():  # the head starts from the target's rows
        drafter.lm_head.weight.copy_(target.lm_head.weight[t2d])
    return drafter


def train_drafter(
    drafter: Drafter,
    target: LiveTarget,
    texts: Texts,
    states: Sequence[int],
    *,
    seed: int,
    steps: int,
    chain: int = 5,
    batch: int = 32,
    peak_lr: float = 3e-3,
    exchanged: float = 0.0,
    report: Callable[[str], None] = print,
) -> None:
    """Train a drafter in place on canonical `states` of the target, over chains of `chain` steps.

    A share `exchanged` of the texts is fed another text's states, which teaches the drafter to fall
    back on the tokens it sees.
    """
    embedding = target.embed_tokens.weight.detach()
    optimizer = torch.optim.AdamW(
        drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    order = torch.Generator().manual_seed(seed)
    started, running = time.monotonic(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warm_hold_decay(step, steps)
        chosen = torch.randint(len(texts.ids), (batch,), generator=order)
        ids, scored = texts.ids[chosen], texts.scored(chosen)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits, kept = target(ids, states)
        aux = torch.cat([kept[k] for k in states], -1).float()
        if exchanged:
            other = torch.rand(batch, generator=order) < exchanged
            aux = torch.where(other[:, None, None], aux.roll(1, 0), aux)
        loss, right = chain_loss(drafter, embedding, ids, aux, logits.float(), scored, chain)
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


def chain_loss(
    drafter: Drafter,
    embedding: Tensor,
    ids: Tensor,
    aux: Tensor,
    logits: Tensor,
    scored: Tensor,
    chain: int,
) -> tuple[Tensor, float]:
    """Cross-entropy with the target's distribution over a chain's steps, weighted 0.8^s.

    ids and scored [B, T], aux [B, T, A·H], logits [B, T, V] of the target. As in SpecForge the
    target is cut to the draft vocabulary, and positions whose best token lies outside it carry no
    loss. Also returns the share of first-step tokens that are the target's own choice.
    """
    length = ids.shape[1] - 1 - chain  # rows whose whole chain has a truth
    rows = torch.arange(length)
    wanted = logits[..., drafter.t2d].softmax(-1)  # [B, T, V_d]; entry p stands for token p + 1
    best = logits.argmax(-1)
    scored = scored.roll(-1, 1)  # entry p now stands for token p + 1, as the logits do
    learnt = drafter.t2d[best] & scored
    cache: Cache = []
    losses, right = [], 0.0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = drafter.fuse(aux[:, :length]).float()  # the residual stream stays in float32
        for s in range(chain):
            embedded = embedding[ids[:, 1 + s : 1 + s + length]]
            hidden = drafter.step(embedded, drafter.feedback(hidden) if s else hidden, rows, cache)
            drafted = drafter.logits(hidden).float()
            behind = slice(1 + s, 1 + s + length)
            loss = -(wanted[:, behind] * drafted.log_softmax(-1)).sum(-1)  # [B, length]
            losses.append(0.8**s * loss[learnt[:, behind]].mean())
            if s == 0:
                chosen = drafted.argmax(-1)
                hits = chosen + drafter.d2t[chosen] == best[:, behind]
                right = hits[scored[:, behind]].float().mean().item()
    return torch.stack(losses).sum(), right

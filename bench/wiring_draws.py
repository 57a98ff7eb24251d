"""Drawn problems for a search among 144 wirings, with one right answer each, easy or hard to see.

A draw is a drafter, four stored states, some texts, and the 144 wirings that the data leaves open:
24 ordered triples of the states × 3 readings of d2t × the decoder layer in or out. Which of them is
right is drawn, and so is how hard it is to see:

    far     the fourth state is far from the three
    near    it lies beside one of them, as close as costs the drafter about a tenth of a token
    order   two chunks of fc are blended into each other, until exchanging them costs about that
    noise   on fc, in half of the draws of each kind: the drafter is worse, down to a dead one
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import connect
from eagle3.form import DrafterForm
from eagle3.lab.target import LiveTarget
from eagle3.metrics import (
    Count,
    Truth,
    count_chains,
    judge_chains,
    scored_rows,
    truth_tokens,
)
from eagle3.model import Drafter
from eagle3.repetition import cut
from eagle3.search.texts import Text
from eagle3.target import TargetParts
from eagle3.wiring import D2T, DecoderLayer, Wiring

LAB = Path(__file__).resolve().parent.parent / "lab"
TRAINED = (0, 3, 31)  # of lab/drafter
TRUTH = Truth.target_argmax.value
STEPS = 4
FAR = (11, 21, 58, 59, 60, 61)
BESIDE = {0: (1,), 3: (2, 4), 31: (30, 32)}
POOL_STATES = tuple(sorted({*TRAINED, *FAR, *itertools.chain(*BESIDE.values())}))
PROMPTS = (48, 36)  # tokens of each prompt that are given
NEW_TOKENS, WINDOW, LEAST = 96, 24, 24  # as conf/data/lab.yaml has them
TEXTS, POSITIONS = 64, 4000  # at least, of a draw
SET_UP = 48  # of its texts, on which a draw's closeness is measured
GOALS = (0.05, 0.2)  # accept length between the right wiring and the one beside it
NOISY = (1.1, 2.6)  # accept length that noise brings a drafter down to


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One drawn problem."""

    name: str
    checkpoint: DrafterCheckpoint
    texts: Sequence[Text]
    wirings: Sequence[Wiring]
    true: Wiring

    @property
    def positions(self) -> int:
        """Scored positions."""
        return sum(len(text.rows) for text in self.texts)


def make_pool(model: LiveTarget, lines: Sequence[str], prompts: Sequence[int]) -> list[Text]:
    """The lab's prompts, each given in several lengths and continued by the target, with all states."""
    end = model.shape.vocab - 1
    given = [json.loads(line)["input_ids"] for line in lines]
    pool = []
    for length in prompts:
        batch = model.generate(torch.tensor([ids[:length] for ids in given]), NEW_TOKENS)
        for number, ids in enumerate(batch):
            stop = cut(ids.tolist(), length, {end}, WINDOW)
            if stop - length >= LEAST:
                pool.append(text_of(model, ids[:stop], length, Path(f"{length}/{number}")))
    return pool


@torch.no_grad()
def text_of(model: LiveTarget, ids: Tensor, prompt: int, path: Path) -> Text:
    """One text with the states of POOL_STATES."""
    logits, states = model(ids[None], POOL_STATES)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[prompt:] = True
    truth = truth_tokens(ids, logits[0].argmax(-1), Truth.target_argmax, str(path))
    return Text(
        path=path,
        ids=ids,
        mask=mask,
        rows=scored_rows(mask),
        states={k: states[k][0] for k in POOL_STATES},
        truths={TRUTH: truth},
    )


def score_one(
    checkpoint: DrafterCheckpoint, target: TargetParts, texts: Sequence[Text], wiring: Wiring
) -> list[dict[str, Count]]:
    """The counts of one wiring a text, as jobs/drafter_test computes them."""
    tied = connect(checkpoint, target, wiring)
    counts = []
    for text in texts:
        drafted = draft_chains(
            tied.drafter,
            tied.embedding,
            text.ids,
            torch.cat([text.states[k] for k in tied.states], -1),
            text.rows,
            steps=STEPS,
            to_target=tied.to_target,
            decoder_layer=tied.decoder_layer,
            head=tied.head,
        )
        truth = text.truths[TRUTH]
        chains = judge_chains(drafted, text.rows, text.ids, text.mask, truth, tied.drafter.t2d)
        counts.append(count_chains(chains))
    return counts


def pooled(counts: Sequence[Count]) -> float:
    """One rate over all texts."""
    return sum(c.numerator for c in counts) / sum(c.denominator for c in counts)


def length_of(
    checkpoint: DrafterCheckpoint, target: TargetParts, texts: Sequence[Text], wiring: Wiring
) -> float:
    """The accept length of one wiring."""
    return pooled([c["accept_length"] for c in score_one(checkpoint, target, texts, wiring)])


def draw_problem(
    number: int, seed: int, lab: DrafterCheckpoint, target: TargetParts, pool: Sequence[Text]
) -> Draw:
    """The problem of a number: always the same for one seed."""
    chance = random.Random(f"{seed}/{number}")
    chosen = enough(chance.sample(pool, len(pool)))
    states = tuple(chance.sample(TRAINED, 3))
    true = Wiring.of_states(states, d2t=chance.choice(list(D2T))).resolved(lab.form)
    drafter = reordered(copy.deepcopy(lab.drafter), states, true.d2t)

    def length(
        changed: Drafter, wiring: Wiring = true, texts: Sequence[Text] = chosen[:SET_UP]
    ) -> float:
        return length_of(replace(lab, drafter=changed), target, texts, wiring)

    kind, noise = chance.choice(("far", "near", "near", "order")), chance.random() < 0.5
    if noise:
        drafter = noisy(drafter, chance.getrandbits(40), chance.uniform(*NOISY), length)
    goal = chance.uniform(*GOALS)
    fourth = chance.choice(FAR)
    if kind == "near":
        place = chance.choice(TRAINED)
        fourth = chance.choice(BESIDE[place])
        beside = replace(true, layers=tuple(fourth if k == place else k for k in states))
        best, some = length(drafter), chosen[:SET_UP]
        share = halve(
            lambda share: best - length(drafter, beside, blend(some, place, fourth, share)), goal
        )
        chosen = blend(chosen, place, fourth, share)
    elif kind == "order":
        a, b = chance.sample(range(3), 2)
        swapped = list(states)
        swapped[a], swapped[b] = states[b], states[a]
        other = replace(true, layers=tuple(swapped))

        def cost(share: float) -> float:
            changed = mixed(drafter, a, b, 0.5 * (1 - share))
            return length(changed) - length(changed, other)

        drafter = mixed(drafter, a, b, 0.5 * (1 - halve(cost, goal)))
    stored = sorted({*TRAINED, fourth})
    return Draw(
        name=f"{kind}+noise" if noise else kind,
        checkpoint=replace(lab, drafter=drafter),
        texts=[replace(text, states={k: text.states[k] for k in stored}) for text in chosen],
        wirings=wirings_of(stored, lab.form),
        true=true,
    )


def enough(texts: Sequence[Text]) -> list[Text]:
    """The first texts, as many as a draw needs."""
    chosen: list[Text] = []
    for text in texts:
        if len(chosen) >= TEXTS and sum(len(other.rows) for other in chosen) >= POSITIONS:
            break
        chosen.append(text)
    return chosen


def wirings_of(stored: Sequence[int], form: DrafterForm) -> list[Wiring]:
    """The 144 wirings over four stored states."""
    return [
        Wiring.of_states(triple, d2t=d2t, decoder_layer=layer).resolved(form)
        for triple in itertools.permutations(stored, 3)
        for d2t in D2T
        for layer in DecoderLayer
    ]


def halve(cost: Callable[[float], float], goal: float, rounds: int = 6) -> float:
    """The share between 0 and 1 whose cost is about the goal; 1 where none is so high."""
    low, high = 0.0, 1.0
    if cost(high) <= goal:
        return high
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) < goal else (low, middle)
    return (low + high) / 2


def reordered(drafter: Drafter, states: tuple[int, ...], reading: D2T) -> Drafter:
    """The same drafter for states in this order and with a table that is meant to be read so.

    Draft ids are renamed so that all three readings stay inside the vocabulary: descending target
    ids where the table is absolute; the target's own where it is the identity, which costs the ids
    behind the table's end.
    """
    chunks = drafter.fc.weight.split(drafter.shape.target_hidden, 1)
    drafter.fc.weight.copy_(torch.cat([chunks[TRAINED.index(k)] for k in states], 1).clone())
    ids = draft_to_target_ids(drafter.d2t, D2T.offset, drafter.shape.vocab)
    head = drafter.lm_head.weight
    if reading is D2T.absolute:
        head.copy_(head.flip(0).clone())
        drafter.d2t.copy_(ids.flip(0))
    if reading is D2T.identity:
        inside = ids < len(ids)
        rows = torch.zeros_like(head)
        rows[ids[inside]] = head[inside]
        head.copy_(rows)
    return drafter


def noisy(drafter: Drafter, seed: int, goal: float, length: Callable[[Drafter], float]) -> Drafter:
    """The drafter with so much noise on fc that its accept length falls to about the goal."""
    weight = drafter.fc.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * weight.std()

    def changed(level: float) -> Drafter:
        other = copy.deepcopy(drafter)
        other.fc.weight.add_(noise * level)
        return other

    best = length(drafter)
    return changed(3 * halve(lambda share: best - length(changed(3 * share)), best - goal))


def mixed(drafter: Drafter, a: int, b: int, share: float) -> Drafter:
    """Two chunks of fc, each with a share of the other: at one half their order is no longer there."""
    other = copy.deepcopy(drafter)
    chunks = list(drafter.fc.weight.split(drafter.shape.target_hidden, 1))
    first, second = chunks[a], chunks[b]
    chunks[a] = (1 - share) * first + share * second
    chunks[b] = (1 - share) * second + share * first
    other.fc.weight.copy_(torch.cat(chunks, 1))
    return other


def blend(texts: Sequence[Text], place: int, fourth: int, share: float) -> list[Text]:
    """Texts whose state `fourth` lies only a share of the way from state `place` to it."""
    return [
        replace(
            text,
            states={
                **text.states,
                fourth: torch.lerp(text.states[place], text.states[fourth], share),
            },
        )
        for text in texts
    ]

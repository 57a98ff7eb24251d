"""The search among 144 wirings, side by side with scoring one, and with scoring them all.

    python bench/wiring_search.py [--draws 5] [--repeats 3] [--seed 0] [--threads 1]

A draw is a drafter, four stored states, some texts, and the 144 wirings that the data leaves open:
24 ordered triples of the states × 3 readings of d2t × the decoder layer in or out. Which of them is
right is drawn, and so is how hard it is to see:

    far     the fourth state is far from the three
    near    it lies beside one of them, as close as costs the drafter about a tenth of a token
    order   two chunks of fc are blended into each other, until exchanging them costs about that
    noise   on fc, in half of the draws of each kind: the drafter is worse, down to a dead one

Both sides get the texts with all states and the target's choices in memory. One: a wiring connected,
its chains of four drafted, judged and counted over all texts, as `drafter_test` does. The search:
everything from the scorer's making to the answer. They take turns in one process.

Exhaustive: every wiring over every text, by accept length. Only rows whose tokens were right so far
are drafted on, which changes no accept length and is checked against the other side's way of counting
for two wirings a draw. A pick counts as missed where the best's accept length is above its own by more
than the paired 95 % interval allows, uncorrected.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.connect import connect
from eagle3.form import DrafterForm
from eagle3.lab.layout import lay_out, load_live
from eagle3.lab.target import LiveTarget
from eagle3.metrics import (
    Count,
    Difference,
    Truth,
    count_chains,
    judge_chains,
    paired_difference,
    scored_rows,
    truth_tokens,
)
from eagle3.model import Cache, Drafter
from eagle3.repetition import cut
from eagle3.search.halving import race
from eagle3.search.score import Scorer
from eagle3.search.texts import Text
from eagle3.target import TargetParts, load_target_parts
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
NOT_DRAFTED = -2  # no truth has this id


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


@dataclass(frozen=True)
class Took:
    """Seconds by two clocks: others on the machine add to the first, hardly to the second."""

    wall: float
    cpu: float

    @classmethod
    def since(cls, began: Took | None = None) -> Took:
        """The clocks, or how far they went on."""
        now = cls(time.perf_counter(), time.process_time())
        return now if began is None else cls(now.wall - began.wall, now.cpu - began.cpu)

    @classmethod
    def median(cls, times: Sequence[Took]) -> Took:
        """Each clock's median."""
        return cls(
            statistics.median(t.wall for t in times), statistics.median(t.cpu for t in times)
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a draw."""

    draw: Draw
    one: Took
    search: Took
    pick: Wiring
    best: Wiring
    lengths: dict[Wiring, float]
    behind: Difference  # the best's accept length minus the pick's, paired

    @property
    def missed(self) -> bool:
        """Whether the pick is worse than the best by more than chance."""
        return self.behind.low > 0

    @property
    def ratio(self) -> float:
        """The search's time over that of scoring one, by the clock on the wall."""
        return self.search.wall / self.one.wall

    @property
    def gap(self) -> float:
        """Accept length between the two best wirings."""
        first, second = sorted(self.lengths.values(), reverse=True)[:2]
        return first - second


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


def score_all(draw: Draw, target: TargetParts) -> dict[Wiring, list[Count]]:
    """Accept length counts of every wiring of a draw, a text."""
    drafter = draw.checkpoint.drafter
    maps = {r: draft_to_target_ids(drafter.d2t, r, drafter.shape.vocab) for r in D2T}
    found: dict[Wiring, list[Count]] = {wiring: [] for wiring in draw.wirings}
    shared: dict[tuple[tuple[int, ...], DecoderLayer], list[Wiring]] = {}
    for wiring in draw.wirings:
        shared.setdefault((wiring.states(), wiring.decoder_layer), []).append(wiring)
    for (states, layer), wirings in shared.items():
        for text in draw.texts:
            aux = torch.cat([text.states[k] for k in states], -1)
            if layer is DecoderLayer.skipped:
                tokens = drafter.logits(drafter.fuse(aux[text.rows])).argmax(-1)
                chains = [maps[w.d2t][tokens][:, None].expand(-1, STEPS) for w in wirings]
            else:
                chains = draft_while_right(
                    drafter, target.embedding, text, aux, [maps[w.d2t] for w in wirings]
                )
            for wiring, drafted in zip(wirings, chains, strict=True):
                judged = judge_chains(
                    drafted, text.rows, text.ids, text.mask, text.truths[TRUTH], drafter.t2d
                )
                found[wiring].append(count_chains(judged)["accept_length"])
    return found


@torch.no_grad()
def draft_while_right(
    drafter: Drafter, embedding: Tensor, text: Text, aux: Tensor, maps: Sequence[Tensor]
) -> list[Tensor]:
    """Chains [R, STEPS] for each reading of d2t; behind a wrong token nothing is drafted."""
    rows, truth = text.rows, text.truths[TRUTH]
    length = int(rows[-1]) + 1
    native: Cache = []
    g = drafter.fuse(aux[:length])[None]
    embedded = embedding[text.ids[1 : length + 1]][None]
    y = drafter.step(embedded, g, torch.arange(length), native)[:, rows]
    first = drafter.logits(y[0]).argmax(-1)
    chains = []
    for to_target in maps:
        drafted = torch.full((len(rows), STEPS), NOT_DRAFTED)
        drafted[:, 0] = to_target[first]
        alive, hidden, cache = torch.arange(len(rows)), y, list(native)
        for step in range(1, STEPS):
            behind = rows[alive] + 1 + step
            right = drafted[alive, step - 1] == truth[behind]
            right &= behind + 1 < len(truth)
            kept = right.nonzero().flatten()
            if not len(kept):
                break
            alive, hidden = alive[kept], hidden[:, kept]
            cache = [
                native[0],
                *([(k[:, :, kept], v[:, :, kept]) for k, v in s] for s in cache[1:]),
            ]
            fed = embedding[drafted[alive, step - 1]][None]
            hidden = drafter.step(fed, drafter.feedback(hidden), rows[alive], cache)
            drafted[alive, step] = to_target[drafter.logits(hidden[0]).argmax(-1)]
        chains.append(drafted)
    return chains


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


def answer(draw: Draw, target: TargetParts, repeats: int) -> Outcome:
    """One draw timed and searched, then scored exhaustively."""
    one, search = [], []
    for _ in range(repeats):
        began = Took.since()
        score_one(draw.checkpoint, target, draw.texts, draw.true)
        one.append(Took.since(began))
        began = Took.since()
        scorer = Scorer(draw.checkpoint, target, draw.texts, steps=STEPS)
        raced = race(scorer, draw.wirings, teacher=TRUTH)
        search.append(Took.since(began))
    counts = score_all(draw, target)
    pick = raced.best.wiring
    best = max(counts, key=lambda wiring: pooled(counts[wiring]))
    for wiring in (best, draw.wirings[len(draw.name) * 7 % len(draw.wirings)]):
        plainly = score_one(draw.checkpoint, target, draw.texts, wiring)
        if [c["accept_length"] for c in plainly] != counts[wiring]:
            raise RuntimeError(f"the two ways of counting do not agree on {wiring.plain()}")
    return Outcome(
        draw=draw,
        one=Took.median(one),
        search=Took.median(search),
        pick=pick,
        best=best,
        lengths={wiring: pooled(found) for wiring, found in counts.items()},
        behind=paired_difference(counts[best], counts[pick]),
    )


def short(wiring: Wiring) -> str:
    """A wiring in a few letters."""
    states = ",".join(map(str, wiring.states()))
    return f"{states} {wiring.d2t.value} {wiring.decoder_layer.value}"


def line_of(number: int, found: Outcome) -> str:
    """One draw, one line."""
    kind = "picked" if found.pick == found.best else "missed" if found.missed else "tied"
    regret = found.behind.value
    return (
        f"{number:3d} {found.draw.name:12s} {len(found.draw.texts):3d} texts {found.draw.positions:5d} "
        f"positions  best {found.lengths[found.best]:.3f} ahead by {found.gap:.3f}  one "
        f"{found.one.wall:.2f} s search {found.search.wall:.2f} s ({found.ratio:.2f} x, by processor "
        f"{found.search.cpu / found.one.cpu:.2f} x)  "
        f"{kind} {regret:.3f}  {short(found.best)}"
        + ("" if kind == "picked" else f" | picked {short(found.pick)}")
    )


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """The figures over all draws."""
    ratios = sorted(found.ratio for found in outcomes)
    by_cpu = sorted(found.search.cpu / found.one.cpu for found in outcomes)
    regrets = [found.behind.value for found in outcomes]
    missed = sum(found.missed for found in outcomes)
    exact = sum(found.pick == found.best for found in outcomes)
    close = [found for found in outcomes if 0.05 <= found.gap <= 0.15]
    closer = [found for found in outcomes if found.gap < 0.05]
    return [
        f"search / one: median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; by processor "
        f"time {statistics.median(by_cpu):.2f} and {by_cpu[-1]:.2f}",
        f"{exact} of {len(outcomes)} picks are the best, {len(outcomes) - exact - missed} tied with it, "
        f"{missed} missed",
        f"regret: mean {statistics.mean(regrets):.4f}, worst {max(regrets):.4f} accept length",
        f"the best is ahead by 0.05 to 0.15 in {len(close)} draws "
        f"({sum(f.pick == f.best for f in close)} picked), by less in {len(closer)} "
        f"({sum(f.pick == f.best for f in closer)} picked)",
    ]


def main() -> int:
    """All draws; exit code 1 where a pick was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--repeats", type=int, default=3, help="timings a draw; medians are taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        target = load_target_parts(lay_out(LAB / "target", Path(folder) / "target"))
        lab = load_drafter(LAB / "drafter")
        lines = (LAB / "prompts.jsonl").read_text().splitlines()
        pool = make_pool(load_live(LAB / "target"), lines, PROMPTS)
        shape = lab.drafter.shape
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {given.threads} threads, torch "
            f"{torch.__version__}; hidden {shape.hidden}, vocabulary {shape.vocab}, drafted "
            f"{shape.draft_vocab}, {len(pool)} texts to draw from; medians of {given.repeats}"
        )
        outcomes = []
        for number in range(given.first, given.first + given.draws):
            draw = draw_problem(number, given.seed, lab, target, pool)
            outcomes.append(answer(draw, target, given.repeats))
            print(line_of(number, outcomes[-1]), flush=True)
    print("\n".join(summary(outcomes)))
    return int(any(found.missed for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())

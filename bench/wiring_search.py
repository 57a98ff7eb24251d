"""The search among 144 wirings, side by side with scoring one, and with scoring them all.

    python -m bench.wiring_search [--draws 5] [--repeats 3] [--seed 0] [--threads 1]

The problems are those of bench.wiring_draws. Both sides get the texts with all states and the
target's choices in memory. One: a wiring connected, its chains of four drafted, judged and counted
over all texts, as `drafter_test` does. The search: eagle3.search.search with the axes states, d2t and
decoder_layer, from the scorer's making to the answer. They take turns in one process. Who taught the
drafter is left out on both sides: the only teacher is the target's own choice.

Exhaustive: every wiring over every text, by accept length. Only rows whose tokens were right so far
are drafted on, which changes no accept length and is checked against the other side's way of counting
for two wirings a draw. A pick counts as missed where the best's accept length is above its own by more
than the paired 95 % interval allows, uncorrected.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.wiring_draws import (
    LAB,
    PROMPTS,
    STEPS,
    TRUTH,
    Draw,
    draw_problem,
    make_pool,
    pooled,
    score_one,
)
from eagle3.chain import draft_to_target_ids
from eagle3.checkpoint import load_drafter
from eagle3.lab.layout import lay_out, load_live
from eagle3.metrics import (
    Count,
    Difference,
    count_chains,
    judge_chains,
    paired_difference,
)
from eagle3.model import Cache, Drafter
from eagle3.search.axes import axes_of
from eagle3.search.score import Scorer
from eagle3.search.search import Searched, search
from eagle3.search.teachers import Teacher
from eagle3.search.texts import Text
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import D2T, SWITCHES, DecoderLayer, Wiring

NOT_DRAFTED = -2  # no truth has this id
VARIED = ("d2t", "decoder_layer")  # beside the states
REFERENCE = Teacher(name=TRUTH, slot=None, norms=0, in_words="the target's own choice")
MOST_RATIO = 2.0  # the search's time over that of scoring one


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


def searched(draw: Draw, target: TargetParts) -> Searched:
    """What the search says, with the first of the draw's wirings as its start."""
    form, start = draw.checkpoint.form, draw.wirings[0]
    scorer = Scorer(draw.checkpoint, target, draw.texts, steps=STEPS)
    axes = axes_of(
        form,
        start,
        scorer.known,
        target_rope=None,
        own_embedding=False,
        own_head=True,
        stored=scorer.known,
        fixed=[name for name in SWITCHES if name not in VARIED],
    )
    return search(scorer, [start], axes, [REFERENCE], form=form, steps=STEPS, seed=0, finalists=1)


def answer(draw: Draw, target: TargetParts, repeats: int) -> Outcome:
    """One draw timed and searched, then scored exhaustively."""
    one, took = [], []
    for _ in range(repeats):
        began = Took.since()
        score_one(draw.checkpoint, target, draw.texts, draw.true)
        one.append(Took.since(began))
        began = Took.since()
        found = searched(draw, target)
        took.append(Took.since(began))
    counts = score_all(draw, target)
    pick = found.best.wiring
    if found.scored != len(draw.wirings):
        raise RuntimeError(f"the search scored {found.scored} wirings, not {len(draw.wirings)}")
    best = max(counts, key=lambda wiring: pooled(counts[wiring]))
    for wiring in (best, draw.wirings[len(draw.name) * 7 % len(draw.wirings)]):
        plainly = score_one(draw.checkpoint, target, draw.texts, wiring)
        if [c["accept_length"] for c in plainly] != counts[wiring]:
            raise RuntimeError(f"the two ways of counting do not agree on {wiring.plain()}")
    return Outcome(
        draw=draw,
        one=Took.median(one),
        search=Took.median(took),
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
    """All draws; exit code 1 where a pick was missed, or the median search takes more than twice one."""
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
    slow = statistics.median(found.ratio for found in outcomes) > MOST_RATIO
    return int(slow or any(found.missed for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())

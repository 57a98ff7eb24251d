"""Scoring many wirings of one drafter on the same texts, with what they share computed once.

Within one call:

    partial products   fc_j · h_k, once a chunk j of fc and a state k: every ordered choice of states
                       is a sum of them
    first step         once a (sum, switches of the block): whatever d2t, head, norm and teacher
    picks              once a (first step, head): whatever d2t and teacher; kept for good

Texts run side by side (eagle3.search.batch).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import check_fit
from eagle3.errors import BadInput
from eagle3.metrics import Count, count_chains, judge_chains
from eagle3.model import DrafterShape
from eagle3.samples import asked_in_vain
from eagle3.search.batch import Batch, batches
from eagle3.search.drafting import draft
from eagle3.search.outputs import FEW, Outputs
from eagle3.search.rewired import ROWS_AT_ONCE, Rewired
from eagle3.search.spread import SMALL, spread
from eagle3.search.texts import Text, known_states
from eagle3.target import TargetParts
from eagle3.wiring import D2T, DecoderLayer, Embedding, Head, Token, Wiring

# Positions that go through the block together. More leave the processor's caches, fewer leave small
# drafters waiting for the next operation to begin.
AT_ONCE = {"cpu": 1024, "cuda": 16384}
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)  # that losses are tried at

Sum = tuple[tuple[int, ...], bool, bool]  # states, and the shape's norm_before_fc and fc_norm
Block = tuple[DrafterShape, Embedding, Token]
Picked = tuple[Sequence[Wiring], Mapping[int, Tensor]]  # alike, and what is picked on each text


@dataclass(frozen=True)
class Share:
    """First steps that go through the block together."""

    batch: Batch
    block: Block | None  # None: left out
    sums: Sequence[tuple[Sum, Sequence[Wiring]]]


class Scorer:
    """Counts of any wiring on any of the texts.

    Kept for good: the picks and counts of first steps and the drafted chains, so that no wiring is
    scored twice on a text. Shared by the wirings of one call and then forgotten, since they are as
    large as the states: padded states, partial products, first steps. A later call makes them again for
    the same text.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        target: TargetParts,
        texts: Sequence[Text],
        *,
        steps: int,
    ) -> None:
        check_fit(checkpoint, target)
        if not texts:
            raise BadInput("there is no text to score a wiring on")
        self.checkpoint, self.target, self.texts, self.steps = checkpoint, target, texts, steps
        self.wired = Rewired(checkpoint, target)
        self.known = known_states(texts)
        self.teachers = sorted(set.intersection(*(set(text.truths) for text in texts)))
        self._rights: dict[Wiring, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._picks: dict[Wiring, dict[int, Tensor]] = defaultdict(dict)
        self._outputs = Outputs(texts, checkpoint.drafter.shape.hidden)
        self._drafted: dict[Wiring, dict[int, Tensor]] = defaultdict(dict)
        self._counted: dict[tuple[Wiring, str], dict[int, dict[str, Count]]] = defaultdict(dict)
        self._scored: dict[int, tuple[int, ...]] = {}
        device = str(texts[0].ids.device.type)
        self._at_once = AT_ONCE.get(device, AT_ONCE["cuda"])
        self._cores = 1
        if device == "cpu" and checkpoint.drafter.shape.hidden <= SMALL:
            self._cores = torch.get_num_threads()

    @property
    def scored(self) -> int:
        """How many wirings have been scored at all."""
        return len(self.everyone())

    @property
    def drafted(self) -> int:
        """How many of them have been drafted with, and not only scored at the first step."""
        return sum(bool(chains) for chains in self._drafted.values())

    def why_not(self, wiring: Wiring) -> str | None:
        """Why this wiring cannot be scored; None: it can."""
        try:
            self.check(wiring)
        except BadInput as error:
            return str(error)
        return None

    def check(self, wiring: Wiring) -> None:
        """Raises BadInput where the wiring cannot be scored, naming what does not fit."""
        states, shape = wiring.states(self.target.num_layers), self.checkpoint.drafter.shape
        if len(states) != shape.num_aux:
            raise BadInput(
                f"wiring.layers names {len(states)} states, but the drafter's fc takes "
                f"{shape.num_aux}"
            )
        if lacking := [k for k in states if k not in self.known]:
            folder = str(self.texts[0].path.parent)
            raise BadInput(asked_in_vain(lacking, self.known, folder))
        self.wired.shape(wiring)
        self.wired.embedding(wiring.embedding)
        if wiring.head is Head.target or not shape.own_head:
            self.wired.head(wiring)

    def first(
        self, wirings: Sequence[Wiring], chosen: Sequence[int], teachers: Sequence[str]
    ) -> dict[Wiring, dict[str, list[Count]]]:
        """Counts of the first step, for each wiring and teacher an entry a chosen text."""
        self._score(wirings, chosen)
        places = {name: self.teachers.index(name) for name in teachers}
        return {
            wiring: {
                name: [
                    Count(self._rights[wiring][i][place], self._scored[i][place]) for i in chosen
                ]
                for name, place in places.items()
            }
            for wiring in wirings
        }

    def rights(self, wirings: Sequence[Wiring], chosen: Sequence[int], teacher: str) -> Tensor:
        """How often the first step is right, [wirings, chosen] float64."""
        self._score(wirings, chosen)
        place = self.teachers.index(teacher)
        counts = [[self._rights[w][i][place] for i in chosen] for w in wirings]
        return torch.tensor(counts, dtype=torch.float64)

    @torch.no_grad()
    def losses(
        self, wirings: Sequence[Wiring], chosen: Sequence[int], teacher: str
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the first step against the teacher, [W, chosen] sums in nats, and of how many
        rows, [chosen]: those whose token has a draft id; all wirings read d2t the same way.

        It tells wirings apart that are right equally often. Each is taken at the temperature that suits
        it best, so that one that only makes the drafter more or less sure of itself wins nothing.
        """
        (reading,) = {wiring.d2t for wiring in wirings}
        ids = self.wired.to_target(reading)
        draft_id = torch.full((self.target.vocab + 1,), -1, device=ids.device)
        draft_id[ids] = torch.arange(len(ids), device=ids.device)
        draft_id[-1] = -1  # where an id leads outside, and where the teacher's choice is not known
        sums = torch.zeros(len(wirings), len(TEMPERATURES), len(chosen), dtype=torch.float64)
        rows = torch.zeros(len(chosen), dtype=torch.float64)
        place, number = {i: n for n, i in enumerate(chosen)}, {w: n for n, w in enumerate(wirings)}
        for some in self._outputs.portions(len(wirings), chosen):
            truths = [self.texts[i].truths[teacher][self.texts[i].rows + 2] for i in some]
            wanted = draft_id[torch.cat(truths)]
            counts = torch.tensor([len(truth) for truth in truths])
            at = torch.tensor([place[i] for i in some]).repeat_interleave(counts)
            known = wanted >= 0
            rows.index_add_(0, at, known.double().cpu())
            self._run(wirings, some)
            for wiring in wirings:
                y = self._outputs.of(wiring, some)
                loss = self._loss(y, wanted, wiring).where(known, 0.0).double().cpu()
                sums[number[wiring]].index_add_(1, at, loss)
        best = sums.sum(2).argmin(1)
        return sums[torch.arange(len(wirings)), best], rows

    def rights_known(self, wiring: Wiring) -> Mapping[int, tuple[int, ...]]:
        """What is known so far: text → how often the first step is right, a teacher of `teachers`."""
        return self._rights.get(wiring, {})

    def drafted_known(self, wiring: Wiring) -> Collection[int]:
        """The texts whose chains are known so far."""
        return self._drafted.get(wiring, {}).keys()

    def everyone(self) -> tuple[Wiring, ...]:
        """All wirings that have been scored at all, in that order."""
        known = dict.fromkeys((*self._rights, *self._drafted))
        return tuple(w for w in known if self._rights.get(w) or self._drafted.get(w))

    def positions(self, chosen: Sequence[int], teacher: str) -> Tensor:
        """How many first tokens are compared with the teacher's, [chosen] float64."""
        place = self.teachers.index(teacher)
        return torch.tensor([self.scored_of(i)[place] for i in chosen], dtype=torch.float64)

    def scored_of(self, number: int) -> tuple[int, ...]:
        """Scored rows of a text whose truth is known, for each of `teachers`."""
        if number not in self._scored:
            text = self.texts[number]
            known = [int((text.truths[n][text.rows + 2] >= 0).sum()) for n in self.teachers]
            self._scored[number] = tuple(known)
        return self._scored[number]

    def chains(self, wiring: Wiring, chosen: Sequence[int], teacher: str) -> list[dict[str, Count]]:
        """eagle3.metrics.count_chains of each chosen text, against the teacher's choices.

        But for step_accuracy/marginal: a chain is followed to its first miss only.
        """
        self.draft([wiring], chosen)
        drafted, counted = self._drafted[wiring], self._counted[wiring, teacher]
        t2d = self.checkpoint.vocabulary(self.wired.to_target(wiring.d2t))
        for i in chosen:
            if i in counted:
                continue
            text = self.texts[i]
            truth = text.truths[teacher]
            chains = drafted[i].long()
            judged = judge_chains(chains, text.rows, text.ids, text.mask, truth, t2d)
            counted[i] = count_chains(judged, marginal=False)
        return [counted[i] for i in chosen]

    def draft(self, wirings: Iterable[Wiring], chosen: Sequence[int]) -> None:
        """Draft the chains of these wirings that are not known yet, side by side."""
        for new, asked in self._lacking(wirings, chosen, self._drafted).items():
            parts = ((wiring, batch) for batch in self._batches(new) for wiring in asked)
            for (wiring, batch), made in spread(self._drafted_of, parts, self._cores):
                self._drafted[wiring].update(zip(batch.numbers, made, strict=True))

    # The first step.

    @torch.no_grad()
    def _score(self, wirings: Iterable[Wiring], chosen: Sequence[int]) -> None:
        """Fill in the counts of the first step that are not known yet."""
        lacking = self._lacking(wirings, chosen, self._rights)
        for i in chosen:
            self.scored_of(i)
        for new, asked in lacking.items():
            unlike = [w for w in asked if not self._picked(w, new)]
            kept = len(unlike) <= FEW and self._outputs.make_room(len(unlike), new)
            shares = self._shares(new, unlike)
            for share, made in spread(self._first_steps_and_picks, shares, self._cores):
                for y, alike, picked in made:
                    for same, picks in picked:
                        for wiring in same:
                            self._picks[by_picks(wiring)].update(picks)
                    if kept:
                        self._outputs.keep(share.batch, y, alike)
            self._count(asked, new)

    def _lacking(
        self,
        wirings: Iterable[Wiring],
        chosen: Sequence[int],
        known: Mapping[Wiring, Collection[int]],
    ) -> dict[tuple[int, ...], list[Wiring]]:
        """Texts on which nothing is known yet → the wirings that lack them. Raises BadInput."""
        lacking: dict[tuple[int, ...], list[Wiring]] = defaultdict(list)
        for wiring in dict.fromkeys(wirings):
            if new := tuple(i for i in chosen if i not in known.get(wiring, ())):
                self.check(wiring)
                lacking[new].append(wiring)
        return lacking

    def _run(self, wirings: Sequence[Wiring], chosen: Sequence[int]) -> None:
        """Fill in the outputs of the block that are not kept."""
        self._outputs.make_room(len(wirings), chosen)
        lacking: dict[tuple[int, ...], list[Wiring]] = defaultdict(list)
        for wiring in wirings:
            if new := self._outputs.lacking(wiring, chosen):
                lacking[new].append(wiring)
        for new, asked in lacking.items():
            shares = self._shares(new, asked)
            for share, made in spread(self._first_steps, shares, self._cores):
                for y, alike in made:
                    self._outputs.keep(share.batch, y, alike)

    def _picked(self, wiring: Wiring, chosen: Iterable[int]) -> bool:
        """Whether what the head picks on these texts is known, if from another reading of d2t."""
        known = self._picks[by_picks(wiring)]
        return all(i in known for i in chosen)

    def _count(self, wirings: Iterable[Wiring], chosen: Sequence[int]) -> None:
        """Count the picks of wirings that are right on these texts."""
        truths = [
            torch.stack([text.truths[t][text.rows + 2] for t in self.teachers])
            for text in (self.texts[i] for i in chosen)
        ]
        together = torch.cat(truths, 1)  # [teachers, N]
        ends = torch.tensor([truth.shape[1] for truth in truths], device=together.device).cumsum(0)
        for wiring in wirings:
            known, rights = self._picks[by_picks(wiring)], self._rights[wiring]
            ids = self.wired.to_target(wiring.d2t)[torch.cat([known[i] for i in chosen]).long()]
            # What leads outside is -1, and so is a choice that is not known.
            right = ((ids == together) & (together >= 0)).cumsum(1)
            up_to = F.pad(right, (1, 0))[:, F.pad(ends, (1, 0))]  # [teachers, texts + 1]
            rights.update(zip(chosen, map(tuple, up_to.diff(dim=1).T.tolist()), strict=True))

    def _batches(self, chosen: Sequence[int]) -> Iterator[Batch]:
        """The chosen texts, side by side."""
        return batches(self.texts, chosen, self.checkpoint.drafter.shape, self._at_once)

    def _drafted_of(self, part: tuple[Wiring, Batch]) -> list[Tensor]:
        """Each text's chains, [R, steps] int32."""
        return draft(self.wired, *part, self.steps)

    def _shares(self, chosen: Sequence[int], wirings: Sequence[Wiring]) -> Iterator[Share]:
        """The first steps of these wirings on these texts, in parts that are run at once."""
        # Whatever only shows behind the first step, or behind the block, is no part of the key.
        own = self.checkpoint.drafter.shape
        unseen = ("feedback_normed", "head_norm", "standing", "norm_before_fc", "fc_norm")
        usual = {name: getattr(own, name) for name in unseen}
        blocks: dict[Block | None, dict[Sum, list[Wiring]]] = defaultdict(lambda: defaultdict(list))
        for wiring in wirings:
            shape = self.wired.shape(wiring)
            total = (wiring.states(), shape.norm_before_fc, shape.fc_norm)
            block = None
            if wiring.decoder_layer is DecoderLayer.included:
                block = (replace(shape, **usual), wiring.embedding, wiring.token)
            blocks[block][total].append(wiring)
        for batch in self._batches(chosen) if wirings else ():
            side_by_side = max(1, self._at_once // (len(batch.texts) * batch.length))
            for block, sums in blocks.items():
                totals = list(sums.items())
                for at in range(0, len(totals), side_by_side):
                    yield Share(batch, block, totals[at : at + side_by_side])

    @torch.no_grad()
    def _first_steps(self, share: Share) -> list[tuple[Tensor, Sequence[Wiring]]]:
        """The block's outputs y [N, H_d], each with the wirings that give this one."""
        hidden = self._hidden(share.batch, share.block, [total for total, _ in share.sums])
        return [(y, alike) for y, (_, alike) in zip(hidden, share.sums, strict=True)]

    def _first_steps_and_picks(
        self, share: Share
    ) -> list[tuple[Tensor, Sequence[Wiring], list[Picked]]]:
        """The same with what the head picks there."""
        return [
            (y, alike, self._picks_of(share.batch, y, alike))
            for y, alike in self._first_steps(share)
        ]

    def _hidden(self, batch: Batch, block: Block | None, totals: Sequence[Sum]) -> Tensor:
        """The block's output y at the scored rows for several sums, [sums, N, H_d]."""
        fused = []
        for states, whole, chunks in totals:
            own = self.checkpoint.drafter.shape
            shape = replace(own, norm_before_fc=whole, fc_norm=chunks)
            fused.append(batch.fuse(self.wired.drafter(shape), states))
        if block is None:
            return torch.stack([g.flatten(0, 1)[batch.flat] for g in fused])
        shape, embedding, token = block
        g = torch.cat(fused)
        table = self.wired.embedding(embedding)
        embedded = table[batch.tokens(token)].float().repeat(len(totals), 1, 1)
        rows = torch.arange(batch.length, device=g.device)
        asked = batch.asked.repeat(len(totals), 1)
        y = self.wired.drafter(shape).step(embedded, g, rows, [], asked=asked)
        return y.view(len(totals), *batch.asked.shape, -1)[:, batch.is_row]

    @torch.no_grad()
    def _picks_of(self, batch: Batch, y: Tensor, wirings: Sequence[Wiring]) -> list[Picked]:
        """What the head picks for wirings whose first steps give the same y [N, H_d]."""
        heads: dict[tuple[bool, Head, D2T | None], list[Wiring]] = defaultdict(list)
        for wiring in wirings:
            reading = wiring.d2t if wiring.head is Head.target else None
            heads[self.wired.shape(wiring).head_norm, wiring.head, reading].append(wiring)
        counts = [len(text.rows) for text in batch.texts]
        picked: list[Picked] = []
        for (normed, _, _), alike in heads.items():
            picks = self.wired.picks(y, alike[0], normed).int().split(counts)
            picked.append((alike, dict(zip(batch.numbers, picks, strict=True))))
        return picked

    def _loss(self, y: Tensor, wanted: Tensor, wiring: Wiring) -> Tensor:
        """Cross-entropy of every row of y [N, H_d] with its draft id, [TEMPERATURES, N]; of no meaning
        where that is -1.
        """
        head, normed = self.wired.head(wiring), self.wired.shape(wiring).head_norm
        losses = []
        for part, ids in zip(y.split(ROWS_AT_ONCE), wanted.split(ROWS_AT_ONCE), strict=True):
            seen = self.checkpoint.drafter.norm(part) if normed else part
            logits, ids = F.linear(seen, head), ids.clamp(min=0)
            losses.append(
                torch.stack(
                    [F.cross_entropy(logits / t, ids, reduction="none") for t in TEMPERATURES]
                )
            )
        return torch.cat(losses, 1)


def by_picks(wiring: Wiring) -> Wiring:
    """One of the wirings whose head picks the same draft ids: with a head of its own, whatever d2t."""
    return wiring if wiring.head is Head.target else replace(wiring, d2t=D2T.offset)

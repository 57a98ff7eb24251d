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
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import check_fit, embedding_of, head_of, switches_of, target_rope
from eagle3.errors import BadInput
from eagle3.metrics import Count, count_chains, judge_chains
from eagle3.model import Cache, Drafter, DrafterShape
from eagle3.samples import asked_in_vain
from eagle3.search.batch import Batch
from eagle3.search.outputs import FEW, Outputs
from eagle3.search.spread import SMALL, spread
from eagle3.search.texts import Text, known_states
from eagle3.target import TargetParts
from eagle3.wiring import D2T, DecoderLayer, Embedding, Head, Token, Wiring, needs_target

# Positions that go through the block together. More leave the processor's caches, fewer leave small
# drafters waiting for the next operation to begin.
AT_ONCE = {"cpu": 1024, "cuda": 16384}
ROWS_AT_ONCE = 512  # bounds logits to [512, V_d]
TEMPERATURES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)  # that losses are tried at
SCORES_AT_ONCE = 1 << 25  # numbers in the deeper steps' attention scores
KEPT_BYTES = 1 << 30  # of rows of the target's head
WASTE = 1.2  # rows that are run, padding included, over those that are asked for

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
        self.known = known_states(texts)
        self.teachers = sorted(set.intersection(*(set(text.truths) for text in texts)))
        self._rights: dict[Wiring, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._picks: dict[Wiring, dict[int, Tensor]] = defaultdict(dict)
        self._outputs = Outputs(texts, checkpoint.drafter.shape.hidden)
        self._drafted: dict[Wiring, dict[int, Tensor]] = defaultdict(dict)
        self._counted: dict[tuple[Wiring, str], dict[int, dict[str, Count]]] = defaultdict(dict)
        self._scored: dict[int, tuple[int, ...]] = {}
        self._shapes: dict[Wiring, DrafterShape] = {}
        self._drafters: dict[DrafterShape, Drafter] = {}
        self._to_target: dict[D2T, Tensor] = {}
        self._heads: dict[D2T, Tensor] = {}
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
        self.shape(wiring)
        embedding_of(self.checkpoint, self.target, wiring.embedding)
        if wiring.head is Head.target or not shape.own_head:
            self.head(wiring)

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
        ids = self.to_target(reading)
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
        t2d = self.checkpoint.vocabulary(self.to_target(wiring.d2t))
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
        lacking: dict[tuple[int, ...], list[Wiring]] = defaultdict(list)
        for wiring in dict.fromkeys(wirings):
            drafted = self._drafted[wiring]
            if new := tuple(i for i in chosen if i not in drafted):
                self.check(wiring)
                lacking[new].append(wiring)
        for new, asked in lacking.items():
            parts = ((wiring, batch) for batch in self._batches(new) for wiring in asked)
            for (wiring, batch), made in spread(self._draft, parts, self._cores):
                self._drafted[wiring].update(zip(batch.numbers, made, strict=True))

    # What a wiring stands for.

    def shape(self, wiring: Wiring) -> DrafterShape:
        """The drafter's shape behind the wiring's switches."""
        if wiring not in self._shapes:
            own = self.checkpoint.drafter.shape
            theirs = target_rope(self.target) if needs_target(wiring.rope) else None
            self._shapes[wiring] = replace(own, **switches_of(wiring, own, theirs))
        return self._shapes[wiring]

    def drafter(self, shape: DrafterShape) -> Drafter:
        """The same weights in that shape."""
        if shape == self.checkpoint.drafter.shape:
            return self.checkpoint.drafter
        if shape not in self._drafters:
            own = vars(self.checkpoint.drafter.shape)
            switches = {name: value for name, value in vars(shape).items() if value != own[name]}
            self._drafters[shape] = self.checkpoint.drafter.rewired(**switches)
        return self._drafters[shape]

    def to_target(self, d2t: D2T) -> Tensor:
        """The target id of every draft id [V_d]; -1, which is never right, outside the vocabulary.

        A table of absolute ids that is read as offsets leads outside, and is a start like any other.
        """
        if d2t not in self._to_target:
            table, vocab = self.checkpoint.drafter.d2t, self.target.vocab
            ids = torch.arange(len(table), device=table.device)
            if d2t is not D2T.identity:
                ids = table + ids if d2t is D2T.offset else table.clone()
            self._to_target[d2t] = ids.where((ids >= 0) & (ids < vocab), -1)
        return self._to_target[d2t]

    def outside(self, d2t: D2T) -> int:
        """How many draft ids lead outside the target's vocabulary."""
        return int((self.to_target(d2t) < 0).sum())

    @cached_property
    def named_by_t2d(self) -> frozenset[D2T]:
        """The readings of d2t that name the tokens of the file's own t2d; none, where it has none."""
        if not self.checkpoint.own_t2d:
            return frozenset()
        wanted = self.checkpoint.drafter.t2d.nonzero().flatten()
        return frozenset(d for d in D2T if torch.equal(self.to_target(d).sort().values, wanted))

    def head(self, wiring: Wiring) -> Tensor:
        """The head's rows [V_d, H_d]."""
        drafter = self.checkpoint.drafter
        if wiring.head is Head.own:
            head_of(self.checkpoint, self.target, Head.own, drafter.d2t)  # says where there is none
            return drafter.lm_head.weight
        made = self._heads.get(wiring.d2t)
        if made is None:
            rows = self.to_target(wiring.d2t).clamp(min=0)
            size = len(rows) * self.target.hidden * 4
            if (len(self._heads) + 1) * size > KEPT_BYTES:
                self._heads.clear()
            made = head_of(self.checkpoint, self.target, Head.target, rows)
            assert made is not None
            self._heads[wiring.d2t] = made
        return made

    # The first step.

    @torch.no_grad()
    def _score(self, wirings: Iterable[Wiring], chosen: Sequence[int]) -> None:
        """Fill in the counts of the first step that are not known yet."""
        lacking: dict[tuple[int, ...], list[Wiring]] = defaultdict(list)
        for wiring in dict.fromkeys(wirings):
            known = self._rights[wiring]
            if new := tuple(i for i in chosen if i not in known):
                self.check(wiring)
                lacking[new].append(wiring)
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
        counts = [truth.shape[1] for truth in truths]
        for wiring in wirings:
            known, rights = self._picks[by_picks(wiring)], self._rights[wiring]
            ids = self.to_target(wiring.d2t)[torch.cat([known[i] for i in chosen]).long()]
            # What leads outside is -1, and so is a choice that is not known.
            right = ((ids == together) & (together >= 0)).split(counts, 1)
            for i, of_text in zip(chosen, right, strict=True):
                rights[i] = tuple(of_text.sum(1).tolist())

    def _batches(self, chosen: Sequence[int]) -> Iterator[Batch]:
        """The chosen texts, as many that are about equally long as go through the block together."""
        shape = self.checkpoint.drafter.shape
        group: list[int] = []
        for i in sorted(chosen, key=lambda i: int(self.texts[i].rows[-1])):
            more = [*group, i]
            lengths = [int(self.texts[n].rows[-1]) + 1 for n in more]
            run = len(more) * max(lengths)
            if group and (run > self._at_once or run > WASTE * sum(lengths)):
                yield Batch(group, [self.texts[n] for n in group], shape)
                more = [i]
            group = more
        yield Batch(group, [self.texts[n] for n in group], shape)

    def _shares(self, chosen: Sequence[int], wirings: Sequence[Wiring]) -> Iterator[Share]:
        """The first steps of these wirings on these texts, in parts that are run at once."""
        # Whatever only shows behind the first step, or behind the block, is no part of the key.
        own = self.checkpoint.drafter.shape
        unseen = ("feedback_normed", "head_norm", "standing", "norm_before_fc", "fc_norm")
        usual = {name: getattr(own, name) for name in unseen}
        blocks: dict[Block | None, dict[Sum, list[Wiring]]] = defaultdict(lambda: defaultdict(list))
        for wiring in wirings:
            shape = self.shape(wiring)
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
            fused.append(batch.fuse(self.drafter(shape), states))
        if block is None:
            return torch.stack([g.flatten(0, 1)[batch.flat] for g in fused])
        shape, embedding, token = block
        g = torch.cat(fused)
        table = embedding_of(self.checkpoint, self.target, embedding)
        embedded = table[batch.tokens(token)].float().repeat(len(totals), 1, 1)
        rows = torch.arange(batch.length, device=g.device)
        asked = batch.asked.repeat(len(totals), 1)
        y = self.drafter(shape).step(embedded, g, rows, [], asked=asked)
        return y.view(len(totals), *batch.asked.shape, -1)[:, batch.is_row]

    @torch.no_grad()
    def _picks_of(self, batch: Batch, y: Tensor, wirings: Sequence[Wiring]) -> list[Picked]:
        """What the head picks for wirings whose first steps give the same y [N, H_d]."""
        heads: dict[tuple[bool, Head, D2T | None], list[Wiring]] = defaultdict(list)
        for wiring in wirings:
            reading = wiring.d2t if wiring.head is Head.target else None
            heads[self.shape(wiring).head_norm, wiring.head, reading].append(wiring)
        counts = [len(text.rows) for text in batch.texts]
        picked: list[Picked] = []
        for (normed, _, _), alike in heads.items():
            picks = self.picks(y, alike[0], normed).int().split(counts)
            picked.append((alike, dict(zip(batch.numbers, picks, strict=True))))
        return picked

    def picks(self, y: Tensor, wiring: Wiring, normed: bool) -> Tensor:
        """The draft id that the head chooses for each row of y [N, H_d]."""
        head = self.head(wiring)
        chosen = []
        for part in y.split(ROWS_AT_ONCE):
            seen = self.checkpoint.drafter.norm(part) if normed else part
            chosen.append(F.linear(seen, head).argmax(-1))
        return torch.cat(chosen)

    def _loss(self, y: Tensor, wanted: Tensor, wiring: Wiring) -> Tensor:
        """Cross-entropy of every row of y [N, H_d] with its draft id, [TEMPERATURES, N]; of no meaning
        where that is -1.
        """
        head, normed = self.head(wiring), self.shape(wiring).head_norm
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

    # Whole chains: eagle3.chain.draft_chains for texts side by side.

    @torch.no_grad()
    def _draft(self, part: tuple[Wiring, Batch]) -> list[Tensor]:
        """Each text's chains, [R, steps] int32."""
        wiring, batch = part
        shape = self.shape(wiring)
        drafter = self.drafter(shape)
        g = batch.fuse(drafter, wiring.states())
        if wiring.decoder_layer is DecoderLayer.skipped:
            rows = g.flatten(0, 1)[batch.flat]
            first = self.to_target(wiring.d2t)[self.picks(rows, wiring, shape.head_norm)].int()
            whole = first[:, None].expand(-1, self.steps)
            return list(whole.split([len(text.rows) for text in batch.texts]))
        table = embedding_of(self.checkpoint, self.target, wiring.embedding)
        native: Cache = []
        prefix = torch.arange(batch.length, device=g.device)
        embedded = table[batch.tokens(wiring.token)]
        y = drafter.step(embedded, g, prefix, native, asked=batch.asked)
        most = max(1, SCORES_AT_ONCE // (len(batch.texts) * shape.heads * batch.length))
        chains = [
            self._follow(wiring, batch, native, *part)
            for part in zip(
                *(x.split(min(most, ROWS_AT_ONCE), 1) for x in (y, batch.asked, batch.is_row)),
                strict=True,
            )
        ]
        whole = torch.cat(chains, 1)[batch.is_row]
        return list(whole.split([len(text.rows) for text in batch.texts]))

    def _follow(
        self,
        wiring: Wiring,
        batch: Batch,
        native: Cache,
        hidden: Tensor,
        rows: Tensor,
        alive: Tensor,
    ) -> Tensor:
        """Chains behind rows [B, R] whose first step gives hidden [B, R, H_d], [B, R, steps] int32.

        Each as far as it drafts the text: behind anything else no truth is known, and nothing counts.
        What is not drafted is -1. `alive` [B, R] are the rows that are asked for.
        """
        shape, to_target = self.shape(wiring), self.to_target(wiring.d2t)
        drafter = self.drafter(shape)
        table = embedding_of(self.checkpoint, self.target, wiring.embedding)
        ids = batch.ids_until(batch.length + 1 + self.steps)
        texts = torch.arange(len(rows), device=rows.device)[:, None]
        chains = torch.full((*rows.shape, self.steps), -1, dtype=torch.int32, device=rows.device)
        places = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)
        cache = list(native)
        for step in range(self.steps):
            tokens = self._tokens(hidden, wiring, shape, to_target)
            text, at = alive.nonzero(as_tuple=True)
            chains[text, places[text, at], step] = tokens[text, at].int()
            alive = alive & (tokens == ids.gather(1, rows + 2 + step))
            most = int(alive.sum(1).max())
            if not most or step + 1 == self.steps:
                break
            # Those that go on stand in front; a text with fewer of them is padded with others.
            kept = alive.int().argsort(stable=True, dim=1, descending=True)[:, :most]
            alive, rows, places, tokens = (x.gather(1, kept) for x in (alive, rows, places, tokens))
            hidden = hidden[texts, kept]
            along = kept[:, None, :, None]
            cache[1:] = [
                [(k.take_along_dim(along, 2), v.take_along_dim(along, 2)) for k, v in layers]
                for layers in cache[1:]
            ]
            fed = table[tokens.clamp(min=0)]
            hidden = drafter.step(fed, drafter.feedback(hidden), rows, cache)
        return chains

    def _tokens(
        self, hidden: Tensor, wiring: Wiring, shape: DrafterShape, to_target: Tensor
    ) -> Tensor:
        """What the head makes of hidden [B, R, H_d], as target ids [B, R]."""
        picks = self.picks(hidden.flatten(0, 1), wiring, shape.head_norm)
        return to_target[picks].view(hidden.shape[:2])


def by_picks(wiring: Wiring) -> Wiring:
    """One of the wirings whose head picks the same draft ids: with a head of its own, whatever d2t."""
    return wiring if wiring.head is Head.target else replace(wiring, d2t=D2T.offset)

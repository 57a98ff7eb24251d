"""What a diagnosis measures beside the search: costs, a ladder of fixes, whether every part works."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.diagnosis.causes import kinds_between, no_cost, with_part_of
from eagle3.diagnosis.damage import USELESS
from eagle3.diagnosis.evidence import Health, Mended, Part, Scored, chunk_name
from eagle3.diagnosis.incomplete import blank
from eagle3.errors import BadInput
from eagle3.metrics import Count, Difference, Rate, Truth, rate
from eagle3.model import Drafter
from eagle3.search.bounds import bounded, loss_bounds, rate_difference, tail_of
from eagle3.search.score import Scorer
from eagle3.search.texts import Text
from eagle3.target import TargetParts
from eagle3.wiring import Feedback, HeadInput, Wiring

# Without which little else can be known: a part of which a little work is as good as none.
STATES_PART = "what the target's states feed in"
FEW_TEXTS = 16  # that are asked first whether a part does any work
# Spread of a norm's weights, by their size, up to which they are as they began.
UNTRAINED = 0.02


def scored(scorer: Scorer, wiring: Wiring, teacher: str, seed: int) -> Scored:
    """One wiring on all texts against one teacher's choices. Raises BadInput where it cannot be run."""
    counts = scorer.chains(wiring, range(len(scorer.texts)), teacher)
    return Scored(wiring=wiring, counts=counts, truth=teacher, steps=scorer.steps, seed=seed)


def lacking(texts: Sequence[Text], wiring: Wiring) -> str | None:
    """Why a wiring cannot be scored on these texts; None: all its states are at hand."""
    held = set.intersection(*(set(text.states) for text in texts))
    missing = sorted(set(wiring.states()) - held)
    if not missing:
        return None
    named = ", ".join(map(str, missing))
    return (
        f"state {named} is not in the data, and the target's layers were not run as far as that here; "
        f"data that stores state {named} too would tell (job=capture_states)"
    )


def alone(
    scorer: Scorer, trained: Wiring, wrong: Wiring, truth: str, seed: int
) -> tuple[dict[str, Scored], dict[str, str]]:
    """Each difference put into the trained wiring alone, and why some cannot be scored.

    `wrong` is evidence.held_against's, also of an engine that does not start.
    """
    found: dict[str, Scored] = {}
    why: dict[str, str] = {}
    for kind in kinds_between(trained, wrong):
        so = with_part_of(trained, wrong, kind)
        reason = lacking(scorer.texts, so)
        if reason is None:
            try:
                found[kind] = scored(scorer, so, truth, seed)
            except BadInput as error:
                reason = str(error)
        if reason is not None:
            why[kind] = reason
    return found, why


def loss_alone(
    scorer: Scorer, trained: Wiring, alone: Mapping[str, Scored], teacher: str, *, comparisons: int
) -> dict[str, Difference]:
    """How much cross-entropy each difference alone adds to the first step, paired and corrected.

    Readings of d2t are left out: each is about other tokens.
    """
    others = {kind: so.wiring for kind, so in alone.items() if so.wiring.d2t == trained.d2t}
    if not others:
        return {}
    chosen = range(len(scorer.texts))
    sums, rows = scorer.losses(list(dict.fromkeys((trained, *others.values()))), chosen, teacher)
    places = {w: i for i, w in enumerate(dict.fromkeys((trained, *others.values())))}
    value, reach = loss_bounds(sums[0], sums, rows, tail_of(comparisons))
    return {
        kind: bounded(float(value[places[w]]), float(reach[places[w]]), math.inf)
        for kind, w in others.items()
    }


def uncounted(trained: Scored, found: Mapping[str, Scored]) -> dict[str, str]:
    """Why some differences that were scored have no cost in accept length."""
    reasons = {kind: no_cost(trained, so) for kind, so in found.items()}
    return {kind: why for kind, why in reasons.items() if why is not None}


def bigram_accuracy(texts: Sequence[Text], truth: str) -> float:
    """How often a table of which token follows which, made of the other texts, names the truth."""
    table: dict[int, Counter[int]] = defaultdict(Counter)
    pairs = [list(zip(t.ids.tolist(), t.ids[1:].tolist(), strict=False)) for t in texts]
    for a, b in chain.from_iterable(pairs):
        table[a][b] += 1
    right = total = 0
    for text, own in zip(texts, pairs, strict=True):
        mine: dict[int, Counter[int]] = defaultdict(Counter)
        for a, b in own:
            mine[a][b] += 1
        wanted, ids = text.truths[truth].tolist(), text.ids.tolist()
        for row in text.rows.tolist():
            if wanted[row + 2] < 0:
                continue
            a = ids[row + 1]
            others = table[a] - mine[a]
            best = others.most_common(1)
            right += bool(best) and best[0][0] == wanted[row + 2]
            total += 1
    return right / total if total else 0.0


def health(
    scorer: Scorer,
    checkpoint: DrafterCheckpoint,
    wiring: Wiring,
    teacher: str,
    *,
    remake: Callable[[DrafterCheckpoint], Scorer],
    seed: int,
    comparisons: int = 20,
) -> Health:
    """Whether every part of the drafter does some work at the first step, wired so."""
    chosen = range(len(scorer.texts))
    few = chosen[:: -(-len(chosen) // FEW_TEXTS)]
    whole = scorer.first([wiring], chosen, [teacher])[wiring][teacher]
    sums, rows = scorer.losses([wiring], chosen, teacher)
    parts = []
    for name, single, maimed in without_parts(checkpoint):
        other = remake(maimed)
        counts = other.first([wiring], few, [teacher])[wiring][teacher]
        if any(count.denominator for count in counts):
            made = part(name, single, [whole[i] for i in few], counts, seed, 2 * comparisons)
            if clearly_works(made):
                parts.append(made)
                continue
        counts = other.first([wiring], chosen, [teacher])[wiring][teacher]
        made = part(name, single, whole, counts, seed, comparisons)
        doubtful = made.worth.low <= 0 if single else made.share < USELESS
        if doubtful and name != STATES_PART:
            without, _ = other.losses([wiring], chosen, teacher)
            value, reach = loss_bounds(sums[0], without, rows, tail_of(comparisons))
            loss = bounded(float(value[0]), float(reach[0]), math.inf)
            made = replace(made, loss=loss)
        parts.append(made)
    return Health(
        bigram=bigram_accuracy(scorer.texts, teacher),
        parts=tuple(parts),
        left_out=left_out(checkpoint, scorer.target, wiring),
        blank=blank(checkpoint),
    )


def part(
    name: str,
    single: bool,
    whole: Sequence[Count],
    counts: Sequence[Count],
    seed: int,
    comparisons: int,
) -> Part:
    """A part with what is lost without it."""
    with_it, without = (plain_rate(c, seed) for c in (whole, counts))
    worth = rate_difference(whole, counts, comparisons=comparisons)
    share = worth.value / with_it.value if with_it.value else 0.0
    return Part(name=name, single=single, without=without, worth=worth, share=share)


def left_out(checkpoint: DrafterCheckpoint, target: TargetParts, wiring: Wiring) -> str | None:
    """That the wiring never runs the last norm, although its weights were trained.

    No gradient reaches a norm that is not run, so it stays as it began: all ones, or the target's.
    """
    if wiring.head_input is not HeadInput.raw or wiring.feedback is Feedback.normed:
        return None
    weight = checkpoint.drafter.norm.weight.float()
    if float(weight.std() / weight.abs().mean()) <= UNTRAINED:
        return None
    try:
        begun = target.final_norm().factor.float().to(weight.device)
    except BadInput:
        begun = None
    if (
        begun is not None
        and begun.shape == weight.shape
        and torch.allclose(weight, begun, rtol=0.02)
    ):
        return None
    return (
        f"the last norm harms although it was trained (its weights lie between {weight.min():.2f} and "
        f"{weight.max():.2f}): the drafter is better without it, so they are not what was trained"
    )


def clearly_works(part: Part) -> bool:
    """Whether few texts settle that the part does some work, so that no more have to tell."""
    if part.single:
        return part.worth.low > 0
    with_it = part.without.value + part.worth.value
    return part.worth.low >= USELESS * with_it > 0


def plain_rate(counts: Sequence[Count], seed: int) -> Rate:
    """An accuracy over texts. Raises BadInput without positions."""
    found = rate(counts, Truth.target_argmax, limits=(0.0, 1.0), seed=seed)
    if found is None:
        raise BadInput("no position of these texts can be scored")
    return found


def without_parts(checkpoint: DrafterCheckpoint) -> Iterator[tuple[str, bool, DrafterCheckpoint]]:
    """The drafter without the target's states, without all its attention, without all its MLPs, without
    each layer's or state's.

    Each with its name, and whether it is one of several of a sort.
    """
    yield STATES_PART, False, zeroed(checkpoint, ["fc.weight"])
    sorts = {"attention": "self_attn.o_proj", "MLP": "mlp.down_proj"}
    layers = checkpoint.form.num_layers.value
    for sort, place in sorts.items():
        yield f"the {sort}", False, zeroed(checkpoint, [place])
    for i in range(layers if layers > 1 else 0):
        prefix = "midlayer" if i == 0 else f"layers.{i}"
        for sort, place in sorts.items():
            yield f"the {sort} of layer {i}", True, zeroed(checkpoint, [f"{prefix}.{place}"])
    for j in range(checkpoint.form.num_aux.value):
        yield chunk_name(j), True, without_chunk(checkpoint, j)


def zeroed(checkpoint: DrafterCheckpoint, places: Sequence[str]) -> DrafterCheckpoint:
    """The checkpoint with the named projections, weights and biases, at zero; it is left as it is."""
    drafter = checkpoint.drafter
    held = {
        name: torch.zeros_like(tensor) if any(place in name for place in places) else tensor
        for name, tensor in drafter.state_dict().items()
    }
    return with_tensors(checkpoint, held)


def without_chunk(checkpoint: DrafterCheckpoint, place: int) -> DrafterCheckpoint:
    """The checkpoint whose fc makes nothing of one of the states."""
    held = checkpoint.drafter.state_dict()
    width = checkpoint.form.target_hidden.value
    weight = held["fc.weight"].clone()
    weight[:, place * width : (place + 1) * width] = 0
    return with_tensors(checkpoint, {**held, "fc.weight": weight})


def with_tensors(
    checkpoint: DrafterCheckpoint, tensors: Mapping[str, torch.Tensor]
) -> DrafterCheckpoint:
    """The checkpoint with other tensors of the same shapes; those that are the same are shared."""
    with torch.device("meta"):
        other = Drafter(checkpoint.drafter.shape)
    other.load_state_dict(dict(tensors), assign=True)
    return replace(checkpoint, drafter=other.eval().requires_grad_(False))


def mended_table(checkpoint: DrafterCheckpoint) -> DrafterCheckpoint | None:
    """The checkpoint with d2t made of t2d; None where t2d names as many tokens and says the same."""
    drafter = checkpoint.drafter
    ids = drafter.t2d.nonzero().flatten()
    if len(ids) != len(drafter.d2t):
        return None
    places = torch.arange(len(ids), device=ids.device)
    offsets = ids - places
    if torch.equal(offsets, drafter.d2t) or torch.equal(ids, drafter.d2t):
        return None  # absolute ids are a reading of the search
    return with_tensors(checkpoint, {**drafter.state_dict(), "d2t": offsets})


def is_wrong_table(checkpoint: DrafterCheckpoint) -> bool:
    """Whether no reading of d2t names the tokens of t2d, each once, in whatever order."""
    drafter = checkpoint.drafter
    named = drafter.t2d.nonzero().flatten()
    absolute = drafter.d2t.long()
    offset = absolute + torch.arange(len(absolute), device=absolute.device)
    return not any(torch.equal(ids.sort().values, named) for ids in (offset, absolute))


def mended(as_it_is: Scored) -> Mended:
    """The table as a cause."""
    return Mended(
        kind="d2t",
        trained="d2t as t2d names the tokens, in ascending order",
        served="a d2t that names other tokens",
        as_it_is=as_it_is,
    )

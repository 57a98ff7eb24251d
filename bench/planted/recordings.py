"""Faults of who records a target's states: hooks, batches, chunks, shards; and two other teachers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bench.planted.draft import Draft
from bench.planted.dumps import Stored
from bench.planted.handovers import raw_slots
from bench.planted.kinds import ALONE, HELD_OUT, Kind, Plant, WhyNot, only
from bench.planted.lab import live_target
from bench.planted.settings import states_matter
from bench.planted.stored import of_others, stored_as
from eagle3.lab.target import LiveTarget

CHUNK = 6  # tokens of a prefill that sees no others

Again = Callable[[LiveTarget, Stored, tuple[int, ...]], dict[int, Tensor]]


def edited(edit: Callable[[Stored], list[Tensor]]) -> Plant:
    """Aux slots as `edit` makes them; the last slot stays."""

    def change(stored: Stored) -> None:
        stored.slots = [*edit(stored), stored.slots[-1]]

    return lambda draft, _: draft.edit_dump(change)


def run_again(states: Again) -> Plant:
    """All slots of another run of the target over the same texts."""

    def plant(draft: Draft, _: random.Random) -> None:
        live, slots = live_target(draft.dump.texts), draft.dump.slots
        normed = draft.dump.layout == "specforge"

        @torch.no_grad()
        def change(stored: Stored) -> None:
            kept = states(live, stored, slots)
            *aux, last = (kept[k] for k in slots)
            stored.slots = [*aux, live.norm(last) if normed else last]

        draft.edit_dump(change)

    return plant


def in_chunks(live: LiveTarget, stored: Stored, slots: tuple[int, ...]) -> dict[int, Tensor]:
    """States of a prefill in chunks, each without what came before it."""
    parts = [live(ids[None], slots)[1] for ids in stored.text.ids.split(CHUNK)]
    return {k: torch.cat([part[k][0] for part in parts]) for k in slots}


def behind_layernorm(draft: Draft, _: random.Random) -> None:
    """Each aux state behind the norm in front of the layer's attention, where the hook sat."""
    live, aux = live_target(draft.dump.texts), draft.dump.slots[:-1]
    places = live.shape.live_layers

    def change(stored: Stored) -> None:
        normed = [
            live.layers[places.index(k)].input_layernorm(h) if k in places else h  # type: ignore[operator]
            for k, h in zip(aux, stored.slots[:-1], strict=True)
        ]
        stored.slots = [*normed, stored.slots[-1]]

    draft.edit_dump(change)


def one_rank(stored: Stored) -> list[Tensor]:
    """The columns of one of two ranks; the other's were never gathered."""
    width = stored.slots[0].shape[1] // 2
    return [torch.cat([h[:, :width], torch.zeros_like(h[:, width:])], 1) for h in stored.slots[:-1]]


def ranks_swapped(stored: Stored) -> list[Tensor]:
    """The columns of two ranks, gathered in the other order."""
    return [h.roll(h.shape[1] // 2, 1) for h in stored.slots[:-1]]


def later(h: Tensor, rows: int) -> Tensor:
    """States so many rows further on; in front the first one stands again, as of padding."""
    return torch.cat([h[:1].expand(rows, -1), h[:-rows]])


def averaged_over(stored: Stored) -> list[Tensor]:
    """Two neighbouring positions in the mean, as a pool over a page of two keeps them."""
    aux = stored.slots[:-1]
    return [(h + torch.cat([h[:1], h[:-1]])) / 2 for h in aux]


def left_padded(stored: Stored) -> None:
    """Rows of a batch that was padded on the left, by as much as the text is short."""
    padding = 1 + len(stored.ids) % 6
    stored.slots = [later(h, padding) for h in stored.slots]


def decoded_late(stored: Stored) -> None:
    """The prompt's rows in place, the answer's one late: the prefill's last row stands there twice."""
    start = int(stored.mask.argmax())
    stored.slots = [torch.cat([h[:start], h[start - 1 : -1]]) for h in stored.slots]


def shifted_ids(stored: Stored) -> None:
    """Ids that a trainer shifted already, a zero behind them."""
    stored.ids = torch.cat([stored.ids[1:], torch.zeros_like(stored.ids[:1])])


def aux_behind(stored: Stored) -> None:
    """Row t of the aux slots is position t - 1's; the last slot's is its own."""
    *aux, last = stored.slots
    stored.slots = [*(later(h, 1) for h in aux), last]


def rows(change: Callable[[Stored], None]) -> Plant:
    """A change of every text."""
    return lambda draft, _: draft.edit_dump(change)


def ids_ahead(draft: Draft, _: random.Random) -> None:
    """Ids of the next position. The target's choices are left out: they would be another text's."""
    draft.edit_dump(shifted_ids)
    draft.dump = replace(draft.dump, argmax=False)


def descending(draft: Draft, _: random.Random) -> None:
    """The deepest slot in front."""
    *aux, last = draft.dump.slots
    stored_as(draft, (*reversed(aux), last))


def one_lower(draft: Draft, _: random.Random) -> None:
    """Slots captured one layer early, where there is one."""
    *aux, last = draft.dump.slots
    stored_as(draft, (*(max(k - 1, 0) for k in aux), last))


def beside(target: str) -> Plant:
    """Beside another of the lab's targets and its texts."""

    def plant(draft: Draft, _: random.Random) -> None:
        raw_slots(draft)
        draft.target = target
        draft.dump = replace(draft.dump, texts=target)

    return plant


def of_second(draft: Draft) -> str | None:
    """Why another target is the one for it."""
    return only((draft.drafter == "second", "its teacher was the whole target"))


def of_raw_states(draft: Draft) -> str | None:
    """Why states behind a norm are as good."""
    return only((draft.drafter == "first", "norms in front of fc take their size out again"))


def context_matters(draft: Draft) -> str | None:
    """Why states without what came before are as good."""
    return only((draft.drafter != "second", "what came long before matters little to it"))


def of_third(draft: Draft) -> str | None:
    """Why states one lower are as good."""
    return only((draft.drafter == "third", "states one lower are nearly as good for it"))


SLOTS = ("ids", "slots", "fc")


def capture(name: str, how: str, plant: Plant, why_not: WhyNot = lambda _: None) -> Kind:
    """A kind of wrong slots."""
    return Kind(
        name=f"slots/{name}",
        touches=SLOTS,
        accepted=("slots",),
        how=how,
        use=HELD_OUT,
        shows=ALONE,
        plant=plant,
        why_not=why_not,
    )


def alignment(name: str, how: str, plant: Plant) -> Kind:
    """A kind of rows that do not belong together."""
    return Kind(
        name=f"token/{name}",
        touches=("slots", "ids"),
        accepted=("token", "slots"),
        how=how,
        use=HELD_OUT,
        shows=ALONE,
        plant=plant,
    )


KINDS: tuple[Kind, ...] = (
    capture(
        "chunked",
        f"all slots are of chunks of {CHUNK} tokens run alone",
        run_again(in_chunks),
        context_matters,
    ),
    capture(
        "behind_layernorm",
        "aux slots hold their states behind the next layer's input_layernorm",
        behind_layernorm,
        of_raw_states,
    ),
    capture("one_rank", "the second half of each aux state's columns is zero", edited(one_rank)),
    capture(
        "ranks_swapped",
        "the halves of each aux state's columns are exchanged",
        edited(ranks_swapped),
    ),
    capture(
        "averaged",
        "each aux row is the mean of its own and the one before",
        edited(averaged_over),
        states_matter,
    ),
    capture(
        "descending", "aux slots hold the deepest state first, not as capture.json says", descending
    ),
    capture(
        "one_lower",
        "each aux slot holds the state one lower than capture.json says",
        one_lower,
        of_third,
    ),
    alignment(
        "left_padded",
        "the slots' rows are later by the padding on the left of a batch, which differs by text",
        rows(left_padded),
    ),
    alignment(
        "decoded_late",
        "the slots' rows are in place over the prompt and one late over the answer",
        rows(decoded_late),
    ),
    alignment("ids_ahead", "input_ids were shifted by one already, the slots were not", ids_ahead),
    alignment(
        "aux_behind",
        "row t of the aux slots holds the state of position t - 1; the last slot is in its place",
        rows(aux_behind),
    ),
    Kind(
        name="teacher/one_more",
        touches=("slots", "target"),
        accepted=("teacher",),
        how="the target has one more layer behind the state whose words were learnt",
        use=HELD_OUT,
        plant=beside("one_more"),
        why_not=of_others,
    ),
    Kind(
        name="teacher/weights_left_out",
        touches=("slots", "target", "vocabulary"),  # the target's head is none for the drafter then
        accepted=("teacher",),
        how="trained to say what the head of a target of 59 layers says without its norm's weights",
        use=HELD_OUT,
        plant=beside("own_norm_at_59"),
        why_not=of_second,
    ),
)

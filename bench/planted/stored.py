"""Faults of data, teacher, vocabulary and training, and figures that no wiring explains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench.planted.draft import STEPS, Draft
from bench.planted.drafters import fitting
from bench.planted.dumps import Stored
from bench.planted.kinds import ALONE, ANY, BRINGS, TUNING, Kind, Plant, only


def stored_as(draft: Draft, slots: tuple[int, ...]) -> None:
    """Put these states where others are declared."""
    draft.dump = replace(draft.dump, slots=slots)


def slots_exchanged(draft: Draft, _: random.Random) -> None:
    """Two slots under each other's numbers."""
    a, b, c, last = draft.dump.slots
    stored_as(draft, (b, a, c, last))


def slots_higher(draft: Draft, _: random.Random) -> None:
    """Slots captured one layer late."""
    *aux, last = draft.dump.slots
    stored_as(draft, (*(k + 1 for k in aux), last))


def slots_window(draft: Draft, _: random.Random) -> None:
    """[3, 31, 59] captured where [0, 3, 31] is said, or [3, 31, 59] for [2, 30, 58]."""
    stored_as(draft, (3, 31, 59, draft.dump.slots[-1]))


def rolled(by: int) -> Plant:
    """Row t holds the states of position t - by."""

    def change(stored: Stored) -> None:
        stored.slots = [h.roll(by, 0) for h in stored.slots]

    return lambda draft, _: draft.edit_dump(change)


def trained_on_59(draft: Draft, _: random.Random) -> None:
    """Beside the lab's whole target, as it was trained: its teacher was state 59 of 61 layers."""
    draft.target = "whole"
    slots = (*draft.states, 59)
    layout = "pt_shards" if draft.dump.layout == "specforge" else draft.dump.layout
    draft.dump = replace(
        draft.dump, texts="whole", slots=slots, declared=slots, layout=layout, argmax=True
    )


def goes_on(draft: Draft, _: random.Random) -> None:
    """Beside a target of two more layers: what it was trained to say is an inner state's word."""
    draft.target = "goes_on"
    layout = "pt_shards" if draft.dump.layout == "specforge" else draft.dump.layout
    draft.dump = replace(draft.dump, texts="goes_on", layout=layout)


def of_second(draft: Draft) -> str | None:
    """Why its teacher is right."""
    return only((draft.drafter == "second", "its teacher was the lab target's end"))


def of_others(draft: Draft) -> str | None:
    """Why its teacher is wrong already."""
    return only((draft.drafter != "second", "its teacher is state 59 already"))


def vocabulary_cut(to: int) -> Plant:
    """A draft vocabulary of fewer tokens, drawn at random."""
    return lambda draft, rng: kept_only(
        draft, sorted(rng.sample(range(len(draft.tensors["d2t"])), to))
    )


def kept_only(draft: Draft, places: Sequence[int]) -> None:
    """A draft vocabulary of these draft ids alone; head and both tables agree."""
    ids = torch.arange(len(draft.tensors["d2t"])) + draft.tensors["d2t"]
    kept = torch.tensor(list(places))
    draft.config["draft_vocab_size"] = len(kept)
    draft.tensors["lm_head.weight"] = draft.tensors["lm_head.weight"][kept]
    draft.tensors["d2t"] = ids[kept] - torch.arange(len(kept))
    draft.tensors["t2d"] = torch.zeros_like(draft.tensors["t2d"])
    draft.tensors["t2d"][ids[kept]] = True
    draft.trained_accuracy = None  # a trainer of such a vocabulary would say less


def engine_says(figure: Callable[[float], float], which: int) -> Plant:
    """The accept length that an engine which fits was measured at."""

    def plant(draft: Draft, _: random.Random) -> None:
        if draft.engine is None:
            engines = fitting(draft)
            draft.serve(engines[which % len(engines)])
        assert draft.engine is not None
        name = "num_steps" if draft.engine.name == "sglang" else "num_speculative_tokens"
        draft.engine_flags[name] = STEPS
        draft.measured = figure

    return plant


def nothing(_: Draft, __: random.Random) -> None:
    """The drafter itself is what is to be found."""


def of_early(draft: Draft) -> str | None:
    """Why it is no early checkpoint."""
    return only((draft.drafter == "early", "it was trained to the end"))


KINDS: tuple[Kind, ...] = (
    Kind(
        name="slots/exchanged",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="the first two slots of the dump hold each other's states",
        use=TUNING,
        shows=ALONE,
        plant=slots_exchanged,
    ),
    Kind(
        name="slots/one_higher",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="each aux slot holds the state one higher than capture.json says",
        use=TUNING,
        shows=ALONE,
        plant=slots_higher,
    ),
    Kind(
        name="slots/window",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="the slots hold 3, 31 and 59 whatever capture.json says",
        use=TUNING,
        shows=ALONE,
        plant=slots_window,
    ),
    Kind(
        name="token/rolled",
        touches=("slots", "ids"),
        accepted=("token", "slots"),
        how="row t of every slot holds the state of position t + 1",
        use=TUNING,
        shows=ALONE,
        plant=rolled(-1),
    ),
    Kind(
        name="token/rolled_back",
        touches=("slots", "ids"),
        accepted=("token", "slots"),
        how="row t of every slot holds the state of position t - 1",
        use=TUNING,
        shows=ALONE,
        plant=rolled(1),
    ),
    Kind(
        name="teacher/state_59",
        touches=("slots", "target"),
        accepted=("teacher",),
        how="trained by speculators on a dump whose last slot was state 59 of 61 layers",
        use=TUNING,
        shows=ANY,
        plant=trained_on_59,
        why_not=of_second,
    ),
    Kind(
        name="teacher/goes_on",
        touches=("slots", "target"),
        accepted=("teacher",),
        how="the target has two more layers behind the state whose words were learnt",
        use=TUNING,
        shows=ANY,
        plant=goes_on,
        why_not=of_others,
    ),
    Kind(
        name="coverage/half",
        touches=("vocabulary",),
        accepted=("coverage",),
        how="the draft vocabulary keeps 256 tokens at random, consistently",
        use=TUNING,
        shows=ANY,
        plant=vocabulary_cut(256),
    ),
    Kind(
        name="coverage/most",
        touches=("vocabulary",),
        accepted=("coverage",),
        how="the draft vocabulary keeps 360 tokens at random, consistently",
        use=TUNING,
        shows=ANY,
        plant=vocabulary_cut(360),
    ),
    Kind(
        name="under-trained/early",
        accepted=("under-trained",),
        how="an early checkpoint of the third drafter's training",
        use=TUNING,
        shows=ANY,
        plant=nothing,
        why_not=of_early,
    ),
    Kind(
        name="engine-state/much_lost",
        accepted=("engine-state",),
        how="the engine was measured at 1 + 0.6 of what the drafter gains alone",
        use=TUNING,
        shows=BRINGS,
        plant=engine_says(lambda alone: 1 + 0.6 * (alone - 1), 0),
    ),
    Kind(
        name="engine-state/quarter_lost",
        accepted=("engine-state",),
        how="the engine was measured at 1 + three quarters of what the drafter gains alone",
        use=TUNING,
        shows=BRINGS,
        plant=engine_says(lambda alone: 1 + 0.75 * (alone - 1), 1),
    ),
    Kind(
        name="measurement/bonus",
        accepted=("measurement",),
        how="the engine's figure leaves the bonus token out: exactly one less",
        use=TUNING,
        shows=BRINGS,
        plant=engine_says(lambda alone: alone - 1, 0),
    ),
)

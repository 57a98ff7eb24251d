"""More faults of a dump and of a teacher, and engines that do not start with what they are given."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import torch

from bench.planted.draft import SGLANG, SGLANG_OLD, VLLM, Draft
from bench.planted.dumps import Stored
from bench.planted.kinds import ALONE, BRINGS, TUNING, Kind, nested_only, one_layer, only
from bench.planted.lab import live_target
from bench.planted.stored import of_others
from eagle3.lab.target import LiveTarget

BITS = 2  # of a quantised target's weights: -1, 0 and 1


def deepest_normed(draft: Draft, _: random.Random) -> None:
    """The deepest aux slot behind the final norm."""
    norm = live_target(draft.dump.texts).norm

    def change(stored: Stored) -> None:
        *aux, deepest, last = stored.slots
        stored.slots = [*aux, norm(deepest), last]

    draft.edit_dump(change)


def branches(draft: Draft, _: random.Random) -> None:
    """What the layer in front of each aux state added, without what it was added to."""
    aux = draft.dump.slots[:-1]

    def change(stored: Stored) -> None:
        states = stored.text.states
        added = [states[k] - states[k - 1] if k else states[k] for k in aux]
        stored.slots = [*added, stored.slots[-1]]

    draft.edit_dump(change)


@lru_cache(maxsize=2)
def quantised(name: str) -> LiveTarget:
    """One of the lab's targets with its layers' weights rounded, a scale a row."""
    live = live_target(name)
    for parameter in live.layers.parameters():
        if parameter.dim() == 2:
            most = 2 ** (BITS - 1) - 1
            scale = parameter.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
            parameter.copy_((parameter / scale).round() * scale)
    return live


def of_quantised(draft: Draft, _: random.Random) -> None:
    """The same texts, run through a build of the target that is rounded."""
    name, slots = draft.dump.texts, draft.dump.slots
    normed = draft.dump.layout == "specforge"

    @torch.no_grad()
    def change(stored: Stored) -> None:
        live = quantised(name)
        kept = live(stored.text.ids[None], slots)[1]
        *aux, last = (kept[k][0] for k in slots)
        stored.slots = [*aux, live.norm(last) if normed else last]

    draft.edit_dump(change)


def first_twice(draft: Draft, _: random.Random) -> None:
    """Ids behind a first token that stands there twice, and states of a text where it does once.

    The target's choices are left out: beside such ids they would be another text's.
    """

    def change(stored: Stored) -> None:
        stored.ids = torch.cat([stored.ids[:1], stored.ids[:-1]])

    draft.edit_dump(change)
    draft.dump = replace(draft.dump, argmax=False)


def even_chunks(draft: Draft) -> str | None:
    """Why a normed state is as good as a raw one."""
    normed = "fc_norm.0.weight" in draft.tensors
    return only((not normed, "a norm in front of each chunk of fc takes its size out again"))


def normed_twice(draft: Draft, _: random.Random) -> None:
    """Beside a target whose head, behind a second norm, says what was learnt.

    The dump is SpecForge's, whose last state is behind the norm already.
    """
    draft.target = "normed_twice"
    draft.dump = replace(draft.dump, texts="normed_twice", layout="specforge")


def nested_in_sglang(draft: Draft, _: random.Random) -> None:
    """An engine that does not load speculators' layout."""
    draft.serve(SGLANG)


def old_names(draft: Draft, _: random.Random) -> None:
    """The first layer under a name that the engine does not look for."""
    for name in [n for n in draft.tensors if n.startswith("midlayer.")]:
        draft.tensors[name.replace("midlayer.", "layers.0.")] = draft.tensors.pop(name)
    draft.serve(SGLANG_OLD)


def id_twice(draft: Draft, _: random.Random) -> None:
    """One id twice, of which the engine captures one state."""
    draft.serve(VLLM)
    first, second, _last = sorted(draft.states)
    draft.write_ids([first, second, second], VLLM.place)


KINDS: tuple[Kind, ...] = (
    Kind(
        name="slots/normed",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="the deepest aux slot holds its state behind the target's final norm, as the last of "
        "transformers' hidden_states does",
        use=TUNING,
        shows=ALONE,
        plant=deepest_normed,
        why_not=even_chunks,
    ),
    Kind(
        name="slots/branch",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="aux slots hold what the layer before them added, without the residual stream",
        use=TUNING,
        shows=ALONE,
        plant=branches,
    ),
    Kind(
        name="slots/other_build",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how=f"all slots were captured from a build of the target with weights of {BITS} bits",
        use=TUNING,
        shows=ALONE,
        plant=of_quantised,
    ),
    Kind(
        name="token/first_twice",
        touches=("slots", "ids"),
        accepted=("token", "slots"),
        how="input_ids hold their first token twice, the states are of a text where it stands once",
        use=TUNING,
        shows=ALONE,
        plant=first_twice,
    ),
    Kind(
        name="teacher/normed_twice",
        touches=("slots", "target", "vocabulary"),  # the target's head is none for the drafter then
        accepted=("teacher",),
        how="trained to say what the target's head says behind the final norm twice, as where a trainer "
        "norms SpecForge's last state again",
        use=TUNING,
        plant=normed_twice,
        why_not=of_others,
    ),
    Kind(
        name="not-served/nested",
        accepted=("not-served",),
        how="a config in speculators' layout, and SGLang, which does not load it",
        use=TUNING,
        shows=BRINGS,
        plant=nested_in_sglang,
        why_not=nested_only,
    ),
    Kind(
        name="not-served/old_names",
        accepted=("not-served",),
        how="the first layer is called layers.0 in a flat config, and SGLang 0.5.9, which knows "
        "midlayer alone",
        use=TUNING,
        shows=BRINGS,
        plant=old_names,
        why_not=one_layer,
    ),
    Kind(
        name="not-served/id_twice",
        accepted=("not-served", "states"),
        how="one id stands in config.json twice: vLLM captures two states, and fc takes three",
        use=TUNING,
        shows=BRINGS,
        plant=id_twice,
    ),
)

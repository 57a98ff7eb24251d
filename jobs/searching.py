"""One search as a question asks for it: from where, along which axes, with which teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import target_rope
from eagle3.data.form import DataForm
from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.layers import LayerConvention
from eagle3.search.axes import STATES, axes_of, changed, value_of
from eagle3.search.score import Scorer
from eagle3.search.search import Searched, search
from eagle3.search.teachers import Teacher
from eagle3.search.texts import Text, known_states
from eagle3.target import TargetParts
from eagle3.wiring import SWITCHES, Wiring
from jobs.question import Asked, Progress


def search_texts(
    asked: Asked,
    checkpoint: DrafterCheckpoint,
    target: TargetParts,
    texts: Sequence[Text],
    *,
    starts: Sequence[Wiring],
    teachers: Sequence[Teacher],
    progress: Progress,
) -> tuple[Searched, Scorer]:
    """The search from every start that can be scored, and what scored it.

    What the question fixes or cuts stays in all of them as the first has it. Where none can be scored,
    the data's first states stand in; raises BadInput where a person said which states it has to be.
    """
    scorer = Scorer(checkpoint, target, texts, steps=asked.steps)
    asked_for = {k for states in asked.more_states for k in states}
    if lacking := sorted(asked_for - set(scorer.known)):
        raise BadInput(
            f"job.axes.more_states names state {', '.join(map(str, lacking))}, but the texts hold only "
            f"{', '.join(map(str, scorer.known))}, and the target's first layers do not make it here"
        )
    able = [s for s in kept(asked, starts, checkpoint.form) if scorer.why_not(s) is None]
    if not able and (asked.start is not None or "states" in asked.fixed):
        raise BadInput(str(scorer.why_not(starts[0].resolved(checkpoint.form))))
    if not able:
        able = [with_held_states(starts[0].resolved(checkpoint.form), checkpoint, scorer.known)]
    # Other starts' states are tried as they are: every ordered choice of them too would be many.
    made = set.union(*(set(text.computed) for text in texts))
    at_hand = set(scorer.known) - (made - {0}) | set(able[0].states())
    axes = axes_of(
        checkpoint.form,
        able[0],
        sorted(at_hand),
        target_rope=rope_of(target),
        own_embedding=checkpoint.embedding is not None,
        own_head=checkpoint.form.head.value == "own",
        stored=[k for k in known_states(texts) if k not in made],
        fixed=asked.fixed,
        only=asked.only,
        more_states=asked.more_states,
    )
    found = search(
        scorer,
        able,
        axes,
        teachers,
        form=checkpoint.form,
        steps=asked.steps,
        seed=asked.seed,
        finalists=asked.finalists,
        progress=lambda done, total: progress("search", done, total),
    )
    return found, scorer


def kept(asked: Asked, starts: Sequence[Wiring], form: DrafterForm) -> list[Wiring]:
    """The starts, resolved, each once, with what a person fixed or cut as the first one has it."""
    first = starts[0].resolved(form)
    found = [first]
    for start in starts[1:]:
        other = start.resolved(form)
        for name in {STATES, *SWITCHES}.intersection((*asked.fixed, *asked.only)):
            other = changed(other, name, value_of(first, name), form)
        if other not in found:
            found.append(other)
    return found


def with_held_states(wiring: Wiring, checkpoint: DrafterCheckpoint, held: Sequence[int]) -> Wiring:
    """As many states as fc takes, where none that is asked for is at hand."""
    count = checkpoint.form.num_aux.value
    if len(held) < count:
        listed = ", ".join(map(str, held)) or "of no declared number"
        raise BadInput(
            f"the data holds states {listed}, but the drafter's fc takes {count}; set data.states to "
            "the canonical states in the files' order, or capture more of them (job=capture_states)"
        )
    return replace(wiring, layers=tuple(held[:count]), convention=LayerConvention.input)


def data_order(declared: Wiring, form: DataForm) -> Wiring | None:
    """The data's aux slots in their order, where there are as many as fc takes."""
    aux = [slot.state for i, slot in enumerate(form.slots) if i != form.teacher and not slot.normed]
    states = tuple(k for k in aux if k is not None)
    if len(states) != len(declared.layers):
        return None
    return replace(declared, layers=states, convention=LayerConvention.input)


def rope_of(target: TargetParts) -> Rope | None:
    """The target's rotary embedding, None where it is none that is run here."""
    try:
        return target_rope(target)
    except BadInput:
        return None

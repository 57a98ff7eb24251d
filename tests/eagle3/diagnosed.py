"""Evidence made by hand: curves with known accuracies, and everything that a verdict rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.conventions import Evidence as Ground
from eagle3.diagnosis.evidence import Evidence, Health, Inspected, Part, Scored, SlotSeen
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.form import DrafterForm
from eagle3.metrics import Count, Difference, Rate
from eagle3.search.results import Ranked, Searched, TeacherScore
from eagle3.search.teachers import Teacher
from eagle3.served import ServedWiring
from eagle3.served_switches import Stop
from eagle3.wiring import Wiring

LAB = Path(__file__).parents[2] / "lab"
STEPS, TEXTS, ROWS = 4, 24, 40
ARGMAX = Teacher(name="target_argmax", slot=None, norms=0, in_words="the target's own choice")
SLOT3 = Teacher(name="slot3/normed", slot=3, norms=1, in_words="the data's last slot")
ENGINE = EngineAsked(name="sglang", version="0.5.12", engine_class="kimi_k25")
GOOD = (0.75, 0.8, 0.8, 0.8)
POOR = (0.3, 0.4, 0.4, 0.4)
DEAD = (0.03, 0.0, 0.0, 0.0)


def form() -> DrafterForm:
    """The first lab drafter's."""
    found = read_drafter(LAB / "drafter")[0].form
    assert found is not None
    return found


def wiring(*states: int, **switches: Any) -> Wiring:
    """A resolved wiring of the first lab drafter."""
    return Wiring.of_states(states or (0, 3, 31), **switches).resolved(form())


T = wiring(0, 3, 31)  # as trained
S = wiring(3, 31, 59)  # as served


def text_counts(curve: Sequence[float], coverage: float, rows: int) -> dict[str, Count]:
    """Counts of one text whose steps are right as often as `curve` says, given the ones before.

    A round of the served walk gains 1 + the sum of the cumulative curve.
    """
    counts = {"coverage": Count(round(rows * coverage), rows)}
    before = rows
    gained = rows
    for step, share in enumerate(curve):
        right = round(before * share)
        counts[f"step_accuracy/conditional@{step}"] = Count(right, before)
        gained += right
        before = right
    counts["accuracy"] = counts["step_accuracy/conditional@0"]
    counts["accept_length"] = Count(gained, rows)
    return counts


def scored(
    wired: Wiring, curve: Sequence[float], *, coverage: float = 0.98, truth: str = "target_argmax"
) -> Scored:
    """TEXTS texts, of which every other one is a little longer."""
    counts = [text_counts(curve, coverage, ROWS + i % 2 * 10) for i in range(TEXTS)]
    return Scored(wiring=wired, counts=counts, truth=truth, steps=STEPS, seed=0)


def ranked(of: Scored, *, tied: bool = False) -> Ranked:
    """A place in the search's table."""
    return Ranked(
        wiring=of.wiring,
        changed=(),
        teacher=of.truth,
        accuracy=of.accuracy,
        accept_length=of.accept_length,
        coverage=of.coverage,
        curves={},
        counts=of.counts,
        behind=None,
        tied=tied,
    )


def searched(
    best: Scored,
    *,
    teacher: Teacher = ARGMAX,
    by_teacher: Scored | None = None,
    agreement: float = 0.4,
) -> Searched:
    """What a search says that ended there."""
    scores = [TeacherScore(teacher=ARGMAX, accuracy=best.accuracy, agreement=None)]
    if teacher is not ARGMAX:
        assert by_teacher is not None
        same = Rate(
            value=agreement,
            low=agreement - 0.02,
            high=agreement + 0.02,
            numerator=int(1000 * agreement),
            denominator=1000,
            truth="target_argmax",
        )
        scores.insert(
            0, TeacherScore(teacher=teacher, accuracy=by_teacher.accuracy, agreement=same)
        )
    place = ranked(best)
    return Searched(
        start=best.wiring,
        best=place,
        ranked=(place,),
        dropped=(),
        teachers=tuple(scores),
        teacher=teacher,
        teacher_clear=True,
        rounds=(),
        scored=60,
        drafted=12,
        notes=(),
    )


def part(name: str, share: float, *, of: Scored, single: bool = False) -> Part:
    """A part of the drafter that is worth a share of its accuracy."""
    worth = share * of.accuracy.value
    without = replace(of.accuracy, value=of.accuracy.value - worth)
    difference = Difference(value=worth, low=worth - 0.01, high=worth + 0.01)
    return Part(name=name, single=single, without=without, worth=difference, share=share)


def served(
    wired: Wiring | None,
    *,
    ground: str = "read",
    problems: Sequence[str] = (),
    switch: str | None = "states",
) -> ServedWiring:
    """What an engine runs; without a wiring, `problems` of that switch stop it."""
    stops = [Stop(why=why, switch=switch) for why in problems] if wired is None else []
    return ServedWiring(
        wiring=wired,
        run=wired,
        states=None if wired is None else wired.states(),
        ids=(2, 30, 58),
        place="eagle_config",
        because={},
        evidence=Ground(ground),
        stops=tuple(stops),
        problems=tuple(problems),
        notes=(),
        engine="SGLang 0.5.12, class kimi_k25",
    )


def slots(verdict: str = "verified") -> tuple[SlotSeen, ...]:
    """Four slots, each what it is declared to be."""
    return tuple(
        SlotSeen(index=i, declared=k, found=(k,), verdict=verdict, what="")
        for i, k in enumerate((0, 3, 31, 59))
    )


def evidence(
    trained: Scored,
    *,
    wrong: Scored | None = None,
    alone: Mapping[str, Scored] | None = None,
    engine: bool = True,
    teacher: Teacher = ARGMAX,
    by_teacher: Scored | None = None,
    **changed: Any,
) -> Evidence:
    """A sound drafter behind an engine that runs it as trained, but for what is given."""
    learnt = by_teacher or trained
    so = wrong or trained
    found = dict(alone or {})
    e = Evidence(
        form=form(),
        config={
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
            "vocab_size": 1024,
        },
        num_layers=61,
        target_rope=None,
        target_classes=("llama",),
        searched=searched(trained, teacher=teacher, by_teacher=by_teacher),
        declared=so.wiring,
        declared_by="ids in config.json",
        served=served(so.wiring) if engine else None,
        trained=trained,
        by_teacher=learnt,
        as_served=so,
        why_not_served=None,
        alone=found,
        alone_by_teacher=found,
        loss_alone={},
        not_alone={},
        ladder=tuple((kind, trained) for kind in found),
        health=Health(
            bigram=0.18,
            parts=(part("the attention", 0.9, of=learnt), part("the MLP", 0.4, of=learnt)),
        ),
        inspected=Inspected(slots=slots(), findings=(), notes=()),
        mended=(),
        doctor=(),
        asked=ENGINE if engine else None,
        engine_accept_length=None,
        tree=None,
        trained_accuracy=None,
        longest=144,
        stored=(0, 3, 31, 59),
    )
    return replace(e, **changed)

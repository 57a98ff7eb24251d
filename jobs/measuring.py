"""What is measured around a search: the served wiring, costs, the ladder of fixes, health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from eagle3.connect import connect
from eagle3.data.form import DataForm
from eagle3.diagnosis import measure
from eagle3.diagnosis.beyond import slot_causes, teacher_cause
from eagle3.diagnosis.causes import LEAST_LENGTH, mended_causes, runs, wiring_causes, with_part_of
from eagle3.diagnosis.evidence import Evidence, Inspected, Scored, held_against
from eagle3.diagnosis.fix import mended
from eagle3.diagnosis.heard import counted_of, why_unlike
from eagle3.diagnosis.kinds import ORDER, STATES
from eagle3.doctor.findings import Finding
from eagle3.doctor.report import examine
from eagle3.doctor.server import flags_of
from eagle3.errors import BadInput
from eagle3.layers import LayerConvention
from eagle3.metrics import Difference
from eagle3.search.score import Scorer
from eagle3.search.search import Searched
from eagle3.search.texts import Text
from eagle3.tree import count_trees, judge_trees
from eagle3.wiring import Wiring
from jobs.inspecting import short
from jobs.question import Asked, Kit, Read
from jobs.reference import follows, reference_of
from jobs.searching import rope_of

TABLE = "d2t"
# Findings on ids that the file holds: of no use where others are served.
OF_IDS = ("ids-", "states-not-servable", "embedding-needs-a-patch", "fc-width")


@dataclass(frozen=True, kw_only=True)
class Matter:
    """All that one question is about."""

    asked: Asked
    kit: Kit
    known: Read  # its checkpoint is what is scored: the file's, or one with a table mended
    form: DataForm
    inspected: Inspected
    texts: tuple[Text, ...]

    def scored(self, scorer: Scorer, wiring: Wiring) -> Scored:
        """One wiring against what serving goes by."""
        return measure.scored(scorer, wiring, reference_of(self.texts), self.asked.seed)


@dataclass(frozen=True, kw_only=True)
class ServedSide:
    """The wrong side of the differences, scored on the tables that the file holds."""

    wrong: Wiring
    as_served: Scored | None
    why_not: str | None
    alone: Mapping[str, Scored]
    alone_by_teacher: Mapping[str, Scored]
    loss_alone: Mapping[str, Difference]
    not_alone: Mapping[str, str]


def measured(m: Matter, searched: Searched, scorer: Scorer, file: Scorer | None = None) -> Evidence:
    """The search's wiring beside the served one: costs, ladder, health.

    `file` scores with the tables that the file holds, where `scorer` has one that was mended.
    """
    checkpoint, target, seed = m.known.checkpoint, m.kit.target, m.asked.seed
    teacher = searched.teacher.name
    best = searched.best.wiring.resolved(checkpoint.form)
    trained = m.scored(scorer, best)
    same = teacher == trained.truth
    by_teacher = trained if same else measure.scored(scorer, best, teacher, seed)
    side = served_side(m, scorer, file, trained, searched)
    tree, notes = None, list[str]()
    if side.as_served is not None:
        tree, notes = tree_of(m, side.wrong, trained.truth)
    heard, counted = m.asked.heard, None
    goes_on = follows(m.texts, seed)
    unlike = why_unlike(trained.truth, goes_on)
    if unlike is None and tree is None and drafts_a_tree(m.asked):
        unlike = "; ".join(notes) or "the tree that its flags describe was not scored alone"
    if unlike is None:
        names = [short(text.path) for text in m.texts]
        counted = counted_of(heard, tree or side.as_served, names)
    evidence = Evidence(
        form=checkpoint.form,
        config=m.known.config,
        num_layers=target.num_layers,
        target_rope=rope_of(target),
        target_classes=m.kit.classes,
        searched=searched,
        declared=m.known.declared.resolved(checkpoint.form),
        declared_by=m.known.declared_by,
        served=m.known.served,
        trained=trained,
        by_teacher=by_teacher,
        as_served=side.as_served,
        why_not_served=side.why_not,
        alone=side.alone,
        alone_by_teacher=side.alone_by_teacher,
        loss_alone=side.loss_alone,
        not_alone=side.not_alone,
        ladder=(),
        health=measure.health(
            scorer,
            checkpoint,
            best,
            teacher,
            remake=lambda maimed: Scorer(maimed, target, m.texts, steps=m.asked.steps),
            seed=seed,
        ),
        inspected=replace(m.inspected, as_declared=as_declared(m, scorer, best)),
        mended=() if file is None else (measure.mended(side.alone[TABLE]),),
        doctor=doctor_of(m),
        asked=m.asked.engine,
        engine_accept_length=reported(m.asked),
        tree=None if tree is None else tree.accept_length,
        trained_accuracy=m.asked.trained_accuracy,
        longest=max(len(text.ids) for text in m.texts),
        stored=tuple(slot.state for slot in m.form.slots if slot.state is not None),
        notes=tuple(notes),
        follows=goes_on,
        heard=heard,
        counted=counted,
        not_counted=unlike,
    )
    return with_ladder(m, evidence, scorer, file)


def served_side(
    m: Matter, scorer: Scorer, file: Scorer | None, trained: Scored, searched: Searched
) -> ServedSide:
    """What is served, or declared, and each difference put into the trained wiring alone."""
    teacher = searched.teacher.name
    best, served, seed = trained.wiring, m.known.served, m.asked.seed
    wrong = held_against(served, m.known.declared, best).resolved(m.known.checkpoint.form)
    runs = served is None or served.wiring is not None
    on = file or scorer
    why = on.why_not(wrong) if runs else "the engine does not run it"
    as_served = None
    if why is None:
        as_served = trained if wrong == best and file is None else m.scored(on, wrong)
    alone, not_alone = measure.alone(scorer, best, wrong, trained.truth, seed)
    learnt = alone
    if teacher != trained.truth:
        learnt, _ = measure.alone(scorer, best, wrong, teacher, seed)
    loss = measure.loss_alone(scorer, best, alone, teacher, comparisons=searched.scored)
    not_alone = {**not_alone, **measure.uncounted(trained, alone)}
    if file is not None:
        alone = {**alone, TABLE: m.scored(file, best)}
        learnt = {**learnt, TABLE: measure.scored(file, best, teacher, seed)}
    return ServedSide(
        wrong=wrong,
        as_served=as_served,
        why_not=why,
        alone=alone,
        alone_by_teacher=learnt,
        loss_alone=loss,
        not_alone=not_alone,
    )


def with_ladder(m: Matter, e: Evidence, scorer: Scorer, file: Scorer | None) -> Evidence:
    """The evidence with accept lengths as one cause after the other is mended.

    What can be written comes first: so it shows what that alone is worth. What keeps an engine from
    starting is before all, whether it can be mended or not: nothing is served until that is.
    """
    causes, _ = wiring_causes(e)
    labels = {kind: slot.kind for slot in slot_causes(e, causes) for kind in slot.explains}
    order = sorted(
        [*causes, *mended_causes(e)],
        key=lambda c: (
            not c.stops,
            mended(c.fixes),
            -(c.cost.difference.value if c.cost is not None else 0.0),
        ),
    )
    climbed = rungs(m, e.trained, e.wrong, [cause.kind for cause in order], scorer, file)
    if climbed is None or (runs(e) and e.as_served is None):
        return e
    ladder = tuple((labels.get(kind, kind), so) for kind, so in climbed)
    # Where something else stops the engine, mending the states alone serves nothing.
    others = any(cause.stops and cause.kind not in (STATES, ORDER) for cause in causes)
    alone = None if others else states_alone(m, e, climbed, scorer, file)
    return replace(e, ladder=ladder, states_alone=alone)


def rungs(
    m: Matter,
    trained: Scored,
    wiring: Wiring,
    kinds: Sequence[str],
    scorer: Scorer,
    file: Scorer | None,
) -> list[tuple[str, Scored]] | None:
    """A wiring as one kind after the other is mended; None where one of them cannot be scored."""
    climbed: list[tuple[str, Scored]] = []
    for kind in kinds:
        if kind == TABLE and file is not None:
            file = None
        else:
            wiring = with_part_of(wiring, trained.wiring, kind)
        on = file or scorer
        if on.why_not(wiring) is not None:
            return None
        whole = wiring == trained.wiring and file is None
        climbed.append((kind, trained if whole else m.scored(on, wiring)))
    return climbed


def states_alone(
    m: Matter,
    e: Evidence,
    ladder: Sequence[tuple[str, Scored]],
    scorer: Scorer,
    file: Scorer | None,
) -> tuple[str, Scored] | None:
    """The accept length that serving shows behind the states' fix alone, where that leaves it slow."""
    kind = next((kind for kind, _ in ladder if kind in (STATES, ORDER)), None)
    if kind is None:
        return None
    climbed = list(ladder[:1])
    if ladder[0][0] != kind:
        climbed = rungs(m, e.trained, e.wrong, [kind], scorer, file) or []
    if not climbed:
        return None
    so = climbed[0][1]
    lacks = e.trained.accept_length.value - so.accept_length.value >= LEAST_LENGTH
    return (kind, so) if lacks or teacher_cause(e) is not None else None


def doctor_of(m: Matter) -> tuple[Finding, ...]:
    """What the files themselves show; of the file's ids nothing where others are served, or where
    it was measured what is fed.
    """
    asked = m.asked
    report = examine(asked.drafter, m.kit.target.folder, asked.data, engine=asked.engine)
    measured = m.known.served is not None and m.known.served.measured
    if asked.ids is None and not measured:
        return tuple(report.findings)
    return tuple(f for f in report.findings if not f.name.startswith(OF_IDS))


def as_declared(m: Matter, scorer: Scorer, best: Wiring) -> Scored | None:
    """What whoever believes the data's labels serves: the trained states by their declared names."""
    states = m.inspected.labelled(best.states())
    if states == best.states():
        return None
    wiring = replace(best, layers=states, convention=LayerConvention.input)
    return None if scorer.why_not(wiring) else m.scored(scorer, wiring)


def reported(asked: Asked) -> float | None:
    """The engine's accept length: as a running server counted it, else as it was given."""
    counted = None if asked.heard is None else asked.heard.accept_length
    return asked.accept_length if counted is None else counted.value


def drafts_a_tree(asked: Asked) -> bool:
    """Whether the engine's flags say that it drafts a tree."""
    flags = flags_of(asked.engine.flags) if asked.engine is not None else {}
    return str(flags.get("speculative_eagle_topk", 1)) != "1"


def tree_of(m: Matter, wiring: Wiring, truth: str) -> tuple[Scored | None, list[str]]:
    """Accept length in the tree that the engine's flags describe, and why it is not measured.

    None without a reason where they describe a chain, or no figure is there to be compared.
    """
    asked = m.asked
    flags = flags_of(asked.engine.flags) if asked.engine is not None else {}
    topk, tokens = flags.get("speculative_eagle_topk"), flags.get("speculative_num_draft_tokens")
    if reported(asked) is None or topk is None or str(topk) == "1" or tokens is None:
        return None, []
    try:
        tied = connect(m.known.checkpoint, m.kit.target, wiring)
    except BadInput as error:
        return None, [f"the engine's tree was not scored: {error}"]
    counts = []
    for text in m.texts:
        aux = torch.cat([text.states[k].float() for k in tied.states], -1)
        trees = tied.trees(
            text.ids, aux, text.rows, steps=asked.steps, topk=int(topk), draft_tokens=int(tokens)
        )
        truths = text.truths[truth]
        judged = judge_trees(trees, text.rows, text.ids, text.mask, truths, tied.vocabulary)
        found = count_trees(judged)
        name = next(
            (n for n in found if n.startswith("accept_length") and "uniform" not in n), None
        )
        if name is None:
            return None, []
        counts.append({"accept_length": found[name]})
    so = Scored(wiring=wiring, counts=counts, truth=truth, steps=asked.steps, seed=asked.seed)
    return so, []

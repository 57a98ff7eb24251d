"""From a question to a diagnosis: the search, and what is measured around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.connect import connect, target_rope
from eagle3.data.form import DataForm
from eagle3.diagnosis import measure
from eagle3.diagnosis.answer import Diagnosis
from eagle3.diagnosis.beyond import DECENT, broken, ceiling
from eagle3.diagnosis.causes import matters, wiring_causes
from eagle3.diagnosis.evidence import Evidence, Inspected, Mended, Scored
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.report import examine
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.layers import LayerConvention
from eagle3.metrics import Rate, Truth
from eagle3.search.axes import axes_of
from eagle3.search.score import Scorer
from eagle3.search.search import Searched, search
from eagle3.search.teachers import Teacher, teachers_of
from eagle3.search.texts import Text, known_states, with_states
from eagle3.target import TargetParts
from eagle3.tree import count_trees, judge_trees
from eagle3.wiring import Wiring
from jobs.question import Asked, Kit, Progress, Read, inspect, read, texts_of


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A diagnosis with all that it rests on."""

    diagnosis: Diagnosis
    evidence: Evidence
    checkpoint: DrafterCheckpoint
    form: DataForm  # as taken: with what the inspection found
    texts: Sequence[Text]
    data_digest: str
    notes: tuple[str, ...]


def diagnose_folder(asked: Asked, kit: Kit, progress: Progress = lambda *_: None) -> Answer:
    """The answer to one question. Raises BadInput for what cannot be read, naming it."""
    known = read(asked, kit)
    inspected, form, ran = inspect(asked, kit, known)
    texts, digest, left_out, more = texts_of(asked, kit, known, form, ran, progress)
    evidence = gather(asked, kit, known, form, inspected, texts, progress)
    if is_low(evidence):
        more_texts, made = with_neighbours(kit, evidence, texts, ran)
        wider = wider_search(
            asked, kit, known, form, inspected, more_texts, made, evidence, progress
        )
        if wider is not None:
            texts, evidence = more_texts, wider
    notes = (*known.checkpoint.notes, *form.notes, *left_out.notes(), *more)
    return Answer(
        diagnosis=diagnose(replace(evidence, notes=(*evidence.notes, *more))),
        evidence=evidence,
        checkpoint=known.checkpoint,
        form=form,
        texts=texts,
        data_digest=digest,
        notes=notes,
    )


def is_low(e: Evidence) -> bool:
    """Whether what the search found may be a state beside the right one."""
    return bool(broken(e)) or e.by_teacher.accuracy.high / ceiling(e) < DECENT


def with_neighbours(
    kit: Kit, e: Evidence, texts: Sequence[Text], layers: int
) -> tuple[list[Text], tuple[int, ...]]:
    """The texts with the states beside those that were found, where the target's layers make them."""
    found = {*e.trained.wiring.states(), *e.declared.states()}
    beside = {k + by for k in found for by in (-1, 1)} - set(known_states(texts))
    missing = tuple(sorted(k for k in beside if 0 < k <= layers))
    if not missing:
        return list(texts), ()
    made = kit.layers.states([text.ids for text in texts], layers)
    pairs = zip(texts, made, strict=True)
    return [with_states(t, {k: states[k] for k in missing}) for t, states in pairs], missing


def wider_search(
    asked: Asked,
    kit: Kit,
    known: Read,
    form: DataForm,
    inspected: Inspected,
    texts: Sequence[Text],
    made: Sequence[int],
    before: Evidence,
    progress: Progress,
) -> Evidence | None:
    """The evidence with one of the states replaced by its neighbour, where that is clearly better."""
    if not made or "states" in asked.fixed or "states" in asked.only:
        return None
    scorer = Scorer(known.checkpoint, kit.target, texts, steps=asked.steps)
    best, teacher = before.trained.wiring, before.searched.teacher.name
    states = best.states()
    others = [
        replace(best, layers=(*states[:j], k, *states[j + 1 :]))
        for j in range(len(states))
        for k in made
        if abs(k - states[j]) == 1
    ]
    if not others:
        return None
    counts = scorer.first(others, range(len(texts)), [teacher])
    leader = max(others, key=lambda w: sum(c.numerator for c in counts[w][teacher]))
    better = measure.scored(scorer, leader, teacher, asked.seed)
    if not matters(better, before.by_teacher, before.searched.scored + len(others)):
        return None
    # From there everything is asked again.
    again = replace(asked, start=leader)
    return gather(again, kit, known, form, inspected, texts, progress)


def reference_of(texts: Sequence[Text]) -> str:
    """The truth that serving goes by: the target's own choice where all texts have it."""
    argmax = Truth.target_argmax.value
    return argmax if all(argmax in text.truths for text in texts) else Truth.next_token.value


def rope_of(target: TargetParts) -> Rope | None:
    """The target's rotary embedding, None where it is none that is run here."""
    try:
        return target_rope(target)
    except BadInput:
        return None


def gather(
    asked: Asked,
    kit: Kit,
    known: Read,
    form: DataForm,
    inspected: Inspected,
    texts: Sequence[Text],
    progress: Progress,
) -> Evidence:
    """Search, and measure what the conclusions rest on."""
    target, checkpoint = kit.target, known.checkpoint
    reference = reference_of(texts)
    teachers = [
        teacher
        for teacher in teachers_of(form, target, has_argmax=reference == Truth.target_argmax.value)
        if all(teacher.name in text.truths for text in texts)
    ]
    searched, scorer = searching(asked, known, form, target, texts, teachers, checkpoint, progress)
    mended: tuple[Mended, ...] = ()
    whole = measured(asked, kit, known, form, inspected, texts, searched, scorer, mended)
    table = measure.mended_table(checkpoint)
    if table is not None:
        again, other = searching(asked, known, form, target, texts, teachers, table, progress)
        remade = measured(
            asked,
            kit,
            replace(known, checkpoint=table),
            form,
            inspected,
            texts,
            again,
            other,
            (measure.mended(whole.trained),),
        )
        if not broken(remade) and matters(remade.trained, whole.trained, again.scored):
            return remade
    return whole


def searching(
    asked: Asked,
    known: Read,
    form: DataForm,
    target: TargetParts,
    texts: Sequence[Text],
    teachers: Sequence[Teacher],
    checkpoint: DrafterCheckpoint,
    progress: Progress,
) -> tuple[Searched, Scorer]:
    """The search from every start that can be scored."""
    scorer = Scorer(checkpoint, target, texts, steps=asked.steps)
    starts: list[Wiring] = []
    in_order = data_order(known.declared, form)
    served = known.served.wiring if known.served is not None else None
    for start in (asked.start, known.declared, served, in_order):
        if start is None:
            continue
        wiring = start.resolved(checkpoint.form)
        if wiring not in starts and scorer.why_not(wiring) is None:
            starts.append(wiring)
    if not starts:
        held = known_states(texts)
        if len(held) < checkpoint.form.num_aux.value:
            raise BadInput(
                f"the data holds states {', '.join(map(str, held)) or 'of no declared number'}, "
                f"but the drafter's fc takes {checkpoint.form.num_aux.value}; set data.states to the "
                "canonical states in the files' order"
            )
        fed = held[: checkpoint.form.num_aux.value]
        starts = [replace(known.declared, layers=fed, convention=LayerConvention.input)]
    own_head = checkpoint.form.head.value == "own"
    # Other starts' states are tried as they are: every ordered choice of them too would be many.
    computed = set.union(*(set(text.computed) for text in texts)) - {0}
    at_hand = set(known_states(texts)) - computed | set(starts[0].states())
    axes = axes_of(
        checkpoint.form,
        starts[0],
        sorted(at_hand),
        target_rope=rope_of(target),
        own_embedding=checkpoint.embedding is not None,
        own_head=own_head,
        stored=[k for k in known_states(texts) if k not in texts[0].computed],
        fixed=asked.fixed,
        only=asked.only,
    )
    found = search(
        scorer,
        starts,
        axes,
        teachers,
        form=checkpoint.form,
        steps=asked.steps,
        seed=asked.seed,
        finalists=asked.finalists,
        progress=lambda done, total: progress("search", done, total),
    )
    return found, scorer


def data_order(declared: Wiring, form: DataForm) -> Wiring | None:
    """The data's aux slots in their order, where there are as many as fc takes."""
    aux = [slot.state for i, slot in enumerate(form.slots) if i != form.teacher and not slot.normed]
    states = tuple(k for k in aux if k is not None)
    if len(states) != len(declared.layers):
        return None
    return replace(declared, layers=states, convention=LayerConvention.input)


def measured(
    asked: Asked,
    kit: Kit,
    known: Read,
    form: DataForm,
    inspected: Inspected,
    texts: Sequence[Text],
    searched: Searched,
    scorer: Scorer,
    mended: tuple[Mended, ...],
) -> Evidence:
    """The search's wiring beside the served one: costs, ladder, health."""
    checkpoint, target, seed = known.checkpoint, kit.target, asked.seed
    reference, teacher = reference_of(texts), searched.teacher.name
    best = searched.best.wiring.resolved(checkpoint.form)
    trained = measure.scored(scorer, best, reference, seed)
    by_teacher = trained if teacher == reference else measure.scored(scorer, best, teacher, seed)
    served = known.served
    runs = served is None or served.wiring is not None
    wrong = known.declared if served is None or served.wiring is None else served.wiring
    wrong = wrong.resolved(checkpoint.form)
    why = scorer.why_not(wrong)
    as_served = None
    if runs and why is None:
        as_served = trained if wrong == best else measure.scored(scorer, wrong, reference, seed)
    found, unmeasured = measure.alone(scorer, best, wrong, reference, seed) if runs else ({}, {})
    learnt = found
    if runs and teacher != reference:
        learnt, _ = measure.alone(scorer, best, wrong, teacher, seed)
    report = examine(
        asked.drafter, target.folder, asked.data, engine=asked.engine if served else None
    )
    evidence = Evidence(
        form=checkpoint.form,
        config=known.config,
        num_layers=target.num_layers,
        target_rope=rope_of(target),
        target_classes=kit.classes,
        searched=searched,
        declared=known.declared.resolved(checkpoint.form),
        declared_by=known.declared_by,
        served=served,
        trained=trained,
        by_teacher=by_teacher,
        as_served=as_served,
        why_not_served=why if runs else "the engine does not run it",
        alone=found,
        alone_by_teacher=learnt,
        not_alone=unmeasured,
        ladder=(),
        health=measure.health(
            scorer,
            checkpoint,
            best,
            teacher,
            remake=lambda maimed: Scorer(maimed, target, texts, steps=asked.steps),
            seed=seed,
        ),
        inspected=replace(
            inspected, as_declared=as_declared(scorer, best, inspected, reference, seed)
        ),
        mended=mended,
        doctor=report.findings,
        asked=asked.engine,
        engine_accept_length=asked.accept_length,
        tree=tree_of(asked, known, kit, texts, wrong, reference) if as_served else None,
        trained_accuracy=asked.trained_accuracy,
        longest=max(len(text.ids) for text in texts),
        stored=tuple(slot.state for slot in form.slots if slot.state is not None),
        notes=() if known.why_no_engine is None else (known.why_no_engine,),
    )
    if as_served is None:
        return evidence
    causes, _ = wiring_causes(evidence)
    # What can be written comes first: so the ladder shows what that alone is worth.
    order = sorted(
        causes,
        key=lambda c: (
            not any(fix.possible for fix in c.fixes),
            -(c.cost.difference.value if c.cost is not None else 0.0),
        ),
    )
    kinds = [cause.kind for cause in order]
    return replace(evidence, ladder=measure.ladder(scorer, trained, as_served, kinds))


def as_declared(
    scorer: Scorer, best: Wiring, inspected: Inspected, truth: str, seed: int
) -> Scored | None:
    """The trained wiring where the slots are taken for what they are declared to be."""
    really = {s.declared: s.state for s in inspected.slots if s.declared is not None}
    fed = [really.get(k, k) for k in best.states()]
    states = tuple(k for k in fed if k is not None)
    if states == best.states() or len(states) != len(fed):
        return None
    wiring = replace(best, layers=states, convention=LayerConvention.input)
    return None if scorer.why_not(wiring) else measure.scored(scorer, wiring, truth, seed)


def tree_of(
    asked: Asked, known: Read, kit: Kit, texts: Sequence[Text], wiring: Wiring, truth: str
) -> Rate | None:
    """Accept length in the tree that the engine's flags describe; None where they describe a chain."""
    flags = asked.engine.flags if asked.engine is not None else {}
    topk, tokens = flags.get("speculative_eagle_topk"), flags.get("speculative_num_draft_tokens")
    if asked.accept_length is None or topk in (None, 1) or tokens is None:
        return None
    tied = connect(known.checkpoint, kit.target, wiring)
    counts = []
    for text in texts:
        aux = torch.cat([text.states[k].float() for k in tied.states], -1)
        trees = tied.trees(
            text.ids, aux, text.rows, steps=asked.steps, topk=int(topk), draft_tokens=int(tokens)
        )
        truths = text.truths[truth]
        judged = judge_trees(trees, text.rows, text.ids, text.mask, truths, tied.drafter.t2d)
        found = count_trees(judged)
        name = next(
            (n for n in found if n.startswith("accept_length") and "uniform" not in n), None
        )
        if name is None:
            return None
        counts.append({"accept_length": found[name]})
    return Scored(
        wiring=wiring, counts=counts, truth=truth, steps=asked.steps, seed=asked.seed
    ).accept_length

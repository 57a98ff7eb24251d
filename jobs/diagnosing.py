"""From a question to a diagnosis: the search, and the answer that it leads to.

What is measured around the search is in `jobs.measuring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle3.checkpoint import DrafterCheckpoint
from eagle3.data.form import DataForm
from eagle3.diagnosis import measure
from eagle3.diagnosis.answer import Diagnosis
from eagle3.diagnosis.beyond import is_low as is_low_alone
from eagle3.diagnosis.causes import matters
from eagle3.diagnosis.damage import broken, least_accuracy
from eagle3.diagnosis.evidence import Evidence
from eagle3.diagnosis.verdict import diagnose
from eagle3.errors import BadInput
from eagle3.search.score import Scorer
from eagle3.search.search import Searched
from eagle3.search.texts import Text
from jobs.measuring import Matter, measured
from jobs.neighbours import better_neighbour, missing_beside, neighbours, with_made
from jobs.question import Asked, Kit, Progress, inspect, read, texts_of
from jobs.reference import candidates, with_end
from jobs.remaking import can_be_made, with_remade, without_lost
from jobs.searching import data_order, search_texts
from jobs.served_live import Server, heard

FEW_TEXTS = 16  # that tell whether a state beside those that were found is worth a look
DOUBT = 0.05  # how far an agreement may be off on so few
BEHIND = 0.01  # by how much the right state may be behind on so few, by chance
PLAIN = (
    0.02  # by how much that of a drafter that does not work rises with the right state, and more
)


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


def diagnose_folder(
    asked: Asked, kit: Kit, progress: Progress = lambda *_: None, server: Server | None = None
) -> Answer:
    """The answer to one question, for which a running `server` is asked as well.

    Raises BadInput for what cannot be read, naming it.
    """
    known = read(asked, kit)
    if server is not None:
        asked, known = heard(server, asked, known, kit, progress)
    inspected, form, ran = inspect(asked, kit, known)
    texts, digest, left_out, more = texts_of(asked, kit, known, form, ran, progress)
    more = (*asked.heard.notes, *more) if asked.heard is not None else more
    texts = with_end(texts, form, inspected, kit.target)
    matter = Matter(
        asked=asked, kit=kit, known=known, form=form, inspected=inspected, texts=tuple(texts)
    )
    if inspected.shift:
        matter, evidence = of_shifted(matter, ran, progress)
        texts = list(matter.texts)
    elif can_be_made(inspected, ran):
        matter, evidence = of_lost(matter, progress)
        texts = list(matter.texts)
    else:
        evidence = gather(matter, progress)
    beside = with_neighbours(matter, evidence, ran) if asked.neighbours else None
    if beside is not None:
        more_texts, made = beside
        wide = replace(matter, texts=tuple(more_texts))
        wider = wider_search(wide, made, evidence, progress)
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


def aligned(m: Matter, layers: int, progress: Progress) -> Matter:
    """The same with each row of the data at the position whose states it holds."""
    shift, slots = m.inspected.shift, m.inspected.slots
    in_place = {slot.index for slot in slots if slot.in_place}
    texts, *_ = texts_of(
        m.asked,
        m.kit,
        m.known,
        m.form,
        layers,
        progress,
        shift=shift,
        in_place=in_place,
        in_answer=m.inspected.in_answer,
    )
    inspected = replace(m.inspected, aligned=True)
    return replace(
        m, inspected=inspected, texts=tuple(with_end(texts, m.form, inspected, m.kit.target))
    )


def of_shifted(m: Matter, layers: int, progress: Progress) -> tuple[Matter, Evidence]:
    """Data whose rows lag, each row at its position; as stored where the drafter does not work so, or
    works better on what is stored, with what a search finds there.

    As stored, the choices made of the target's end may never go on with the text, so that nothing can
    be counted against them.
    """
    mended = aligned(m, layers, progress)
    moved = gather(mended, progress)
    if not broken(moved) and not better_as_stored(m, moved):
        return mended, moved
    try:
        as_stored = gather(m, progress)
    except BadInput:
        return mended, moved
    return (mended, moved) if works_better(moved, as_stored) else (m, as_stored)


def of_lost(m: Matter, progress: Progress) -> tuple[Matter, Evidence]:
    """Data with slots that hold no state of the target, on the states that the target makes; as stored
    where it cannot be run over all texts, where the drafter does not work on those, or works better on
    what is stored.
    """
    try:
        texts = with_remade(m.kit.layers, m.texts, m.inspected)
    except BadInput:
        return m, gather(m, progress)
    made = replace(
        m,
        texts=tuple(texts),
        form=without_lost(m.form, m.inspected),
        inspected=replace(m.inspected, remade=True),
    )
    found = gather(made, progress)
    if broken(found) or better_as_stored(m, found):
        return m, gather(m, progress)
    return made, found


def better_as_stored(m: Matter, found: Evidence) -> bool:
    """Whether what was found on states that were made, or moved, does better on the stored ones.

    One that needs none of those does equally well, and nothing is learnt by a search on what is stored.
    """
    scorer = scorer_of(m, found, m.texts)
    wiring = found.trained.wiring
    if scorer.why_not(wiring) is not None:
        return False
    stored = measure.scored(scorer, wiring, found.trained.truth, m.asked.seed)
    return stored.accuracy.value > found.trained.accuracy.value


def scorer_of(m: Matter, found: Evidence, texts: Sequence[Text]) -> Scorer:
    """Scores what was found, with the table that it was found with."""
    table = measure.mended_table(m.known.checkpoint) if found.mended else None
    return Scorer(table or m.known.checkpoint, m.kit.target, texts, steps=m.asked.steps)


def works_better(one: Evidence, other: Evidence) -> bool:
    """Whether the drafter is that of this evidence rather than of the other's data."""
    if broken(one):
        return False
    return bool(broken(other)) or one.trained.accuracy.value > other.trained.accuracy.value


def is_low(e: Evidence) -> bool:
    """Whether what the search found may be a state beside the right one."""
    return bool(broken(e)) or is_low_alone(e)


def with_neighbours(
    m: Matter, e: Evidence, layers: int
) -> tuple[list[Text], tuple[int, ...]] | None:
    """The texts with the states beside those that were found, where the target's first `layers` make
    them, and which these are; None where none is worth a look.

    A few texts tell, before the others' are made.
    """
    if not is_low(e) or "states" in m.asked.fixed or "states" in m.asked.only:
        return None
    found = {*e.trained.wiring.states(), *e.declared.states()}
    missing = missing_beside(found, m.texts, layers)
    stride = -(-len(m.texts) // FEW_TEXTS)
    few = with_made(m.kit.layers, m.texts[::stride], missing)
    if not may_be_beside(m, e, few, missing):
        return None
    others = [text for i, text in enumerate(m.texts) if i % stride]
    rest = iter(with_made(m.kit.layers, others, missing))
    return [
        few[i // stride] if i % stride == 0 else next(rest) for i in range(len(m.texts))
    ], missing


def may_be_beside(m: Matter, e: Evidence, few: Sequence[Text], made: Sequence[int]) -> bool:
    """Whether it is worth while to make the states beside those that were found for all texts.

    With one of them a drafter that does not work has to be plainly better on the few, and to come near
    to working; one that works has to be right as often as it is without, but for chance.
    """
    others = neighbours(e.trained.wiring, made)
    if not others:
        return False
    scorer = scorer_of(m, e, few)
    teacher = e.searched.teacher.name
    own, *rights = scorer.rights([e.trained.wiring, *others], range(len(few)), teacher).sum(1)
    best = float(max(rights) - own)
    total = float(scorer.positions(range(len(few)), teacher).sum())
    if not broken(e):
        return best >= -BEHIND * total
    return best >= PLAIN * total and float(max(rights)) >= (least_accuracy(e) - DOUBT) * total


def wider_search(
    m: Matter, made: Sequence[int], before: Evidence, progress: Progress
) -> Evidence | None:
    """The evidence with one of the states replaced by its neighbour, where that is clearly better."""
    asked = m.asked
    if not made:
        return None
    leader = better_neighbour(
        scorer_of(m, before, m.texts),
        before.trained.wiring,
        made,
        teacher=before.searched.teacher.name,
        tried=before.searched.scored,
        seed=asked.seed,
        least=least_accuracy(before),
    )
    if leader is None:
        return None
    # From there everything is asked again.
    return gather(replace(m, asked=replace(asked, start=leader)), progress)


def gather(m: Matter, progress: Progress) -> Evidence:
    """Search, and measure what the conclusions rest on.

    A d2t that cannot be right beside t2d is made again from it; only where that helps nothing it is
    taken as it is. So is one made again with which the drafter does not work, or only by another head
    or reading than it declares, where that is clearly better.
    """
    checkpoint = m.known.checkpoint
    table = measure.mended_table(checkpoint)
    wrong = table is not None and measure.is_wrong_table(checkpoint)
    remade = of_table(m, table, progress) if table is not None and wrong else None
    if remade is not None:
        return remade
    whole = measured(m, *searching(m, checkpoint, progress))
    moved = {"head", "d2t"} & set(m.known.declared.differing(whole.trained.wiring))
    if table is None or wrong or not (moved or broken(whole)):
        return whole
    remade = of_table(m, table, progress)
    if remade is None or not matters(remade.trained, whole.trained, remade.searched.scored):
        return whole
    return remade


def of_table(m: Matter, table: DrafterCheckpoint, progress: Progress) -> Evidence | None:
    """The evidence with another d2t than the file's; None where the drafter does not work with it, or
    does as well with the file's.
    """
    again, scorer = searching(m, table, progress)
    file = Scorer(m.known.checkpoint, m.kit.target, m.texts, steps=m.asked.steps)
    remade = measured(
        replace(m, known=replace(m.known, checkpoint=table)), again, scorer, file=file
    )
    if broken(remade) or not matters(remade.trained, remade.mended[0].as_it_is, again.scored):
        return None
    return remade


def searching(
    m: Matter, checkpoint: DrafterCheckpoint, progress: Progress
) -> tuple[Searched, Scorer]:
    """The search from what is stated, declared and served, and from the data's own order."""
    known = m.known
    served = known.served.wiring if known.served is not None else None
    starts = (m.asked.start, known.declared, served, data_order(known.declared, m.form))
    return search_texts(
        m.asked,
        checkpoint,
        m.kit.target,
        m.texts,
        starts=[start for start in starts if start is not None],
        teachers=candidates(m.form, m.kit.target, m.texts, m.inspected),
        progress=progress,
    )

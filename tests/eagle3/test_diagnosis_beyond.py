"""Teacher, slots, vocabulary, training, parts and engine are causes only where the figures say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3.diagnosis.beyond import DECENT
from eagle3.diagnosis.causes import comparisons_of
from eagle3.diagnosis.damage import BESIDE_BIGRAM, USELESS
from eagle3.diagnosis.evidence import Health, Inspected, Part, SlotSeen, chunk_name
from eagle3.diagnosis.verdict import diagnose
from eagle3.metrics import Difference
from eagle3.wiring import Head, HeadInput, Token
from tests.eagle3.diagnosed import (
    DEAD,
    ENGINE,
    GOOD,
    POOR,
    SLOT3,
    STEPS,
    S,
    T,
    evidence,
    form,
    part,
    scored,
    slots,
    wiring,
)


def kinds(e):
    return [cause.kind for cause in diagnose(e).causes]


def test_another_teacher_than_the_target_is_named_with_what_is_left():
    trained, learnt = scored(T, POOR), scored(T, GOOD, truth=SLOT3.name)
    d = diagnose(evidence(trained, teacher=SLOT3, by_teacher=learnt))
    (cause,) = d.causes
    assert cause.kind == "teacher"
    # Each agreement by its name; no accept length of one truth is set beside one of another.
    assert "state 59 of the data does (agreement 0.756)" in cause.what
    assert "as the target's own choice (0.300)" in cause.what
    assert f"accept length {trained.accept_length.value:.2f}" in cause.what
    assert "agrees with the target's own choice at 0.400" in cause.what
    assert cause.cost is None
    assert not cause.fixes[0].possible


def test_a_teacher_slot_that_the_drafter_was_not_trained_on_is_no_cause():
    assert kinds(evidence(scored(T, GOOD))) == []


def test_a_teacher_that_says_nearly_what_the_target_says_is_no_cause():
    trained, learnt = scored(T, POOR), scored(T, GOOD, truth=SLOT3.name)
    e = evidence(trained, teacher=SLOT3, by_teacher=learnt)
    score = e.searched.teachers[0]
    assert score.agreement is not None
    near = replace(score, agreement=replace(score.agreement, value=0.97, low=0.95, high=0.98))
    e = replace(e, searched=replace(e.searched, teachers=(near, *e.searched.teachers[1:])))
    assert "teacher" not in kinds(e)


def test_slots_that_are_not_what_is_declared():
    wrong = (
        SlotSeen(index=0, declared=3, found=(0,), verdict="contradicted", what=""),
        SlotSeen(index=1, declared=0, found=(3,), verdict="contradicted", what=""),
        *slots()[2:],
    )
    as_declared = scored(wiring(3, 0, 31), POOR)
    d = diagnose(
        evidence(
            scored(T, GOOD),
            inspected=Inspected(slots=wrong, findings=(), notes=(), as_declared=as_declared),
        )
    )
    (cause,) = d.causes
    assert cause.kind == "slots"
    assert cause.fixes[0].lines == ("states=[0,3,31,59] (in a config: data.states)",)
    # The labels are wrong, and nothing that is served.
    assert cause.cost is None
    assert (
        f"fed as labelled it would accept {as_declared.accept_length.value:.2f}" in cause.evidence
    )
    assert cause.what.endswith("; SGLang 0.5.12, class kimi_k25 feeds what it was trained on")


def test_a_slot_of_no_state_of_this_target_has_to_be_captured_again():
    wrong = (
        *slots()[:2],
        SlotSeen(index=2, declared=31, found=(), verdict="contradicted", what=""),
        slots()[3],
    )
    d = diagnose(evidence(scored(T, GOOD), inspected=Inspected(slots=wrong, findings=(), notes=())))
    assert d.causes[0].kind == "slots"
    assert not d.causes[0].fixes[0].possible


def test_shifted_states_are_the_data_and_not_the_token():
    shifted = replace(T, token=Token.same)
    so = scored(T, DEAD)
    e = evidence(
        scored(shifted, GOOD),
        wrong=so,
        alone={"token": so},
        inspected=Inspected(slots=slots("as declared"), findings=(), notes=(), shift=1),
    )
    assert kinds(e) == ["slots"]


def test_a_small_vocabulary_is_a_ceiling():
    low = scored(T, (0.45, 0.5, 0.5, 0.5), coverage=0.7)
    d = diagnose(evidence(low, trained_accuracy=0.77))
    assert [c.kind for c in d.causes] == ["coverage"]
    assert f"{low.coverage.value:.3f}" in d.causes[0].what
    assert not d.causes[0].fixes[0].possible


def test_a_vocabulary_of_tokens_drawn_at_random_is_a_ceiling_or_another_tokenizers():
    """The latter where the drafter's own head does not go with it."""
    share = form().draft_vocab.value / form().vocab.value
    curve = (0.45, 0.5, 0.5, 0.5)
    assert kinds(evidence(scored(T, curve, coverage=share))) == ["coverage"]
    theirs = scored(wiring(head=Head.target), curve, coverage=share)
    wrong = scored(T, DEAD)
    d = diagnose(evidence(theirs, wrong=wrong, alone={"head": wrong}))
    assert [c.kind for c in d.causes] == ["unknown"]
    assert "drawn at random" in d.causes[0].what
    better = scored(wiring(head=Head.target), curve, coverage=share + 0.4 * (1 - share))
    assert kinds(evidence(better, wrong=wrong, alone={"head": wrong}))[0] == "head"


def test_a_drafter_far_below_its_ceiling_is_not_excused_by_it():
    low = scored(T, (0.27, 0.4, 0.4, 0.4), coverage=0.7)
    assert kinds(evidence(low)) == ["under-trained"]


def test_under_trained_is_said_where_every_part_works():
    low = scored(T, (DECENT - 0.1, 0.45, 0.45, 0.45))
    d = diagnose(evidence(low, trained_accuracy=0.42))
    (cause,) = d.causes
    assert cause.kind == "under-trained"
    assert cause.confidence == "likely"
    assert "log says the same" in cause.what


def test_under_trained_stands_behind_a_cause_that_was_found():
    low, wrong = scored(T, (0.4, 0.45, 0.45, 0.45)), scored(S, DEAD)
    e = evidence(low, wrong=wrong, alone={"states": wrong})
    d = diagnose(e)
    assert [c.kind for c in d.causes] == ["states", "under-trained"]
    assert d.causes[1].confidence == "possible"


@pytest.mark.parametrize("share", [USELESS - 0.05, -0.3])
def test_a_part_that_does_no_work_makes_it_unknown_whatever_helps_a_little(share):
    trained, wrong = scored(T, (0.35, 0.4, 0.4, 0.4)), scored(S, (0.25, 0.3, 0.3, 0.3))
    parts = (part("the attention", 0.9, of=trained), part("the MLP", share, of=trained))
    d = diagnose(
        evidence(
            trained,
            wrong=wrong,
            alone={"states": wrong},
            health=Health(bigram=0.18, parts=parts),
        )
    )
    assert d.verdict == "unknown"
    assert [c.kind for c in d.causes] == ["unknown"]
    assert "not among the causes I know" in d.first_lines()[0]
    assert any("still broken" in note for note in d.notes)
    assert d.elsewhere == ()


def test_one_of_several_parts_may_do_little_but_no_harm():
    good = scored(T, GOOD)
    little = part("chunk 0 of fc", 0.0, of=good, single=True)
    harm = part("chunk 0 of fc", -0.2, of=good, single=True)
    works = (part("the attention", 0.9, of=good), part("the MLP", 0.4, of=good))
    assert kinds(evidence(good, health=Health(bigram=0.18, parts=(*works, little)))) == []
    assert kinds(evidence(good, health=Health(bigram=0.18, parts=(*works, harm)))) == ["unknown"]


def lossy(part: Part, value: float) -> Part:
    """The part with what cross-entropy says of it, closely."""
    return replace(part, loss=Difference(value=value, low=value - 0.002, high=value + 0.002))


def test_cross_entropy_tells_a_part_that_works_a_little_from_one_that_does_not():
    early = scored(T, (0.35, 0.4, 0.4, 0.4))
    works, little = part("the attention", 0.9, of=early), part("the MLP", 0.05, of=early)
    for loss, wanted in ((0.1, ["under-trained"]), (0.001, ["unknown"]), (-0.1, ["unknown"])):
        health = Health(bigram=0.18, parts=(works, lossy(little, loss)))
        assert kinds(evidence(early, health=health)) == wanted, loss


def test_states_of_which_nothing_is_made_are_not_what_was_trained():
    """One chunk is damaged: the search finds the state that does the least harm there."""
    trained = scored(T, (0.35, 0.4, 0.4, 0.4))
    other = scored(wiring(0, 3, 58), DEAD)
    works = [part(chunk_name(j), 0.3, of=trained, single=True) for j in (0, 1)]
    last = part(chunk_name(2), 0.0, of=trained, single=True)
    e = evidence(trained, wrong=other, alone={"states": other})
    for loss, wanted in ((0.1, ["states", "under-trained"]), (0.001, ["unknown"])):
        parts = (part("the attention", 0.9, of=trained), *works, lossy(last, loss))
        assert kinds(replace(e, health=Health(bigram=0.18, parts=parts))) == wanted, loss
    # Where another place differs as well and works, the states are believed.
    both = scored(wiring(9, 3, 58), DEAD)
    e = evidence(trained, wrong=both, alone={"states": both})
    health = Health(bigram=0.18, parts=(*works, lossy(last, 0.001)))
    assert kinds(replace(e, health=health)) == ["states", "under-trained"]


def test_a_trained_norm_is_damaged_where_the_drafter_is_clearly_better_without_it():
    trained = scored(wiring(head_input=HeadInput.raw), GOOD)
    e = evidence(trained)
    left = replace(e.health, left_out="the last norm harms although it was trained")
    # Nobody runs it with that norm, and where somebody does it costs nothing: no sign of damage.
    for so, wanted in ((None, []), (scored(T, GOOD), []), (scored(T, DEAD), ["unknown"])):
        alone = {} if so is None else {"head-input": so}
        made = evidence(trained, wrong=so, alone=alone, health=left)
        d = diagnose(made)
        assert [c.kind for c in d.causes] == wanted
        assert not wanted or "the last norm harms" in d.causes[0].what


def test_states_are_no_damage_where_the_texts_are_too_few_to_show_that_a_chunk_idles():
    trained = scored(T, (0.35, 0.4, 0.4, 0.4))
    other = scored(wiring(0, 3, 58), DEAD)
    e = evidence(trained, wrong=other, alone={"states": other})
    idle = part(chunk_name(2), 0.0, of=trained, single=True)
    wide = replace(
        idle,
        worth=Difference(value=0.0, low=-0.1, high=0.1),
        loss=Difference(value=0.0, low=-0.2, high=0.2),
    )
    for last, wanted in ((lossy(idle, 0.0), ["unknown"]), (wide, ["states", "under-trained"])):
        parts = (part("the attention", 0.9, of=trained), last)
        assert kinds(replace(e, health=Health(bigram=0.18, parts=parts))) == wanted


def test_a_dead_wiring_that_scores_higher_leaves_a_broken_drafter_unknown():
    """One that works and scores higher says that the search ended beside the right wiring."""
    dead, alive = scored(S, (0.2, 0.2, 0.2, 0.2)), scored(S, GOOD)
    for other, wanted in ((dead, "unknown"), (alive, "undecided")):
        e = evidence(scored(T, (0.15, 0.1, 0.1, 0.1)), wrong=other, alone={"states": other})
        assert diagnose(e).verdict == wanted


def test_what_shows_behind_the_first_step_alone_is_corrected_for_what_was_compared_there():
    e = evidence(scored(T, GOOD))
    assert e.searched.drafted < e.searched.scored
    assert comparisons_of(e, "feedback") == comparisons_of(e, "positions") == e.searched.drafted
    assert comparisons_of(e, "residual") == comparisons_of(e) == e.searched.scored


def test_a_drafter_that_knows_no_more_than_pairs_of_tokens_is_unknown():
    dead = scored(T, (0.2, 0.1, 0.1, 0.1))
    e = evidence(dead)
    assert dead.accuracy.value < BESIDE_BIGRAM * e.health.bigram
    assert kinds(e) == ["unknown"]


def test_a_log_that_is_far_from_reached_is_unknown_behind_what_was_found():
    trained, wrong = scored(T, (0.55, 0.6, 0.6, 0.6)), scored(S, DEAD)
    alone = {"states": wrong}
    assert kinds(evidence(trained, trained_accuracy=0.8)) == ["unknown"]
    assert kinds(evidence(trained, trained_accuracy=0.6)) == []
    found = evidence(trained, wrong=wrong, alone=alone, trained_accuracy=0.8)
    assert kinds(found) == ["states", "unknown"]


def measured(length, flags=None, **changed):
    asked = replace(ENGINE, flags={"num_steps": STEPS} if flags is None else flags)
    return evidence(scored(T, GOOD), engine_accept_length=length, asked=asked, **changed)


def test_figures_behind_the_engine():
    predicted = scored(T, GOOD).accept_length.value
    assert kinds(measured(predicted + 0.05)) == []
    assert kinds(measured(1 + (predicted - 1) / 2)) == ["engine-state"]
    assert kinds(measured(predicted + 0.7)) == ["measurement"]
    tree = replace(scored(T, GOOD).accept_length, value=3.9, low=3.8, high=4.0)
    (cause,) = diagnose(measured(3.9, tree=tree)).causes
    assert cause.confidence == "likely"
    assert "tree" in cause.what


def test_a_figure_that_two_readings_explain_is_one_cause_with_the_other_in_its_words():
    predicted = scored(T, GOOD).accept_length.value
    (bonus,) = diagnose(measured(predicted - 1)).causes
    assert bonus.kind == "measurement"
    assert "bonus token" in bonus.what
    assert "loses the rest" in bonus.what
    (state,) = diagnose(measured(predicted - 0.95)).causes
    assert state.kind == "engine-state"
    assert "leaves the bonus token out" in state.what
    for cause in (bonus, state):
        assert {fix.evidence for fix in cause.fixes} == {"inferred"}


def test_figures_of_other_chains_are_not_compared():
    for flags in (
        {"speculative_num_steps": 3},
        {"--speculative-num-steps": 3},
        {"num_steps": 3, "topk": 1},
        {"num_speculative_tokens": 3},
        {"speculative_config": {"num_speculative_tokens": 3}},
    ):
        d = diagnose(measured(1.2, flags))
        assert d.causes == ()
        assert any("job.steps=3" in line for line in d.undecided), flags
        # Whoever gave the figure sees at once that it decided nothing, and why.
        lines = d.first_lines()
        assert any("own 1.20 is not compared: the engine drafts 3 steps" in line for line in lines)


def test_without_the_engine_s_steps_only_what_no_steps_explain_is_a_cause():
    one = 1 + scored(T, GOOD).accuracy.value
    for length in (one, 2.2, 5.0):
        d = diagnose(measured(length, {}))
        assert d.causes == ()
        assert any("how many steps" in line for line in d.undecided), length
    assert kinds(measured(one - 0.3, {})) == ["engine-state"]
    # Where no step behind the first gains anything, how many there are makes no difference.
    dead = scored(S, (0.04, 0.02, 0.0, 0.0))
    e = measured(1.05, {}, wrong=dead, alone={"states": dead})
    assert diagnose(e).engine_figure is None


# The target's end as the reference, and texts that the target did not write.


def end_slots(verdict="as declared"):
    return (*slots()[:3], SlotSeen(index=3, declared=61, found=(), verdict=verdict, what=""))


def test_a_slot_with_the_target_s_last_state_is_no_other_teacher():
    trained, learnt = scored(T, POOR), scored(T, GOOD, truth=SLOT3.name)
    end = Inspected(slots=end_slots(), findings=(), notes=())
    e = evidence(trained, teacher=SLOT3, by_teacher=learnt)
    assert kinds(e) == ["teacher"]
    assert "teacher" not in kinds(replace(e, inspected=end))
    twice = replace(SLOT3, norms=2)
    score = replace(e.searched.teachers[0], teacher=twice)
    again = replace(e.searched, teacher=twice, teachers=(score, *e.searched.teachers[1:]))
    assert kinds(replace(e, inspected=end, searched=again)) == ["teacher"]


def test_an_end_that_is_only_declared_is_said_to_be():
    trained = scored(T, GOOD, truth="stored_teacher")
    e = evidence(trained, inspected=Inspected(slots=end_slots(), findings=(), notes=()))
    d = diagnose(e)
    assert any("declared state 61 is the target's end" in line for line in d.undecided)
    assert "made of its last state in the data" in d.confidence
    assert d.confidence.startswith("likely")


@pytest.mark.parametrize("why", ["text", "follows"])
def test_a_text_that_the_target_did_not_write_makes_no_drafter_under_trained(why):
    low = scored(T, POOR, truth="next_token" if why == "text" else "target_argmax")
    follows = replace(low.accuracy, value=0.3, low=0.25, high=0.35) if why == "follows" else None
    e = evidence(low, trained_accuracy=0.74, follows=follows)
    d = diagnose(e)
    assert d.verdict == "sound"
    assert any("whether the drafter is under-trained" in line for line in d.undecided)
    assert any("whether the training log's 0.740" in line for line in d.undecided)
    own = evidence(scored(T, POOR), trained_accuracy=0.74)
    assert kinds(own) == ["unknown"]  # by the log it was trained enough


def test_the_log_is_held_against_the_trainer_s_own_teacher():
    trained, learnt = scored(T, POOR), scored(T, GOOD, truth=SLOT3.name)
    e = evidence(trained, teacher=SLOT3, by_teacher=learnt, trained_accuracy=0.74)
    assert kinds(e) == ["teacher"]


def test_beside_a_text_only_a_teacher_that_is_agreed_with_decently_is_one():
    text = scored(T, (0.2, 0.4, 0.4, 0.4), truth="next_token")
    near = scored(T, (0.35, 0.4, 0.4, 0.4), truth=SLOT3.name)
    far = scored(T, GOOD, truth=SLOT3.name)
    e = evidence(text, teacher=SLOT3, by_teacher=near)
    assert "teacher" not in kinds(replace(e, health=Health(bigram=0.1, parts=e.health.parts)))
    assert "teacher" in kinds(evidence(text, teacher=SLOT3, by_teacher=far))


def test_a_teacher_of_whose_tokens_the_vocabulary_only_has_more_was_not_learnt():
    target = scored(T, (0.53, 0.7, 0.7, 0.7), coverage=0.71)
    less = scored(T, (0.53, 0.7, 0.7, 0.7), coverage=0.6, truth=SLOT3.name)
    assert "teacher" in kinds(evidence(target, teacher=SLOT3, by_teacher=less))
    for coverage, wanted in ((0.76, ["coverage"]), (0.71, ["teacher", "coverage"])):
        learnt = scored(T, (0.57, 0.7, 0.7, 0.7), coverage=coverage, truth=SLOT3.name)
        assert kinds(evidence(target, teacher=SLOT3, by_teacher=learnt)) == wanted


# Order of the causes, and what is said once.


def test_the_teacher_stands_first_where_it_limits_most_and_else_behind_what_lines_mend():
    learnt = scored(T, GOOD, truth=SLOT3.name)
    for level, first in ((POOR, "teacher"), ((0.62, 0.7, 0.7, 0.7), "states")):
        trained, wrong = scored(T, level), scored(S, DEAD)
        e = evidence(
            trained, wrong=wrong, alone={"states": wrong}, teacher=SLOT3, by_teacher=learnt
        )
        assert kinds(e) == [first, *({"teacher", "states"} - {first})]


def test_slots_and_order_that_say_the_same_are_one_cause():
    wrong = tuple(
        SlotSeen(index=i, declared=k, found=(s,), verdict="contradicted", what="")
        for i, (k, s) in enumerate(((3, 0), (31, 3), (0, 31)))
    )
    inspected = Inspected(slots=(*wrong, slots()[3]), findings=(), notes=())
    assert inspected.labelled((0, 3, 31)) == (3, 31, 0)
    so = scored(wiring(3, 31, 0), DEAD)
    alone = {"order": so}
    e = evidence(scored(T, GOOD), wrong=so, alone=alone, engine=False, inspected=inspected)
    assert kinds(e) == ["slots"]
    # Another order than the labels' is a fault of its own.
    other = scored(wiring(31, 0, 3), DEAD)
    e = evidence(
        scored(T, GOOD), wrong=other, alone={"order": other}, engine=False, inspected=inspected
    )
    assert set(kinds(e)) == {"slots", "order"}


def test_states_that_only_the_labels_call_otherwise_are_one_cause_with_the_slots():
    wrong = SlotSeen(index=2, declared=30, found=(31,), verdict="contradicted", what="")
    seen = Inspected(slots=(*slots()[:2], wrong, slots()[3]), findings=(), notes=())
    so = scored(wiring(0, 3, 30), POOR)
    e = evidence(scored(T, GOOD), wrong=so, alone={"states": so}, inspected=seen, engine=False)
    assert kinds(e) == ["slots"]
    # An engine that goes by the labels is not mended by other labels.
    behind = evidence(scored(T, GOOD), wrong=so, alone={"states": so}, inspected=seen)
    assert set(kinds(behind)) == {"slots", "states"}
    d = diagnose(behind)
    (states,) = (c for c in d.causes if c.kind == "states")
    assert any("[-1, 2, 30]" in line for line in states.fixes[0].lines)
    assert d.elsewhere


# Training, parts.


def test_under_trained_is_level_and_shows_its_curve_and_the_engine_beside_it():
    low = scored(T, (0.4, 0.45, 0.45, 0.45))
    asked = replace(ENGINE, flags={"num_steps": STEPS})
    reported = evidence(low, engine_accept_length=low.accept_length.value, asked=asked)
    (cause,) = diagnose(reported).causes
    assert "level over the draft steps (0.40, 0.44" in cause.what
    assert "is as standalone" in cause.what
    assert cause.confidence == "likely"
    elsewhere = evidence(low, engine_accept_length=1.9, as_served=None, why_not_served="no states")
    said = next(c.what for c in diagnose(elsewhere).causes if c.kind == "under-trained")
    assert "the engine's own 1.90 is not compared" in said
    steep = scored(T, (0.45, 0.28, 0.2, 0.2))
    d = diagnose(evidence(steep))
    assert d.causes == ()
    assert any("draft steps are not level" in line for line in d.undecided)


def test_under_trained_beside_an_engine_that_gives_less_is_only_possible():
    low = scored(T, (0.4, 0.45, 0.45, 0.45))
    d = diagnose(evidence(low, engine_accept_length=1.05))
    assert [c.kind for c in d.causes] == ["under-trained", "engine-state"]
    assert "is not as standalone" in d.causes[0].what
    assert d.causes[0].confidence == "possible"


def test_a_part_is_only_idle_where_the_interval_says_so():
    good = scored(T, GOOD)
    works = part("the attention", 0.9, of=good)
    idle = part("the MLP", 0.05, of=good)
    wide = replace(idle, worth=replace(idle.worth, low=-0.3, high=0.4))
    assert kinds(evidence(good, health=Health(bigram=0.18, parts=(works, idle)))) == ["unknown"]
    assert kinds(evidence(good, health=Health(bigram=0.18, parts=(works, wide)))) == []


def test_what_was_not_shown_to_help_is_inferred():
    for e in (
        measured(1.3),
        evidence(scored(T, (0.4, 0.45, 0.45, 0.45))),
        evidence(scored(T, DEAD)),
    ):
        for cause in diagnose(e).causes:
            assert {fix.evidence for fix in cause.fixes} <= {"run", "read", "inferred"}

"""Each verdict from evidence made by hand; the figures follow from the curves that were put in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3.diagnosis.beyond import BESIDE_BIGRAM, DECENT, USELESS
from eagle3.diagnosis.causes import kinds_between, with_part_of
from eagle3.diagnosis.evidence import Health, Inspected, SlotSeen
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.kinds import KINDS, WIRING, kind_of, switch_of
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.metrics import Count
from eagle3.wiring import D2T, SWITCHES, Feedback, Residual, RopeChoice, Token
from tests.eagle3.diagnosed import (
    GOOD,
    LAB,
    SLOT3,
    evidence,
    part,
    ranked,
    scored,
    served,
    slots,
    wiring,
)

T = wiring(0, 3, 31)
S = wiring(3, 31, 59)
DEAD = (0.03, 0.0, 0.0, 0.0)
POOR = (0.3, 0.4, 0.4, 0.4)


def kinds(e):
    return [cause.kind for cause in diagnose(e).causes]


def test_every_switch_has_a_kind_and_the_kinds_lead_back():
    for name in SWITCHES:
        assert kind_of(name) in WIRING
        assert switch_of(kind_of(name)) == name
    assert switch_of("order") == switch_of("states") == "states"
    assert switch_of("teacher") is None
    assert set(WIRING) < set(KINDS)


def test_states_and_their_order_are_two_kinds():
    assert kinds_between(T, S) == ("states",)
    assert kinds_between(T, wiring(31, 0, 3)) == ("order",)
    other = wiring(0, 3, 31, d2t=D2T.absolute, residual=Residual.normed)
    assert kinds_between(T, other) == ("d2t", "residual")
    assert with_part_of(T, other, "d2t").d2t is D2T.absolute
    assert with_part_of(T, S, "states") == S
    assert with_part_of(T, S, "states").residual is T.residual


def test_other_states_are_the_cause_with_what_they_cost():
    trained, wrong = scored(T, GOOD), scored(S, DEAD)
    d = diagnose(evidence(trained, wrong=wrong, alone={"states": wrong}))
    assert d.verdict == "cause"
    (cause,) = d.causes
    assert cause.kind == "states"
    assert cause.what == "trained on states 0, 3 and 31; served states 3, 31 and 59"
    assert cause.cost is not None
    expected = trained.accept_length.value - wrong.accept_length.value
    assert cause.cost.difference.value == pytest.approx(expected)
    assert cause.confidence == "certain"
    assert any("-1, 2, 30" in line for fix in cause.fixes for line in fix.lines)
    assert d.accept_length_served == wrong.accept_length
    assert d.accept_length_repaired == trained.accept_length
    assert d.config is not None
    assert d.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 2, 30]
    assert d.config["vocab_size"] == 1024
    assert d.elsewhere


def test_several_causes_come_with_the_most_costly_first():
    both = wiring(3, 31, 59, residual=Residual.normed)
    trained = scored(T, GOOD)
    alone = {
        "states": scored(S, POOR),
        "residual": scored(wiring(0, 3, 31, residual=Residual.normed), (0.1, 0.2, 0.2, 0.2)),
    }
    assert kinds(evidence(trained, wrong=scored(both, DEAD), alone=alone)) == ["residual", "states"]


def test_a_difference_that_costs_nothing_is_a_note_and_no_cause():
    other = wiring(0, 3, 31, rope=RopeChoice.base_10000)
    other = replace(other, rope=RopeChoice.target)
    trained, so = scored(T, GOOD), scored(other, GOOD)
    d = diagnose(evidence(trained, wrong=so, alone={"rope": so}))
    assert d.verdict == "sound"
    assert d.causes == ()
    assert any(note.startswith("rope (") for note in d.notes)


def test_a_settled_loss_that_is_too_small_to_matter_is_no_cause():
    other = replace(T, feedback=Feedback.normed)
    trained = scored(T, GOOD)
    counts = []
    for i, text in enumerate(trained.counts):
        lost = text["accept_length"]
        # One token in every text: settled, but 0.02 of accept length.
        counts.append({**text, "accept_length": Count(lost.numerator - 1, lost.denominator)})
        assert i < 24
    so = replace(trained, wiring=other, counts=counts)
    assert kinds(evidence(trained, wrong=so, alone={"feedback": so})) == []


def test_a_loss_of_one_text_among_many_is_not_settled():
    other = replace(T, residual=Residual.normed)
    trained = scored(T, GOOD)
    counts = list(trained.counts)
    bad = scored(T, DEAD).counts[0]
    counts[0] = bad
    so = replace(trained, wiring=other, counts=counts)
    assert kinds(evidence(trained, wrong=so, alone={"residual": so})) == []


def test_what_the_drafter_learnt_shows_a_difference_that_the_target_hardly_does():
    wrong = scored(S, POOR)
    trained = scored(T, POOR)
    learnt = scored(T, GOOD, truth=SLOT3.name)
    e = evidence(
        trained,
        wrong=wrong,
        alone={"states": wrong},
        teacher=SLOT3,
        by_teacher=learnt,
        alone_by_teacher={"states": scored(S, POOR, truth=SLOT3.name)},
    )
    assert set(kinds(e)) == {"teacher", "states"}


def test_an_engine_that_does_not_start_is_told_with_its_problem():
    e = evidence(
        scored(T, GOOD),
        served=served(None, problems=("id -1 names no layer",)),
        as_served=None,
        why_not_served="the engine does not run it",
    )
    d = diagnose(e)
    assert [c.kind for c in d.causes] == ["states"]
    assert "id -1 names no layer" in d.causes[0].what
    assert d.accept_length_served is None
    assert "expected accept length: it does not start" in "\n".join(d.first_lines())


def test_a_layout_that_the_engine_does_not_load_is_copied_before_all_other_fixes():
    trained = scored(wiring(), GOOD)
    found = read_drafter(LAB / "drafter_speculators")[0].form
    config = json.loads((LAB / "drafter_speculators" / "config.json").read_text())
    stopped = served(None, problems=["config.json is in speculators' layout"])
    told = diagnose(evidence(trained, form=found, config=config, served=stopped))
    text = told.markdown()
    assert text.count("the flat layout") == 1
    assert text.index("## Before all other fixes") < text.index("## 1.")
    assert told.config is not None
    assert "transformer_layer_config" not in told.config
    assert told.plain()["before"]["engine"] == "SGLang 0.5.12, class kimi_k25"
    vllm = EngineAsked(name="vllm", version="0.27.0", engine_class="llama")
    assert diagnose(evidence(trained, form=found, config=config, asked=vllm)).before is None


def test_states_that_no_data_holds_are_a_cause_without_a_cost():
    e = evidence(
        scored(T, GOOD),
        wrong=scored(wiring(2, 30, 58), DEAD),
        not_alone={"states": "state 2, 30, 58 is not in the data"},
        as_served=None,
        why_not_served="state 2, 30, 58 is not in the data",
    )
    d = diagnose(e)
    assert d.causes[0].kind == "states"
    assert d.causes[0].cost is None
    assert d.causes[0].confidence == "likely"
    assert any("not in the data" in line for line in d.undecided)


def test_without_an_engine_what_config_json_declares_is_held_against_the_training():
    wrong = scored(S, DEAD)
    d = diagnose(evidence(scored(T, GOOD), wrong=wrong, alone={"states": wrong}, engine=False))
    assert d.causes[0].what == "trained on states 0, 3 and 31; declared states 3, 31 and 59"
    assert any("name the engine" in line for line in d.undecided)
    assert any("as declared" in line for line in d.first_lines())


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
    assert cause.fixes[0].lines == ("data.states=[0,3,31,59]",)
    assert cause.cost is not None
    assert cause.cost.accuracy_so == as_declared.accuracy


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
    low = scored(T, (0.45, 0.5, 0.5, 0.5), coverage=0.55)
    d = diagnose(evidence(low, trained_accuracy=0.77))
    assert [c.kind for c in d.causes] == ["coverage"]
    assert f"{low.coverage.value:.3f}" in d.causes[0].what
    assert not d.causes[0].fixes[0].possible


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


def measured(length, **changed):
    return evidence(scored(T, GOOD), engine_accept_length=length, **changed)


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
    e = measured(1.2)
    assert e.asked is not None
    asked = replace(e.asked, flags={"speculative_num_steps": 3})
    d = diagnose(replace(e, asked=asked))
    assert d.causes == ()
    assert any("job.steps=3" in line for line in d.undecided)


def test_what_ties_is_said_with_the_data_that_would_tell():
    trained = scored(T, GOOD)
    other = ranked(scored(replace(T, rope=RopeChoice.target), GOOD), tied=True)
    e = evidence(trained)
    e = replace(e, searched=replace(e.searched, ranked=(e.searched.best, other)))
    (line,) = [line for line in diagnose(e).undecided if line.startswith("rope")]
    assert "longer than 144 positions" in line


def test_slots_as_declared_and_the_text_alone_lower_the_confidence():
    wrong = scored(S, DEAD)
    e = evidence(scored(T, GOOD), wrong=wrong, alone={"states": wrong})
    unverified = replace(e, inspected=replace(e.inspected, slots=slots("as declared")))
    assert diagnose(unverified).confidence.startswith("likely")
    texts_only = replace(e, trained=replace(e.trained, truth="next_token"))
    d = diagnose(texts_only)
    assert d.confidence.startswith("likely")
    assert any("no target_argmax" in line for line in d.undecided)


def test_the_first_lines_hold_cause_fix_accept_length_and_confidence():
    both = wiring(3, 31, 59, residual=Residual.normed, d2t=D2T.absolute, token=Token.same)
    trained = scored(T, GOOD)
    names = ("states", "residual", "d2t", "token")
    alone = {kind: scored(with_part_of(T, both, kind), POOR) for kind in names}
    for e in (
        evidence(trained),
        evidence(trained, wrong=scored(both, DEAD), alone=alone),
        evidence(scored(T, DEAD), wrong=scored(both, DEAD), alone=alone),
    ):
        d = diagnose(e)
        lines = d.first_lines()
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 120
        assert any(line.startswith("expected accept length") for line in lines)
        assert any(line.startswith("confidence: ") for line in lines)
        for cause in d.causes[:2]:
            assert any(cause.kind in line for line in lines)
        assert d.markdown().splitlines()[: len(lines)] == lines
        assert json.loads(json.dumps(d.plain()))["first_lines"] == lines


# Too little data.


def better_as_declared(trained, wrong, **changed):
    return evidence(trained, wrong=wrong, alone={"states": wrong}, engine=False, **changed)


def test_a_declared_wiring_that_scores_higher_than_the_one_found_is_undecided():
    d = diagnose(better_as_declared(scored(S, (0.5, 0.6, 0.6, 0.6)), scored(T, GOOD)))
    assert d.verdict == "undecided"
    assert d.headline.startswith("undecided: too few texts (24 texts, ")
    assert "scores" in d.headline
    assert d.causes == ()
    assert d.elsewhere == ()
    assert d.config is None
    lines = d.first_lines()
    assert lines[0].startswith("undecided")
    assert any("as the search ended" in line for line in lines)
    assert d.confidence.startswith("possible")
    assert any("more texts" in line or "larger job.max_samples" in line for line in lines)


def test_a_search_that_ended_beside_the_right_wiring_is_no_unknown_drafter():
    dead = scored(S, (0.1, 0.0, 0.0, 0.0))
    assert kinds(evidence(dead)) == ["unknown"]
    d = diagnose(better_as_declared(dead, scored(T, GOOD)))
    assert d.verdict == "undecided"


def test_one_text_settles_nothing():
    one = replace(scored(T, GOOD), counts=scored(T, GOOD).counts[:1])
    assert diagnose(evidence(scored(T, GOOD))).verdict == "sound"
    assert diagnose(evidence(one)).verdict == "undecided"


def test_a_difference_that_few_texts_leave_open_is_undecided():
    trained, wrong = scored(T, GOOD), scored(S, (0.4, 0.5, 0.5, 0.5))
    counts = [
        {**so, "accept_length": mine["accept_length"]} if i % 2 else so
        for i, (so, mine) in enumerate(zip(wrong.counts, trained.counts, strict=True))
    ]
    few = replace(trained, counts=trained.counts[:2])
    so = replace(wrong, counts=counts[:2])
    assert diagnose(evidence(few, wrong=so, alone={"states": so})).verdict == "undecided"


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
    assert kinds(own) == ["unknown", "under-trained"]


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
    e = evidence(scored(T, GOOD), wrong=so, alone={"states": so}, inspected=seen)
    assert kinds(e) == ["slots"]


# Training, parts.


def test_under_trained_is_level_and_shows_its_curve_and_the_engine_beside_it():
    low = scored(T, (0.4, 0.45, 0.45, 0.45))
    (cause,) = diagnose(evidence(low, engine_accept_length=low.accept_length.value)).causes
    assert "level over the draft steps (0.40, 0.44" in cause.what
    assert "is as standalone" in cause.what
    assert cause.confidence == "likely"
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


# The first lines.


def exact(line, possible=True):
    return Fix(
        engine="SGLang 0.5.12, class kimi_k25",
        possible=possible,
        lines=(line,),
        left=None if possible else "patch models/x.py",
        evidence="read",
        needs="the embedding capture patch" if possible else None,
    )


def test_of_three_causes_each_fix_and_the_figures_are_visible():
    both = wiring(3, 31, 59, residual=Residual.normed, token=Token.same)
    trained, wrong = scored(T, GOOD), scored(both, DEAD)
    alone = {
        kind: scored(with_part_of(T, both, kind), POOR) for kind in ("states", "residual", "token")
    }
    d = diagnose(evidence(trained, wrong=wrong, alone=alone))
    line = '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}'
    causes = tuple(
        replace(c, what=f"{c.what} {'and more ' * 30}", fixes=(exact(line),)) for c in d.causes
    )
    mid = scored(both, POOR).accept_length
    ladder = (("states", wrong.accept_length), ("residual", mid), ("token", trained.accept_length))
    d = replace(d, causes=causes, ladder=ladder, states_alone=("states", wrong.accept_length))
    lines = d.first_lines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert sum(f"fix: {line} [read]" in said for said in lines) == 3
    (expected,) = [said for said in lines if said.startswith("expected accept length")]
    served, repaired = wrong.accept_length.value, trained.accept_length.value
    assert f"{served:.2f} as served → {repaired:.2f} [" in expected
    assert "after all fixes" in expected
    slow = (
        f"with states alone mended the accept length is {served:.2f}: serving stays slow [inferred]"
    )
    assert any(slow in said for said in lines)
    assert slow in d.markdown()
    assert d.plain()["states_alone"]["mended"] == "states"


def test_what_lines_cannot_mend_is_not_promised():
    both = wiring(3, 31, 59, residual=Residual.normed)
    trained, wrong = scored(T, GOOD), scored(both, DEAD)
    alone = {kind: scored(with_part_of(T, both, kind), POOR) for kind in ("states", "residual")}
    d = diagnose(evidence(trained, wrong=wrong, alone=alone))
    fixes = {"states": exact("ids"), "residual": exact("", possible=False)}
    causes = tuple(replace(c, fixes=(fixes[c.kind],)) for c in d.causes)
    mid = scored(T, POOR).accept_length
    ladder = (("states", mid), ("residual", trained.accept_length))
    (said,) = [
        line
        for line in replace(d, causes=causes, ladder=ladder).first_lines()
        if line.startswith("expected")
    ]
    assert f"{mid.value:.2f} by lines alone" in said
    assert "with residual too (not by lines)" in said


def test_what_was_not_shown_to_help_is_inferred():
    for e in (
        measured(1.3),
        evidence(scored(T, (0.4, 0.45, 0.45, 0.45))),
        evidence(scored(T, DEAD)),
    ):
        for cause in diagnose(e).causes:
            assert {fix.evidence for fix in cause.fixes} <= {"run", "read", "inferred"}


def test_a_difference_that_stays_open_is_among_the_first_lines_where_there_is_room():
    both = wiring(3, 31, 59, residual=Residual.normed)
    trained, wrong = scored(T, GOOD), scored(both, DEAD)
    so = scored(replace(T, residual=Residual.normed), GOOD)
    counts = [
        text if i % 6 else bad
        for i, (text, bad) in enumerate(zip(so.counts, wrong.counts, strict=True))
    ]
    alone = {"states": scored(S, DEAD), "residual": replace(so, counts=counts)}
    d = diagnose(evidence(trained, wrong=wrong, alone=alone))
    assert [c.kind for c in d.causes] == ["states"]
    assert d.undecided[0].startswith("whether residual is a fault")
    assert any(line.startswith("open: whether residual") for line in d.first_lines())
    assert len(d.first_lines()) <= 12

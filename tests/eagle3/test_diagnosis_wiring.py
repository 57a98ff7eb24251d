"""A difference between trained and served wiring is a cause where its cost is settled and matters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3.diagnosis.causes import kinds_between, matters, with_part_of
from eagle3.diagnosis.kinds import KINDS, WIRING, kind_of, switch_of
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.form import Setting
from eagle3.metrics import Count, Difference
from eagle3.wiring import D2T, SWITCHES, Feedback, Residual, RopeChoice, Window
from tests.eagle3.diagnosed import (
    DEAD,
    GOOD,
    LAB,
    POOR,
    SLOT3,
    S,
    T,
    evidence,
    form,
    scored,
    served,
    wiring,
)


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


def test_a_loss_counts_for_itself_where_probability_tells_what_was_trained():
    """Else it is one of all that the search compared, and the trained side was chosen by it."""
    other = replace(T, residual=Residual.normed)
    trained = scored(T, GOOD)
    few = [scored(T, POOR).counts[i] if i < 5 else c for i, c in enumerate(trained.counts)]
    so = replace(trained, wiring=other, counts=few)
    found = evidence(trained, wrong=so, alone={"residual": so})
    assert "residual" not in kinds(found)
    for low, high, told in ((0.01, 0.05, True), (-0.01, 0.05, False)):
        nats = Difference(value=0.02, low=low, high=high)
        assert ("residual" in kinds(replace(found, loss_alone={"residual": nats}))) is told
    (cause,) = diagnose(
        replace(found, loss_alone={"residual": Difference(value=0.02, low=0.01, high=0.05)})
    ).causes
    assert cause.cost is not None
    assert cause.cost.comparisons == 1


def test_where_little_is_accepted_little_is_enough_to_matter():
    low = (0.3, 0.1, 0.1, 0.1)
    trained, so = (
        scored(T, low),
        scored(replace(T, residual=Residual.normed), (0.29, 0.1, 0.1, 0.1)),
    )
    lost = trained.accept_length.value - so.accept_length.value
    assert 0.05 * (trained.accept_length.value - 1) < lost < 0.05
    assert matters(trained, so, 60)
    # Of a drafter that accepts more, as much is lost among texts, releases and rounding.
    good, close = scored(T, GOOD), scored(T, (0.75, 0.8, 0.8, 0.76))
    assert 0 < good.accept_length.value - close.accept_length.value < 0.05
    assert not matters(good, close, 1)


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
    # What the target's own choice does not settle is told by what does.
    (states,) = (c for c in diagnose(e).causes if c.kind == "states")
    assert "; served states 3, 31 and 59; +" in states.what
    assert "lost by it against what it learnt, the data's last slot" in states.what
    settled = evidence(scored(T, GOOD), wrong=scored(S, DEAD), alone={"states": scored(S, DEAD)})
    assert "against what it learnt" not in diagnose(settled).causes[0].what


def test_an_engine_that_reports_an_accept_length_has_started_whatever_was_read():
    e = evidence(
        scored(T, GOOD),
        served=served(None, problems=("id -1 names no layer",)),
        as_served=None,
        why_not_served="the engine does not run it",
        engine_accept_length=2.4,
    )
    d = diagnose(e)
    assert [c.confidence for c in d.causes] == ["possible"]
    assert d.engine_figure is not None
    assert "2.40 is not compared: an engine that reports one runs the drafter" in d.engine_figure
    assert any(line.strip().startswith("the engine's own 2.40") for line in d.first_lines())
    assert not any("it does not start, whatever" in line for line in d.first_lines())
    # One that runs states which no data holds may report what it likes.
    far = replace(e, served=served(S), why_not_served="state 59 is not in the data")
    assert "state 59 is not in the data" in str(diagnose(far).engine_figure)


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
    first, whole = text.split("\n# ")
    assert first.count("the flat layout") == whole.count("the flat layout") == 1
    assert sum(line.startswith("before all fixes: copy") for line in told.first_lines()) == 1
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


def test_a_layout_that_the_engine_does_not_load_is_a_cause_where_nothing_else_is_wrong():
    found = read_drafter(LAB / "drafter_speculators")[0].form
    config = json.loads((LAB / "drafter_speculators" / "config.json").read_text())
    told = diagnose(evidence(scored(wiring(), GOOD), form=found, config=config))
    (cause,) = told.causes
    assert (told.verdict, cause.kind, cause.stops) == ("cause", "not-served", True)
    assert "does not load the nested layout" in told.first_lines()[0]
    assert cause.fixes[0].possible
    vllm = EngineAsked(name="vllm", version="0.27.0", engine_class="llama")
    sound = evidence(scored(wiring(), GOOD), form=found, config=config, asked=vllm)
    assert diagnose(sound).causes == ()


@pytest.mark.parametrize(
    ("run", "kind"), [({"window": Window.none}, "window"), ({"rope": RopeChoice.target}, "rope")]
)
def test_what_only_longer_texts_would_show_is_said_where_nothing_else_is_found(run, kind):
    wide = replace(form(), windows=Setting((512,), "config.json"))
    ours = replace(T, window=Window.declared, rope=RopeChoice.declared)
    same = scored(replace(ours, **run), GOOD)
    d = diagnose(evidence(scored(ours, GOOD), wrong=same, alone={kind: same}, form=wide))
    assert d.verdict == "sound"
    assert f"but for {kind}, which texts of 144 positions cannot show" in d.headline
    assert any(line.startswith(f"what {kind} costs") for line in d.undecided)
    assert "but for" not in diagnose(evidence(scored(ours, GOOD), form=wide)).headline


def test_a_release_that_was_not_read_is_said_in_the_headline_and_in_the_confidence():
    for version, said in (("9.9.0", True), ("0.5.12", False)):
        asked = EngineAsked(name="sglang", version=version, engine_class="kimi_k25")
        d = diagnose(evidence(scored(T, GOOD), asked=asked))
        assert ("(not read)" in d.headline) is said
        assert (f"{version} was not read (what was read: " in d.confidence) is said

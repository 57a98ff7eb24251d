"""What a file lacks is named by what it lacks, and what was left out on purpose is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3.diagnosis.incomplete import blank
from eagle3.diagnosis.measure import with_tensors
from eagle3.diagnosis.verdict import diagnose
from eagle3.form import Setting
from eagle3.served_switches import Stop
from eagle3.wiring import Head
from tests.eagle3.diagnosed import DEAD, GOOD, POOR, S, T, evidence, form, scored, served, wiring
from tests.eagle3.searchable import PLAIN, checkpoint

HEADLESS = replace(form(), head=Setting("target", "the file"))
STAND_IN = wiring(0, 3, 31, head=Head.target)
WIDTH = PLAIN.target_hidden


@pytest.mark.parametrize("curve", [GOOD, POOR, DEAD])
def test_a_head_that_is_not_in_the_file_is_the_cause_whatever_stands_in_for_it_reaches(curve):
    whole = evidence(scored(T, curve), engine=False)
    d = diagnose(replace(evidence(scored(STAND_IN, curve), engine=False), form=HEADLESS))
    assert (d.verdict, d.causes[0].kind) == ("cause", "head")
    assert "no lm_head.weight" in d.causes[0].what
    assert "as it was trained" in d.causes[0].fixes[0].lines[0]
    if curve is DEAD:
        assert any("with the target's rows for a head" in note for note in d.notes)
    assert "head" not in [cause.kind for cause in diagnose(whole).causes]
    # What the stand-in reaches is not called what the drafter does.
    said = "\n".join(d.first_lines())
    assert "with the target's rows for a head" in said
    assert "as trained" not in said.partition("expected")[2]
    assert "nothing serves it as it is" in said


def test_the_level_of_a_stand_in_says_nothing_of_training_teacher_or_vocabulary():
    low = scored(STAND_IN, (0.3, 0.4, 0.4, 0.4), coverage=0.6)
    e = replace(evidence(low, engine=False), form=HEADLESS, trained_accuracy=0.75)
    (cause,) = diagnose(e).causes
    assert cause.kind == "head"
    assert cause.trained == f"a head of {form().draft_vocab.value} rows"
    assert cause.what.endswith("in training at 0.750: the head was trained, so export it again")
    reached = evidence(scored(STAND_IN, GOOD), engine=False)
    (cause,) = diagnose(replace(reached, form=HEADLESS, trained_accuracy=0.75)).causes
    assert cause.what.endswith("these may well be its head")


def test_what_else_keeps_an_engine_from_starting_is_said_beside_a_head_that_is_lacking():
    stops = (Stop(why="no lm_head.weight there", switch="head"), Stop(why="no such class"))
    stopped = replace(served(None), stops=stops, run=S, states=S.states())
    for curve in (GOOD, DEAD):
        e = replace(evidence(scored(STAND_IN, curve)), form=HEADLESS, served=stopped)
        kinds = [cause.kind for cause in diagnose(e).causes if cause.stops]
        assert kinds == ["head", "not-served"]


def test_behind_an_engine_that_stops_over_it_the_head_is_said_once_and_first():
    e = evidence(scored(T, GOOD), wrong=scored(S, DEAD), alone={"states": scored(S, DEAD)})
    stopped = served(None, problems=["no lm_head.weight there"], switch="head")
    d = diagnose(replace(e, form=HEADLESS, served=replace(stopped, run=S, states=S.states())))
    assert [cause.kind for cause in d.causes] == ["head", "states"]
    assert d.causes[0].what == "no lm_head.weight there"
    assert d.causes[0].trained == f"a head of {form().draft_vocab.value} rows"
    assert d.ladder == ()


def test_a_vocabulary_that_is_the_target_s_needs_no_head_in_the_file():
    whole = replace(HEADLESS, draft_vocab=form().vocab)
    assert diagnose(replace(evidence(scored(T, GOOD)), form=whole)).verdict == "sound"


def with_zeros(name: str, *places: tuple[slice, slice]) -> str | None:
    """What is said of a drafter with these blocks of a tensor at zero."""
    made = checkpoint(PLAIN)
    held = made.drafter.state_dict()
    weight = held[name].clone()
    for place in places:
        weight[place] = 0
    return blank(with_tensors(made, {**held, name: weight}))


ALL = slice(None)
HALF = slice(WIDTH // 2)


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("fc.weight", (HALF, ALL), f"{WIDTH // 2} of {WIDTH} rows of fc.weight"),
        ("fc.weight", (ALL, HALF), f"{WIDTH // 2} of {3 * WIDTH} columns of fc.weight"),
        ("midlayer.mlp.up_proj.weight", (ALL, HALF), "columns of midlayer.mlp.up_proj.weight"),
        ("midlayer.mlp.down_proj.weight", (HALF, ALL), "rows of midlayer.mlp.down_proj.weight"),
        ("midlayer.self_attn.o_proj.weight", (HALF, ALL), "rows of midlayer.self_attn.o_proj"),
    ],
)
def test_a_piece_that_was_not_written_is_named(name, place, said):
    found = with_zeros(name, place)
    assert found is not None
    assert said in found
    e = evidence(scored(T, GOOD))
    d = diagnose(replace(e, health=replace(e.health, blank=found)))
    assert d.verdict == "unknown"
    assert found in d.headline
    assert d.causes[0].confidence == "possible"
    assert "unless the zeros were written on purpose" in str(d.causes[0].fixes[0].left)
    # One that does what its log says was trained with them.
    blank_one = replace(e.health, blank=found)
    as_logged = diagnose(replace(e, health=blank_one, trained_accuracy=GOOD[0]))
    assert as_logged.verdict == "sound"
    assert found in as_logged.notes
    lost = diagnose(replace(e, health=blank_one, trained_accuracy=0.9))
    assert lost.verdict == "unknown"
    # Which states it is fed is told beside that, with the line to write.
    fed = evidence(scored(T, GOOD), wrong=scored(S, DEAD), alone={"states": scored(S, DEAD)})
    d = diagnose(replace(fed, health=replace(fed.health, blank=found)))
    assert [cause.kind for cause in d.causes] == ["unknown", "states"]
    assert any("[-1, 2, 30]" in line for line in d.first_lines())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("fc.weight", (ALL, slice(WIDTH))),  # a state that is not fed
        ("midlayer.self_attn.o_proj.weight", (ALL, ALL)),  # attention left out
        ("midlayer.mlp.up_proj.weight", (HALF, ALL)),  # an MLP padded for its kernels
        ("midlayer.mlp.down_proj.weight", (ALL, HALF)),
        ("midlayer.self_attn.q_proj.weight", (HALF, ALL)),  # heads padded to a number
        ("lm_head.weight", (slice(8), ALL)),  # a vocabulary padded
        ("fc.weight", (slice(1), slice(3))),  # some numbers, but no row
    ],
)
def test_zeros_that_somebody_wrote_are_no_damage(name, place):
    assert with_zeros(name, place) is None

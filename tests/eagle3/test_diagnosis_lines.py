"""The first lines say cause, fix, accept length, how sure that is and what stays open, in 12 lines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3.diagnosis.causes import with_part_of
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.told import fix_words
from eagle3.diagnosis.verdict import diagnose
from eagle3.diagnosis.words import rate_words
from eagle3.doctor.subject import EngineAsked
from eagle3.form import Setting
from eagle3.metrics import Difference
from eagle3.served import served_wiring
from eagle3.wiring import D2T, Residual, RopeChoice, Token
from tests.eagle3.diagnosed import (
    DEAD,
    GOOD,
    LAB,
    POOR,
    S,
    T,
    evidence,
    form,
    ranked,
    scored,
    served,
    slots,
    wiring,
)


def test_what_ties_is_said_with_the_data_that_would_tell():
    trained = scored(T, GOOD)
    other = ranked(scored(replace(T, rope=RopeChoice.target), GOOD), tied=True)
    e = evidence(trained)
    e = replace(e, searched=replace(e.searched, ranked=(e.searched.best, other)))
    (line,) = [line for line in diagnose(e).undecided if line.startswith("rope")]
    assert "longer than 144 positions" in line
    # What is served is no tie where the teacher's choices are clearly less probable by it.
    so = scored(other.wiring, GOOD)
    for low, open_ in ((-0.01, True), (0.01, False)):
        nats = Difference(value=0.02, low=low, high=0.05)
        known = replace(e, alone={"rope": so}, loss_alone={"rope": nats})
        assert any(line.startswith("rope") for line in diagnose(known).undecided) is open_


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


def exact(line, possible=True, needs=None):
    return Fix(
        engine="SGLang 0.5.12, class kimi_k25",
        possible=possible,
        lines=(line,),
        left=None if possible else "patch models/x.py",
        evidence="read",
        needs=needs,
        patched=needs is not None,
    )


PATCH = "the embedding capture patch"
GIVEN = f"{PATCH} (engine.patch=embedding_capture)"


def test_of_three_causes_each_fix_and_the_figures_are_visible():
    both = wiring(3, 31, 59, residual=Residual.normed, token=Token.same)
    trained, wrong = scored(T, GOOD), scored(both, DEAD)
    alone = {
        kind: scored(with_part_of(T, both, kind), POOR) for kind in ("states", "residual", "token")
    }
    d = diagnose(evidence(trained, wrong=wrong, alone=alone))
    line = '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}'
    causes = tuple(
        replace(c, what=f"{c.what} {'and more ' * 30}", fixes=(exact(line, needs=PATCH),))
        for c in d.causes
    )
    mid = scored(both, POOR).accept_length
    ladder = (("states", wrong.accept_length), ("residual", mid), ("token", trained.accept_length))
    d = replace(d, causes=causes, ladder=ladder, states_alone=("states", wrong.accept_length))
    lines = d.first_lines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert sum(f"fix: {line}; needs {PATCH}" in said for said in lines) == 3
    (expected,) = [said for said in lines if said.startswith("expected accept length")]
    served, repaired = wrong.accept_length.value, trained.accept_length.value
    assert f"{served:.2f} as served → {repaired:.2f} [" in expected
    assert expected.endswith("after all fixes (with a patch)")
    slow = f"with states alone mended {served:.2f}: serving stays slow [inferred]"
    assert any(slow in said for said in lines)
    assert slow in d.markdown()
    assert d.plain()["states_alone"]["mended"] == "states"


WAYS = {
    "lines": exact("ids"),
    "copy": replace(exact("ids"), needs="the flat copy of config.json"),
    "patch": exact("ids", needs=PATCH),
    "no": exact("", possible=False),
}


@pytest.mark.parametrize(
    ("states", "residual", "stops", "told"),
    [
        ("lines", "lines", (), "SERVED → END after all fixes"),
        ("lines", "no", (), "SERVED → MID by lines alone → not by lines: END with residual too"),
        # A flat copy is written; a patch of the engine is not.
        ("copy", "lines", (), "SERVED → END after all fixes"),
        ("copy", "no", (), "SERVED → MID by lines alone → not by lines: END with residual too"),
        ("patch", "patch", (), "SERVED → END after all fixes (with a patch)"),
        ("patch", "no", (), "SERVED → MID with a patch → not by lines: END with residual too"),
        ("lines", "patch", (), "SERVED → MID by lines alone → END after all fixes (with a patch)"),
        ("no", "no", (), "SERVED → not by lines: END with states and residual mended"),
        # A line behind what stays is not reached by lines alone.
        ("no", "lines", (), "SERVED → not by lines: END with states too"),
        # An engine that does not start serves nothing before what stops it is mended.
        ("lines", "lines", ("states",), "STOPPED → END after all fixes"),
        (
            "lines",
            "no",
            ("states",),
            "STOPPED → MID by lines alone → not by lines: END with residual too",
        ),
        ("patch", "lines", ("states",), "STOPPED → END after all fixes (with a patch)"),
        ("no", "lines", ("states",), "NEVER → not by lines: END with states too"),
        ("no", "no", ("states",), "NEVER → not by lines: END with states and residual mended"),
        ("lines", "no", ("states", "residual"), "NEVER → not by lines: END with residual too"),
    ],
)
def test_only_what_is_reached_is_promised(states, residual, stops, told):
    both = wiring(3, 31, 59, residual=Residual.normed)
    trained, wrong = scored(T, GOOD), scored(both, DEAD)
    alone = {kind: scored(with_part_of(T, both, kind), POOR) for kind in ("states", "residual")}
    d = diagnose(evidence(trained, wrong=wrong, alone=alone))
    fixes = {"states": WAYS[states], "residual": WAYS[residual]}
    causes = [replace(c, fixes=(fixes[c.kind],), stops=c.kind in stops) for c in d.causes]
    mid, end = scored(T, POOR).accept_length, trained.accept_length
    d = replace(d, causes=tuple(causes), ladder=(("states", mid), ("residual", end)))
    if stops:
        dead = served(None, problems=("it stops",))
        d = replace(d, served=dead, accept_length_served=None)
    words = {
        "SERVED": f"{wrong.accept_length.value:.2f} as served",
        "STOPPED": "it does not start",
        "NEVER": "it does not start, whatever is written",
        "MID": f"{mid.value:.2f}",
        "END": rate_words(end),
    }
    for name, said in words.items():
        told = told.replace(name, said)
    said = f"expected accept length: {told}"
    if len(said) > 120:  # the interval, which stands below, gives way
        said = said.replace(rate_words(end), f"{end.value:.2f}")
    (line,) = [line for line in d.first_lines() if line.startswith("expected")]
    assert line == said


def test_the_patch_that_a_line_needs_is_seen_beside_two_other_causes():
    both = wiring(3, 31, 59, residual=Residual.normed, token=Token.same)
    trained = scored(T, GOOD)
    alone = {
        kind: scored(with_part_of(T, both, kind), POOR) for kind in ("states", "residual", "token")
    }
    d = diagnose(evidence(trained, wrong=scored(both, DEAD), alone=alone))
    (states,) = [c for c in d.causes if c.kind == "states"]
    assert (states.fixes[0].needs, states.fixes[0].patched) == (GIVEN, True)
    several = f"{GIVEN} and the flat copy of config.json"
    for needs in (GIVEN, several):
        fix = replace(states.fixes[0], needs=needs)
        causes = [replace(c, fixes=(fix,)) if c is states else c for c in d.causes]
        lines = replace(d, causes=tuple(causes)).first_lines()
        assert len(d.causes) == 3
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 120
        short = "engine.patch=embedding_capture"
        assert any(f"[-1, 2, 30]}}; needs {short}" in line for line in lines)
        lost = replace(fix, needs=f"{PATCH} (not shipped for 0.5.13)")
        assert "; needs the embedding capture patch (not shipped for 0.5.13) [" in fix_words(lost)


def test_an_engine_that_refuses_a_part_is_told_with_its_own_fix():
    # vLLM before 0.16 has no place for biases; no config, no flag and no program gives it one.
    vllm = EngineAsked(name="vllm", version="0.15.0", engine_class="llama")
    biased = replace(form(), attention_bias=Setting(True, "config.json: attention_bias"))
    config = {"vocab_size": 1024, "attention_bias": True}
    both = wiring(2, 30, 58)
    stopped = served_wiring(
        biased,
        {**json.loads((LAB / "drafter" / "config.json").read_text()), **config},
        vllm,
        num_layers=61,
    )
    assert [stop.switch for stop in stopped.stops] == ["biases"]
    trained = scored(T, GOOD)
    e = evidence(
        trained,
        alone={"states": scored(both, POOR)},
        form=biased,
        config=config,
        asked=vllm,
        served=stopped,
        as_served=None,
        why_not_served="the engine does not run it",
        ladder=(("biases", scored(both, POOR)), ("states", trained)),
    )
    d = diagnose(e)
    assert [c.kind for c in d.causes] == ["biases", "states"]
    lines = d.first_lines()
    assert "vLLM 0.15.0 has no place for the drafter's attention_bias" in lines[0]
    fixes = [line.strip() for line in lines if line.strip().startswith("fix:")]
    assert fixes[0].startswith("fix: no line there; serve it with vLLM 0.16 or newer")
    assert "nothing: config.json says so already" not in d.markdown()
    (said,) = [line for line in lines if line.startswith("expected")]
    assert "it does not start, whatever is written" in said
    assert "after all fixes" not in said
    assert "by lines alone" not in said


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


def test_states_that_need_a_patch_of_the_engine_are_sound_only_with_it() -> None:
    """No file shows whether the engine has it; the first lines say what hangs on it."""
    told = diagnose(evidence(scored(T, GOOD)))  # states 0, 3 and 31 in SGLang 0.5.12
    assert told.verdict == "sound"
    (line,) = [line for line in told.first_lines() if line.startswith("provided that")]
    assert f"SGLang 0.5.12, class kimi_k25 has {GIVEN}: without" in line
    assert told.plain()["provided"].startswith("provided that")
    for other in (wiring(3, 31, 59), wiring(2, 30, 58)):
        assert diagnose(evidence(scored(other, GOOD))).provided is None
    wrong = scored(S, DEAD)  # what it needs stands with the fix
    assert (
        diagnose(evidence(scored(T, GOOD), wrong=wrong, alone={"states": wrong})).provided is None
    )


def test_a_sound_answer_says_what_stays_open_of_the_level_and_of_the_engine() -> None:
    assert "(trained_accuracy=X)" in diagnose(evidence(scored(T, GOOD))).headline
    known = evidence(scored(T, GOOD), trained_accuracy=0.74, engine_accept_length=2.2)
    headline = diagnose(known).headline
    assert "trained_accuracy" not in headline
    assert "why the engine's own accept length is 2.20 stays open" in headline

"""The first lines say cause, fix, accept length, how sure that is and what stays open, in 12 lines."""

from __future__ import annotations

import json
from dataclasses import replace

from eagle3.diagnosis.causes import with_part_of
from eagle3.diagnosis.fixes import Fix
from eagle3.diagnosis.verdict import diagnose
from eagle3.wiring import D2T, Residual, RopeChoice, Token
from tests.eagle3.diagnosed import GOOD, evidence, ranked, scored, slots, wiring

T = wiring(0, 3, 31)
S = wiring(3, 31, 59)
DEAD = (0.03, 0.0, 0.0, 0.0)
POOR = (0.3, 0.4, 0.4, 0.4)


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

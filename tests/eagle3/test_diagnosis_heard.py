"""What a running server returned and accepted, joined with tables and with the drafter alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eagle3.conventions import Evidence as Ground
from eagle3.diagnosis.evidence import Evidence, Scored
from eagle3.diagnosis.heard import Heard, believed, contradiction, counted_of, why_unlike
from eagle3.diagnosis.verdict import diagnose
from eagle3.doctor.subject import EngineAsked
from eagle3.metrics import Count, Rate
from eagle3.served import ServedWiring
from eagle3.served_switches import Stop
from tests.eagle3.diagnosed import DEAD, GOOD, STEPS, TEXTS, S, T, evidence, scored, served

ASKED = EngineAsked(
    name="sglang", version="0.5.23", engine_class="llama", flags={"num_steps": STEPS}
)
NAMES = [f"text{i}" for i in range(TEXTS)]
FLAG = "--enable-return-hidden-states"


def heard(states: tuple[int, ...] | None, length: float | None = None, **more: Any) -> Heard:
    """Of a server that gains so much in each of 20 rounds of every text."""
    counts: dict[str, Count] = {}
    rate = None
    if length is not None:
        counts = {name: Count(round(20 * length), 20) for name in NAMES}
        gained = round(20 * length)
        rate = Rate(
            **{"value": length, "low": length, "high": length, "numerator": gained},
            **{"denominator": 20, "truth": "target_argmax"},
        )
    return Heard(
        url="u", version="0.5.23", states=states, counts=counts, accept_length=rate, **more
    )


def asked(tables: ServedWiring, found: Heard, so: Scored) -> Evidence:
    """A drafter trained on T behind a server; `so` is it wired as what is believed to be served."""
    e = evidence(scored(T, GOOD), wrong=so, alone={} if so.wiring == T else {"states": so})
    length = found.accept_length
    return replace(
        e,
        served=believed(tables, found),
        asked=ASKED,
        heard=found,
        counted=counted_of(found, so, NAMES),
        engine_accept_length=None if length is None else length.value,
    )


def test_measured_states_replace_those_of_the_tables_and_what_stops_them() -> None:
    stopped = replace(
        served(None, problems=("id -1 names no layer",)), run=T, because={"states": "tables"}
    )
    found = believed(stopped, heard((3, 31, 59)))
    assert found.wiring is not None
    assert (found.wiring.states(), found.states, found.stops) == ((3, 31, 59), (3, 31, 59), ())
    assert (found.measured, found.problems) == (True, ())
    # Another stop is another matter, and what was not measured changes nothing.
    both = replace(stopped, stops=(*stopped.stops, Stop(why="no architectures")))
    assert believed(both, heard((3, 31, 59))).wiring is None
    assert believed(stopped, heard(None, why_not="no flag")) is stopped


def test_tables_that_say_otherwise_are_contradicted_in_one_line() -> None:
    tables = replace(served(T), because={"states": "SGLang reads [-1,2,30] as 0, 3 and 31"})
    assert contradiction(tables, heard((0, 3, 31))) is None
    assert contradiction(tables, heard(None)) is None
    assert contradiction(tables, heard((3, 31, 59))) == (
        "the tables are contradicted: SGLang reads [-1,2,30] as 0, 3 and 31; but it returns states 3, "
        "31 and 59, and that is believed"
    )
    unseen = contradiction(tables, heard((3, 31, 59), config_seen=False))
    assert unseen is not None
    assert unseen.startswith(
        "what this server serves is not the drafter's config.json that was read"
    )


def test_an_inferred_table_is_no_matter_where_states_were_measured() -> None:
    wrong = scored(S, DEAD)
    tables = served(S, ground="inferred")
    (by_table,) = diagnose(asked(tables, heard(None, why_not="no flag"), wrong)).causes
    (by_server,) = diagnose(asked(tables, heard((3, 31, 59)), wrong)).causes
    assert (by_table.confidence, by_server.confidence) == ("likely", "certain")
    assert "served: run (measured: the server returns" in by_server.evidence
    assert believed(tables, heard((3, 31, 59))).evidence is Ground.inferred  # of all else


@pytest.mark.parametrize(
    ("states", "length", "fault", "kinds"),
    [
        ((0, 3, 31), scored(T, GOOD).accept_length.value, "none found", []),
        ((0, 3, 31), 1.5, "engine", ["engine-state"]),
        ((0, 3, 31), 4.9, "measurement", ["measurement"]),
        ((3, 31, 59), scored(S, DEAD).accept_length.value, "config", ["states"]),
        ((3, 31, 59), None, "config", ["states"]),
    ],
)
def test_where_the_fault_lies(
    states: tuple[int, ...], length: float | None, fault: str, kinds: list[str]
) -> None:
    so = scored(T, GOOD) if states == (0, 3, 31) else scored(S, DEAD)
    d = diagnose(asked(served(so.wiring), heard(states, length), so))
    assert [cause.kind for cause in d.causes] == kinds
    assert d.joined is not None
    assert d.joined.fault == fault
    (line,) = [line for line in d.first_lines() if line.startswith("fault: ")]
    assert line.startswith(f"fault: {fault}; the server feeds states ")
    assert "(measured)" in line
    assert len(d.first_lines()) <= 12
    assert max(map(len, d.first_lines())) <= 120


def test_tables_are_said_to_be_tables_with_the_flag_that_would_measure() -> None:
    found = heard(None, 1.05, why_not=f"start it with {FLAG}", needs=FLAG)
    d = diagnose(asked(served(S), found, scored(S, DEAD)))
    lines = " ".join(" ".join(d.first_lines()).split())
    assert f"states 3, 31 and 59 read from tables, not measured (needs {FLAG})" in lines
    assert any(line.endswith(f"not measured; start it with {FLAG}") for line in d.undecided)
    assert d.joined is not None
    assert d.joined.plain()["states"] is None


def test_more_than_the_tables_states_can_give_speaks_against_them() -> None:
    d = diagnose(asked(served(S), heard(None, 3.2, why_not="no flag"), scored(S, DEAD)))
    assert d.joined is not None
    assert d.joined.fault.startswith("undecided, since it accepts more")
    assert {cause.kind: cause.confidence for cause in d.causes} == {
        "states": "possible",
        "measurement": "possible",
    }


def test_a_patch_that_the_server_is_seen_to_have_is_no_condition() -> None:
    told = asked(served(T), heard(None, why_not="no flag"), scored(T, GOOD))
    old = replace(ASKED, version="0.5.12", engine_class="kimi_k25")
    assert diagnose(replace(told, asked=old)).provided is not None
    seen = asked(served(T), heard((0, 3, 31)), scored(T, GOOD))
    assert diagnose(replace(seen, asked=old)).provided is None


def test_texts_that_were_not_asked_are_not_counted() -> None:
    so = scored(T, GOOD)
    found = heard((0, 3, 31), 3.0)
    some = replace(found, counts=dict(list(found.counts.items())[:3]))
    counted = counted_of(some, so, NAMES)
    assert counted is not None
    assert counted.texts == 3
    assert (counted.served.numerator, counted.served.denominator) == (180, 60)
    assert counted.alone.denominator == sum(
        text["accept_length"].denominator for text in so.counts[:3]
    )
    assert counted_of(replace(found, counts={}), so, NAMES) is None
    assert counted_of(heard((0, 3, 31)), so, NAMES) is None
    assert counted_of(None, so, NAMES) is None


@pytest.mark.parametrize(
    ("truth", "follows", "said"),
    [
        ("next_token", None, "the target's own choices are not known"),
        ("target_argmax", 0.97, "at only 0.970"),
        ("target_argmax", 0.98, None),
    ],
)
def test_other_texts_than_the_servers_own_are_nothing_to_hold_it_against(
    truth: str, follows: float | None, said: str | None
) -> None:
    rate = None
    if follows is not None:
        values = {"value": follows, "low": follows, "high": 1.0}
        rate = Rate(**values, numerator=97, denominator=100, truth="target_argmax")
    why = why_unlike(truth, rate)
    assert why == said or (why is not None and said is not None and said in why)
    # However little it accepts then, nobody is blamed, and nothing is called sound.
    e = asked(served(T), heard((0, 3, 31), 1.2), scored(T, GOOD))
    d = diagnose(replace(e, counted=None, not_counted="other texts"))
    assert d.verdict == "undecided"
    assert d.causes == ()
    assert d.joined is not None
    assert d.joined.fault == "undecided"
    assert any(line.endswith("gives: other texts") for line in d.undecided)
    lines = " ".join(" ".join(d.first_lines()).split())
    assert "gives: other texts; by its wiring alone nothing is wrong" in lines
    assert "too few texts" not in lines
    assert len(d.first_lines()) <= 12
    assert max(map(len, d.first_lines())) <= 120


def test_a_server_that_counts_too_little_or_nothing_is_not_called_sound() -> None:
    so, found = scored(T, GOOD), heard((0, 3, 31), 3.0)
    one = replace(found, counts=dict(list(found.counts.items())[:1]))
    for heard_, counted in ((one, counted_of(one, so, NAMES)), (heard((0, 3, 31)), None)):
        d = diagnose(replace(asked(served(T), heard_, so), counted=counted))
        assert d.verdict == "undecided"
        assert d.joined is not None
        assert d.joined.fault == "undecided"


def test_rows_that_are_moved_in_the_answer_alone_are_no_fault() -> None:
    so = scored(T, GOOD)
    as_alone = heard((0, 3, 31), so.accept_length.value, shift=-1)
    assert diagnose(asked(served(T), as_alone, so)).causes == ()
    for length, confidence in ((1.5, "likely"), (None, "possible")):
        (cause,) = diagnose(asked(served(T), heard((0, 3, 31), length, shift=-1), so)).causes
        assert (cause.kind, cause.confidence) == ("engine-state", confidence)

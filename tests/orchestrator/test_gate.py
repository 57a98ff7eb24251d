"""`gate`: accept lengths held against those stored of other engine versions."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from orchestrator.__main__ import main
from orchestrator.gate_check import hold
from tests.orchestrator.gated import (
    DIGESTS,
    EXPERIMENT,
    FEWER,
    MORE,
    ONE_ELSE,
    STEPS,
    USUAL,
    Place,
    figure,
)
from tests.orchestrator.world import make_world

Output = pytest.CaptureFixture[str]


def test_what_is_stored_passes_as_stored(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    (entry,) = place.content()["entries"]
    figure = entry["versions"]["0.5.23"]
    # 112 drafts stood in 60 rounds, each with a bonus, in each of three passes.
    assert (figure["numerator"], figure["denominator"], figure["passes"]) == (516, 180, 3)
    assert (figure["run"], figure["date"]) == ("first", "2026-09-21")
    assert entry["key"]["drafter"] == DIGESTS["drafter"]
    assert (entry["key"]["new_tokens"], entry["key"]["states"]) == (64, [0, 3, 31])
    capsys.readouterr()
    assert place.gate("first") == 0
    said = capsys.readouterr().out
    assert "0.5.23   2.867 [" in said
    assert "as stored" in said
    assert "every prompt is accepted as stored" in said


def test_more_passes_of_the_same_are_as_stored(place: Place, capsys: Output) -> None:
    place.store(place.run("first", passes=3))
    assert place.gate(place.run("second", "0.5.24", passes=5)) == 0
    assert "every prompt is accepted as stored; store=true would keep it" in capsys.readouterr().out


def test_an_upgrade_that_lowers_it_fails_and_is_not_stored(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    before = place.golden.read_bytes()
    assert place.gate(place.run("second", "0.5.24", FEWER)) == 3
    said = capsys.readouterr().out
    assert "-1.000 [" in said
    assert "clearly lower" in said
    assert "sglang 0.5.24 accepts clearly less than 0.5.23 did" in said
    assert place.gate("second", "store=true") == 3
    assert "nothing was stored" in capsys.readouterr().out
    assert place.golden.read_bytes() == before


def test_one_prompt_that_goes_another_way_is_no_fall(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    assert place.gate(place.run("second", "0.5.24", ONE_ELSE)) == 0
    said = capsys.readouterr().out
    assert "not clearly lower" in said
    (held,) = hold(figure(ONE_ELSE), {"0": figure(USUAL)}, most=STEPS)
    assert f"holds 0, and with it a fall of up to {-held.low:.3f}" in said


def test_more_passes_and_says_that_it_can_be_kept(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    assert place.gate(place.run("second", "0.5.24", MORE)) == 0
    said = capsys.readouterr().out
    assert "clearly higher" in said
    assert "more is accepted than 0.5.23 did; store=true would keep it" in said
    place.store("second")
    (entry,) = place.content()["entries"]
    assert list(entry["versions"]) == ["0.5.23", "0.5.24"]


def test_every_version_is_held_against_the_newest_first(place: Place, capsys: Output) -> None:
    place.store(place.run("first", "0.5.9"))
    place.store(place.run("second", "0.5.10", MORE))
    capsys.readouterr()
    # As 0.5.9 did: lower than the newest alone.
    assert place.gate(place.run("third", "0.5.11")) == 3
    said = capsys.readouterr().out
    assert said.index("0.5.10   3.867") < said.index("0.5.9    2.867")
    assert "less than 0.5.10 did" in said


def test_the_same_version_is_replaced_by_more_and_left_alone_where_it_is_equal(
    place: Place,
) -> None:
    place.store(place.run("first"))
    before = place.golden.read_bytes()
    place.store(place.run("again"))
    assert place.golden.read_bytes() == before
    place.store(place.run("better", accepted=MORE))
    (entry,) = place.content()["entries"]
    assert entry["versions"]["0.5.23"]["run"] == "better"


def test_storing_each_time_hides_no_slow_decline(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    before = place.golden.read_bytes()
    place.store(place.run("second", accepted=ONE_ELSE))  # not clearly lower
    said = capsys.readouterr().out
    assert "kept     the stored figure of 0.5.23, since this one is 0.033 lower" in said  # 2 of 60
    assert f"to accept that, take 0.5.23 out of {place.golden} and store again" in said
    assert place.golden.read_bytes() == before
    place.store(place.run("third", "0.5.24", ONE_ELSE))
    (entry,) = place.content()["entries"]
    assert {name: one["run"] for name, one in entry["versions"].items()} == {
        "0.5.23": "first",
        "0.5.24": "third",
    }
    place.golden.unlink()
    place.store("second")
    assert place.content()["entries"][0]["versions"]["0.5.23"]["run"] == "second"


def test_what_would_not_be_stored_is_not_offered(place: Place, capsys: Output) -> None:
    place.store(place.run("old", "0.5.22", FEWER))
    place.store(place.run("first"))
    capsys.readouterr()
    assert place.gate(place.run("second", accepted=ONE_ELSE)) == 0
    said = capsys.readouterr().out
    assert "more is accepted than 0.5.22 did" in said
    assert "store=true" not in said


def test_nothing_stored_is_no_pass(place: Place, capsys: Output) -> None:
    assert place.gate(place.run("first")) == 2
    assert "holds nothing yet; store a figure that you trust with store=true" in (
        capsys.readouterr().err
    )
    assert not place.golden.exists()


def test_an_unknown_run_is_said(place: Place, capsys: Output) -> None:
    place.run("first")
    assert place.gate("nonesuch") == 2
    assert "there is no run nonesuch" in capsys.readouterr().err


UNREAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no file": (("run=last",), "gate needs golden=FILE"),
    "no folder": (("golden=/nowhere/g.json",), "there is no folder /nowhere"),
    "no home": (("golden=~nobody-here/g.json",), "golden=~nobody-here/g.json: "),
    "empty": (("golden=",), "golden= is empty"),
    "twice": (("golden=a", "golden=b"), "golden is given twice, as a and b"),
    "store": (("golden=a", "store=yes"), "store=yes: write store=true"),
    "both": (("golden=a", "run=last", "job.steps=3"), "leave job.steps=3 out"),
    "flag": (("golden=a", "-m", "job.steps=2,3"), "gate takes no '-m'"),
    "word": (("golden=a", "last"), "gate takes no 'last'"),
    "configs": (("golden=a", "--config-dir", "/nowhere"), "--config-dir /nowhere is no folder"),
    "key": (("golden=a", *EXPERIMENT, "job.stepz=3"), "did you mean 'steps'?"),
    "sweep": (("golden=a", *EXPERIMENT, "job.steps=2,3"), "job.steps=2,3"),
    "null": (("golden=a", *EXPERIMENT, "engine.ids={a: 1}"), "engine.ids"),
    "job": (("golden=a", "+experiment=layers_m1_2_30"), "not job=drafter_test"),
    "control": (("golden=a", *EXPERIMENT, "job.control=true"), "job.control=true has no drafter"),
    "few": (("golden=a", *EXPERIMENT, "job.max_prompts=5"), "job.max_prompts=5 is too few"),
    "detach": (("golden=a", *EXPERIMENT, "detach=true"), "leave detach=true out"),
    "nothing": (("golden=a", *EXPERIMENT), "golden=a holds nothing yet"),
}


@pytest.mark.parametrize("what", UNREAD)
def test_what_cannot_be_read_or_held_is_said_before_anything_is_started(
    what: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = UNREAD[what]
    started = () if what in ("no file", "both") else (f"results={tmp_path / 'results'}",)
    assert main(["gate", *arguments, *started]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("job.steps=3", "differs in steps (4 there, 3 here)"),
        ("engine.patch=/mine/my.patch", "differs in patch (null there, my.patch here)"),
    ],
)
def test_a_hypothesis_that_nothing_is_stored_of_is_not_run(
    changed: str, said: str, place: Place, capsys: Output
) -> None:
    place.store(place.run("first"))
    arguments = [f"golden={place.golden}", *EXPERIMENT, changed, f"results={place.results}"]
    assert main(["gate", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert len(list((place.results / "runs").iterdir())) == 1


def test_its_help_names_its_exit_codes(capsys: Output) -> None:
    assert main(["gate", "--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m orchestrator gate golden=FILE" in said
    assert "3: clearly lower" in said
    assert main(["gat"]) == 2
    assert "did you mean 'gate'?" in capsys.readouterr().err


UPGRADED = """#!{python}
import sys
sys.path.insert(0, {folder!r})
import fake
fake.WRONG_EVERY = 2
if sys.argv[1] == "-I":
    print("0.5.24")
else:
    fake.main(sys.argv[1:])
"""


@pytest.mark.runs
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_a_hypothesis_is_run_and_held_and_an_upgrade_that_lowers_it_fails(
    tmp_path: Path, capfd: Output
) -> None:
    world = make_world(tmp_path / "world", samples=6)
    fake = Path(__file__).parent.parent / "jobs" / "engines" / "fake.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(fake)])} "$@"\n')
    python.chmod(0o755)
    golden = tmp_path / "golden.json"
    small = ("pairs=1", "least=1", "repeats=0")
    arguments = [
        *("gate", f"golden={golden}"),
        *world.overrides("job=engine_bench", "engine=sglang", "engine.engine_class=llama"),
        *(f"engine.python={python}", "job.new_tokens=21", "job.advice=false", "job.device=cpu"),
        *("job.steps=3", *(f"job.budget.{setting}" for setting in small)),
    ]
    assert main([*arguments, "store=true"]) == 0
    said = capfd.readouterr().out
    assert "filed    MLflow run" in said
    assert f"stored   sglang 0.5.23 in {golden}" in said
    (run,) = (world.results / "runs").iterdir()
    assert main(["gate", f"golden={golden}", "run=last", f"results={world.results}"]) == 0
    assert "every prompt is accepted as stored" in capfd.readouterr().out

    python.write_text(UPGRADED.format(python=sys.executable, folder=str(fake.parent)))
    assert main(arguments) == 3
    said = capfd.readouterr().out
    assert "sglang 0.5.24 accepts clearly less than 0.5.23 did" in said
    (entry,) = json.loads(golden.read_bytes())["entries"]
    assert {name: figure["run"] for name, figure in entry["versions"].items()} == {
        "0.5.23": run.name
    }

    assert main([*arguments, "engine.version=0.5.23"]) == 2
    out, err = capfd.readouterr()
    assert "0.5.24 is what is there" in out + err
    assert "the gate was not checked" in err

"""`gate`: accept lengths held against those stored of other engine versions."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3.metrics import Count
from eagle3.search.bounds import rate_difference
from jobs.engines import figures
from jobs.engines.kept import kept
from jobs.engines.records import Counters
from orchestrator import gate_file
from orchestrator.__main__ import main
from orchestrator.config import Resolved
from orchestrator.errors import InputError
from orchestrator.gate_check import hold
from orchestrator.gate_figure import Figure
from orchestrator.push import tree_of
from orchestrator.runs import new_folder, write_json, write_records
from orchestrator.snapshot import Snapshot
from tests.jobs.engines.made import answered, one_pass, request
from tests.orchestrator.searched import T0
from tests.orchestrator.test_config import resolved
from tests.orchestrator.test_show_bench import bench, level
from tests.orchestrator.world import make_world

STEPS = 4
# Accepted drafts and rounds of each prompt in a pass.
USUAL = [(20, 10), (18, 10), (22, 10), (15, 10), (20, 10), (17, 10)]
FEWER = [(accepted - 10, rounds) for accepted, rounds in USUAL]
MORE = [(accepted + 10, rounds) for accepted, rounds in USUAL]
ONE_ELSE = [(18, 10), *USUAL[1:]]
DIGESTS = {"drafter": "sha256:" + "d" * 64, "target": "sha256:" + "e" * 64}
EXPERIMENT = ("+experiment=engine_layers_m1_2_30", "engine.python=/opt/python")


@pytest.fixture(scope="module")
def compose() -> Callable[..., Resolved]:
    """A resolved benchmark, made once for the same overrides."""
    made: dict[tuple[str, ...], Resolved] = {}

    def of(*overrides: str) -> Resolved:
        if overrides not in made:
            made[overrides] = resolved(*EXPERIMENT, *overrides)
        return made[overrides]

    return of


class Place:
    """A results folder with runs as the job and the loop leave them, and a golden file."""

    def __init__(self, folder: Path, compose: Callable[..., Resolved]) -> None:
        self.results, self.golden, self.compose = (
            folder / "results",
            folder / "golden.json",
            compose,
        )

    def run(
        self,
        run_id: str,
        version: str = "0.5.23",
        accepted: Sequence[tuple[int, int]] = USUAL,
        *,
        passes: int = 3,
        prompts: int = 0,  # the first one's number
        overrides: tuple[str, ...] = (),
        digests: dict[str, str] = DIGESTS,
        tokens: int = 64,
        **given: Any,
    ) -> str:
        """A run of that many passes, and what `given` changes in its bench."""
        config = self.compose(*overrides)
        steps = config.config["job"]["steps"]
        asked = [request(prompts + n, tokens=tokens, name=str(n)) for n in range(len(accepted))]
        answers = [
            answered(prompt=str(n), accepted=stood, rounds=rounds)
            for n, (stood, rounds) in enumerate(accepted)
        ]
        made = [one_pass(*answers, number=n) for n in range(passes)]
        length = figures.accept_length(made, steps + 1, 0)
        assert length is not None
        told: dict[str, Any] = {
            "control": False,
            "version": version,
            "steps": steps,
            "draft_tokens": steps + 1,
            "prompts": len(asked),
            **kept(asked, made),
        }
        result = {
            **{"case_id": "case", "status": "ok", "error": None, "started": T0, "ended": T0 + 60},
            **{"curves": {}, "wiring": {}, "notes": [], "fingerprints": digests},
            "metrics": {"accept_length": length.plain(), "tok_s": {"value": 100.0}},
            "bench": {**bench(level(1)), **told, **given},
        }
        paths = new_folder(self.results, run_id)
        snapshot = Snapshot(tree=tree_of({}), commit="none", diff="")
        write_records(paths, config, snapshot, None)
        write_json(paths.result, result)
        return run_id

    def change(self, run_id: str, change: Callable[[dict[str, Any]], None], file: str) -> None:
        """Change a record of a run."""
        path = self.results / "runs" / run_id / file
        record = json.loads(path.read_bytes())
        change(record)
        write_json(path, record)

    def gate(self, run_id: str, *more: str) -> int:
        return main(
            ["gate", f"golden={self.golden}", f"run={run_id}", f"results={self.results}", *more]
        )

    def store(self, run_id: str) -> None:
        assert self.gate(run_id, "store=true") == 0

    def content(self) -> Any:
        return json.loads(self.golden.read_bytes())


@pytest.fixture
def place(tmp_path: Path, compose: Callable[..., Resolved]) -> Place:
    return Place(tmp_path, compose)


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
    assert "the interval of the difference holds 0" in said


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


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "drafter": (
        {"digests": {**DIGESTS, "drafter": "sha256:" + "0" * 64}},
        "differs in drafter (sha256:dddddddddddd… there, sha256:000000000000… here)",
    ),
    "target": (
        {"digests": {**DIGESTS, "target": "sha256:" + "0" * 64}},
        "differs in target (sha256:eeeeeeeeeeee… there, sha256:000000000000… here)",
    ),
    "prompts": ({"prompts": 100}, "differs in prompts (sha256:"),
    "states": ({"states": [3, 31, 59]}, "differs in states ([0, 3, 31] there, [3, 31, 59] here)"),
    "tokens": ({"tokens": 32}, "differs in new_tokens (64 there, 32 here)"),
    "engine": (
        {"overrides": ("engine=vllm",)},
        "differs in engine (sglang there, vllm here)",
    ),
    "flags": (
        {"overrides": ("+engine.flags={tp-size: 8}",)},
        'differs in flags ({} there, {"tp_size": 8} here)',
    ),
    "eos": (
        {"overrides": ("job.ignore_eos=false",)},
        "differs in ignore_eos (true there, false here)",
    ),
    "tree": (
        {"overrides": ("job.topk=2", "job.draft_tokens=8")},
        "differs in topk (1 there, 2 here) and draft_tokens (5 there, 8 here)",
    ),
    "steps": (
        {"overrides": ("job.steps=3",)},
        "differs in steps (4 there, 3 here) and draft_tokens (5 there, 4 here)",
    ),
    "concurrency": (
        {"overrides": ("job.concurrency=[2,1]",)},
        "differs in concurrency (1 there, 2 here)",
    ),
    "number": (
        {"accepted": USUAL[:4]},
        "and number_of_prompts (6 there, 4 here)",
    ),
}


@pytest.mark.parametrize("part", DIFFERENT)
def test_what_nothing_is_stored_of_is_named_by_what_differs(
    part: str, place: Place, capsys: Output
) -> None:
    given, said = DIFFERENT[part]
    place.store(place.run("first"))
    before = place.golden.read_bytes()
    assert place.gate(place.run("second", **given)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert place.golden.read_bytes() == before
    # It gets an entry of its own, and then both are there.
    place.store("second")
    assert len(place.content()["entries"]) == 2
    assert place.gate("first") == 0
    assert place.gate("second") == 0


def test_a_server_that_was_found_running_is_another_question(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    own = ("engine.python=null", "engine.url='http://gpu8:30000'")
    place.compose = lambda *_: resolved("+experiment=engine_layers_m1_2_30", *own)
    assert place.gate(place.run("second")) == 2
    assert "differs in server (started there, found running here)" in capsys.readouterr().err


def test_nothing_stored_is_no_pass(place: Place, capsys: Output) -> None:
    assert place.gate(place.run("first")) == 2
    assert "holds nothing yet; store a figure that you trust with store=true" in (
        capsys.readouterr().err
    )
    assert not place.golden.exists()


FOREIGN = {
    "text": ("a poem", "Expecting value"),
    "nothing": ("", "Expecting value"),
    "a list": ("[]", "it holds no entries"),
    "another's": ('{"name": "package"}', "it holds no entries"),
    "of tomorrow": ('{"format": 2, "entries": []}', "its format is 2, not 1"),
    "a merge": ("<<<<<<< HEAD\n{}", "Expecting value"),
    "no key": ('{"format": 1, "entries": [{"versions": {}}]}', "entry 1 has no key"),
    "no versions": ('{"format": 1, "entries": [{"key": {}}]}', "entry 1 has no versions"),
    "twice": ('{"format": 1, "format": 1, "entries": []}', "a name stands twice"),
    "no number": ('{"format": 1, "entries": [NaN]}', "NaN is no number"),
    "deep": ("[" * 100_000, "recursion"),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("more", [(), ("store=true",)])
def test_a_file_that_is_no_golden_file_stays_as_it_is(
    what: str, more: tuple[str, ...], place: Place, capsys: Output
) -> None:
    content, why = FOREIGN[what]
    place.golden.write_text(content)
    assert place.gate(place.run("first"), *more) == 2
    error = capsys.readouterr().err
    assert "is no golden file" in error
    assert why in error
    assert place.golden.read_text() == content
    assert [path.name for path in place.golden.parent.iterdir() if "golden" in path.name] == [
        "golden.json"
    ]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "count": (lambda f: f.update(tokens=[1, *f["tokens"][1:]]), "numerator is not the sum"),
    "value": (lambda f: f.update(value=9.0), "value is not its numerator over"),
    "interval": (lambda f: f.update(low=3.5), "value is not within its interval"),
    "lists": (lambda f: f.update(tokens=[516], rounds=[180]), "no count for every prompt"),
    "negative": (lambda f: f.update(rounds=[-1] * 6), "counts that are none"),
    "passes": (lambda f: f.pop("passes"), "has no passes"),
    "no pass": (lambda f: f.update(passes=0), "no count for every prompt"),
    "true": (lambda f: f.update(passes=True), "has no passes"),
    "date": (lambda f: f.update(date=7), "has no date"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_figure_that_does_not_add_up_is_refused(what: str, place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    content = place.content()
    (entry,) = content["entries"]
    change, why = BROKEN[what]
    change(entry["versions"]["0.5.23"])
    place.golden.write_text(json.dumps(content))
    before = place.golden.read_bytes()
    assert place.gate("first", "store=true") == 2
    error = capsys.readouterr().err
    assert why in error
    assert "0.5.23 of entry 1" in error
    assert place.golden.read_bytes() == before


def test_two_entries_of_one_key_are_refused(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    content = place.content()
    place.golden.write_text(json.dumps({**content, "entries": content["entries"] * 2}))
    assert place.gate("first") == 2
    assert "two entries have the same key" in capsys.readouterr().err


def test_other_entries_and_what_a_person_added_stay(place: Place) -> None:
    place.store(place.run("first"))
    place.store(place.run("other", prompts=100))
    content = place.content()
    content["entries"][0]["remark"] = "before the upgrade"
    content["note"] = "  [ 1,  2 ]  "
    place.golden.write_text(json.dumps(content))
    place.store(place.run("second", "0.5.24", MORE))
    now = place.content()
    assert now["entries"][0]["versions"].pop("0.5.24")["run"] == "second"
    assert now == content


def test_a_person_can_read_it(place: Place) -> None:
    place.store(place.run("first"))
    assert '"rounds": [30, 30, 30, 30, 30, 30],\n' in place.golden.read_text()


def test_a_write_that_is_cut_short_leaves_the_old_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.store(place.run("first"))
    second, before = place.run("second", "0.5.24", MORE), place.golden.read_bytes()

    def cut(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", cut)  # as a kill there: all is written, nothing is renamed
    assert place.gate(second, "store=true") == 1
    assert place.golden.read_bytes() == before
    monkeypatch.undo()
    place.store(second)
    assert [p.name for p in place.golden.parent.iterdir() if p.is_file()] == ["golden.json"]


def test_a_link_to_the_file_stays_a_link(place: Place, tmp_path: Path) -> None:
    kept_at = tmp_path / "kept.json"
    place.golden.symlink_to(kept_at)
    place.store(place.run("first"))
    assert place.golden.is_symlink()
    assert json.loads(kept_at.read_bytes())["format"] == 1


def test_a_file_that_cannot_be_written_is_said(place: Place, capsys: Output) -> None:
    place.golden.mkdir()
    assert place.gate(place.run("first"), "store=true") == 2
    assert f"golden={place.golden} cannot be read" in capsys.readouterr().err
    with pytest.raises(InputError, match="cannot be written"):
        gate_file.write_golden(Path("/proc/golden.json"), {})


def drop_length(result: dict[str, Any]) -> None:
    del result["metrics"]["accept_length"]


def drop_prompts(result: dict[str, Any]) -> None:
    del result["bench"]["prompts_digest"], result["bench"]["control"]


def fail(result: dict[str, Any]) -> None:
    result.update(status="failed", error={"kind": "BadInput", "message": "no such flag"})


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "control": (lambda r: r["bench"].update(control=True), "result.json", "is a control"),
    "no length": (drop_length, "result.json", "has no accept length"),
    "older": (drop_prompts, "result.json", "an older engine_bench made it"),
    "failed": (fail, "result.json", "gave no answer (no such flag)"),
    "job": (lambda r: r.update(job="drafter_test"), "run.json", "is of job=drafter_test"),
}


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("more", [(), ("store=true",)])
def test_a_run_without_a_figure_to_hold_is_bad_input(
    what: str, more: tuple[str, ...], place: Place, capsys: Output
) -> None:
    place.store(place.run("first"))
    before = place.golden.read_bytes()
    change, file, said = UNFIT[what]
    place.change(place.run("second"), change, file)
    assert place.gate("second", *more) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert place.golden.read_bytes() == before


def test_a_run_that_has_not_ended_is_not_held(place: Place, capsys: Output) -> None:
    run_id = place.run("first")
    (place.results / "runs" / run_id / "result.json").unlink()
    assert place.gate(run_id, "store=true") == 2
    assert "has no result yet; follow it to its end" in capsys.readouterr().err


def test_counts_that_could_never_fail_are_not_taken(place: Place, capsys: Output) -> None:
    both = [request(4), request(9)]
    together = one_pass(answered(), answered(prompt="1"), counted=Counters(rounds=6, accepted=8))
    assert place.gate(place.run("pooled", **kept(both, [together])), "store=true") == 2
    assert "was counted for all requests together" in capsys.readouterr().err
    assert place.gate(place.run("one", accepted=USUAL[:1]), "store=true") == 2
    assert "asked one prompt" in capsys.readouterr().err
    assert not place.golden.exists()


def test_an_answer_that_ended_with_its_first_token_has_no_round(place: Place) -> None:
    place.store(place.run("first", accepted=[*USUAL, (0, 0)]))
    assert place.gate("first") == 0
    assert place.gate(place.run("second", accepted=[*FEWER, (0, 0)])) == 3


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


def test_a_hypothesis_that_nothing_is_stored_of_is_not_run(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    arguments = [f"golden={place.golden}", *EXPERIMENT, "job.steps=3", f"results={place.results}"]
    assert main(["gate", *arguments]) == 2
    assert "differs in steps (4 there, 3 here)" in capsys.readouterr().err
    assert len(list((place.results / "runs").iterdir())) == 1


def test_its_help_names_its_exit_codes(capsys: Output) -> None:
    assert main(["gate", "--help"]) == 0
    said = capsys.readouterr().out
    assert "python -m orchestrator gate golden=FILE" in said
    assert "3: clearly lower" in said
    assert main(["gat"]) == 2
    assert "did you mean 'gate'?" in capsys.readouterr().err


def figure(counts: Sequence[tuple[int, int]], passes: int = 1) -> Figure:
    """Of accepted drafts and rounds by prompt in a pass."""
    tokens = [passes * (accepted + rounds) for accepted, rounds in counts]
    rounds = [passes * rounds for _, rounds in counts]
    value = sum(tokens) / sum(rounds)
    return Figure(
        **{"value": value, "low": value, "high": value, "passes": passes},
        **{"tokens": tuple(tokens), "rounds": tuple(rounds), "date": "", "run": ""},
    )


@pytest.mark.parametrize(
    "counts", [FEWER, ONE_ELSE, MORE, [(20, 9), (18, 11), (22, 10), (0, 14), (20, 10), (30, 8)]]
)
def test_the_interval_is_the_searchs_of_the_same_counts(counts: list[tuple[int, int]]) -> None:
    (held,) = hold(figure(counts), {"0": figure(USUAL)}, most=STEPS)
    mine, theirs = ([Count(a + r, r) for a, r in found] for found in (counts, USUAL))
    wanted = rate_difference(mine, theirs, comparisons=1, most=float(STEPS))
    assert (held.value, held.low, held.high) == pytest.approx(
        (wanted.value, wanted.low, wanted.high)
    )


def test_more_passes_of_the_same_make_no_interval_narrower() -> None:
    (once,) = hold(figure(ONE_ELSE), {"0": figure(USUAL)}, most=STEPS)
    (often,) = hold(figure(ONE_ELSE, passes=50), {"0": figure(USUAL, passes=9)}, most=STEPS)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_one_prompt_with_rounds_says_nothing_of_the_others() -> None:
    (held,) = hold(figure([(10, 10), (0, 0)]), {"0": figure([(20, 10), (0, 0)])}, most=STEPS)
    assert (held.value, held.low, held.high) == (-1.0, -STEPS, STEPS)
    assert not held.lower


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
    world = make_world(tmp_path / "world")
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

"""What the gate takes of a run, and how one is held against another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eagle3.metrics import Count
from eagle3.search.bounds import rate_difference
from jobs.engines.kept import kept
from jobs.engines.records import Counters
from orchestrator.__main__ import main
from orchestrator.gate_check import Held, hold
from orchestrator.gate_figure import LEAST_PROMPTS
from tests.jobs.engines.made import answered, one_pass, request
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
from tests.orchestrator.test_config import resolved

Output = pytest.CaptureFixture[str]


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
        {"accepted": [*USUAL, (20, 10)]},
        "and number_of_prompts (6 there, 7 here)",
    ),
    "patch": (
        {"overrides": ("engine.patch=/mine/my.patch",), "patch": {"sha256": "1" * 64}},
        "differs in patch_digest (null there, sha256:111111111111… here) and patch (null there, my.",
    ),
    "shipped": (
        {"overrides": ("engine.patch=embedding_capture",), "patch": {"sha256": "1" * 64}},
        "differs in patch (null there, embedding_capture here)",
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


def launched(tag: str, *words: str, plain: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The overrides of commands of one's own."""
    image = [f"lmsysorg/sglang:{tag}", "--port={port}"]
    drafted = ["docker", "run", "--name", "drafted", *image, "--draft={drafter}", *words]
    baseline = ["docker", "run", "--name", "plain", *image, *plain]
    commands = {"launch": drafted, "baseline_launch": baseline}
    return (
        "engine.version=0.5.23",
        *(f"engine.{key}={json.dumps(command)}" for key, command in commands.items()),
    )


def test_a_server_of_other_words_is_another_question(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    place.compose = lambda *overrides: resolved("+experiment=engine_layers_m1_2_30", *overrides)
    for number, overrides in enumerate(
        (
            launched("v0.5.23"),
            launched("v0.5.23", "--quantization=fp8"),
            launched("v0.5.23", plain=("--quantization=fp8",)),
        )
    ):
        assert place.gate(place.run(f"other{number}", overrides=overrides)) == 2
        assert "launch (" in capsys.readouterr().err
        place.store(f"other{number}")
    assert len(place.content()["entries"]) == 4
    # The image's release is the engine's version.
    upgraded = launched("v0.5.24.post1", "--quantization=fp8")
    assert place.gate(place.run("newer", "0.5.24.post1", FEWER, overrides=upgraded)) == 3
    assert place.gate(place.run("same", "0.5.24.post1", overrides=upgraded)) == 0


def test_a_patch_that_was_changed_is_another_question(place: Place, capsys: Output) -> None:
    patched: dict[str, Any] = {"overrides": ("engine.patch=/mine/my.patch",)}
    place.store(place.run("first", **patched, patch={"sha256": "1" * 64}))
    assert place.gate(place.run("second", **patched, patch={"sha256": "2" * 64})) == 2
    said = "differs in patch_digest (sha256:111111111111… there, sha256:222222222222… here)"
    assert said in capsys.readouterr().err


def test_the_shipped_patch_is_of_each_release(place: Place) -> None:
    patched: dict[str, Any] = {"overrides": ("engine.patch=embedding_capture",)}
    place.store(place.run("first", **patched, patch={"sha256": "1" * 64}))
    other = place.run("second", "0.5.24", **patched, patch={"sha256": "2" * 64})
    place.store(other)
    (entry,) = place.content()["entries"]
    assert (entry["key"]["patch"], entry["key"]["patch_digest"]) == ("embedding_capture", None)
    assert {version: one["patch"] for version, one in entry["versions"].items()} == {
        "0.5.23": f"sha256:{'1' * 64}",
        "0.5.24": f"sha256:{'2' * 64}",
    }
    assert place.gate("first") == place.gate(other) == 0


@pytest.mark.parametrize("more", [(), ("store=true",)])
def test_a_shipped_patch_that_was_changed_is_not_held_against_its_older_self(
    more: tuple[str, ...], place: Place, capsys: Output
) -> None:
    patched: dict[str, Any] = {"overrides": ("engine.patch=embedding_capture",)}
    place.store(place.run("first", **patched, patch={"sha256": "1" * 64}))
    before = place.golden.read_bytes()
    assert place.gate(place.run("second", **patched, patch={"sha256": "2" * 64}), *more) == 2
    error = capsys.readouterr().err
    assert (
        "has 0.5.23 with another embedding_capture (sha256:111111111111… there, sha256:222222222222… "
        "here), so the two are not compared; take 0.5.23 out of" in error
    )
    assert error.count("\n") == 1
    assert place.golden.read_bytes() == before


def test_an_older_file_that_holds_the_shipped_patch_by_name_alone_is_read(place: Place) -> None:
    patched: dict[str, Any] = {"overrides": ("engine.patch=embedding_capture",)}
    place.store(place.run("first", **patched, patch={"sha256": "1" * 64}))
    content = place.content()
    del content["entries"][0]["versions"]["0.5.23"]["patch"]
    place.golden.write_text(json.dumps(content))
    assert place.gate(place.run("second", **patched, patch={"sha256": "2" * 64})) == 0
    content["entries"][0]["versions"]["0.5.23"]["patch"] = 1
    place.golden.write_text(json.dumps(content))
    assert place.gate("second") == 2


def test_an_older_figure_is_stored_again_once_it_can_say_its_patch(place: Place) -> None:
    patched: dict[str, Any] = {"overrides": ("engine.patch=embedding_capture",)}
    place.store(place.run("first", **patched, patch={"sha256": "1" * 64}))
    said = place.content()
    older = place.content()
    del older["entries"][0]["versions"]["0.5.23"]["patch"]
    place.golden.write_text(json.dumps(older))
    place.store("first")
    assert place.content() == said


def test_an_entry_that_does_not_say_its_server_is_none(place: Place, capsys: Output) -> None:
    place.store(place.run("first"))
    content = place.content()
    del content["entries"][0]["key"]["launch"]
    place.golden.write_text(json.dumps(content))
    arguments = [f"golden={place.golden}", *EXPERIMENT, f"results={place.results}"]
    for asked in (arguments, [*arguments[:1], "run=first", arguments[-1]]):
        assert main(["gate", *asked]) == 2
        assert "differs in launch (not said there, null here)" in capsys.readouterr().err


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
    asked = [request(number) for number in range(LEAST_PROMPTS)]
    answers = [answered(prompt=str(number)) for number in range(LEAST_PROMPTS)]
    together = one_pass(*answers, counted=Counters(rounds=18, accepted=24))
    assert place.gate(place.run("pooled", **kept(asked, [together])), "store=true") == 2
    assert "was counted for all requests together" in capsys.readouterr().err
    few = [*USUAL[: LEAST_PROMPTS - 1], (0, 0)]  # one ended with its first token
    for run_id, counts, said in (("one", USUAL[:1], "1 prompt,"), ("few", few, "5 prompts,")):
        assert place.gate(place.run(run_id, accepted=counts), "store=true") == 2
        assert f"has rounds of {said}" in capsys.readouterr().err
    assert not place.golden.exists()


def test_an_answer_that_ended_with_its_first_token_has_no_round(place: Place) -> None:
    place.store(place.run("first", accepted=[*USUAL, (0, 0)]))
    assert place.gate("first") == 0
    assert place.gate(place.run("second", accepted=[*FEWER, (0, 0)])) == 3


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


def halved(lengths: Sequence[int], steps: int) -> Held:
    """Answers of one length with these accept lengths, against the same with half of each."""
    tokens = 2520  # of which every length up to 10 is a divisor
    then = [(tokens - tokens // length, tokens // length) for length in lengths]
    now = [(tokens - 2 * rounds, 2 * rounds) for _, rounds in then]
    (held,) = hold(figure(now), {"0": figure(then)}, most=steps)
    return held


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_halving_of_every_prompt_is_clearly_lower(steps: int) -> None:
    # The spread is widest with every accept length at an end: 2, of which half is 1, or steps + 1.
    for longest in range(LEAST_PROMPTS + 1):
        lengths = [2] * (LEAST_PROMPTS - longest) + [steps + 1] * longest
        assert halved(lengths, steps).lower


@pytest.mark.parametrize(("prompts", "t"), [(2, 12.706205), (4, 3.182446), (6, 2.570582)])
def test_of_few_prompts_a_halving_could_be_chance(prompts: int, t: float) -> None:
    half = prompts // 2
    held = halved([2] * half + [8] * half, 8)
    # Rounds of 1/2 and 1/8: their mean is 5/16, and each is 3/16 away from it. A prompt's part of the
    # difference is half of its part of the stored ratio, 16/5.
    spread = 3 / 5 / math.sqrt(prompts - 1)
    assert held.value == pytest.approx(-8 / 5)
    assert held.high == pytest.approx(min(-8 / 5 * (1 - t * spread), 8), abs=1e-5)
    assert held.lower is (prompts >= LEAST_PROMPTS)

"""A known-good drafter beside the one that is measured: what is refused, asked and said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import load_drafter
from eagle3.errors import BadInput
from eagle3.metrics import Rate
from jobs.engines import room
from jobs.engines.engine import Draft
from jobs.engines.known_good import (
    KNOWN_GOOD,
    KnownGood,
    PointsAt,
    half_right,
    in_words,
    known_good_at,
    points_at,
    read,
    well,
)
from tests.eagle3.small import SHAPE, write_tensors
from tests.jobs.engines import fake
from tests.jobs.engines.made import answered, one_pass
from tests.jobs.engines.test_bench import KEY, Bench, arms

BOTH = pytest.mark.parametrize("name", ["sglang", "vllm"])
LINE = Draft(folder=Path("/ours"), steps=3)
IDS = [2, 3, 4]


@pytest.fixture
def bench(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """With room for two servers."""
    monkeypatch.setattr(room, "memory", lambda: {"available": 1 << 40})
    return Bench(tmp_path, python)


@pytest.fixture
def public(bench: Bench, tmp_path: Path) -> Path:
    """Another drafter of the same target, with ids of its own."""
    folder = tmp_path / "public"
    shutil.copytree(bench.desk.drafter, folder)
    tell(folder, eagle_config={KEY: IDS})
    return folder


def tell(folder: Path, **changes: Any) -> None:
    """Other values in a folder's config.json; None takes a key away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# What is refused before any server starts.


def refused(bench: Bench, folder: Path, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        bench.run(known_good=folder)
    assert "is starting" not in bench.said()


def test_a_folder_that_is_not_there_is_refused(bench: Bench, tmp_path: Path) -> None:
    refused(bench, tmp_path / "nowhere", r"^job\.known_good: .*nowhere is no folder; name the one")


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("config.json", r"^job\.known_good: .*config\.json cannot be read: No such file"),
        ("model.safetensors", r"^job\.known_good: .*public holds no weights: expected model\.s"),
    ],
)
def test_a_folder_without_config_or_weights_is_refused(
    bench: Bench,
    public: Path,
    lacking: str,
    words: str,
) -> None:
    (public / lacking).unlink()
    refused(bench, public, words)


def test_weights_that_are_cut_off_are_refused(bench: Bench, public: Path) -> None:
    weights = public / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(bench, public, r"^job\.known_good: .*model\.safetensors is cut off")


@pytest.mark.parametrize("linked", [False, True])
def test_the_drafter_itself_is_no_control(bench: Bench, tmp_path: Path, linked: bool) -> None:
    folder = bench.desk.drafter
    if linked:
        folder = tmp_path / "link"
        folder.symlink_to(bench.desk.drafter)
    refused(
        bench, folder, r"^job\.known_good: .* is the drafter that is measured; name another one"
    )


def test_a_copy_of_the_drafter_is_no_control_either(bench: Bench, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bench.desk.drafter, copy)
    refused(bench, copy, r"^job\.known_good: .*copy is the drafter that is measured")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"hidden": SHAPE.target_hidden + 4},
            "hidden size 20, but this target has 24; name a drafter",
        ),
        (
            {"vocab": SHAPE.vocab + 7},
            "vocabulary 50, but this target has 57; name a drafter of this",
        ),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    bench: Bench,
    public: Path,
    other: dict[str, int],
    words: str,
) -> None:
    sizes = {"hidden": SHAPE.target_hidden, "vocab": SHAPE.vocab}
    found = read(public, bench.desk.drafter, "", **sizes)
    assert found.fingerprint == load_drafter(public).fingerprint
    assert found.notes == ()
    with pytest.raises(
        BadInput, match=rf"^job\.known_good: .*public is made for a target of {words}"
    ):
        read(public, bench.desk.drafter, "", **{**sizes, **other})


def test_nothing_is_started_for_a_drafter_of_another_target(bench: Bench, public: Path) -> None:
    weights = load_file(public / "model.safetensors")
    weights["embed_tokens.weight"] = torch.randn(SHAPE.vocab + 7, SHAPE.hidden)
    write_tensors(public / "model.safetensors", weights)
    tell(public, vocab_size=SHAPE.vocab + 7)
    refused(bench, public, r"made for a target of vocabulary 57, but this target has 50")


def test_a_kind_that_only_engines_run_is_taken_with_what_its_config_says(
    bench: Bench,
    public: Path,
) -> None:
    (public / "config.json").write_text(json.dumps({"model_type": "mla", "hidden_size": 20}))
    write_tensors(public / "model.safetensors", {"midlayer.kv_b_proj.weight": torch.ones(2, 2)})
    found = read(public, bench.desk.drafter, "", hidden=20, vocab=50)
    (note,) = found.notes
    assert note.endswith("config.json does not say its target's vocabulary: it is not checked")
    with pytest.raises(BadInput, match="hidden size 20, but this target has 24"):
        read(public, bench.desk.drafter, "", hidden=24, vocab=50)


# What it says.


def test_half_right_is_the_sum_of_halves() -> None:
    assert half_right(Draft(folder=LINE.folder, steps=1)) == 1 + 1 / 2
    assert half_right(LINE) == 1 + 1 / 2 + 1 / 4 + 1 / 8
    tree = Draft(folder=LINE.folder, steps=3, topk=2, draft_tokens=6)
    assert half_right(tree) == half_right(LINE)
    # Three tokens, the root among them, hold no third draft.
    assert half_right(Draft(folder=LINE.folder, steps=3, topk=2, draft_tokens=3)) == 1.75


def rate(value: float, low: float, high: float) -> Rate:
    return Rate(value=value, low=low, high=high, numerator=1, denominator=1, truth="target_argmax")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (rate(2.5, 2.0, 3.0), True),
        (rate(1.2, 1.0, 1.8), False),
        (rate(2.5, 1.8, 3.0), None),
        (rate(1.875, 1.875, 1.875), None),
        (None, None),
    ],
)
def test_well_is_said_of_whole_intervals_only(found: Rate | None, said: bool | None) -> None:
    assert well(found, half_right(LINE)) is said


@pytest.mark.parametrize(
    ("theirs", "ours", "where"),
    [
        (True, False, PointsAt.drafter),
        (False, False, PointsAt.engine),
        (True, True, PointsAt.nothing),
        (False, True, PointsAt.known_good),
        (None, False, None),
        (True, None, None),
    ],
)
def test_both_together_say_where_to_look(
    theirs: bool | None, ours: bool | None, where: PointsAt | None
) -> None:
    assert points_at(theirs, ours, alone=False) is where
    # Only of a drafter that is good alone it is known that it was trained well.
    good = PointsAt.wiring if where is PointsAt.drafter else where
    assert points_at(theirs, ours, alone=True) is good


@pytest.mark.parametrize(
    ("alone", "words"),
    [
        (None, "our drafter: its wiring, its teacher or its training (`diagnose` tells which)"),
        (1.875, "our drafter: its wiring, its teacher or its training (`diagnose` tells which)"),
        (1.9, "wiring"),
    ],
)
def test_the_wiring_alone_is_named_where_training_is_not_at_fault(
    alone: float | None, words: str
) -> None:
    found = at(POOR, 4, 4, alone=alone)
    (said,) = in_words(found, 9.0, POOR)
    assert said.endswith(words)
    assert ("our drafter alone lies above 1.88" in said) is (words == "wiring")


def at(ours: Rate | None, *rounds: int, alone: float | None = None) -> KnownGood:
    """Two answers of 12 tokens behind the first, in so many rounds each; 2 s in all."""
    answers = [
        answered(13, rounds=n, accepted=12 - n, latency_s=6.5, prompt=str(i))
        for i, n in enumerate(rounds)
    ]
    found = known_good_at([one_pass(*answers, wall_s=2.0, arm=KNOWN_GOOD)], ours, LINE, 0, alone)
    assert found is not None
    return found


POOR, GOOD = rate(1.1, 1.0, 1.2), rate(3.0, 2.8, 3.2)


@pytest.mark.parametrize(
    ("ours", "rounds", "where", "words"),
    [
        (
            POOR,
            (4, 4),
            "drafter",
            "3.00 and 13.0 tok/s, ours 1.10 and 9.0: the engine does accept, so look at our drafter: "
            "its wiring, its teacher or its training (`diagnose` tells which)",
        ),
        (
            POOR,
            (12, 12),
            "engine",
            "1.00 and 13.0 tok/s, ours 1.10 and 9.0: both lie below 1.88, which drafts have that are "
            "right half of the time, so look at the engine, its flags or the prompts",
        ),
        (
            GOOD,
            (4, 4),
            "nothing",
            "3.00 and 13.0 tok/s, ours 3.00 and 9.0: both lie above 1.88, which drafts have that are "
            "right half of the time, so neither engine nor wiring is at fault by this",
        ),
        (
            GOOD,
            (12, 12),
            "known_good",
            "1.00 and 13.0 tok/s, ours 3.00 and 9.0: ours is the better one, so the known-good is no "
            "control for this target and these prompts",
        ),
        (
            POOR,
            (4,),  # one text alone says nothing about others
            None,
            "3.00 and 6.5 tok/s, ours 1.10 and 9.0: these prompts do not tell which of them lie above "
            "1.88, which drafts have that are right half of the time, so ask more, one at a time "
            "(job.max_prompts, job.concurrency)",
        ),
    ],
)
def test_each_outcome_is_a_sentence(
    ours: Rate, rounds: tuple[int, ...], where: str | None, words: str
) -> None:
    found = at(ours, *rounds)
    assert found.plain()["points_at"] == where
    assert found.plain()["well_above"] == 1.875
    assert in_words(found, 9.0, ours) == [f"the known-good drafter has accept length {words}"]


def test_without_one_nothing_is_said() -> None:
    assert known_good_at([], GOOD, LINE, 0) is None
    assert in_words(None, 9.0, GOOD) == []


def test_where_nobody_counts_no_place_is_named() -> None:
    found = known_good_at([one_pass(answered(13), wall_s=2.0)], POOR, LINE, 0)
    assert found is not None
    assert found.points_at is None
    assert set(found.metrics()) == {"tok_s_known_good"}
    assert in_words(found, 9.0, None)[0].startswith(
        "the known-good drafter has accept length none and 6.5 tok/s, ours none and 9.0: these"
    )


# The job as a whole.


@pytest.mark.runs
@BOTH
@pytest.mark.parametrize(
    ("poor", "lengths", "where"),
    [
        ("drafter", (2.5, 1.0), "drafter"),
        ("public", (1.0, 2.5), "known_good"),
        ("", (2.5, 2.5), "nothing"),
    ],
)
def test_it_is_asked_as_ours_is_with_its_own_config(
    name: str,
    bench: Bench,
    public: Path,
    poor: str,
    lengths: tuple[float, float],
    where: str,
) -> None:
    before = (public / "config.json").read_bytes()
    result = bench.run(
        name,
        known_good=public,
        advice=False,
        concurrency=[1, 2],
        engine={"env": {fake.POOR: poor}},
    )
    assert arms(result) == [("baseline", 0), ("speculative", 0), ("known_good", 0)]
    found = result["bench"]
    ours, theirs = (" ".join(server["command"]) for server in found["servers"][1:])
    drafter = str(bench.folder / "engine" / "drafter")
    # But for where the drafter lies and the port both are told the same.
    assert str(public) in theirs
    assert without_port(theirs.replace(str(public), drafter)) == without_port(ours)
    assert (public / "config.json").read_bytes() == before
    for level in found["levels"]:
        assert level["accept_length"]["value"] == lengths[1]
        assert level["known_good"]["accept_length"]["value"] == lengths[0]
        assert level["known_good"]["tok_s"]["value"] > 0
    assert found["known_good"]["folder"] == str(public)
    assert (
        found["known_good"]["points_at"] == found["levels"][0]["known_good"]["points_at"] == where
    )
    assert found["levels"][0]["beside_in_words"][0].startswith("the known-good drafter has accept")
    metrics = result["metrics"]
    assert metrics["accept_length_known_good"] == found["known_good"]["accept_length"]
    assert metrics["tok_s_known_good"]["value"] > 0
    assert metrics["accept_length"]["value"] == lengths[1]
    json.dumps(result, allow_nan=False)


def without_port(command: str) -> str:
    """A server's command line without its port."""
    words = command.split()
    at = words.index("--port")
    return " ".join(words[:at] + words[at + 2 :])


@pytest.mark.runs
def test_where_none_is_named_nothing_is_said(bench: Bench) -> None:
    result = bench.run(advice=False)
    assert result["bench"]["known_good"] is None
    assert result["bench"]["levels"][0]["known_good"] is None
    assert "accept_length_known_good" not in result["metrics"]


@pytest.mark.runs
def test_beside_a_tree_it_drafts_the_same_tree(bench: Bench, public: Path) -> None:
    result = bench.run(topk=2, draft_tokens=6, chain=True, known_good=public)
    assert [label for label, _ in arms(result)] == [
        *("baseline", "speculative", "chain", "known_good")
    ]
    command = result["bench"]["servers"][3]["command"]
    told = {"num-steps": "3", "eagle-topk": "2", "num-draft-tokens": "6"}
    for flag, value in told.items():
        assert command[command.index(f"--speculative-{flag}") + 1] == value
    assert len(result["bench"]["levels"][0]["beside_in_words"]) == 2


@pytest.mark.runs
@pytest.mark.parametrize("fault", ["dies_at_start", "dies"])
def test_one_whose_server_fails_is_said_and_all_else_stays(
    bench: Bench, public: Path, fault: str
) -> None:
    bench.ask([[3, 4, 9], [fake.VICTIM, 5, 9]])  # the server's first request is not the victim
    env = {fake.FAULT: fault, fake.FAULTS_OF: "public"}
    result = bench.run(known_good=public, advice=False, engine={"env": env})
    found = result["bench"]
    assert found["known_good"]["folder"] == str(public)
    why = found["known_good"]["failed"]
    assert why.startswith("known_good: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in why
    assert set(found["known_good"]) == {"folder", "fingerprint", "failed"}
    note = f"{why}; so known_good is left out, and all that was measured stays"
    assert note in result["notes"]
    assert note in bench.said()
    assert {p["arm"] for p in found["passes"]} == {"baseline", "speculative"}
    assert {"accept_length", "tok_s", "speedup", "break_even"} <= set(result["metrics"])
    assert not {"accept_length_known_good", "tok_s_known_good"} & set(result["metrics"])
    assert found["levels"][0]["known_good"] is None
    assert found["levels"][0]["beside_in_words"] == []
    json.dumps(result, allow_nan=False)


@pytest.mark.runs
def test_simulated_arms_whose_servers_fail_lose_nothing_either(bench: Bench, public: Path) -> None:
    env = {fake.FAULT: "dies_at_start", fake.FAULTS_OF: "simulated"}
    result = bench.run(
        simulate=True, known_good=public, advice=False, engine={"env": env}, budget={"restarts": 5}
    )
    assert [label for label, _ in arms(result)] == ["baseline", "speculative", "known_good"]
    left = [n.rpartition("; so ")[2] for n in result["notes"] if n.startswith("simulated_")]
    assert left == [
        f"simulated_{which} is left out, and all that was measured stays"
        for which in ("floor", "ceiling")
    ]
    level = result["bench"]["levels"][0]
    assert (level["floor"], level["ceiling"]) == (None, None)
    assert result["bench"]["known_good"]["failed"] is None


@pytest.mark.runs
def test_its_start_counts_as_one(bench: Bench, public: Path) -> None:
    words = r"this takes 3 starts .* job\.budget\.restarts is 2; set job\.budget\.restarts=3$"
    with pytest.raises(BadInput, match=words):
        bench.run(known_good=public, advice=False, budget={"restarts": 2})
    assert "3 starts; " in bench.said()
    assert "is starting" not in bench.said()

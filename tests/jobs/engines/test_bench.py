"""The job as a whole, with a fake engine: what is started, asked, told and left."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import BadInput
from jobs import engine_bench, engine_probe
from jobs.engines import gpu_memory, room
from jobs.engines.engine import Draft
from jobs.engines.talk import Address, get
from jobs.events import Events
from tests.jobs.engines import fake
from tests.jobs.engines.conftest import Serve
from tests.jobs.test_drafter_test import LAYERS, STATES, WIRING, Desk

pytestmark = pytest.mark.runs  # each starts servers

BOTH = pytest.mark.parametrize("name", ["sglang", "vllm"])
PROMPTS, TOKENS, STEPS = 4, 21, 3
KEY = "eagle_aux_hidden_state_layer_ids"


class Bench:
    """The files of a test, and the job on them."""

    def __init__(self, folder: Path, python: str) -> None:
        self.desk, self.python, self.folder = Desk(folder), python, folder
        self.prompts = folder / "asked.jsonl"
        self.ask([[1, 9, 4 + 5 * n] for n in range(PROMPTS)])

    def ask(self, prompts: list[list[int]]) -> None:
        self.prompts.write_text("".join(json.dumps({"input_ids": p}) + "\n" for p in prompts))

    def run(
        self,
        name: str = "sglang",
        engine: dict[str, Any] | None = None,
        budget: dict[str, Any] | None = None,
        patch: str | None = None,
        known_good: Path | None = None,
        layers: tuple[int, ...] = (0, 3, 5),
        open_job: Callable[..., Any] = engine_bench.open_job,
        **settings: Any,
    ) -> dict[str, Any]:
        data = {"path": str(self.desk.data), "states": STATES, "layout": None, "damaged": "fail"}
        ends = {"pairs": 2, "least": 2, "precision": 0.0, "minutes": 60.0, "restarts": 4}
        asked: dict[str, Any] = {
            **{"name": name, "version": None, "engine_class": None, "flags": {}, "env": {}},
            **{"python": self.python, "url": None, "baseline_url": None, "patch": None},
            **{"launch": None, "baseline_launch": None},
        }
        request = {
            **{"device": "cpu", "steps": STEPS, "topk": 1, "draft_tokens": None, "seed": 0},
            **{"max_prompts": 16, "new_tokens": TOKENS, "ignore_eos": True, "concurrency": [1]},
            **{"control": False, "advice": True, "simulate": False, "chain": False},
            **{"start_s": 60.0, "first_s": 30.0, "request_s": 30.0},
            "engine": {**asked, **(engine or {})},
            "budget": {**ends, "repeats": 0, **(budget or {})},
            "inputs": {
                "target": {"path": str(self.desk.target), "layout": "hf", "made": ""},
                "drafter": {"path": str(self.desk.drafter), "layout": None},
                "data": {**data, "target_argmax": None},
                "prompts": str(self.prompts),
                "patch": patch,
                "known_good": None if known_good is None else str(known_good),
            },
            **settings,
        }
        with Events(self.folder / "events.jsonl") as events:
            job = open_job(request, events)
            case = {"case_id": "a", "wiring": {**WIRING, "layers": layers}}
            answer: dict[str, Any] = job.run_case(case)
            return answer

    def said(self) -> str:
        return (self.folder / "events.jsonl").read_text()

    def served(self) -> dict[str, Any]:
        """The config.json that the engine was given."""
        found: dict[str, Any] = json.loads(
            (self.folder / "engine" / "drafter" / "config.json").read_text()
        )
        return found


@pytest.fixture
def bench(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(room, "memory", lambda: {"available": 1 << 40})
    return Bench(tmp_path, python)


@pytest.fixture
def cramped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Without room for two servers."""
    monkeypatch.setattr(room, "memory", lambda: {"available": 1 << 30})
    return bench


def arms(result: dict[str, Any]) -> list[tuple[str, int]]:
    return [(server["label"], server["start"]) for server in result["bench"]["servers"]]


@BOTH
def test_the_accept_length_is_what_the_engine_does_beside_what_the_drafter_does_alone(
    name: str, bench: Bench
) -> None:
    result = bench.run(name)
    # In verifications of 4, 1, 4, 1, … for each prompt in each of two passes, or in the one of them
    # that the machine's other work left alone.
    length = result["metrics"]["accept_length"]
    drafted = [p for p in result["bench"]["passes"] if p["arm"] == "speculative"]
    passes = len([p for p in drafted if not p["disturbed"]] or drafted)
    assert length["value"] == 2.5
    assert length["numerator"] == 20 * PROMPTS * passes
    assert length["denominator"] == 8 * PROMPTS * passes
    assert {"accuracy", "tok_s", "tok_s_baseline", "speedup"} <= (result["metrics"].keys())
    found = result["bench"]
    assert (found["ids"], found["states"]) == (
        [-1, 2, 4] if name == "sglang" else [0, 3, 5],
        [0, 3, 5],
    )
    assert arms(result) == [("baseline", 0), ("speculative", 0), ("fewer_steps", 0)]
    assert found["agreement"]["speculative"] == {"prompts": PROMPTS, "same": PROMPTS, "first": []}
    json.dumps(result, allow_nan=False)


def test_break_even_and_advice_follow_from_what_was_measured(bench: Bench) -> None:
    (level,) = bench.run()["bench"]["levels"]
    limits = level["limits"]
    assert limits["break_even"] == pytest.approx(limits["round_s"] / limits["step_s"])
    assert level["per_position"] == [0.5, 0.5, 0.5]
    assert set(level["advice"]["by_steps"]) == {"0", "1", "2", "3"}
    # All prompts have three tokens, and each pass is as the other.
    (bucket,) = level["by_context"]
    assert (bucket["from"], bucket["below"], bucket["prompts"]) == (2, 4, PROMPTS)
    assert bucket["accept_length"] == level["accept_length"]
    assert {m["accept_length"]["value"] for m in level["over_time"]} == {2.5}
    assert level["over_time"][0]["after_s"] == 0.0
    assert level["parts_in_words"] == []


@BOTH
def test_the_engine_is_given_the_wirings_ids_and_the_drafter_stays_as_it_is(
    name: str, bench: Bench
) -> None:
    config = bench.desk.drafter / "config.json"
    before = config.read_bytes()
    bench.run(name, advice=False)
    served = bench.served()
    assert (served["eagle_config"] if name == "sglang" else served)[KEY] == (
        [-1, 2, 4] if name == "sglang" else [0, 3, 5]
    )
    assert config.read_bytes() == before


def test_nothing_that_was_started_is_left(
    bench: Bench, is_running: Callable[[int], bool], eventually: Callable[..., Any]
) -> None:
    bench.run()
    notes = [json.loads(line).get("text", "") for line in bench.said().splitlines()]
    pids = [int(n.partition("(pid ")[2].partition(",")[0]) for n in notes if "is starting" in n]
    assert len(pids) == 3
    assert [pid for pid in pids if is_running(pid)] == []


def test_without_room_for_two_one_stands_at_a_time(cramped: Bench) -> None:
    result = cramped.run("vllm", advice=False)
    assert arms(result) == [("baseline", 0), ("speculative", 0), ("baseline", 1)]
    assert "passes of each server, one at a time, since two servers need about" in cramped.said()
    (level,) = result["bench"]["levels"]
    assert level["between_starts"] >= 0
    assert level["accept_length"]["value"] == 2.5
    passes = [(p["arm"], p["server"], p["number"]) for p in result["bench"]["passes"]]
    assert passes == [
        *[("baseline", 0, 0), ("baseline", 0, 1), ("speculative", 0, 0), ("speculative", 0, 1)],
        *[("baseline", 1, 0), ("baseline", 1, 1)],
    ]


def test_more_starts_than_may_be_are_refused_before_the_first(cramped: Bench) -> None:
    with pytest.raises(
        BadInput, match=r"this takes 4 starts .* job\.budget\.restarts is 3 \(two s"
    ):
        cramped.run(budget={"restarts": 3})
    assert "is starting" not in cramped.said()


def test_floor_and_ceiling_are_simulated_and_kept_apart(bench: Bench) -> None:
    result = bench.run(simulate=True, concurrency=[1, 2], budget={"restarts": 5})
    assert arms(result) == [
        *[("baseline", 0), ("speculative", 0), ("fewer_steps", 0)],
        *[("simulated_floor", 0), ("simulated_ceiling", 0)],
    ]
    for level in result["bench"]["levels"]:
        floor, ceiling = level["floor"], level["ceiling"]
        # 20 tokens behind the prefill's, one or four a round.
        assert (floor["accept_length_set"], floor["accept_length"]["denominator"]) == (1, 80)
        assert (ceiling["accept_length_set"], ceiling["accept_length"]["denominator"]) == (4, 20)
        for arm in (floor, ceiling):
            assert (arm["simulated"], arm["held"]) == (True, True)
            assert arm["accept_length"]["value"] == arm["accept_length_set"]
            per_round = 1 / level["limits"]["round_s"]
            assert arm["decode_tok_s_predicted"] == pytest.approx(
                arm["accept_length_set"] * per_round
            )
        assert {line.partition(":")[0] for line in level["beside_in_words"]} == {"simulated"}
        # What was measured is as without them.
        assert level["accept_length"]["value"] == 2.5
        assert {m["accept_length"]["value"] for m in level["over_time"]} == {2.5}
    assert result["metrics"]["accept_length"]["value"] == 2.5
    assert result["bench"]["agreement"]["speculative"]["same"] == PROMPTS
    assert set(result["bench"]["agreement"]) <= {"speculative", "baseline"}


def test_a_release_that_does_not_simulate_gives_no_bounds(bench: Bench) -> None:
    faulty = {fake.FAULT: "does_not_simulate"}
    result = bench.run(simulate=True, advice=False, engine={"env": faulty}, budget={"restarts": 4})
    (level,) = result["bench"]["levels"]
    assert (level["floor"]["held"], level["ceiling"]["held"]) == (False, False)
    assert level["beside_in_words"] == [
        f"simulated: the engine was told to accept {told} tokens a round, but counted 2.50: its figures "
        "are no bound"
        for told in (1, 4)
    ]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_where_texts_go_apart_the_baseline_is_asked_how_near_the_tokens_are(
    bench: Bench, name: str
) -> None:
    bench.ask([[1, 9, 4], [fake.VICTIM, 9, 4]])
    faulty = {fake.FAULT: "differs", fake.FAULTS_OF: "drafted"}
    result = bench.run(name, advice=False, engine={"env": faulty})
    agreed = result["bench"]["agreement"]["speculative"]
    assert agreed["prompts"] - agreed["same"] == 1
    (tie,) = result["bench"]["ties"]
    assert (tie["at"], tie["near"]) == (fake.WENT_APART, False)
    assert tie["gap"] == pytest.approx(fake.GAP)
    assert any("0.250 nats apart: at token 2 of prompt" in note for note in result["notes"])


def test_texts_that_are_the_same_are_not_asked_about(bench: Bench) -> None:
    assert bench.run(advice=False)["bench"]["ties"] == []


def test_simulated_starts_count_as_starts(bench: Bench) -> None:
    words = r"this takes 5 starts .* job\.budget\.restarts is 4; set job\.budget\.restarts=5$"
    with pytest.raises(BadInput, match=words):
        bench.run(simulate=True)
    assert "is starting" not in bench.said()


def test_each_concurrency_has_figures_of_its_own(bench: Bench) -> None:
    result = bench.run("vllm", concurrency=[1, 3], advice=False)
    one, three = result["bench"]["levels"]
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    assert one["accept_length"]["value"] == three["accept_length"]["value"] == 2.5
    assert [point["step"] for point in result["curves"]["tok_s"]] == [1, 3]


def test_of_a_control_nothing_is_drafted(bench: Bench) -> None:
    result = bench.run(control=True)
    assert "accept_length" not in result["metrics"]
    assert result["metrics"]["speedup"]["value"] > 0
    assert arms(result) == [("baseline", 0), ("speculative", 0)]
    assert "--speculative-algorithm" not in str(result["bench"]["servers"])


def test_of_a_tree_no_arm_is_started_that_would_tell_nothing(bench: Bench) -> None:
    result = bench.run(topk=2, draft_tokens=6)
    assert arms(result) == [("baseline", 0), ("speculative", 0)]
    command = result["bench"]["servers"][1]["command"]
    assert command[command.index("--speculative-num-draft-tokens") + 1] == "6"


def test_beside_a_tree_a_chain_of_its_steps_is_measured(bench: Bench) -> None:
    result = bench.run(topk=2, draft_tokens=6, chain=True, budget={"restarts": 3})
    assert arms(result) == [("baseline", 0), ("speculative", 0), ("chain", 0)]
    command = result["bench"]["servers"][2]["command"]
    told = {"num-steps": "3", "eagle-topk": "1", "num-draft-tokens": "4"}
    for flag, value in told.items():
        assert command[command.index(f"--speculative-{flag}") + 1] == value
    (level,) = result["bench"]["levels"]
    assert level["chain"]["accept_length"]["value"] == 2.5
    assert level["chain"]["better"] in ("tree", "chain", None)
    (line,) = level["beside_in_words"]
    assert line.startswith("a chain of 3 steps gives ")


@pytest.fixture
def mine(serve: Serve, tmp_path: Path) -> Address:
    """A person's own server, whose drafter has the wiring's ids."""
    drafter = tmp_path / "mine"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"eagle_config": {KEY: [-1, 2, 4]}}))
    return serve(draft=Draft(folder=drafter, steps=STEPS))


def test_servers_of_ones_own_are_asked_and_left(bench: Bench, mine: Address, serve: Serve) -> None:
    other = serve()
    result = bench.run(engine={"url": mine.url, "baseline_url": other.url, "python": None})
    assert result["metrics"]["accept_length"]["value"] == 2.5
    assert result["metrics"]["speedup"]["value"] > 0
    assert "is starting" not in bench.said()
    assert not any("cores" in note for note in result["notes"])  # whose work it is is not known
    for address in (mine, other):
        assert get(address, "/v1/models")


def test_without_a_baseline_there_is_no_speedup(bench: Bench, mine: Address) -> None:
    result = bench.run(engine={"url": mine.url, "python": None})
    assert result["metrics"]["accept_length"]["value"] == 2.5
    assert {"speedup", "break_even", "tok_s_baseline"}.isdisjoint(result["metrics"])
    assert arms(result) == [("speculative", 0)]


def test_a_server_that_is_not_the_hypothesis_is_not_measured(
    bench: Bench, serve: Serve, tmp_path: Path
) -> None:
    mine = serve(draft=Draft(folder=tmp_path / "x", steps=5))
    with pytest.raises(
        BadInput, match=r"engine\.url=.*: its speculative_num_steps is 5, but the job"
    ):
        bench.run(engine={"url": mine.url, "python": None})


@pytest.mark.parametrize("open_job", [engine_bench.open_job, engine_probe.open_job])
@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_SIMULATE_ACC_LEN",
        "SGLANG_SIMULATE_ACC_METHOD",
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
        "SIMULATE_ACC_LEN",
    ],
)
def test_an_engine_that_would_accept_anything_is_refused(
    name: str, open_job: Callable[..., Any], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        f"^{name} is set: accept lengths would be simulated, .*; unset it in engine.env, host.env and "
        "the host's own environment$"
    )
    with pytest.raises(BadInput, match=words):
        bench.run(engine={"env": {name: "3"}}, open_job=open_job)
    monkeypatch.setenv(name, "3")
    with pytest.raises(BadInput, match=words):
        bench.run(open_job=open_job)
    assert "is starting" not in bench.said()


def test_another_release_than_the_one_named_is_refused(bench: Bench) -> None:
    with pytest.raises(BadInput, match=r"engine\.version=0\.5\.12, but sglang 0\.5\.23 is what is"):
        bench.run(engine={"version": "0.5.12"})
    assert "is starting" not in bench.said()


def test_a_server_that_dies_while_it_is_measured_is_one_clear_error(bench: Bench) -> None:
    bench.ask([[1, 9, 4], [fake.VICTIM, 9, 4]])
    with pytest.raises(BadInput, match=r"^speculative: the server ended with exit code 3 .*mat1"):
        bench.run(engine={"env": {fake.FAULT: "dies", fake.FAULTS_OF: "drafted"}})
    assert bench.said().count("stopped in") == 2


def test_states_that_cannot_be_fed_start_nothing(bench: Bench) -> None:
    assert LAYERS in STATES
    with pytest.raises(BadInput, match=r"sglang 0\.5\.23 cannot feed states \[0, 3, 7\]"):
        bench.run(layers=(0, 3, LAYERS))
    assert "is starting" not in bench.said()


CLASS = "sglang/srt/models/llama.py"
DIFF = f"--- a/{CLASS}\n+++ b/{CLASS}\n@@ -1 +1 @@\n-SAID = 'as installed'\n+SAID = 'as patched'\n"


@pytest.fixture
def engine_source(tmp_path: Path) -> dict[str, str]:
    """An engine's package on disk, and the environment in which its server imports the class."""
    file = tmp_path / "site" / CLASS
    file.parent.mkdir(parents=True)
    for folder in list(file.parents)[:3]:
        (folder / "__init__.py").touch()
    file.write_text("SAID = 'as installed'\n")
    return {"PYTHONPATH": str(tmp_path / "site"), fake.IMPORTS: "sglang.srt.models.llama"}


def test_a_patch_is_laid_over_the_servers_with_the_drafter_and_is_recorded(
    bench: Bench, engine_source: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "my.patch").write_text(DIFF)
    result = bench.run(
        engine={"env": engine_source, "patch": "my.patch"}, patch=str(tmp_path / "my.patch")
    )
    digest = hashlib.sha256(DIFF.encode()).hexdigest()
    assert result["bench"]["patch"] == {"name": "my.patch", "sha256": digest, "files": [CLASS]}
    for label in ("speculative", "fewer_steps"):
        assert f"{label}: 1 of its processes imported the patched {CLASS}" in bench.said()
    assert "baseline: 1 of its processes" not in bench.said()
    assert (tmp_path / "site" / CLASS).read_text() == "SAID = 'as installed'\n"
    assert list((tmp_path / "engine").glob("patched-*")) == []


def test_a_patched_file_that_the_server_does_not_import_ends_the_run(
    bench: Bench, engine_source: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "my.patch").write_text(DIFF)
    del engine_source[fake.IMPORTS]
    with pytest.raises(
        BadInput, match=f"^speculative: {CLASS} of the patch my.patch was imported by none of the"
    ):
        bench.run(engine={"env": engine_source, "patch": "x"}, patch=str(tmp_path / "my.patch"))
    assert bench.said().count("stopped in") == 2
    assert list((tmp_path / "engine").glob("patched-*")) == []


def test_a_patch_that_does_not_fit_starts_nothing(
    bench: Bench, engine_source: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "my.patch").write_text(DIFF.replace("-SAID", "-SAYS"))
    with pytest.raises(BadInput, match=f"does not fit sglang 0.5.23: {CLASS}, hunk 1 does not"):
        bench.run(engine={"env": engine_source, "patch": "x"}, patch=str(tmp_path / "my.patch"))
    with pytest.raises(BadInput, match="captures the embedding output without a patch; leave"):
        bench.run(engine={"env": engine_source, "patch": "embedding_capture"})
    assert "is starting" not in bench.said()


GROWING = """#!/bin/sh
case "$1" in
  --query-gpu=*)
    echo x >> "$0.asked"
    echo "0, GPU-00, Fake, 80000, $(($(wc -l < "$0.asked") * 1000)), 0" ;;
esac
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_memory_that_is_not_given_back_stands_in_the_result(
    device: str, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "smi" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(GROWING)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_memory, "WAIT_S", 0.0)
    result = bench.run(device=device)
    found = [note for note in result["notes"] if "more in use than before the start" in note]
    starts = arms(result)
    # One behind the other, as SGLang's servers stand on a GPU.
    assert [n.partition(":")[0] for n in found] == [label for label, _ in starts if device != "cpu"]
    assert all(": GPU 0 (Fake) has " in note and note in bench.said() for note in found)


def test_states_that_need_a_patch_are_fed_with_one_only(bench: Bench) -> None:
    asked = {"name": "vllm", "engine_class": "kimi_k25"}
    with pytest.raises(
        BadInput, match=r"only with the embedding capture patch: .*engine\.patch=emb"
    ):
        bench.run("vllm", engine=asked)
    assert "is starting" not in bench.said()


DRAFTED = [
    *(
        "{model}",
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        "{drafter}",
    ),
    *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(STEPS + 1)),
]


def launches(bench: Bench, **more: Any) -> dict[str, Any]:
    """Commands of a person's own, in the place of all that the job would put together."""
    words = [bench.python, "-m", "sglang.launch_server", "--port", "{port}", "--model-path"]
    own = {"launch": [*words, *DRAFTED], "baseline_launch": [*words, "{model}"]}
    return {"version": "0.5.23", "python": None, **own, **more}


def test_servers_that_a_persons_commands_start_are_measured(bench: Bench) -> None:
    result = bench.run(engine=launches(bench))
    assert result["metrics"]["accept_length"]["value"] == 2.5
    assert result["metrics"]["speedup"]["value"] > 0
    assert arms(result) == [("baseline", 0), ("speculative", 0)]  # a command is one number of steps
    assert bench.served()["eagle_config"][KEY] == [-1, 2, 4]
    assert bench.said().count("stopped in") == 2


def test_a_command_that_starts_something_else_is_not_measured(bench: Bench) -> None:
    with pytest.raises(
        BadInput,
        match=r"^speculative: engine\.launch: its speculative_num_steps is 3, but the jo",
    ):
        bench.run(engine=launches(bench), steps=4)
    other = bench.folder / "other"
    other.mkdir()
    with pytest.raises(
        BadInput,
        match=r"^baseline: engine\.baseline_launch: it is sglang 0\.5\.23, but engine\.version is",
    ):
        Bench(other, bench.python).run(engine=launches(bench, version="0.5.22"))


def test_what_is_in_a_container_is_told_of_each_server(bench: Bench, docker: Path) -> None:
    own = launches(bench)
    inside = [*own["baseline_launch"][:-1], "/model"]
    result = bench.run(
        engine={**own, "baseline_launch": ["docker", "run", "--name", "plain", *inside]}
    )
    assert result["bench"]["servers"][0]["facts"]["model"] == "/model"
    assert any("drafting and verifying are not told" in note for note in result["notes"])
    assert not (docker / "plain").exists()


def test_a_baseline_command_that_drafts_is_not_measured(bench: Bench) -> None:
    own = launches(bench)
    with pytest.raises(
        BadInput, match=r"baseline_launch: it drafts \(EAGLE3\), but is to be the ba"
    ):
        bench.run(engine={**own, "baseline_launch": own["launch"]})

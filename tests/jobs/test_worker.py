"""One case's failure is that case's result; the others go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.events import Events
from jobs.files import write_json_atomic

RequestOf = Callable[..., dict[str, Any]]
Work = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def work(snapshot: Path, run_dir: Path, request_of: RequestOf) -> Work:
    def run(*cases: dict[str, Any], raw: str | None = None, **more: Any) -> Any:
        (run_dir / "request.json").write_text(raw or json.dumps(request_of(*cases, **more)))
        command = [sys.executable, "-m", "jobs.worker", str(run_dir)]
        return subprocess.run(command, cwd=snapshot, capture_output=True, text=True, check=False)

    return run


def results(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / "results").glob("*.json"))]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_an_answered_case_has_its_figures_and_an_empty_error(work: Work, run_dir: Path) -> None:
    assert work({"do": "ok"}).returncode == 0
    (result,) = results(run_dir)
    assert result.pop("started") <= result.pop("ended")
    assert result == {
        "case_id": "case-0",
        "status": "ok",
        "error": None,
        "metrics": {"accuracy": {"value": 0.5}},
        "curves": {},
        "wiring": {},
        "fingerprints": {},
        "notes": ["fine"],
    }
    kinds = [(e["type"], e.get("status")) for e in events(run_dir)]
    assert kinds == [("case", "started"), ("progress", None), ("case", "ok")]


def test_a_failed_case_does_not_stop_the_others(work: Work, run_dir: Path) -> None:
    cases = ["error", "input_error", "sys_exit", "memory", "ok"]
    done = work(*({"do": do} for do in cases))
    assert done.returncode == 1
    errors = [r["error"] and (r["error"]["kind"], r["error"]["message"]) for r in results(run_dir)]
    assert errors == [
        ("RuntimeError", "first line second line"),
        ("BadInput", "layer 99 is not there"),
        ("SystemExit", "the job called sys.exit(7)"),
        ("MemoryError", "MemoryError"),
        None,
    ]
    assert "in run_case" in results(run_dir)[0]["error"]["traceback"]
    assert "RuntimeError: first line" in done.stderr


def test_a_job_that_cannot_be_opened_fails_every_case(work: Work, run_dir: Path) -> None:
    assert work({"do": "ok"}, {"do": "ok"}, refuse=True).returncode == 1
    messages = [result["error"]["message"] for result in results(run_dir)]
    assert messages == ["the drafter has no d2t"] * 2


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (None, "BadInput", "has no job 'other'"),
        ("", "BadInput", "has no open_job"),
        ("import not_installed", "ModuleNotFoundError", "not_installed"),
        ("raise SystemExit(3)", "SystemExit", "sys.exit(3)"),
        ("def open_job(", "SyntaxError", "never closed"),
    ],
)
def test_a_job_that_cannot_be_imported_fails_its_cases(
    work: Work, run_dir: Path, snapshot: Path, source: str | None, kind: str, words: str
) -> None:
    if source is not None:
        (snapshot / "jobs" / "other.py").write_text(source)
    assert work({"do": "ok"}, job="other").returncode == 1
    (result,) = results(run_dir)
    assert result["error"]["kind"] == kind
    assert words in result["error"]["message"]
    assert (run_dir / "environment.json").exists()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"do": "give", "what": "nan"}, "metrics.accuracy.value is nan"),
        ({"do": "give", "what": "set"}, "metrics.accuracy.value is a set"),
        ({"do": "give_status"}, "status"),
        ({"do": "give_none"}, "NoneType"),
    ],
)
def test_an_answer_that_cannot_be_stored_fails_and_names_the_place(
    work: Work, run_dir: Path, case: dict[str, Any], words: str
) -> None:
    assert work(case).returncode == 1
    (result,) = results(run_dir)
    assert (result["status"], result["metrics"]) == ("failed", {})
    assert words in result["error"]["message"]


def test_the_environment_is_written_and_threads_are_fixed(work: Work, run_dir: Path) -> None:
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    assert work({"do": "env", "names": names}, threads=3).returncode == 0
    assert results(run_dir)[0]["wiring"] == dict.fromkeys(names, "3")
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["threads"] == 3
    assert environment["executable"] == sys.executable
    assert {"torch", "safetensors", "transformers", "numpy"} <= set(environment["packages"])
    assert environment["torch"]["version"].startswith(environment["packages"]["torch"][:4])
    assert environment["loaded_torch"] is None, "the worker must not import torch on its own"
    assert environment["fingerprint"].startswith("sha256:")
    assert (environment["pid"] > 1, len(environment["nonce"])) == (True, 32)


def test_the_commit_of_a_checkout_goes_into_the_environment(work: Work, run_dir: Path) -> None:
    place = run_dir / "no checkout"
    assert work({"do": "ok"}, checkouts=[str(place)]).returncode == 0
    environment = json.loads((run_dir / "environment.json").read_text())
    assert "is no folder" in environment["checkouts"][str(place)]["error"]


def test_torch_gets_the_threads_of_the_request(work: Work, run_dir: Path, snapshot: Path) -> None:
    (snapshot / "jobs" / "torch_job.py").write_text(
        "def open_job(request, events):\n"
        "    import torch\n"
        "    return type('Job', (), {'run_case': lambda self, case: "
        "{'wiring': {'threads': torch.get_num_threads()}}})()\n"
    )
    assert work({}, job="torch_job", threads=1).returncode == 0
    assert results(run_dir)[0]["wiring"] == {"threads": 1}
    environment = json.loads((run_dir / "environment.json").read_text())
    facts = environment["loaded_torch"]
    assert (facts["threads"], facts["gpus"]) == (1, [])
    assert facts["version"] == environment["torch"]["version"]


def test_what_the_supervisor_says_of_the_gpus_becomes_notes(work: Work, run_dir: Path) -> None:
    (run_dir / "gpus.json").write_text(json.dumps({"notes": ["GPU 3 is chosen"]}))
    assert work({"do": "ok"}).returncode == 0
    assert [e["text"] for e in events(run_dir) if e["type"] == "note"] == ["GPU 3 is chosen"]


def test_gpus_that_could_not_be_chosen_fail_every_case(work: Work, run_dir: Path) -> None:
    record = {"notes": [], "error": "host.gpus asks for GPU 7"}
    (run_dir / "gpus.json").write_text(json.dumps(record))
    assert work({"do": "ok"}, {"do": "ok"}).returncode == 1
    errors = [(r["error"]["kind"], r["error"]["message"]) for r in results(run_dir)]
    assert errors == [("BadInput", "host.gpus asks for GPU 7")] * 2
    assert (run_dir / "environment.json").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw": "[]"}, "not a JSON object"),
        ({"raw": "{"}, "cannot be read"),
        ({"job": "../evil"}, "not the name of a job"),
        ({"threads": 0}, "threads 0"),
        ({"timeout_s": -1}, "timeout_s -1"),
        ({"grace_s": "5"}, "grace_s '5'"),
        ({"device": "gpu"}, "device 'gpu' is not one of"),
        ({"gpus": [0]}, "gpus [0] is not"),
        ({"gpus": {"wanted": ["0"], "lease": False}}, "is not {wanted"),
        ({"gpus": {"wanted": [True], "lease": False}}, "is not {wanted"),
        ({"gpus": {"wanted": None}}, "is not {wanted"),
        ({"checkouts": "/x"}, "checkouts is not a list"),
        ({"cases": []}, "at least one case"),
        ({"cases": [{"case_id": "../x"}]}, "'../x' is not a plain file name"),
        ({"cases": [{"case_id": "a"}, {"case_id": "a"}]}, "twice"),
    ],
)
def test_a_request_that_is_wrong_ends_with_two_and_one_sentence(
    work: Work, changes: dict[str, Any], words: str
) -> None:
    done = work({"do": "ok"}, **changes)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_results_folder_keeps_what_is_there(
    work: Work, run_dir: Path, tiny_disk: Callable[[str, str], Path]
) -> None:
    tiny_disk("run/results", "64k")
    done = work({"do": "ok"}, {"do": "give", "what": "big"}, {"do": "ok"})
    assert done.returncode == 1
    assert [result["case_id"] for result in results(run_dir)] == ["case-0"]
    assert "case-1.json cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (run_dir / "results").iterdir()] == ["case-0.json"]


def test_progress_is_thinned_out_but_its_last_line_is_kept(tmp_path: Path) -> None:
    with Events(tmp_path / "events.jsonl") as log:
        for done in range(1, 1001):
            log.progress("score", done, 1000)
    lines = events(tmp_path)
    assert len(lines) < 500
    assert (lines[0]["done"], lines[-1]["done"]) == (1, 1000)


def test_progress_that_stops_early_is_written_before_the_next_event(tmp_path: Path) -> None:
    with Events(tmp_path / "events.jsonl") as log:
        for done in range(1, 8):
            log.progress("score", done, 10)
        log.note("stopped")
        log.metric("a", "loss", 0.25, 3)
    lines = events(tmp_path)
    assert [line.get("done") for line in lines][-3:] == [7, None, None]
    assert {key: lines[-1][key] for key in ("case_id", "name", "value", "step")} == {
        "case_id": "a",
        "name": "loss",
        "value": 0.25,
        "step": 3,
    }


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with (
        Events(tmp_path / "events.jsonl") as log,
        pytest.raises(ValueError, match="'loss' of case 'a' is inf"),
    ):
        log.metric("a", "loss", float("inf"))


def test_a_line_that_a_full_disk_tore_does_not_spoil_the_next(
    tiny_disk: Callable[[str, str], Path],
) -> None:
    disk = tiny_disk("disk", "8k")
    filler = disk / "filler"
    filler.write_bytes(bytes(4096))
    with Events(disk / "events.jsonl") as log:
        with pytest.raises(OSError, match="No space left"):
            log.note("x" * 5000)
        filler.unlink()
        log.note("after")
    lines = (disk / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["text"] == "after"


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(
    tmp_path: Path, tiny_disk: Callable[[str, str], Path]
) -> None:
    disk = tiny_disk("disk", "16k")
    path = disk / "result.json"
    write_json_atomic(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"new": float("nan")})
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(path, {"new": "x" * 65536})
    assert [entry.name for entry in disk.iterdir()] == ["result.json"]
    assert json.loads(path.read_text()) == {"old": 1}

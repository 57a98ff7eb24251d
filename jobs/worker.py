"""Answers the cases of one request.

    python -m jobs.worker RUN_DIR

Exit code 0 where every case was answered, 1 where one was not, 2 where the request cannot be read.
A job is a module `jobs.NAME` with `open_job(request, events)`, which returns an object with
`run_case(case) -> dict`: the metrics, curves, wiring, fingerprints and notes of that case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from eagle3.errors import BadInput
from jobs.environment import describe as describe_machine
from jobs.events import Events
from jobs.files import read_request, write_json_atomic
from jobs.supervisor import PR_SET_PDEATHSIG, SUPERVISOR, prctl

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
VARIABLES = (*THREAD_VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
OWN_KEYS = frozenset({"case_id", "status", "error", "started", "ended"})

T = TypeVar("T")
Error = dict[str, str]


def say(sentence: str) -> None:
    """One line on the run's log; a full disk there is no reason to fail."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()


def guarded(action: Callable[[], T]) -> tuple[T | None, Error | None]:
    """The action's value, or its error as it goes into a result."""
    try:
        return action(), None
    except SystemExit as error:
        # One case that wants to leave must not take the others with it.
        return None, describe(error, f"the job called sys.exit({error.code!r})")
    except Exception as error:  # noqa: BLE001 -- here a traceback becomes a result
        return None, describe(error, str(error))


def describe(error: BaseException, message: str) -> Error:
    """The error as it stands in a result; the traceback goes to the log as well.

    An error with a `trace` of its own has told the log already.
    """
    trace = getattr(error, "trace", None)
    if trace is None:
        trace = "".join(traceback.format_exception(error))
        say(trace)
    sentence = " ".join(message.split())[:2000]
    kind = type(error).__name__
    return {"kind": kind, "message": sentence or kind, "traceback": trace}


def flaw(value: object, where: str) -> str | None:
    """What keeps a value out of a result, with its place; None where nothing does."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}, not a finite number"
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, which is not a string"
            if found := flaw(inner, f"{where}.{key}" if where else key):
                return found
        return None
    if isinstance(value, (list, tuple)):
        return next(filter(None, (flaw(v, f"{where}[{i}]") for i, v in enumerate(value))), None)
    if value is None or isinstance(value, (str, int, float)):
        return None
    return f"{where} is a {type(value).__name__}, which JSON cannot hold"


def checked(answer: object) -> dict[str, Any]:
    """What run_case returned, fit to be written. Raises ValueError."""
    if not isinstance(answer, dict):
        raise ValueError(f"run_case returned a {type(answer).__name__}, not a dict")
    if taken := sorted(OWN_KEYS & answer.keys()):
        raise ValueError(f"run_case returned keys that the worker fills in: {', '.join(taken)}")
    if found := flaw(answer, ""):
        raise ValueError(f"the result cannot be stored: {found}")
    return answer


def answer_case(job: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The job's answer to one case, checked."""
    return checked(job.run_case(case))


def result_of(case_id: str, answer: dict[str, Any] | None, **more: object) -> dict[str, Any]:
    """One results file."""
    empty: dict[str, object] = {
        "metrics": {},
        "curves": {},
        "wiring": {},
        "fingerprints": {},
        "notes": [],
    }
    return {"case_id": case_id, **more, **empty, **(answer or {})}


def torch_facts(device: str) -> dict[str, Any] | None:
    """What torch says of itself and its GPUs; None where the job has not imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "gpus": [],
    }
    if device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return facts


def describe_process(request: dict[str, Any]) -> dict[str, Any]:
    """environment.json without what only a loaded torch can tell; a nonce made here."""
    return {
        **describe_machine(request.get("checkouts", [])),
        "nonce": secrets.token_hex(16),
        "pid": os.getpid(),
        "threads": request["threads"],
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def settle_environment(run_dir: Path, request: dict[str, Any], facts: dict[str, Any]) -> None:
    """Fixes torch's threads where it is loaded, and writes environment.json."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(request["threads"])
    loaded = torch_facts(request.get("device", "auto"))
    write_json_atomic(run_dir / "environment.json", {**facts, "loaded_torch": loaded})


def heed_gpus(run_dir: Path, events: Events) -> None:
    """Passes on what the supervisor says of the GPUs; raises BadInput where it could not choose."""
    try:
        record = json.loads((run_dir / "gpus.json").read_bytes())
    except FileNotFoundError:
        return  # the request asks for no choice
    for note in record["notes"]:
        events.note(note)
    if error := record.get("error"):
        raise BadInput(error)


def open_job(run_dir: Path, request: dict[str, Any], events: Events) -> Any:
    """The job's object; raises whatever the job raises, and BadInput where there is no job."""
    name = f"jobs.{request['job']}"
    facts = describe_process(request)
    settle_environment(run_dir, request, facts)
    heed_gpus(run_dir, events)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise BadInput(f"this snapshot has no job {request['job']!r}") from error
        raise
    had_torch = "torch" in sys.modules
    if had_torch:
        settle_environment(run_dir, request, facts)
    if not callable(getattr(module, "open_job", None)):
        raise BadInput(f"{name} is no job: it has no open_job(request, events)")
    job = module.open_job(request, events)
    if not had_torch and "torch" in sys.modules:
        settle_environment(run_dir, request, facts)
    return job


def answer_cases(run_dir: Path, request: dict[str, Any], events: Events) -> int:
    """Runs and records every case; the number of those that failed. Raises OSError."""
    (run_dir / "results").mkdir(exist_ok=True)
    job, failure = guarded(lambda: open_job(run_dir, request, events))
    failed = 0
    for case in request["cases"]:
        case_id = case["case_id"]
        events.case(case_id, "started")
        started = time.time()
        answer, error = None, failure
        if error is None:
            answer, error = guarded(partial(answer_case, job, case))
        status = "ok" if error is None else "failed"
        failed += error is not None
        result = result_of(
            case_id, answer, status=status, error=error, started=started, ended=time.time()
        )
        write_json_atomic(run_dir / "results" / f"{case_id}.json", result)
        events.case(case_id, status)
    return failed


def main(arguments: list[str]) -> int:
    """Answers the request in the run folder; the exit code."""
    (folder,) = arguments
    run_dir = Path(folder).absolute()
    # A worker whose supervisor was killed would go on unseen, on a GPU that looks free.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
        say("the supervisor was gone before the job began; nothing was run")
        return 1
    try:
        request = read_request(run_dir)
    except BadInput as error:
        say(str(error))
        return 2
    for name in THREAD_VARIABLES:
        os.environ[name] = str(request["threads"])
    try:
        with Events(run_dir / "events.jsonl") as events:
            failed = answer_cases(run_dir, request, events)
    except OSError as error:
        say(
            f"{error.filename or run_dir} cannot be written: {error.strerror}; the results that "
            "stand there are complete, the cases after them were not answered"
        )
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

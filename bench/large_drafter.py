"""`diagnose` on a drafter of Kimi-K2.5's size: wall time and peak memory of its process.

    python -m bench.large_drafter [--texts 8] [--tokens 40] [--work FOLDER] [--keep]

Nothing is downloaded: checkpoint, target and data are made by bench.large_files and removed at the
end. The planted fault: trained on canonical states 0, 3 and 31, while config.json declares [2, 30, 58],
which SGLang 0.5.12's kimi_k25 serves as 3, 31 and 59.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.large_files import STORED, Made, Size, make, write_json
from bench.planted.draft import AXES, STEPS

CLONE = Path(__file__).resolve().parent.parent
ENGINE = {"name": "sglang", "version": "0.5.12", "engine_class": "kimi_k25"}


def request_of(made: Made, *, threads: int, job: str = "diagnose") -> dict[str, Any]:
    """The request that `diagnose` sends to a host for this drafter."""
    return {
        "run_id": "large-drafter",
        "job": job,
        "device": "cpu",
        "threads": threads,
        "timeout_s": None,
        "steps": STEPS,
        "max_samples": None,
        "seed": 0,
        "truth": "target_argmax",
        "axes": AXES,
        "start": None,
        "finalists": 8,
        "inputs": {
            "target": {"path": str(made.target), "layout": "path"},
            "drafter": {"path": str(made.drafter), "layout": None},
            "data": {
                "path": str(made.data),
                "layout": None,
                "states": list(STORED),
                "target_argmax": None,
                "damaged": "fail",
            },
        },
        "engine": {**ENGINE, "checkout": None, "flags": {}, "ids": None, "accept_length": None},
        "trained_accuracy": None,
        "cases": [{"case_id": "large"}],
    }


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a process took."""

    wall_s: float
    peak_gib: float  # the largest resident set, mapped files included
    anonymous_gib: float  # the most of it that was no file's, looked at every 50 ms
    result: dict[str, Any]


def run_job(request: dict[str, Any], folder: Path) -> Cost:
    """The request answered by the host's worker, in a process of its own."""
    folder.mkdir(parents=True)
    write_json(folder / "request.json", request)
    started = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.worker", str(folder)],
            cwd=CLONE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        most = [0]
        ended = threading.Event()
        watch = threading.Thread(target=watch_memory, args=(process.pid, most, ended), daemon=True)
        watch.start()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        ended.set()
        watch.join()
    wall = time.monotonic() - started
    result = folder / "results" / "large.json"
    if not result.is_file():
        raise RuntimeError(f"the job left no result: {(folder / 'log').read_text()[-2000:]}")
    return Cost(
        wall_s=wall,
        peak_gib=used.ru_maxrss / 2**20,
        anonymous_gib=most[0] / 2**20,
        result=json.loads(result.read_text()),
    )


def watch_memory(pid: int, most: list[int], ended: threading.Event) -> None:
    """Keeps the highest RssAnon of a process in most[0], in KiB."""
    status = Path(f"/proc/{pid}/status")
    while not ended.wait(0.05):
        with suppress(OSError):
            for line in status.read_text().splitlines():
                if line.startswith("RssAnon:"):
                    most[0] = max(most[0], int(line.split()[1]))


def report(cost: Cost) -> None:
    """What was answered and what it took."""
    result = cost.result
    print(
        f"wall {cost.wall_s:.0f} s, peak resident {cost.peak_gib:.1f} GiB, of which no file's "
        f"{cost.anonymous_gib:.1f} GiB"
    )
    if result["status"] != "ok":
        print(f"failed: {result['error']['kind']}: {result['error']['message']}")
        return
    print("\n".join(result.get("diagnosis", {}).get("first_lines", [])))


def main() -> None:
    """Make, diagnose, report, remove."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", type=Path, help="folder for 8 GB; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    size = Size(texts=given.texts, tokens=given.tokens)
    work = Path(tempfile.mkdtemp(prefix="large-drafter.", dir=given.work))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {given.threads} threads, torch "
        f"{torch.__version__}\n{size}"
    )
    try:
        began = time.monotonic()
        made = make(work, size)
        stored = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
        print(f"made {stored / 2**30:.1f} GiB in {time.monotonic() - began:.0f} s in {work}")
        report(run_job(request_of(made, threads=given.threads), work / "run"))
    finally:
        if not given.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()

"""How long the command line takes before anything runs, side by side with a Hydra hello world.

    make bench

Each line is the median of nine fresh interpreters, and its ratio to Hydra's own start.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 9
CLONE = Path(__file__).resolve().parent.parent
HELLO = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(cfg): pass
main()
"""


def seconds(command: list[str], folder: str) -> float:
    """Wall time of one command."""
    started = time.perf_counter()
    subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLONE)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measure all commands in turn, round by round, so that a busy moment hits them alike."""
    ours = [sys.executable, "-m", "orchestrator"]
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "hydra hello world": [sys.executable, "hello.py", *quiet],
        "orchestrator --help": [*ours, "--help"],
        "orchestrator with a config error": [*ours, "wiring.lyers=[1]"],
        "orchestrator with an unknown verb": [*ours, "uii"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import mlflow": [sys.executable, "-c", "import mlflow"],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text(HELLO)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            seconds(command, folder)  # warm the file cache
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(seconds(command, folder))
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"median of {ROUNDS}"
    )
    for name, median in medians.items():
        print(
            f"{name:36s} {median * 1000:7.0f} ms  {median / medians['hydra hello world']:5.2f} x hydra"
        )


if __name__ == "__main__":
    main()

"""Where things lie: one place that knows every file name on the user's side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
CONF = CLONE / "conf"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run on the user's side; MLflow is filled from them."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "run.json"

    @property
    def request(self) -> Path:
        return self.folder / "request.json"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def exit(self) -> Path:
        return self.folder / "exit.json"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def started(self) -> Path:
        return self.folder / "started.json"

    @property
    def gpus(self) -> Path:
        return self.folder / "gpus.json"

    @property
    def preflight(self) -> Path:
        return self.folder / "preflight.json"

    @property
    def owner(self) -> Path:
        return self.folder / "owner"

    @property
    def verdict(self) -> Path:
        return self.folder / "verdict.json"

    @property
    def patched(self) -> Path:
        return self.folder / "patched" / "config.json"

    @property
    def filed(self) -> Path:
        return self.folder / "filed.json"

    @property
    def snapshot_diff(self) -> Path:
        return self.folder / "snapshot.diff"


def runs_folder(results: Path) -> Path:
    """Where the runs' folders lie."""
    return results / "runs"


def sweeps_folder(results: Path) -> Path:
    """Where the sweeps' folders lie."""
    return results / "sweeps"

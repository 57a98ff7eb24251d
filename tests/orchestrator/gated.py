"""Runs of a benchmark for the gate to check, made by hand as the job and the loop leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs.engines import figures
from jobs.engines.kept import kept
from orchestrator.__main__ import main
from orchestrator.config import Resolved
from orchestrator.gate_figure import Figure
from orchestrator.push import tree_of
from orchestrator.runs import new_folder, write_json, write_records
from orchestrator.snapshot import Snapshot
from tests.jobs.engines.made import answered, one_pass, request
from tests.orchestrator.searched import T0
from tests.orchestrator.test_show_bench import bench, level

STEPS = 4
# Accepted drafts and rounds of each prompt in a pass.
USUAL = [(20, 10), (18, 10), (22, 10), (15, 10), (20, 10), (17, 10)]
FEWER = [(accepted - 10, rounds) for accepted, rounds in USUAL]
MORE = [(accepted + 10, rounds) for accepted, rounds in USUAL]
ONE_ELSE = [(18, 10), *USUAL[1:]]
DIGESTS = {"drafter": "sha256:" + "d" * 64, "target": "sha256:" + "e" * 64}
EXPERIMENT = ("+experiment=engine_layers_m1_2_30", "engine.python=/opt/python")


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


def figure(counts: Sequence[tuple[int, int]], passes: int = 1) -> Figure:
    """Of accepted drafts and rounds by prompt in a pass."""
    tokens = [passes * (accepted + rounds) for accepted, rounds in counts]
    rounds = [passes * rounds for _, rounds in counts]
    value = sum(tokens) / sum(rounds)
    return Figure(
        **{"value": value, "low": value, "high": value, "passes": passes},
        **{"tokens": tuple(tokens), "rounds": tuple(rounds), "date": "", "run": ""},
    )

"""The recorder in a real process: over a module that an engine would have, with fc in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3.errors import BadInput
from jobs.engines.recording import Recorder, Taken, prefill_of

MODEL = """
import torch

class LlamaModel(torch.nn.Module):
    def __init__(self, *, vllm_config=None):
        super().__init__()
        self.fc = torch.nn.Linear(6, 2)

class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(6, 2)

class Named:
    def __init__(self, logits):
        self.next_token_logits = logits

class LogitsProcessor(torch.nn.Module):
    def forward(self, logits):
        return Named(logits) if len(logits) == 1 and logits[0, 0] == 2 else logits

class LlamaForCausalLM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LlamaModel()
        self.logits_processor = LogitsProcessor()
"""
RUN = """
import inspect, os, pathlib, torch
from vllm.model_executor.models.llama_eagle3 import LlamaForCausalLM, LlamaModel, Other
armed = pathlib.Path(os.environ["DRAFTER_RECORD"]) / "armed"
assert "vllm_config" in inspect.signature(LlamaModel.__init__).parameters
whole, other = LlamaForCausalLM(), Other()
model = whole.model
for rows in (5, 2):
    model.fc(torch.full((rows, 6), float(rows)))
    whole.logits_processor(torch.full((1, 3), float(rows)))
other.proj(torch.zeros(9, 6))
armed.unlink()
model.fc(torch.zeros(7, 6))
print(os.environ.get("WAS_THERE"))
"""


def run(tmp_path: Path, recorder: Recorder, given: dict[str, str]) -> str:
    package = tmp_path / "engine" / "vllm" / "model_executor" / "models"
    package.mkdir(parents=True)
    (package / "llama_eagle3.py").write_text(MODEL)
    path = os.pathsep.join([str(tmp_path / "engine"), given.pop("PYTHONPATH", "")])
    environment = recorder.environment({**given, "PYTHONPATH": path})
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_goes_into_fc_is_written_while_it_is_armed(tmp_path: Path) -> None:
    recorder = Recorder(folder=tmp_path / "recorded")
    recorder.arm()
    run(tmp_path, recorder, {})
    taken = recorder.take()
    assert [call.tolist() for call in taken.calls] == [[[5.0] * 6] * 5, [[2.0] * 6] * 2]
    # The logits behind each of them, as vLLM gives them and as SGLang does.
    assert [(number, logits.tolist()) for number, logits in taken.logits] == [
        (1, [[5.0, 5.0, 5.0]]),
        (2, [[2.0, 2.0, 2.0]]),
    ]
    assert taken.behind(1).tolist() == [5.0] * 3
    assert taken.behind(3) is None
    assert recorder.take() == Taken(calls=[], logits=[])


def test_a_sitecustomize_that_was_there_still_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['WAS_THERE'] = 'yes'\n")
    recorder = Recorder(folder=tmp_path / "recorded")
    recorder.arm()
    assert run(tmp_path, recorder, {"PYTHONPATH": str(own)}) == "yes"
    assert len(recorder.take().calls) == 2


def test_a_prompt_that_was_fed_in_parts_is_put_together() -> None:
    calls = [torch.full((n, 3), float(n)) for n in (4, 2, 3)]
    prefill, later = prefill_of(calls, 5)
    assert prefill[:, 0].tolist() == [4, 4, 4, 4, 2]
    assert [len(call) for call in later] == [3]


def test_nothing_recorded_and_too_little_are_said() -> None:
    with pytest.raises(BadInput, match="nothing was recorded at the drafter's fc"):
        prefill_of([], 3)
    with pytest.raises(BadInput, match=r"2 rows were recorded .* fewer than the prompt's 3"):
        prefill_of([torch.zeros(2, 3)], 3)

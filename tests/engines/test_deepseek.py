"""What DeepSeek's class captures, by its own code with layers in it whose sums are known.

No CPU runs this class in either engine, so its capture code is driven alone: in vLLM its whole layer
loop, in SGLang what it makes of an id list. Layer k adds 2^k to a residual stream that begins with the
embedding 1000, so that state k is 1000 + 2^k - 1 and nothing else is.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eagle3.engines import id_states, rule_for
from jobs.engines.patched import overlaid, package_folder, patch_engine
from jobs.engines.shipped import shipped
from tests.engines import serving
from tests.engines.setup_engines import RELEASES

LAYERS = 8
CLASS = "deepseek_v2"
LOOP = """
import json, sys, types
import torch
import vllm.model_executor.models.deepseek_v2 as m

class Layer:
    use_sequence_parallel_moe = False
    def __init__(self, k):
        self.k = k
    def __call__(self, positions, hidden, residual, scaling):
        stream = hidden.clone() if residual is None else hidden + residual
        return torch.full_like(hidden, 2.0**self.k), stream

class Model:
    aux_hidden_state_layers = tuple(json.loads(sys.argv[1]))
    start_layer, end_layer = 0, LAYERS
    config = types.SimpleNamespace()
    layers = [Layer(k) for k in range(LAYERS)]
    def embed_input_ids(self, ids):
        return torch.full((len(ids), 4), 1000.0)
    def norm(self, hidden, residual):
        return hidden + residual, None

m.get_pp_group = lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
ids = torch.arange(3)
out, aux = m.DeepseekV2Model.forward(Model(), ids, ids, None)
assert float(out[0, 0]) == 1000 + 2**LAYERS - 1
print(json.dumps([float(a[0, 0]) for a in aux]))
""".replace("LAYERS", str(LAYERS))
READ = """
import json, sys, types
import sglang.srt.models.deepseek_v2 as m

found = []
for ids in json.loads(sys.argv[1]):
    model = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(is_last_rank=True),
        config=types.SimpleNamespace(num_hidden_layers=LAYERS),
        model=types.SimpleNamespace(layers_to_capture=[]),
    )
    m.DeepseekV2ForCausalLM.set_eagle3_layers_to_capture(model, ids)
    found.append(list(model.model.layers_to_capture))
print(json.dumps(found))
""".replace("LAYERS", str(LAYERS))


def said(
    engine: str, code: str, ids: Sequence[Any], more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A child in the engine's own environment."""
    return subprocess.run(
        [str(serving.engine_python(engine)), "-c", code, json.dumps(ids)],
        env={**os.environ, **serving.environment(engine), **(more or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    """What a child printed last."""
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def state(k: int) -> float:
    """The stream in front of layer k."""
    return 1000 + 2.0**k - 1


def test_vllms_loop_captures_the_states_that_its_row_says() -> None:
    ids = [2, 5, LAYERS]
    states = id_states(rule_for("vllm", RELEASES["vllm"], CLASS), ids, LAYERS)
    assert last_line(said("vllm", LOOP, ids)) == [state(k) for k in states]


@pytest.mark.parametrize("patched", [False, True])
def test_the_embedding_takes_the_shipped_patch(tmp_path: Path, patched: bool) -> None:
    with ExitStack() as stack:
        more: dict[str, str] = {}
        if patched:
            given = serving.environment("vllm")
            python = str(serving.engine_python("vllm"))
            root = package_folder("vllm", python, given, tmp_path)
            patch = shipped("vllm", RELEASES["vllm"], CLASS)
            made = patch_engine(patch, root, "vllm", RELEASES["vllm"])
            overlay = stack.enter_context(overlaid(made, tmp_path / "over"))
            more = overlay.environment(given)
        done = said("vllm", LOOP, [0, 2, 5], more)
    if patched:
        assert last_line(done) == [state(0), state(2), state(5)]
    else:
        assert done.returncode == 1
        assert "'NoneType'" in done.stderr


def test_sglang_reads_id_lists_as_its_row_says() -> None:
    rule = rule_for("sglang", RELEASES["sglang"], CLASS)
    lists = [[0, 2, 5], [1, 3, 5], [2, 3, 5]]
    # What it captures is what goes into a layer.
    expected = [list(id_states(rule, ids, LAYERS)) for ids in lists]
    assert last_line(said("sglang", READ, lists)) == expected

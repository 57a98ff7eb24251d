"""The shipped patch over the real vLLM: it fits, and it is what is imported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from jobs.engines.patched import overlaid, package_folder, patch_engine
from jobs.engines.shipped import shipped
from tests.engines import serving

MODULE = "vllm/model_executor/models/deepseek_v2.py"
SAYS = (
    "import inspect, vllm.model_executor.models.deepseek_v2 as m; "
    "print(inspect.getsource(m.DeepseekV2Model.forward))"
)


def test_the_real_vllm_imports_the_patched_class_and_stays_as_it_is(tmp_path: Path) -> None:
    python, given = str(serving.engine_python("vllm")), serving.environment("vllm")
    root = package_folder("vllm", python, given, tmp_path)
    installed = root.parent / MODULE
    before = installed.read_bytes()
    patched = patch_engine(shipped("vllm", "0.32.0", "kimi_k25"), root, "vllm", "0.32.0")
    with overlaid(patched, tmp_path / "over") as overlay:
        done = subprocess.run(
            [python, "-c", SAYS],
            env={**os.environ, **overlay.environment(given)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert overlay.check("x") == {MODULE: 1}
    assert "hidden_states.clone()\n" in done.stdout
    assert installed.read_bytes() == before
    assert b"hidden_states.clone()\n" not in before

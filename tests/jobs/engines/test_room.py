"""Two servers stand beside each other only where there is room for both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3.errors import BadInput
from jobs.engines import room
from jobs.engines.room import PROCESS_BYTES, weights, why_no_room

SIZE = 4 * 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"w": torch.zeros(1000)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_checkpoint_is_as_large_as_its_tensors(model: Path, tmp_path: Path) -> None:
    assert weights(model) == SIZE
    other = tmp_path / "other"
    other.mkdir()
    (other / "pytorch_model.bin").write_bytes(bytes(77))
    assert weights(other) == 77


def test_on_a_cpu_both_must_fit_into_what_is_free(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * (2 * (SIZE + SIZE) + PROCESS_BYTES)
    monkeypatch.setattr(room, "memory", lambda: {"available": needed})
    assert why_no_room("sglang", "cpu", model, model, {}) is None
    monkeypatch.setattr(room, "memory", lambda: {"available": needed - (1 << 30)})
    assert why_no_room("sglang", "cpu", model, model, {}) == (
        "two servers need about 6.0 GiB of the 5.0 that are free"
    )


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("vllm", {}, "takes most of a GPU unless engine.flags names gpu_memory_utilization"),
        ("vllm", {"gpu_memory_utilization": "0.45"}, None),
        ("vllm", {"--gpu-memory-utilization": 0.45}, None),
        ("vllm", {"gpu-memory-utilization": 0.5}, "each server takes 50% of a GPU"),
        # Its share is of what is free, so that the second one would be another server.
        (
            "sglang",
            {"mem_fraction_static": 0.4},
            "sglang takes a share of the GPU memory that is free",
        ),
    ],
)
def test_on_a_gpu_the_servers_shares_decide(
    engine: str, flags: dict[str, object], words: str | None, model: Path
) -> None:
    found = why_no_room(engine, "cuda", model, model, flags)
    assert found is None if words is None else words in (found or "")


def test_a_share_that_is_no_number_is_refused(model: Path) -> None:
    with pytest.raises(
        BadInput, match=r"engine\.flags\.gpu_memory_utilization is 'auto', no number"
    ):
        why_no_room("vllm", "cuda", model, model, {"gpu_memory_utilization": "auto"})

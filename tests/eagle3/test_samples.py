"""Samples: what is read, and every way a file can be wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import BadInput
from eagle3.samples import read_sample, sample_files, stored_states

STATES = (0, 3, 31, 59)


def content(length: int = 6, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "input_ids": torch.arange(length),
        "loss_mask": torch.tensor([0, 0] + [1] * (length - 2)),
        "hidden_states": [torch.full((length, 4), float(k), dtype=torch.bfloat16) for k in STATES],
        "target_argmax": torch.arange(1, length + 1),
    }
    raw.update(changes)
    return {k: v for k, v in raw.items() if v is not None}


def save(folder: Path, raw: Any) -> Path:
    path = folder / "rows_0-2000" / "data_7.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(raw, path)
    return path


def test_states_are_found_by_their_canonical_number(tmp_path: Path) -> None:
    sample = read_sample(save(tmp_path, content()), STATES, vocab=50, hidden=4)
    aux = sample.aux([31, 0, 59])
    assert aux.shape == (6, 12)
    assert aux.dtype == torch.float32
    assert aux[0].tolist() == [31.0] * 4 + [0.0] * 4 + [59.0] * 4
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True]


def test_a_leading_batch_dimension_is_taken_off(tmp_path: Path) -> None:
    raw = content()
    raw["input_ids"] = raw["input_ids"][None]
    raw["hidden_states"] = [h[None] for h in raw["hidden_states"]]
    assert read_sample(save(tmp_path, raw), STATES, vocab=50, hidden=4).aux([3]).shape == (6, 4)


def test_a_state_that_is_not_stored_is_named_with_those_that_are(tmp_path: Path) -> None:
    sample = read_sample(save(tmp_path, content()), STATES, vocab=50, hidden=4)
    with pytest.raises(
        BadInput, match=r"asks for state 2, 30, but the data stores only 0, 3, 31, 59"
    ):
        sample.aux([0, 2, 30])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": None}, "lacks loss_mask; it has input_ids"),
        ({"loss_mask": torch.zeros(6, dtype=torch.long)}, "loss_mask is empty"),
        ({"loss_mask": torch.ones(5, dtype=torch.long)}, "lengths differ"),
        ({"input_ids": torch.tensor([0, 1, 2, 3, 4, 50])}, "reach from 0 to 50.*has 50 ids"),
        ({"input_ids": torch.tensor([0, -1, 2, 3, 4, 5])}, "reach from -1 to 5"),
        ({"input_ids": torch.rand(6)}, "input_ids must be whole numbers"),
        ({"hidden_states": [torch.ones(6, 4)] * 3}, "stores 3 states, but 4 are declared"),
        ({"hidden_states": [torch.ones(5, 4)] * 4}, "lengths differ"),
        ({"hidden_states": torch.ones(4, 6, 4)}, "no list of tensors"),
        ({"hidden_states": [torch.full((6, 4), torch.inf)] * 4}, "stored state 0 holds NaN or"),
        (
            {"target_argmax": torch.ones(3, dtype=torch.long)},
            "target_argmax has 3 positions, not 6",
        ),
    ],
)
def test_a_wrong_sample_is_named_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=rf"data_7\.pt.*{words}"):
        read_sample(save(tmp_path, content(**changes)), STATES, vocab=50, hidden=4)


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


def test_a_file_that_contains_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save(tmp_path, content(extra=Payload(tmp_path / "ran")))
    with pytest.raises(BadInput, match=r"data_7\.pt contains pickled code.*not loaded"):
        read_sample(path, STATES, vocab=50, hidden=4)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 10, 600])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path, content())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"data_7\.pt is damaged or truncated"):
        read_sample(path, STATES, vocab=50, hidden=4)


def test_files_come_in_numeric_order(tmp_path: Path) -> None:
    for shard, number in (("rows_2000-4000", 2000), ("rows_0-2000", 10), ("rows_0-2000", 9)):
        (tmp_path / shard).mkdir(exist_ok=True)
        (tmp_path / shard / f"data_{number}.pt").touch()
    assert [p.stem for p in sample_files(tmp_path)] == ["data_9", "data_10", "data_2000"]
    with pytest.raises(BadInput, match="does not exist"):
        sample_files(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no \.pt files"):
        sample_files(tmp_path / "empty")


def test_which_states_are_stored_is_declared_or_written_and_must_agree(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"set data\.states"):
        stored_states(tmp_path, None)
    assert stored_states(tmp_path, [0, 3]) == (0, 3)
    (tmp_path / "capture.json").write_text(json.dumps({"states": [0, 3, 31]}))
    assert stored_states(tmp_path, None) == (0, 3, 31)
    (tmp_path / "capture.json").write_text(json.dumps({"states": 3}))
    with pytest.raises(BadInput, match="does not list the stored states"):
        stored_states(tmp_path, None)
    (tmp_path / "capture.json").write_text(json.dumps({"states": [0, 3, 31]}))
    with pytest.raises(BadInput, match=r"data\.states says \[0, 3\], but .* says \[0, 3, 31\]"):
        stored_states(tmp_path, [0, 3])

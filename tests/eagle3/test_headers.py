from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eagle3.errors import BadInput
from eagle3.headers import find_tensors, find_weights, read_header, read_rows, read_values

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_a_type_is_read_as_torch_reads_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        values = patterns.to(torch.uint16).view(dtype)
    else:
        values = torch.randn(1000, dtype=dtype)
    save_file({"before": torch.ones(3), "x": values.clone()}, tmp_path / "a.safetensors")
    info = read_header(tmp_path / "a.safetensors")["x"]
    got, want = read_values(info), values.double().numpy()
    assert got.dtype.kind == "f"
    with np.errstate(invalid="ignore"):  # among the patterns are NaNs that signal
        assert np.array_equal(got.astype(np.float64), want, equal_nan=True)


def test_whole_numbers_and_masks_keep_their_types(tmp_path: Path) -> None:
    tensors = {"d2t": torch.tensor([[3, -4], [2**40, 0]]), "t2d": torch.tensor([True, False])}
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    assert header["d2t"].dtype == "I64"
    assert read_values(header["d2t"]).tolist() == [[3, -4], [2**40, 0]]
    assert read_values(header["t2d"]).tolist() == [True, False]


def test_rows_are_read_from_their_places(tmp_path: Path) -> None:
    table = torch.randn(50, 7).bfloat16()
    save_file({"a": torch.ones(5), "table": table}, tmp_path / "a.safetensors")
    info = read_header(tmp_path / "a.safetensors")["table"]
    assert np.array_equal(read_rows(info, [49, 0, 13]), table[[49, 0, 13]].float().numpy())
    with pytest.raises(BadInput, match="has 50 rows"):
        read_rows(info, [50])


def write(path: Path, header: Any, body: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


DAMAGED = {
    "short": (b"", b"", None, "cut off"),
    "gigantic header": (b"{}", b"", 1 << 40, "1099511627776 bytes"),
    "header behind the end": (b"{}", b"", 5000, "header ends at byte 5008"),
    "no JSON": (b"{]", b"", None, "no JSON"),
    "nested too deep": (b"[" * 100_000, b"", None, "no JSON"),
    "no object": (b"[1]", b"", None, "no JSON object"),
    "twice": (b'{"a":1,"a":2}', b"", None, "names 'a' twice"),
    "incomplete": ({"a": {"dtype": "F32"}}, b"", None, "entry of a is incomplete"),
    "unknown type": ({"a": entry(0, 4, "F31")}, b"0000", None, "unknown number type 'F31'"),
    "negative": ({"a": entry(4, 0)}, b"0000", None, "at bytes 4 to 0"),
    "shape of text": ({"a": entry(0, 4, shape=["1"])}, b"0000", None, "has the shape"),
    "wrong size": ({"a": entry(0, 4, shape=[2])}, b"0000", None, "8 bytes, but has 4"),
    "truncated": ({"a": entry(0, 8)}, b"0000", None, "a ends at byte"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12, None, "b overlaps a"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12, None, "between a and b"),
    "rest": ({"a": entry(0, 4)}, b"0" * 9, None, "5 bytes lie behind a"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_with_the_file(tmp_path: Path, case: str) -> None:
    header, body, length, said = DAMAGED[case]
    path = write(tmp_path / "model.safetensors", header, body, length)
    if case == "short":
        path.write_bytes(b"1234")
    with pytest.raises(BadInput, match=said) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2) for name in names}


def shard(folder: Path, index: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    for name, held in files.items():
        save_file(held, folder / f"{name.replace('_', '-')}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_one_file_whatever_its_name(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "draft.safetensors")
    found = find_weights(tmp_path)
    assert found.kind == "safetensors"
    assert found.files == (tmp_path / "draft.safetensors",)
    assert list(found.tensors or ()) == ["a"]


def test_shards_are_joined(tmp_path: Path) -> None:
    shard(
        tmp_path,
        {"a": FIRST, "b": SECOND},
        model_00001_of_00002=tensors("a"),
        model_00002_of_00002=tensors("b"),
    )
    found = find_weights(tmp_path)
    assert found.kind == "sharded"
    assert {name: info.file.name for name, info in (found.tensors or {}).items()} == {
        "a": FIRST,
        "b": SECOND,
    }


def test_bin_is_found_and_not_examined(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    found = find_weights(tmp_path)
    assert (found.kind, found.tensors) == ("bin", None)


SHARDS = {
    "missing shard": ({"a": FIRST, "b": SECOND}, ["a"], None, f"lacks {SECOND}"),
    "shard unknown to the index": ({"a": FIRST}, ["a"], ["b"], f"{SECOND}, which .* not name"),
    "not in its shard": ({"a": FIRST, "b": SECOND}, ["a"], ["c"], "b is not in"),
    "not in the index": ({"a": FIRST, "b": SECOND}, ["a"], ["b", "c"], "c is in .* not in the in"),
    "in two shards": ({"a": FIRST, "b": SECOND}, ["a", "b"], ["b"], "b is in .* and in"),
    "outside the folder": ({"a": "../x.safetensors"}, ["a"], None, "puts a into"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_index_and_shards_must_agree(tmp_path: Path, case: str) -> None:
    index, first, second, said = SHARDS[case]
    files = {"model_00001_of_00002": tensors(*first)}
    files |= {"model_00002_of_00002": tensors(*second)} if second else {}
    shard(tmp_path, index, **files)
    with pytest.raises(BadInput, match=said):
        find_weights(tmp_path)


def test_two_kinds_at_once_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no weights"):
        find_weights(tmp_path)
    save_file(tensors("a"), tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"both model\.safetensors and pytorch_model\.bin"):
        find_weights(tmp_path)
    with pytest.raises(BadInput, match="is no folder"):
        find_weights(tmp_path / "nothing")


def test_of_a_sharded_target_only_the_headers_that_are_needed_are_read(tmp_path: Path) -> None:
    shard(
        tmp_path,
        {"language_model.model.embed_tokens.weight": FIRST, "x.experts.0": SECOND},
        model_00001_of_00002=tensors("language_model.model.embed_tokens.weight"),
    )
    (tmp_path / SECOND).write_bytes(b"damaged, and nobody looks")
    found = find_tensors(tmp_path, ["embed_tokens.weight", "lm_head.weight"])
    assert list(found) == ["embed_tokens.weight"]
    assert found["embed_tokens.weight"].name == "language_model.model.embed_tokens.weight"


def test_the_model_s_own_norm_is_not_taken_for_a_tower_s(tmp_path: Path) -> None:
    save_file(tensors("model.norm.weight", "vision.blocks.norm.weight"), tmp_path / "m.safetensors")
    assert find_tensors(tmp_path, ["norm.weight"])["norm.weight"].name == "model.norm.weight"

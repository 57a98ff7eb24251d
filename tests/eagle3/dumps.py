"""The same small texts written in every layout, each as its own ecosystem's writer would."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 4
VOCAB = 50
LAYERS = 61
STATES = (0, 3, 31)  # of the aux slots


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text of T tokens and the target's states behind them."""

    ids: Tensor  # [T] int64
    mask: Tensor  # [T] int64
    aux: tuple[Tensor, ...]  # each [T, H]
    end: Tensor  # [T, H] before the final norm
    normed: Tensor  # [T, H] behind it


def make_texts(count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Text]:
    """Random texts of 9, 10, … tokens."""
    generator = torch.Generator().manual_seed(11)

    def states(length: int) -> Tensor:
        return torch.randn(length, HIDDEN, generator=generator).to(dtype)

    return [
        Text(
            ids=torch.randint(VOCAB, (length,), generator=generator),
            mask=torch.tensor([0, 0] + [1] * (length - 2)),
            aux=tuple(states(length) for _ in STATES),
            end=states(length),
            normed=states(length),
        )
        for length in range(9, 9 + count)
    ]


def write_pt_shards(folder: Path, texts: Sequence[Text]) -> None:
    """A list of states a file, the target's end last."""
    for i, text in enumerate(texts):
        save_pt(
            {
                "input_ids": text.ids,
                "hidden_states": [*text.aux, text.end],
                "loss_mask": text.mask,
            },
            folder / f"rows_{i // 2 * 2}-{i // 2 * 2 + 2}" / f"data_{i}.pt",
        )


def write_speculators_v0(folder: Path, texts: Sequence[Text]) -> None:
    """Aux states side by side, and the end behind the norm as `target`."""
    for i, text in enumerate(texts):
        save_pt(
            {
                "input_ids": text.ids,
                "loss_mask": text.mask,
                "hidden_state": torch.cat(text.aux, -1),
                "target": text.normed,
            },
            folder / f"data_{i}.pt",
        )


def write_specforge(folder: Path, texts: Sequence[Text], zipped: bool = False) -> None:
    """Aux states side by side and the end behind the norm, both with a batch dimension."""
    for i, text in enumerate(texts):
        content = {
            "input_ids": text.ids,
            "loss_mask": text.mask,
            "hidden_state": text.normed[None],
            "aux_hidden_state": torch.cat(text.aux, -1)[None],
        }
        path = folder / "rows_0-2000" / f"data_{i}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if zipped:
            with gzip.open(f"{path}.gz", "wb") as file:
                torch.save(content, file)
        else:
            torch.save(content, path)


def write_speculators(
    folder: Path, texts: Sequence[Text], indices: Sequence[int] | None = None, shards: int = 2
) -> None:
    """States of the rows `indices` (or all) in safetensors, and a dataset of all rows."""
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    for i in range(len(texts)) if indices is None else indices:
        tensors = {
            "token_ids": texts[i].ids,
            "hidden_states": torch.stack([*texts[i].aux, texts[i].end], 1),
        }
        save_file(tensors, states / f"hs_{i}.safetensors")
    write_dataset(folder, texts, shards)


def write_dataset(folder: Path, texts: Sequence[Text], shards: int) -> None:
    """What `datasets` makes of save_to_disk: shards of an arrow stream, and two JSON files."""
    features = {
        name: {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
        for name in ("input_ids", "loss_mask")
    } | {"seq_len": {"dtype": "int64", "_type": "Value"}}
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int64())),
            ("loss_mask", pa.list_(pa.int64())),
            ("seq_len", pa.int64()),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    names = [f"data-{shard:05}-of-{shards:05}.arrow" for shard in range(shards)]
    size = -(-len(texts) // shards)
    for shard, name in enumerate(names):
        part = texts[shard * size : (shard + 1) * size]
        table = pa.table(
            {
                "input_ids": [text.ids.tolist() for text in part],
                "loss_mask": [text.mask.tolist() for text in part],
                "seq_len": [len(text.ids) for text in part],
            },
            schema=schema,
        )
        with (folder / name).open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state))


def save_pt(content: object, path: Path) -> Path:
    """A torch file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path

"""Run by the peers' interpreter: their own readers on given dumps, and dumps of their own writers.

    data_peer.py IN OUT

IN holds specforge/, specforge.gz/ and speculators/ (dumps), and texts.safetensors with the texts
that are written anew. OUT/read.safetensors gets what the readers feed to training, by layout, file
and name; OUT/written is a dump of speculators' made with `datasets` and its float8 helper.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import Dataset
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from safetensors.torch import load_file, save_file
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import list_feature_files
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset

LONGEST = 4096


def read_specforge(folder: Path) -> dict[str, torch.Tensor]:
    """What SpecForge's trainer gets: its reader, its normaliser, and its head's shift."""
    fed = {}
    for path in list_feature_files(str(folder)):
        sample = normalize_offline_sample(load_feature_file(path), LONGEST)
        ids, target, mask = TargetHead.preprocess(
            None, sample["input_ids"], sample["target"], sample["loss_mask"]
        )
        stem = Path(path).name.split(".")[0]
        fed[f"{folder.name}/{stem}/input_ids"] = ids[0]
        fed[f"{folder.name}/{stem}/target"] = target[0]
        fed[f"{folder.name}/{stem}/loss_mask"] = mask[0, :, 0]
        fed[f"{folder.name}/{stem}/hidden"] = sample["hidden_state"][0]
    return fed


def read_speculators(
    folder: Path, name: str, transfer: FP8Transfer | None
) -> dict[str, torch.Tensor]:
    """What speculators' trainer gets: its dataset, and its shift."""
    data = ArrowDataset(LONGEST, folder, transfer=transfer, on_missing="raise")
    fed = {}
    for i in range(len(data)):
        batch = shift_batch(data[i])
        fed[f"{name}/hs_{i}/input_ids"] = batch["input_ids"]
        fed[f"{name}/hs_{i}/target"] = batch["verifier_last_hidden_states"]
        fed[f"{name}/hs_{i}/loss_mask"] = batch["loss_mask"]
        fed[f"{name}/hs_{i}/hidden"] = batch["hidden_states"]
    return fed


def write_speculators(folder: Path, texts: dict[str, torch.Tensor]) -> None:
    """A dataset that was filtered and shuffled before it was saved in shards, as prepare_data does."""
    count = len({name.split("/")[0] for name in texts})
    rows = {
        "input_ids": [texts[f"{i}/ids"].tolist() for i in range(count)],
        "loss_mask": [texts[f"{i}/mask"].tolist() for i in range(count)],
        "seq_len": [len(texts[f"{i}/ids"]) for i in range(count)],
        "text": list(range(count)),
    }
    data = Dataset.from_dict(rows).filter(lambda row: row["text"] != 1).shuffle(seed=3)
    order = data["text"][:]
    data = data.remove_columns("text").with_format("torch")
    data.save_to_disk(folder, num_shards=3)
    (folder / "hidden_states").mkdir()
    for row, i in enumerate(order):
        states = texts[f"{i}/states"]
        tensors = {"token_ids": texts[f"{i}/ids"]}
        if row % 2:
            tensors["hidden_states"], tensors["hidden_states_scales"] = quantize_tensor_to_fp8(
                states
            )
        else:
            tensors["hidden_states"] = states
        save_file(tensors, folder / "hidden_states" / f"hs_{row}.safetensors")


def main(given: Path, out: Path) -> None:
    """Read what is given, then write and read again."""
    fed = read_specforge(given / "specforge") | read_specforge(given / "specforge.gz")
    fed |= read_speculators(given / "speculators", "speculators", None)
    write_speculators(out / "written", load_file(given / "texts.safetensors"))
    transfer = FP8Transfer(out / "written" / "hidden_states")
    fed |= read_speculators(out / "written", "written", transfer)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in fed.items()},
        out / "read.safetensors",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Rows as we read them, against what the peers' own readers feed to training from the same files."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.data import find_data
from eagle3.samples import Sample, read_samples
from tests.eagle3.dumps import (
    HIDDEN,
    LAYERS,
    STATES,
    VOCAB,
    make_texts,
    write_specforge,
    write_speculators,
)

SCRIPT = Path(__file__).with_name("data_peer.py")


@dataclass(frozen=True)
class Dumps:
    """Dumps, and what the peers' readers made of them."""

    folders: dict[str, Path]
    fed: dict[str, Tensor]

    def ours(self, name: str) -> list[tuple[Sample, dict[str, Tensor]]]:
        """Our samples of a dump, each with what its peer feeds from the same file."""
        form = find_data(self.folders[name], states=STATES, hidden=HIDDEN, num_layers=LAYERS)
        pairs = []
        for sample in read_samples(form, vocab=VOCAB, hidden=HIDDEN):
            start = f"{name}/{sample.path.name.split('.')[0]}/"
            fed = {k.removeprefix(start): v for k, v in self.fed.items() if k.startswith(start)}
            assert len(fed) == 4, sample.path
            pairs.append((sample, fed))
        return pairs


@pytest.fixture(scope="module")
def dumps(peers_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    given, out = tmp_path_factory.mktemp("given"), tmp_path_factory.mktemp("out")
    texts = make_texts(5)
    write_specforge(given / "specforge", texts)
    write_specforge(given / "specforge.gz", texts, zipped=True)
    write_speculators(given / "speculators", texts)
    plain = {}
    for i, text in enumerate(texts):
        plain |= {
            f"{i}/ids": text.ids,
            f"{i}/mask": text.mask,
            f"{i}/states": torch.stack([*text.aux, text.end], 1),
        }
    save_file(plain, given / "texts.safetensors")
    done = subprocess.run(
        [str(peers_python), str(SCRIPT), str(given), str(out)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(out / "hf"),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("specforge", "specforge.gz", "speculators")
    folders = {name: given / name for name in names} | {"written": out / "written"}
    return Dumps(folders, load_file(out / "read.safetensors"))


@pytest.mark.parametrize("name", ["specforge", "specforge.gz"])
def test_specforge_trains_on_our_rows_with_text_and_teacher_shifted(
    name: str, dumps: Dumps
) -> None:
    pairs = dumps.ours(name)
    assert len(pairs) == 5
    for sample, fed in pairs:
        # One row less in truth: where nothing stands behind the text, it puts zeros.
        assert torch.equal(fed["input_ids"], behind(sample.input_ids))
        assert torch.equal(fed["target"], behind(sample.stored[-1]))
        assert torch.equal(fed["hidden"], torch.cat(sample.stored[:-1], -1))
        mask = sample.loss_mask.clone()
        mask[-1] = False  # set by its loader; the mask is not shifted
        assert torch.equal(fed["loss_mask"].bool(), mask)


@pytest.mark.parametrize(("name", "count"), [("speculators", 5), ("written", 4)])
def test_speculators_trains_on_our_rows_with_all_but_the_aux_states_shifted(
    name: str, count: int, dumps: Dumps
) -> None:
    pairs = dumps.ours(name)
    assert len(pairs) == count
    for sample, fed in pairs:
        assert torch.equal(fed["input_ids"], sample.input_ids[1:])
        assert torch.equal(fed["target"], sample.stored[-1][1:])
        assert torch.equal(fed["loss_mask"].bool(), sample.loss_mask[1:])
        assert torch.equal(fed["hidden"], torch.cat(sample.stored[:-1], -1)[:-1])


def behind(rows: Tensor) -> Tensor:
    """Each row's successor, and zeros at the end."""
    return torch.cat([rows[1:], torch.zeros_like(rows[:1])])

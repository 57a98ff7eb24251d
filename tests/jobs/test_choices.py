"""A target's choices for the texts of a dump, and how they are joined to it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.data import find_data
from eagle3.data.argmax import ABOUT, argmax_file, check_argmax, with_argmax
from eagle3.errors import BadInput
from eagle3.samples import Sample, read_samples
from eagle3.target import load_target_parts
from jobs.capture_states import open_job
from jobs.events import Events

LENGTHS = (5, 9, 7)
HIDDEN, VOCAB = 16, 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    for i, length in enumerate(LENGTHS):
        torch.manual_seed(i)
        path = folder / f"rows_{i}-{i + 1}" / f"data_{i}.pt"
        path.parent.mkdir(parents=True)
        content = {
            "input_ids": torch.randint(VOCAB, (length,)),
            "loss_mask": torch.ones(length, dtype=torch.int64),
            "hidden_states": [torch.randn(length, HIDDEN) for _ in range(2)],
        }
        torch.save(content, path)
    return folder


def choose(target: Path, dump: Path, out: Path, tmp_path: Path, **data: Any) -> dict[str, Any]:
    spec = {"path": str(dump), "states": None, "layout": None, "damaged": "fail", **data}
    request = {
        "device": "cpu",
        "dtype": "float32",
        "inputs": {"target": {"path": str(target), "layout": "hf", "made": ""}},
    }
    with Events(tmp_path / "events.jsonl") as events:
        return open_job(request, events).run_case({"case_id": "a", "data": spec, "out": str(out)})


def samples(dump: Path) -> list[Sample]:
    form = find_data(dump, hidden=HIDDEN, num_layers=3)
    return list(read_samples(form, vocab=VOCAB, hidden=HIDDEN))


def test_choices_are_the_targets_and_the_dump_is_untouched(
    target: Path, dump: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in dump.rglob("*.pt")}
    result = choose(target, dump, tmp_path / "out", tmp_path)
    assert {path: path.read_bytes() for path in dump.rglob("*.pt")} == before
    assert result["capture"]["samples"] == len(LENGTHS)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    joined = list(with_argmax(iter(samples(dump)), tmp_path / "out", dump, VOCAB))
    assert [len(sample.input_ids) for sample in joined] == list(LENGTHS)
    for sample in joined:
        with torch.no_grad():
            wanted = model(sample.input_ids[None]).logits[0].argmax(-1)
        assert sample.target_argmax is not None
        assert sample.target_argmax.tolist() == wanted.tolist()


def test_choices_for_another_text_are_refused(target: Path, dump: Path, tmp_path: Path) -> None:
    choose(target, dump, tmp_path / "out", tmp_path)
    path = dump / "rows_1-2" / "data_1.pt"
    content = torch.load(path)
    content["input_ids"][4] = (content["input_ids"][4] + 1) % VOCAB
    torch.save(content, path)
    with pytest.raises(BadInput, match=r"data_1\.pt.*made for another text"):
        list(with_argmax(iter(samples(dump)), tmp_path / "out", dump, VOCAB))


def test_a_sample_without_choices_is_named(target: Path, dump: Path, tmp_path: Path) -> None:
    choose(target, dump, tmp_path / "out", tmp_path)
    first = samples(dump)[0]
    argmax_file(tmp_path / "out", first.path, dump).unlink()
    with pytest.raises(BadInput, match=r"has nothing for .*data_0\.pt"):
        list(with_argmax(iter(samples(dump)), tmp_path / "out", dump, VOCAB))


def test_a_folder_that_is_there_is_not_written_to(target: Path, dump: Path, tmp_path: Path) -> None:
    choose(target, dump, tmp_path / "out", tmp_path)
    with pytest.raises(BadInput, match="exists already"):
        choose(target, dump, tmp_path / "out", tmp_path)


def test_nothing_is_left_of_a_dump_that_cannot_be_read(
    target: Path, dump: Path, tmp_path: Path
) -> None:
    damaged = dump / "rows_2-3" / "data_2.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(BadInput, match=r"data_2\.pt"):
        choose(target, dump, tmp_path / "out", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["dump"]
    result = choose(target, dump, tmp_path / "out", tmp_path, damaged="skip")
    assert result["capture"]["samples"] == 2
    assert any("data_2.pt" in note for note in result["notes"])
    assert load_file(argmax_file(tmp_path / "out", samples_path(dump, 0), dump))


def samples_path(dump: Path, index: int) -> Path:
    return dump / f"rows_{index}-{index + 1}" / f"data_{index}.pt"


def test_choices_are_of_one_target(target: Path, dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    choose(target, dump, out, tmp_path)
    mine = load_target_parts(target).fingerprint
    check_argmax(out, mine)
    with pytest.raises(BadInput, match="choices of another target"):
        check_argmax(out, "sha256:other")
    (out / ABOUT).unlink()
    with pytest.raises(BadInput, match=r"holds no argmax\.json"):
        check_argmax(out, mine)


def test_a_dump_of_another_target_is_refused(target: Path, dump: Path, tmp_path: Path) -> None:
    said = {"states": [0, 3], "target": "sha256:other"}
    (dump / "capture.json").write_text(json.dumps(said))
    with pytest.raises(BadInput, match="captured from another target"):
        choose(target, dump, tmp_path / "out", tmp_path)


def test_choices_outside_the_vocabulary_are_refused(
    target: Path, dump: Path, tmp_path: Path
) -> None:
    choose(target, dump, tmp_path / "out", tmp_path)
    with pytest.raises(
        BadInput, match=r"reaches from \d+ to \d+, but the target's vocabulary has 1"
    ):
        list(with_argmax(iter(samples(dump)), tmp_path / "out", dump, 1))

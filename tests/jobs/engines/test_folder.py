"""A drafter is served from a folder of its own, and its files stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.errors import BadInput
from jobs.engines.folder import drop_copies, lay_out

CONFIG = '{"hidden_size": 128}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    (folder / "more").mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "more" / "vocab.txt").write_text("words")
    return folder


def test_every_file_is_a_link_and_the_config_is_anew(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "run" / "engine" / "drafter"
    assert lay_out(source, out, {"hidden_size": 128, "ids": [0, 3]}) == out
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "more",
    ]
    assert (out / "model.safetensors").is_symlink()
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert (out / "more" / "vocab.txt").read_text() == "words"
    assert not (out / "config.json").is_symlink()
    assert json.loads((out / "config.json").read_text()) == {"hidden_size": 128, "ids": [0, 3]}


def test_the_original_is_not_touched(source: Path, tmp_path: Path) -> None:
    lay_out(source, tmp_path / "out", {})
    assert (source / "config.json").read_text() == CONFIG
    assert len(list(source.iterdir())) == 3


def test_links_hold_where_the_source_is_named_from_the_current_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = lay_out(Path("drafter"), Path("out"), {}).resolve()
    monkeypatch.chdir("/")
    assert (out / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_is_there_is_not_written_into(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadInput, match=r"/out cannot be laid out: File exists"):
        lay_out(source, out, {})
    assert list(out.iterdir()) == []


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"/nowhere cannot be laid out: No such file or directory"):
        lay_out(tmp_path / "nowhere", tmp_path / "out", {})


def test_what_cannot_be_copied_whole_leaves_nothing(source: Path, tmp_path: Path) -> None:
    (source / "z.bin").symlink_to("nowhere")  # behind what can be copied
    with pytest.raises(BadInput, match=r"z\.bin cannot be laid out: No such file or directory"):
        lay_out(source, tmp_path / "out", {}, copied=True)
    assert not (tmp_path / "out").exists()


def test_for_a_container_there_are_copies_that_go_again(source: Path, tmp_path: Path) -> None:
    (source / "linked.bin").symlink_to(source / "model.safetensors")  # as in a cache of checkpoints
    out = lay_out(source, tmp_path / "out", {"ids": [0, 3]}, copied=True)
    assert not any(file.is_symlink() for file in out.rglob("*"))
    assert (
        (out / "linked.bin").read_bytes() == (out / "model.safetensors").read_bytes() == b"weights"
    )
    assert (out / "more" / "vocab.txt").read_text() == "words"
    assert json.loads((out / "config.json").read_text()) == {"ids": [0, 3]}
    drop_copies(out)
    assert [file.name for file in out.iterdir()] == ["config.json"]
    assert (source / "model.safetensors").read_bytes() == b"weights"

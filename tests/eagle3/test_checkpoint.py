"""Checkpoints are read strictly: every fault is named, in one error, and no code is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import load_drafter, load_target_parts
from eagle3.errors import BadInput
from eagle3.model import Drafter
from tests.eagle3.small import SHAPE, write_tensors


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_what_was_saved_is_loaded(drafter: Drafter, drafter_folder: Path) -> None:
    loaded = load_drafter(drafter_folder)
    assert loaded.drafter.shape == SHAPE
    assert loaded.embedding is None
    assert loaded.notes == ()
    for name, value in drafter.state_dict().items():
        want = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(loaded.drafter.state_dict()[name], want), name


def test_bin_and_safetensors_are_the_same(drafter_folder: Path) -> None:
    first = load_drafter(drafter_folder)
    tensors = load_file(drafter_folder / "model.safetensors")
    torch.save(tensors, drafter_folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"both model\.safetensors and pytorch_model\.bin"):
        load_drafter(drafter_folder)
    (drafter_folder / "model.safetensors").unlink()
    second = load_drafter(drafter_folder)
    for name, value in first.drafter.state_dict().items():
        assert torch.equal(second.drafter.state_dict()[name], value), name
    assert second.fingerprint != first.fingerprint  # other bytes


def test_every_fault_of_the_tensors_stands_in_one_error(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["norm.weight"], tensors["d2t"]
    tensors["layers.0.hidden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    tensors["t2d"] = tensors["t2d"].to(torch.int64)
    tensors["midlayer.mlp.up_proj.weight"][0, 0] = float("nan")
    write_tensors(path, tensors)
    with pytest.raises(BadInput) as caught:
        load_drafter(drafter_folder)
    message = str(caught.value)
    for words in (
        str(path),
        "missing norm.weight",
        "missing d2t",
        "missing midlayer.hidden_norm.weight",
        "unexpected layers.0.hidden_norm.weight",
        "lm_head.weight is [29, 24], expected [30, 24]",
        "t2d holds torch.int64",
        "midlayer.mlp.up_proj.weight holds NaN",
    ):
        assert words in message


def test_an_own_embedding_is_kept_apart_and_checked(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["embed_tokens.weight"] = torch.ones(SHAPE.vocab, SHAPE.hidden)
    write_tensors(path, tensors)
    embedding = load_drafter(drafter_folder).embedding
    assert embedding is not None
    assert torch.equal(embedding, torch.ones(SHAPE.vocab, SHAPE.hidden))
    tensors["embed_tokens.weight"] = torch.ones(SHAPE.vocab + 1, SHAPE.hidden)
    write_tensors(path, tensors)
    with pytest.raises(BadInput, match=r"embed_tokens\.weight is \[51, 24\], expected \[50, 24\]"):
        load_drafter(drafter_folder)


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


def test_a_bin_that_contains_code_is_refused_and_not_run(
    drafter_folder: Path, tmp_path: Path
) -> None:
    (drafter_folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Payload(tmp_path / "ran")}, drafter_folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin contains pickled code.*not loaded"):
        load_drafter(drafter_folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 7, 100, 2000])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_truncated_file_is_named(drafter_folder: Path, keep: int, kind: str) -> None:
    path = drafter_folder / "model.safetensors"
    if kind == "bin":
        tensors = load_file(path)
        path.unlink()
        path = drafter_folder / "pytorch_model.bin"
        torch.save(tensors, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=f"{path.name} is damaged or truncated"):
        load_drafter(drafter_folder)


def test_a_missing_folder_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere/config\.json does not exist; a checkpoint is"):
        load_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "24"}, "'hidden_size' must be a positive integer, not '24'"),
        ({"norm_before_residual": True}, "sets norm_before_residual=True, which"),
        ({"eagle_config": {"norm_output": True}}, r"sets eagle_config\.norm_output=True, which"),
        ({"hidden_act": "gelu"}, "sets hidden_act='gelu'"),
        ({"rope_scaling": [1]}, "must be objects or null"),
        ({"attention_bias": True}, "sets attention_bias=True, which"),
        ({"num_hidden_layers": 2}, "declares 2 decoder layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "asks for 'yarn' rope scaling"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' must be a float"),
        ({"target_hidden_size": 7}, "no multiple of the target's hidden size 7"),
        ({"intermediate_size": 41}, r"gate_proj\.weight is \[40, 24\], expected \[41, 24\]"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    drafter_folder: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(drafter_folder, **changes)
    with pytest.raises(BadInput, match=words):
        load_drafter(drafter_folder)


def test_a_default_is_said_aloud(drafter_folder: Path) -> None:
    edit_config(drafter_folder, rope_theta=None)
    loaded = load_drafter(drafter_folder)
    assert loaded.drafter.shape.rope_theta == 10_000
    assert any("rope_theta" in note and "10000" in note for note in loaded.notes)


def test_declared_layer_ids_and_an_ambiguous_switch_are_said_aloud(drafter_folder: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    edit_config(drafter_folder, norm_output=False, eagle_config=ids)
    notes = " ".join(load_drafter(drafter_folder).notes)
    assert "norm_output=false, read as engines do" in notes
    assert "declares aux layer ids [2, 30, 58], in no stated convention" in notes


def test_weights_must_be_finite_floats_and_old_files_are_read(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    path = drafter_folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    assert load_drafter(drafter_folder).drafter.shape == SHAPE
    own = torch.full((SHAPE.vocab, SHAPE.hidden), torch.nan)
    wrong = {"fc.weight": tensors["fc.weight"].to(torch.int8), "embed_tokens.weight": own}
    torch.save({**tensors, **wrong}, path)
    with pytest.raises(
        BadInput, match=r"fc\.weight holds torch\.int8.*embed_tokens\.weight holds NaN"
    ):
        load_drafter(drafter_folder)


def test_rope_theta_in_the_new_spelling(drafter_folder: Path) -> None:
    edit_config(
        drafter_folder,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 123.0},
    )
    assert load_drafter(drafter_folder).drafter.shape.rope_theta == 123.0


@pytest.mark.parametrize("sharded", [False, True])
def test_the_targets_embedding_is_found_by_its_name(tmp_path: Path, sharded: bool) -> None:
    table = torch.arange(12.0).view(4, 3)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 5}')
    name = "model.embed_tokens.weight"
    tensors = {name: table, "model.norm.weight": torch.ones(3)}
    if sharded:
        write_tensors(tmp_path / "b.safetensors", tensors)
        index = {"weight_map": {name: "b.safetensors", "model.norm.weight": "b.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        write_tensors(tmp_path / "model.safetensors", tensors)
    parts = load_target_parts(tmp_path)
    assert parts.num_layers == 5
    assert torch.equal(parts.embedding, table)


def test_a_target_without_embedding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 5}')
    with pytest.raises(BadInput, match=r"neither model\.safetensors nor"):
        load_target_parts(tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"model.norm.weight": torch.ones(3)})
    with pytest.raises(BadInput, match=r"holds 0 tensors named \*\.embed_tokens\.weight"):
        load_target_parts(tmp_path)

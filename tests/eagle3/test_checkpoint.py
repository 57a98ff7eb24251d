"""Checkpoints are read strictly: every fault is named, in one error, and no code is run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3.checkpoint import load_drafter, wrong_numbers
from eagle3.errors import BadInput
from eagle3.model import Drafter
from tests.eagle3 import configs
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
    assert loaded.form.layout.value == "specforge"
    assert loaded.notes == (
        "drafter: layout specforge, since a flat config.json and midlayer.* tensors",
    )
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
    tensors["midlayer.hidden.weight"] = tensors.pop("midlayer.hidden_norm.weight")
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
        "unexpected midlayer.hidden.weight",
        "lm_head.weight is [29, 24], expected [30, 24]",
        "t2d holds torch.int64",
        "midlayer.mlp.up_proj.weight holds NaN",
    ):
        assert words in message


def test_many_faults_are_counted(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    write_tensors(path, {**load_file(path), **{f"x.{i}": torch.ones(1) for i in range(20)}})
    with pytest.raises(BadInput, match=r"unexpected x\.0; .*; and 8 more$"):
        load_drafter(drafter_folder)


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
    with pytest.raises(BadInput, match=rf"{path.name} is (damaged|cut off)"):
        load_drafter(drafter_folder)


def split(folder: Path) -> dict[str, str]:
    """Spread a folder's weights over two files, and tell which is where."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        write_tensors(folder / file, {n: tensors[n] for n in names if where[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_are_one_checkpoint(drafter: Drafter, drafter_folder: Path) -> None:
    whole = load_drafter(drafter_folder)
    where = split(drafter_folder)
    sharded = load_drafter(drafter_folder)
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(sharded.drafter.state_dict()[name], value), name
    (drafter_folder / where["fc.weight"]).unlink()
    with pytest.raises(BadInput, match=rf"lacks {where['fc.weight']}, which"):
        load_drafter(drafter_folder)


def test_shards_of_bin_files_are_one_checkpoint(drafter_folder: Path) -> None:
    whole = load_drafter(drafter_folder)
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    where = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(where.values()):
        torch.save({n: tensors[n] for n in names if where[n] == file}, drafter_folder / file)
    index = drafter_folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    sharded = load_drafter(drafter_folder)
    for name, value in whole.drafter.state_dict().items():
        assert torch.equal(sharded.drafter.state_dict()[name], value), name
    (drafter_folder / where["norm.weight"]).unlink()
    with pytest.raises(BadInput, match=r"index\.json and its files do not agree on .*norm\.weight"):
        load_drafter(drafter_folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": 5}, "its weight_map is no object"),
        ({"weight_map": [["a"]]}, "its weight_map is no object"),
        ({}, "its weight_map is no object"),
        ({"weight_map": {"fc.weight": 5}}, "do not agree on"),
    ],
)
def test_a_damaged_index_of_bin_files_is_named(
    drafter_folder: Path, index: dict[str, Any], words: str
) -> None:
    as_bin(drafter_folder, load_file(drafter_folder / "model.safetensors"))
    (drafter_folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match=words):
        load_drafter(drafter_folder)


def as_bin(folder: Path, state: object) -> None:
    """Put what torch saves in the place of the weights."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(state, folder / "pytorch_model.bin")


def test_a_bin_holds_plain_tensors_by_name_or_is_refused(drafter_folder: Path) -> None:
    whole = load_drafter(drafter_folder)
    tensors = load_file(drafter_folder / "model.safetensors")
    as_bin(drafter_folder, {**tensors, 5: torch.ones(1)})
    with pytest.raises(BadInput, match="holds no state_dict"):
        load_drafter(drafter_folder)
    fc = tensors["fc.weight"].float()
    for odd in (fc.to_sparse(), fc.to("meta")):
        as_bin(drafter_folder, {**tensors, "fc.weight": odd})
        with pytest.raises(BadInput, match=r"pytorch_model\.bin: fc\.weight is sparse, nested"):
            load_drafter(drafter_folder)
    trained = {
        name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()
    }
    table = torch.nn.Parameter(torch.ones(SHAPE.vocab, SHAPE.hidden))
    as_bin(drafter_folder, {**trained, "embed_tokens.weight": table})
    loaded = load_drafter(drafter_folder)
    assert loaded.embedding is not None
    assert not loaded.embedding.requires_grad
    assert torch.equal(loaded.drafter.fc.weight, whole.drafter.fc.weight)


class Largest(TorchDispatchMode):
    """The size of the largest result of an operation that is no view of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.size = max(self.size, out.nbytes)
        return out


def test_a_table_is_looked_through_without_a_copy_of_it() -> None:
    table = torch.zeros(20_000, 16, dtype=torch.bfloat16)
    with Largest() as largest:
        assert wrong_numbers({"embed_tokens.weight": table}) == ()
    assert 0 < largest.size < table.nbytes / 10
    table[19_999, 15] = float("inf")
    named = ("embed_tokens.weight holds NaN or infinity",)
    assert wrong_numbers({"embed_tokens.weight": table}) == named
    assert wrong_numbers({"embed_tokens.weight": torch.tensor(float("nan"))}) == named


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 10**12, 10**400, 1e308, 5e-324, float("nan"), float("inf")])
    | st.floats()
    | st.sampled_from(["", "x", "²2.3", "yarn", "llama3", "dynamic", "qwen3", "sliding_attention"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "rope_type", "factor", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)
YARNS = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
WAVES = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Keys that are read but are not in the configs, for another value to stand there.
MORE = {
    "layer_types": ["full_attention"],
    "sliding_window": 4,
    "use_sliding_window": False,
    "max_window_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
}


def fuzzed(scaling: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A config of each layout in which every key that is read stands."""
    layer = {**configs.LAYER, **MORE, "rope_scaling": scaling}
    if scaling["rope_type"] != "yarn":
        layer.pop("original_max_position_embeddings")
    nested = {**configs.NESTED, "transformer_layer_config": layer, "norm_before_residual": False}
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "num_aux_hidden_states": 3}
    flat = {
        **configs.FLAT,
        **layer,
        "eagle_config": {**ids, "return_hidden_post_norm": False},
        "norm_output": True,
        "fc_norm": False,
        "bias": False,
        "tie_word_embeddings": False,
    }
    return {"flat": flat, "nested": {**nested, "eagle_config": ids}}


def places(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from places(value, (*prefix, key))


def replaced(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A config with another value at a path."""
    key, *inner = place
    return {**config, key: replaced(config[key], tuple(inner), value) if inner else value}


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("scaling", [YARNS, WAVES], ids=["yarn", "llama3"])
@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_a_config_is_loaded_or_refused(
    drafter_folder: Path, scaling: dict[str, Any], layout: str, data: st.DataObject
) -> None:
    config = fuzzed(scaling)[layout]
    path = drafter_folder / "config.json"
    path.write_text(json.dumps(config))
    load_drafter(drafter_folder)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(sorted(places(config))))
        config = replaced(config, place, data.draw(JSON))
    path.write_text(json.dumps(config))
    try:
        loaded = load_drafter(drafter_folder).drafter
    except BadInput:
        return
    inside, given = torch.arange(4), torch.ones(1, 4, SHAPE.hidden)
    assert loaded.step(given, given, inside, []).shape == given.shape


def test_the_first_layers_other_name_is_the_same_layer(drafter_folder: Path) -> None:
    first = load_drafter(drafter_folder)
    path = drafter_folder / "model.safetensors"
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(path).items()}
    write_tensors(path, tensors)
    second = load_drafter(drafter_folder)
    for name, value in first.drafter.state_dict().items():
        assert torch.equal(second.drafter.state_dict()[name], value), name
    assert "layers.0.* tensors" in second.notes[0]


def test_a_file_without_a_head_leaves_it_to_the_target(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    write_tensors(path, {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    loaded = load_drafter(drafter_folder)
    assert loaded.form.head.value == "target"
    y = torch.randn(5, SHAPE.hidden)
    with pytest.raises(BadInput, match=r"no head of its own; set wiring\.head=target"):
        loaded.drafter.logits(y)
    head = tensors["lm_head.weight"].float()
    write_tensors(path, tensors)
    want = load_drafter(drafter_folder).drafter.logits(y)
    assert torch.equal(loaded.drafter.logits(y, head), want)


def test_a_file_without_the_mask_has_it_from_the_table(
    drafter: Drafter, drafter_folder: Path
) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    write_tensors(path, {n: t for n, t in tensors.items() if n != "t2d"})
    loaded = load_drafter(drafter_folder)
    assert torch.equal(loaded.drafter.t2d, drafter.t2d)
    assert "the file has no t2d: taken from d2t, read as offsets" in loaded.notes
    tensors["t2d"] = tensors["t2d"].roll(1)
    write_tensors(path, tensors)
    assert any("do not name the same target ids" in n for n in load_drafter(drafter_folder).notes)


def test_a_mask_kept_as_bytes_is_the_same_mask(drafter: Drafter, drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["t2d"] = tensors["t2d"].to(torch.uint8)
    write_tensors(path, tensors)
    assert torch.equal(load_drafter(drafter_folder).drafter.t2d, drafter.t2d)
    tensors["t2d"][3] = 2
    write_tensors(path, tensors)
    with pytest.raises(BadInput, match="expected a mask"):
        load_drafter(drafter_folder)


@pytest.mark.parametrize("text", ['{"a": 1' + "0" * 5000 + "}", "[" * 100_000, "\x00"])
def test_odd_json_is_one_sentence(drafter_folder: Path, text: str) -> None:
    (drafter_folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json cannot be read as JSON"):
        load_drafter(drafter_folder)


def test_a_missing_folder_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere/config\.json does not exist; a checkpoint is"):
        load_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "24"}, "'hidden_size' must be a positive integer, not '24'"),
        ({"eagle_config": {"norm_output": True}}, r"sets eagle_config\.norm_output=True, which"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"attention_bias": True}, r"missing midlayer\.self_attn\.q_proj\.bias"),
        ({"num_hidden_layers": 2}, r"the file holds layer 0, but num_layers is 2 \(config"),
        ({"target_hidden_size": 7}, r"fc\.weight is \[24, 60\], expected \[24, 21\]: 3 aux states"),
        ({"intermediate_size": 41}, r"gate_proj\.weight is \[40, 24\], expected \[41, 24\]"),
        ({"mask_token_id": 3}, "is a P-EAGLE drafter"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    drafter_folder: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(drafter_folder, **changes)
    with pytest.raises(BadInput, match=words):
        load_drafter(drafter_folder)


def test_a_default_is_said_aloud(drafter_folder: Path) -> None:
    edit_config(drafter_folder, rope_theta=None, rms_norm_eps=None)
    loaded = load_drafter(drafter_folder)
    assert loaded.drafter.shape.rope.theta == 10_000
    assert loaded.drafter.shape.norm_eps == 1e-6
    notes = "; ".join(loaded.notes)
    assert "does not state rope: {'theta': 10000.0, 'kind': 'default'} taken, default of" in notes
    assert "does not state norm_eps: 1e-06 taken, default of LlamaConfig" in notes


def test_declared_layer_ids_and_an_ambiguous_switch_are_said_aloud(drafter_folder: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    edit_config(drafter_folder, norm_output=False, eagle_config=ids)
    loaded = load_drafter(drafter_folder)
    notes = " ".join(loaded.notes)
    assert loaded.drafter.shape.head_norm is False
    assert "norm_output=False, read as SpecForge trains" in notes
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


def test_saved_rotary_frequencies_are_not_run_but_compared(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    own = SHAPE.rope.theta ** -(torch.arange(0, 8, 2) / 8)
    write_tensors(path, {**tensors, name: own})
    assert len(load_drafter(drafter_folder).notes) == 1
    write_tensors(path, {**tensors, name: 10_000.0 ** -(torch.arange(0, 8, 2) / 8)})
    assert any("inv_freq is not what" in note for note in load_drafter(drafter_folder).notes)


def test_quantised_weights_are_refused(drafter_folder: Path) -> None:
    path = drafter_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    write_tensors(path, tensors)
    with pytest.raises(BadInput, match=r"fc\.weight holds torch\.float8_e4m3fn, expected"):
        load_drafter(drafter_folder)


def test_the_layout_may_be_forced(drafter_folder: Path) -> None:
    assert load_drafter(drafter_folder, layout="specforge").notes[0].endswith("since asked for")
    with pytest.raises(BadInput, match=r"but num_layers is 32 \(default of Qwen3Config\)"):
        load_drafter(drafter_folder, layout="speculators")


def test_the_labs_drafter_keeps_its_fingerprint() -> None:
    folder = Path(__file__).parents[2] / "lab" / "drafter"
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    assert load_drafter(folder).fingerprint == f"sha256:{digest.hexdigest()}"

"""The program of a fix leaves a drafter behind that computes by default what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import load_drafter
from eagle3.checkpoints.agree import expected_shapes
from eagle3.diagnosis import rewrites
from eagle3.diagnosis.rewrites import program_lines
from eagle3.diagnosis.tensor_fixes import of_table
from eagle3.doctor.subject import read_drafter
from eagle3.served import served_wiring
from eagle3.wiring import (
    D2T,
    Biases,
    Concat,
    DecoderLayer,
    Embedding,
    FcInput,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Rotation,
    Wiring,
)
from tests.eagle3.configs import changed, sound, to_start
from tests.eagle3.fixing import (
    DEFAULT,
    FLAT,
    HIDDEN,
    KEY,
    KIMI,
    NESTED,
    OLD,
    QWEN,
    STATES,
    VLLM,
    VOCAB,
    asked,
    default,
    drafted,
    first,
    form_of,
    run_program,
    write,
)
from tests.eagle3.wired import target_of

TWO = changed(FLAT, num_hidden_layers=2)
CASES = [
    ("order", {"layers": (5, 0, 3)}, FLAT),
    ("order", {"layers": (3, 5, 0)}, {**FLAT, "fc_norm": True}),
    ("order", {"layers": (5, 3, 0)}, {**NESTED, "norm_before_fc": True, KEY: [0, 3, 5]}),
    ("d2t", {"d2t": D2T.absolute}, FLAT),
    ("d2t", {"d2t": D2T.identity}, FLAT),
    ("decoder-layer", {"decoder_layer": DecoderLayer.skipped}, FLAT),
    ("decoder-layer", {"decoder_layer": DecoderLayer.skipped}, TWO),
    ("concat", {"concat": Concat.hidden_first}, FLAT),
    ("concat", {"concat": Concat.hidden_first}, NESTED),
    ("input-norms", {"input_norms": InputNorms.swapped}, FLAT),
    ("input-norms", {"input_norms": InputNorms.swapped}, NESTED),
    ("rotation", {"rotation": Rotation.interleaved}, FLAT),
    ("rotation", {"rotation": Rotation.interleaved}, {**TWO, "attention_bias": True}),
    (
        "rotation",
        {"rotation": Rotation.interleaved},
        changed(NESTED, inner=True, model_type="qwen3"),
    ),
    ("embedding", {"embedding": Embedding.target}, FLAT),
    ("head", {"head": Head.target}, FLAT),
    ("head-input", {"head_input": HeadInput.raw}, FLAT),
    ("deeper-norm", {"deeper_norm": Parts.dropped}, TWO),
    ("fc-input", {"fc_input": FcInput.raw}, {**FLAT, "norm_before_fc": True}),
    ("fc-input", {"fc_input": FcInput.raw}, {**NESTED, "fc_norm": True}),
    ("biases", {"biases": Biases.first_dropped}, {**FLAT, "attention_bias": True}),
    ("biases", {"biases": Biases.dropped}, {**TWO, "attention_bias": True}),
    ("biases", {"biases": Biases.dropped}, changed(NESTED, inner=True, attention_bias=True)),
    ("qk-norm", {"qk_norm": Parts.dropped}, changed(NESTED, inner=True, model_type="qwen3")),
    ("qk-norm", {"qk_norm": Parts.dropped}, QWEN),
]


@pytest.mark.parametrize(("kind", "switches", "config"), CASES)
def test_the_rewritten_drafter_computes_by_default_what_was_trained(
    kind: str,
    switches: dict[str, Any],
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config, own_embedding=kind == "embedding")
    if switches.get("d2t") is D2T.absolute:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        save_file(tensors, path, metadata={"format": "pt", "made": "here"})
    form = load_drafter(folder).form
    layers = switches.get("layers", STATES)
    more = {name: value for name, value in switches.items() if name != "layers"}
    trained = replace(default(folder), layers=layers, **more).resolved(form)
    if kind != "d2t" or switches["d2t"] is D2T.identity:
        before = drafted(folder, target, trained)
        assert not torch.equal(before, drafted(folder, target, default(folder)))
    else:
        before = drafted(folder, target, trained)
        assert max(before.flatten().tolist()) < VOCAB
    fix = first(kind, trained, VLLM, config, form=form, num_layers=8)
    assert fix.possible
    assert fix.snippet is not None
    assert fix.lines[-2:] == program_lines(fix.snippet)
    if fix.config is not None:
        (folder / "config.json").write_text(json.dumps(fix.config))
    weights = folder / "model.safetensors"
    weights.chmod(0o640)
    run_program(fix.snippet, monkeypatch, folder, target.folder)
    assert torch.equal(drafted(folder, target, default(folder)), before)
    assert weights.stat().st_mode & 0o777 == 0o640
    with safe_open(weights, "pt") as file:
        kept = file.metadata()
    assert kept.pop("patched") == rewrites.in_short(fix.snippet).replace(";", ",")
    assert kept == {"format": "pt", "made": "here"}
    # Twice would undo some of them, and break what others have mended.
    with pytest.raises(SystemExit, match="was rewritten by this program already"):
        run_program(fix.snippet, monkeypatch, folder, target.folder)
    assert torch.equal(drafted(folder, target, default(folder)), before)


def test_absolute_ids_are_refused_as_offsets_and_mended_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    tensors = load_file(folder / "model.safetensors")
    absolute = tensors["d2t"] + torch.arange(30)
    save_file({**tensors, "d2t": absolute.int()}, folder / "model.safetensors")
    fix = first("d2t", Wiring.of_states(STATES, d2t=D2T.absolute), None, FLAT)
    assert (fix.engine, fix.possible) == ("every engine", True)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    mended = load_file(folder / "model.safetensors")
    assert torch.equal(mended["d2t"], tensors["d2t"].int())
    assert torch.equal(mended["t2d"], tensors["t2d"])


def test_programs_keep_number_types_shards_and_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    split = [{n: t for n, t in half.items() if ("self_attn" in n) is (i == 0)} for i in (0, 1)]
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    for name, part in zip(names, split, strict=True):
        save_file(part, folder / name, metadata={"part": name})
    where = {n: name for name, part in zip(names, split, strict=True) for n in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    run_program(rewrites.swapped_halves(), monkeypatch, folder)
    run_program(rewrites.without("norm[.]weight", "the norm"), monkeypatch, folder)
    run_program(rewrites.ones_before_head(), monkeypatch, folder)
    after = {name: t for file in names for name, t in load_file(folder / file).items()}
    assert {name: t.dtype for name, t in after.items()} == {n: t.dtype for n, t in half.items()}
    q = "midlayer.self_attn.q_proj.weight"
    assert torch.equal(after[q][:, :HIDDEN], half[q][:, HIDDEN:])
    assert torch.equal(after["norm.weight"], torch.ones(HIDDEN, dtype=torch.bfloat16))
    told = json.loads(index.read_text())
    assert told["metadata"] == {"total_size": 1}
    assert told["weight_map"] == {n: file for file in names for n in load_file(folder / file)}
    with safe_open(folder / names[0], "pt") as file:
        assert file.metadata()["part"] == names[0]
        assert len(file.metadata()["patched"].split("; ")) == 3
    assert load_drafter(folder).form.head_norm.value
    with pytest.raises(SystemExit, match="holds no"):
        run_program(rewrites.swapped_norms(), monkeypatch, tmp_path)


@pytest.mark.parametrize("reading", [D2T.offset, D2T.absolute])
def test_a_whole_vocabulary_is_put_in_the_targets_order(
    reading: D2T, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**FLAT, "draft_vocab_size": VOCAB}
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config)
    path = folder / "model.safetensors"
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    table = order - torch.arange(VOCAB) if reading is D2T.offset else order
    save_file({**load_file(path), "d2t": table}, path)
    engines = default(folder)
    trained = replace(engines, d2t=reading)
    before = drafted(folder, target, trained)
    unread = replace(trained, d2t=D2T.identity)
    assert not torch.equal(drafted(folder, target, unread), before)
    fix = first("d2t", trained, VLLM, config)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    assert torch.equal(drafted(folder, target, unread), before)
    assert torch.equal(drafted(folder, target, engines), before)


def test_the_deeper_norm_is_stored_where_sglang_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", TWO)
    found, _ = read_drafter(folder)
    assert found.form is not None
    lost = served_wiring(found.form, TWO, OLD, num_layers=KIMI, drafter=found).wiring
    assert lost is not None
    assert lost.deeper_norm is Parts.dropped
    fix = first("deeper-norm", Wiring.of_states((2, 30, 58)), OLD, TWO, form=found.form)
    assert fix.snippet is not None
    run_program(fix.snippet, monkeypatch, folder)
    after = load_file(folder / "model.safetensors")
    name = "layers.1.{}.weight"
    assert torch.equal(after[name.format("hidden_norm")], after[name.format("input_layernorm")])
    mended, _ = read_drafter(folder)
    again = served_wiring(found.form, TWO, OLD, num_layers=KIMI, drafter=mended).wiring
    assert again is not None
    assert again.deeper_norm is Parts.declared
    assert not first("deeper-norm", Wiring.of_states(STATES), VLLM, TWO).possible


def test_the_first_layer_is_called_as_an_old_release_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", NESTED)
    found, _ = read_drafter(folder)
    assert found.form is not None
    old = asked("sglang", "0.5.11")
    stopped = served_wiring(found.form, NESTED, old, num_layers=KIMI, drafter=found)
    assert stopped.wiring is None
    assert to_start(stopped)[0] == "rename the first layer's tensors to midlayer.*"
    run_program(to_start(stopped)[1], monkeypatch, folder)
    renamed, _ = read_drafter(folder)
    resolved = served_wiring(found.form, NESTED, old, num_layers=KIMI, drafter=renamed)
    assert resolved.wiring is not None


def test_sound_shapes_are_those_of_the_tests() -> None:
    assert set(sound(FLAT)) - {"t2d"} == set(expected_shapes(form_of(FLAT)))


def test_a_table_is_made_again_from_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "drafter", FLAT)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "d2t": tensors["d2t"].flip(0).int()}, path, metadata={"made": "here"})
    fix = of_table()
    assert fix.snippet is not None
    assert fix.lines == (
        "d2t = t2d.nonzero().flatten() - arange(len(d2t))",
        fix.snippet.rstrip("\n"),
    )
    run_program(fix.snippet, monkeypatch, folder)
    after = load_file(path)
    assert torch.equal(after["d2t"], tensors["d2t"].int())
    assert all(torch.equal(after[n], t) for n, t in tensors.items() if n != "d2t")
    with safe_open(path, "pt") as file:
        assert file.metadata()["made"] == "here"
    # A mask of another size says nothing of this table, and the file is left alone.
    for wrong in ({**tensors, "t2d": torch.ones(VOCAB, dtype=torch.bool)}, {"d2t": tensors["d2t"]}):
        save_file(wrong, path)
        before = path.read_bytes()
        with pytest.raises(SystemExit, match="t2d"):
            run_program(fix.snippet, monkeypatch, folder)
        assert path.read_bytes() == before
    assert [p.name for p in folder.iterdir() if "new" in p.name] == []


@pytest.mark.parametrize(
    ("has", "wanted", "base"),
    [
        ("norm_before_fc", FcInput.chunks, FLAT),
        ("norm_before_fc", FcInput.chunks, NESTED),
        ("fc_norm", FcInput.whole, FLAT),
        ("fc_norm", FcInput.whole, NESTED),
        (None, FcInput.chunks, FLAT),
        (None, FcInput.whole, NESTED),
    ],
)
def test_a_norm_that_the_file_does_not_have(
    has: str | None,
    wanted: FcInput,
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**base, has: True} if has else base
    target = target_of(tmp_path / "target", HIDDEN)
    folder = write(tmp_path / "drafter", config)
    trained = replace(default(folder), fc_input=wanted)
    before = drafted(folder, target, trained)
    fix = first("fc-input", replace(DEFAULT, fc_input=wanted), VLLM, config)
    assert fix.snippet is not None
    (folder / "config.json").write_text(json.dumps(fix.config))
    run_program(fix.snippet, monkeypatch, folder)
    assert load_drafter(folder).form.fc_norm.value is (wanted is FcInput.chunks)
    assert torch.equal(drafted(folder, target, default(folder)), before)
    found, _ = read_drafter(folder)
    assert found.form is not None
    assert fix.config is not None
    run = served_wiring(found.form, dict(fix.config), VLLM, num_layers=KIMI, drafter=found).wiring
    assert run is not None
    assert run.fc_input is wanted


def test_a_program_that_lacks_a_folder_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"usage: python .*this\.py DRAFTER TARGET, on a copy"):
        run_program(rewrites.head_of_target(), monkeypatch, tmp_path / "drafter")

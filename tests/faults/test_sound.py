"""Sound checkpoints and dumps of every layout are passed in silence."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.checkpoint import load_drafter
from eagle3.doctor.report import examine
from orchestrator.paths import CLONE
from tests.eagle3.dumps import write_specforge, write_speculators, write_speculators_v0
from tests.faults.drafters import LAYOUTS, SGLANG, VARIANTS, VLLM, engine_of, for_vllm
from tests.faults.edits import table_of, with_nan
from tests.faults.planting import weights
from tests.faults.run import Bench
from tests.faults.sound import LAYERS, STATES, TEMPLATE, Target

LAB = sorted(path.parent for path in (CLONE / "lab").glob("*/config.json"))
STORED = ("safetensors", "sharded", "bin", "sharded bin")


def stored(sound: Path, folder: Path, how: str) -> Path:
    """The same checkpoint in another kind of file."""
    shutil.copytree(sound, folder)
    if how == "safetensors":
        return folder
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if how == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    stem, end = ("pytorch_model", "bin") if how == "sharded bin" else ("model", "safetensors")
    parts = dict(enumerate((dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])), 1))
    names = {number: f"{stem}-0000{number}-of-00002.{end}" for number in parts}
    for number, part in parts.items():
        if end == "bin":
            torch.save(part, folder / names[number])
        else:
            save_file(part, folder / names[number])
    index = {name: names[number] for number, part in parts.items() for name in part}
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("how", STORED)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_checkpoint_is_passed_in_silence(
    bench: Bench, tmp_path: Path, layout: str, variant: str, how: str
) -> None:
    drafter = stored(bench.drafter(layout, variant), tmp_path / "drafter", how)
    engine = engine_of(layout, variant)
    own = for_vllm not in VARIANTS[variant] or layout == "speculators"
    asked: list[dict[str, Any]] = [
        {},
        {"target": bench.target.folder},
        {"target": bench.target.folder, "engine": engine, "states": STATES},
        {"target": bench.target.folder, "engine": engine, "data": bench.dump(layout)},
    ]
    # Its trainer knows what its ids mean, and reads no map without its mask.
    if own and variant != "no t2d":
        asked.append({**asked[-1], "trainer": layout})
    for more in asked:
        assert examine(drafter, **more).findings == ()
    load_drafter(drafter)


@pytest.mark.parametrize("variant", ["plain", "no t2d"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_target_s_head_in_d2t_s_order_is_passed_in_silence(
    bench: Bench, layout: str, variant: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["lm_head.weight"] = bench.target.head[ids].bfloat16()

    drafter = bench.spoilt(bench.drafter(layout, variant), weights(change))
    assert examine(drafter, bench.target.folder).findings == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_target_s_template_in_the_tokenizer_s_config_is_the_same(
    bench: Bench, layout: str
) -> None:
    def moved(folder: Path, target: Target) -> None:
        text = (folder / TEMPLATE).read_text()
        (folder / TEMPLATE).unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text + "\n"}))

    drafter = bench.spoilt(bench.drafter(layout, "plain"), moved)
    assert examine(drafter, bench.target.folder).findings == ()


def test_a_table_without_numbers_is_graver_where_the_engine_keeps_it(bench: Bench) -> None:
    severities = []
    for variant, engine in (("plain", SGLANG), ("for vLLM", VLLM)):
        drafter = bench.spoilt(bench.drafter("specforge", variant), table_of(with_nan))
        (found,) = examine(drafter, bench.target.folder, engine=engine, states=STATES).findings
        severities.append((found.name, found.severity))
    assert severities == [("embedding-not-finite", "warning"), ("embedding-not-finite", "error")]


@pytest.mark.parametrize("drafter", LAB, ids=lambda path: path.name)
def test_the_lab_s_drafters_are_passed_in_silence(drafter: Path) -> None:
    nested = "transformer_layer_config" in (drafter / "config.json").read_text()
    engine = VLLM if nested else SGLANG
    assert examine(drafter, CLONE / "lab" / "target").findings == ()
    assert examine(drafter, CLONE / "lab" / "target", engine=engine).findings == ()


@pytest.mark.parametrize(
    ("layout", "write", "dtype"),
    [
        ("pt_shards", None, torch.float32),
        ("specforge", None, torch.bfloat16),
        ("speculators", None, torch.bfloat16),
        ("specforge, zipped", partial(write_specforge, zipped=True), torch.bfloat16),
        ("speculators, float32", write_speculators, torch.float32),
        ("speculators_v0", write_speculators_v0, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("first_layers", [None, 0])
def test_a_sound_dump_is_passed_in_silence(
    bench: Bench, tmp_path: Path, layout: str, write: Any, dtype: Any, first_layers: int | None
) -> None:
    if write is None:
        data = bench.dump(layout)
    else:
        data = tmp_path / "data"
        write(data, bench.target.texts(dtype))
        capture = {"states": [*STATES, LAYERS], "target": bench.target.fingerprint}
        (data / "capture.json").write_text(json.dumps(capture))
    told = bench.inspected(data, bench.target.folder, first_layers)
    assert told.findings == ()
    assert told.refused is None
    assert examine(None, bench.target.folder, data).findings == ()

"""The verb, asked as a person asks it, over the host program of this machine."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator import doctor
from orchestrator.errors import InputError, OrchestratorError
from tests.doctor.files import (
    bf16,
    flat_config,
    flat_drafter,
    layer_config,
    write_sparse,
    write_target,
)

CLONE = Path(__file__).resolve().parents[2]
BIG_V, BIG_VD, BIG_H, BIG_WIDE = 163840, 32000, 7168, 18432


def ask(results: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "doctor", *arguments, f"results={results}"],
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_lab_is_sound(tmp_path: Path) -> None:
    code, said, errors = ask(tmp_path, "drafter=lab", "target=lab")
    assert (code, errors) == (0, "")
    assert said.splitlines()[-1] == "nothing found that would not fit"


def test_the_story_told_of_the_lab(tmp_path: Path) -> None:
    kimi = ("engine=sglang", "engine_version=0.5.12", "engine_class=kimi_k25")
    code, said, _ = ask(tmp_path, "drafter=lab", "target=lab", "states=[0,3,31,59]", *kimi)
    assert code == 3
    assert "error    ids-mean-other-states" in said
    assert "feeds states 2, 30 and 58, but the drafter was trained on states 0, 3 and 31" in said
    assert 'fix: "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]}' in said
    assert said.splitlines()[-1] == "1 error"


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    drafter = flat_drafter(tmp_path / "drafter", max_position_embeddings=100)
    target = write_target(tmp_path / "target")
    code, said, _ = ask(tmp_path, f"drafter={drafter}", f"target={target}", "json=true")
    report = json.loads(said)
    assert code == 3
    assert [f["name"] for f in report["findings"]] == ["context-too-short"]
    assert report["form"]["num_aux"]["value"] == 3
    assert "fc.weight" in report["inventory"]["required"]
    assert report["host"] == "local"


def test_every_switch_is_shown_with_its_origin(tmp_path: Path) -> None:
    code, said, _ = ask(tmp_path, "drafter=lab", "verbose=true")
    assert code == 0
    assert "norm_before_residual  False  (default of SpecForge" in said
    assert "d2t, fc.weight" in said


def test_kimi_s_size_by_its_headers_alone(tmp_path: Path) -> None:
    chosen = np.sort(np.random.default_rng(0).permutation(BIG_V)[:BIG_VD])
    mask = np.zeros(BIG_V, bool)
    mask[chosen] = True
    norm = bf16(1 + 0.1 * np.random.default_rng(1).standard_normal(BIG_H))
    config = {
        **flat_config(),
        **layer_config(),
        "hidden_size": BIG_H,
        "intermediate_size": BIG_WIDE,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 128,
        "vocab_size": BIG_V,
        "draft_vocab_size": BIG_VD,
        "max_position_embeddings": 262144,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]},
    }
    wide = 64 * 128
    tensors: dict[str, Any] = {
        "d2t": chosen - np.arange(BIG_VD),
        "t2d": mask,
        "fc.weight": ("BF16", (BIG_H, 3 * BIG_H)),
        "lm_head.weight": ("BF16", (BIG_VD, BIG_H)),
        "norm.weight": norm,
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = norm
    for name in "qkv":
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = ("BF16", (wide, 2 * BIG_H))
    tensors["midlayer.self_attn.o_proj.weight"] = ("BF16", (BIG_H, wide))
    tensors["midlayer.mlp.gate_proj.weight"] = ("BF16", (BIG_WIDE, BIG_H))
    tensors["midlayer.mlp.up_proj.weight"] = ("BF16", (BIG_WIDE, BIG_H))
    tensors["midlayer.mlp.down_proj.weight"] = ("BF16", (BIG_H, BIG_WIDE))
    drafter, target = tmp_path / "drafter", tmp_path / "target"
    write_sparse(drafter / "model.safetensors", tensors)
    (drafter / "config.json").write_text(json.dumps(config))
    files = {
        "language_model.model.embed_tokens.weight": ("BF16", (BIG_V, BIG_H)),
        "language_model.lm_head.weight": ("BF16", (BIG_V, BIG_H)),
        "language_model.model.norm.weight": norm,
    }
    shards = {}
    for number, (name, held) in enumerate(files.items()):
        shards[name] = f"model-{number + 1:05}-of-00064.safetensors"
        write_sparse(target / shards[name], {name: held})
    for layer in range(61):
        for expert in range(384):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"language_model.model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                shards[name] = f"model-{layer + 4:05}-of-00064.safetensors"  # never opened
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    text = {
        "num_hidden_layers": 61,
        "hidden_size": BIG_H,
        "vocab_size": BIG_V,
        "max_position_embeddings": 262144,
    }
    (target / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **text}})
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, said, errors = ask(
        tmp_path / "results",
        f"drafter={drafter}",
        f"target={target}",
        "engine=sglang",
        "engine_version=0.5.13",
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (code, errors) == (0, ""), said
    assert "sglang 0.5.13, class kimi_k25 feeds states 2, 30 and 58" in said
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 2.0  # of processors, whatever else this machine does meanwhile


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drafer=lab"], "did you mean drafter="),
        (["engine=sglang"], "examines a drafter"),
        (["drafter=lab", "drafter=lab"], "given twice"),
        (["drafter=lab", "engine_version=1"], "without an engine"),
        (["drafter=lab", "states=[a]"], "canonical states"),
        (["drafter=lab", "json=maybe"], "json=true"),
        (["drafter=lab", "engine=sglang", "engine_flags={"], "no JSON"),
        (["drafter="], "is empty"),
        (["drafter=lab", "--config-dir", "/nothing"], "is no folder"),
        (["drafter=x/y", "host=gpu8"], "relative"),
        (["drafter=/nothing/there"], "no folder on this host"),
        (["drafter=lab", "engine=vlm"], "did you mean vllm"),
    ],
)
def test_bad_input_is_said_so(tmp_path: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        doctor.run([*arguments, f"results={tmp_path}"])


def test_relative_paths_are_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat_drafter(tmp_path / "drafter")
    monkeypatch.chdir(tmp_path)
    assert doctor.run(["drafter=drafter", f"results={tmp_path / 'results'}"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"num_steps": 3, "topk": 1}',
        "num_steps=3,topk=1",
        "--num-steps 3 --topk 1",
        "--num-steps=3 --topk=1",
        "--num-steps '3' --topk 1",
    ],
)
def test_flags_are_read_however_they_are_written(text: str) -> None:
    flags = {k.lstrip("-").replace("-", "_"): v for k, v in doctor.flags_of(text).items()}
    assert flags == {"num_steps": 3, "topk": 1}


def test_an_interpreter_without_numpy_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {Path(sys._base_executable)} -S "$@"\n')
    bare.chmod(0o755)
    arguments = ["drafter=lab", f"results={tmp_path / 'r'}", f"host.python={bare}"]
    with pytest.raises(OrchestratorError, match="numpy is not installed for") as caught:
        doctor.run(arguments)
    assert caught.value.exit_code == 1


def test_a_host_of_one_s_own_config(tmp_path: Path) -> None:
    own = tmp_path / "own" / "host"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        f"name: mine\nalias: null\nwork: {tmp_path / 'work'}\npython: {sys.executable}\n"
    )
    code, said, errors = ask(
        tmp_path / "results",
        "drafter=lab",
        "host=mine",
        "json=true",
        "--config-dir",
        str(own.parent),
    )
    assert (code, errors) == (0, "")
    assert json.loads(said)["host"] == "mine"
    assert (tmp_path / "work" / "snapshots").is_dir()

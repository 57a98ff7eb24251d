"""Engines asked for fixes, the fixes of a wiring, and random drafters whose files the fixes change."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.checkpoint import load_drafter
from eagle3.checkpoints import examine
from eagle3.checkpoints.agree import expected_shapes
from eagle3.connect import connect
from eagle3.diagnosis.fixes import Fix, fixes_for
from eagle3.doctor.subject import EngineAsked
from eagle3.form import DrafterForm
from eagle3.served import ServedWiring, served_wiring
from eagle3.target import TargetParts
from eagle3.wiring import Embedding, HeadInput, Wiring
from tests.eagle3 import configs
from tests.eagle3.configs import WHERE

KEY = "eagle_aux_hidden_state_layer_ids"
KIMI = 61  # layers
FLAT, NESTED = ({**base, "target_hidden_size": 24} for base in (configs.FLAT, configs.NESTED))
QWEN = {**FLAT, "architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
VOCAB, HIDDEN, LENGTH, STEPS = 50, 24, 40, 4
STATES = (0, 3, 5)
DEFAULT = Wiring.of_states((2, 30, 58))


def asked(name: str, version: str | None, kind: str | None = "llama", **flags: Any) -> EngineAsked:
    """An engine as a user names it."""
    return EngineAsked(name=name, version=version, engine_class=kind, flags=flags)


OLD, NEW = asked("sglang", "0.5.12", "kimi_k25"), asked("sglang", "0.5.23", "kimi_k25")
VLLM = asked("vllm", "0.33.0")
TRT = asked("tensorrt_llm", None, None)


def form_of(config: dict[str, Any], **more: tuple[int, ...]) -> DrafterForm:
    """What a config and tensors that fit it say; `more` are tensors beside those."""
    form, _ = examine(config, None, WHERE)
    assert form is not None
    prefix = "midlayer." if form.layout.value == "specforge" else "layers.0."
    shapes = {n.replace("midlayer.", prefix): s for n, s in expected_shapes(form).items()}
    form, _ = examine(config, {**shapes, **more}, WHERE)
    assert form is not None
    return form


def wanted_fixes(
    kind: str,
    trained: Wiring,
    engine: EngineAsked | None,
    config: dict[str, Any],
    *,
    form: DrafterForm | None = None,
    stored: Sequence[int] = (),
    num_layers: int = KIMI,
    **more: Any,
) -> tuple[Fix, ...]:
    """The fixes of one kind for an engine that runs the config as it stands."""
    form = form or form_of(config)
    served = None
    if engine is not None:
        served = served_wiring(form, config, engine, num_layers=num_layers)
    return fixes_for(
        kind,
        trained.resolved(form),
        served,
        form=form,
        config=config,
        asked=engine,
        num_layers=num_layers,
        stored=stored,
        **more,
    )


def first(*args: Any, **how: Any) -> Fix:
    """The first of the wanted fixes."""
    return wanted_fixes(*args, **how)[0]


def again(fix: Fix, engine: EngineAsked, num_layers: int = KIMI) -> ServedWiring:
    """What the engine runs of the fix's config."""
    assert fix.config is not None
    config = dict(fix.config)
    return served_wiring(form_of(config), config, engine, num_layers=num_layers)


def write(folder: Path, config: dict[str, Any], *, own_embedding: bool = False) -> Path:
    """A random checkpoint of a config."""
    form = form_of(config)
    generator = torch.Generator().manual_seed(11)
    prefix = "midlayer." if form.layout.value == "specforge" else "layers.0."
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_shapes(form).items():
        scale = 0.4 if len(shape) == 2 else 0.3
        value = torch.randn(shape, generator=generator) * scale
        value = value + 1 if len(shape) == 1 and "norm" in name else value
        tensors[name.replace("midlayer.", prefix)] = value
    count = form.draft_vocab.value
    chosen = torch.randperm(VOCAB, generator=generator)[:count].sort().values
    tensors["d2t"] = chosen - torch.arange(count)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][chosen] = True
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "made": "here"})
    return folder


def drafted(folder: Path, target: TargetParts, wiring: Wiring) -> Tensor:
    """Chains from every position of one text."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    states = {k: torch.randn(LENGTH, HIDDEN, generator=generator) for k in range(8)}
    aux = torch.cat([states[k] for k in wiring.states()], -1)
    connected = connect(load_drafter(folder), target, wiring)
    return connected.chains(ids, aux, torch.arange(LENGTH - 2), steps=STEPS)


def default(folder: Path) -> Wiring:
    """What engines run where nothing is out of the ordinary."""
    form = load_drafter(folder).form
    whose = Embedding.own if form.embedding.value == "own" else Embedding.target
    wiring = Wiring.of_states(STATES, embedding=whose, head_input=HeadInput.normed)
    return wiring.resolved(form)


def run_program(snippet: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: Path) -> None:
    """Carry a program out on a drafter's folder, as its user would."""
    program = folder.parent / "this.py"
    program.write_text(snippet)
    monkeypatch.setattr(sys, "argv", [str(program), str(folder), *map(str, more)])
    runpy.run_path(str(program))

"""Runs in the peers' environment: random drafters of the peers' own classes, saved and run by them.

    python logits_peer.py FOLDER

FOLDER holds cases.json, a list of {name, peer, config, switches, aux, form, cannot} (see
test_logits.py). For each case a drafter with random weights is written to FOLDER/NAME/checkpoint by
the peer's own writer, and FOLDER/NAME/run.safetensors holds what it was given (input_ids [T + 1],
aux [T, A·H], embedding [V, H_d]) and what its own test-time-training loop made of it: logits
[steps, T, V_d]. SpecForge: `OnlineEagle3Model.forward` over `project_hidden_states`, `backbone` and
`compute_logits`. speculators: `Eagle3DraftModel.forward` with its eager attention and mask. A case
that says `cannot` must raise instead; FOLDER/NAME/error.txt holds what.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# The peers' losses are Triton kernels and their norms are compiled; a CPU runs both as written.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.export.to_hf import export_to_hf
from specforge.export.to_sglang import export_to_sglang
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

STEPS = 4
LENGTH = 11
LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def random_weights(model: torch.nn.Module, vocab: int, draft_vocab: int) -> dict[str, Tensor]:
    """A state dict for a model, in numbers that bf16 holds; the tables agree with each other."""
    weights = {}
    for name, tensor in model.state_dict().items():
        size = 0.25 if tensor.dim() == 2 else 1.0
        weights[name] = (torch.randn(tensor.shape) * size).bfloat16().float()
    if "d2t" in weights:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        weights["d2t"] = chosen - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][chosen] = True
    return weights


def given(case: dict[str, Any], vocab: int, hidden: int) -> tuple[Tensor, Tensor]:
    """A text [T + 1] and its aux states [T, A·H]."""
    return torch.randint(vocab, (LENGTH + 1,)), torch.randn(LENGTH, case["aux"] * hidden) * 2


class SpecForge(OnlineEagle3Model):
    """Its own loop, which hands the logits of each step to the loss; the loss is left out."""

    def _acc_and_loss(self, *, logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
        self.kept.append(logits)
        return (torch.zeros(()),) * 7


def run_specforge(case: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"], **case["config"], **case["switches"]
    )
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
    weights = random_weights(drafter, config.vocab_size, config.draft_vocab_size)
    drafter.load_state_dict(weights)
    ids, aux = given(case, config.vocab_size, drafter.target_hidden_size)
    loop = SpecForge(drafter, length=STEPS, attention_backend="sdpa")
    loop.kept = []
    with torch.no_grad():
        loop(
            input_ids=ids[None, 1:],
            attention_mask=torch.ones(1, LENGTH, dtype=torch.bool),
            target=torch.zeros(1, LENGTH, config.vocab_size),
            loss_mask=torch.ones(1, LENGTH, 1),
            hidden_states=aux[None],
        )
    save_specforge(case["form"], drafter, config, weights, folder)
    return run(ids, aux, weights, loop.kept)


def save_specforge(
    form: str,
    drafter: LlamaForCausalLMEagle3,
    config: LlamaConfig,
    weights: dict[str, Tensor],
    folder: Path,
) -> None:
    """sglang, hf: the exporters; sharded: save_pretrained; bin, layers.0: as EAGLE and others save."""
    folder.mkdir(parents=True)
    if form == "sharded":
        drafter.save_pretrained(folder, max_shard_size="20KB")
        return
    without = {name: t for name, t in weights.items() if name != "embed_tokens.weight"}
    if form == "bin":
        config.save_pretrained(folder)
        torch.save(without, folder / "pytorch_model.bin")
        return
    training = folder.parent / "training"
    config.save_pretrained(training)
    torch.save(
        {"strategy": "eagle3", "draft_state_dict": without if form == "sglang" else weights},
        training / "training_state.pt",
    )
    export = export_to_sglang if form == "sglang" else export_to_hf
    export(str(training), str(training / "config.json"), str(folder))
    if form == "layers.0":
        path = folder / "model.safetensors"
        renamed = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(path).items()}
        path.unlink()
        save_file(renamed, path, metadata={"format": "pt"})


def run_speculators(case: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    settings = dict(case["config"])
    draft_vocab = settings.pop("draft_vocab_size")
    layer = LAYERS[settings.pop("model_type", "llama")](**settings)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=draft_vocab, **case["switches"]
    )
    drafter = Eagle3DraftModel(config).eval()
    weights = random_weights(drafter, layer.vocab_size, draft_vocab)
    drafter.load_state_dict(weights)
    hidden = config.target_hidden_size or layer.hidden_size
    ids, aux = given(case, layer.vocab_size, hidden)
    kept: list[Tensor] = []
    drafter.lm_head.register_forward_hook(lambda _module, _inputs, logits: kept.append(logits))
    positions = {} if case["form"] == "from 1" else {"position_ids": torch.arange(LENGTH)[None]}
    with torch.no_grad():
        drafter(
            hidden_states=aux[None],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            ttt_steps=STEPS,
            **positions,
        )
    limit = {"max_shard_size": "20KB"} if case["form"] == "sharded" else {}
    drafter.save_pretrained(folder, **limit)
    return run(ids, aux, weights, kept)


def run(
    ids: Tensor, aux: Tensor, weights: dict[str, Tensor], kept: list[Tensor]
) -> dict[str, Tensor]:
    """What a case was given and what came out."""
    logits = torch.cat(kept).contiguous()
    assert logits.shape[:2] == (STEPS, LENGTH), logits.shape
    return {
        "input_ids": ids,
        "aux": aux,
        "embedding": weights["embed_tokens.weight"],
        "logits": logits,
    }


def main(folder: Path) -> None:
    for seed, case in enumerate(json.loads((folder / "cases.json").read_text())):
        torch.manual_seed(seed)
        place = folder / case["name"]
        place.mkdir()
        run_case = {"specforge": run_specforge, "speculators": run_speculators}[case["peer"]]
        try:
            result = run_case(case, place / "checkpoint")
        except Exception as error:
            if not case["cannot"]:
                raise
            (place / "error.txt").write_text(f"{type(error).__name__}: {error}")
            continue
        save_file(result, place / "run.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

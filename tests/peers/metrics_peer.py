"""Runs in the peers' environment: the trainers' own forwards and metrics on given tensors.

    python metrics_peer.py FOLDER…

Each FOLDER holds case.json (config keys and switches), drafter.safetensors (SpecForge's names, with
embed_tokens, d2t, t2d), target.safetensors (head [V, H], norm [H]) and texts.safetensors
(INDEX.input_ids, .loss_mask, .aux [T, A·H], .teacher [T, H] before the final norm). Writes out.json:
each trainer's counts a text, and its own summary over all texts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# SpecForge compiles its teacher; uncompiled it is the same code.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors.torch import load_file
from specforge.algorithms.eagle3 import model as eagle3_model
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.core import loss as specforge_loss
from specforge.eval.evaluator import Evaluator
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.controller import _reduce_eagle3_metrics
from specforge.training.strategies.base import Eagle3TrainStrategy
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.utils import normalize_counted_metrics
from torch import Tensor
from transformers import LlamaConfig

Text = dict[str, Tensor]


class ReferenceLoss:
    """SpecForge's loss as its own reference has it, since a CPU cannot run the kernel; no metric's."""

    apply = staticmethod(specforge_loss._compute_loss)


eagle3_model.LogSoftmaxLoss = ReferenceLoss


def llama(config: dict[str, Any]) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    keys = {key: value for key, value in config.items() if key != "rope_theta"}
    return LlamaConfig(**keys, rope_parameters=rope, tie_word_embeddings=False)


def load(model: torch.nn.Module, weights: dict[str, Tensor], extra: set[str]) -> None:
    """All weights must find their place, and all but `extra` places their weight."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= extra, missing
    assert not unexpected, unexpected


def normed(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * weight


def run_specforge(
    case: dict[str, Any], weights: dict[str, Tensor], target: dict[str, Tensor], texts: list[Text]
) -> dict[str, Any]:
    config = llama(case["config"])
    config.target_hidden_size = target["head"].shape[1]
    drafter = LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval().float()
    load(drafter, weights, set())
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": target["head"].shape[1], "vocab_size": len(target["head"])}
        LlamaConfig(**shape, num_attention_heads=1).save_pretrained(folder)
        head = TargetHead(folder)
    head.fc.weight.data.copy_(target["head"])
    model = OnlineEagle3Model(drafter, length=case["steps"]["specforge"], attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(model, target_head=head)
    batches = []
    for i, text in enumerate(texts):
        stored = {
            "input_ids": text["input_ids"],
            "loss_mask": text["loss_mask"].long(),
            "aux_hidden_state": text["aux"][None],
            # Its dumps hold the state behind the final norm.
            "hidden_state": normed(text["teacher"], target["norm"], config.rms_norm_eps)[None],
        }
        tensors = normalize_offline_sample(stored, max_len=10_000)
        batches.append(TrainBatch([str(i)], "eagle3", tensors, {"target_repr": "hidden_state"}))
    counts, lines = [], []
    outputs = {batch.sample_ids[0]: strategy.forward_loss(batch) for batch in batches}
    for output in outputs.values():
        metrics = output.metrics
        counts.append(
            {key: [float(value) for value in metrics[key]] for key in metrics if key != "acces"}
        )
        lines.append(
            _reduce_eagle3_metrics(
                metrics, device=torch.device("cpu"), process_group=None, ploss_decay=0.8
            )
        )
    return {
        "counts": counts,
        "log": lines,
        "eval": Evaluator().run(lambda batch: outputs[batch.sample_ids[0]], batches),
    }


def run_speculators(
    case: dict[str, Any], weights: dict[str, Tensor], target: dict[str, Tensor], texts: list[Text]
) -> dict[str, Any]:
    layer = llama(case["config"])
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=case["config"]["draft_vocab_size"],
        **case["speculators"],
    )
    model = Eagle3DraftModel(config).eval().float()
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    renamed["verifier_norm.weight"] = target["norm"]
    renamed["verifier_lm_head.weight"] = target["head"][weights["t2d"]]
    load(model, renamed, set())
    call = {
        "ttt_steps": case["steps"]["speculators"],
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def item(text: Text) -> Text:
        length = len(text["input_ids"])
        return {
            "hidden_states": text["aux"],
            "input_ids": text["input_ids"],
            "verifier_last_hidden_states": text["teacher"],
            "loss_mask": text["loss_mask"],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }

    def metrics_of(together: list[Text], rows: int) -> dict[str, float]:
        collate = CollateFn(rows, layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)
        batch = collate([item(text) for text in together])
        metrics = model(**batch, **call)[2]
        return {key: float(value) for key, value in metrics.items()}

    alone = [metrics_of([text], len(text["input_ids"]) - 1) for text in texts]
    summed = {key: sum(counts[key] for counts in alone) for key in alone[0]}
    rows = sum(len(text["input_ids"]) - 1 for text in texts) + 5
    return {
        "counts": alone,
        "val": normalize_counted_metrics(summed),
        "packed": metrics_of(texts, rows),
    }


def run(folder: Path) -> None:
    torch.manual_seed(0)
    case = json.loads((folder / "case.json").read_text())
    weights = load_file(folder / "drafter.safetensors")
    target = load_file(folder / "target.safetensors")
    flat = load_file(folder / "texts.safetensors")
    names = ("input_ids", "loss_mask", "aux", "teacher")
    texts = [{name: flat[f"{i}.{name}"] for name in names} for i in range(len(flat) // len(names))]
    out = {}
    with torch.no_grad():
        if "specforge" in case["steps"]:
            out["specforge"] = run_specforge(case, weights, target, texts)
        if "speculators" in case["steps"]:
            out["speculators"] = run_speculators(case, weights, target, texts)
    (folder / "out.json").write_text(json.dumps(out))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))

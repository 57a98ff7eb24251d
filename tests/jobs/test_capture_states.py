"""Captured states against forward hooks on every layer, and how a continuation is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle3.data import find_data
from eagle3.errors import BadInput
from eagle3.samples import Sample, read_samples
from jobs.capture_states import (
    captured_states,
    decoder_layers,
    equal_lengths,
    open_job,
    read_prompts,
)
from jobs.events import Events

LAYERS = 5
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 39,
}
STATES = [0, 1, 3, 5]
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
TARGETS = ["llama", "qwen2", "qwen3", "deepseek_v3"]


def random_target(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))
    else:
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(**{**SIZES, "num_key_value_heads": 2}, **LATENT)
        )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    random_target(request.param).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def capture(target: Path, tmp_path: Path, texts: list[list[int]], **case: Any) -> Path:
    lines = [json.dumps({"input_ids": ids}) for ids in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    request = {
        "device": "cpu",
        "dtype": "float32",
        "inputs": {"target": {"path": str(target), "layout": "hf", "made": ""}},
    }
    job = open_job(request, Events(tmp_path / "events.jsonl"))
    out = tmp_path / "data"
    defaults = {
        "out": str(out),
        "prompts": str(tmp_path / "prompts.jsonl"),
        "states": STATES,
        "new_tokens": 0,
        "repetition_window": None,
        "min_new_tokens": 1,
        "batch": 2,
        "max_samples": None,
        "keep": False,
    }
    job.run_case({**defaults, **case})
    return out


def samples_of(out: Path) -> list[Sample]:
    form = find_data(out, hidden=16, num_layers=LAYERS)
    assert [(slot.state, slot.origin) for slot in form.slots] == [
        (k, "capture.json") for k in STATES
    ]
    return list(read_samples(form, vocab=40, hidden=16))


def hooked(target: Path, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """States 0..n and logits by a hook on every layer, one text at a time."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    states: list[torch.Tensor] = [model.get_input_embeddings()(ids)]

    def keep(_: Any, __: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    for handle in handles:
        handle.remove()
    return [s.reshape(len(ids), -1) for s in states], logits


@pytest.mark.parametrize("kind", TARGETS)
def test_every_state_is_what_a_hook_on_its_layer_sees(kind: str) -> None:
    model = random_target(kind)
    layers = decoder_layers(model)
    assert len(layers) == LAYERS
    ids = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    with torch.no_grad(), captured_states(layers, range(LAYERS + 1)) as kept:
        listed = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert sorted(kept) == list(range(LAYERS + 1))
    assert torch.equal(kept[0], model.get_input_embeddings()(ids))
    for k in range(1, LAYERS + 1):
        assert torch.equal(kept[k], seen[k - 1]), k
    # transformers lists the same states, but its last entry is behind the final norm.
    assert len(listed) == LAYERS + 1
    for k in range(LAYERS):
        assert torch.equal(kept[k], listed[k]), k
    with torch.no_grad():
        assert torch.equal(model.get_decoder().norm(kept[LAYERS]), listed[LAYERS])
    assert not torch.allclose(kept[LAYERS], listed[LAYERS], atol=0.1)
    # Nothing is left on the model: a later pass is not captured.
    before = kept[0]
    model(ids[:1], use_cache=False)
    assert kept[0] is before


def test_states_are_those_behind_every_layer(target: Path, tmp_path: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13], [14, 15, 16, 17, 18]]
    out = capture(target, tmp_path, prompts)
    texts = []
    for sample in samples_of(out):
        states, logits = hooked(target, sample.input_ids)
        for k in STATES:
            torch.testing.assert_close(sample.states[k], states[k], atol=1e-5, rtol=1e-5)
        assert sample.target_argmax is not None
        assert torch.equal(sample.target_argmax, logits.argmax(-1))
        assert sample.loss_mask.tolist() == [False] + [True] * (len(sample.input_ids) - 1)
        texts.append(sample.input_ids.tolist())
    assert sorted(texts) == sorted(prompts)
    written = json.loads((out / "capture.json").read_text())
    assert (written["states"], written["num_layers"], written["samples"]) == (STATES, LAYERS, 4)
    assert written["positions"] == 4 + 2 + 4 + 4


def test_a_continuation_is_the_targets_greedy_choice(target: Path, tmp_path: Path) -> None:
    out = capture(target, tmp_path, [[1, 2, 3], [4, 5, 6], [7, 8]], new_tokens=9)
    for sample in samples_of(out):
        new = int(sample.loss_mask.sum())
        prompt = len(sample.input_ids) - new
        assert sample.loss_mask.tolist() == [False] * prompt + [True] * new
        _, logits = hooked(target, sample.input_ids)
        assert torch.equal(logits.argmax(-1)[prompt - 1 : -1], sample.input_ids[prompt:])
        assert new == 9 or int(sample.input_ids[-1]) == 39
    written = json.loads((out / "capture.json").read_text())
    assert written["positions_following_argmax"] == written["positions"] > 0


def test_a_text_that_is_not_the_targets_own_is_counted_so(target: Path, tmp_path: Path) -> None:
    out = capture(target, tmp_path, [[1, 2, 3, 4, 5, 6, 7, 8], [9]])
    (sample,) = samples_of(out)  # one token alone has nothing to score and is left out
    _, logits = hooked(target, sample.input_ids)
    written = json.loads((out / "capture.json").read_text())
    follows = int((logits.argmax(-1)[:-1] == sample.input_ids[1:]).sum())
    assert (written["positions"], written["left_out"]) == (7, 1)
    assert written["positions_following_argmax"] == follows < 7


def test_a_target_that_lacks_tensors_is_not_filled_with_random_ones(
    target: Path, tmp_path: Path
) -> None:
    path = target / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"missing keys: model\.layers\.1\.mlp\.down_proj\.weight"):
        capture(target, tmp_path, [[1, 2, 3]])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        BadInput, match=r"target .* cannot be loaded|is damaged or truncated|is cut off"
    ):
        capture(target, tmp_path, [[1, 2, 3]])


def test_text_needs_a_tokenizer(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "x"}')
    with pytest.raises(BadInput, match="holds no tokenizer; give the prompts as input_ids"):
        read_prompts(tmp_path / "p.jsonl", target)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"states": [0, 6]}, "state 6 is asked for, but the target has 5 decoder layers"),
        ({"new_tokens": 3, "min_new_tokens": 4}, "none of 1 prompts gave 4 tokens"),
        ({"prompts": "/nowhere.jsonl"}, "prompts /nowhere.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_captured_is_refused_and_leaves_nothing(
    target: Path, tmp_path: Path, case: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        capture(target, tmp_path, [[1, 2, 3]], **case)
    assert not (tmp_path / "data").exists()
    assert not list(tmp_path.glob("data.*"))


def test_an_existing_folder_is_never_written_to(target: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(BadInput, match="exists already"):
        capture(target, tmp_path, [[1, 2, 3]])
    # Where the data is made on first use, another run may have made it meanwhile.
    with pytest.raises(BadInput, match="exists already"):
        capture(target, tmp_path, [[1, 2, 3]], keep=True)
    (tmp_path / "data").rmdir()
    out = capture(target, tmp_path, [[1, 2, 3]])
    before = (out / "capture.json").read_bytes()
    assert capture(target, tmp_path, [[4, 5, 6, 7]], keep=True) == out
    assert (out / "capture.json").read_bytes() == before
    with pytest.raises(BadInput, match="line 1: ids reach from 1 to 40"):
        capture(target, tmp_path, [[1, 40]], out=str(tmp_path / "other"))


def test_prompts_are_batched_by_length_and_none_is_lost() -> None:
    prompts = [[0] * n for n in (3, 5, 3, 3, 5, 7, 3)]
    batches = list(equal_lengths(prompts, 2))
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(len({len(prompts[i]) for i in batch}) == 1 for batch in batches)
    assert max(map(len, batches)) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is no JSON"),
        ("[1, 2]", "line 2 needs 'input_ids'"),
        ('{"input_ids": []}', "line 2 needs 'input_ids'"),
        ('{"input_ids": [1, true]}', "line 2 needs 'input_ids'"),
        ('{"prompt": "x"}', "line 2 needs 'input_ids'"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [1]}\n' + line)
    with pytest.raises(BadInput, match=words):
        read_prompts(path, tmp_path)

"""What slots are said to be: tiny targets, dumps in every layout, faults planted in the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle3.data.argmax import write_argmax
from eagle3.errors import BadInput
from eagle3.target import load_target_parts
from jobs import first_layers
from jobs.capture_states import captured_states, decoder_layers
from jobs.events import Events
from jobs.first_layers import load_first_layers, mib, plan_layers, run_layers, side_by_side
from jobs.inspect_data import open_job
from tests.eagle3.dumps import (
    Text,
    write_pt_shards,
    write_specforge,
    write_speculators,
    write_speculators_v0,
)

LAYERS, WIDTH, VOCAB = 7, 32, 60
AUX = (0, 2, 5)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **{k: v for k, v in SIZES.items() if k != "head_dim"}, embedding_multiplier=12.0
        )
    ),
    # Its final norm is a LayerNorm, and its head has a scale.
    "cohere": lambda: CohereForCausalLM(
        CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"})
    ),
}
FIVE = {**SIZES, "num_hidden_layers": 5, "num_key_value_heads": 2}
BIG_KINDS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{k: v for k, v in FIVE.items() if k != "head_dim"},
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    ),
    "gemma3 with its vision tower": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **FIVE,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
            },
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
            image_token_index=5,
            boi_token_index=6,
            eoi_token_index=7,
        )
    ),
}
WRITERS: dict[str, Callable[..., None]] = {
    "pt_shards": write_pt_shards,
    "speculators_v0": write_speculators_v0,
    "speculators": write_speculators,
    "specforge": write_specforge,
    "specforge.gz": partial(write_specforge, zipped=True),
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A target's folder, its texts, and for each text all its states [n + 1, T, H] and its choices."""

    folder: Path
    ids: list[Tensor]
    states: list[Tensor]
    normed: list[Tensor]
    argmax: list[Tensor]

    def texts(
        self,
        aux: Sequence[int] = AUX,
        end: int = LAYERS,
        dtype: torch.dtype = torch.float32,
        shift: int = 0,
    ) -> list[Text]:
        """Dumps of some states; with a shift, row t holds the state of position t + shift."""
        return [
            Text(
                ids=ids,
                mask=torch.tensor([0] * 4 + [1] * (len(ids) - 4)),
                aux=tuple(states[k].roll(-shift, 0).to(dtype) for k in aux),
                end=states[end].roll(-shift, 0).to(dtype),
                normed=normed.roll(-shift, 0).to(dtype),
            )
            for ids, states, normed in zip(self.ids, self.states, self.normed, strict=True)
        ]


def make(kind: str, folder: Path) -> Made:
    torch.manual_seed(5)
    model = {**KINDS, **OTHERS}[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.3, 1.7)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    ids = [torch.randint(3, VOCAB, (20 + i,)) for i in range(6)]
    ids = [torch.cat([torch.tensor([1]), text]) for text in ids]
    states, normed, argmax = [], [], []
    with torch.no_grad():
        for text in ids:
            with captured_states(model.model.layers, range(LAYERS + 1)) as kept:
                logits = model(text[None], use_cache=False).logits[0]
            states.append(torch.cat([kept[k] for k in range(LAYERS + 1)]))
            normed.append(model.model.norm(states[-1][-1]))
            argmax.append(logits.argmax(-1))
    return Made(folder=folder, ids=ids, states=states, normed=normed, argmax=argmax)


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    made: dict[str, Made] = {}

    def get(kind: str) -> Made:
        if kind not in made:
            made[kind] = make(kind, tmp_path_factory.mktemp("target") / "t")
        return made[kind]

    return get


@pytest.fixture
def llama(makers: Callable[[str], Made]) -> Made:
    return makers("llama")


Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    def run(made: Made, **more: Any) -> dict[str, Any]:
        data: dict[str, Any] = {
            "path": str(tmp_path / "data"),
            "states": [*AUX, LAYERS],
            "layout": None,
            "damaged": "fail",
            "target_argmax": None,
            **more.pop("data", {}),
        }
        request = {
            "device": "cpu",
            "max_samples": None,
            "first_layers": None,
            "seed": 0,
            **more,
            "inputs": {
                "target": {"path": str(made.folder), "layout": "hf", "made": ""},
                "data": data,
            },
        }
        with Events(tmp_path / "events.jsonl") as events:
            result = open_job(request, events).run_case({"case_id": "case"})
        json.dumps(result, allow_nan=False)
        return result

    return run


def add_argmax(made: Made, tmp_path: Path, argmax: Sequence[Tensor] | None = None) -> str:
    """The target's choices beside the dump in tmp_path, as capture_states leaves them."""
    files = sorted((tmp_path / "data").rglob("*.pt"), key=lambda p: int(p.stem.split("_")[1]))
    for path, ids, chosen in zip(files, made.ids, argmax or made.argmax, strict=True):
        write_argmax(tmp_path / "argmax", path, tmp_path / "data", ids, chosen)
    return str(tmp_path / "argmax")


def verdicts(result: dict[str, Any]) -> list[str]:
    return [slot["verdict"] for slot in result["slots"]]


def names(result: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in result["findings"]]


def finding(result: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [f for f in result["findings"] if f["name"] == name]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", WRITERS)
def test_a_sound_dump_is_verified_slot_by_slot_and_passed_in_silence(
    kind: str, layout: str, makers: Callable[[str], Made], inspect: Inspect, tmp_path: Path
) -> None:
    made = makers(kind)
    dtype = torch.bfloat16 if layout.startswith("spec") else torch.float32
    WRITERS[layout](tmp_path / "data", made.texts(dtype=dtype))
    result = inspect(made)
    assert result["findings"] == []
    assert verdicts(result) == ["verified"] * 4
    assert [slot["found"] for slot in result["slots"]] == [[0], [2], [5], [LAYERS]]
    normed = layout not in ("pt_shards", "speculators")
    assert [s["behind_final_norm"] for s in result["slots"]] == [False, False, False, normed]
    assert [s["teacher"] for s in result["slots"]] == [False, False, False, True]
    assert result["first_layers"]["layers"] == LAYERS
    assert result["texts"]["samples"] == 6
    assert result["texts"]["masked"] == sum(len(ids) - 4 for ids in made.ids)


def test_what_was_not_run_is_only_as_declared(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    bare = inspect(llama, first_layers=0)
    assert verdicts(bare) == ["verified", "as declared", "as declared", "as declared"]
    assert "the layers below it were not run" in bare["slots"][1]["what"]
    assert any("no target_argmax" in note for note in bare["notes"])
    assert any("tensor-parallel" in note for note in bare["notes"])
    assert bare["findings"] == []
    assert "teacher_agreement" not in bare["metrics"]
    # Three layers settle state 2; the target's own choices do not settle the end.
    data = {"target_argmax": add_argmax(llama, tmp_path)}
    some = inspect(llama, first_layers=3, data=data)
    assert verdicts(some) == ["verified", "verified", "as declared", "as declared"]
    assert "none of states 0 to 3" in some["slots"][2]["what"]
    # Of so few positions even all leave the interval's lower end below the bound.
    assert "does not tell it from a state near the end" in some["slots"][3]["what"]
    assert any(f"job.first_layers={LAYERS} does" in note for note in some["notes"])
    assert not any("scored positions" in note for note in some["notes"])
    agreement = some["metrics"]["teacher_agreement"]
    assert agreement["value"] == 1
    assert agreement["truth"] == "target_argmax"
    assert agreement["denominator"] == sum(len(ids) - 4 for ids in llama.ids)
    assert some["findings"] == []


def test_every_slot_of_another_state_is_named_with_what_to_write(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(aux=(0, 5, 2)))
    swapped = inspect(llama)
    assert verdicts(swapped) == ["verified", "contradicted", "contradicted", "verified"]
    assert names(swapped) == ["wrong-state", "wrong-state"]
    assert swapped["findings"][0]["fix"] == [f"data.states=[0,5,2,{LAYERS}]"]
    (tmp_path / "data" / "capture.json").write_text(json.dumps({"states": [*AUX, LAYERS]}))
    assert inspect(llama)["findings"][0]["fix"][0].startswith(f'"states": [0,5,2,{LAYERS}] in ')


def test_a_slot_off_by_one_is_found_by_a_few_layers(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(aux=(0, 3, 5)))
    result = inspect(llama, first_layers=4)
    assert result["slots"][1]["verdict"] == "contradicted"
    assert result["slots"][1]["found"] == [3]
    assert "it is state 3" in finding(result, "wrong-state")["what"]
    # With two layers it is known to be none of their states, and so not the one it is declared.
    less = inspect(llama, first_layers=2)
    assert (less["slots"][1]["verdict"], less["slots"][1]["found"]) == ("contradicted", None)
    assert finding(less, "wrong-state")["fix"] == ["capture the data again"]


def test_a_missing_embedding_is_named(llama: Made, inspect: Inspect, tmp_path: Path) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(aux=(1, 2, 5)))
    result = inspect(llama, first_layers=0)
    what = finding(result, "embedding-missing")["what"]
    assert "declared state 0 (data.states), but only 0.0% of its rows" in what
    assert verdicts(result)[0] == "contradicted"


@pytest.mark.parametrize("layers", [0, None])
def test_a_target_that_multiplies_its_embedding_is_taken_at_its_configs_word(
    layers: int | None, makers: Callable[[str], Made], inspect: Inspect, tmp_path: Path
) -> None:
    made = makers("granite")
    write_pt_shards(tmp_path / "data", made.texts(dtype=torch.bfloat16))
    result = inspect(made, first_layers=layers)
    assert result["findings"] == []
    assert (result["slots"][0]["verdict"], result["slots"][0]["found"]) == ("verified", [0])
    match = result["slots"][0]["embedding"]["by_shift"]["+0"]
    assert match["exact"] == match["rows"] == result["texts"]["positions"]


@pytest.mark.parametrize(("kind", "factor"), [("llama", 0.5), ("llama", 12.0), ("granite", 1 / 12)])
def test_a_constant_factor_of_the_embedding_is_judged_by_running_the_target_alone(
    kind: str, factor: float, makers: Callable[[str], Made], inspect: Inspect, tmp_path: Path
) -> None:
    made = makers(kind)
    texts = [replace(t, aux=(t.aux[0] * factor, *t.aux[1:])) for t in made.texts()]
    write_pt_shards(tmp_path / "data", texts)
    unknown = inspect(made, first_layers=0)
    assert unknown["findings"] == []
    assert verdicts(unknown)[0] == "as declared"
    assert "a constant factor of the embedding" in unknown["slots"][0]["what"]
    known = inspect(made, first_layers=1)
    assert (
        "which is not the state 0 that the target makes"
        in finding(known, "embedding-missing")["what"]
    )
    assert verdicts(known)[0] == "contradicted"


def test_a_table_that_gemma_would_multiply_is_not_its_embedding_output(
    makers: Callable[[str], Made], inspect: Inspect, tmp_path: Path
) -> None:
    made = makers("gemma")
    texts = [replace(t, aux=(t.aux[0] / WIDTH**0.5, *t.aux[1:])) for t in made.texts()]
    write_pt_shards(tmp_path / "data", texts)
    assert names(inspect(made, first_layers=1)) == ["embedding-missing"]


def test_a_target_whose_final_norm_is_not_measured_is_verified_by_its_layers(
    makers: Callable[[str], Made], inspect: Inspect, tmp_path: Path
) -> None:
    made = makers("cohere")
    write_pt_shards(tmp_path / "data", made.texts())
    data = {"target_argmax": add_argmax(made, tmp_path)}
    result = inspect(made, data=data)
    assert result["findings"] == []
    assert verdicts(result) == ["verified"] * 4
    assert "before the final norm" in result["slots"][3]["what"]
    bare = inspect(made, first_layers=0, data=data)
    assert verdicts(bare) == ["verified", "as declared", "as declared", "as declared"]
    assert "nothing compares its choices" in bare["slots"][3]["what"]
    assert not any("has no target_argmax" in note for note in bare["notes"])


def test_texts_of_one_token_are_inspected(llama: Made, inspect: Inspect, tmp_path: Path) -> None:
    texts = [
        replace(
            t,
            ids=t.ids[:1],
            mask=t.mask[:1],
            aux=tuple(h[:1] for h in t.aux),
            end=t.end[:1],
            normed=t.normed[:1],
        )
        for t in llama.texts()
    ]
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama)
    assert [slot["found"] for slot in result["slots"]] == [[0], [2], [5], [LAYERS]]


def test_a_few_rows_of_a_long_text_go_through_the_head_and_the_notes_say_so(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    def long(h: Tensor) -> Tensor:
        return torch.cat([h] * 4)

    texts = [
        replace(
            t,
            ids=long(t.ids),
            mask=long(t.mask),
            aux=tuple(map(long, t.aux)),
            end=long(t.end),
            normed=long(t.normed),
        )
        for t in llama.texts()
    ]
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama, first_layers=0)
    scored = sum(4 * (len(ids) - 4) for ids in llama.ids)
    counted = sum(min(64, 4 * (len(ids) - 4)) for ids in llama.ids)
    assert counted < scored
    assert result["metrics"]["teacher_next_token"]["denominator"] == counted
    assert any(f"count {counted} of {scored} scored positions" in n for n in result["notes"])


@pytest.mark.parametrize("by", [-1, 1])
def test_ids_beside_other_positions_states_are_told_from_wrong_states(
    by: int, llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    texts = [replace(t, ids=t.ids.roll(by)) for t in llama.texts()]
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama)
    assert set(names(result)) - {"mask-covers-bos"} == {"states-shifted"}
    assert "contradicted" not in verdicts(result)
    assert "shifted against the ids" in result["slots"][2]["what"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda h, w: h / h.pow(2).mean(-1, keepdim=True).sqrt(),
            "are the embedding's behind a norm",
        ),
        (
            lambda h, w: h / h.pow(2).mean(-1, keepdim=True).sqrt() * w,
            "are the embedding's behind the first layer's input norm",
        ),
    ],
)
def test_what_became_of_the_embedding_is_told(
    spoil: Callable[[Tensor, Tensor], Tensor],
    words: str,
    llama: Made,
    inspect: Inspect,
    tmp_path: Path,
) -> None:
    weight = load_file(llama.folder / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    texts = [
        replace(text, aux=(spoil(text.aux[0], weight), *text.aux[1:])) for text in llama.texts()
    ]
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama, first_layers=0)
    assert words in finding(result, "embedding-missing")["what"]


@pytest.mark.parametrize("layers", [0, None])
def test_an_intermediate_teacher_is_named_by_argmax_alone_and_by_running_the_target(
    layers: int | None, llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(end=6))
    data = {"states": [*AUX, 6], "target_argmax": add_argmax(llama, tmp_path)}
    result = inspect(llama, first_layers=layers, data=data)
    found = finding(result, "wrong-teacher")
    assert "hidden_states[3]" in found["what"]
    assert found["evidence"] == "measured"
    assert f"is state 6 and not the target's end (state {LAYERS})" in found["what"]
    assert len(found["what"].split()) <= 45
    assert found["what"].count("the head makes") == 1
    assert result["metrics"]["teacher_agreement"]["high"] < 0.97
    assert names(result) == ["wrong-teacher"]
    assert result["slots"][3]["verdict"] == ("as declared" if layers == 0 else "verified")


def test_a_teacher_declared_the_end_that_is_not_is_contradicted_by_its_choices(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_speculators(tmp_path / "data", llama.texts(end=6))
    # speculators' rule takes the last entry for the end; without argmax only a run can tell.
    silent = inspect(llama, first_layers=0, data={"states": None})
    assert silent["findings"] == []
    assert any("does not tell the target's end" in note for note in silent["notes"])
    told = inspect(llama, data={"states": None})
    assert {"wrong-teacher", "wrong-state"} == set(names(told))
    assert told["slots"][3]["found"] == [6]
    assert [s["verdict"] for s in told["slots"][:3]] == [
        "verified"
    ] * 3  # found, though not declared
    assert [s["found"] for s in told["slots"][:3]] == [[0], [2], [5]]


def test_another_slot_that_agrees_better_with_the_text_convicts_the_teacher(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    made = written_by_itself(llama)
    write_pt_shards(tmp_path / "data", made.texts(aux=(0, LAYERS, 5), end=2))
    result = inspect(made, first_layers=0, data={"states": None})
    assert "hidden_states[1] does better by" in finding(result, "wrong-teacher")["what"]
    # Declared, the same slots are out of order as well.
    declared = inspect(made, first_layers=0, data={"states": [0, 2, 5, 3]})
    assert (
        "hidden_states[1], declared state 2, leads"
        in finding(declared, "slots-out-of-order")["what"]
    )


def test_a_declared_teacher_that_nothing_measures_is_said_to_be_inferred(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(end=6))
    result = inspect(llama, first_layers=0, data={"states": [*AUX, 6]})
    assert finding(result, "wrong-teacher")["evidence"] == "inferred from data.states"
    assert names(result) == ["wrong-teacher"]


def test_a_target_without_head_is_said_to_leave_agreement_unmeasured(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    tensors = load_file(llama.folder / "model.safetensors")
    del tensors["lm_head.weight"]
    folder = tmp_path / "headless"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((llama.folder / "config.json").read_bytes())
    result = inspect(replace(llama, folder=folder))
    assert any("what the head makes of a slot was not measured" in note for note in result["notes"])
    assert result["metrics"] == {}
    # transformers would make a head up; its layers are not run without one.
    assert "missing keys: lm_head.weight" in result["first_layers"]["why"]
    assert verdicts(result) == ["verified", "as declared", "as declared", "as declared"]


def written_by_itself(made: Made) -> Made:
    """The same states, and texts that are their greedy choices, so that no loop hides a shift."""
    ids = [torch.cat([i[:1], a[:-1]]) for i, a in zip(made.ids, made.argmax, strict=True)]
    return replace(made, ids=ids)


def test_a_slot_behind_the_norm_that_is_declared_before_it_is_named(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    texts = [replace(text, end=text.normed) for text in llama.texts()]
    write_pt_shards(tmp_path / "data", texts)
    for layers in (0, None):
        result = inspect(llama, first_layers=layers)
        assert names(result) == ["slot-norm"]
        assert verdicts(result)[3] == "contradicted"
        assert "declared before the target's final norm" in result["findings"][0]["what"]
    assert result["slots"][3]["found"] == [LAYERS]  # the last state, though on the other side
    other = [replace(text, normed=text.end) for text in llama.texts()]
    write_specforge(tmp_path / "other", other)
    result = inspect(llama, first_layers=0, data={"path": str(tmp_path / "other")})
    assert names(result) == ["slot-norm"]


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(("aux", "layers"), [(AUX, 0), ((2, 3, 5), None)])
def test_states_beside_another_positions_ids_are_named(
    shift: int,
    aux: tuple[int, ...],
    layers: int | None,
    llama: Made,
    inspect: Inspect,
    tmp_path: Path,
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts(aux=aux, shift=shift))
    data = {"states": [*aux, LAYERS], "target_argmax": add_argmax(llama, tmp_path)}
    result = inspect(llama, first_layers=layers, data=data)
    assert names(result) == ["states-shifted"]
    assert f"belongs to position t{shift:+d}" in result["findings"][0]["what"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_shows_in_the_choices_where_no_state_can_be_compared(
    shift: int, llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    made = written_by_itself(llama)
    write_pt_shards(tmp_path / "data", made.texts(aux=(2, 3, 5), shift=shift))
    result = inspect(made, first_layers=0, data={"states": [2, 3, 5, LAYERS]})
    what = finding(result, "states-shifted")["what"]
    assert f"is token t{1 + shift:+d} at 100.0%" in what
    write_pt_shards(tmp_path / "straight", made.texts(aux=(2, 3, 5)))
    data = {"path": str(tmp_path / "straight"), "states": [2, 3, 5, LAYERS]}
    assert "states-shifted" not in names(inspect(made, first_layers=0, data=data))


def test_zero_tails_are_named_and_graver_where_they_are_scored(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    def padded(text: Text, masked: int) -> Text:
        def pad(h: Tensor) -> Tensor:
            return torch.cat([h, torch.zeros(5, h.shape[1])])

        return replace(
            text,
            ids=torch.cat([text.ids, torch.zeros(5, dtype=torch.int64)]),
            mask=torch.cat([text.mask, torch.tensor([masked] * 5)]),
            aux=tuple(map(pad, text.aux)),
            end=pad(text.end),
        )

    texts = llama.texts()
    for masked, severity in ((0, "warning"), (1, "error")):
        write_pt_shards(tmp_path / "data", [padded(texts[0], masked), *texts[1:]])
        result = inspect(llama)
        found = finding(result, "zero-tail")
        assert (found["severity"], result["texts"]["zero_positions"]) == (severity, 5)
        assert "1 of 6 samples" in found["what"]
        assert verdicts(result) == ["verified"] * 4
        assert ("mask-covers-pad" in names(result)) == bool(masked)


def test_numbers_that_no_state_holds_are_named(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    texts = llama.texts(dtype=torch.float16)
    texts[1].end[7, 3] = torch.inf
    texts[2].aux[1][9] = 0
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama)
    what = finding(result, "fp16-overflow")["what"]
    assert "hidden_states[3]: 1 of" in what
    assert "data_1.pt, position 7" in what
    assert "hidden_states[1]: 1 of" in finding(result, "zero-rows")["what"]
    assert result["slots"][3]["scale"]["non_finite_rows"] == 1
    clamped = llama.texts(dtype=torch.float16)
    clamped[0].end[3, 3] = 65504
    write_pt_shards(tmp_path / "data", clamped)
    assert "reaches 65504" in finding(inspect(llama), "fp16-overflow")["what"]


def test_slots_that_repeat_or_never_change_are_named(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    texts = [
        replace(t, aux=(torch.ones_like(t.aux[0]), t.aux[1], t.aux[1].clone()))
        for t in llama.texts()
    ]
    write_pt_shards(tmp_path / "data", texts)
    result = inspect(llama, first_layers=0)
    assert "hidden_states[0]: all" in finding(result, "constant-slot")["what"]
    assert "declared state 2 and declared state 5" in finding(result, "identical-slots")["what"]


def test_layers_that_add_nothing_make_a_set_of_states(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    tensors = load_file(llama.folder / "model.safetensors")
    for layer in (2, 3, 5):  # states 2, 3 and 4 are one, and so are 5 and 6
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"].zero_()
    folder = tmp_path / "idle"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((llama.folder / "config.json").read_bytes())
    model = LlamaForCausalLM.from_pretrained(folder)
    states = []
    with torch.no_grad():
        for ids in llama.ids:
            with captured_states(model.model.layers, range(LAYERS + 1)) as kept:
                model(ids[None], use_cache=False)
            states.append(torch.cat([kept[k] for k in range(LAYERS + 1)]))
    made = replace(llama, folder=folder, states=states)
    write_pt_shards(tmp_path / "data", made.texts(aux=(0, 2, 4)))
    result = inspect(made, data={"states": [0, 3, 4, LAYERS]})
    assert [slot["found"] for slot in result["slots"]] == [[0], [2, 3, 4], [2, 3, 4], [LAYERS]]
    assert verdicts(result) == ["verified"] * 4
    assert "states 2..4, all equal here" in result["slots"][1]["what"]
    assert result["findings"] == []  # two equal slots are as they must be
    # Where the run ends among equal states, a later one may equal them too.
    open_end = inspect(made, first_layers=3, data={"states": [0, 3, 4, LAYERS]})
    assert verdicts(open_end)[1:3] == ["verified", "as declared"]
    wrong = inspect(made, data={"states": [0, 1, 4, LAYERS]})
    assert verdicts(wrong)[:3] == ["verified", "contradicted", "verified"]


def test_texts_and_masks_that_are_not_right_are_named(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    texts = llama.texts()
    texts[0].ids[1] = 1  # bos again
    texts[1] = replace(texts[1], mask=torch.ones_like(texts[1].mask))
    texts[2] = replace(texts[2], mask=torch.zeros_like(texts[2].mask))
    texts[3].ids[9] = VOCAB
    texts[5] = texts[4]
    write_pt_shards(tmp_path / "data", [replace(t, ids=t.ids.clone()) for t in texts])
    texts[0].ids[1], texts[3].ids[9] = 5, 5  # these are the fixture's
    result = inspect(llama, first_layers=0)
    for name, words in (
        ("doubled-bos", "1 of 6 samples begin with the bos token twice"),
        ("mask-covers-everything", "1 of 6 samples"),
        ("mask-empty", "1 of 6 samples"),
        ("ids-outside-vocabulary", f"1 of {result['texts']['positions']} ids"),
        ("repeated-samples", "1 of 6 samples"),
        ("mask-covers-bos", "at 1 positions"),
    ):
        assert words in finding(result, name)["what"]
    assert result["texts"]["special_tokens"] == {"bos": 7, "eos": 0, "pad": 0}


def test_a_shifted_argmax_is_named(llama: Made, inspect: Inspect, tmp_path: Path) -> None:
    made = written_by_itself(llama)
    write_pt_shards(tmp_path / "data", made.texts(aux=(2, 3, 5)))
    late = [argmax.roll(1) for argmax in llama.argmax]
    data = {"states": [2, 3, 5, LAYERS], "target_argmax": add_argmax(made, tmp_path, late)}
    result = inspect(made, first_layers=0, data=data)
    assert "shifted by -1" in finding(result, "argmax-shifted")["what"]


def test_the_first_prompts_hash_can_be_made_by_hand(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    template = inspect(llama, first_layers=0)["template"]
    joined = ",".join(str(int(i)) for i in llama.ids[0][:4])
    assert template["prompt_ids_sha256"] == hashlib.sha256(joined.encode()).hexdigest()
    assert template["prompt_tokens"] == 4
    assert template["prompt_text_sha256"] is None


def test_damaged_files_end_the_job_or_are_left_out_and_counted(
    llama: Made, inspect: Inspect, tmp_path: Path
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    files = sorted((tmp_path / "data").rglob("*.pt"))
    for path in files[1:3]:
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(
        BadInput, match=r"data_1\.pt .*2 of 6 files cannot be used; data\.damaged=skip"
    ):
        inspect(llama, first_layers=0)
    result = inspect(llama, first_layers=0, data={"damaged": "skip"})
    assert result["texts"]["samples"] == 4
    assert "2 files cannot be read" in finding(result, "damaged-files")["what"]
    assert inspect(llama, first_layers=0, max_samples=1)["findings"] == []


def test_layers_that_cannot_be_run_are_an_error_only_where_they_are_asked_for(
    llama: Made, inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    with pytest.raises(BadInput, match="first_layers=8, but the target has 7 layers"):
        inspect(llama, first_layers=8)
    # As if the machine had room for the embedding, the head and two layers.
    size = (llama.folder / "model.safetensors").stat().st_size
    layer = sum(
        tensor.nbytes
        for name, tensor in load_file(llama.folder / "model.safetensors").items()
        if ".layers.0." in name
    )
    free = 2 * (size - 5 * layer)
    monkeypatch.setattr("jobs.first_layers.free_memory", lambda device: free)
    with pytest.raises(BadInput, match=f"half of {mib(free)} of free memory .* holds 2 layers"):
        inspect(llama, first_layers=3)
    fits = inspect(llama)
    assert fits["first_layers"]["layers"] == 2
    # State 2 lies at the end of what was run: nothing behind it is known, but it is unlike state 1.
    assert verdicts(fits) == ["verified", "verified", "as declared", "as declared"]
    config = json.loads((llama.folder / "config.json").read_text())
    other = tmp_path / "quantised"
    other.mkdir()
    (other / "model.safetensors").symlink_to(llama.folder / "model.safetensors")
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    with pytest.raises(BadInput, match="first_layers=2, but the target's weights are quantised"):
        inspect(replace(llama, folder=other), first_layers=2)
    result = inspect(replace(llama, folder=other))
    assert result["first_layers"]["layers"] == 0
    assert "quantised" in result["first_layers"]["why"]


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3 with its vision tower"])
def test_the_first_layers_of_a_sharded_target_are_those_of_the_whole(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model = BIG_KINDS[kind]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "t", max_shard_size="20KB")
    target = load_target_parts(tmp_path / "t")
    assert len(list(target.folder.glob("*.safetensors"))) > 5
    ids = torch.randint(8, VOCAB, (20,))
    layers = decoder_layers(model)
    with torch.no_grad(), captured_states(layers, range(4)) as kept:
        model.get_decoder()(input_ids=ids[None], use_cache=False)
    plan = plan_layers(target, 3, [0])
    whole = plan_layers(target, None, [0])
    stored = sum(path.stat().st_size for path in target.folder.glob("*.safetensors"))
    assert 0 < plan.needed < whole.needed <= stored
    assert (plan.layers, whole.layers) == (3, 5)
    (made,) = run_layers(load_first_layers(target.folder, 3, "cpu"), [ids], "cpu")
    assert torch.equal(made, torch.cat([kept[k] for k in range(4)]))


def test_texts_that_run_side_by_side_are_as_alone(llama: Made) -> None:
    model = load_first_layers(llama.folder, LAYERS, "cpu")
    together = run_layers(model, llama.ids, "cpu")
    for ids, states in zip(llama.ids, together, strict=True):
        (alone,) = run_layers(model, [ids], "cpu")
        assert states.shape == alone.shape
        torch.testing.assert_close(states, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cores", [1, 3])
def test_some_states_of_groups_on_several_cores_are_those_of_all(
    cores: int, llama: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_layers, "TOGETHER", 1)  # every text is a group
    model = load_first_layers(llama.folder, LAYERS, "cpu")
    texts = [ids[:n] for n, ids in enumerate(llama.ids * 4, start=3)]
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        some = run_layers(model, texts, "cpu", [2, LAYERS, 0])
        torch.set_num_threads(1)
        whole = run_layers(model, texts, "cpu")
    finally:
        torch.set_num_threads(threads)
    for states, every in zip(some, whole, strict=True):
        assert torch.equal(states, every[[2, LAYERS, 0]])


def test_as_many_short_texts_run_together_as_fit_with_their_padding() -> None:
    assert side_by_side([]) == []
    assert side_by_side([600, 300, 400, 2000, 320]) == [[1, 4], [2], [0], [3]]
    assert side_by_side([512, 512, 1]) == [[2, 0], [1]]


def test_data_of_another_target_is_named(llama: Made, inspect: Inspect, tmp_path: Path) -> None:
    write_pt_shards(tmp_path / "data", llama.texts())
    capture = {"states": [*AUX, LAYERS], "target": "sha256:0123"}
    (tmp_path / "data" / "capture.json").write_text(json.dumps(capture))
    assert names(inspect(llama)) == ["another-target"]

"""The edits that plant faults, and the releases that do not fit sound files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle3.doctor.subject import EngineAsked
from tests.faults.drafters import draft_ids
from tests.faults.planting import (
    Edit,
    Stored,
    captured_states_are,
    dump,
    edit_json,
    edit_tensors,
    in_turn,
    top,
    weights,
)
from tests.faults.sound import (
    BOS,
    DRAFT_VOCAB,
    DUMPS,
    LAYERS,
    PROMPT,
    STATES,
    TEMPLATE,
    TEXTS,
    VOCAB,
    WIDTH,
    Target,
)


def sglang(version: str, engine_class: str = "llama", **flags: Any) -> EngineAsked:
    """A release of SGLang."""
    return EngineAsked(name="sglang", version=version, engine_class=engine_class, flags=flags)


def vllm(version: str) -> EngineAsked:
    """A release of vLLM."""
    return EngineAsked(name="vllm", version=version, engine_class="llama")


def ids(flat: list[int] | str, nested: list[int] | str) -> dict[str, Edit]:
    """Layer ids, each layout's in its own place."""
    return {
        "specforge": top(eagle_config={"eagle_aux_hidden_state_layer_ids": flat}),
        "speculators": top(eagle_aux_hidden_state_layer_ids=nested),
    }


def nested_ids(*more: Edit) -> Edit:
    """Ids back to where SGLang looks, in a variant that was written for vLLM; then more."""
    place = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in STATES]}
    return in_turn(top(eagle_config=place, eagle_aux_hidden_state_layer_ids=None), *more)


NOT_IN_SGLANG = ("config-nested", "ids-not-looked-up")  # of any nested config
FOR_SGLANG = {"specforge": (), "speculators": NOT_IN_SGLANG}
ALL_DUMPS = tuple(DUMPS)


def window_shifted(stored: Stored) -> None:
    """[embedding, 3, 4, 6] where [3, 4, 6, end] should be."""
    for place, k in enumerate((0, *STATES)):
        last = stored.layout == "specforge" and place == len(STATES)
        stored.put(place, stored.target.norm(stored.states[k]) if last else stored.states[k])


def swapped(stored: Stored) -> None:
    stored.slots[0], stored.slots[2] = stored.slots[2], stored.slots[0]


def one_aux(folder: Any, target: Target) -> None:
    """A dump of one aux state and the end."""
    dump(lambda stored: stored.slots.__delitem__(slice(0, 2)))(folder, target)
    captured_states_are(STATES[-1], LAYERS)(folder, target)


def fc_of_one(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :WIDTH]


def other_side(stored: Stored) -> None:
    """The end on the side of the final norm on which the layout does not keep it."""
    end = stored.states[LAYERS]
    stored.put(3, end if stored.layout == "specforge" else stored.target.norm(end))


def earlier_end(k: int) -> Edit:
    """State k in the place of the target's end."""

    def change(stored: Stored) -> None:
        h = stored.states[k]
        stored.put(3, stored.target.norm(h) if stored.layout == "specforge" else h)

    return dump(change)


def without_residual(stored: Stored) -> None:
    """What layer 3 adds to the stream in the place of the stream behind it."""
    stored.put(1, stored.states[STATES[1]] - stored.states[STATES[1] - 1])


def half(stored: Stored) -> None:
    """One of two ranks' part of a state; the other's is lacking."""
    stored.slots[1][:, WIDTH // 2 :] = 0


def quantised(folder: Any, target: Target) -> None:
    edit_json(
        folder / "config.json",
        lambda values: values.update(quantization_config={"quant_method": "fp8"}),
    )


def of_any_target(folder: Any, target: Target) -> None:
    """A dump that does not say of which target it is."""
    edit_json(folder / "capture.json", lambda values: values.pop("target"))


def exchange(a: str, b: str) -> Edit:
    """Two tensors of the decoder layer are exchanged."""

    def change(tensors: dict[str, Tensor]) -> None:
        one, other = (next(n for n in tensors if n.endswith(end)) for end in (a, b))
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return weights(change)


def halves_exchanged(tensors: dict[str, Tensor]) -> None:
    """Hidden state in front of the embedding in the attention's input."""
    for name in [
        n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        tensors[name] = tensors[name].roll(WIDTH, 1)


def head_permuted(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


def in_pairs(tensors: dict[str, Tensor]) -> None:
    """The rows of q and k as an interleaved rotation wants them."""
    order = torch.arange(8).view(2, 4).T.flatten()
    for name in [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight"))]:
        rows = tensors[name].view(-1, 8, 2 * WIDTH)[:, order]
        tensors[name] = rows.reshape(tensors[name].shape)


def rounded(stored: Stored) -> None:
    """States that err by one part in a hundred, as another build's do."""
    generator = torch.Generator().manual_seed(stored.number)
    for place, h in enumerate(stored.slots):
        noisy = torch.randn(h.shape, generator=generator) * 0.01 * h.float().pow(2).mean().sqrt()
        stored.put(place, h.float() + noisy)


def mask_early(stored: Stored) -> None:
    stored.mask[PROMPT - 1] = 1


def as_modelopt(values: dict[str, Any]) -> None:
    values["eagle_config"] |= {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }


def to_other_block(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith(("midlayer.", "layers."))]:
        tensors["draft." + name] = tensors.pop(name)


def to_layers(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def absolute(d2t: Tensor) -> Tensor:
    return d2t + torch.arange(len(d2t))


def by_frequency(tensors: dict[str, Tensor]) -> None:
    """The map and the head in another order than the mask's ascending one."""
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(4))
    tensors["d2t"] = draft_ids()[order] - torch.arange(DRAFT_VOCAB)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def plain_head(folder: Any, target: Target) -> None:
    """The target's first rows for a head."""
    rows = target.head[:DRAFT_VOCAB].bfloat16()
    weights(lambda tensors: tensors.update({"lm_head.weight": rows}))(folder, target)


def ascending_head(folder: Any, target: Target) -> None:
    """The target's rows in ascending order, for a map in another."""

    def change(tensors: dict[str, Tensor]) -> None:
        by_frequency(tensors)
        tensors["lm_head.weight"] = target.head[draft_ids()].bfloat16()
        del tensors["t2d"]

    weights(change)(folder, target)


def table_of(make: Callable[[Tensor], Tensor]) -> Edit:
    """An embedding in the file, made of the target's."""

    def edit(folder: Any, target: Target) -> None:
        table = make(target.embedding).bfloat16()
        weights(lambda tensors: tensors.update({"embed_tokens.weight": table}))(folder, target)

    return edit


def noise(table: Tensor) -> Tensor:
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(6))


def trained(table: Tensor) -> Tensor:
    return table + 0.1 * table.std() * noise(table)


def with_nan(table: Tensor) -> Tensor:
    return table.index_fill(0, torch.tensor([0, VOCAB - 1]), torch.nan)


def other_template(folder: Any, target: Target) -> None:
    (folder / TEMPLATE).write_text("{{ messages }} {{ thinking }}")


def template_in_config(folder: Any, target: Target) -> None:
    (folder / TEMPLATE).unlink()
    held = {"chat_template": "{{ messages }} {{ thinking }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(held))


def rolled(*places: int) -> Edit:
    """Row t holds the state of position t + 1."""

    def change(stored: Stored) -> None:
        for place in places:
            stored.slots[place] = stored.slots[place].roll(-1, 0)

    return dump(change)


def masked(*, first: bool) -> Edit:
    def change(stored: Stored) -> None:
        stored.mask[0 if first else slice(None)] = 1

    return dump(change)


def doubled_bos(stored: Stored) -> None:
    if stored.number == TEXTS - 1:
        stored.ids[1] = BOS


def other_token(stored: Stored) -> None:
    """One more token than there are rows."""
    stored.ids = torch.cat([torch.tensor([BOS]), stored.ids])


def other_ids(folder: Any, target: Target) -> None:
    """Another token in one file; the dataset keeps the text."""
    edit_tensors(
        folder / "hidden_states" / "hs_0.safetensors",
        lambda tensors: tensors["token_ids"].__setitem__(5, 7),
    )


def padded(scored: int) -> Edit:
    """Four rows of padding behind the text, scored or not."""

    def change(stored: Stored) -> None:
        stored.ids = torch.cat([stored.ids, torch.zeros(4, dtype=torch.int64)])
        stored.mask = torch.cat([stored.mask, torch.tensor([scored] * 4)])
        stored.slots = [torch.cat([h, h.new_zeros(4, WIDTH)]) for h in stored.slots]

    return dump(change)


def overflowed(stored: Stored) -> None:
    """A large component, then float16."""
    stored.slots[2][5, 3] = 1e5
    stored.slots = [h.half() for h in stored.slots]


def overflowing_fc(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"][0, 0] = 1e5
    tensors["fc.weight"] = tensors["fc.weight"].half()


def not_a_number(stored: Stored) -> None:
    if stored.number == 1:
        stored.slots[2][5, 3] = torch.nan


def turns(base: float) -> Edit:
    """The rotary frequencies that old trainers keep in the file, of another base than the config's."""
    table = base ** -(torch.arange(0, 8, 2) / 8)

    def change(tensors: dict[str, Tensor]) -> None:
        first = next(n for n in tensors if n.endswith("q_proj.weight"))
        tensors[first.replace("q_proj.weight", "rotary_emb.inv_freq")] = table

    return weights(change)


MODELOPT_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
KIMI_YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

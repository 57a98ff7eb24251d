"""The 43 ways in which a drafter is wired wrongly: how each is planted, and what names it.

A row is data. `planted` lists edits of sound files (or an engine or a trainer that does not fit them)
with the finding that must be reported; `cannot` says why files do not show the fault, or not always,
and `instead` what would. The tests plant every row, and docs/faults.md is rendered from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor

from eagle3.doctor.subject import EngineAsked
from tests.faults.planting import (
    Edit,
    Stored,
    captured_states_are,
    config,
    drop,
    dump,
    edit_json,
    in_turn,
    layer,
    nothing,
    of_d2t,
    of_norm,
    of_t2d,
    top,
    weights,
)
from tests.faults.sound import (
    BOS,
    DRAFT_VOCAB,
    DUMPS,
    LAYERS,
    LAYOUTS,
    LONG,
    SGLANG,
    STATES,
    TEMPLATE,
    TEXTS,
    VOCAB,
    WIDTH,
    Target,
    draft_ids,
)

T = TypeVar("T")


class By(str, Enum):
    """What names a fault."""

    doctor = "doctor"
    inspect_data = "inspect_data"
    drafter_test = "drafter_test"  # its readers of checkpoints and samples refuse the files
    layers = "layers"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One way to plant a fault, and what must then be said."""

    how: str
    by: By = By.doctor
    name: str = ""  # the finding's; empty where an error is the answer
    reads: str  # words of it
    also: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()  # findings that come with it
    layouts: tuple[str, ...] = LAYOUTS  # of drafters, or of dumps where the fault is in one
    only: str = ""  # why not in the other layouts
    edit: Edit | Mapping[str, Edit] = nothing  # of the drafter, or of the dump that is inspected
    data: Edit | None = nothing  # of the dump that doctor is given with the drafter; None: no dump
    target: Edit | None = None  # of a copy of the target
    variant: str = "plain"  # of the sound drafter
    engine: EngineAsked | Mapping[str, EngineAsked] | None = None  # None: one that fits
    trainer: str | None = None
    refused: str | None = None  # words in which drafter_test's readers refuse the files as well
    first_layers: int | None = None  # of the target that inspect_data runs; None: all


@dataclass(frozen=True, kw_only=True)
class Row:
    """One of the 43 faults."""

    number: int
    fault: str
    serving: str  # what one sees in service
    planted: tuple[Planted, ...] = ()
    cannot: str = ""  # why files do not show it, or not always
    instead: str = ""  # what would


def of_layout(value: T | Mapping[str, T], layout: str) -> T:
    """A value that may be one for each layout."""
    return value[layout] if isinstance(value, Mapping) else value


def sglang(version: str, engine_class: str = "llama", **flags: Any) -> EngineAsked:
    """A release of SGLang."""
    return EngineAsked(name="sglang", version=version, engine_class=engine_class, flags=flags)


def vllm(version: str) -> EngineAsked:
    """A release of vLLM."""
    return EngineAsked(name="vllm", version=version, engine_class="llama")


def ids(flat: list[int], nested: list[int]) -> dict[str, Edit]:
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
LIST_DUMPS = ("pt_shards", "speculators")  # the last state is one of the list
ELSEWHERE = "SpecForge's layout keeps the end apart, as the model's own output"


# -- edits ---------------------------------------------------------------------------------------


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


# -- the rows ------------------------------------------------------------------------------------

ROWS: tuple[Row, ...] = (
    Row(
        number=1,
        fault="Layer ids in another convention: every state is that of the layer beside it",
        serving="It starts and the text is right. From 0.1 of accept length up to nearly all of it is "
        "lost, the first drafted token as much as the others.",
        planted=(
            Planted(
                how="config.json: the ids are written as the other engine means them; the dump's "
                "capture.json says what was trained on",
                edit=ids([3, 4, 6], [2, 3, 5]),
                name="ids-mean-other-states",
                reads="but the drafter was trained on states 3, 4 and 6",
                also={"specforge": (), "speculators": ("ids-not-those-of-the-data",)},
            ),
        ),
        cannot="No field of a drafter says which convention its ids are in. Without data=, states= or "
        "trainer= only lists that are somebody's default raise a suspicion "
        "(ids-of-another-convention).",
        instead="`python -m orchestrator layers` tells each reading; job=drafter_test tries them",
    ),
    Row(
        number=2,
        fault="The embedding output is in the window or missing from it: [0,3,4] for [3,4,6]",
        serving="The width is right and nothing fails. The first drafted token is hit hardest: every "
        "block of fc gets a state of another kind.",
        planted=(
            Planted(
                how="dump: the slots hold [embedding, 3, 4, 6], capture.json still says [3, 4, 6, end]",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(window_shifted),
                name="wrong-state",
                reads="declared state 3 (capture.json), but it is the embedding output",
                also=("wrong-teacher",),
            ),
            Planted(
                how="the dump says honestly that it holds [embedding, 3, 4] and the end; config.json "
                "still names 3, 4 and 6",
                data=captured_states_are(0, 3, 4, LAYERS),
                name="ids-mean-other-states",
                reads="feeds states 3, 4 and 6, but the drafter was trained on states 0, 3 and 4",
                also={"specforge": (), "speculators": ("ids-not-those-of-the-data",)},
            ),
        ),
    ),
    Row(
        number=3,
        fault="A new release reads the same ids otherwise",
        serving="Acceptance changes with an upgrade, and with nothing else.",
        planted=(
            Planted(
                how="the files are sound for SGLang 0.5.12; the engine is 0.5.13 and the target of "
                "DeepSeek's kind",
                layouts=("specforge",),
                only="SGLang does not load this layout; vLLM, which does, has not changed the meaning",
                engine=sglang("0.5.13", "kimi_k25"),
                name="ids-mean-other-states",
                reads="sglang 0.5.13, class kimi_k25 feeds states 2, 3 and 5",
            ),
            Planted(
                how="config.json: speculators_version of before 0.5, when its ids were outputs of "
                "layers, and a dump of those states",
                layouts=("speculators",),
                only="the layout does not say which release wrote it",
                edit=top(speculators_version="0.4.0"),
                data=captured_states_are(4, 5, 7, LAYERS),
                name="ids-mean-other-states",
                reads="but the drafter was trained on states 4, 5 and 7",
            ),
            Planted(
                how="the same list is asked about for both releases",
                by=By.layers,
                layouts=(),
                only="it takes a list, and no files",
                reads="[2,3,5] is [3,4,6] in 0.5.12 and [2,3,5] in 0.5.13",
            ),
        ),
    ),
    Row(
        number=4,
        fault="The engine does not find the ids, and takes its default layers",
        serving="Acceptance is that of the default layers; editing the ids changes nothing.",
        planted=(
            Planted(
                how="config.json: the ids are moved to the place in which the other ecosystem keeps "
                "them",
                edit={
                    "specforge": top(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
                    "speculators": top(
                        eagle_aux_hidden_state_layer_ids=None,
                        eagle_config={"eagle_aux_hidden_state_layer_ids": list(STATES)},
                    ),
                },
                name="ids-not-looked-up",
                reads="it takes its default states (states 2, 4 and 5)",
            ),
            Planted(
                how="config.json: the ids are taken out",
                edit={
                    "specforge": top(eagle_config=None),
                    "speculators": top(eagle_aux_hidden_state_layer_ids=None),
                },
                name="ids-mean-other-states",
                reads="no ids are found",
            ),
        ),
    ),
    Row(
        number=5,
        fault="The engine sorts the ids, or drops one that stands there twice",
        serving="In another order: acceptance about 0, since each block of fc gets another block's "
        "state. Twice: the server stops at a shape error.",
        planted=(
            Planted(
                how="config.json: the ids in descending order",
                edit=ids([5, 3, 2], [6, 4, 3]),
                name="ids-out-of-order",
                reads="do not ascend",
                also={"specforge": (), "speculators": ("ids-not-those-of-the-data",)},
            ),
            Planted(
                how="config.json: one id stands there twice",
                edit=ids([2, 2, 5], [3, 3, 6]),
                name="ids-not-served",
                reads="twice",
                also=("ids-mean-other-states",),
            ),
            Planted(
                how="dump: two aux slots are exchanged",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(swapped),
                name="wrong-state",
                reads="declared state 3 (capture.json), but it is state 6",
            ),
        ),
    ),
    Row(
        number=6,
        fault="The number of aux states is wrong, or fc is passed over where it is one",
        serving="The server stops at a shape error. With one state as wide as the drafter SGLang "
        "starts and leaves fc out: acceptance about 0.",
        planted=(
            Planted(
                how="config.json: two ids, where fc takes three states",
                edit=ids([2, 3], [3, 4]),
                name="file-and-config-disagree",
                reads="fc.weight is [32, 96], expected [32, 64]: 2 aux states",
                refused="fc.weight is [32, 96], expected [32, 64]: 2 aux states",
            ),
            Planted(
                how="one id, a dump of one aux state, and fc.weight cut to one block",
                layouts=("specforge",),
                only="vLLM, which serves this layout, always applies fc",
                edit=in_turn(ids([5], [6])["specforge"], weights(fc_of_one)),
                data=one_aux,
                name="fc-skipped",
                reads="applies it only where the two differ",
            ),
        ),
    ),
    Row(
        number=7,
        fault="A state on the other side of the target's final norm, or one layer before the end",
        serving="As aux state: the scale of a block is off, at every step. As teacher: see 15.",
        planted=(
            Planted(
                how="dump: the last slot is stored on the other side of the norm",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(other_side),
                name="slot-norm",
                reads="the final norm (divided by its weight",
            ),
            Planted(
                how="dump: an aux slot went through the final norm",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(lambda s: s.put(2, s.target.norm(s.states[6]))),
                name="slot-norm",
                reads="declared state 6, is declared before the target's final norm",
            ),
            Planted(
                how="dump: the last slot holds state 7 of 8",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=earlier_end(7),
                name="wrong-teacher",
                reads="is state 7 and not the target's end (state 8)",
                also=("wrong-state",),
            ),
        ),
    ),
    Row(
        number=8,
        fault="Aux states of one rank, from before an all-reduce, or without the residual",
        serving="Low acceptance at every step; the sizes of the blocks are others than in the dump.",
        planted=(
            Planted(
                how="dump: a slot holds what the layer adds to the stream, not the stream",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(without_residual),
                name="wrong-state",
                reads="it is not the state 4 that the target makes",
            ),
            Planted(
                how="dump: the columns of one rank of two are zero",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(half),
                name="wrong-state",
                reads="it is not the state 4 that the target makes",
            ),
        ),
        cannot="Where the target's layers do not fit in memory, no figure of a dump shows it; and what a "
        "running engine feeds stands in no file.",
        instead="the same prompts through one rank and through all of them, states compared",
    ),
    Row(
        number=9,
        fault="Aux states of a quantised or another build of the target",
        serving="A small loss, the same at every step.",
        planted=(
            Planted(
                how="the target's config.json: another quantisation than the dump was captured with",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                target=quantised,
                name="another-target",
                reads="was captured from another target",
            ),
        ),
        cannot="Without a capture.json nothing tells of which build a state is: it errs by as little as "
        "rounding does. The fingerprint covers the target's config and its embedding, not every weight.",
        instead="accept length behind the engine against job=drafter_test on states of the served build",
    ),
    Row(
        number=10,
        fault="hidden_norm and input_layernorm exchanged, or hidden state before embedding",
        serving="Acceptance about 0.",
        cannot="Both norms have the same shape and may hold any numbers near one, and the halves of q, k "
        "and v are equally wide: exchanged files are as consistent as sound ones.",
        instead="job=drafter_test: accuracy near 0 where the training log says otherwise",
    ),
    Row(
        number=11,
        fault="The residual is the fused state where training took its norm, or the reverse",
        serving="The first drafted token is worse, deeper ones much worse, since the sizes grow apart.",
        planted=(
            Planted(
                how="config.json: norm_before_residual is true, and the engine is SGLang",
                edit={"specforge": top(norm_before_residual=True), "speculators": nothing},
                engine=SGLANG,
                name="norm-before-residual-ignored",
                reads="trained with norm_before_residual, which sglang 0.5.23, class llama ignores",
                also=FOR_SGLANG,
            ),
            Planted(
                how="config.json: norm_before_residual is taken out",
                layouts=("speculators",),
                only="everybody takes false there",
                edit=top(norm_before_residual=None),
                name="norm-before-residual-not-stated",
                reads="takes true, speculators' config class false, its trainer's default is true",
            ),
        ),
    ),
    Row(
        number=12,
        fault="fc_norm or input_norm is missing, or is passed over by the engine",
        serving="Low acceptance at every step; 1.1 of accept length has been seen.",
        planted=(
            Planted(
                how="the fc_norm.* tensors are taken out of a drafter that was trained with them",
                variant="fc_norm",
                edit=drop("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
                name="file-and-config-disagree",
                reads="fc_norm is true (config.json: fc_norm), but the file has no such tensor",
                refused="fc_norm is true (config.json: fc_norm), but the file has no such tensor",
            ),
            Planted(
                how="one of the fc_norm.* tensors is taken out",
                variant="fc_norm",
                edit=drop("fc_norm.1.weight"),
                name="tensors-missing",
                reads="the file lacks fc_norm.1.weight",
                refused="missing fc_norm.1.weight",
            ),
            Planted(
                how="config.json: norm_before_fc is taken out, input_norm.weight stays in the file",
                variant="norm_before_fc",
                edit=top(norm_before_fc=None),
                name="file-and-config-disagree",
                reads="the file holds input_norm.weight, but norm_before_fc is false",
                refused="the file holds input_norm.weight, but norm_before_fc is false",
            ),
            Planted(
                how="a release of the engine from before fc_norm",
                variant="fc_norm",
                engine={"specforge": sglang("0.5.9"), "speculators": vllm("0.18.0")},
                name="fc-norm-ignored",
                reads="the drafter was trained with fc_norm, which",
            ),
            Planted(
                how="a release of the engine from before norm_before_fc",
                variant="norm_before_fc",
                engine={"specforge": sglang("0.5.15"), "speculators": vllm("0.17.0")},
                name="norm-before-fc-ignored",
                reads="the drafter was trained with norm_before_fc, which",
            ),
        ),
    ),
    Row(
        number=13,
        fault="The next step is fed y where training fed norm(y), or the reverse",
        serving="The first drafted token is as trained, from the second on acceptance collapses.",
        planted=(
            Planted(
                how="config.json: norm_output, as SpecForge writes it for the norm in front of the head",
                layouts=("specforge",),
                only="there the key means to the trainer what it means to engines",
                edit=top(norm_output=True),
                name="norm-output-trap",
                reads="norm_output is SpecForge's switch for the norm in front of the head",
            ),
            Planted(
                how="config.json: norm_output, and a release of vLLM that does not read it",
                layouts=("speculators",),
                only="there the key means something else, see above",
                edit=top(norm_output=True),
                engine=vllm("0.20.0"),
                name="feedback-normed-ignored",
                reads="the drafter was trained with feedback_normed, which vllm 0.20.0",
            ),
        ),
    ),
    Row(
        number=14,
        fault="No norm in front of the head, one with another eps, or one of Gemma's kind",
        serving="Flattened or wrong logits, from the first drafted token on.",
        planted=(
            Planted(
                how="norm.weight is taken out of the file",
                edit=drop("norm.weight"),
                name="tensors-missing",
                reads="",
            ),
        ),
    ),
)

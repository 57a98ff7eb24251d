"""Faults between who trains, who captures and who serves: keys, engines, dumps, figures."""

from __future__ import annotations

import random
from dataclasses import replace

from bench.planted.draft import VLLM, Draft, Engine
from bench.planted.dumps import Stored
from bench.planted.kinds import (
    ALONE,
    BRINGS,
    READS,
    TUNING,
    Kind,
    flat_only,
    nested_only,
    one_layer,
    only,
)
from bench.planted.settings import (
    has_normed_residual,
    of_first_two,
    rope,
    states_matter,
)
from bench.planted.stored import engine_says, of_others, stored_as

GPT_OSS = Engine(name="sglang", version="0.5.22", engine_class="gpt_oss", place="nested", plus=-1)
LLAMA_CPP = Engine(name="llama_cpp", version="7100", engine_class="llama", place="nested", plus=-1)
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 16.0}
NARROW = 4  # tokens that a second layer sees


def inputs_in_gpt_oss(draft: Draft, _: random.Random) -> None:
    """Ids that are inputs of layers, in a list without the last layer's."""
    draft.serve(GPT_OSS)
    draft.write_ids(draft.states, GPT_OSS.place)


def digit_wrong(draft: Draft, _: random.Random) -> None:
    """One id with a digit too many, or a wrong one."""
    wrong = {3: 30} if 3 in draft.states else {58: 38}
    draft.serve(VLLM)
    draft.write_ids([wrong.get(k, k) for k in draft.states], VLLM.place)


def stamped_old(draft: Draft, _: random.Random) -> None:
    """The version of a release that meant outputs of layers."""
    draft.config["speculators_version"] = "0.4.0"


def first_nested(draft: Draft) -> str | None:
    """Why states one higher are no fault."""
    matters = only((draft.drafter == "first", "states one higher are as good for it"))
    return nested_only(draft) or matters


def in_llama_cpp(draft: Draft, _: random.Random) -> None:
    """An engine that reads no ids."""
    draft.serve(LLAMA_CPP)


def residual_in_eagle_config(draft: Draft, _: random.Random) -> None:
    """The key where ModelOpt keeps its own."""
    del draft.config["norm_before_residual"]
    draft.config.setdefault("eagle_config", {})["norm_before_residual"] = True
    draft.serve(VLLM)


def residual_false_left_out(draft: Draft, _: random.Random) -> None:
    """Only what differs from the config class's default is written."""
    del draft.config["norm_before_residual"]
    draft.serve(VLLM)


def raw_residual(draft: Draft) -> str | None:
    """Why false cannot be left out."""
    trained_raw = only((not draft.normed_residual, "it was trained with norm_before_residual"))
    return nested_only(draft) or trained_raw


def post_norm_fed_back(draft: Draft, _: random.Random) -> None:
    """ModelOpt's and TensorRT-LLM's key for a normed feedback."""
    draft.config.setdefault("eagle_config", {})["return_hidden_post_norm"] = True


def first_flat(draft: Draft) -> str | None:
    """Why a normed feedback is no fault."""
    matters = only((draft.drafter == "first", "its last norm is so even that little is lost"))
    return flat_only(draft) or matters


def linear_scaling(draft: Draft, _: random.Random) -> None:
    """Positions divided."""
    rope(draft, 10000.0, LINEAR)


def llama_3_rope(draft: Draft, _: random.Random) -> None:
    """The rotary embedding of another family of targets."""
    rope(draft, 500_000.0, LLAMA_3)


def base_matters(draft: Draft) -> str | None:
    """Why another base is no fault."""
    return only((draft.drafter != "second", "another base is nearly as good for it"))


def second_layer_narrow(draft: Draft, _: random.Random) -> None:
    """Layers that take turns, as in targets with sliding windows."""
    draft.block.update(
        sliding_window=NARROW,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
    )


def two_layers_nested(draft: Draft) -> str | None:
    """Why no second layer can be narrowed."""
    return nested_only(draft) or only((draft.num_layers > 1, "it has one layer"))


def raw_slots(draft: Draft) -> None:
    """A layout whose last slot may be any state."""
    if draft.dump.layout == "specforge":
        draft.dump = replace(draft.dump, layout="pt_shards")


def last_in_front(draft: Draft, _: random.Random) -> None:
    """The end stored in front of the aux states."""
    raw_slots(draft)
    *aux, last = draft.dump.slots
    stored_as(draft, (last, *aux))


def one_buffer(draft: Draft, _: random.Random) -> None:
    """Every aux slot is the buffer that the deepest one was written to last."""
    *aux, last = draft.dump.slots
    stored_as(draft, (*(aux[-1] for _ in aux), last))


def first_hook_moved(draft: Draft, _: random.Random) -> None:
    """The first slot captured behind the first layer, or in front of it where it should be deeper."""
    first, *others = draft.dump.slots
    stored_as(draft, (1 if first == 0 else 0, *others))


def aux_ahead(draft: Draft, _: random.Random) -> None:
    """Row t of the aux slots is position t + 1's; the last slot's is its own."""

    def change(stored: Stored) -> None:
        *aux, last = stored.slots
        stored.slots = [*(h.roll(-1, 0) for h in aux), last]

    draft.edit_dump(change)


def norm_left_out(draft: Draft, _: random.Random) -> None:
    """Beside a target whose head, without its norm, says what was learnt."""
    draft.target = "own_norm"
    raw_slots(draft)
    draft.dump = replace(draft.dump, texts="own_norm")


KINDS: tuple[Kind, ...] = (
    Kind(
        name="states/gpt_oss",
        touches=("ids",),
        accepted=("states",),
        how="SGLang 0.5.22, class gpt_oss: a list without the last layer's id is read as outputs",
        use=TUNING,
        shows=BRINGS,
        plant=inputs_in_gpt_oss,
        why_not=one_layer,
    ),
    Kind(
        name="states/digit",
        touches=("ids",),
        accepted=("states",),
        how="one of the ids is mistyped, 30 for 3 or 38 for 58, and vLLM",
        use=TUNING,
        shows=BRINGS,
        plant=digit_wrong,
        why_not=states_matter,
    ),
    Kind(
        name="states/old_stamp",
        touches=("ids",),
        accepted=("states",),
        how="speculators_version is that of a release that meant outputs of layers; no engine is named",
        use=TUNING,
        shows=ALONE,
        plant=stamped_old,
        why_not=first_nested,
    ),
    Kind(
        name="states/llama_cpp",
        touches=("ids",),
        accepted=("states",),
        how="llama.cpp, which reads no ids and feeds its default states",
        use=TUNING,
        shows=BRINGS,
        plant=in_llama_cpp,
        why_not=lambda draft: of_first_two(draft) or one_layer(draft),
    ),
    Kind(
        name="residual/in_eagle_config",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual stands in eagle_config, where vLLM does not look",
        use=TUNING,
        shows=BRINGS,
        plant=residual_in_eagle_config,
        why_not=lambda draft: flat_only(draft) or has_normed_residual(draft),
    ),
    Kind(
        name="residual/false_left_out",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual was false and is left out of a nested config.json: vLLM takes true",
        use=TUNING,
        shows=BRINGS,
        plant=residual_false_left_out,
        why_not=raw_residual,
    ),
    Kind(
        name="feedback/post_norm",
        touches=("feedback",),
        accepted=("feedback",),
        how="eagle_config.return_hidden_post_norm is true, trained with the raw state fed back; no "
        "engine is named",
        use=TUNING,
        shows=ALONE,
        plant=post_norm_fed_back,
        why_not=first_flat,
    ),
    Kind(
        name="rope/linear",
        touches=("rope",),
        accepted=("rope",),
        how="linear rope scaling by 16, trained without",
        use=TUNING,
        shows=READS,
        plant=linear_scaling,
    ),
    Kind(
        name="rope/llama3",
        touches=("rope",),
        accepted=("rope",),
        how="Llama 3.1's base and scaling from a template, trained with base 10000",
        use=TUNING,
        shows=READS,
        plant=llama_3_rope,
        why_not=base_matters,
    ),
    Kind(
        name="window/second_layer",
        touches=("window",),
        accepted=("window",),
        how=f"a sliding window of {NARROW} tokens in the second layer, trained over the whole text",
        use=TUNING,
        shows=READS,
        plant=second_layer_narrow,
        why_not=two_layers_nested,
    ),
    Kind(
        name="slots/last_in_front",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="the dump holds the last state in front of the aux states, whatever capture.json says",
        use=TUNING,
        shows=ALONE,
        plant=last_in_front,
    ),
    Kind(
        name="slots/one_buffer",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="every aux slot holds the deepest aux state, as where no copy was kept",
        use=TUNING,
        shows=ALONE,
        plant=one_buffer,
        why_not=states_matter,
    ),
    Kind(
        name="slots/first_hook",
        touches=("ids", "slots", "fc"),
        accepted=("slots",),
        how="the first aux slot holds state 1 where capture.json says 0, or state 0 where it says 2",
        use=TUNING,
        shows=ALONE,
        plant=first_hook_moved,
        why_not=states_matter,
    ),
    Kind(
        name="token/aux_ahead",
        touches=("slots", "ids"),
        accepted=("token", "slots"),
        how="row t of the aux slots holds the state of position t + 1; the last slot is in its place",
        use=TUNING,
        shows=ALONE,
        plant=aux_ahead,
    ),
    Kind(
        name="teacher/norm_left_out",
        touches=("slots", "target", "vocabulary"),  # the target's head is none for the drafter then
        accepted=("teacher",),
        how="trained to say what the target's head says without the final norm's weights",
        use=TUNING,
        plant=norm_left_out,
        why_not=of_others,
    ),
    Kind(
        name="engine-state/not_rebuilt",
        accepted=("engine-state",),
        how="the engine was measured at 0.88 of what the drafter reaches alone, as where its cache is "
        "never made anew from the target's states",
        use=TUNING,
        shows=BRINGS,
        plant=engine_says(lambda alone: 0.88 * alone, 2),
    ),
    Kind(
        name="measurement/bonus_twice",
        accepted=("measurement",),
        how="one was added to an engine's figure that held the bonus token already",
        use=TUNING,
        shows=BRINGS,
        plant=engine_says(lambda alone: alone + 1, 1),
    ),
)

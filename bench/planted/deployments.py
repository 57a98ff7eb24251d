"""Faults of who deploys: ids and releases that do not go together, templates, figures."""

from __future__ import annotations

import random
from dataclasses import replace

from bench.planted.draft import VLLM, Draft, Engine
from bench.planted.kinds import (
    ALONE,
    BRINGS,
    HELD_OUT,
    READS,
    Kind,
    flat_only,
    nested_only,
    one_layer,
    only,
)
from bench.planted.settings import has_normed_residual, of_first_two, rope, states_matter
from bench.planted.stored import engine_says

TRANSFORMERS = replace(VLLM, engine_class="transformers")
VLLM_READS_BOTH = Engine(
    name="vllm", version="0.26.0", engine_class="llama", place="nested", plus=0
)
VLLM_TOP_ALONE = Engine(name="vllm", version="0.21.0", engine_class="llama", place="top", plus=0)
MINIMAX = Engine(
    name="sglang", version="0.5.20", engine_class="minimax_m3_vl", place="nested", plus=-1
)
# The default states of a target of 48 layers.
OF_48 = (2, 24, 45)
SHARPER = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "attention_factor": 2.0,
}
NARROW = 4  # tokens that a first layer sees
SHORT = 6  # tokens of a window that was meant for blocks


def of_other_depth(draft: Draft, _: random.Random) -> None:
    """The list of a shallower target."""
    draft.serve(VLLM)
    draft.write_ids(OF_48, VLLM.place)


def wrapped(draft: Draft, _: random.Random) -> None:
    """An engine's backend that looks a layer up by its id less one."""
    draft.serve(TRANSFORMERS)


def of_embedding(draft: Draft) -> str | None:
    """Why no id is looked up from the end."""
    return only((0 in draft.states, "it was not trained on the embedding"))


def converted_twice(draft: Draft, _: random.Random) -> None:
    """Ids to which one was added although they were inputs of layers already."""
    draft.serve(replace(VLLM, version="0.29.0"))
    draft.write_ids([k + 1 for k in sorted(draft.states)], VLLM.place)


def one_higher_matters(draft: Draft) -> str | None:
    """Why states one higher are no fault."""
    return only((draft.drafter == "first", "states one higher are as good for it"))


def nested_in_old(draft: Draft, _: random.Random) -> None:
    """Ids in eagle_config, and a release that reads the top level alone."""
    draft.serve(VLLM_TOP_ALONE)
    draft.write_ids(sorted(draft.states), "nested")


def raw_feedback(draft: Draft) -> str | None:
    """Why so old a release would have a second fault."""
    return only((draft.drafter != "second", "the release feeds no normed state back"))


def outputs_in_vllm(draft: Draft, _: random.Random) -> None:
    """SpecForge's list where SpecForge writes it, and a release that reads it there as inputs."""
    draft.serve(VLLM_READS_BOTH)
    draft.write_ids([k - 1 for k in sorted(draft.states)], "nested")


def deep_and_flat(draft: Draft) -> str | None:
    """Why such a list would not be read, or not serve."""
    deep = only((0 not in draft.states, "state -1 is none: the server would not start"))
    return flat_only(draft) or deep


def no_ids_in_minimax(draft: Draft, _: random.Random) -> None:
    """No ids, and an engine whose default list goes through the conversion as well."""
    draft.serve(MINIMAX)
    draft.write_ids(None, MINIMAX.place)


def null_residual(draft: Draft, _: random.Random) -> None:
    """A key of which a template's null is left."""
    draft.config["norm_before_residual"] = None


def in_thousands(draft: Draft, _: random.Random) -> None:
    """A base without its thousands."""
    rope(draft, 10.0)


def inverse_factor(draft: Draft, _: random.Random) -> None:
    """Positions multiplied where they should be divided."""
    rope(draft, 10000.0, {"rope_type": "linear", "factor": 0.125})


def sharper(draft: Draft, _: random.Random) -> None:
    """A factor on cos and sin, and so on attention, that was not trained."""
    rope(draft, 10000.0, SHARPER)


def first_layer_narrow(draft: Draft, _: random.Random) -> None:
    """Layers that take turns, beginning with a narrow one."""
    draft.block.update(
        sliding_window=NARROW,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )


def two_layers_nested(draft: Draft) -> str | None:
    """Why no layer can be narrow beside another."""
    return nested_only(draft) or only((draft.num_layers > 1, "it has one layer"))


def short_window(draft: Draft, _: random.Random) -> None:
    """A window's width in blocks of tokens, read as tokens."""
    draft.block.update(
        sliding_window=SHORT,
        use_sliding_window=True,
        layer_types=["sliding_attention"] * draft.num_layers,
    )


KINDS: tuple[Kind, ...] = (
    Kind(
        name="states/other_depth",
        touches=("ids",),
        accepted=("states",),
        how="config.json's ids are the default ones of a target of 48 layers, and vLLM",
        use=HELD_OUT,
        shows=BRINGS,
        plant=of_other_depth,
        why_not=states_matter,
    ),
    Kind(
        name="states/wrapped",
        touches=("ids",),
        accepted=("states",),
        how="vLLM's transformers backend, which looks id 0 up from the end: the last state",
        use=HELD_OUT,
        shows=BRINGS,
        plant=wrapped,
        why_not=of_embedding,
    ),
    Kind(
        name="states/converted_twice",
        touches=("ids",),
        accepted=("states",),
        how="one was added to ids that were inputs of layers already, and vLLM 0.29.0",
        use=HELD_OUT,
        shows=BRINGS,
        plant=converted_twice,
        why_not=one_higher_matters,
    ),
    Kind(
        name="states/nested_in_old_vllm",
        touches=("ids",),
        accepted=("states",),
        how="ids in eagle_config, and vLLM 0.21.0, which reads the top level alone",
        use=HELD_OUT,
        shows=BRINGS,
        plant=nested_in_old,
        why_not=lambda draft: of_first_two(draft) or raw_feedback(draft),
    ),
    Kind(
        name="states/outputs_in_vllm",
        touches=("ids",),
        accepted=("states",),
        how="SpecForge's ids, outputs of layers, in eagle_config, which vLLM 0.26.0 reads as inputs",
        use=HELD_OUT,
        shows=BRINGS,
        plant=outputs_in_vllm,
        why_not=deep_and_flat,
    ),
    Kind(
        name="states/minimax",
        touches=("ids",),
        accepted=("states",),
        how="no ids, and SGLang 0.5.20, class minimax_m3_vl, which adds one to its default states",
        use=HELD_OUT,
        shows=BRINGS,
        plant=no_ids_in_minimax,
        why_not=one_layer,
    ),
    Kind(
        name="residual/null",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual is null, trained with true; no engine is named",
        use=HELD_OUT,
        shows=ALONE,
        plant=null_residual,
        why_not=has_normed_residual,
    ),
    Kind(
        name="rope/in_thousands",
        touches=("rope",),
        accepted=("rope",),
        how="rope_theta is 10, written in thousands, trained with 10000",
        use=HELD_OUT,
        shows=READS,
        plant=in_thousands,
    ),
    Kind(
        name="rope/inverse_factor",
        touches=("rope",),
        accepted=("rope",),
        how="linear rope scaling by the inverse of eight, trained without",
        use=HELD_OUT,
        shows=READS,
        plant=inverse_factor,
    ),
    Kind(
        name="rope/attention_factor",
        touches=("rope",),
        accepted=("rope",),
        how="yarn by four with an attention_factor of two, trained without",
        use=HELD_OUT,
        shows=READS,
        plant=sharper,
    ),
    Kind(
        name="window/first_layer",
        touches=("window",),
        accepted=("window",),
        how=f"a sliding window of {NARROW} tokens in the first layer, trained over the whole text",
        use=HELD_OUT,
        shows=READS,
        plant=first_layer_narrow,
        why_not=two_layers_nested,
    ),
    Kind(
        name="window/in_blocks",
        touches=("window",),
        accepted=("window",),
        how=f"a sliding window of {SHORT} in every layer, meant in blocks of tokens",
        use=HELD_OUT,
        shows=READS,
        plant=short_window,
        why_not=nested_only,
    ),
    Kind(
        name="engine-state/stale",
        accepted=("engine-state",),
        how="the engine was measured at 1 + seven tenths of what the drafter gains alone, as where "
        "rejected drafts stay in its cache",
        use=HELD_OUT,
        shows=BRINGS,
        plant=engine_says(lambda alone: 1 + 0.7 * (alone - 1), 2),
    ),
    Kind(
        name="measurement/tree",
        accepted=("measurement",),
        how="a figure of trees beside one of chains: two fifths more than the drafter gains alone",
        use=HELD_OUT,
        shows=BRINGS,
        plant=engine_says(lambda alone: 1 + 1.4 * (alone - 1), 0),
    ),
)

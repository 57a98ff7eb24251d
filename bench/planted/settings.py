"""Faults of config.json, and of a release of an engine that reads it: which ids, switches, rope."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from bench.planted.draft import (
    SGLANG,
    SGLANG_KIMI_OLD,
    SGLANG_OLD,
    VLLM,
    Draft,
    Engine,
)
from bench.planted.kinds import (
    ALONE,
    BRINGS,
    READS,
    TUNING,
    Kind,
    Plant,
    flat_only,
    lean_on_norm,
    nested_only,
    one_layer,
    only,
)

YARN_OF_EXPORT = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 2048,
}
YARN_OF_KIMI = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def behind(engine: Engine, ids: Callable[[Draft], list[int]], place: str | None = None) -> Plant:
    """An engine, and these ids in config.json, in the place that it reads or in another one."""

    def plant(draft: Draft, _: random.Random) -> None:
        draft.serve(engine)
        draft.write_ids(ids(draft), place or engine.place)

    return plant


def window_shifted(draft: Draft, _: random.Random) -> None:
    """The story's: the embedding is left out, and what is fed lies one state higher."""
    draft.serve(SGLANG_KIMI_OLD)
    draft.write_ids([2, 30, 58], "nested")


def asked(draft: Draft, _: random.Random) -> None:
    """Ids that the server is given."""
    draft.serve(VLLM)
    draft.engine_ids = tuple(k + 2 for k in sorted(draft.states))


def moved(by: int) -> Callable[[Draft], list[int]]:
    """Ids that mean states `by` higher to an engine that takes them as they are."""
    return lambda draft: [k + by for k in sorted(draft.states)]


def ids_contradict(draft: Draft, _: random.Random) -> None:
    """Ids of other states than were trained."""
    draft.write_ids([k + 2 for k in draft.states], "top")


def states_matter(draft: Draft) -> str | None:
    """Why states a little further on are no fault."""
    return only((draft.drafter != "second", "states a little further on are as good for it"))


def nested_and_matter(draft: Draft) -> str | None:
    """Why ids that contradict cannot be planted."""
    return nested_only(draft) or states_matter(draft)


def of_first_two(draft: Draft) -> str | None:
    """Why the engine's default states are no fault."""
    return only((0 in draft.states, "the engine's default states are the trained ones"))


def of_deep(draft: Draft) -> str | None:
    """Why ids cannot be one lower."""
    return only((0 not in draft.states, "state -1 is none: the server would not start"))


def flip(key: str) -> Plant:
    """The opposite of a switch in config.json."""

    def plant(draft: Draft, _: random.Random) -> None:
        draft.config[key] = not draft.config.get(key, False)

    return plant


def residual_flipped(draft: Draft, rng: random.Random) -> None:
    """The other residual is declared."""
    flip("norm_before_residual")(draft, rng)


def residual_ignored(draft: Draft, _: random.Random) -> None:
    """An engine without the switch."""
    draft.serve(SGLANG)


def residual_not_stated(draft: Draft, _: random.Random) -> None:
    """A key that readers fill in in different ways."""
    del draft.config["norm_before_residual"]
    if draft.flat:
        draft.serve(VLLM)  # which takes false in a flat config


def has_normed_residual(draft: Draft) -> str | None:
    """Why the key cannot be missed."""
    return only((draft.normed_residual, "it was not trained with norm_before_residual"))


def normed_in_sglang(draft: Draft) -> str | None:
    """Why SGLang is no fault here."""
    return only(
        (draft.flat, "SGLang does not load a nested config"),
        (draft.normed_residual, "it was not trained with norm_before_residual"),
    )


def head_declared_raw(draft: Draft, _: random.Random) -> None:
    """A norm that was trained with is declared off."""
    draft.config["norm_output"] = False


def feedback_trap(draft: Draft, rng: random.Random) -> None:
    """One key of two meanings."""
    draft.config["norm_output"] = True  # SpecForge's own switch, for the norm in front of the head
    draft.serve(rng.choice([SGLANG, VLLM]))


def no_feedback_norm(draft: Draft) -> str | None:
    """Why the trap cannot be planted."""
    return only(
        (draft.flat, "the nested layout's key is the engines'"),
        (not draft.config.get("norm_output"), "it was trained with the normed state fed back"),
        (one_layer(draft) is None, "SGLang would have a second fault"),
    )


def norm_matters(draft: Draft) -> str | None:
    """Whether its last norm does enough for its loss to be measured."""
    return only((draft.drafter != "second", "its last norm is so even that nothing is lost"))


def norm_in_front_of_head(draft: Draft) -> str | None:
    """Why that norm cannot be declared off."""
    matters = only((draft.drafter == "first", "its last norm is so even that nothing is lost"))
    return flat_only(draft) or matters


def norm_fed_back(draft: Draft) -> str | None:
    """Why the feedback cannot be flipped."""
    return nested_only(draft) or norm_matters(draft)


def rope(draft: Draft, theta: float, scaling: dict[str, object] | None = None) -> None:
    """Write a rotary embedding where the layout keeps it."""
    if draft.flat:
        draft.config["rope_theta"] = theta
        if scaling:
            draft.config["rope_scaling"] = dict(scaling)
    else:
        block = {"rope_theta": theta, "rope_type": "default", **(scaling or {})}
        draft.block["rope_parameters"] = block


def theta_written_over(draft: Draft, _: random.Random) -> None:
    """A larger base than trained."""
    rope(draft, 5e6)


def theta_small(draft: Draft, _: random.Random) -> None:
    """A smaller base than trained."""
    rope(draft, 100.0)


def yarn_by_export(draft: Draft, _: random.Random) -> None:
    """A scaling that was not trained."""
    rope(draft, 10000.0, YARN_OF_EXPORT)


def mscale_dropped(draft: Draft, _: random.Random) -> None:
    """A scaling that the engine reads by half."""
    rope(draft, 10000.0, YARN_OF_KIMI)
    draft.serve(replace(SGLANG_OLD, version="0.5.9"))


def small_window(draft: Draft, _: random.Random) -> None:
    """A window that was not trained."""
    layers = draft.num_layers
    draft.block.update(
        sliding_window=12, use_sliding_window=True, layer_types=["sliding_attention"] * layers
    )


def two_layers_in_sglang(draft: Draft, rng: random.Random) -> None:
    """A name that the engine does not look for, of a norm that matters."""
    lean_on_norm(draft, rng)
    draft.serve(SGLANG)


def of_two_layers(draft: Draft) -> str | None:
    """Why a deeper norm cannot be lost."""
    return only(
        (draft.flat, "SGLang does not load a nested config"),
        (draft.num_layers > 1, "it has one layer"),
    )


KINDS: tuple[Kind, ...] = (
    Kind(
        name="states/window",
        touches=("ids",),
        accepted=("states",),
        how="SGLang 0.5.12, class kimi_k25, and ids [2,30,58], outputs of layers to it: 3, 31, 59",
        use=TUNING,
        shows=BRINGS,
        plant=window_shifted,
        why_not=one_layer,
    ),
    Kind(
        name="states/one_higher",
        touches=("ids",),
        accepted=("states",),
        how="the states' own numbers as ids for SGLang, which reads outputs of layers",
        use=TUNING,
        shows=BRINGS,
        plant=behind(SGLANG, moved(0)),
        why_not=one_layer,
    ),
    Kind(
        name="states/two_higher_vllm",
        touches=("ids",),
        accepted=("states",),
        how="ids two too high for vLLM, which reads inputs of layers",
        use=TUNING,
        shows=BRINGS,
        plant=behind(VLLM, moved(2)),
        why_not=states_matter,
    ),
    Kind(
        name="states/one_lower_vllm",
        touches=("ids",),
        accepted=("states",),
        how="SpecForge's ids, outputs of layers, in vLLM, which reads inputs",
        use=TUNING,
        shows=BRINGS,
        plant=behind(VLLM, moved(-1)),
        why_not=of_deep,
    ),
    Kind(
        name="states/upgrade",
        touches=("ids",),
        accepted=("states",),
        how="ids as SGLang 0.5.13 reads them for Kimi-K2.5, and 0.5.12, which adds one to each",
        use=TUNING,
        shows=BRINGS,
        plant=behind(SGLANG_KIMI_OLD, moved(0)),
        why_not=one_layer,
    ),
    Kind(
        name="states/nested_in_vllm",
        touches=("ids",),
        accepted=("states",),
        how="ids in eagle_config, where vLLM 0.33 does not look: it takes its default states",
        use=TUNING,
        shows=BRINGS,
        plant=behind(VLLM, moved(0), "nested"),
        why_not=of_first_two,
    ),
    Kind(
        name="states/top_in_sglang",
        touches=("ids",),
        accepted=("states",),
        how="ids at the top level, where SGLang does not look: it takes its default states",
        use=TUNING,
        shows=BRINGS,
        plant=behind(SGLANG, moved(-1), "top"),
        why_not=lambda draft: of_first_two(draft) or one_layer(draft),
    ),
    Kind(
        name="states/ids_asked",
        touches=("ids",),
        accepted=("states",),
        how="ids that the server is given in the place of config.json's, two too high",
        use=TUNING,
        shows=BRINGS,
        plant=asked,
        why_not=states_matter,
    ),
    Kind(
        name="states/ids_contradict",
        touches=("ids",),
        accepted=("states",),
        how="ids in config.json two higher than trained, in the convention of its speculators_version; "
        "no engine is named",
        use=TUNING,
        shows=ALONE,
        plant=ids_contradict,
        why_not=nested_and_matter,
    ),
    Kind(
        name="residual/flipped",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual says the opposite of what was trained",
        use=TUNING,
        shows=READS,
        plant=residual_flipped,
    ),
    Kind(
        name="residual/ignored",
        touches=("residual",),
        accepted=("residual",),
        how="SGLang, which has no norm_before_residual",
        use=TUNING,
        shows=BRINGS,
        plant=residual_ignored,
        why_not=normed_in_sglang,
    ),
    Kind(
        name="residual/not_stated",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual is taken out of a flat config.json: vLLM takes false",
        use=TUNING,
        shows=BRINGS,
        plant=residual_not_stated,
        why_not=lambda draft: flat_only(draft) or has_normed_residual(draft),
    ),
    Kind(
        name="residual/not_stated_nested",
        touches=("residual",),
        accepted=("residual",),
        how="norm_before_residual is taken out of a nested config.json, where speculators' config class "
        "takes false; no engine is named",
        use=TUNING,
        shows=ALONE,
        plant=residual_not_stated,
        why_not=lambda draft: nested_only(draft) or has_normed_residual(draft),
    ),
    Kind(
        name="head-input/declared_raw",
        touches=("feedback",),
        accepted=("head-input",),
        how="norm_output is false, as SpecForge switches off the norm in front of the head",
        use=TUNING,
        shows=ALONE,
        plant=head_declared_raw,
        why_not=norm_in_front_of_head,
    ),
    Kind(
        name="feedback/trap",
        touches=("feedback",),
        accepted=("feedback",),
        how="norm_output as SpecForge writes it for the norm in front of the head; engines read it as "
        "what the next step is fed",
        use=TUNING,
        shows=BRINGS,
        plant=feedback_trap,
        why_not=no_feedback_norm,
    ),
    Kind(
        name="feedback/flipped",
        touches=("feedback",),
        accepted=("feedback",),
        how="norm_output says the opposite of what was trained",
        use=TUNING,
        shows=READS,
        plant=flip("norm_output"),
        why_not=norm_fed_back,
    ),
    Kind(
        name="rope/theta",
        touches=("rope",),
        accepted=("rope",),
        how="rope_theta is 5000000, trained with 10000",
        use=TUNING,
        shows=READS,
        plant=theta_written_over,
    ),
    Kind(
        name="rope/theta_small",
        touches=("rope",),
        accepted=("rope",),
        how="rope_theta is 100, trained with 10000",
        use=TUNING,
        shows=READS,
        plant=theta_small,
    ),
    Kind(
        name="rope/export",
        touches=("rope",),
        accepted=("rope",),
        how="the yarn scaling that ModelOpt's export writes over a plain rotary embedding",
        use=TUNING,
        shows=READS,
        plant=yarn_by_export,
        why_not=flat_only,
    ),
    Kind(
        name="rope/mscale",
        touches=("rope",),
        accepted=("rope",),
        how="yarn with mscale, which SGLang 0.5.9 does not read",
        use=TUNING,
        shows=BRINGS,
        plant=mscale_dropped,
        why_not=one_layer,
    ),
    Kind(
        name="window/declared",
        touches=("window",),
        accepted=("window",),
        how="a sliding window of 12 tokens in config.json, trained over the whole text",
        use=TUNING,
        shows=READS,
        plant=small_window,
        why_not=nested_only,
    ),
    Kind(
        name="deeper-norm/name",
        touches=("deeper",),
        accepted=("deeper-norm",),
        how="SGLang, which looks for layers.1.hidden_norm, and the file holds layers.1.input_layernorm",
        use=TUNING,
        shows=BRINGS,
        plant=two_layers_in_sglang,
        why_not=of_two_layers,
    ),
)

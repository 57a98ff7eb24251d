"""Engines that do not start with what they are given: ids that are none, states and tensors too many."""

from __future__ import annotations

import random

from bench.planted.deployments import VLLM_TOP_ALONE, of_embedding
from bench.planted.draft import SGLANG, SGLANG_KIMI, VLLM, Draft, Engine
from bench.planted.handovers import LLAMA_CPP
from bench.planted.kinds import BRINGS, HELD_OUT, Kind, flat_only, one_layer, only

GEMMA = Engine(name="sglang", version="0.5.20", engine_class="gemma4", place="nested", plus=-1)


def teacher_asked(draft: Draft, _: random.Random) -> None:
    """The list that the dump was captured with, the teacher's state in it."""
    draft.serve(VLLM)
    draft.engine_ids = draft.dump.declared


def empty_list(draft: Draft, _: random.Random) -> None:
    """A list without ids, which SGLang takes as given."""
    draft.serve(SGLANG)
    draft.write_ids([], SGLANG.place)


def below_zero(draft: Draft, _: random.Random) -> None:
    """Outputs of layers to a release that takes them as inputs, and refuses what is none."""
    draft.serve(SGLANG_KIMI)
    draft.write_ids([k - 1 for k in sorted(draft.states)], SGLANG_KIMI.place)


def in_gemma(draft: Draft, _: random.Random) -> None:
    """A class of targets of which this release captures nothing that is a state."""
    draft.serve(GEMMA)


def in_llama_cpp(draft: Draft, _: random.Random) -> None:
    """An engine without norms in front of fc, and of one layer."""
    draft.serve(LLAMA_CPP)


def beyond_llama_cpp(draft: Draft) -> str | None:
    """Why llama.cpp has a place for it."""
    normed = any(n.startswith(("input_norm.", "fc_norm.")) for n in draft.tensors)
    return flat_only(draft) or only((normed, "it has no norm in front of fc"))


def in_old_vllm(draft: Draft, _: random.Random) -> None:
    """A release that came before norms for each chunk of fc."""
    draft.serve(VLLM_TOP_ALONE)


def has_chunk_norms(draft: Draft) -> str | None:
    """Why an old release has a place for it."""
    return only(("fc_norm.0.weight" in draft.tensors, "it was trained without fc_norm"))


KINDS: tuple[Kind, ...] = (
    Kind(
        name="not-served/teacher_asked",
        accepted=("not-served", "states"),
        how="vLLM is given the ids that the dump was captured with, the last state's in it: four states "
        "for an fc of three",
        use=HELD_OUT,
        shows=BRINGS,
        plant=teacher_asked,
    ),
    Kind(
        name="not-served/empty_list",
        accepted=("not-served", "states"),
        how="the list of ids is empty, which SGLang takes as given: no state for an fc of three",
        use=HELD_OUT,
        shows=BRINGS,
        plant=empty_list,
        why_not=one_layer,
    ),
    Kind(
        name="not-served/below_zero",
        accepted=("not-served", "states"),
        how="id -1 for the embedding, and SGLang 0.5.18, class kimi_k25, which takes ids as they are "
        "and refuses it",
        use=HELD_OUT,
        shows=BRINGS,
        plant=below_zero,
        why_not=lambda draft: one_layer(draft) or of_embedding(draft),
    ),
    Kind(
        name="not-served/gemma",
        accepted=("not-served", "states"),
        how="SGLang 0.5.20, class gemma4, which captures nothing that is a state",
        use=HELD_OUT,
        shows=BRINGS,
        plant=in_gemma,
        why_not=one_layer,
    ),
    Kind(
        name="not-served/llama_cpp",
        accepted=("not-served", "fc-input"),
        how="llama.cpp, which has no place for norms in front of fc",
        use=HELD_OUT,
        shows=BRINGS,
        plant=in_llama_cpp,
        why_not=beyond_llama_cpp,
    ),
    Kind(
        name="not-served/old_vllm",
        accepted=("not-served", "fc-input"),
        how="vLLM 0.21.0, which has no place for fc_norm's tensors",
        use=HELD_OUT,
        shows=BRINGS,
        plant=in_old_vllm,
        why_not=has_chunk_norms,
    ),
)

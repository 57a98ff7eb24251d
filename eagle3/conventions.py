"""The table of what engines and trainers mean by a list of layer ids.

A row of `RULES` says, for some classes of targets and some releases of one ecosystem, which canonical
states an id list stands for and where the list is looked up. `since` is the first release that the
row holds for, `until` the first that it does not hold for; None is open. The functions over the table
are in `eagle3.engines`, what an engine does with the rest of a drafter is in `eagle3.serving`.
Standard library only: hosts without torch read this.

Evidence: `run` (seen in a running engine), `read` (in the source of every release of the range from
the oldest to the newest that `READ` names), `inferred` (from other code, documentation or reports).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

EMBEDDING_PATCH = (
    "the embedding capture patch: the layer loop adds hidden_states and residual, and in front of "
    "layer 0 residual is None"
)
COPY_PATCH = (
    "the embedding copy patch: the layer loop keeps a copy of the embedding output, as the norm in "
    "place behind layer 0's attention writes over it on CUDA"
)
KEY = "eagle_aux_hidden_state_layer_ids"
NESTED = f"eagle_config.{KEY}"


class Evidence(str, Enum):
    """How a statement about an engine is known."""

    run = "run"
    read = "read"
    inferred = "inferred"


class Meaning(str, Enum):
    """Which canonical state an id i of a list stands for."""

    output = "output"  # i + 1
    input = "input"  # i
    output_if_first_is_1 = "output_if_first_is_1"  # i + 1 where the list starts with 1, else i
    input_if_highest_is_n = "input_if_highest_is_n"  # i where the highest id is n, else i + 1
    derived = "derived"  # the list is not read: always the default states


class Reach(str, Enum):
    """Whether a state at the edge can be captured."""

    yes = "yes"
    patch = "patch"  # the code has to be changed first
    no = "no"


class Lost(str, Enum):
    """What becomes of an id that no layer of the walk answers to, and of one written twice."""

    dropped = "dropped"  # fewer states come out than ids went in
    refused = "refused"  # an error at start or at the first forward
    unset = "unset"  # its chunk of fc's input keeps whatever its memory held


@dataclass(frozen=True)
class Place:
    """A place in a drafter's config.json, by its dotted path; its ids are read with `plus` added."""

    path: str
    plus: int = 0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What layer ids mean to one ecosystem, for some classes of targets and some releases."""

    ecosystem: str
    classes: tuple[str, ...]  # modules and architectures; ("*",): any without a row of its own
    since: str | None = None
    until: str | None = None
    meaning: Meaning
    # What comes out: always ascending ("sorted"), or in the order of the list ("kept").
    order: str = "sorted"
    twice: Lost = Lost.dropped  # an id written twice
    unreached: Lost = Lost.dropped  # an id of no state
    wraps_below: int | None = None  # states lower than this are looked up from the end: k + n
    embedding: Reach = Reach.yes  # state 0
    last: Reach = Reach.yes  # state n, before the final norm
    patch: str | None = None  # what has to be changed where `embedding` is `patch`
    fault: str | None = None  # why nothing of what is captured is a canonical state
    count: int | None = None  # how many ids it takes; None: any number
    lowest: int | None = None  # the lowest id that is accepted; None: not checked
    # Default states: 2, n//2 and n-3, each plus this; None: there are none, ids must be given.
    default_shift: int | None = 0
    appends_last: bool = False  # id n stands behind the others, for the teacher's state
    places: tuple[Place, ...] = ()  # where ids are looked up in a drafter's config.json, in order
    empty_counts: bool = False  # an empty list is taken as given, not as missing
    other_runner: str | None = (
        None  # a second model runner of the same release that looks elsewhere
    )
    other_places: tuple[Place, ...] = ()
    captured_by: str | None = None  # the engine whose capturing a trainer uses
    setting: str | None = None  # the setting that ids come from, where it is not config.json
    notes: tuple[str, ...] = ()
    source: str
    evidence: Evidence


def _sglang(classes: str, source: str, **changes: object) -> Rule:
    """A row of SGLang: ids are looked up nested only, a layer loop captures in ascending order."""
    row = Rule(
        ecosystem="sglang",
        classes=tuple(classes.split()),
        meaning=Meaning.output,
        embedding=Reach.patch,
        last=Reach.no,
        places=(Place(NESTED),),
        empty_counts=True,
        source=f"{source}::set_eagle3_layers_to_capture and the layer loop",
        evidence=Evidence.read,
    )
    row = replace(row, **changes)  # type: ignore[arg-type]
    if row.embedding is Reach.patch and row.patch is None:
        row = replace(row, patch=EMBEDDING_PATCH)
    return row


_Begun = dict[str | None, str]  # by the release from which on these classes have it


def _begun(classes: _Begun, source: str, until: str, **changes: object) -> tuple[Rule, ...]:
    """Rows of SGLang that differ only in the release with which a class began to capture.

    None: it did so in the oldest release that was read.
    """
    return tuple(
        _sglang(names, source, since=since, until=until, **changes)
        for since, names in classes.items()
    )


def _all(classes: _Begun) -> str:
    return " ".join(classes.values())


# The setter may be a class's own or an inherited one.
_DEEPSEEK: _Begun = {
    "0.5.5": (
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 DeepseekV2ForCausalLM DeepseekV3ForCausalLM "
        "DeepseekV32ForCausalLM"
    ),
    "0.5.7": "mistral_large_3 MistralLarge3ForCausalLM",
    "0.5.9": "glm_moe_dsa GlmMoeDsaForCausalLM",
    "0.5.10": "kimi_k25 KimiK25ForConditionalGeneration",
}
_GLM_LITE = "glm4_moe_lite Glm4MoeLiteForCausalLM"
_LLAMA: _Begun = {
    None: (
        "llama mistral phi3 internlm3 apertus LlamaForCausalLM MistralForCausalLM Phi3ForCausalLM "
        "InternLM3ForCausalLM ApertusForCausalLM"
    ),
    "0.5.7": "ministral3 Ministral3ForCausalLM",
    "0.5.9": "exaone_moe ExaoneMoEForCausalLM",
}
_LLAMA4: _Begun = {
    None: "llama4 mllama4 Llama4ForCausalLM Llama4ForConditionalGeneration",
    "0.5.5": "glm4_moe Glm4MoeForCausalLM",
    "0.5.6": "longcat_flash LongcatFlashForCausalLM",
}
_QWEN: _Begun = {
    None: (
        "qwen2 qwen2_5_vl qwen3 Qwen2ForCausalLM Qwen3ForCausalLM Qwen2_5_VLForConditionalGeneration"
    ),
    "0.5.9": "bailing_moe BailingMoeForCausalLM BailingMoeV2ForCausalLM",
    "0.5.11": (
        "qwen3_vl qwen3_vl_moe Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration"
    ),
}
_GEMMA3 = "gemma3 gemma3_causal gemma3_mm Gemma3ForCausalLM Gemma3ForConditionalGeneration "
_GEMMA4 = "gemma4 gemma4_causal gemma4_mm Gemma4ForCausalLM Gemma4ForConditionalGeneration"
_GEMMA4_UNIFIED = "gemma4_unified Gemma4UnifiedForConditionalGeneration"
_QWEN_MOE = "qwen2_moe qwen3_moe Qwen2MoeForCausalLM Qwen3MoeForCausalLM"
_QWEN_NEXT = "qwen3_next Qwen3NextForCausalLM"
_QWEN_3_5 = (
    "qwen3_5 qwen3_5_text qwen3_5_moe Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM "
    "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration"
)
_FIRST_IS_1 = (
    "a list that starts with 1 is read in the convention 'output', any other in 'input' "
    "(a heuristic of sglang#25454)",
)
_HIGHEST_IS_N = (
    "a list whose highest id is n is read in the convention 'input', any other in 'output' "
    "(sglang#32334)",
)
_FLAGGED: dict[str, object] = {
    "wraps_below": 0,
    "unreached": Lost.refused,
    "notes": ("the layers themselves are flagged, so an id below -1 counts from the end",),
}
_ALONE = (
    "only the MLP's output is kept, apart from the residual: no canonical state is captured; it needs "
    "a patch"
)
_WRITTEN_OVER = (
    "what is kept is no copy, and the norm behind attention writes over it on CUDA: no state but the "
    "last is captured; it needs a patch"
)

# The releases whose source was read: the oldest, the newest.
READ = {
    "sglang": ("0.5.4", "0.5.23"),
    "vllm": ("0.11.2", "0.33.0"),
    "speculators": ("0.3.0", "0.9.0"),
    "specforge": ("0.2.0", "0.2.0"),
    "modelopt": ("0.39.0", "0.47.0"),
}

# Releases that were run, with the classes whose states were recorded at the drafter's fc and named, for
# ids of the embedding and of layers (tests/engines/test_probe.py).
RUN = {
    ("sglang", "0.5.23"): ("llama",),
    ("vllm", "0.32.0"): ("llama",),
}
RECORDED = "recorded at the drafter's fc"

_SGLANG_ROWS = (
    *_begun({**_DEEPSEEK, "0.5.8": _GLM_LITE}, "models/deepseek_v2.py", "0.5.13"),
    _sglang(
        f"{_all(_DEEPSEEK)} {_GLM_LITE}",
        "models/deepseek_v2.py",
        since="0.5.13",
        until="0.5.14",
        meaning=Meaning.output_if_first_is_1,
        notes=_FIRST_IS_1,
    ),
    _sglang(
        _all(_DEEPSEEK),
        "models/deepseek_v2.py",
        since="0.5.14",
        until="0.5.17",
        meaning=Meaning.output_if_first_is_1,
        embedding=Reach.yes,
        notes=_FIRST_IS_1,
    ),
    _sglang(
        _all(_DEEPSEEK),
        "models/deepseek_v2.py",
        since="0.5.17",
        meaning=Meaning.output_if_first_is_1,
        embedding=Reach.yes,
        twice=Lost.refused,
        unreached=Lost.refused,
        notes=_FIRST_IS_1,
    ),
    _sglang(
        _GLM_LITE,
        "models/glm4_moe_lite.py",
        since="0.5.14",
        until="0.5.21",
        meaning=Meaning.output_if_first_is_1,
        notes=_FIRST_IS_1,
    ),
    _sglang(
        _GLM_LITE,
        "models/glm4_moe_lite.py",
        since="0.5.21",
        meaning=Meaning.output_if_first_is_1,
        embedding=Reach.yes,
        notes=_FIRST_IS_1,
    ),
    _sglang("gpt_oss GptOssForCausalLM", "models/gpt_oss.py", until="0.5.17"),
    _sglang(
        "gpt_oss GptOssForCausalLM",
        "models/gpt_oss.py",
        since="0.5.17",
        until="0.5.21",
        meaning=Meaning.input_if_highest_is_n,
        patch=COPY_PATCH,
        last=Reach.yes,
        notes=_HIGHEST_IS_N,
    ),
    _sglang(
        "gpt_oss GptOssForCausalLM",
        "models/gpt_oss.py",
        since="0.5.21",
        meaning=Meaning.input_if_highest_is_n,
        embedding=Reach.yes,
        last=Reach.yes,
        notes=_HIGHEST_IS_N,
    ),
    *_begun(_LLAMA, "models/llama.py, apertus.py, exaone_moe.py", "0.5.22"),
    _sglang(
        _all(_LLAMA),
        "models/llama.py, apertus.py, exaone_moe.py",
        since="0.5.22",
        embedding=Reach.yes,
    ),
    *_begun(_LLAMA4, "models/llama4.py, glm4_moe.py, longcat_flash.py", "0.5.21"),
    _sglang(
        _all(_LLAMA4),
        "models/llama4.py, glm4_moe.py, longcat_flash.py",
        since="0.5.21",
        embedding=Reach.yes,
    ),
    *_begun(
        _QWEN,
        "models/qwen2.py, qwen3.py, qwen3_vl.py, bailing_moe.py",
        "0.5.21",
        patch=COPY_PATCH,
    ),
    _sglang(
        _all(_QWEN),
        "models/qwen2.py, qwen3.py, qwen3_vl.py, bailing_moe.py",
        since="0.5.21",
        embedding=Reach.yes,
    ),
    _sglang(
        _GEMMA3,
        "models/gemma3_causal.py",
        since="0.5.12",
        until="0.5.17",
        embedding=Reach.yes,
        last=Reach.yes,
    ),
    _sglang(
        _GEMMA3,
        "models/gemma3_causal.py",
        since="0.5.17",
        embedding=Reach.no,
        fault=_ALONE,
    ),
    *_begun(
        {"0.5.12": _GEMMA4, "0.5.13": _GEMMA4_UNIFIED},
        "models/gemma4_causal.py",
        "0.5.22",
        embedding=Reach.no,
        fault=_WRITTEN_OVER,
    ),
    _sglang(
        f"{_GEMMA4} {_GEMMA4_UNIFIED}",
        "models/gemma4_causal.py",
        since="0.5.22",
        embedding=Reach.yes,
        last=Reach.yes,
    ),
    _sglang(_QWEN_MOE, "models/qwen2_moe.py", until="0.5.5", patch=COPY_PATCH),
    *(
        _sglang(
            names,
            "models/qwen2_moe.py, qwen3_moe.py, qwen3_next.py, qwen3_5.py",
            since=since,
            embedding=Reach.yes,
            **_FLAGGED,
        )
        for since, names in (
            ("0.5.5", _QWEN_MOE),
            ("0.5.9", _QWEN_NEXT),
            ("0.5.16", "mellum MellumForCausalLM"),
            ("0.5.22", _QWEN_3_5),
        )
    ),
    _sglang(
        "minimax_m2 MiniMaxM2ForCausalLM", "models/minimax_m2.py", since="0.5.6", until="0.5.11"
    ),
    _sglang(
        "minimax_m2 MiniMaxM2ForCausalLM",
        "models/minimax_m2.py",
        since="0.5.11",
        embedding=Reach.yes,
    ),
    _sglang(
        "minimax_m3 MiniMaxM3SparseForCausalLM",
        "models/minimax_m3.py",
        since="0.5.16",
        until="0.5.23",
        embedding=Reach.yes,
    ),
    _sglang(
        "minimax_m3 MiniMaxM3SparseForCausalLM",
        "models/minimax_m3.py",
        since="0.5.23",
        embedding=Reach.yes,
        last=Reach.yes,
    ),
    _sglang(
        "minimax_m3_vl MiniMaxM3SparseForConditionalGeneration",
        "models/minimax_m3_vl.py",
        since="0.5.18",
        until="0.5.23",
        embedding=Reach.yes,
        default_shift=1,
        notes=("its default list goes through the +1 as well",),
    ),
    _sglang(
        "minimax_m3_vl MiniMaxM3SparseForConditionalGeneration",
        "models/minimax_m3_vl.py",
        since="0.5.23",
        embedding=Reach.yes,
        last=Reach.yes,
        default_shift=1,
        notes=("its default list goes through the +1 as well",),
    ),
    _sglang(
        "*",
        "models/*.py",
        embedding=Reach.patch,
        evidence=Evidence.inferred,
        notes=(
            "the rule that every class but those of DeepSeek's kind and gpt_oss follows; a class "
            "without set_eagle3_layers_to_capture, such as kimi_vl, is not served at all",
        ),
    ),
)

_TOP = Place(KEY)
_DFLASH = Place("dflash_config.target_layer_ids", 1)
_OLD_RUNNER = (_TOP, Place(NESTED), _DFLASH)
_NEW_RUNNER = (_TOP, _DFLASH, Place("target_layer_ids", 1))
_NEWER_RUNNER = (*_NEW_RUNNER, Place("dflash_config.layer_ids"), Place("eagle_config.layer_ids"))
_NEW_NAME = "the new model runner, by then the default for some architectures"
_OLD_NAME = "the old model runner (VLLM_USE_V2_MODEL_RUNNER=0)"


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """Where vLLM's releases look for ids: one set of places a model runner."""

    since: str | None
    until: str | None
    places: tuple[Place, ...]
    other_runner: str | None = None
    other_places: tuple[Place, ...] = ()


_VLLM_LOOKUPS = (
    _Lookup(since=None, until="0.22.0", places=(_TOP,)),
    _Lookup(
        since="0.22.0",
        until="0.25.0",
        places=_OLD_RUNNER,
        other_runner=_NEW_NAME,
        other_places=(_TOP,),
    ),
    _Lookup(
        since="0.25.0",
        until="0.27.0",
        places=_OLD_RUNNER,
        other_runner=_NEW_NAME,
        other_places=_NEW_RUNNER,
    ),
    _Lookup(
        since="0.27.0",
        until="0.29.0",
        places=_OLD_RUNNER,
        other_runner=_NEW_NAME,
        other_places=_NEWER_RUNNER,
    ),
    _Lookup(
        since="0.29.0",
        until=None,
        places=_NEWER_RUNNER,
        other_runner=_OLD_NAME,
        other_places=_OLD_RUNNER,
    ),
)


def _vllm(
    classes: str, module: str, since: str | None, until: str | None, **changes: object
) -> list[Rule]:
    """vLLM's row for these classes, once for every range in which ids are looked up elsewhere."""
    row = Rule(
        ecosystem="vllm",
        classes=tuple(classes.split()),
        since=since,
        until=until,
        meaning=Meaning.input,
        source=f"model_executor/models/{module}; v1/worker/gpu_model_runner.py, gpu/spec_decode/eagle",
        evidence=Evidence.read,
    )
    return list(_by_lookup(replace(row, **changes)))  # type: ignore[arg-type]


def _by_lookup(row: Rule) -> Iterator[Rule]:
    for lookup in _VLLM_LOOKUPS:
        since = max(row.since, lookup.since, key=_order) if row.since and lookup.since else None
        since = since or row.since or lookup.since
        until = min(row.until, lookup.until, key=_order) if row.until and lookup.until else None
        until = until or row.until or lookup.until
        if since is None or until is None or _order(since) < _order(until):
            yield replace(
                row,
                since=since,
                until=until,
                places=lookup.places,
                other_runner=lookup.other_runner,
                other_places=lookup.other_places,
            )


def _order(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


_VLLM_DEEPSEEK = (
    "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 kimi_k25 glm_moe_dsa mistral_large_3 "
    "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM "
    "KimiK25ForConditionalGeneration MistralLarge3ForCausalLM"
)
_VLLM_ROWS = (
    *_vllm(
        "*",
        "llama.py, qwen2.py and others",
        None,
        "0.18.0",
        embedding=Reach.patch,
        last=Reach.no,
        patch=EMBEDDING_PATCH,
        notes=("gpt_oss, afmoe and minicpm capture state 0 without a patch",),
    ),
    *_vllm("*", "interfaces.py::EagleModelMixin", "0.18.0", None),
    *_vllm(
        _VLLM_DEEPSEEK,
        "deepseek_v2.py::DeepseekV2Model.forward",
        "0.18.0",
        "0.25.0",
        embedding=Reach.patch,
        last=Reach.no,
        patch=EMBEDDING_PATCH,
    ),
    *_vllm(
        _VLLM_DEEPSEEK,
        "deepseek_v2.py::DeepseekV2Model.forward",
        "0.25.0",
        None,
        embedding=Reach.patch,
        patch=EMBEDDING_PATCH,
    ),
    *_vllm(
        "transformers TransformersForCausalLM TransformersMoEForCausalLM",
        "transformers/base.py::set_aux_hidden_state_layers",
        "0.18.0",
        None,
        wraps_below=1,
        unreached=Lost.refused,
        embedding=Reach.no,
        notes=("a layer is looked up by id - 1, so id 0 is the last one",),
    ),
)

_OTHER_ENGINES = (
    Rule(
        ecosystem="tensorrt_llm",
        classes=("*",),
        meaning=Meaning.output,
        embedding=Reach.no,
        unreached=Lost.unset,
        setting="eagle3_layers_to_capture of its speculative config",
        source="_torch/speculative/eagle3.py::Eagle3OneModelSpecMetadata, speculative/utils.py",
        evidence=Evidence.read,
        notes=(
            "with 5 layers or fewer it refuses to choose by itself; -1 stands for the last state "
            "where hidden states are saved, and sorts behind the others",
            "whether newer releases read the ids of config.json is not known",
        ),
    ),
    Rule(
        ecosystem="llama_cpp",
        classes=("*",),
        meaning=Meaning.derived,
        embedding=Reach.no,
        last=Reach.no,
        source="conversion/llama.py (extract_layers), common/speculative.cpp",
        evidence=Evidence.read,
        notes=(
            "the converter of commit 0274f0fc writes [2, n//2, n-3], taken as inputs of layers, "
            "whatever config.json says; the GGUF's eagle3.extract_layers holds what was written",
        ),
    ),
)

_TRAINERS = (
    Rule(
        ecosystem="specforge",
        classes=("*",),
        meaning=Meaning.output,
        embedding=Reach.no,
        last=Reach.no,
        unreached=Lost.refused,
        twice=Lost.refused,
        count=3,
        lowest=0,
        places=(Place(NESTED),),
        empty_counts=True,
        captured_by="sglang",
        source="algorithms/model_providers.py::resolve_eagle_capture_layers, application/planning.py",
        evidence=Evidence.read,
        notes=(
            "ids go to the setter of the SGLang that captures: on its classes of DeepSeek's kind "
            "from 0.5.13 a list that does not start with 1 is read as inputs of layers",
        ),
    ),
    Rule(
        ecosystem="speculators",
        classes=("*",),
        until="0.5.0",
        meaning=Meaning.output,
        embedding=Reach.no,
        unreached=Lost.refused,
        lowest=0,
        default_shift=1,
        appends_last=True,
        places=(_TOP,),
        source="data_generation/custom_worker.py",
        evidence=Evidence.read,
        notes=("the last id must be n - 1: its state is what the trainer takes as the teacher",),
    ),
    Rule(
        ecosystem="speculators",
        classes=("*",),
        since="0.5.0",
        meaning=Meaning.input,
        unreached=Lost.refused,
        twice=Lost.refused,
        lowest=0,
        appends_last=True,
        places=(_TOP,),
        captured_by="vllm",
        source="models/utils.py::resolve_target_layer_ids, train/data.py",
        evidence=Evidence.read,
        notes=(
            "data generation runs in vLLM and needs id n behind the others: its state is what the "
            "trainer takes as the teacher",
        ),
    ),
    Rule(
        ecosystem="eagle",
        classes=("*",),
        meaning=Meaning.derived,
        embedding=Reach.no,
        last=Reach.no,
        source="eagle/model/modeling_llama_kv.py, eagle/traineagle3/cnets.py",
        evidence=Evidence.read,
        notes=("the layers 2, n//2 and n-3 are written in its code",),
    ),
    Rule(
        ecosystem="modelopt",
        classes=("*",),
        meaning=Meaning.output,
        embedding=Reach.no,
        unreached=Lost.dropped,
        places=(Place(NESTED),),
        source="torch/speculative/plugins/hf_eagle.py, torch/export/plugins/hf_spec_export.py",
        evidence=Evidence.read,
        notes=(
            "id n - 1 is a forward hook on the last layer, in front of the final norm; the state "
            "that its dumps keep as the last one is behind it",
        ),
    ),
    Rule(
        ecosystem="torchspec",
        classes=("*",),
        meaning=Meaning.output,
        embedding=Reach.no,
        places=(Place(NESTED),),
        source="TorchSpec's engines and tools/convert_to_hf.py",
        evidence=Evidence.read,
        notes=("its export of a kimi_k2 drafter for vLLM adds 1 to the ids",),
    ),
)

RULES: tuple[Rule, ...] = (*_SGLANG_ROWS, *_VLLM_ROWS, *_OTHER_ENGINES, *_TRAINERS)

ENGINES = ("sglang", "vllm", "tensorrt_llm", "llama_cpp")
TRAINERS = ("specforge", "speculators", "eagle", "modelopt", "torchspec")

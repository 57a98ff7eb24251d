"""What an engine does with the rest of a drafter: norms, biases, embedding, head, d2t, rope.

A row of `SERVING` holds for drafters of some architectures in some releases, with the ranges and the
evidence of `eagle3.conventions`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from eagle3.conventions import KEY, NESTED, Evidence
from eagle3.engines import plain_class, unread
from eagle3.errors import BadInput
from eagle3.releases import holds, parse_version


@dataclass(frozen=True)
class Switch:
    """How an engine learns of one of a drafter's switches, named as in `eagle3.form`."""

    places: tuple[str, ...] = ()  # dotted paths in config.json, the first that has it counts
    default: bool = False  # the value where none has it; with no places, the value it always is
    any_of: bool = False  # it is on where any of the places says so

    @property
    def honoured(self) -> bool:
        """Whether the config can set it at all."""
        return bool(self.places)

    def value(self, config: Mapping[str, Any]) -> bool:
        """What the engine does for this config.json."""
        said = [bool(found) for path in self.places if (found := _found(config, path)) is not None]
        if not said:
            return self.default
        return any(said) if self.any_of else said[0]


def _found(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


class Unknown(str, Enum):
    """What becomes of a tensor that the engine has no place for."""

    skipped = "skipped"  # in silence
    warned = "warned"
    refused = "refused"  # the server does not start


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What one engine does with drafters of some architectures, in some releases."""

    ecosystem: str
    drafters: tuple[str, ...]  # architectures in a drafter's config.json; ("*",): any other
    since: str | None = None
    until: str | None = None
    norm_before_residual: Switch = Switch()
    norm_before_fc: Switch = Switch()
    fc_norm: Switch = Switch()
    feedback_normed: Switch = Switch()
    attention_bias: Switch = Switch()
    mlp_bias: Switch = Switch()
    fc_bias: Switch = Switch()
    qk_norm: Switch = Switch()
    blocks: tuple[str, ...] = ("midlayer.", "layers.0.")  # how the first layer's tensors may start
    architectures: tuple[str, ...] = ()  # all that the engine knows; empty: not known
    # In a config of speculators' format, a missing norm_before_residual counts as this.
    speculators_residual_default: bool | None = None
    deeper_norm: str | None = None  # the norm in front of the attention of layers >= 1
    max_layers: int | None = None
    num_aux: tuple[str, ...] = ()  # places that give the number of chunks; then it is 3
    fc_by_width: bool = False  # fc is applied only where A·H differs from the drafter's width
    unknown: Unknown
    embedding: str  # whose embedding is used
    own_embedding_kept: bool  # whether a trained embedding in the file is used
    head: str  # whose head is used
    d2t: str = "offset"  # how the checkpoint's d2t is read
    d2t_missing: str  # what happens without d2t where the vocabularies differ
    interleaved_rope: bool = False
    yarn_mscale: bool = True  # yarn's mscale and mscale_all_dim are read
    source: str
    evidence: Evidence
    notes: tuple[str, ...] = ()


def _at(name: str, *, nested: bool = False) -> Switch:
    """A switch at the config's top level; with `nested`, in eagle_config before that."""
    return Switch((f"eagle_config.{name}", name) if nested else (name,))


_SGLANG_HEAD = (
    "the target's where draft_vocab_size is null, otherwise its own, whether the file has it or not"
)
_SGLANG_LLAMA = Serving(
    ecosystem="sglang",
    drafters=("*",),
    until="0.5.12",
    blocks=("midlayer.",),
    architectures=("LlamaForCausalLMEagle3",),
    fc_bias=_at("bias"),
    deeper_norm="hidden_norm",
    fc_by_width=True,
    max_layers=1,
    unknown=Unknown.skipped,
    embedding="the target's, unless target_hidden_size differs from hidden_size",
    own_embedding_kept=False,
    head=_SGLANG_HEAD,
    d2t_missing="draft ids are taken as target ids",
    yarn_mscale=False,
    source="models/llama_eagle3.py, speculative/eagle_worker*.py, models/llama.py::set_embed",
    evidence=Evidence.read,
)
_SGLANG_NORMS = replace(
    _SGLANG_LLAMA,
    since="0.5.12",
    until="0.5.16",
    max_layers=None,
    blocks=("midlayer.", "layers.0."),
    architectures=("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
    fc_norm=Switch(("fc_norm", "use_aux_norm"), any_of=True),
    feedback_normed=_at("norm_output"),
    num_aux=("num_aux_hidden_states", NESTED),
)
_SGLANG_YARN = replace(_SGLANG_NORMS, since="0.5.16", until="0.5.17", yarn_mscale=True)
_SGLANG_INPUT_NORM = replace(
    _SGLANG_YARN,
    since="0.5.17",
    until=None,
    norm_before_fc=_at("norm_before_fc", nested=True),
)
_SGLANG_MLA = Serving(
    ecosystem="sglang",
    drafters=("Eagle3DeepseekV2ForCausalLM",),
    since="0.5.12",
    until="0.5.13",
    architectures=("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"),
    fc_bias=_at("bias"),
    max_layers=1,
    num_aux=(NESTED, KEY),
    fc_by_width=True,
    unknown=Unknown.warned,
    embedding="the target's, unless target_hidden_size differs from hidden_size",
    own_embedding_kept=False,
    head=_SGLANG_HEAD,
    d2t_missing="draft ids are taken as target ids",
    interleaved_rope=True,
    source="models/kimi_k25_eagle3.py",
    evidence=Evidence.read,
)
_SGLANG_MLA_NORMS = replace(
    _SGLANG_MLA,
    since="0.5.13",
    until=None,
    fc_norm=Switch(("fc_norm", "use_aux_norm"), any_of=True),
    feedback_normed=_at("norm_output"),
)

_VLLM_LLAMA = Serving(
    ecosystem="vllm",
    drafters=("*",),
    until="0.16.0",
    norm_before_residual=_at("norm_before_residual"),
    speculators_residual_default=True,
    mlp_bias=_at("mlp_bias"),
    deeper_norm="input_layernorm",
    unknown=Unknown.refused,
    embedding="its own where the file has one that differs from the target's, otherwise the target's",
    own_embedding_kept=True,
    head="its own where the file has one that differs from the target's, otherwise the target's",
    d2t_missing="draft ids are taken as target ids (a table of zero offsets)",
    yarn_mscale=False,
    source="model_executor/models/llama_eagle3.py, v1/spec_decode/llm_base_proposer.py",
    evidence=Evidence.read,
)
_VLLM_BIAS = replace(
    _VLLM_LLAMA, since="0.16.0", until="0.18.0", attention_bias=_at("attention_bias")
)
_VLLM_INPUT_NORM = replace(
    _VLLM_BIAS, since="0.18.0", until="0.22.0", norm_before_fc=_at("norm_before_fc", nested=True)
)
_VLLM_NORMS = replace(
    _VLLM_INPUT_NORM,
    since="0.22.0",
    until="0.30.0",
    fc_norm=_at("fc_norm"),
    feedback_normed=_at("norm_output"),
    num_aux=("num_aux_hidden_states", NESTED),
)
_VLLM_YARN = replace(_VLLM_NORMS, since="0.30.0", until=None, yarn_mscale=True)
_VLLM_QWEN3 = replace(
    _VLLM_NORMS,
    drafters=("Eagle3Qwen3ForCausalLM",),
    since="0.24.0",
    qk_norm=Switch((), default=True),
    num_aux=("num_aux_layers", "num_aux_hidden_states", KEY, NESTED),
    source="model_executor/models/qwen3_eagle3.py",
)
_VLLM_QWEN3_YARN = replace(_VLLM_QWEN3, since="0.30.0", until=None, yarn_mscale=True)
_VLLM_MLA = replace(
    _VLLM_LLAMA,
    drafters=("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    since="0.18.0",
    until="0.22.0",
    mlp_bias=Switch(),
    interleaved_rope=True,
    yarn_mscale=True,  # deepseek_yarn has always read it
    source="model_executor/models/deepseek_eagle3.py",
)
_VLLM_MLA_NORMS = replace(
    _VLLM_MLA,
    since="0.22.0",
    until=None,
    fc_norm=_at("fc_norm"),
    feedback_normed=_at("norm_output"),
    num_aux=("num_aux_hidden_states", NESTED),
)

SERVING: tuple[Serving, ...] = (
    _SGLANG_LLAMA,
    _SGLANG_NORMS,
    _SGLANG_YARN,
    _SGLANG_INPUT_NORM,
    _SGLANG_MLA,
    _SGLANG_MLA_NORMS,
    _VLLM_LLAMA,
    _VLLM_BIAS,
    _VLLM_INPUT_NORM,
    _VLLM_NORMS,
    _VLLM_YARN,
    _VLLM_QWEN3,
    _VLLM_QWEN3_YARN,
    _VLLM_MLA,
    _VLLM_MLA_NORMS,
    Serving(
        ecosystem="tensorrt_llm",
        drafters=("*",),
        norm_before_fc=Switch(("eagle_config.norm_before_fc",)),
        fc_norm=_at("fc_norm"),
        feedback_normed=Switch(("eagle_config.return_hidden_post_norm", "norm_output")),
        attention_bias=_at("attention_bias"),
        fc_bias=_at("bias"),
        deeper_norm="hidden_norm",
        unknown=Unknown.skipped,
        embedding="the target's, unless target_hidden_size differs from hidden_size",
        own_embedding_kept=False,
        head="its own where the file has one, otherwise the target's",
        d2t_missing="draft ids are taken as target ids",
        source="_torch/models/modeling_speculative.py",
        evidence=Evidence.read,
    ),
    Serving(
        ecosystem="llama_cpp",
        drafters=("*",),
        norm_before_residual=_at("norm_before_residual"),
        max_layers=1,
        unknown=Unknown.refused,
        embedding="its own where the file has one, otherwise the target's",
        own_embedding_kept=True,
        head="its own where the file has one, otherwise the target's",
        d2t="offset, made absolute in the GGUF",
        d2t_missing="draft ids are taken as target ids",
        source="conversion/llama.py, src/models/eagle3.cpp",
        evidence=Evidence.inferred,
    ),
)

SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "feedback_normed",
    "attention_bias",
    "mlp_bias",
    "fc_bias",
    "qk_norm",
)


def serving_for(ecosystem: str, version: str | None, architecture: str | None) -> Serving:
    """The row for a drafter's architecture (config.json's `architectures[0]`) in a release.

    Without a version the newest row holds, which the notes say. Raises BadInput where the engine is
    unknown or had no place for such a drafter yet.
    """
    rows = [row for row in SERVING if row.ecosystem == ecosystem]
    if not rows:
        names = ", ".join(dict.fromkeys(row.ecosystem for row in SERVING))
        raise BadInput(f"there is no engine '{ecosystem}'; known are {names}")
    wanted = plain_class(architecture or "")
    own = [row for row in rows if wanted in map(plain_class, row.drafters)]
    rows = own or [row for row in rows if row.drafters == ("*",)]
    if version is None:
        row = rows[-1]
        since = f" from {row.since} on" if row.since else ""
        return replace(row, notes=(*row.notes, f"no version was given; this holds{since}"))
    key = parse_version(version)
    for row in rows:
        if holds(row.since, row.until, key):
            break
    else:
        raise BadInput(
            f"{ecosystem} {version} has no place for a drafter of {architecture}; it has one from "
            f"{rows[0].since} on"
        )
    if outside := unread(ecosystem, version):
        return replace(row, evidence=Evidence.inferred, notes=(*row.notes, outside))
    return row

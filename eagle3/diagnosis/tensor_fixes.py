"""Fixes that rewrite the checkpoint's tensors: the same drafter, laid out as engines read it."""

from __future__ import annotations

from eagle3.conventions import Evidence
from eagle3.diagnosis import rewrites
from eagle3.diagnosis.fix import CODE, EVERY, TRAINING, Case, Fix
from eagle3.diagnosis.patched_config import COUNT
from eagle3.doctor.switches import line
from eagle3.wiring import (
    D2T,
    Concat,
    Embedding,
    Feedback,
    Head,
    HeadInput,
    InputNorms,
    Parts,
    Rotation,
)

DOUBLE_PATCH = (
    "patch models/llama_eagle3.py: `self.hidden_norm(self.input_layernorm(hidden_states))` in the place "
    "of `self.hidden_norm(hidden_states)` in the first layer"
)

EXPORTED = (
    "lm_head.weight as it was trained (SpecForge), exported again; of a trainer that keeps the target's "
    "rows (speculators), what follows"
)


def of_d2t(case: Case) -> tuple[Fix, ...]:
    """The table as offsets, which every engine reads."""
    whole = case.form.draft_vocab.value == case.form.vocab.value
    reading = case.trained.d2t
    unread = whole and (case.name == "vllm" or reading is D2T.offset)
    if unread and reading is not D2T.identity:
        return (case.rewritten(rewrites.head_in_target_order(reading.value)),)
    if reading is D2T.offset:
        return (case.none("export the mapping that was trained with (vocab_mapping.pt) as d2t"),)
    return (case.rewritten(rewrites.offsets(reading.value)),)


def of_table() -> Fix:
    """For a d2t that does not fit t2d, the program that makes it again."""
    snippet = rewrites.table_of_mask()
    return Fix(
        engine=EVERY,
        possible=True,
        lines=rewrites.program_lines(snippet),
        evidence=Evidence.read.value,
        source="the rows of every engine, which read d2t as offsets",
        snippet=snippet,
    )


def of_decoder_layer(case: Case) -> tuple[Fix, ...]:
    """No engine leaves the layer out; one that adds nothing does the same."""
    form = case.form
    if form.norm_before_residual.value or form.feedback_normed.value:
        return (case.none("train again with the decoder layer, which every engine runs"),)
    return (case.rewritten(rewrites.idle_layers()),)


def of_concat(case: Case) -> tuple[Fix, ...]:
    """Embedding first, as everybody has it."""
    if case.trained.concat is Concat.embedding_first:
        return (case.none(CODE),)
    return (case.rewritten(rewrites.swapped_halves()),)


def of_input_norms(case: Case) -> tuple[Fix, ...]:
    """Two tensors change places; two norms in a row are no one norm."""
    if case.trained.input_norms is InputNorms.swapped:
        return (case.rewritten(rewrites.swapped_norms()),)
    if case.trained.input_norms is InputNorms.own:
        return (case.none(CODE),)
    patch = [DOUBLE_PATCH] if case.name in ("sglang", "vllm") else []
    again = (
        "train again with one norm (ModelOpt: layers[0].input_layernorm an Identity in front of the "
        "hidden state)"
    )
    return (case.none(*patch, again),)


def of_rotation(case: Case) -> tuple[Fix, ...]:
    """The rows of q and k lie as the engine pairs them."""
    there = case.run.rotation if case.run is not None else Rotation.half_split
    if case.trained.rotation is Rotation.interleaved and there is Rotation.half_split:
        return (case.rewritten(rewrites.half_split_rows(case.form.head_dim.value)),)
    return (
        case.none("serve it as a Llama drafter (LlamaForCausalLMEagle3), whose rotation it has"),
    )


def of_deeper_norm(case: Case) -> tuple[Fix, ...]:
    """The norm under the name that the engine looks for."""
    layers = case.form.num_layers.value
    if case.trained.deeper_norm is Parts.dropped:
        return (case.rewritten(rewrites.ones_in_deeper_norms(layers)),)
    name = case.serving.deeper_norm if case.serving is not None else None
    if name is None or name == "input_layernorm":
        return (case.none("no engine but SGLang and TensorRT-LLM looks for another name"),)
    return (case.rewritten(rewrites.deeper_norms_as(name, layers)),)


def of_head(case: Case) -> tuple[Fix, ...]:
    """The head that was trained with: the target's rows, or the drafter's own."""
    whole = case.form.draft_vocab.value == case.form.vocab.value
    if case.trained.head is Head.own:
        edit = case.edit()
        edit.put("draft_vocab_size", case.form.draft_vocab.value)
        return (case.edited(edit),)
    first = None if case.trained.d2t is D2T.offset else "the program for d2t, run before this one"
    lines = (EXPORTED,) if case.form.head.value == Head.target.value else ()
    rows = case.fix(*lines, snippet=rewrites.head_of_target(), needs=first)
    if whole and case.name == "sglang":
        edit = case.edit()
        edit.put("draft_vocab_size", None)
        return (case.edited(edit), rows)
    return (rows,)


def of_embedding(case: Case) -> tuple[Fix, ...]:
    """The table that was trained with."""
    if case.trained.embedding is Embedding.target:
        return (
            case.rewritten(rewrites.without("embed_tokens[.]weight", "the drafter's embedding")),
        )
    ways = ["serve it with vLLM, which keeps the file's embedding"]
    serving, form = case.serving, case.form
    counted = case.name == "sglang" and serving is not None and serving.num_aux[:1] == (COUNT,)
    if counted and not form.fc_norm.value:
        # set_embed leaves a drafter alone whose target_hidden_size is not its own; fc is as wide.
        fed = form.num_aux.value * form.target_hidden.value
        ways.append(
            f"from 0.5.15 on, in a copy of config.json for SGLang alone, "
            f"{line('target_hidden_size', fed)} and {line(COUNT, 1)}, so that set_embed leaves "
            "the table alone (inferred from models/llama.py::set_embed; try it first)"
        )
    ways.append("train with a frozen embedding (the target's) where it is to be served there")
    return (case.none(*ways),)


def of_head_input(case: Case) -> tuple[Fix, ...]:
    """Without the norm's weight the ranking is that of no norm at all."""
    if case.trained.head_input is HeadInput.normed:
        return (case.none(CODE),)
    again = "train with the norm: leave norm_output out of the draft model's config"
    if case.trained.feedback is Feedback.normed:
        return (case.none(again),)
    return (
        case.fix(
            snippet=rewrites.ones_before_head(),
            needs="greedy chains (topk 1)",
            note="the tokens are those of training, their probabilities, which trees and sampling go "
            "by, are not",
        ),
        Fix(
            engine=TRAINING,
            possible=True,
            lines=(again,),
            evidence=Evidence.read.value,
            source="specforge/modeling/draft/llama3_eagle.py",
        ),
    )

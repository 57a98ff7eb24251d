"""Faults of tokens and vocabulary: d2t, t2d, head, embedding, templates."""

from __future__ import annotations

import torch

from tests.faults.edits import (
    absolute,
    ascending_head,
    by_frequency,
    head_permuted,
    noise,
    other_template,
    plain_head,
    table_of,
    template_in_config,
    trained,
    with_nan,
)
from tests.faults.form import Planted, Row
from tests.faults.planting import drop, in_turn, of_d2t, of_t2d, weights

ROWS: tuple[Row, ...] = (
    Row(
        number=21,
        fault="d2t holds target ids where offsets are read, or the reverse",
        serving="Nonsense is drafted: acceptance about 0 but for a few low ids.",
        planted=(
            Planted(
                how="d2t holds target ids",
                edit=of_d2t(absolute),
                name="d2t-absolute",
                reads="d2t holds target ids, but every engine and trainer reads offsets",
            ),
            Planted(
                how="d2t holds target ids, and the file has no t2d",
                edit=in_turn(of_d2t(absolute), drop("t2d")),
                name="d2t-absolute",
                reads="d2t holds target ids, but every engine and trainer reads offsets",
            ),
        ),
    ),
    Row(
        number=22,
        fault="d2t is all zero, or is not there",
        serving="Only tokens of low ids are ever drafted right.",
        planted=(
            Planted(
                how="d2t is zero",
                edit=of_d2t(torch.zeros_like),
                name="d2t-zeros",
                reads="d2t is all zero: the draft vocabulary would be the target's first 96 ids",
            ),
            Planted(
                how="d2t counts 0, 1, 2, …",
                edit=of_d2t(lambda d2t: torch.arange(len(d2t))),
                name="d2t-arange",
                reads="read as offsets, draft token i is target token 2i",
            ),
            Planted(
                how="d2t is taken out of the file",
                edit=drop("d2t"),
                name="d2t-missing",
                reads="the file has no d2t, but 96 draft tokens stand for some of 640",
                refused="missing d2t",
            ),
        ),
    ),
    Row(
        number=23,
        fault="d2t and t2d name other tokens, or the same in another order",
        serving="The drafter has learnt a permutation of its words: acceptance about 0.",
        planted=(
            Planted(
                how="t2d is moved by one id",
                edit=of_t2d(lambda t2d: t2d.roll(1)),
                name="d2t-and-t2d-disagree",
                reads="become target tokens that t2d does not name",
            ),
            Planted(
                how="d2t and lm_head.weight in order of frequency, t2d picks in ascending order",
                edit=weights(by_frequency),
                name="d2t-unsorted",
                reads="d2t does not ascend, but t2d picks the teacher's logits in ascending order",
            ),
            Planted(
                how="t2d is all true, as before a mapping is loaded",
                edit=of_t2d(torch.ones_like),
                name="t2d-count",
                reads="t2d names 640 target tokens, the draft vocabulary has 96",
            ),
        ),
    ),
    Row(
        number=24,
        fault="d2t was cast to a number type that does not hold ids",
        serving="Nearly all tokens above id 256 become neighbours of themselves: acceptance about 0.",
        planted=(
            Planted(
                how="d2t is cast to bf16, as a whole state dict is",
                edit=of_d2t(lambda d2t: d2t.bfloat16()),
                name="d2t-type",
                reads="d2t holds BF16, everybody writes I64",
                also=("d2t-rounded",),
                refused="d2t holds torch.bfloat16",
            ),
            Planted(
                how="d2t went through bf16 and back to int64",
                edit=of_d2t(lambda d2t: d2t.bfloat16().long()),
                name="d2t-rounded",
                reads="is a number that bf16 holds",
            ),
            Planted(
                how="d2t is cast to int32, which is exact and only noted",
                edit=of_d2t(lambda d2t: d2t.int()),
                name="d2t-type",
                reads="d2t holds I32, everybody writes I64",
            ),
        ),
    ),
    Row(
        number=25,
        fault="The head's rows are of another vocabulary order, or the target's head takes its place",
        serving="Fluent words, and the wrong ones: acceptance about 0.",
        planted=(
            Planted(
                how="lm_head.weight holds the target's first rows in place of those that d2t names",
                edit=plain_head,
                name="head-in-another-order",
                reads="its rows are the target's head in plain order",
            ),
            Planted(
                how="lm_head.weight holds the target's rows in ascending order, d2t is in order of "
                "frequency, and there is no t2d, as ModelOpt writes it",
                edit=ascending_head,
                name="head-in-another-order",
                reads="its rows are the target's head in ascending order",
            ),
            Planted(
                how="lm_head.weight is taken out of the file",
                edit=drop("lm_head.weight"),
                name="head-missing",
                reads="the file has no lm_head.weight",
            ),
        ),
        unseen=(
            Planted(
                how="the rows of a trained lm_head.weight are moved by one",
                edit=weights(head_permuted),
            ),
        ),
        cannot="A head that was trained is like no table of the target, so its rows in any order are as "
        "consistent as in the right one.",
        instead="job=drafter_test: accuracy near 0, or wiring.head=target far above it",
    ),
    Row(
        number=26,
        fault="The embedding is another one: a trained table is replaced, or the file's was made up",
        serving="From a small loss (a table that was trained a little) to acceptance about 0 (a random "
        "one).",
        planted=(
            Planted(
                how="embed_tokens.weight differs a little from the target's, and the engine is SGLang",
                layouts=("specforge",),
                only="vLLM, which serves it, keeps the file's table",
                edit=table_of(trained),
                name="embedding-replaced",
                reads="replaces it by the target's in silence",
            ),
            Planted(
                how="embed_tokens.weight is random, as a fresh model exports it, and the engine is vLLM",
                edit={"specforge": table_of(noise), "speculators": table_of(noise)},
                variant="for vLLM",
                name="embedding-unrelated",
                reads="the file's embedding is unrelated to the target's",
            ),
            Planted(
                how="embed_tokens.weight holds NaN",
                edit=table_of(with_nan),
                variant="for vLLM",
                name="embedding-not-finite",
                reads="sampled rows of the file's embedding hold NaN or infinity",
                refused="embed_tokens.weight holds NaN or infinity",
            ),
        ),
    ),
    Row(
        number=27,
        fault="Tokenizer or chat template of training and of service differ",
        serving="Good on held-out training text, low on served prompts.",
        planted=(
            Planted(
                how="the drafter's folder holds another chat_template.jinja than the target's",
                edit=other_template,
                name="tokenizer-differs",
                reads="chat_template.jinja is not the target's",
            ),
            Planted(
                how="the drafter's template stands in tokenizer_config.json, and is another",
                edit=template_in_config,
                name="tokenizer-differs",
                reads="chat_template of tokenizer_config.json is not the target's",
            ),
        ),
        cannot="Most drafters ship neither, and which template the training text was made with stands "
        "in no file.",
        instead="the prompt's hash of job=inspect_data against that of a served prompt",
    ),
    Row(
        number=28,
        fault="The draft vocabulary covers the domain badly",
        serving="A ceiling on acceptance that no wiring lifts.",
        cannot="The files are consistent, and the wiring is right: which tokens the domain needs is a "
        "matter of the text.",
        instead="`coverage` of job=drafter_test, the share of the target's tokens that can be drafted",
    ),
)

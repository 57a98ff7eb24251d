"""Faults of alignment, rope, attention, caches, numbers and reports."""

from __future__ import annotations

import torch

from tests.faults.drafters import SGLANG
from tests.faults.edits import (
    ALL_DUMPS,
    KIMI_YARN,
    MODELOPT_YARN,
    NOT_IN_SGLANG,
    doubled_bos,
    ids,
    in_pairs,
    mask_early,
    masked,
    not_a_number,
    of_any_target,
    other_ids,
    other_token,
    overflowed,
    overflowing_fc,
    padded,
    rolled,
    sglang,
    turns,
)
from tests.faults.form import By, Planted, Row
from tests.faults.planting import dump, edit_json, in_turn, layer, of_norm, weights
from tests.faults.sound import LONG

ROWS: tuple[Row, ...] = (
    Row(
        number=29,
        fault="A state stands beside the wrong token: (h[t], x[t]) for (h[t], x[t+1])",
        serving="About as good as a table of bigrams.",
        planted=(
            Planted(
                how="dump: every slot's rows are moved by one position",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=rolled(0, 1, 2, 3),
                name="states-shifted",
                reads="belongs to position t+1 of input_ids",
            ),
        ),
        cannot="How a trainer or an engine pairs sound rows stands in its code.",
        instead="job=drafter_test, whose pairing is the engines': it is far below the training log",
    ),
    Row(
        number=30,
        fault="The teacher is not shifted as the tokens are",
        serving="Acceptance about 0, while accuracy against the token before is high.",
        planted=(
            Planted(
                how="dump: the last slot alone is moved by one position",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=rolled(3),
                name="states-shifted",
                reads="belongs to position t+1 of input_ids",
            ),
        ),
        cannot="How a trainer shifts a sound teacher stands in its code.",
        instead="job=drafter_test job.metrics=[ours,specforge,speculators] against the training log",
    ),
    Row(
        number=31,
        fault="The loss mask takes prompt tokens in, or is off by one",
        serving="Nothing: only figures move, by the ends of the spans.",
        planted=(
            Planted(
                how="dump: the mask covers every position",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=masked(first=False),
                first_layers=0,
                name="mask-covers-everything",
                reads="covers every position",
                also=("mask-covers-bos",),
            ),
            Planted(
                how="dump: the mask covers the first token",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=masked(first=True),
                first_layers=0,
                name="mask-covers-first-token",
                reads="covers the first token, which nothing can predict",
                also=("mask-covers-bos",),
            ),
        ),
        unseen=(
            Planted(
                how="dump: the mask begins one token early",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(mask_early),
            ),
        ),
        cannot="Inside a text nothing tells the last prompt token from the first written one, unless it "
        "is one of the target's special tokens.",
        instead="the first prompt's ids in inspect_data's result, read by a person",
    ),
    Row(
        number=32,
        fault="The ids are not those that the states were made of: bos twice, or cut off",
        serving="Prompts look other to the drafter than in training; acceptance is lower.",
        planted=(
            Planted(
                how="dump: one text begins with bos twice",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(doubled_bos),
                name="doubled-bos",
                reads="begin with the bos token twice",
            ),
            Planted(
                how="dump: input_ids have one token more than the states have rows",
                by=By.samples,
                layouts=ALL_DUMPS,
                edit=dump(other_token),
                refused="lengths differ: input_ids",
                reads="lengths differ: input_ids",
            ),
            Planted(
                how="dump: token_ids of a file are not the dataset's",
                by=By.samples,
                layouts=("speculators",),
                only="they store the ids once",
                edit=other_ids,
                refused="token_ids differ at position 5",
                reads="token_ids differ at position 5 from the input_ids of the dataset's row 0",
            ),
        ),
    ),
    Row(
        number=33,
        fault="Padding of zero rows is taken for text",
        serving="Little; in training it is learnt from, in figures it lowers accuracy.",
        planted=(
            Planted(
                how="dump: four rows of zeros behind each text, not in the mask",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=padded(0),
                first_layers=0,
                name="zero-tail",
                reads="end in rows that are zero in every slot",
            ),
            Planted(
                how="dump: the same, in the mask",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=padded(1),
                first_layers=0,
                name="zero-tail",
                reads="24 of them in the loss mask",
                also=("mask-covers-pad",),
                refused="padding was stored as text",
            ),
        ),
    ),
    Row(
        number=34,
        fault="The rotary base in service is not the one of training",
        serving="Good near the start of the context, decaying with length.",
        planted=(
            Planted(
                how="config.json states no rope_theta, the target's is 5000000",
                edit=layer(rope_theta=None),
                target=lambda folder, _: edit_json(
                    folder / "config.json", lambda values: values.update(rope_theta=5e6)
                ),
                data=of_any_target,
                name="rope-theta-missing",
                reads="states no rope_theta: trainers and engines take 10000; the target's is 5e+06",
            ),
            Planted(
                how="config.json: rope_theta is 1000000, and EAGLE's trainer takes 10000",
                layouts=("specforge",),
                only="EAGLE's trainer does not write it",
                edit=in_turn(layer(rope_theta=1e6), ids([1, 3, 4], [])["specforge"]),
                data=None,
                trainer="eagle",
                name="rope-theta-not-trained",
                reads="EAGLE's trainer rotates with base 10000 whatever the config says; it says 1e+06",
            ),
            Planted(
                how="the file keeps its rotary frequencies (rotary_emb.inv_freq), and they are of base "
                "1000000",
                edit=turns(1e6),
                name="rope-table-differs",
                reads="rotary frequencies are of base 1e+06, config.json makes them of base 10000",
            ),
        ),
        unseen=(
            Planted(
                how="config.json: rope_theta is 1000000, trained with 10000",
                edit=layer(rope_theta=1e6),
            ),
        ),
        cannot="A base that config.json states and that was not trained with leaves no trace: new files "
        "do not keep the frequencies.",
        instead="accept length by position in the context",
    ),
    Row(
        number=35,
        fault="Rope scaling came in at the export, or its mscale gets lost in the engine",
        serving="Lower acceptance at every length, or at long ones.",
        planted=(
            Planted(
                how="config.json: the rope scaling that ModelOpt's export writes over a plain one",
                layouts=("specforge",),
                only="ModelOpt writes flat configs",
                edit=layer(rope_scaling=MODELOPT_YARN),
                name="rope-from-export",
                reads="is what ModelOpt's export writes over a plain rotary embedding",
            ),
            Planted(
                how="config.json: yarn with mscale, and the engine is SGLang 0.5.9",
                layouts=("specforge",),
                only="vLLM, which serves it, reads mscale",
                edit=layer(rope_scaling=KIMI_YARN),
                engine=sglang("0.5.9"),
                name="yarn-mscale-dropped",
                reads="it scales cos and sin by 1.416, training by 1.000",
            ),
        ),
    ),
    Row(
        number=36,
        fault="Rotation in pairs where training rotated in halves, or the reverse",
        serving="Low acceptance at every step; the first positions are spared.",
        unseen=(
            Planted(
                how="the rows of q and k are put in pairs",
                edit=weights(in_pairs),
            ),
        ),
        cannot="The rows of q and k are permuted between the two, and no key says which they are in; "
        "the shapes are the same.",
        instead="job=drafter_test against the engine: the same states, another acceptance",
    ),
    Row(
        number=37,
        fault="The position is not counted up from step to step",
        serving="The first drafted token is as trained, deeper ones are worse. A constant offset is "
        "harmless.",
        cannot="Positions are made by the trainer's and the engine's code and stored nowhere.",
        instead="step_accuracy of job=drafter_test against the engine's acceptance by position",
    ),
    Row(
        number=38,
        fault="Training masked other keys at deeper steps than service shows",
        serving="The first drafted token is fine, from the third on slightly worse.",
        cannot="The mask is a matter of the trainer's release, which no file names.",
        instead="job=drafter_test job.metrics=[ours,specforge,speculators]: deeper steps that differ",
    ),
    Row(
        number=39,
        fault="The drafter's cache is not rebuilt from the target's states, or is stale",
        serving="The first round is fine, later rounds are worse.",
        cannot="It happens in a running engine alone; drafter_test's own cache is rebuilt, and is what "
        "an engine is held against.",
        instead="the engine's acceptance by round against job=drafter_test",
    ),
    Row(
        number=40,
        fault="A sliding window that was not trained, or one that gets lost; too few positions",
        serving="As trained in short contexts, falling behind the window or the last position.",
        planted=(
            Planted(
                how="config.json: max_position_embeddings is 256, the target's is 1024",
                edit=layer(max_position_embeddings=256),
                name="context-too-short",
                reads=f"max_position_embeddings is 256, the target's is {LONG}",
            ),
            Planted(
                how="config.json: a sliding window, as speculators trains by default, and SGLang",
                layouts=("speculators",),
                only="SpecForge trains no window",
                edit=layer(layer_types=["sliding_attention"], sliding_window=2048),
                engine=SGLANG,
                name="window-ignored",
                reads="was trained with a sliding window of 2048; SGLang reads none of it",
                also=(*NOT_IN_SGLANG, "norm-before-residual-ignored"),
            ),
            Planted(
                how="--speculative-draft-window-size for a drafter that was trained without",
                layouts=("specforge",),
                only="SGLang does not load it",
                engine=sglang("0.5.23", speculative_draft_window_size=128),
                name="flag-draft-window-size",
                reads="the drafter was trained without one",
            ),
        ),
    ),
    Row(
        number=41,
        fault="float16 overflows where states are large; NaN in a state",
        serving="One token again and again, or samples that trainers leave out in silence.",
        planted=(
            Planted(
                how="dump: a large component, stored in float16",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(overflowed),
                first_layers=0,
                name="fp16-overflow",
                reads="rows hold NaN or infinity",
                refused="holds NaN or infinity in 1 of",
            ),
            Planted(
                how="dump: one NaN",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=dump(not_a_number),
                first_layers=0,
                name="non-finite",
                reads="1 of 147 rows hold NaN or infinity",
                refused="holds NaN or infinity in 1 of",
            ),
            Planted(
                how="the dump that doctor is given is in float16",
                data=dump(lambda s: s.slots.__setitem__(slice(None), [h.half() for h in s.slots])),
                name="data-half-precision",
                reads="is stored as float16",
            ),
            Planted(
                how="a NaN in norm.weight",
                edit=of_norm(lambda weight: weight.index_fill(0, torch.tensor([3]), torch.nan)),
                name="not-finite",
                reads="1 of its 32 numbers are NaN or infinite",
                refused="norm.weight holds NaN or infinity",
            ),
            Planted(
                how="fc.weight is cast to float16 and overflows; doctor does not read matrices",
                by=By.loader,
                edit=weights(overflowing_fc),
                reads="fc.weight holds NaN or infinity",
                refused="fc.weight holds NaN or infinity",
            ),
        ),
    ),
    Row(
        number=42,
        fault="Accept lengths that were counted in different ways",
        serving="A gap of exactly about 1 (the bonus token), or of a smooth factor.",
        cannot="How a number was counted stands in no file of a drafter.",
        instead="every figure of job=drafter_test says what it counts; compare those of one name",
    ),
    Row(
        number=43,
        fault="Prompts without the drafter's cache (prefix hits, the tail of chunked prefill)",
        serving="Lower acceptance in the first round.",
        cannot="It happens in a running engine alone.",
        instead="the same prompts with the engine's prefix cache on and off",
    ),
)

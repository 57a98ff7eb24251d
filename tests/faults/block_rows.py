"""Faults of the draft block: norms, residual, feedback, names, sizes, and the teacher."""

from __future__ import annotations

import torch

from tests.faults.drafters import SGLANG
from tests.faults.edits import (
    ALL_DUMPS,
    FOR_SGLANG,
    NOT_IN_SGLANG,
    as_modelopt,
    earlier_end,
    exchange,
    halves_exchanged,
    ids,
    nested_ids,
    sglang,
    to_layers,
    to_other_block,
    vllm,
)
from tests.faults.form import By, Planted, Row
from tests.faults.planting import (
    captured_states_are,
    config,
    drop,
    in_turn,
    layer,
    nothing,
    of_norm,
    top,
    weights,
)
from tests.faults.sound import STATES

ROWS: tuple[Row, ...] = (
    Row(
        number=10,
        fault="hidden_norm and input_layernorm exchanged, or hidden state before embedding",
        serving="Acceptance about 0.",
        unseen=(
            Planted(
                how="the two norms are exchanged",
                edit=exchange("hidden_norm.weight", "input_layernorm.weight"),
            ),
            Planted(
                how="the halves of q, k and v are exchanged",
                edit=weights(halves_exchanged),
            ),
        ),
        cannot="Both norms have the same shape and may hold any numbers near one, and the halves of q, "
        "k and v are equally wide: exchanged files are as consistent as sound ones.",
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
                only="there the key means something else, as above",
                edit=top(norm_output=True),
                engine=vllm("0.20.0"),
                name="feedback-normed-ignored",
                reads="the drafter was trained with feedback_normed, which vllm 0.20.0",
            ),
            Planted(
                how="config.json: eagle_config.return_hidden_post_norm, which SGLang does not read",
                layouts=("specforge",),
                only="it has no eagle_config",
                edit=config(lambda c: c["eagle_config"].update(return_hidden_post_norm=True)),
                name="feedback-normed-differs",
                reads="the drafter was trained with feedback_normed on",
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
                reads="the file lacks norm.weight",
                refused="missing norm.weight",
            ),
            Planted(
                how="config.json: rms_norm_eps is 0.1",
                edit=layer(rms_norm_eps=0.1),
                name="norm-eps",
                reads="rms_norm_eps is 0.1",
            ),
            Planted(
                how="norm.weight as Gemma keeps it, one less",
                edit=of_norm(lambda weight: weight - 1),
                name="norm-around-zero",
                reads="its weights lie around zero",
            ),
            Planted(
                how="norm.weight is all one among trained norms",
                edit=of_norm(torch.ones_like),
                name="norm-ones",
                reads="exactly one everywhere, while other norms of the file are trained",
            ),
            Planted(
                how="config.json: norm_output is false, so that SpecForge trains without the norm",
                layouts=("specforge",),
                only="there the key does not mean this norm",
                edit=top(norm_output=False),
                name="head-norm-off",
                reads="without the norm in front of the head",
            ),
        ),
    ),
    Row(
        number=15,
        fault="The teacher is not the target: an earlier layer, or the norm left out or applied twice",
        serving="Training accuracy looks fine, and the target's own choices are met far less often.",
        planted=(
            Planted(
                how="dump: the last slot holds state 6, capture.json says that it is the end",
                by=By.inspect_data,
                layouts=ALL_DUMPS,
                edit=earlier_end(6),
                name="wrong-teacher",
                reads="is state 6 and not the target's end (state 8)",
                also={
                    "specforge": ("wrong-state",),
                    "pt_shards": ("wrong-state", "identical-slots"),
                    "speculators": ("wrong-state", "identical-slots"),
                },
            ),
            Planted(
                how="the same, and capture.json says so",
                data=in_turn(earlier_end(7), captured_states_are(*STATES, 7)),
                name="teacher-is-not-the-end",
                reads="the last slot is state 7, not the target's end (state 8)",
                refused={
                    "specforge": "says that hidden_state is state 7, but in this layout it is the "
                    "target's end",
                    "speculators": None,
                },
            ),
        ),
        cannot="A norm that a trainer leaves out or applies once more stands in its code, not in the "
        "dump; a slot on the wrong side of the norm is 7.",
        instead="job=drafter_test with all three truths, which then lie far apart",
    ),
    Row(
        number=16,
        fault="Training norms the hidden state twice (ModelOpt 0.47)",
        serving="The trainer's own evaluation is good, and every engine is lower.",
        planted=(
            Planted(
                how="config.json: eagle_config as ModelOpt's export writes it",
                layouts=("specforge",),
                only="ModelOpt writes flat configs",
                edit=config(as_modelopt),
                name="double-norm-in-training",
                reads="ModelOpt 0.47 applies input_layernorm to the hidden state as well",
            ),
        ),
        cannot="The file tells that ModelOpt wrote it, not which release, so this is a note and no "
        "error.",
        instead="job=drafter_test below the trainer's own evaluation on the same data",
    ),
    Row(
        number=17,
        fault="The norms of further layers are looked for under another name",
        serving="Low acceptance at every step: these norms stay at one.",
        planted=(
            Planted(
                how="a drafter of two layers, and the engine is SGLang",
                variant="two layers",
                edit={"specforge": nested_ids(), "speculators": nothing},
                engine=SGLANG,
                name="deeper-norm-name",
                reads="looks for layers.1.hidden_norm.weight, which the file does not have",
                also={
                    "specforge": (),
                    "speculators": (*NOT_IN_SGLANG, "norm-before-residual-ignored"),
                },
            ),
        ),
    ),
    Row(
        number=18,
        fault="Biases, or the norms of q and k, are passed over in silence",
        serving="Acceptance drops from the first drafted token on.",
        planted=(
            Planted(
                how="a drafter with attention_bias, and an engine that has none",
                variant="attention_bias",
                edit={"specforge": nested_ids(), "speculators": nothing},
                engine={"specforge": SGLANG, "speculators": vllm("0.15.0")},
                name="attention-bias-ignored",
                reads="the drafter was trained with attention_bias, which",
            ),
            Planted(
                how="config.json: attention_bias is taken out, the biases stay in the file",
                variant="attention_bias",
                edit=layer(attention_bias=None),
                name="file-and-config-disagree",
                reads="_proj.bias, but attention_bias is false",
                refused="_proj.bias, but attention_bias is false",
            ),
            Planted(
                how="a Qwen3 drafter, and SGLang, which knows none",
                variant="qwen3",
                edit={
                    "specforge": nested_ids(top(architectures=["LlamaForCausalLMEagle3"])),
                    "speculators": nothing,
                },
                engine=SGLANG,
                name="qk-norm-ignored",
                reads="the drafter was trained with qk_norm, which sglang 0.5.23, class llama ignores",
                also={
                    "specforge": (),
                    "speculators": (*NOT_IN_SGLANG, "norm-before-residual-ignored"),
                },
            ),
        ),
    ),
    Row(
        number=19,
        fault="The decoder layer's tensors have names that the loader does not know",
        serving="Acceptance about 0: the layer keeps its random values, without a message.",
        planted=(
            Planted(
                how="midlayer.* is renamed layers.0.*, and the engine is SGLang 0.5.9",
                edit={"specforge": weights(to_layers), "speculators": nothing},
                engine=sglang("0.5.9"),
                name="names-not-remapped",
                reads="looks for midlayer.*, the file has layers.0.*",
                also={
                    "specforge": (),
                    "speculators": (*NOT_IN_SGLANG, "norm-before-residual-ignored"),
                },
            ),
            Planted(
                how="midlayer.* is renamed layers.0.*, and EAGLE's own code loads it",
                layouts=("specforge",),
                only="EAGLE's code does not read it at all",
                edit=in_turn(weights(to_layers), ids([1, 3, 4], [])["specforge"]),
                data=None,
                trainer="eagle",
                name="names-not-remapped",
                reads="EAGLE's own loader renames nothing",
            ),
            Planted(
                how="the decoder layer's tensors get a prefix that nobody strips",
                edit=weights(to_other_block),
                name="tensors-missing",
                reads="self_attn.q_proj.weight",
                also=("tensors-unread",),
                refused="missing midlayer.self_attn.q_proj.weight",
            ),
        ),
    ),
    Row(
        number=20,
        fault="head_dim is not hidden_size over heads, and somebody takes that for granted",
        serving="A shape error, or EAGLE's reference code cannot load it.",
        planted=(
            Planted(
                how="wider heads, and EAGLE's own code loads them",
                variant="wide heads",
                layouts=("specforge",),
                only="EAGLE's code does not read it at all",
                edit=ids([1, 3, 4], [])["specforge"],
                data=None,
                trainer="eagle",
                name="head-dim-ignored",
                reads="head_dim is 16; EAGLE's code takes 8",
            ),
            Planted(
                how="config.json: head_dim of a drafter with wider heads is taken for 8",
                variant="wide heads",
                edit=layer(head_dim=8),
                name="file-and-config-disagree",
                reads="midlayer.self_attn.q_proj.weight is [64, 64], expected [32, 64]",
                refused="midlayer.self_attn.q_proj.weight is [64, 64], expected [32, 64]",
            ),
        ),
    ),
)

"""A config.json of speculators' layout as engines that know only the flat one want it."""

from __future__ import annotations

import json
from typing import Any

from eagle3.conventions import KEY, NESTED
from eagle3.doctor.findings import listed
from eagle3.doctor.mending import again, patch_lines
from eagle3.doctor.subject import LAYER, Drafter, Engine, Subject
from eagle3.doctor.trained import trained
from eagle3.engines import ids_to_write
from eagle3.errors import BadInput
from eagle3.form import DrafterForm

KEPT = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# A flat drafter's window is a flag of the server's, and its norms on q and k go by model_type.
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab",
    "draft_vocab_size": "draft_vocab",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
}
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "attention_bias", "mlp_bias")


def flattened(subject: Subject, drafter: Drafter, engine: Engine) -> tuple[str, ...]:
    """The flat config.json to write, whole, and how to ask again."""
    if drafter.form is None:
        keys = [LAYER, *(key for key in drafter.config if key.startswith("speculators_")), KEY]
        return (
            "correct what is wrong with its sizes first; then the flat config can be printed here",
            f"it will have no {', '.join(keys)}",
        )
    wanted = trained(subject)
    config = flat_config(drafter, drafter.form)
    lines: list[str] = []
    place = engine.rule.places[0].path if engine.rule.places else None
    if wanted is None:
        lines.append("and the layer ids: doctor … states=[…] tells which")
    elif place == NESTED:
        try:
            written = ids_to_write(engine.rule, wanted.states, subject.num_layers)
        except BadInput:
            written = None
        if written is not None and written.ids is not None:
            config.setdefault("eagle_config", {})[KEY] = list(written.ids)
            lines += patch_lines(subject, engine, wanted.states) if written.needs else ()
        else:
            lines.append(f"without layer ids: states {listed(wanted.states)} cannot be fed there")
    windows = sorted({width for width in drafter.form.windows.value if width is not None})
    if windows and engine.name == "sglang":
        lines.append(f"and serve with --speculative-draft-window-size {windows[0]}")
    return (
        "write this, and nothing else, as config.json of a copy:",
        json.dumps(config),
        *lines,
        *((again(subject, wanted),) if wanted is not None else ()),
    )


def flat_config(drafter: Drafter, form: DrafterForm) -> dict[str, Any]:
    """The keys that engines read at the top level, with every default of speculators' written out."""
    layer = drafter.block
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if form.qk_norm.value else "llama",
        **{key: value for key, value in drafter.config.items() if key in KEPT},
        **{
            key: value
            for key, value in layer.items()
            if key not in WINDOWS and key not in ("architectures", "model_type", "auto_map")
        },
        **{key: getattr(form, name).value for key, name in SIZES.items()},
        "tie_word_embeddings": False,
    }
    if form.target_hidden.value != form.hidden.value:
        config["target_hidden_size"] = form.target_hidden.value
    if form.num_aux.value != 3:
        config["num_aux_hidden_states"] = form.num_aux.value
    config |= {name: True for name in SWITCHES if getattr(form, name).value}
    if form.feedback_normed.value:
        # One key for engines; the other says that a flat config's norm_output is not SpecForge's.
        config["norm_output"] = True
        config["eagle_config"] = {"return_hidden_post_norm": True}
    return config

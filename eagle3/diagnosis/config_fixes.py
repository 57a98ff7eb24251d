"""Fixes that change config.json, or a server's flag, where the engine reads them."""

from __future__ import annotations

from eagle3.diagnosis import rewrites
from eagle3.diagnosis.fix import CODE, Case, Fix
from eagle3.diagnosis.patched_config import no_window, set_rope, set_switch, switch_off
from eagle3.doctor.report import QWEN3_IN_VLLM
from eagle3.doctor.rope import ATTN_FACTOR, attention_factor
from eagle3.doctor.subject import Engine
from eagle3.doctor.switches import at, ways_out
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.serving import Unknown, serving_for
from eagle3.wiring import (
    Biases,
    FcInput,
    Feedback,
    Parts,
    Residual,
    RopeChoice,
    Window,
    chosen_rope,
)

SGLANG_WINDOW = "models/llama_eagle3.py"
TARGET_LINES = "rope_theta and rope_scaling as they stand in the target's config.json"


def switched(case: Case, name: str, value: bool, tensors: str | None = None) -> tuple[Fix, ...]:
    """A switch that the config sets where the engine reads it; `tensors` to leave out where off."""
    serving = case.serving
    if serving is None or case.asked is None or case.rule is None:
        return ()
    switch = getattr(serving, name)
    gone = rewrites.without(tensors, f"the tensors of {name}") if tensors and not value else None
    if not switch.honoured and value:
        engine = Engine(asked=case.asked, rule=case.rule, serving=serving, checkout=None)
        return (case.none(*ways_out(name, engine)),)
    if not switch.honoured and gone is None:
        return (case.none(CODE),)
    edit = case.edit()
    if switch.honoured:
        set_switch(edit, name, switch, value)
    else:
        switch_off(edit, name)  # for whoever reads it: the file has no tensors of it any more
    return (case.edited(edit, snippet=gone),)


def of_residual(case: Case) -> tuple[Fix, ...]:
    """norm_before_residual."""
    return switched(case, "norm_before_residual", case.trained.residual is Residual.normed)


def of_feedback(case: Case) -> tuple[Fix, ...]:
    """norm_output, as engines mean it."""
    return switched(case, "feedback_normed", case.trained.feedback is Feedback.normed)


def of_fc_input(case: Case) -> tuple[Fix, ...]:
    """The norms in front of fc."""
    wanted, form, serving = case.trained.fc_input, case.form, case.serving
    if wanted is FcInput.raw:
        name = "norm_before_fc" if form.norm_before_fc.value else "fc_norm"
        return switched(case, name, False, rewrites.FC_NORMS[name])
    names = ("norm_before_fc", "fc_norm")
    name, other = names if wanted is FcInput.whole else reversed(names)
    if serving is None or not getattr(serving, name).honoured:
        return switched(case, name, True)
    edit = case.edit()
    set_switch(edit, name, getattr(serving, name), True)
    switch_off(edit, other)  # engines and readers refuse both
    snippet = None
    if not getattr(form, name).value:
        snippet = rewrites.norm_of_ones(name, form.num_aux.value)
    return (case.edited(edit, snippet=snippet),)


def of_biases(case: Case) -> tuple[Fix, ...]:
    """The biases of the attention's projections."""
    serving = case.serving
    if case.trained.biases is Biases.dropped:
        gone = rewrites.without(r".*[.]self_attn[.][qkvo]_proj[.]bias", "the attention's biases")
        edit = case.edit()
        edit.put(f"{edit.layer}attention_bias", False)
        return (case.edited(edit, snippet=gone),)
    # o's stay, so the switch stays on, and who refuses the tensors refuses zeros as well.
    refused = (
        serving is not None
        and serving.unknown is Unknown.refused
        and not serving.attention_bias.honoured
    )
    if case.trained.biases is Biases.first_dropped and not refused:
        return (case.rewritten(rewrites.no_biases()),)
    return switched(case, "attention_bias", True)


def of_qk_norm(case: Case) -> tuple[Fix, ...]:
    """Qwen3's norms on q and k."""
    if case.trained.qk_norm is Parts.declared and has_qwen3(case):
        return (qwen3_class(case),)
    if case.trained.qk_norm is Parts.declared:
        return switched(case, "qk_norm", True)
    gone = rewrites.without(r".*[.]self_attn[.][qk]_norm[.]weight", "the norms on q and k")
    edit = case.edit()
    edit.put(f"{edit.layer}model_type", "llama")
    if any("qwen3" in str(name).lower() for name in at(edit.config, "architectures") or ()):
        edit.put("architectures", ["LlamaForCausalLMEagle3"])
    return (case.edited(edit, snippet=gone),)


def has_qwen3(case: Case) -> bool:
    """Whether the release has a class with norms on q and k, which goes by another name."""
    if case.asked is None or case.name != "vllm":
        return False
    try:
        return serving_for("vllm", case.asked.version, QWEN3_IN_VLLM).qk_norm.value({})
    except BadInput:
        return False  # it came later


def qwen3_class(case: Case) -> Fix:
    """The name by which vLLM takes a drafter for that class: its own, or its layer's type."""
    edit = case.edit()
    if edit.nested:
        edit.put(f"{edit.layer}model_type", "qwen3")
    else:
        edit.put("architectures", [QWEN3_IN_VLLM])
    return case.edited(edit)


def of_rope(case: Case) -> tuple[Fix, ...]:
    """The base and the scaling that were trained with, where this layout states them."""
    own = case.form.rope.value
    if case.trained.rope is RopeChoice.declared:
        if case.run is None or case.run.rope is not RopeChoice.no_mscale:
            return (case.none(CODE),)
        return factor_written(case, own)
    if case.trained.rope is RopeChoice.target and case.target_rope is None:
        return (case.fix(f"write {TARGET_LINES}"),)
    edit = case.edit()
    set_rope(edit, chosen_rope(case.trained.rope, own, case.target_rope))
    return (case.edited(edit),)


def factor_written(case: Case, own: Rope) -> tuple[Fix, ...]:
    """yarn's factor for releases that read neither mscale nor attention_factor."""
    serving = case.serving
    newer = "serve it with SGLang 0.5.16 or vLLM 0.30, or newer, which read mscale"
    if serving is None or serving.yarn_mscale:
        return (case.none("state the factor by mscale and mscale_all_dim, which it reads"),)
    bare = Rope(theta=own.theta, kind="yarn", scaling=(("factor", dict(own.scaling)["factor"]),))
    edit = case.edit()
    spelled = [edit.layer + key for key in ("rope_scaling", "rope_parameters")]
    factor = float(f"{attention_factor(own) / attention_factor(bare):.4g}")
    edit.put(f"{next(p for p in spelled if at(edit.config, p))}.{ATTN_FACTOR}", factor)
    needs = "a copy of config.json for that release alone"
    return (case.edited(edit, needs=needs, note=f"or, without it, {newer}"),)


def of_window(case: Case) -> tuple[Fix, ...]:
    """A flag in SGLang, the config elsewhere."""
    widths = set(case.form.windows.value)
    if case.trained.window is Window.none and case.name == "sglang":
        return (case.fix("leave out --speculative-draft-window-size", source=SGLANG_WINDOW),)
    if case.trained.window is Window.none:
        edit = case.edit()
        no_window(edit, case.form.num_layers.value)
        return (case.edited(edit),)
    if case.name != "sglang":
        return (case.none("serve it with vLLM, which reads the layers' windows from config.json"),)
    if len(widths) != 1:
        return (
            case.none(
                "SGLang has one window for all layers; serve it with vLLM, which has one for each",
                "train with one window in all layers",
            ),
        )
    return (
        case.fix(
            f"--speculative-draft-window-size {widths.pop()}",
            source=SGLANG_WINDOW,
            note="it sees one token more than training did",
        ),
    )

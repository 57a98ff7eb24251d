"""What the engine does with the drafter's switches: those it ignores, misreads or takes elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from eagle3.doctor.findings import Finding
from eagle3.doctor.subject import Drafter, Engine, Subject
from eagle3.form import DrafterForm
from eagle3.serving import SWITCHES, Serving

# What each switch does to acceptance where the engine runs the other way.
EFFECTS = {
    "norm_before_residual": "the residual is the fused state in place of its norm (or the reverse): "
    "the first drafted token is already worse, deeper ones far worse, since the sizes grow apart",
    "norm_before_fc": "fc sees the states without the norm it was trained behind: acceptance is low "
    "at every step (sglang#32334: accept length about 1.1)",
    "fc_norm": "fc sees the chunks without their norms: acceptance is low at every step",
    "feedback_normed": "the first drafted token is as trained, from the second on acceptance collapses: "
    "the next step is fed the other of y and norm(y)",
    "attention_bias": "q, k and v lack their biases: acceptance drops from the first step on",
    "mlp_bias": "the MLP lacks its biases: acceptance drops from the first step on",
    "fc_bias": "fc lacks its bias: acceptance drops from the first step on",
    "qk_norm": "q and k lack their norms: attention is wrong at every step",
}
PATCHES = {
    ("sglang", "norm_before_residual"): (
        "patch models/llama_eagle3.py, LlamaDecoderLayer.forward: set `residual = hidden_states` "
        "behind `hidden_states = self.hidden_norm(hidden_states)`",
    ),
}
RETRAIN = {
    "norm_before_residual": "train with --no-norm-before-residual (speculators) where it is to be "
    "served there",
    "norm_before_fc": "train with --no-norm-before-fc (speculators) where it is to be served there",
    "feedback_normed": "train with --no-norm-output (speculators) where it is to be served there",
    "fc_norm": "train without fc_norm where it is to be served there",
    "qk_norm": "train a llama drafter (--draft-arch llama) where it is to be served there",
}
TRAP = (
    "norm_output is SpecForge's switch for the norm in front of the head; the engine reads it as "
    "'feed norm(y) to the next step'"
)


def check(subject: Subject) -> Iterator[Finding]:
    """Each switch of the form against what the engine makes of the config."""
    drafter, engine = subject.drafter, subject.engine
    if drafter is None or drafter.form is None or engine is None or engine.serving is None:
        return
    serving = engine.serving
    for name in SWITCHES:
        yield from check_switch(name, drafter, drafter.form, engine, serving)
    yield from head_norm(drafter, drafter.form, engine)
    yield from layers(drafter, drafter.form, engine, serving)
    yield from windows(drafter, drafter.form, engine)


def check_switch(
    name: str, drafter: Drafter, form: DrafterForm, engine: Engine, serving: Serving
) -> Iterator[Finding]:
    """One switch that the engine sets otherwise than the drafter was trained."""
    setting, switch = getattr(form, name), getattr(serving, name)
    there = switch.value(drafter.flat)
    stated = any(at(drafter.flat, path) is not None for path in switch.places)
    default = serving.speculators_residual_default
    if name == "norm_before_residual" and drafter.nested and not stated and default is not None:
        yield from residual_default(drafter, engine, serving, default)
        return
    if there == setting.value:
        return
    trained, does = words(setting.value), words(there)
    if setting.value and not switch.honoured:
        yield Finding(
            name=f"{name.replace('_', '-')}-ignored",
            severity="error",
            where=f"{drafter.where}: {setting.origin}",
            what=f"the drafter was trained with {name}, which {engine.words} ignores",
            effect=EFFECTS[name],
            fix=ways_out(name, engine),
            evidence=f"{serving.evidence.value}: {serving.source}",
        )
        return
    trap = name == "feedback_normed" and not drafter.nested and "norm_output" in drafter.config
    place = switch.places[0] if switch.places else None
    yield Finding(
        name="norm-output-trap" if trap else f"{name.replace('_', '-')}-differs",
        severity="error",
        where=f"{drafter.where}: {setting.origin}",
        what=(
            f"the drafter was trained with {name} {trained}, {engine.words} runs it {does}"
            + (f": {TRAP}" if trap else "")
        ),
        effect=EFFECTS[name],
        fix=(removal("norm_output"),)
        if trap and not setting.value  # false would take away the norm in front of the head
        else (line(place, setting.value),)
        if place is not None
        else (f"serve it with an engine that runs {name} {trained}",),
        evidence=f"{serving.evidence.value}: {serving.source}",
    )


def residual_default(
    drafter: Drafter, engine: Engine, serving: Serving, default: bool
) -> Iterator[Finding]:
    """speculators' config class and its trainer have different defaults for a key that is missing."""
    yield Finding(
        name="norm-before-residual-not-stated",
        severity="error",
        where=str(drafter.config_path),
        what=f"config.json does not state norm_before_residual: {engine.words} takes "
        f"{str(default).lower()}, speculators' config class false, its trainer's default is true",
        effect=EFFECTS["norm_before_residual"] + "; only if it was trained otherwise",
        fix=(
            '"norm_before_residual": true',
            "or false, where it was trained with --no-norm-before-residual",
        ),
        evidence=f"{serving.evidence.value}: {serving.source}",
    )


def ways_out(name: str, engine: Engine) -> tuple[str, ...]:
    """What can be done about a switch that an engine does not have."""
    others = {
        "norm_before_residual": "serve it with vLLM, which reads norm_before_residual",
        "attention_bias": "serve it with vLLM 0.16 or newer, or TensorRT-LLM, which read attention_bias",
        "qk_norm": 'serve it with vLLM 0.24 or newer and "architectures": ["Eagle3Qwen3ForCausalLM"]',
        "norm_before_fc": "serve it with SGLang 0.5.17 or vLLM 0.18, or newer",
        "fc_norm": "serve it with SGLang 0.5.12 or vLLM 0.22, or newer",
        "feedback_normed": "serve it with SGLang 0.5.12 or vLLM 0.22, or newer",
    }
    lines = [*PATCHES.get((engine.name, name), ())]
    lines += [text for key, text in others.items() if key == name]
    lines += [RETRAIN[name]] if name in RETRAIN else []
    return tuple(lines) or (f"train without {name} where it is to be served there",)


def head_norm(drafter: Drafter, form: DrafterForm, engine: Engine) -> Iterator[Finding]:
    """Every engine norms in front of the head."""
    if form.head_norm.value:
        return
    yield Finding(
        name="head-norm-off",
        severity="error",
        where=f"{drafter.where}: {form.head_norm.origin}",
        what=f"SpecForge trains this drafter without the norm in front of the head, {engine.words} "
        "always applies it",
        effect="the logits are of other sizes, and flattened or sharpened row by row: acceptance drops "
        "from the first step on",
        fix=("train with the norm: leave norm_output out of the draft model's config",),
        evidence="read: specforge/modeling/draft/llama3_eagle.py; no engine has this switch",
    )


def layers(
    drafter: Drafter, form: DrafterForm, engine: Engine, serving: Serving
) -> Iterator[Finding]:
    """Drafters of more than one layer: whether it runs them, and which norm it looks for there."""
    count = form.num_layers.value
    if count == 1:
        return
    evidence = f"{serving.evidence.value}: {serving.source}"
    where = f"{drafter.where}: {form.num_layers.origin}"
    if serving.max_layers is not None and count > serving.max_layers:
        yield Finding(
            name="too-many-layers",
            severity="error",
            where=where,
            what=f"the drafter has {count} layers, {engine.words} runs {serving.max_layers}",
            effect="the layers behind the first are left out, or it does not load: acceptance about 0",
            fix=("serve it with SGLang 0.5.12 or newer, or vLLM", "or train one layer"),
            evidence=evidence,
        )
        return
    wanted = serving.deeper_norm
    if wanted is None or not drafter.examined:
        return
    lacking = [
        f"layers.{i}.{wanted}.weight"
        for i in range(1, count)
        if f"layers.{i}.{wanted}.weight" not in drafter.tensors
    ]
    if lacking:
        yield Finding(
            name="deeper-norm-name",
            severity="error",
            where=where,
            what=f"{engine.words} looks for {', '.join(lacking)}, which the file does not have",
            effect="these norms stay at one, so every layer behind the first sees states of the wrong "
            "size: acceptance is low at every step",
            fix=(
                f"store layers.i.input_layernorm.weight as layers.i.{wanted}.weight for that engine",
            ),
            evidence=evidence,
        )


def windows(drafter: Drafter, form: DrafterForm, engine: Engine) -> Iterator[Finding]:
    """SGLang takes a drafter's sliding window from its own flag only."""
    widths = sorted({width for width in form.windows.value if width is not None})
    if not widths or engine.name != "sglang":
        return
    flag = {key.lstrip("-").replace("-", "_"): value for key, value in engine.asked.flags.items()}
    if flag.get("speculative_draft_window_size") == widths[0] and len(widths) == 1:
        return
    yield Finding(
        name="window-ignored",
        severity="warning",
        where=f"{drafter.where}: {form.windows.origin}",
        what=f"the drafter was trained with a sliding window of {widths[0]}; SGLang reads none of it "
        "from config.json",
        effect=f"as trained up to {widths[0]} tokens of context, falling behind it",
        fix=(f"--speculative-draft-window-size {widths[0]}",),
        evidence="read: models/llama_eagle3.py of 0.5.12 to 0.5.23",
    )


def at(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def line(path: str, value: Any) -> str:
    """A line of config.json that sets a dotted path."""
    *outer, key = path.split(".")
    text = f'"{key}": {json.dumps(value)}'
    for name in reversed(outer):
        text = f'"{name}": {{{text}}}'
    return text


def removal(path: str) -> str:
    """A line that says to take a dotted path out of config.json."""
    outer, _, key = path.rpartition(".")
    return f'remove "{key}" ' + (f"of {outer}" if outer else "at the top level")


def words(value: bool) -> str:
    """'on' or 'off'."""
    return "on" if value else "off"

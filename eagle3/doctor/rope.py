"""Rotary embedding and context length: what the engine makes of them, what the target's are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from eagle3.checkpoints.reading import is_number
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.subject import Drafter, Subject, Target, whole
from eagle3.doctor.switches import line
from eagle3.doctor.tensors import HARMLESS
from eagle3.form import DrafterForm, Rope

ATTN_FACTOR = "attn_factor"  # the one of yarn's keys that older releases of SGLang multiply by
DEFAULT_THETA = 10_000.0
FLOATS = ("F64", "F32", "BF16")  # float16 has no room for the low frequencies of a large base
ROUNDING = 0.02  # relative; a table that was cast to bf16 errs by less
Table = np.ndarray[Any, np.dtype[np.float64]]
MODELOPT_YARN = (32.0, 2048)  # factor and original length that its export writes by default


def check(subject: Subject) -> Iterator[Finding]:
    """Base, scaling, head size and length."""
    drafter = subject.drafter
    if drafter is None or drafter.form is None:
        return
    form = drafter.form
    yield from base(subject, drafter, form)
    yield from kept_table(drafter, form)
    yield from injected(drafter, form)
    yield from mscale(subject, drafter, form)
    yield from head_size(subject, drafter, form)
    if subject.target is not None:
        yield from length(subject, drafter, form, subject.target)


def target_theta(target: Target) -> float | None:
    """The target's rotary base, in either spelling."""
    spelled = [target.config.get("rope_theta")]
    for key in ("rope_parameters", "rope_scaling"):
        block = target.config.get(key)
        spelled.append(block.get("rope_theta") if isinstance(block, Mapping) else None)
    known = [float(v) for v in spelled if isinstance(v, int | float)]
    return known[0] if known else None


def is_default(rope_origin: str) -> bool:
    """Whether no key of the config states the base."""
    return "default of" in rope_origin


def base(subject: Subject, drafter: Drafter, form: DrafterForm) -> Iterator[Finding]:
    """A base that nobody states, and EAGLE's trainer, which reads none."""
    theta, origin = form.rope.value.theta, form.rope.origin
    theirs = target_theta(subject.target) if subject.target is not None else None
    if is_default(origin) and theirs is not None and theirs != theta:
        yield Finding(
            name="rope-theta-missing",
            severity="warning",
            where=str(drafter.config_path),
            what=f"config.json states no rope_theta: trainers and engines take {theta:g}; the target's "
            f"is {theirs:g}",
            effect="if it was trained with the target's base, it is good near the start of the context "
            "and decays with length",
            fix=(f'"rope_theta": {theta:g}', f"or {theirs:g}, whichever it was trained with"),
            evidence=MEASURED,
        )
    if subject.trainer is not None and subject.trainer.name == "eagle" and theta != DEFAULT_THETA:
        yield Finding(
            name="rope-theta-not-trained",
            severity="error",
            where=f"{drafter.where}: {origin}",
            what=f"EAGLE's trainer rotates with base 10000 whatever the config says; it says {theta:g}, "
            "and its inference and every engine take that",
            effect="good near the start of the context, decaying with length",
            fix=('"rope_theta": 10000.0',),
            evidence="read: eagle/traineagle3/cnets.py::_init_rope",
        )


def kept_table(drafter: Drafter, form: DrafterForm) -> Iterator[Finding]:
    """Frequencies that old trainers keep in the file, against those that the config makes."""
    rope, size = form.rope.value, form.head_dim.value
    if rope.kind != "default" or not drafter.examined:
        return
    for name, info in sorted(drafter.tensors.items()):
        known = info.shape == ((size + 1) // 2,) and info.dtype in FLOATS
        if not HARMLESS.fullmatch(name) or not known:
            continue
        made = rope.theta ** -(np.arange(0, size, 2) / size)
        values = drafter.values(name)
        if values is None or np.allclose(values.astype(np.float64), made, rtol=ROUNDING, atol=0):
            continue
        base = base_of(values.astype(np.float64))
        yield Finding(
            name="rope-table-differs",
            severity="error",
            where=f"{info.file}: {info.name}",
            what="the file's rotary frequencies are of "
            + (f"base {base:g}" if base else "no plain rotary embedding")
            + f", config.json makes them of base {rope.theta:g} ({form.rope.origin})",
            effect="training rotated by the file's frequencies, engines rotate by the config's: good "
            "near the start of the context, decaying with length",
            fix=(f'"rope_theta": {base:.1f}',)
            if base
            else ("state in config.json the rope that it was trained with",),
            evidence=MEASURED,
        )


def base_of(values: Table) -> float | None:
    """The base of a plain table of frequencies, to three digits; None where it is no such table."""
    if len(values) < 2 or not (np.isfinite(values).all() and (values > 0).all()):
        return None
    base = float(f"{values[-1] ** (-len(values) / (len(values) - 1)):.3g}")
    plain = base ** -(np.arange(len(values)) / len(values))
    return base if np.allclose(values, plain, rtol=ROUNDING, atol=0) else None


def injected(drafter: Drafter, form: DrafterForm) -> Iterator[Finding]:
    """ModelOpt's export replaces a plain rotary embedding by a scaled one."""
    rope = form.rope.value
    scaling = dict(rope.scaling)
    factor, original = MODELOPT_YARN
    if rope.kind != "yarn" or drafter.nested:
        return
    if scaling.get("factor") != factor or original != scaling.get(
        "original_max_position_embeddings"
    ):
        return
    yield Finding(
        name="rope-from-export",
        severity="warning",
        where=f"{drafter.where}: {form.rope.origin}",
        what=f"the rope scaling (yarn, factor {factor:g}, original length {original}) is what "
        "ModelOpt's export writes over a plain rotary embedding",
        effect="where training used plain rope, every rotation and the attention's temperature differ: "
        "acceptance is lower at every length",
        fix=("remove rope_scaling from config.json where training had none",),
        evidence="read: modelopt/torch/speculative/config.py::EagleConfig.eagle_export_rope_scaling",
    )


def mscale(subject: Subject, drafter: Drafter, form: DrafterForm) -> Iterator[Finding]:
    """An engine that drops yarn's mscale keys rescales attention."""
    engine, rope = subject.engine, form.rope.value
    serving = engine.serving if engine is not None else None
    if engine is None or serving is None or serving.yarn_mscale or rope.kind != "yarn":
        return
    scaling = dict(rope.scaling)
    factor = scaling.get("factor", 1)
    if not ("mscale" in scaling or "mscale_all_dim" in scaling) or factor <= 1:
        return
    trained, own = attention_factor(rope), 0.1 * math.log(factor) + 1
    served = own * written_factor(drafter)
    if math.isclose(trained, served, rel_tol=1e-3):
        return
    block = "rope_scaling" if drafter.block.get("rope_scaling") else "rope_parameters"
    yield Finding(
        name="yarn-mscale-dropped",
        severity="error",
        where=f"{drafter.where}: {form.rope.origin}",
        what=f"{engine.words} drops mscale and mscale_all_dim: it scales cos and sin by {served:.3f}, "
        f"training by {trained:.3f}",
        effect=f"the attention's logits are multiplied by {(served / trained) ** 2:.2f}: acceptance is "
        "lower at every length",
        fix=(
            line(f"{block}.{ATTN_FACTOR}", float(f"{trained / own:.4g}")),
            "in a copy of config.json for that release alone: newer ones multiply by it as well",
            "or, without it, serve with SGLang 0.5.16 or vLLM 0.30, or newer",
        ),
        evidence=f"{serving.evidence.value}: {serving.source}",
    )


def written_factor(drafter: Drafter) -> float:
    """What the releases that drop mscale multiply their own factor by: attn_factor of the config."""
    for key in ("rope_scaling", "rope_parameters"):
        block = drafter.block.get(key)
        value = block.get(ATTN_FACTOR) if isinstance(block, Mapping) else None
        if is_number(value):
            return float(str(value))
    return 1.0


def attention_factor(rope: Rope) -> float:
    """What yarn multiplies cos and sin by, as transformers has it."""
    scaling: dict[str, Any] = dict(rope.scaling)
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1)


def head_size(subject: Subject, drafter: Drafter, form: DrafterForm) -> Iterator[Finding]:
    """EAGLE's reference code takes H_d divided by the heads, whatever head_dim says."""
    plain = form.hidden.value // form.heads.value
    if subject.trainer is None or subject.trainer.name != "eagle":
        return
    if form.head_dim.value == plain:
        return
    yield Finding(
        name="head-dim-ignored",
        severity="error",
        where=f"{drafter.where}: {form.head_dim.origin}",
        what=f"head_dim is {form.head_dim.value}; EAGLE's code takes {plain} (hidden_size over heads)",
        effect="its reference inference cannot load the file; engines read head_dim",
        fix=(f'"head_dim": {plain}', "or use an engine's own inference"),
        evidence="read: eagle/model/cnets.py",
    )


def length(
    subject: Subject, drafter: Drafter, form: DrafterForm, target: Target
) -> Iterator[Finding]:
    """A drafter that was made for fewer positions than the target serves."""
    ours, theirs = form.max_positions.value, whole(target.config, "max_position_embeddings")
    if ours is None or theirs is None or ours >= theirs:
        return
    engine = subject.engine
    sglang = engine is not None and engine.name == "sglang"
    yield Finding(
        name="context-too-short",
        severity="warning",
        where=f"{drafter.where}: {form.max_positions.origin}",
        what=f"max_position_embeddings is {ours}, the target's is {theirs}",
        effect="SGLang refuses to start unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1; then "
        f"acceptance falls behind position {ours} if training never went there"
        if sglang
        else f"acceptance falls behind position {ours} if training never went there; an engine may cut "
        "the context to it",
        fix=(
            f'"max_position_embeddings": {theirs}',
            f"or limit the served context: --context-length {ours}",
        ),
        evidence="read: srt/configs/model_config.py of 0.5.23" if sglang else MEASURED,
    )

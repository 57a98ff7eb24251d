"""The inventory: tensors that the wiring asks for, those that are there, those that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagle3.checkpoints.agree import expected_shapes, optional_shapes, own_name
from eagle3.doctor.findings import MEASURED, Finding, Inventory
from eagle3.doctor.subject import Drafter, Subject
from eagle3.serving import Unknown

HARMLESS = re.compile(
    r".*rotary_emb\.inv_freq"
)  # old checkpoints keep it; everybody passes it over
# A switch that contradicts the file is one finding, not one for each of its tensors.
OF_SWITCH = (
    (re.compile(r"input_norm\.weight"), "norm_before_fc"),
    (re.compile(r"fc_norm\.\d+\.weight"), "fc_norm"),
    (re.compile(r".*self_attn\.[qkvo]_proj\.bias"), "attention_bias"),
    (re.compile(r".*mlp\.\w+_proj\.bias"), "mlp_bias"),
    (re.compile(r"fc\.bias"), "fc_bias"),
    (re.compile(r".*self_attn\.[qk]_norm\.weight"), "qk_norm"),
    (re.compile(r"layers\.[1-9]\d*\..*|midlayer\..*"), "num_layers"),
)
UNREAD = {
    Unknown.skipped: ("warning", "skips it in silence, so what it was trained to do is left out"),
    Unknown.warned: ("warning", "skips it with a line in its log"),
    Unknown.refused: ("error", "does not start: it has no place for it"),
}


def inventory(drafter: Drafter | None) -> Inventory:
    """The drafter's tensors by their names in the file; required ones by the drafter's own names."""
    if drafter is None or not drafter.examined:
        return Inventory()
    present = tuple(sorted((drafter.weights.tensors or {}) if drafter.weights else {}))
    if drafter.form is None:
        return Inventory(present=present)
    required, optional = expected_shapes(drafter.form), optional_shapes(drafter.form)
    known = {*required, *optional}
    return Inventory(
        required=tuple(sorted(required)),
        present=present,
        missing=tuple(sorted(name for name in required if name not in drafter.tensors)),
        unread=tuple(
            name for name in present if own_name(name) not in known and not HARMLESS.fullmatch(name)
        ),
    )


def check(subject: Subject) -> Iterator[Finding]:
    """Contradictions between config and file, missing and unread tensors, names nobody remaps."""
    drafter = subject.drafter
    if drafter is None:
        return
    yield from contradictions(subject, drafter)
    yield from numbers(drafter)
    if drafter.examined and drafter.form is not None:
        yield from missing(subject, drafter)
        yield from unread(subject, drafter)
    yield from names(subject, drafter)


def contradictions(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """What the reader of checkpoints finds, and what this project does not run."""
    serving = subject.engine.serving if subject.engine is not None else None
    for fault in drafter.faults:
        if serving is not None and not serving.yarn_mscale and "attn_factor=" in fault:
            continue  # written for this release, which multiplies by it
        yield Finding(
            name="file-and-config-disagree",
            severity="error",
            where=drafter.where,
            what=fault,
            effect="one of the two is not what was trained; engines take either side in silence, and "
            "the drafter is then wired otherwise than in training",
            fix=("correct config.json so that it says what the tensors are, or export again",),
            evidence=MEASURED,
        )
    if drafter.foreign:
        yield Finding(
            name="not-run-here",
            severity="note",
            where=drafter.where,
            what=f"the drafter {'; it '.join(drafter.foreign)}",
            effect="an engine may serve it well; job=drafter_test cannot measure it",
            fix=(),
            evidence=MEASURED,
        )


def numbers(drafter: Drafter) -> Iterator[Finding]:
    """Weights that hold no floating-point numbers."""
    whole = [
        info
        for name, info in drafter.tensors.items()
        if name not in ("d2t", "t2d") and not info.is_float and not HARMLESS.fullmatch(name)
    ]
    if whole:
        named = ", ".join(f"{info.name} ({info.dtype})" for info in whole[:3])
        more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
        yield Finding(
            name="weights-not-floating",
            severity="error",
            where=drafter.where,
            what=f"{named}{more} hold no floating-point numbers",
            effect="they are packed or quantised, or were converted wrongly; read as they stand they "
            "are noise",
            fix=("export the drafter in bf16",),
            evidence=MEASURED,
        )


def covered(drafter: Drafter, name: str) -> bool:
    """Whether a contradiction names this tensor's switch, or the tensor itself, already."""
    switch = next((switch for pattern, switch in OF_SWITCH if pattern.fullmatch(name)), None)
    return any(
        name in fault.replace(",", " ").split()
        or (switch is not None and re.search(rf"\b{switch}\b", fault) is not None)
        for fault in drafter.faults
    )


def missing(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """Tensors that the wiring asks for and the file lacks; d2t and the head have checks of their own."""
    names = [
        name
        for name in inventory(drafter).missing
        if name not in ("d2t", "lm_head.weight", "embed_tokens.weight")
    ]
    names = [name for name in names if not covered(drafter, name)]
    if not names:
        return
    block = [name for name in names if name.startswith(("midlayer.", "layers."))]
    unread_names = inventory(drafter).unread
    renamed = f"; it holds {', '.join(unread_names[:3])} instead" if unread_names else ""
    engine = subject.engine.name if subject.engine else "SGLang"
    yield Finding(
        name="tensors-missing",
        severity="error",
        where=drafter.where,
        what=f"the file lacks {', '.join(names)}{renamed}",
        effect=(
            f"{engine} leaves them at their initial values without a word: "
            + ("acceptance is about 0" if block else "acceptance drops from the first step on")
        ),
        fix=("export the checkpoint again with these names, and load it strictly",),
        evidence=MEASURED,
    )


def unread(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """Tensors that no switch explains."""
    names = [n for n in inventory(drafter).unread if not covered(drafter, own_name(n))]
    if not names:
        return
    engine = subject.engine
    serving = engine.serving if engine is not None else None
    severity, effect = "warning", "engines pass over them, most in silence"
    evidence = MEASURED
    if engine is not None and serving is not None:
        severity, does = UNREAD[serving.unknown]
        effect = f"{engine.words} {does}"
        evidence = f"{serving.evidence.value}: {serving.source}"
    yield Finding(
        name="tensors-unread",
        severity=severity,
        where=drafter.where,
        what=f"nothing in the config asks for {', '.join(names)}",
        effect=effect,
        fix=(
            "state in config.json the switch that they belong to, or leave them out of the export",
        ),
        evidence=evidence,
    )


def names(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """Names of the first layer that a loader does not rename."""
    held = (drafter.weights.tensors if drafter.weights else None) or {}
    new = sorted(name for name in held if name.startswith("layers.0."))
    if not new:
        return
    engine = subject.engine
    serving = engine.serving if engine is not None else None
    if engine is not None and serving is not None and "layers.0." not in serving.blocks:
        yield Finding(
            name="names-not-remapped",
            severity="error",
            where=f"{drafter.where}: {new[0]}",
            what=f"{engine.words} looks for midlayer.*, the file has layers.0.*",
            effect="the decoder layer keeps its random values, without a message: acceptance about 0",
            fix=(
                "rename layers.0.* to midlayer.* in the file",
                "or serve with SGLang 0.5.12 or newer",
            ),
            evidence=f"{serving.evidence.value}: {serving.source}",
        )
    if subject.trainer is not None and subject.trainer.name == "eagle":
        yield Finding(
            name="names-not-remapped",
            severity="error",
            where=f"{drafter.where}: {new[0]}",
            what="EAGLE's own loader renames nothing; the file has layers.0.* in place of midlayer.*",
            effect="it loads with strict=False, so the decoder layer stays random: acceptance about 0",
            fix=("rename layers.0.* to midlayer.* in the file",),
            evidence="read: eagle/model/ea_model.py::EaModel.__init__",
        )

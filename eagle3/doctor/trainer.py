"""A run to come: whether dump, trainer, target and engine will fit, before days are spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eagle3.doctor.findings import Finding, in_words
from eagle3.doctor.subject import Data, Drafter, Engine, Subject, Trainer
from eagle3.engines import ids_to_write
from eagle3.errors import BadInput
from eagle3.serving import serving_for

# The layouts that each trainer reads as they are.
READS = {
    "specforge": ("specforge",),
    "speculators": ("speculators", "pt_shards", "speculators_v0"),
    "eagle": (),
    "modelopt": ("modelopt",),
    "torchspec": (),
}
OLD_SPECULATORS = ("pt_shards", "speculators_v0")
SOURCES = {
    "specforge": "read: specforge/algorithms/eagle3, modeling/draft/llama3_eagle.py of 0.2.0",
    "speculators": "read: speculators/train, models/eagle3/core.py of 0.9.0",
    "eagle": "read: eagle/traineagle3",
    "modelopt": "read: modelopt/torch/speculative of 0.47.0",
    "torchspec": "read: TorchSpec of 2026-04-28",
}
# Switches that speculators' trainer turns on by itself, with the flag that turns them off.
SPECULATORS_ON = {
    "norm_before_residual": "--no-norm-before-residual",
    "norm_before_fc": "--no-norm-before-fc",
    "feedback_normed": "--no-norm-output",
}


def check(subject: Subject) -> Iterator[Finding]:
    """Everything that is known of the trainer, against whatever else was named."""
    trainer = subject.trainer
    if trainer is None:
        if subject.drafter is not None and is_modelopt(subject.drafter):
            yield double_norm(subject.drafter.where, "note")
        return
    if subject.data is not None:
        yield from readable(trainer, subject.data)
        yield from aux_count(trainer, subject.data)
        yield from capturable(subject, trainer, subject.data)
    if trainer.name == "speculators":
        yield from same_width(subject)
        if subject.engine is not None and subject.to_come:
            yield from trainer_defaults(subject.engine)
    if trainer.name == "modelopt":
        where = subject.drafter.where if subject.drafter is not None else "trainer=modelopt"
        yield double_norm(where, "warning")
    if subject.drafter is not None:
        yield from head_tensors(trainer, subject.drafter)


def readable(trainer: Trainer, data: Data) -> Iterator[Finding]:
    """Whether it reads this layout."""
    layouts = READS.get(trainer.name, ())
    if trainer.name == "speculators" and data.layout in OLD_SPECULATORS:
        yield Finding(
            name="data-layout-of-old-releases",
            severity="note",
            where=str(data.folder),
            what=f"the data is in the layout {data.layout}, which speculators 0.3 and 0.4 read; "
            "since 0.5 it reads hs_*.safetensors with a dataset beside them",
            effect="a newer release does not start on it",
            fix=("repack it as hs_*.safetensors, the target's last state as the last slot",),
            evidence=SOURCES["speculators"],
        )
    if data.layout is None or data.layout in layouts:
        return
    online = not layouts
    yield Finding(
        name="data-layout-not-read",
        severity="error",
        where=str(data.folder),
        what=f"the data is in the layout {data.layout}; "
        + (
            f"{trainer.name} reads no dump: it runs the target while it trains"
            if online
            else f"{trainer.name} reads {' and '.join(layouts)}"
        ),
        effect="the training does not start, or starts on other data than this",
        fix=("capture the data again for it",)
        if online
        else (f"repack the data in the layout {layouts[0]}", "or train with who wrote it"),
        evidence=SOURCES[trainer.name],
    )


def aux_count(trainer: Trainer, data: Data) -> Iterator[Finding]:
    """Trainers whose fc has a fixed number of inputs."""
    slots = data.slots
    wanted = 3 if trainer.name in ("specforge", "eagle") else None
    if slots is None or wanted is None:
        return
    count = sum(not slot.teacher for slot in slots)
    if count != wanted:
        yield Finding(
            name="trainer-takes-three",
            severity="error",
            where=str(data.folder),
            what=f"the data has {count} aux slots, {trainer.name}'s fc takes {wanted}, which is written "
            "in its code",
            effect="the training stops at a shape error",
            fix=("capture three aux states beside the last one", "or train with speculators"),
            evidence=SOURCES[trainer.name],
        )


def capturable(subject: Subject, trainer: Trainer, data: Data) -> Iterator[Finding]:
    """States that the trainer's own ids cannot name: its config will say something else."""
    if not data.aux or subject.num_layers is None:
        return
    try:
        written = ids_to_write(trainer.rule, data.aux, subject.num_layers)
    except BadInput:
        return
    if written.possible:
        return
    yield Finding(
        name="states-not-the-trainers",
        severity="warning",
        where=str(data.folder),
        what=f"{in_words(data.aux)} cannot be written as layer ids of {trainer.name}: {written.why}",
        effect="the config that it exports will state other ids than were trained on, or none, and an "
        "engine will feed other states",
        fix=("after the export, write the engine's ids for these states into config.json by hand",),
        evidence=f"{trainer.rule.evidence.value}: {trainer.rule.source}",
    )


def same_width(subject: Subject) -> Iterator[Finding]:
    """speculators' EAGLE-3 needs a drafter as wide as the target."""
    drafter, hidden = subject.drafter, subject.target_hidden
    if drafter is None or hidden is None or drafter.sizes.hidden in (None, hidden):
        return
    yield Finding(
        name="widths-must-agree",
        severity="error",
        where=drafter.where,
        what=f"the drafter is {drafter.sizes.hidden} wide, the target {hidden}; speculators takes equal "
        "widths only",
        effect="the training stops before its first step",
        fix=(f'"hidden_size": {hidden} in transformer_layer_config',),
        evidence=SOURCES["speculators"],
    )


def trainer_defaults(engine: Engine) -> Iterator[Finding]:
    """Switches that will be on unless they are turned off, and that the engine does not have."""
    serving = engine.serving or serving_for(engine.name, engine.asked.version, None)
    off = [
        (name, flag) for name, flag in SPECULATORS_ON.items() if not getattr(serving, name).honoured
    ]
    if off:
        names, flags = [name for name, _ in off], [flag for _, flag in off]
        yield Finding(
            name="trainer-default-not-served",
            severity="error",
            where="trainer=speculators",
            what=f"speculators trains with {' and '.join(names)} by default; {engine.words} ignores "
            + ("them" if len(names) > 1 else "it"),
            effect="the training log looks good, and every drafted token behind the engine is worse",
            fix=(f"speculators train … {' '.join(flags)}", "or serve with vLLM"),
            evidence=f"{serving.evidence.value}: {serving.source}",
        )
    if engine.name == "sglang":
        yield Finding(
            name="trainer-default-window",
            severity="warning",
            where="trainer=speculators",
            what="speculators gives every draft layer a sliding window of 2048 by default; SGLang takes "
            "a window from its own flag only",
            effect="as trained up to 2048 tokens of context, falling behind it",
            fix=(
                "speculators train … --full-attention-indices 0",
                "or serve with --speculative-draft-window-size 2048",
            ),
            evidence=SOURCES["speculators"],
        )


def is_modelopt(drafter: Drafter) -> bool:
    """Whether a checkpoint carries the block that ModelOpt's export writes."""
    block = drafter.config.get("eagle_config")
    return isinstance(block, Mapping) and "next_layer_regular" in block


def double_norm(where: str, severity: str) -> Finding:
    """ModelOpt 0.47's first layer norms the hidden state twice in training."""
    return Finding(
        name="double-norm-in-training",
        severity=severity,
        where=where,
        what="ModelOpt 0.47 applies input_layernorm to the hidden state as well as to the embedding "
        "while it trains; engines apply it to the embedding only",
        effect="the trainer's own evaluation is good and every engine is lower, the more so the less "
        "even input_layernorm.weight is",
        fix=("train with a release in which layers[0].input_layernorm is an Identity",),
        evidence="run: its module alone with transformers 5.24 (which releases have it is not known)",
    )


def head_tensors(trainer: Trainer, drafter: Drafter) -> Iterator[Finding]:
    """A drafter that is to be trained on needs what its trainer loads."""
    if not drafter.examined or trainer.name not in ("specforge", "eagle"):
        return
    sizes = drafter.sizes
    if sizes.vocab == sizes.draft_vocab or "t2d" in drafter.tensors:
        return
    yield Finding(
        name="t2d-missing",
        severity="warning",
        where=drafter.where,
        what=f"the file has no t2d, which {trainer.name} picks the teacher's logits by",
        effect="trained on from here, its mask stays all true: another teacher than d2t says",
        fix=(
            "t2d = torch.zeros(vocab_size, dtype=torch.bool)",
            "t2d[d2t + torch.arange(len(d2t))] = True",
        ),
        evidence=SOURCES[trainer.name],
    )

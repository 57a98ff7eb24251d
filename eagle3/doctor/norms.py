"""The values of the norms: not a number, zero, never trained, or kept as Gemma keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.subject import Drafter, Subject
from eagle3.headers import BITS, NUMPY

LARGEST = 1 << 24  # numbers; a norm has at most A·H
DECODED = {*NUMPY, "BF16", "F8_E4M3", "F8_E5M2"}
# Gemma stores w and multiplies by 1 + w: small numbers of both signs.
GEMMA_RMS, GEMMA_NEGATIVE = 0.5, 0.05
LEAST_EPS, MOST_EPS = 1e-9, 1e-3


def check(subject: Subject) -> Iterator[Finding]:
    """Every one-dimensional tensor of floating-point numbers."""
    drafter = subject.drafter
    if drafter is None:
        return
    yield from epsilon(drafter)
    if not drafter.examined:
        return
    ones: list[str] = []
    trained = 0
    for name, info in sorted(drafter.tensors.items()):
        if len(info.shape) != 1 or not info.is_float or info.dtype not in DECODED:
            continue
        if name in ("d2t", "t2d") or not 0 < info.shape[0] <= LARGEST or info.dtype not in BITS:
            continue
        values = drafter.values(name)
        assert values is not None
        where = f"{info.file}: {info.name}"
        bad = int((~np.isfinite(values)).sum())
        is_norm = name.endswith("norm.weight") or "fc_norm." in name
        if bad:
            yield Finding(
                name="not-finite",
                severity="error",
                where=where,
                what=f"{bad} of its {len(values)} numbers are NaN or infinite",
                effect="every logit is NaN: one token is drafted again and again, acceptance about 0",
                fix=("take an earlier checkpoint of the training run",),
                evidence=MEASURED,
            )
        elif is_norm and not values.any():
            yield Finding(
                name="norm-zeros",
                severity="error",
                where=where,
                what="the norm's weight is all zero, so nothing passes it",
                effect="what lies behind it is constant: acceptance about 0; as Gemma keeps norms "
                "(1 + w) it would be an untrained one",
                fix=("export it again; add 1 to it if it came from a Gemma layer",),
                evidence=MEASURED,
            )
        elif is_norm:
            if (values == 1).all():
                ones.append(where)
            else:
                trained += 1
            yield from gemma(values, where)
    if trained:  # where all are one, the whole drafter may be trained without touching norms
        for where in ones:
            yield untouched(where)


def epsilon(drafter: Drafter) -> Iterator[Finding]:
    """An eps that no model has."""
    if drafter.form is None or LEAST_EPS <= drafter.form.norm_eps.value <= MOST_EPS:
        return
    setting = drafter.form.norm_eps
    yield Finding(
        name="norm-eps",
        severity="error",
        where=f"{drafter.where}: {setting.origin}",
        what=f"rms_norm_eps is {setting.value:g}; models have between {LEAST_EPS:g} and {MOST_EPS:g}",
        effect="every norm's output is too small where states are small: logits are flattened, "
        "acceptance drops from the first step on",
        fix=('"rms_norm_eps": 1e-05', "or the value that it was trained with"),
        evidence=MEASURED,
    )


def gemma(values: np.ndarray[tuple[int], np.dtype[np.floating]], where: str) -> Iterator[Finding]:
    """Weights that make sense only behind 1 +."""
    wide = values.astype(np.float64)
    rms = float(np.sqrt(np.mean(wide * wide)))
    if rms < GEMMA_RMS and float(np.mean(wide < 0)) > GEMMA_NEGATIVE:
        yield Finding(
            name="norm-around-zero",
            severity="warning",
            where=where,
            what=f"its weights lie around zero (RMS {rms:.2f}, both signs), as Gemma keeps norms that "
            "multiply by 1 + w",
            effect="drafters' norms multiply by w: signs and sizes of its outputs are wrong, acceptance "
            "about 0",
            fix=("weight = weight + 1  # if it came from a Gemma layer",),
            evidence=MEASURED,
        )


def untouched(where: str) -> Finding:
    """A norm at its initial value among trained ones."""
    return Finding(
        name="norm-ones",
        severity="warning",
        where=where,
        what="the norm's weight is exactly one everywhere, while other norms of the file are trained",
        effect="it was never trained, or got lost before the export; in that case every step is off",
        fix=("compare it with the training checkpoint, and export again if they differ",),
        evidence=MEASURED,
    )

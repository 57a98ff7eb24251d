"""d2t and t2d: which target token each draft token is, and whether the two tables say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.subject import Drafter, Subject
from eagle3.headers import TensorInfo

NONSENSE = "draft tokens become other target tokens: acceptance about 0 but for a few low ids"
REMAKE = (
    "ids = torch.arange(len(t2d))[t2d.bool()]",
    "d2t = ids - torch.arange(len(ids))  # int64",
)
REMAKE_MASK = (
    "t2d = torch.zeros(vocab_size, dtype=torch.bool)",
    "t2d[d2t + torch.arange(len(d2t))] = True",
)
CONVERT = ("d2t = d2t - torch.arange(len(d2t))  # from absolute ids to offsets",)
LARGEST = 2.0**62  # NaN is not below it either
EXACT_IN_BF16 = 256  # whole numbers up to here
LEAST_ROUNDED = 16  # different offsets beyond it: so many are not all round by chance
Numbers = np.ndarray[Any, Any]


def check(subject: Subject) -> Iterator[Finding]:
    """All of it, from the values where they can be read."""
    drafter = subject.drafter
    if drafter is None:
        return
    vocab, draft_vocab = drafter.sizes.vocab, drafter.sizes.draft_vocab
    if vocab is None or draft_vocab is None:
        return
    if draft_vocab > vocab:
        yield Finding(
            name="draft-vocab-too-large",
            severity="error",
            where=f"{drafter.config_path}: draft_vocab_size",
            what=f"draft_vocab_size is {draft_vocab}, but vocab_size is {vocab}",
            effect="draft tokens without a target token: nothing loads it",
            fix=(f'"draft_vocab_size": {vocab}',),
            evidence=MEASURED,
        )
        return
    if not drafter.examined:
        return
    d2t, t2d = drafter.tensors.get("d2t"), drafter.tensors.get("t2d")
    yield from types(d2t, t2d)
    mask = mask_of(drafter, t2d, vocab)
    if mask is not None and t2d is not None:
        yield from check_mask(mask, t2d, draft_vocab)
    if d2t is None:
        if draft_vocab != vocab:
            yield missing(subject, drafter, vocab, draft_vocab, mask)
        return
    if d2t.shape != (draft_vocab,):
        return  # told as a contradiction of config and file
    offsets = whole_numbers(drafter.values("d2t"))
    if offsets is None:
        return
    yield from check_values(offsets, mask, d2t, vocab)


def types(d2t: TensorInfo | None, t2d: TensorInfo | None) -> Iterator[Finding]:
    """Number types that hold no ids, or no mask."""
    if d2t is not None and d2t.dtype != "I64":
        exact = d2t.dtype in ("I32", "U32")
        yield Finding(
            name="d2t-type",
            severity="note" if exact else "error",
            where=f"{d2t.file}: d2t",
            what=f"d2t holds {d2t.dtype}, everybody writes I64",
            effect="loaders convert it"
            if exact
            else "numbers above 256 are rounded in bf16, above 2048 in f16, so most draft tokens become "
            "other target tokens: acceptance about 0",
            fix=() if exact else ("make it again from t2d:", *REMAKE),
            evidence=MEASURED,
        )
    if t2d is not None and t2d.dtype not in ("BOOL", "U8"):
        yield Finding(
            name="t2d-type",
            severity="error",
            where=f"{t2d.file}: t2d",
            what=f"t2d holds {t2d.dtype}; it is a mask over the target's vocabulary, not a map",
            effect="a trainer that picks the teacher's logits by it takes other rows than the drafter's",
            fix=REMAKE_MASK,
            evidence=MEASURED,
        )


def mask_of(drafter: Drafter, t2d: TensorInfo | None, vocab: int) -> Numbers | None:
    """t2d's values where it is a mask of the right length."""
    if t2d is None or t2d.shape != (vocab,) or t2d.dtype not in ("BOOL", "U8"):
        return None
    values = drafter.values("t2d")
    return None if values is None else values.astype(bool)


def whole_numbers(values: Numbers | None) -> Numbers | None:
    """Values as int64, where they are finite and fit."""
    if values is None:
        return None
    if values.dtype.kind == "f" and not bool((np.abs(values) < LARGEST).all()):
        return None  # told by their number type
    return values.astype(np.int64)


def check_mask(mask: Numbers, t2d: TensorInfo, draft_vocab: int) -> Iterator[Finding]:
    """t2d must name as many tokens as the draft vocabulary has."""
    count = int(mask.sum())
    if count == draft_vocab:
        return
    unfilled = count == len(mask)
    yield Finding(
        name="t2d-count",
        severity="error",
        where=f"{t2d.file}: t2d",
        what=f"t2d names {count} target tokens, the draft vocabulary has {draft_vocab}"
        + (
            "; it is all true, as SpecForge makes it before a mapping is loaded" if unfilled else ""
        ),
        effect="a trainer that picks the teacher's logits by it compares them with other draft tokens; "
        "engines read d2t alone",
        fix=("if d2t is right:", *REMAKE_MASK),
        evidence=MEASURED,
    )


def missing(
    subject: Subject, drafter: Drafter, vocab: int, draft_vocab: int, mask: Numbers | None
) -> Finding:
    """No d2t where the vocabularies differ."""
    engine = subject.engine
    serving = engine.serving if engine is not None else None
    does = serving.d2t_missing if serving is not None else "draft ids are taken as target ids"
    named = f"{engine.words}: " if engine is not None else ""
    can_be_made = mask is not None and int(mask.sum()) == draft_vocab
    return Finding(
        name="d2t-missing",
        severity="error",
        where=drafter.where,
        what=f"the file has no d2t, but {draft_vocab} draft tokens stand for some of {vocab}",
        effect=f"{named}{does}; acceptance comes from accidental hits alone",
        fix=("make it from t2d, in ascending order:", *REMAKE)
        if can_be_made
        else ("export the mapping that was trained with (vocab_mapping.pt) into the file",),
        evidence=MEASURED if serving is None else f"{serving.evidence.value}: {serving.source}",
    )


def check_values(
    offsets: Numbers, mask: Numbers | None, d2t: TensorInfo, vocab: int
) -> Iterator[Finding]:
    """What is wrong with the offsets: the gravest reason only, since the others follow from it."""
    count = len(offsets)
    place = np.arange(count)
    targets = offsets + place
    where = f"{d2t.file}: d2t"

    def finding(name: str, what: str, effect: str, fix: tuple[str, ...]) -> Finding:
        return Finding(
            name=name,
            severity="error",
            where=where,
            what=what,
            effect=effect,
            fix=fix,
            evidence=MEASURED,
        )

    remake = ("make it again from t2d:", *REMAKE) if mask is not None else (REIMPORT,)
    if count == vocab:
        if offsets.any():
            yield finding(
                "d2t-not-identity",
                "the draft vocabulary is the whole target's, but d2t is not all zero",
                NONSENSE,
                ("d2t = torch.zeros(vocab_size, dtype=torch.int64)", "or leave d2t and t2d out"),
            )
        return
    if not offsets.any():
        yield from check_zeros(mask, count, finding, remake)
        return
    if np.array_equal(offsets, place):
        yield finding(
            "d2t-arange",
            "d2t counts 0, 1, 2, …: read as offsets, draft token i is target token 2i",
            NONSENSE,
            remake,
        )
        return
    if is_absolute(offsets, targets, mask, vocab):
        yield finding(
            "d2t-absolute",
            "d2t holds target ids, but every engine and trainer reads offsets: "
            f"draft token {count - 1} would be {int(targets[-1])}, not {int(offsets[-1])}",
            NONSENSE,
            CONVERT,
        )
        return
    if is_rounded(offsets):
        yield finding(
            "d2t-rounded",
            "each of its offsets above 256 is a number that bf16 holds: the table went through bf16, "
            "which rounds them",
            "most draft tokens become a neighbour of the token that they stand for: acceptance about 0",
            remake,
        )
        return
    outside = (targets < 0) | (targets >= vocab)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        yield finding(
            "d2t-out-of-range",
            f"{int(outside.sum())} of {count} draft tokens lie outside the target's vocabulary of "
            f"{vocab}; the first is {first}, which becomes {int(targets[first])}",
            "an engine stops at an index error, or drafts tokens that are never accepted",
            remake,
        )
        return
    if len(np.unique(targets)) < count:
        yield finding(
            "d2t-twice",
            f"{count - len(np.unique(targets))} draft tokens become a target token that another one "
            "becomes already",
            "the probability of a token is split over two rows, and some tokens can never be drafted",
            remake,
        )
        return
    yield from check_membership(targets, mask, finding, remake)


REIMPORT = "export the mapping that was trained with (vocab_mapping.pt) into the file"


def check_zeros(mask: Numbers | None, count: int, finding: Any, remake: Any) -> Iterator[Finding]:
    """All zeros say that the draft vocabulary is the target's first ids."""
    first = mask is not None and int(mask.sum()) == count and bool(mask[:count].all())
    if first:
        yield replace(
            finding(
                "d2t-zeros",
                f"d2t is all zero, and t2d says so too: the draft vocabulary is the target's first "
                f"{count} ids",
                "none, if it was trained so; tokens of other ids cannot be drafted",
                (),
            ),
            severity="note",
        )
        return
    said = (
        "which is what a table looks like that was never filled"
        if mask is None or mask.all()
        else "but t2d names other tokens"
    )
    yield finding(
        "d2t-zeros",
        f"d2t is all zero: the draft vocabulary would be the target's first {count} ids, {said}",
        "only tokens of low ids can be drafted; nearly nothing is accepted where training used others",
        remake,
    )


def is_absolute(offsets: Numbers, targets: Numbers, mask: Numbers | None, vocab: int) -> bool:
    """Whether the numbers are target ids rather than offsets."""
    within = bool(((offsets >= 0) & (offsets < vocab)).all())
    if not within or len(np.unique(offsets)) < len(offsets):
        return False  # offsets repeat wherever two neighbours are both in the draft vocabulary
    in_range = bool(((targets >= 0) & (targets < vocab)).all())
    if mask is not None:
        as_offset = in_range and bool(mask[targets].all())
        return bool(mask[offsets].all()) and not as_offset
    ascending = bool((np.diff(offsets) > 0).all())
    return not in_range or ascending


def is_rounded(offsets: Numbers) -> bool:
    """Whether all large offsets end in zero bits, as a cast of the whole file to bf16 leaves them."""
    large = np.unique(np.abs(offsets))
    large = large[large > EXACT_IN_BF16]
    if len(large) < LEAST_ROUNDED:
        return False
    bits = large.astype(np.float32).view(np.uint32)
    return bool((bits & 0xFFFF == 0).all())


def check_membership(
    targets: Numbers, mask: Numbers | None, finding: Any, remake: Any
) -> Iterator[Finding]:
    """d2t and t2d must name the same tokens, in ascending order where the trainer goes by t2d."""
    if mask is None or mask.all():
        return
    foreign = ~mask[targets]
    if foreign.any():
        yield finding(
            "d2t-and-t2d-disagree",
            f"{int(foreign.sum())} of {len(targets)} draft tokens become target tokens that t2d does "
            "not name",
            "the drafter was trained on one set of tokens and drafts another; where t2d is right, "
            "these rows are wrong words",
            remake,
        )
        return
    if bool((np.diff(targets) < 0).any()):
        yield finding(
            "d2t-unsorted",
            "d2t does not ascend, but t2d picks the teacher's logits in ascending order",
            "in training each draft token was compared with another token's logit, so the drafter has "
            "learnt a permutation: acceptance about 0",
            ("train again with an ascending d2t:", *REMAKE),
        )

"""Embedding, head and sizes against the target's, and whose of them the engine uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.subject import Drafter, Engine, Subject, Target
from eagle3.headers import NUMPY, TensorInfo, read_rows

SAMPLED = 64  # rows of a table that are compared, spread evenly
UNRELATED = 0.1  # mean cosine of rows below which two tables have nothing in common
DECODED = {*NUMPY, "BF16", "F8_E4M3", "F8_E5M2"}
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
Rows = np.ndarray[Any, Any]


def check(subject: Subject) -> Iterator[Finding]:
    """All of it."""
    drafter = subject.drafter
    if drafter is None:
        return
    yield from sizes(subject, drafter)
    if not drafter.examined:
        return
    yield from embedding(subject, drafter)
    yield from head(subject, drafter)
    if subject.target is not None and drafter.weights is not None:
        yield from tokenizers(drafter.weights.folder, subject.target.folder)


def sizes(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """V and H as the drafter states them against the target."""
    target, held = subject.target, drafter.sizes
    if target is None:
        return
    pairs = (
        ("vocab_size", "vocab_size", held.vocab, target.vocab),
        ("target_hidden_size", "hidden_size", held.target_hidden, target.hidden),
    )
    for key, other, ours, theirs in pairs:
        if ours is None or theirs is None or ours == theirs:
            continue
        padded = key == "vocab_size" and target.size("vocab_size") == ours
        if padded:
            continue
        yield Finding(
            name="other-target",
            severity="error",
            where=f"{drafter.config_path}: {key}",
            what=f"the drafter is for a target with {other} {ours}, this target has {theirs}",
            effect="it does not load; where only the vocabulary differs, token ids mean other words",
            fix=("name the target that it was trained for", f'or write "{key}": {theirs}'),
            evidence=MEASURED,
        )


def embedding(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """The drafter's table against the target's, and whose the engine takes."""
    table = drafter.tensors.get("embed_tokens.weight")
    hidden, width = drafter.sizes.hidden, subject.target_hidden
    if table is None:
        if hidden is not None and width is not None and hidden != width:
            yield Finding(
                name="embedding-missing",
                severity="error",
                where=drafter.where,
                what=f"the drafter is {hidden} wide and has no embed_tokens.weight; the target's table, "
                f"{width} wide, does not fit",
                effect="the table stays random, or it does not load: acceptance about 0",
                fix=("export embed_tokens.weight with the drafter",),
                evidence=MEASURED,
            )
        return
    if len(table.shape) == 2 and (bad := not_finite(table)):
        yield no_numbers(subject.engine, table, bad, replaced=hidden == width)
        return
    theirs = subject.target.tensors.get("embedding") if subject.target is not None else None
    if theirs is None or len(table.shape) != 2 or table.shape[1] != theirs.shape[-1]:
        return
    equal, cosine = compare(table, theirs)
    if equal or cosine is None:
        return
    engine = subject.engine
    serving = engine.serving if engine is not None else None
    if engine is None or serving is None:
        return  # told as a fact: which of the two is used depends on the engine
    related = "is unrelated to" if cosine < UNRELATED else "differs from"
    said = (
        f"the file's embedding {related} the target's (mean cosine of {SAMPLED} rows {cosine:.2f})"
    )
    evidence = f"{serving.evidence.value}: {serving.source}"
    if not serving.own_embedding_kept and hidden == width:
        yield Finding(
            name="embedding-replaced",
            severity="warning",
            where=f"{table.file}: {table.name}",
            what=f"{said}, and {engine.words} replaces it by the target's in silence",
            effect="if it was trained, acceptance drops at every step; if an export made it up, nothing "
            "is lost",
            fix=("train with a frozen embedding where it is to be served there",),
            evidence=evidence,
        )
    elif serving.own_embedding_kept and cosine < UNRELATED:
        yield Finding(
            name="embedding-unrelated",
            severity="error",
            where=f"{table.file}: {table.name}",
            what=f"{said}, and {engine.words} keeps it",
            effect="if an export made it up (a fresh model, loaded with strict=False), acceptance is "
            "about 0; if it was trained from scratch, this is well",
            fix=("leave embed_tokens.weight out of the file, so that the target's is used",),
            evidence=evidence,
        )


def not_finite(table: TensorInfo) -> int:
    """How many of the sampled rows hold NaN or infinity."""
    if table.dtype not in DECODED:
        return 0
    rows = read_rows(table, spread(table.shape[0])).astype(np.float64)
    return int((~np.isfinite(rows)).any(axis=1).sum())


def no_numbers(engine: Engine | None, table: TensorInfo, bad: int, *, replaced: bool) -> Finding:
    """A table that an export left without numbers; harmless where the engine takes the target's."""
    serving = engine.serving if engine is not None else None
    unused = replaced and serving is not None and not serving.own_embedding_kept
    count = min(SAMPLED, table.shape[0])
    return Finding(
        name="embedding-not-finite",
        severity="warning" if unused else "error",
        where=f"{table.file}: {table.name}",
        what=f"{bad} of {count} sampled rows of the file's embedding hold NaN or infinity",
        effect="none there, since the target's table takes its place; elsewhere every logit is NaN"
        if unused
        else "every logit behind such a token is NaN: acceptance about 0",
        fix=("leave embed_tokens.weight out of the file, so that the target's is used",),
        evidence=MEASURED,
    )


def head(subject: Subject, drafter: Drafter) -> Iterator[Finding]:
    """A head that is lacking, and one whose rows are the target's in another order."""
    own = drafter.tensors.get("lm_head.weight")
    vocab, draft_vocab = drafter.sizes.vocab, drafter.sizes.draft_vocab
    if own is None:
        yield from no_head(subject.engine, drafter, vocab, draft_vocab)
        return
    theirs = subject.target.tensors.get("head") if subject.target is not None else None
    if theirs is None or vocab is None or draft_vocab is None or len(own.shape) != 2:
        return
    if own.shape[1] != theirs.shape[-1] or own.dtype not in DECODED or theirs.dtype not in DECODED:
        return
    targets = target_ids(drafter, own.shape[0], theirs.shape[0])
    if targets is None:
        return
    for order, ids in (("plain", np.arange(len(targets))), ("ascending", np.sort(targets))):
        picked = [row for row in spread(own.shape[0]) if targets[row] != ids[row]]
        if not picked or len(picked) < min(SAMPLED, own.shape[0]) // 2:
            continue
        rows = read_rows(own, picked)
        as_mapped = cosine_of(rows, read_rows(theirs, [int(targets[row]) for row in picked]))
        as_other = cosine_of(rows, read_rows(theirs, [int(ids[row]) for row in picked]))
        if as_other > 0.9 > as_mapped:
            yield Finding(
                name="head-in-another-order",
                severity="error",
                where=f"{own.file}: {own.name}",
                what=f"its rows are the target's head in {order} order (mean cosine "
                f"{as_other:.2f}), but d2t makes other tokens of them ({as_mapped:.2f})",
                effect="each logit is of another word than the one drafted: acceptance about 0",
                fix=("lm_head.weight = target_head[d2t + torch.arange(len(d2t))]",),
                evidence=MEASURED,
            )
            return


def target_ids(drafter: Drafter, rows: int, vocab: int) -> Rows | None:
    """d2t + arange, where it is sound and names tokens of the target."""
    offsets = drafter.values("d2t")
    if offsets is None or offsets.shape != (rows,) or offsets.dtype.kind not in "iu":
        return None
    targets = offsets.astype(np.int64) + np.arange(rows)
    return targets if bool(((targets >= 0) & (targets < vocab)).all()) else None


def no_head(
    engine: Engine | None, drafter: Drafter, vocab: int | None, draft_vocab: int | None
) -> Iterator[Finding]:
    """Whose head is used where the file has none."""
    serving = engine.serving if engine is not None else None
    declared = drafter.config.get("draft_vocab_size") is not None
    reduced = vocab is not None and draft_vocab is not None and draft_vocab < vocab
    random_there = engine is not None and engine.name == "sglang" and declared
    if not reduced and not random_there:
        return
    yield Finding(
        name="head-missing",
        severity="error",
        where=drafter.where,
        what="the file has no lm_head.weight"
        + (f", and config.json declares draft_vocab_size={draft_vocab}" if declared else ""),
        effect="SGLang leaves the head random and says nothing: accept length 1.00; the target's head "
        "has a row for every target token, not for every draft token"
        if random_there or engine is None
        else f"{engine.words} uses the target's head, whose rows are target tokens, not draft tokens",
        fix=(
            "lm_head.weight = target_head[d2t + torch.arange(len(d2t))]  # where it was the target's",
        )
        if reduced
        else ('"draft_vocab_size": null', "so that SGLang takes the target's head"),
        evidence=MEASURED if serving is None else f"{serving.evidence.value}: {serving.source}",
    )


def spread(count: int) -> list[int]:
    """Up to SAMPLED row numbers, evenly spread."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, SAMPLED))})


def compare(own: TensorInfo, theirs: TensorInfo) -> tuple[bool, float | None]:
    """(whether the sampled rows are the same, their mean cosine); None where they cannot be read."""
    if own.dtype not in DECODED or theirs.dtype not in DECODED or len(theirs.shape) != 2:
        return False, None
    picked = spread(min(own.shape[0], theirs.shape[0]))
    ours, others = read_rows(own, picked), read_rows(theirs, picked)
    rounded = same_but_for_rounding(ours, others)
    return rounded, cosine_of(ours, others)


def same_but_for_rounding(ours: Rows, others: Rows) -> bool:
    """Whether two tables differ by no more than a conversion between bf16, f16 and f32."""
    left, right = ours.astype(np.float64), others.astype(np.float64)
    return bool(np.allclose(left, right, rtol=2.0**-7, atol=1e-6, equal_nan=True))


def cosine_of(ours: Rows, others: Rows) -> float:
    """Mean cosine of rows; a row of zeros counts as orthogonal to everything."""
    left, right = ours.astype(np.float64), others.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    dots = (left * right).sum(axis=1)
    return float(np.mean(np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)))


def tokenizers(drafter: Path, target: Path) -> Iterator[Finding]:
    """A tokenizer or chat template of the drafter's that is not the target's."""
    ours, theirs = drafter / "tokenizer.json", target / "tokenizer.json"
    if ours.is_file() and theirs.is_file() and not same_content(ours, theirs):
        yield differs(ours, "tokenizer.json", f"the target's {theirs}")
    own, other = template(drafter), template(target)
    if own is not None and other is not None and own[1].strip() != other[1].strip():
        yield differs(drafter, own[0], f"the target's {other[0]} in {target}")


def differs(where: Path, name: str, other: str) -> Finding:
    """A file that decides what a prompt looks like, and is not the target's."""
    return Finding(
        name="tokenizer-differs",
        severity="warning",
        where=str(where),
        what=f"{name} is not {other}",
        effect="if the training text was made with it, prompts look other to the drafter: acceptance "
        "is good on training text and low in service",
        fix=("generate the training text with the target's tokenizer and template",),
        evidence=MEASURED,
    )


def template(folder: Path) -> tuple[str, str] | None:
    """A folder's chat template: in which of two files it stands, and its text."""
    try:
        return TEMPLATE, (folder / TEMPLATE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass  # not there, or no text: then it may stand in the other place
    try:
        held = json.loads((folder / TOKENIZER_CONFIG).read_bytes())
    except (OSError, ValueError):
        return None
    text = held.get("chat_template") if isinstance(held, dict) else None
    return (f"chat_template of {TOKENIZER_CONFIG}", text) if isinstance(text, str) else None


def same_content(ours: Path, theirs: Path) -> bool:
    """Whether two files are the same, or the same JSON in another order."""
    if digest(ours) == digest(theirs):
        return True
    try:
        return bool(json.loads(ours.read_bytes()) == json.loads(theirs.read_bytes()))
    except ValueError:
        return False


def digest(path: Path) -> bytes:
    """A file's sha256."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            hasher.update(part)
    return hasher.digest()


def facts(drafter: Drafter, target: Target | None) -> Iterator[str]:
    """Whose embedding the file holds."""
    table = drafter.tensors.get("embed_tokens.weight")
    theirs = target.tensors.get("embedding") if target is not None else None
    if table is None or theirs is None or table.shape[-1] != theirs.shape[-1]:
        return
    equal, cosine = compare(table, theirs)
    if equal:
        yield f"the file's embedding is the target's ({SAMPLED} rows compared)"
    elif cosine is not None:
        yield f"the file's embedding is not the target's (mean cosine of {SAMPLED} rows {cosine:.2f})"

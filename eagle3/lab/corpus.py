"""The lab's text: the Python standard library's own source, as token ids.

Files are split by a hash of their path, so that held-out text stays held out whatever the order of
a directory listing.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_TOKEN = "<|end|>"
HELD_OUT_SHARE = 16  # one file in this many is held out


def is_held_out(relative_path: str) -> bool:
    """Whether a file of the standard library is kept from every training (about one in 16)."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % HELD_OUT_SHARE == 0


def read_stdlib() -> tuple[list[str], list[str]]:
    """The sources of this interpreter's standard library as (training, held-out) texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if "site-packages" in relative or "lib2to3/tests/data" in relative:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few test files are written in other encodings on purpose
            continue
        if 200 < len(text) < 400_000:
            (held_out if is_held_out(relative) else training).append(text)
    if not training or not held_out:
        raise FileNotFoundError(f"no standard library source under {root}; the lab is built on it")
    return training, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with an end token as its last id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_TOKEN])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {vocab_size}")
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Each text as ids, closed by the end token."""
    end = tokenizer.get_vocab_size() - 1
    for encoding in tokenizer.encode_batch(texts):
        yield [*encoding.ids, end]

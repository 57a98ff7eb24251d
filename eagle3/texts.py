"""The texts of captured samples: lengths, mask, special tokens, repetitions, and the first prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3.data.form import RawSample
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.slots import SHIFTS

ARGMAX_MARGIN = 0.2  # by how much a shift must fit target_argmax better to be believed


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids that a target's config names; `others` are further special tokens of its tokenizer."""

    bos: frozenset[int] = frozenset()
    eos: frozenset[int] = frozenset()
    pad: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()

    def kinds(self) -> Iterator[tuple[str, frozenset[int]]]:
        """Each kind that has ids."""
        for name, ids in vars(self).items():
            if ids:
                yield name, ids


def sample_zero(sample: RawSample) -> dict[str, Any]:
    """What the first sample's prompt is, for comparison with what an engine is sent.

    The hash is sha256 over the ids up to the first masked one, in decimal, joined by commas.
    """
    masked = sample.loss_mask.nonzero().flatten()
    prompt = sample.input_ids[: int(masked[0]) if len(masked) else None].tolist()
    joined = ",".join(map(str, prompt))
    return {
        "file": "/".join(sample.path.parts[-2:]),
        "prompt_tokens": len(prompt),
        "prompt_ids_sha256": hashlib.sha256(joined.encode()).hexdigest(),
        "first_ids": prompt[:8],
        "last_ids": prompt[-8:],
    }


@dataclass(kw_only=True)
class TextFigures:
    """Counts over all texts so far; samples and positions are counted as named."""

    vocab: int
    special: SpecialIds
    samples: int = 0
    positions: int = 0
    masked: int = 0  # positions
    spans: int = 0  # runs of masked positions
    unmasked: int = 0  # samples without a masked position
    all_masked: int = 0  # samples with nothing else
    first_masked: int = 0  # samples whose first token is masked
    last_masked: int = 0
    outside: int = 0  # ids beyond the vocabulary
    doubled_bos: int = 0  # samples
    repeated: int = 0  # samples whose ids an earlier one has
    zero_tails: int = 0  # samples whose last rows are zero in every slot
    zero_positions: int = 0
    zero_masked: int = 0  # of those positions
    longest: int = 0
    shortest: int = 0
    at_longest: int = 0  # samples of exactly that length
    prompt_shortest: int | None = None
    prompt_longest: int | None = None
    tokens: Counter[str] = field(default_factory=Counter)  # special tokens, by kind
    tokens_masked: Counter[str] = field(default_factory=Counter)
    follows: dict[int, list[int]] = field(default_factory=lambda: {s: [0, 0] for s in SHIFTS})
    _seen: set[bytes] = field(default_factory=set)

    def add(self, sample: RawSample) -> None:
        """Count one sample."""
        ids, mask = sample.input_ids.cpu(), sample.loss_mask.cpu().bool()
        self.samples += 1
        self.positions += len(ids)
        self.outside += int(((ids < 0) | (ids >= self.vocab)).sum())
        digest = hashlib.sha256(ids.long().contiguous().numpy().tobytes()).digest()[:12]
        self.repeated += digest in self._seen
        self._seen.add(digest)
        self._add_length(len(ids))
        self._add_mask(mask)
        self._add_special(ids, mask)
        self._add_tail(sample, mask)
        if sample.target_argmax is not None:
            self._add_argmax(ids, mask, sample.target_argmax.cpu())

    def _add_length(self, length: int) -> None:
        if length > self.longest:
            self.longest, self.at_longest = length, 0
        self.at_longest += length == self.longest
        self.shortest = min(self.shortest or length, length)

    def _add_mask(self, mask: Tensor) -> None:
        places = mask.nonzero().flatten()
        self.masked += len(places)
        if not len(places):
            self.unmasked += 1
            return
        self.spans += 1 + int((places.diff() > 1).sum())
        self.all_masked += len(places) == len(mask)
        self.first_masked += bool(mask[0])
        self.last_masked += bool(mask[-1])
        prompt = int(places[0])
        self.prompt_shortest = min(prompt, prompt if (p := self.prompt_shortest) is None else p)
        self.prompt_longest = max(prompt, self.prompt_longest or 0)

    def _add_special(self, ids: Tensor, mask: Tensor) -> None:
        for kind, members in self.special.kinds():
            here = torch.isin(ids, torch.tensor(sorted(members)))
            self.tokens[kind] += int(here.sum())
            self.tokens_masked[kind] += int((here & mask).sum())
        if len(ids) > 1:
            self.doubled_bos += int(ids[0]) == int(ids[1]) and int(ids[0]) in self.special.bos

    def _add_tail(self, sample: RawSample, mask: Tensor) -> None:
        lives = torch.zeros_like(mask)
        for slot in sample.slots:
            if (last := slot[-1]).any() or not last.isfinite().all():
                return
            lives |= (slot != 0).any(-1).cpu()
        places = lives.nonzero().flatten()
        end = int(places[-1]) + 1 if len(places) else 0
        self.zero_tails += 1
        self.zero_positions += len(mask) - end
        self.zero_masked += int(mask[end:].sum())

    def _add_argmax(self, ids: Tensor, mask: Tensor, argmax: Tensor) -> None:
        rows = mask[1:].nonzero().flatten()
        for shift, counts in self.follows.items():
            places = rows + 1 + shift
            inside = places < len(ids)
            counts[0] += int((argmax[rows[inside]] == ids[places[inside]]).sum())
            counts[1] += int(inside.sum())

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        counts = {k: v for k, v in vars(self).items() if isinstance(v, int) or v is None}
        return {
            **counts,
            "mask_share": self.masked / self.positions if self.positions else None,
            "special_tokens": dict(self.tokens),
            "special_tokens_masked": dict(self.tokens_masked),
            "argmax_is_the_text": {f"{shift:+d}": c for shift, c in self.follows.items()},
        }

    def findings(self, where: str) -> Iterator[Finding]:
        """What is wrong with the texts or their mask."""
        if self.outside:
            yield measured(
                "ids-outside-vocabulary",
                "error",
                where,
                f"{self.outside} of {self.positions} ids lie outside the target's vocabulary of "
                f"{self.vocab}",
                "the data is another model's, or its ids are corrupt; no score on it means anything",
                "capture the data again with this target",
            )
        if self.zero_tails:
            scored = f", {self.zero_masked} of them in the loss mask" if self.zero_masked else ""
            yield measured(
                "zero-tail",
                "error" if self.zero_masked else "warning",
                where,
                f"{self.zero_tails} of {self.samples} samples end in rows that are zero in every slot, "
                f"{self.zero_positions} positions in all{scored}",
                "padding is treated as text: scored, it lowers accuracy and trains on nothing"
                if self.zero_masked
                else "padding is treated as text by whatever does not read the mask",
                "cut input_ids, loss_mask and every slot at the text's end",
            )
        if self.repeated:
            yield measured(
                "repeated-samples",
                "warning",
                where,
                f"{self.repeated} of {self.samples} samples repeat the ids of an earlier one",
                "repeated texts count several times, and intervals come out too narrow",
                "remove the repetitions",
            )
        if self.doubled_bos:
            yield measured(
                "doubled-bos",
                "warning",
                where,
                f"{self.doubled_bos} of {self.samples} samples begin with the bos token twice",
                "the template and the tokenizer both add it; an engine that adds one sees other states",
                "tokenize rendered prompts with add_special_tokens=False and capture again",
            )
        yield from self._mask_findings(where)
        yield from self._argmax_findings(where)

    def _mask_findings(self, where: str) -> Iterator[Finding]:
        if self.unmasked:
            yield measured(
                "mask-empty",
                "warning",
                where,
                f"{self.unmasked} of {self.samples} samples have an empty loss mask",
                "they train nothing and cannot be scored",
                "find out why the mask's rule does not match these texts, or set data.damaged=skip",
            )
        if self.all_masked:
            yield measured(
                "mask-covers-everything",
                "warning",
                where,
                f"the loss mask of {self.all_masked} of {self.samples} samples covers every position",
                "prompt tokens, which no drafter ever drafts, are scored and trained on",
                "mask the positions that the target wrote",
            )
        elif self.first_masked:
            yield measured(
                "mask-covers-first-token",
                "warning",
                where,
                f"the loss mask of {self.first_masked} of {self.samples} samples covers the first "
                "token, which nothing can predict",
                "the mask seems to be shifted, or to include prompts",
                "mask the positions that the target wrote",
            )
        for kind in ("bos", "pad"):
            only = getattr(self.special, kind) - self.special.eos
            if only and self.tokens_masked[kind]:
                yield measured(
                    f"mask-covers-{kind}",
                    "warning",
                    where,
                    f"the loss mask covers {kind} tokens at {self.tokens_masked[kind]} positions",
                    "tokens that the target does not write are scored",
                    f"leave {kind} tokens out of the mask",
                )

    def _argmax_findings(self, where: str) -> Iterator[Finding]:
        shares = {shift: hit / total for shift, (hit, total) in self.follows.items() if total}
        if not shares:
            return
        best = max(SHIFTS, key=lambda shift: shares.get(shift, 0.0))
        if best and shares[best] > shares.get(0, 0.0) + ARGMAX_MARGIN:
            yield measured(
                "argmax-shifted",
                "error",
                where,
                f"target_argmax is the text's token {1 + best} further at {shares[best]:.1%} of "
                f"positions, and the next one at {shares.get(0, 0.0):.1%}: it is shifted by {best:+d}",
                "accuracy against target_argmax is that of another position",
                "store at t what the target chooses behind input_ids[: t + 1]",
            )


def measured(name: str, severity: str, where: str, what: str, effect: str, *fix: str) -> Finding:
    """Something that was measured in the data."""
    return Finding(
        name=name,
        severity=severity,
        where=where,
        what=what,
        effect=effect,
        fix=fix,
        evidence=MEASURED,
    )


def special_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> SpecialIds:
    """The ids that config.json and generation_config.json name, a number or a list each."""
    text = config.get("text_config", config)
    kinds: dict[str, frozenset[int]] = {}
    for kind in ("bos", "eos", "pad"):
        named: set[int] = set()
        for block in (config, text, generation):
            value = block.get(f"{kind}_token_id")
            named |= {v for v in (value if isinstance(value, list) else [value]) if type(v) is int}
        kinds[kind] = frozenset(named)
    return SpecialIds(**kinds)

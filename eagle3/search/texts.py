"""The texts that a search scores: read once, with every teacher's choices made once.

States stay in the numbers they are stored in, mapped where the layout allows it, and become float32
a batch at a time: a few hundred texts of a large target would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3.data.argmax import with_argmax
from eagle3.data.form import DataForm
from eagle3.errors import BadInput
from eagle3.metrics import Truth, scored_rows, truth_tokens
from eagle3.samples import LeftOut, Sample, answer_start, read_samples
from eagle3.search.teachers import Teacher, teachers_of
from eagle3.slots import embedding_scale
from eagle3.target import TargetParts

ROWS_AT_ONCE = 256  # bounds a teacher's logits to [256, V]
# Models that multiply the embedding's rows by a number that no key of their config names.
SCALED = ("gemma", "paligemma", "shieldgemma2", "vaultgemma", "recurrent_gemma", "t5")
MoreStates = Callable[[Sequence[Tensor]], Sequence[Mapping[int, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text of T positions; rows unshifted, as in eagle3.samples."""

    path: Path
    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool
    rows: Tensor  # [R] behind which a chain is scored, ascending
    states: Mapping[int, Tensor]  # canonical k → [T, H], as stored; float() of it is what is fed
    truths: Mapping[
        str, Tensor
    ]  # Teacher.name → [T]: what a drafted token for p must be; -1 unknown
    computed: frozenset[int] = frozenset()  # states that are not in the data, but were made


def load_texts(
    form: DataForm,
    target: TargetParts,
    *,
    max_samples: int | None,
    damaged: str,
    argmax: Path | None,
    steps: int,
    left_out: LeftOut,
    device: str = "cpu",
    teachers: Sequence[Teacher] | None = None,
    more_states: MoreStates | None = None,
    shift: int = 0,
    in_place: Collection[int] = (),
    in_answer: bool = False,
    seen: Callable[[Sample], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Text]:
    """Every text with all its states and every teacher's choices.

    `teachers` are those whose choices are made, None for all of teachers_of. `more_states` is given
    all texts [T] and makes states that are not stored; where state 0 is not, it is made from the
    target's embedding (see why_no_embedding). `shift` is how far the data's rows lag behind their
    positions: row t belongs to position t + shift, but for the slots `in_place`, and where `in_answer`
    but for the prompt's rows. `seen` is shown each sample as it was read. Where one text lacks the
    target's own choices, none keeps them: truths are never mixed.
    """
    if teachers is None:
        teachers = teachers_of(form, target, has_argmax=False)
    samples = read_samples(
        form,
        vocab=target.vocab,
        hidden=target.hidden,
        device=device,
        damaged=damaged,
        max_samples=max_samples,
        left_out=left_out,
    )
    if argmax is not None:
        samples = with_argmax(samples, argmax, form.folder, target.vocab)
    total = len(form.files[:max_samples])
    embed = why_no_embedding(target) is None
    shifts = [0 if i in in_place else shift for i in range(len(form.slots))]
    texts: list[Text] = []
    for sample in samples:
        start = answer_start(sample.loss_mask) if in_answer else 0
        stored = (aligned(h, by, start) for h, by in zip(sample.stored, shifts, strict=True))
        placed = replace(sample, stored=tuple(stored))
        texts.append(text_of(placed, form, target, teachers, steps, embed=embed))
        if seen is not None:
            seen(sample)
        if progress is not None:
            progress(len(texts), total)
    if not texts:
        raise BadInput(f"{form.folder} holds no sample that can be scored")
    argmax_name = Truth.target_argmax.value
    if not all(argmax_name in text.truths for text in texts):
        texts = [
            replace(text, truths={k: v for k, v in text.truths.items() if k != argmax_name})
            for text in texts
        ]
    if more_states is not None:
        made = more_states([text.ids for text in texts])
        texts = [with_states(text, more) for text, more in zip(texts, made, strict=True)]
    return texts


def text_of(
    sample: Sample,
    form: DataForm,
    target: TargetParts,
    teachers: Sequence[Teacher],
    steps: int,
    *,
    embed: bool,
) -> Text:
    """A sample as a search needs it."""
    ids, rows = sample.input_ids, scored_rows(sample.loss_mask)
    stored = sample.stored
    chosen: dict[str, Tensor] = {}
    if sample.target_argmax is not None:
        chosen[Truth.target_argmax.value] = sample.target_argmax
    asked = [(t.name, t.slot, t.norms) for t in teachers if t.slot is not None]
    made = [(stored[slot], norms - form.slots[slot].normed) for _, slot, norms in asked]
    for (name, _, _), tokens in zip(asked, choices(made, target, rows, steps), strict=True):
        chosen[name] = tokens
    where = str(sample.path)
    truths = {Truth.next_token.value: truth_tokens(ids, None, Truth.next_token, where)}
    for name, tokens in chosen.items():
        truths[name] = truth_tokens(ids, tokens, Truth.target_argmax, where)
    states = {
        slot.state: stored[i].to(ids.device)
        for i, slot in enumerate(form.slots)
        if slot.state is not None and not slot.normed
    }
    computed = frozenset({0} if embed and 0 not in states else ())
    if computed:
        states[0] = target.embedding[ids.to(target.embedding.device)].to(ids.device)
    return Text(
        path=sample.path,
        ids=ids,
        mask=sample.loss_mask,
        rows=rows,
        states=states,
        truths=truths,
        computed=computed,
    )


def aligned(h: Tensor, shift: int, start: int = 0) -> Tensor:
    """States [T, H] of which row t belongs to position t + shift from row `start` on, each at its
    position; where no row belongs, 0.
    """
    if not shift:
        return h
    moved = torch.roll(h[start:], shift, 0)
    edge = moved[:shift] if shift > 0 else moved[shift:]
    edge.zero_()
    return torch.cat([h[:start], moved])


def choices(
    teachers: Sequence[tuple[Tensor, int]], target: TargetParts, rows: Tensor, steps: int
) -> list[Tensor]:
    """What teachers choose behind row + 1 … row + steps, [T] each; else -1.

    A teacher is its states h [T, H] and how often the target's final norm is put before its head. All go
    through the head together, since a large one costs most by being read.
    """
    behind = (rows[:, None] + 1 + torch.arange(steps, device=rows.device)).flatten().unique()
    parts = []
    for h, norms in teachers:
        picked = h[behind[behind < len(h)].to(h.device)].to(target.device).float()
        for _ in range(norms):
            picked = target.final_norm()(picked)
        parts.append(picked)
    if not parts:
        return []
    tokens = []
    for some in torch.cat(parts).split(ROWS_AT_ONCE):
        # A candidate need not be a sound teacher: what is no number is not chosen.
        logits = target.logits(some, normed=True).nan_to_num(nan=float("-inf"))
        tokens.append(logits.argmax(-1).to(rows.device))
    found = []
    for (h, _), own in zip(teachers, torch.cat(tokens).split([len(p) for p in parts]), strict=True):
        chosen = torch.full((len(h),), -1, dtype=torch.int64, device=rows.device)
        chosen[behind[behind < len(h)]] = own
        found.append(chosen)
    return found


def with_states(text: Text, more: Mapping[int, Tensor]) -> Text:
    """The text with states that were made for it; stored ones stay as they are."""
    new = {k: h.to(text.ids.device) for k, h in more.items() if k not in text.states}
    return replace(text, states={**text.states, **new}, computed=text.computed | new.keys())


def known_states(texts: Sequence[Text]) -> tuple[int, ...]:
    """The canonical states that every text holds, ascending."""
    return tuple(sorted(set.intersection(*(set(text.states) for text in texts))))


def why_no_embedding(target: TargetParts) -> str | None:
    """Why state 0 cannot be made from the target's embedding; None: it can."""
    kind = str(target.config.get("model_type"))
    if kind.startswith(SCALED) or embedding_scale(target.config) != 1.0:
        return (
            f"the target ({kind}) multiplies its embedding before the first layer, so that state 0 is "
            "only taken from data that stores it"
        )
    return None

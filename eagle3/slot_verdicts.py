"""What a dump declares of its slots, set against what was measured: a verdict each.

verified      a measurement of its own says that the slot is what is declared
contradicted  a measurement says that it is not
as declared   nothing at hand can tell; the sentence says why

That the head makes the target's own choice of a slot verifies nothing: of the state before the end it
makes nearly the same. Only a slot of which it makes another choice is told apart by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.data.form import DataForm, Slot
from eagle3.metrics import Count, Rate, Truth, rate
from eagle3.slot_states import FAR_BELOW, Located
from eagle3.slots import UNIT, SlotFigures

VERIFIED, CONTRADICTED, AS_DECLARED = "verified", "contradicted", "as declared"
MOSTLY = 0.9  # share of rows from which a slot counts as the embedding, or as normed
END = 0.97  # the target's end leads to its own choice but for rounding
MARGIN = 0.1  # by how much a shift must agree better with the text to be believed
TRUTHS = (Truth.next_token, Truth.target_argmax)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One slot with all that is known of it."""

    index: int
    slot: Slot
    figures: SlotFigures
    located: Located | None
    num_layers: int
    seed: int
    data_shift: int = 0  # row t of the data's states belongs to position t + data_shift

    @property
    def declared_in_words(self) -> str:
        """'declared state 59'."""
        if self.slot.state is None:
            return "not declared"
        return f"declared state {self.slot.state}"

    @property
    def in_words(self) -> str:
        """'hidden_states[3], declared state 59'."""
        return f"{self.slot.name}, {self.declared_in_words}"

    @property
    def embedding_factor(self) -> float | None:
        """The one number by which the rows are the embedding's; None where there is none."""
        if self.figures.matches[0].share("aligned") < MOSTLY:
            return None
        low, middle, high = (self.figures.factor.quantile(q) for q in (0.05, 0.5, 0.95))
        if low is None or middle is None or high is None or high > low * (1 + UNIT):
            return None
        return middle

    @property
    def is_embedding(self) -> bool:
        """Whether the rows are the embedding output's, or √H times the table's, as Gemma has it."""
        if self.located and 0 not in self.located.states:
            return False  # the target's own state 0 is another
        if max(m.share("close") for m in self.figures.matches.values()) >= MOSTLY:
            return True
        factor = self.embedding_factor
        return factor is not None and abs(factor / math.sqrt(self.figures.width) - 1) <= UNIT

    @property
    def is_normed(self) -> bool | None:
        """Whether the rows lie behind the final norm; None where that cannot be measured."""
        if self.located and self.located.found:
            return self.located.normed
        share = self.figures.unit_share
        return None if share is None else share >= MOSTLY and not self.is_embedding

    @property
    def normed(self) -> bool:
        """Whether they do, as measured or else as declared."""
        return self.slot.normed if self.is_normed is None else self.is_normed

    @property
    def shift(self) -> int:
        """How far the rows are from the ids they stand beside, where the states themselves show it."""
        if self.is_embedding and not self.in_answer:
            return max(self.figures.matches, key=lambda s: self.figures.matches[s].share("close"))
        return self.located.shift if self.located and self.located.found else 0

    @property
    def in_answer(self) -> bool:
        """Whether that is so over the answer alone, while the prompt's rows are in their places."""
        return bool(self.located and self.located.found and self.located.in_answer)

    @property
    def found(self) -> tuple[int, ...]:
        """The canonical states that the slot was found to be, all equal to each other."""
        states = set(self.located.found) if self.located else set()
        return tuple(sorted(states | {0} if self.is_embedding else states))

    def counts(self, truth: Truth, shift: int | None = None) -> list[Count]:
        """How often the head's choices are the truth's, a sample: through the norm where that is due."""
        own = self.shift if self.found else self.data_shift
        by = own if shift is None else shift
        return self.figures.agreements.get((truth, not self.normed, by), [])

    def agreement(self, truth: Truth, shift: int | None = None) -> Rate | None:
        """The head's agreement with a truth."""
        return rate(self.counts(truth, shift), truth, limits=(0.0, 1.0), seed=self.seed)

    @property
    def leads_to_choice(self) -> bool | None:
        """Whether the head makes the target's own choice of the slot; None: cannot be told.

        Either way the whole interval lies on one side.
        """
        own = self.agreement(Truth.target_argmax)
        if own is None or own.low < END <= own.high:
            return None
        return own.low >= END

    def state(self) -> tuple[str, str]:
        """Verdict on the declared state and why, in words."""
        declared, found = self.slot.state, self.found
        if found:
            what = f"it is {self.found_in_words()}"
            if declared is None or declared in found:
                return VERIFIED, what
            if self.located and self.located.open_end and declared > self.located.computed:
                return AS_DECLARED, f"{what}, or a later state that equals it"
            return CONTRADICTED, what
        if declared is None:
            return AS_DECLARED, "no state is declared, and none could be told"
        if declared == 0 and self.figures.matches[0].rows:
            return self.instead_of_embedding()
        if self.located and declared <= self.located.computed:
            return self.beside_computed(self.located, declared)
        return self.by_the_end(declared)

    def found_in_words(self) -> str:
        """'state 3', with the measure."""
        parts = []
        if self.is_embedding:
            match, factor = self.figures.matches[self.shift], self.embedding_factor
            parts.append(
                f"the embedding output ({match.exact} of {match.rows} rows are the token's exactly, "
                f"{match.close} within 1 %)"
                if match.share("close") >= MOSTLY or factor is None
                else f"the embedding output (its rows times {factor:.4g}, the root of their width)"
            )
        if located := self.located if self.located and self.located.found else None:
            margin = (
                ""
                if located.margin is None
                else f", the next state that differs {located.margin:.2g} away"
            )
            parts.append(
                f"{states_in_words(located.states)} (relative error {located.error:.2g}{margin})"
            )
        return " and ".join(parts)

    def instead_of_embedding(self) -> tuple[str, str]:
        """The verdict on a slot that is declared the embedding output and was not found to be it."""
        match = self.figures.matches[0]
        if self.embedding_factor is not None:
            times = f"its rows are the embedding's times {self.embedding_factor:.4g}"
            if self.located is None:
                return AS_DECLARED, (
                    f"{times}, a constant factor of the embedding, which no layers that were run show "
                    "to be the target's or not"
                )
            return CONTRADICTED, f"{times}, which is not the state 0 that the target makes"
        if match.share("input_normed") >= MOSTLY:
            return CONTRADICTED, "its rows are the embedding's behind the first layer's input norm"
        if match.share("aligned") >= MOSTLY:
            return CONTRADICTED, "its rows are the embedding's behind a norm"
        share = match.share("close")
        return CONTRADICTED, f"only {share:.1%} of its rows are those of the embedding"

    def beside_computed(self, located: Located, declared: int) -> tuple[str, str]:
        """The verdict where the target made the declared state, but the slot was not found."""
        error = located.errors[declared]
        if self.data_shift:
            return AS_DECLARED, (
                "the states are shifted against the ids, so that the target's layers, run over these "
                "ids, make others"
            )
        if declared in located.states:
            return AS_DECLARED, (
                f"it is one of {states_in_words(located.states)}, which lie too near to each other "
                f"({located.margin or 0:.2g}) to be told apart at an error of {located.error:.2g}"
            )
        if error > located.error / FAR_BELOW or error > 0.5:
            return CONTRADICTED, (
                f"it is not the state {declared} that the target makes (relative error {error:.2g}), "
                f"and none of states 0 to {located.computed}"
            )
        return AS_DECLARED, (
            f"it is near the state {declared} that the target makes, but not near enough to tell "
            f"(relative error {error:.2g})"
        )

    def by_the_end(self, declared: int) -> tuple[str, str]:
        """The verdict on a state that was not computed: its choices may show that it is not the last."""
        beyond = ""
        if self.located:
            beyond = f"; it is none of states 0 to {self.located.computed}"
        own = self.agreement(Truth.target_argmax)
        if declared < self.num_layers:
            return AS_DECLARED, f"the layers below it were not run{beyond}"
        if own is None:
            return AS_DECLARED, f"nothing compares its choices with the target's own{beyond}"
        chooses = f"the head makes the target's own choice of {share_in_words(own)}"
        if self.leads_to_choice is False:
            return CONTRADICTED, chooses
        if self.leads_to_choice:
            return AS_DECLARED, (
                f"consistent with the target's end ({chooses}), as the state before it may be{beyond}"
            )
        return AS_DECLARED, f"{chooses}, which does not tell it from a state near the end{beyond}"

    def norm(self) -> tuple[str, str]:
        """Verdict on whether the slot lies behind the final norm, and why."""
        share = self.figures.unit_share
        if self.is_embedding or self.is_normed is None:
            return AS_DECLARED, ""
        place = "behind" if self.is_normed else "before"
        measured = (
            "as the state that it was found to be"  # there is no weight of an RMSNorm to divide by
            if share is None
            else f"divided by its weight, {share:.1%} of the rows have RMS 1"
        )
        what = f"{place} the final norm ({measured})"
        return (VERIFIED if self.is_normed == self.slot.normed else CONTRADICTED), what

    def verdict(self) -> tuple[str, str]:
        """One verdict on the slot, and one sentence."""
        (state, what), (norm, where) = self.state(), self.norm()
        verdict = CONTRADICTED if norm == CONTRADICTED else state
        sentence = f"{verdict}: {self.in_words}; {what}{f'; {where}' if where else ''}"
        if self.shift:
            over = "over the answer alone, " if self.in_answer else ""
            sentence += f"; {over}row t belongs to position t{self.shift:+d}"
        return verdict, f"{sentence}."

    def plain(self, *, teacher: bool) -> dict[str, Any]:
        """As plain data, for a result."""
        verdict, sentence = self.verdict()
        return {
            "index": self.index,
            **vars(self.slot),
            "teacher": teacher,
            "verdict": verdict,
            "found": list(self.found) or None,
            "what": sentence,
            **self.figures.plain(),
            "behind_final_norm": self.is_normed,
            "first_layers": self.located.plain() if self.located else None,
            "agreement": {truth.value: self.agreements(truth) for truth in TRUTHS},
        }

    def agreements(self, truth: Truth) -> dict[str, Any]:
        """The head's agreement with a truth, through the final norm and without it, as plain data."""
        plain: dict[str, Any] = {}
        for name, through in (("norm_and_head", True), ("head", False)):
            counts = self.figures.agreements.get((truth, through, self.data_shift), [])
            found = rate(counts, truth, limits=(0.0, 1.0), seed=self.seed)
            plain[name] = None if found is None else found.plain()
        return plain


def judge(
    form: DataForm,
    figures: Sequence[SlotFigures],
    located: Sequence[Located | None],
    num_layers: int,
    seed: int,
) -> list[Judged]:
    """Every slot with its figures; a shift that shows is taken into account for all of them."""
    slots = [
        Judged(index=i, slot=slot, figures=f, located=where, num_layers=num_layers, seed=seed)
        for i, (slot, f, where) in enumerate(zip(form.slots, figures, located, strict=True))
    ]
    shown = next((s.shift for s in slots if s.shift), 0)
    settled = shown or any(s.found for s in slots)
    by = shown if settled else shift_by_choices(slots[form.teacher])
    return [replace(s, data_shift=by) for s in slots]


def shift_by_choices(judged: Judged) -> int:
    """The shift at which a slot's choices agree best with the text; 0 unless that is plain.

    Early states repeat the token they see, which looks like a shift by -1; so only a slot that is
    taken for the target's end may show that one.
    """
    end = judged.slot.state in (None, judged.num_layers)
    known = {
        shift: found
        for shift in ((0, 1, -1) if end else (0, 1))
        if (found := judged.agreement(Truth.next_token, shift))
    }
    if not known:
        return 0
    best = max(known, key=lambda shift: known[shift].value)
    straight = known[0].high if 0 in known else 0.0
    return best if known[best].low > straight + MARGIN else 0


def states_in_words(states: Sequence[int]) -> str:
    """'state 3', or the set of equal ones."""
    if len(states) == 1:
        return f"state {states[0]}"
    runs: list[list[int]] = []
    for k in states:
        if runs and k == runs[-1][1] + 1:
            runs[-1][1] = k
        else:
            runs.append([k, k])
    named = ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs)
    return f"states {named}, all equal here" if len(states) > 1 else named


def share_in_words(r: Rate) -> str:
    """'62.1 % of positions [60.0, 64.2]'."""
    return f"{r.value:.1%} of positions [{r.low:.1%}, {r.high:.1%}]"

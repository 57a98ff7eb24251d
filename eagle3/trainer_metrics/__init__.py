"""Each trainer's own metrics, so that a person can meet the figure of a training log.

`count_text` counts one text for any of the trainers, in one rollout; `summarise` pools the texts.
The figures of one trainer are comparable with its log, within the differences it lists, and with
nothing else: trainers disagree on what a position is, on the teacher and on its vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from eagle3.metrics import CONFIDENCE, Count, Truth, bootstrap_weights, rate
from eagle3.model import Drafter
from eagle3.samples import Sample
from eagle3.target import TargetParts
from eagle3.trainer_metrics import specforge, speculators
from eagle3.trainer_metrics.rollout import TeacherLogits, forced_rollout
from eagle3.trainer_metrics.tally import Tally

# How many steps each trainer unrolls, unless its config says otherwise.
STEPS = {"specforge": specforge.STEPS, "speculators": speculators.STEPS}
DEFINITIONS = {**specforge.DEFINITIONS, **speculators.DEFINITIONS}
DIFFERENCES = {"specforge": specforge.DIFFERENCES, "speculators": speculators.DIFFERENCES}
TRUTHS = {"specforge": specforge.TRUTH, "speculators": speculators.TRUTH}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A trainer's figure over all texts with its 95 % interval (a bootstrap over texts).

    `numerator` and `denominator` are None for a figure made of several rates.
    """

    value: float
    low: float
    high: float
    numerator: float | None
    denominator: int | None
    truth: str
    definition: str

    def plain(self) -> dict[str, Any]:
        """As plain data for a result file."""
        counts = {"numerator": self.numerator, "denominator": self.denominator}
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            **(counts if self.denominator is not None else {}),
            "truth": self.truth,
            "definition": self.definition,
        }


def stored_teacher(sample: Sample, target: TargetParts) -> TeacherLogits:
    """The teacher as a trainer takes it from a dump: its last slot through the target's head.

    Through the final norm first where the slot was stored before it.
    """

    def logits(positions: Tensor) -> Tensor:
        return target.logits(sample.teacher[positions], normed=sample.teacher_normed)

    return logits


def count_text(
    steps: Mapping[str, int],
    drafter: Drafter,
    embedding: Tensor,
    sample: Sample,
    aux: Tensor,
    teacher: TeacherLogits,
    *,
    to_target: Tensor,
    head: Tensor | None = None,
) -> dict[str, Tally]:
    """Counts of one text by metric name (curves as NAME@step), for each trainer of `steps`.

    steps {trainer: how many steps it unrolls} · embedding [V, H_d] · aux [T, A·H] from sample.aux ·
    teacher from stored_teacher · to_target [V_d] from draft_to_target_ids · head [V_d, H_d] in the
    place of the drafter's own.
    """
    mask = sample.loss_mask
    wanted = []
    if "specforge" in steps:
        wanted.append(specforge.rows(mask, steps["specforge"]))
    if "speculators" in steps:
        wanted.append(speculators.rows(mask))
    forced = forced_rollout(
        drafter,
        embedding,
        sample.input_ids,
        aux,
        torch.cat(wanted).unique(),
        steps=max(steps.values()),
        teacher=teacher,
        head=head,
    )
    counts: dict[str, Tally] = {}
    if "specforge" in steps:
        counts |= specforge.count(forced, mask, drafter.t2d, to_target, steps["specforge"])
    if "speculators" in steps:
        counts |= speculators.count(forced, mask, steps["speculators"])
    return counts


def summarise(
    texts: Sequence[Mapping[str, Tally]], seed: int = 0
) -> tuple[dict[str, Figure], dict[str, list[tuple[int, Figure]]], list[str]]:
    """Metrics, curves over steps, and notes on what could not be computed for want of positions."""
    metrics: dict[str, Figure] = {}
    curves: dict[str, list[tuple[int, Figure]]] = {}
    notes: list[str] = []
    for key in texts[0]:
        name, step = key.split("@")
        found = pooled(name, [text[key] for text in texts], seed)
        if found is None:
            notes.append(f"{name} has no position on step {step} and is left out there")
        else:
            curves.setdefault(name, []).append((int(step), found))
    steps = [key for key in texts[0] if key.startswith("specforge/acc@")]
    if steps:
        every = [merged([text[key] for key in steps]) for text in texts]
        if (found := pooled("specforge/acc_all_steps", every, seed)) is not None:
            metrics["specforge/acc_all_steps"] = found
            metrics["specforge/simulated_acc_len"] = simulated_length(
                [[text[key] for text in texts] for key in steps], seed
            )
    return metrics, curves, notes


def pooled(name: str, tallies: Sequence[Tally], seed: int) -> Figure | None:
    """A rate over texts; None without positions."""
    # A tally is a count whose numerator may be a sum of probabilities; the interval does not mind.
    found = rate(cast(Sequence[Count], tallies), Truth.stored_teacher, limits=(0.0, 1.0), seed=seed)
    if found is None:
        return None
    whole = merged(tallies)
    return Figure(
        value=found.value
        if isinstance(whole.numerator, int)
        else whole.numerator / whole.denominator,
        low=found.low,
        high=found.high,
        numerator=whole.numerator,
        denominator=whole.denominator,
        truth=TRUTHS[name.split("/")[0]],
        definition=DEFINITIONS[name],
    )


def merged(tallies: Sequence[Tally]) -> Tally:
    """The sum of several."""
    return Tally(sum(t.numerator for t in tallies), sum(t.denominator for t in tallies))


def simulated_length(tallies: Sequence[Sequence[Tally]], seed: int) -> Figure:
    """SpecForge's simulated accept length from the marginal accuracies [step][text]."""
    numerators = torch.tensor([[t.numerator for t in step] for step in tallies]).double()
    denominators = torch.tensor([[t.denominator for t in step] for step in tallies]).double()

    def lengths(weights: Tensor) -> Tensor:  # [K, N] → [K]
        # A step without positions counts as one never accepted, as in the trainer.
        rates = (weights @ numerators.T) / (weights @ denominators.T).clamp(min=1)
        return rates.cumprod(1).sum(1)

    texts = numerators.shape[1]
    value = float(lengths(torch.ones(1, texts, dtype=torch.float64)))
    low, high = 0.0, float(len(tallies))
    if int((denominators[0] > 0).sum()) > 1:  # one text says nothing about the spread between texts
        tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).double()
        low, high = torch.quantile(lengths(bootstrap_weights(texts, seed)), tails).tolist()
        if value in (
            0.0,
            float(len(tallies)),
        ):  # no spread to resample: the exact binomial bound a step
            tail = (1 - CONFIDENCE) / 2
            reach = 1 - tail ** (1 / denominators.sum(1).clamp(min=1))
            bound = float((reach if value == 0.0 else 1 - reach).cumprod(0).sum())
            low, high = (value, bound) if value == 0.0 else (bound, value)
    return Figure(
        value=value,
        low=min(low, value),
        high=max(high, value),
        numerator=None,
        denominator=None,
        truth=specforge.TRUTH,
        definition=DEFINITIONS["specforge/simulated_acc_len"],
    )

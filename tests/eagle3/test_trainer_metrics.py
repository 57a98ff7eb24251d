"""The trainers' own metrics on cases whose counts are known without running a trainer.

tests/peers/test_metrics.py holds the same code against the trainers themselves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3.chain import draft_chains, draft_to_target_ids
from eagle3.errors import BadInput
from eagle3.model import Drafter
from eagle3.samples import Sample
from eagle3.trainer_metrics import (
    DEFINITIONS,
    DIFFERENCES,
    STEPS,
    count_text,
    rollout,
    specforge,
    speculators,
    stored_teacher,
    summarise,
)
from eagle3.trainer_metrics.rollout import Forced, forced_rollout
from eagle3.trainer_metrics.tally import Tally
from eagle3.wiring import D2T
from tests.eagle3.small import SHAPE, random_drafter

LENGTH = 14


def bools(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def forced(
    rows: list[int], drafted: list[list[int]], teacher: list[int], in_draft: list[int]
) -> Forced:
    return Forced(
        rows=torch.tensor(rows),
        drafted=torch.tensor(drafted),
        overlap=torch.full((len(rows), len(drafted[0])), 0.25),
        teacher=torch.tensor(teacher),
        teacher_in_draft=torch.tensor(in_draft),
    )


# A target vocabulary of 6, of which the drafter knows 0, 2, 3 and 5.
T2D = bools("101101")
TO_TARGET = torch.tensor([0, 2, 3, 5])
# Behind position 3 the teacher chooses token 1, which the drafter cannot say; the best it can is 2.
TEACHER = [5, 2, 0, 1, 3, 5]
IN_DRAFT = [3, 1, 0, 1, 2, 3]


def test_specforge_counts_by_the_mask_of_the_row_and_misses_what_cannot_be_drafted() -> None:
    mask = bools("011101")  # the last one has no teacher and is cleared
    rows = specforge.rows(mask, 2)
    assert rows.tolist() == [0, 1, 2, 3]  # row 0 for step 1 only
    drafted = [[1, 0], [0, 1], [1, 2], [2, 0]]
    counts = specforge.count(
        forced([0, 1, 2, 3], drafted, TEACHER, IN_DRAFT), mask, T2D, TO_TARGET, 2
    )
    # Step 0: rows 1, 2, 3 against positions 2, 3, 4, where the teacher says 0, 1, 3; drafted 0, 2, 3.
    assert counts["specforge/acc@0"] == Tally(2, 3)
    # Step 1: rows 0, 1, 2 against the same positions; drafted 0, 2, 3. Row 3's position is cleared.
    assert counts["specforge/acc@1"] == Tally(2, 3)
    # Position 3's choice is outside the draft vocabulary: no position of the acceptance rate.
    assert counts["specforge/acceptance_rate@0"] == Tally(0.5, 2)


def test_speculators_counts_by_the_next_ones_mask_and_scores_against_the_best_it_can_say() -> None:
    mask = bools("001111")
    assert speculators.rows(mask).tolist() == [1, 2, 3, 4]
    drafted = [[0, 1, 2], [1, 0, 3], [2, 3, 0], [3, 0, 0]]
    counts = speculators.count(forced([1, 2, 3, 4], drafted, TEACHER, IN_DRAFT), mask, 3)
    # Step 0: rows 1..4 against positions 2..5: 0, 1 (the best inside), 2, 3: all right.
    assert counts["speculators/full_acc@0"] == Tally(4, 4)
    assert counts["speculators/cond_acc@0"] == Tally(4, 4)
    # Step 1: rows 1..3 against positions 3..5: 1, 2, 3; drafted 1, 0, 3. Row 4 has left the text;
    # row 0, which the mask does not hold at step 0, counts as wrong against position 2.
    assert counts["speculators/full_acc@1"] == Tally(2, 4)
    assert counts["speculators/cond_acc@1"] == Tally(2, 3)
    # Step 2: rows 1, 2 against positions 4, 5; row 2 is right again, which does not help it.
    assert counts["speculators/full_acc@2"] == Tally(1, 3)
    assert counts["speculators/cond_acc@2"] == Tally(1, 1)


def test_speculators_denominators_take_each_steps_own_mask() -> None:
    mask = bools("001001")
    drafted = [[0, 1, 2, 3], [3, 0, 0, 0]]
    counts = speculators.count(forced([1, 4], drafted, TEACHER, IN_DRAFT), mask, 4)
    # Position 2 is reached by row 1 on step 0, and on no deeper one by a row that began in the mask;
    # position 5 by row 4 on step 0 and by row 1 on step 3.
    assert [counts[f"speculators/full_acc@{s}"] for s in range(4)] == [
        Tally(2, 2),
        Tally(0, 2),  # rows 0 and 3 count as wrong, although row 1 is right outside the mask
        Tally(0, 1),
        Tally(1, 1),
    ]
    assert [counts[f"speculators/cond_acc@{s}"] for s in range(4)] == [
        Tally(2, 2),
        Tally(0, 1),
        Tally(0, 1),
        Tally(1, 1),
    ]


def test_a_mask_at_the_texts_edges_is_read_by_each_trainer_in_its_way() -> None:
    first, last = bools("100000"), bools("000001")
    assert specforge.rows(first, 1).tolist() == [0]
    assert specforge.rows(last, 7).tolist() == []
    assert speculators.rows(first).tolist() == []
    assert speculators.rows(last).tolist() == [4]


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(SHAPE.vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def aux() -> Tensor:
    width = SHAPE.num_aux * SHAPE.target_hidden
    return torch.randn(LENGTH, width, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def table() -> Tensor:
    """The teacher's logits at every position, [T, V]."""
    return torch.randn(LENGTH, SHAPE.vocab, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("feedback_normed", [False, True])
def test_the_first_step_is_the_served_one_and_so_is_every_step_behind_right_drafts(
    embedding: Tensor, ids: Tensor, aux: Tensor, table: Tensor, feedback_normed: bool
) -> None:
    drafter = random_drafter(shape=replace(SHAPE, feedback_normed=feedback_normed))
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    rows = torch.arange(LENGTH - 1)
    chains = draft_chains(drafter, embedding, ids, aux, rows, steps=5, to_target=to_target)
    ids[6:11] = chains[4]  # the text goes on as the chain behind position 4, which cannot see it
    out = forced_rollout(drafter, embedding, ids, aux, rows, steps=5, teacher=table.__getitem__)
    assert to_target[out.drafted[4]].tolist() == chains[4].tolist()
    again = draft_chains(drafter, embedding, ids, aux, rows, steps=5, to_target=to_target)
    assert torch.equal(to_target[out.drafted[:, 0]], again[:, 0])
    assert not torch.equal(to_target[out.drafted], again)  # elsewhere the text is not the chain's


def test_a_row_does_not_depend_on_the_rows_beside_it(
    drafter: Drafter,
    embedding: Tensor,
    ids: Tensor,
    aux: Tensor,
    table: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.tensor([1, 2, 5, 9, 12])

    def run(which: Tensor) -> Forced:
        return forced_rollout(
            drafter, embedding, ids, aux, which, steps=4, teacher=table.__getitem__
        )

    whole = run(rows)
    monkeypatch.setattr(rollout, "ROWS_AT_ONCE", 2)
    parts = run(rows)
    assert torch.equal(whole.drafted, parts.drafted)
    assert torch.equal(whole.teacher, parts.teacher)
    torch.testing.assert_close(whole.overlap, parts.overlap)
    for i, row in enumerate(rows.tolist()):
        alone = run(torch.tensor([row]))
        assert torch.equal(alone.drafted[0], whole.drafted[i])
        torch.testing.assert_close(alone.overlap[0], whole.overlap[i])


def test_a_table_of_narrow_numbers_is_widened_before_it_is_used(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, table: Tensor
) -> None:
    narrow = embedding.bfloat16()
    rows = torch.arange(LENGTH - 1)

    def run(which: Tensor) -> Forced:
        return forced_rollout(drafter, which, ids, aux, rows, steps=3, teacher=table.__getitem__)

    assert torch.equal(run(narrow).overlap, run(narrow.float()).overlap)


def test_only_positions_that_some_row_asks_for_are_put_to_the_teacher(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, table: Tensor
) -> None:
    asked: list[int] = []

    def teacher(positions: Tensor) -> Tensor:
        asked.extend(positions.tolist())
        return table[positions]

    out = forced_rollout(
        drafter, embedding, ids, aux, torch.tensor([2, 3]), steps=2, teacher=teacher
    )
    assert asked == [3, 4, 5]
    known = [3, 4, 5]
    assert (out.teacher >= 0).nonzero().flatten().tolist() == known
    assert out.teacher[known].tolist() == table[known].argmax(-1).tolist()
    inside = table[known][:, drafter.t2d].argmax(-1)
    assert out.teacher_in_draft[known].tolist() == inside.tolist()


def test_overlap_with_a_teacher_who_thinks_alike_is_whole_and_with_an_even_one_as_computed(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor
) -> None:
    rows = torch.tensor([3])
    prefix = torch.arange(4)
    y = drafter.step(embedding[ids[1:5]][None], drafter.fuse(aux[:4])[None], prefix, [])
    logits = drafter.logits(y[0, 3])
    alike = torch.full((LENGTH, SHAPE.vocab), float("-inf"))
    alike[:, drafter.t2d] = logits
    even = torch.zeros(LENGTH, SHAPE.vocab)

    def overlap(teacher: Tensor) -> float:
        run = forced_rollout(
            drafter, embedding, ids, aux, rows, steps=1, teacher=teacher.__getitem__
        )
        return float(run.overlap[0, 0])

    assert overlap(alike) == pytest.approx(1, abs=1e-6)
    # The even teacher's probability outside the draft vocabulary is lost, not shared out.
    wanted = torch.minimum(logits.softmax(-1), torch.tensor(1 / SHAPE.vocab)).sum()
    assert overlap(even) == pytest.approx(float(wanted), abs=1e-6)
    assert float(wanted) < SHAPE.draft_vocab / SHAPE.vocab + 1e-6


def test_another_head_scores_the_drafters_states(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, table: Tensor
) -> None:
    rows = torch.arange(LENGTH - 1)
    other = random_drafter(9).lm_head.weight

    def drafted(which: Drafter, head: Tensor | None) -> Tensor:
        return forced_rollout(
            which, embedding, ids, aux, rows, steps=3, teacher=table.__getitem__, head=head
        ).drafted

    with_head = drafted(drafter, other)
    assert not torch.equal(with_head, drafted(drafter, None))
    drafter.lm_head.weight.copy_(other)
    assert torch.equal(with_head, drafted(drafter, None))


def test_a_draft_vocabulary_that_t2d_does_not_cover_is_refused(
    drafter: Drafter, embedding: Tensor, ids: Tensor, aux: Tensor, table: Tensor
) -> None:
    drafter.t2d[int(drafter.t2d.nonzero()[0])] = False
    with pytest.raises(BadInput, match=r"t2d names 29 tokens.*head has 30 rows"):
        forced_rollout(
            drafter, embedding, ids, aux, torch.tensor([0]), steps=1, teacher=table.__getitem__
        )


@pytest.fixture
def sample(ids: Tensor) -> Sample:
    return Sample(
        path=Path("data_0.pt"),
        input_ids=ids,
        loss_mask=torch.arange(LENGTH) >= 5,
        states={},
        target_argmax=None,
        teacher=torch.zeros(LENGTH, 1),
        teacher_normed=False,
        stored=(),
    )


def test_both_trainers_are_counted_in_one_rollout_as_each_alone(
    drafter: Drafter, embedding: Tensor, sample: Sample, aux: Tensor, table: Tensor
) -> None:
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)

    def count(steps: dict[str, int]) -> dict[str, Tally]:
        return count_text(
            steps, drafter, embedding, sample, aux, table.__getitem__, to_target=to_target
        )

    both = count(STEPS)
    alone = count({"specforge": 7}) | count({"speculators": 3})
    assert both.keys() == alone.keys()
    for name, tally in both.items():
        assert tally.denominator == alone[name].denominator, name
        assert tally.numerator == pytest.approx(alone[name].numerator), name
    assert len(both) == 2 * 7 + 2 * 3
    assert both["specforge/acc@0"].denominator == LENGTH - 5 - 1
    assert both["speculators/full_acc@0"].denominator == LENGTH - 5


def test_a_text_whose_mask_no_row_can_meet_has_no_positions(
    drafter: Drafter, embedding: Tensor, sample: Sample, aux: Tensor, table: Tensor
) -> None:
    to_target = draft_to_target_ids(drafter.d2t, D2T.offset, SHAPE.vocab)
    masked = replace(sample, loss_mask=torch.arange(LENGTH) == LENGTH - 1)
    counts = count_text(
        {"specforge": 7}, drafter, embedding, masked, aux, table.__getitem__, to_target=to_target
    )
    assert {tally.denominator for tally in counts.values()} == {0}
    metrics, curves, notes = summarise([counts])
    assert not metrics
    assert not curves
    assert "specforge/acc has no position on step 0" in notes[0]


def test_the_teacher_of_a_dump_is_its_last_slot_through_norm_and_head(sample: Sample) -> None:
    class Target:
        def logits(self, h: Tensor, *, normed: bool) -> Tensor:
            return h * (10 if normed else 100)

    states = torch.arange(float(LENGTH))[:, None]
    before = replace(sample, teacher=states, teacher_normed=False)
    assert stored_teacher(before, Target())(torch.tensor([2, 3])).flatten().tolist() == [200, 300]
    behind = replace(sample, teacher=states, teacher_normed=True)
    assert stored_teacher(behind, Target())(torch.tensor([2])).flatten().tolist() == [20]


def text(acc: list[tuple[int, int]]) -> dict[str, Tally]:
    return {f"specforge/acc@{s}": Tally(*counts) for s, counts in enumerate(acc)}


def test_rates_are_pooled_over_texts_and_the_simulated_length_is_made_of_the_pooled_rates() -> None:
    texts = [text([(3, 4), (1, 4)]), text([(0, 2), (2, 2)])]
    metrics, curves, notes = summarise(texts)
    (_, first), (_, second) = curves["specforge/acc"]
    assert (first.numerator, first.denominator, first.value) == (3, 6, 0.5)
    assert (second.numerator, second.denominator, second.value) == (3, 6, 0.5)
    assert metrics["specforge/simulated_acc_len"].value == pytest.approx(0.5 + 0.25)
    together = metrics["specforge/acc_all_steps"]
    assert (together.numerator, together.denominator, together.value) == (6, 12, 0.5)
    assert not notes
    for figure in (first, *metrics.values()):
        assert figure.low <= figure.value <= figure.high
        assert figure.truth == "stored_teacher"
        assert figure.plain()["definition"] in DEFINITIONS.values()
    assert "numerator" not in metrics["specforge/simulated_acc_len"].plain()


def test_a_step_that_no_text_reaches_is_left_out_aloud_and_never_accepted() -> None:
    metrics, curves, notes = summarise([text([(1, 1), (0, 0)]), text([(1, 1), (0, 0)])])
    assert [step for step, _ in curves["specforge/acc"]] == [0]
    assert notes == ["specforge/acc has no position on step 1 and is left out there"]
    assert metrics["specforge/simulated_acc_len"].value == 1


def test_one_text_says_nothing_about_the_spread() -> None:
    metrics, curves, _ = summarise([text([(1, 2), (1, 2), (1, 2)])])
    assert [(f.low, f.high) for _, f in curves["specforge/acc"]] == [(0, 1)] * 3
    length = metrics["specforge/simulated_acc_len"]
    assert (length.low, length.value, length.high) == (0, 0.875, 3)


def test_sums_of_probabilities_are_not_rounded() -> None:
    texts = [{"specforge/acceptance_rate@0": Tally(n, 2)} for n in (0.7, 0.9, 1.1)]
    _, curves, _ = summarise(texts)
    ((_, rate),) = curves["specforge/acceptance_rate"]
    assert rate.value == pytest.approx(0.45)
    assert rate.low < 0.45 < rate.high
    assert rate.numerator == pytest.approx(2.7)


def test_each_trainer_says_what_its_figures_are_and_how_they_still_differ() -> None:
    assert STEPS == {"specforge": 7, "speculators": 3}
    assert DIFFERENCES.keys() == STEPS.keys()
    assert all(lines for lines in DIFFERENCES.values())
    assert {name.split("/")[0] for name in DEFINITIONS} == STEPS.keys()

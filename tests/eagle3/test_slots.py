"""The measures that verdicts on slots rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.data.form import DataForm, RawSample, Slot
from eagle3.metrics import Count, Truth
from eagle3.slot_findings import teacher_findings
from eagle3.slot_states import locate
from eagle3.slot_verdicts import Judged, judge, states_in_words
from eagle3.slots import (
    HEAD_BLOCK,
    HEAD_ROWS,
    SlotFigures,
    Spread,
    embedding_scale,
    head_choices,
    head_rows,
    overlap,
)
from eagle3.texts import SpecialIds, TextFigures, special_ids


def test_quantiles_are_right_within_their_bins() -> None:
    torch.manual_seed(0)
    values = torch.randn(20_001).exp() * 300
    spread = Spread()
    for part in values.split(999):
        spread.add(part)
    for q in (0.05, 0.5, 0.95):
        assert spread.quantile(q) == pytest.approx(float(values.quantile(q)), rel=0.012)
    assert Spread().quantile(0.5) is None
    ones = Spread()
    ones.add(torch.ones(7))
    assert ones.quantile(0.5) == pytest.approx(1, rel=0.006)


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_rows_stand_beside_those_of_the_shift(shift: int) -> None:
    rows = torch.arange(6)
    ours, theirs = overlap(rows, rows, shift)
    assert torch.equal(theirs - ours, torch.full((6 - abs(shift),), shift))


def test_the_heads_choice_is_that_over_the_whole_vocabulary() -> None:
    torch.manual_seed(1)
    head = torch.randn(2 * HEAD_BLOCK + 5, 8).bfloat16()
    h = torch.randn(40, 8)
    assert torch.equal(head_choices(head, h), (h @ head.float().T).argmax(-1))
    assert len(head_choices(head, h[:0])) == 0


def test_rows_for_the_head_are_spread_over_the_scored_and_usable_ones() -> None:
    mask = torch.zeros(1000, dtype=torch.bool)
    mask[300:] = True
    usable = torch.ones(1000, dtype=torch.bool)
    usable[400:500] = False
    rows = head_rows(mask, usable)
    assert len(rows) == HEAD_ROWS
    assert (int(rows[0]), int(rows[-1])) == (299, 998)  # row t stands for token t + 1
    assert usable[rows].all()
    assert head_rows(mask[:310], usable[:310]).tolist() == list(range(299, 309))


def test_choices_are_counted_at_every_shift() -> None:
    ids = torch.tensor([5, 6, 7, 8, 9])
    rows = torch.tensor([1, 2, 3])
    figures = SlotFigures()
    figures.add_agreements({True: ids[rows + 1]}, rows, ids, ids.roll(-1))
    counts = {key: (c.numerator, c.denominator) for key, (c,) in figures.agreements.items()}
    for truth in (Truth.next_token, Truth.target_argmax):
        assert counts[(truth, True, 0)] == (3, 3)
        assert counts[(truth, True, -1)] == (0, 3)
        assert counts[(truth, True, 1)] == (0, 2)


def made_states(layers: int, step: float, rows: int = 64, width: int = 24) -> Tensor:
    """States that drift by `step` of their length a layer, [layers + 1, rows, width]."""
    generator = torch.Generator().manual_seed(2)
    states = [torch.randn(rows, width, generator=generator)]
    for _ in range(layers):
        drift = torch.randn(rows, width, generator=generator)
        states.append(states[-1] + step * drift)
    return torch.stack(states)


def noisy(h: Tensor, share: float) -> Tensor:
    return h + share * h.norm(dim=-1, keepdim=True) * torch.nn.functional.normalize(
        torch.randn(h.shape, generator=torch.Generator().manual_seed(3)), dim=-1
    )


def test_a_state_is_found_through_rounding_that_is_far_below_a_layers_change() -> None:
    states = made_states(8, 0.3)
    for k in (0, 4, 8):
        found = locate([noisy(states[k], 0.02)], [states])
        assert found is not None
        assert found.found == (k,)
        assert found.error == pytest.approx(0.02, rel=0.1)


def test_a_state_behind_the_computed_ones_is_not_taken_for_the_last_of_them() -> None:
    states = made_states(8, 0.3)
    for k in (5, 6, 8):
        found = locate([states[k]], [states[:5]])
        assert found is not None
        assert found.found == ()


def test_states_nearer_to_each_other_than_the_rounding_are_left_undecided() -> None:
    states = made_states(8, 0.01)
    found = locate([noisy(states[4], 0.03)], [states])
    assert found is not None
    assert not found.equal
    assert found.found == ()
    assert {3, 4, 5} <= set(found.states)


def test_one_text_more_makes_the_median_and_no_row_makes_nothing() -> None:
    states = made_states(4, 0.3)
    spoilt = states[2].clone()
    spoilt[:20] = torch.inf
    found = locate([spoilt, states[2]], [states, states])
    assert found is not None
    assert found.found == (2,)
    assert locate([torch.full_like(states[2], torch.nan)], [states]) is None


def test_a_text_of_one_token_has_no_neighbour_to_be_shifted_to() -> None:
    states = made_states(4, 0.3, rows=1)
    for k in (0, 2):
        found = locate([states[k], states[k]], [states, states])
        assert found is not None
        assert (found.found, found.shift) == ((k,), 0)
    assert locate([states[0][:0]], [states[:, :0]]) is None


@pytest.mark.parametrize("late", [1, -1])
@pytest.mark.parametrize(("prompt", "answer"), [(50, 14), (32, 32), (10, 54)])
def test_an_answer_that_lags_alone_is_told_from_its_prompt(
    late: int, prompt: int, answer: int
) -> None:
    """However long the two are; the row that is lost, or stands twice, lies where they meet."""
    states = made_states(6, 0.3, rows=prompt + answer)
    for k in (0, 3, 6):
        h = states[k].clone()
        h[prompt:] = states[k].roll(late, 0)[prompt:]
        found = locate([h, h], [states, states], [prompt, prompt])
        assert found is not None
        assert (found.found, found.shift, found.in_answer) == ((k,), -late, True)
    sound = locate([states[3]], [states], [prompt])
    assert sound is not None
    assert (sound.found, sound.shift, sound.in_answer) == ((3,), 0, False)
    moved = locate([states[3].roll(late, 0)], [states], [prompt])  # all of it, not the answer alone
    assert moved is not None
    assert (moved.found, moved.shift, moved.in_answer) == ((3,), -late, False)


@pytest.mark.parametrize("cut", range(16, 25))
def test_where_rows_are_alike_noise_does_not_make_an_answer_lag(cut: int) -> None:
    states = made_states(4, 0.3, rows=1).expand(-1, 40, -1).contiguous()
    found = locate([noisy(states[2], 0.02)], [states], [cut])
    assert found is not None
    assert (found.found, found.in_answer) == ((2,), False)


END_SLOT = Slot(name="hidden_states[3]", role="last", state=24, normed=False, origin="data.states")


def teacher(
    hits: Mapping[int, int], truth: Truth = Truth.target_argmax, state: int | None = 24
) -> Judged:
    """The end slot of a target of 24 layers; of 100 choices a text `hits` are the truth's, by shift.

    All of the 20 texts are alike, so that the interval is the value itself.
    """
    figures = SlotFigures()
    for shift, hit in hits.items():
        figures.agreements[(truth, True, shift)] = [Count(hit, 100)] * 20
    slot = Slot(**{**vars(END_SLOT), "state": state})
    return Judged(index=0, slot=slot, figures=figures, located=None, num_layers=24, seed=0)


def form_of(judged: Judged) -> DataForm:
    return DataForm(
        layout="pt_shards",
        why="",
        folder=Path("data"),
        files=(),
        slots=(judged.slot,),
        teacher=0,
    )


@pytest.mark.parametrize(
    ("hits", "verdict", "words"),
    [
        (96, "contradicted", "the head makes the target's own choice of 96.0% of positions"),
        (97, "as declared", "consistent with the target's end (the head makes the target's own"),
        (100, "as declared", "consistent with the target's end (the head makes the target's own"),
    ],
)
def test_the_heads_choices_may_convict_the_end_but_never_verify_it(
    hits: int, verdict: str, words: str
) -> None:
    judged = teacher({0: hits})
    said, sentence = judged.verdict()
    assert said == verdict
    assert sentence.startswith(f"{verdict}: hidden_states[3], declared state 24; {words}")
    found = [f.what for f in teacher_findings("data", form_of(judged), [judged])]
    assert len(found) == (verdict == "contradicted")
    if found:
        # It is declared the end: the sentence may not call it that and deny it.
        assert "is declared state 24, but is not the target's end: the head" in found[0]
        assert len(found[0].split()) <= 45


def test_an_interval_across_the_bound_is_neither_consistent_nor_contradicted() -> None:
    judged = teacher({})
    counts = [Count(100, 100), Count(95, 100)] * 10  # 97.5 %, the interval from below 97 % on
    judged.figures.agreements[(Truth.target_argmax, True, 0)] = counts
    own = judged.agreement(Truth.target_argmax)
    assert own is not None
    assert own.low < 0.97 < own.value
    verdict, sentence = judged.verdict()
    assert verdict == "as declared"
    assert "consistent" not in sentence
    assert "does not tell it from a state near the end" in sentence


def test_a_teacher_that_is_declared_an_earlier_state_is_wrong_whatever_the_head_makes_of_it() -> (
    None
):
    judged = teacher({0: 99}, state=23)
    (found,) = teacher_findings("data", form_of(judged), [judged])
    assert "is state 23 and not the target's end (state 24): data.states says so" in found.what
    assert found.evidence == "inferred from data.states"


@pytest.mark.parametrize(("straight", "moved", "shift"), [(40, 49, 0), (40, 51, 1), (0, 55, 1)])
def test_a_shift_is_believed_from_a_margin_on(straight: int, moved: int, shift: int) -> None:
    judged = teacher({0: straight, 1: moved, -1: 0}, truth=Truth.next_token)
    (again,) = judge(form_of(judged), [judged.figures], [None], 24, 0)
    assert again.data_shift == shift


@pytest.mark.parametrize(
    ("size", "normed"), [(1.0, 1), (1.019, 1), (0.981, 1), (1.021, 0), (0.979, 0)]
)
def test_rows_count_as_normed_within_two_percent(size: float, normed: int) -> None:
    weight = torch.linspace(0.5, 2, 24)
    h = torch.nn.functional.normalize(torch.randn(50, 24, generator=torch.Generator()), dim=-1)
    figures = SlotFigures()
    figures.add_scale(h * math.sqrt(24) * weight * size, "here", weight)
    assert figures.unit_share == normed


@pytest.mark.parametrize(
    ("factors", "expected"),
    [((12.0, 12.0), 12.0), ((12.0, 12.1), 12.05), ((12.0, 12.5), None)],
)
def test_a_factor_is_constant_within_two_percent(
    factors: tuple[float, float], expected: float | None
) -> None:
    embedded = torch.randn(100, 24, generator=torch.Generator().manual_seed(4))
    judged = teacher({}, state=0)
    h = embedded * torch.tensor(factors).repeat(50)[:, None]
    judged.figures.add_matches(h, embedded, torch.float32, None)
    factor = judged.embedding_factor
    assert factor == (None if expected is None else pytest.approx(expected, rel=0.012))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"embedding_multiplier": 12}, 12.0),
        ({"scale_emb": 12.5}, 12.5),
        ({"embedding_multiplier": None, "hidden_size": 7}, 1.0),
    ],
)
def test_the_embeddings_factor_is_read_in_the_config(config: dict[str, Any], scale: float) -> None:
    assert embedding_scale(config) == scale


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((3,), "state 3"),
        ((3, 4, 5), "states 3..5, all equal here"),
        ((0, 4, 5, 9), "states 0, 4..5, 9, all equal here"),
    ],
)
def test_sets_of_states_are_named_by_their_runs(states: tuple[int, ...], words: str) -> None:
    assert states_in_words(states) == words


def raw(ids: list[int], mask: list[int], slot: Tensor | None = None) -> RawSample:
    rows = torch.ones(len(ids), 2) if slot is None else slot
    return RawSample(
        path=Path("rows/data_0.pt"),
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(mask).bool(),
        slots=(rows,),
        target_argmax=None,
    )


def test_texts_are_counted() -> None:
    figures = TextFigures(vocab=10, special=SpecialIds(bos=frozenset({1}), eos=frozenset({2})))
    figures.add(raw([1, 5, 6, 7, 2], [0, 0, 1, 0, 1]))
    figures.add(raw([1, 5, 6], [0, 1, 1]))
    figures.add(raw([1, 5, 6], [0, 1, 1]))
    plain = figures.plain()
    assert (plain["samples"], plain["positions"], plain["masked"], plain["spans"]) == (3, 11, 6, 4)
    assert (plain["longest"], plain["at_longest"], plain["shortest"]) == (5, 1, 3)
    assert (plain["prompt_shortest"], plain["prompt_longest"], plain["repeated"]) == (1, 2, 1)
    assert plain["special_tokens"] == {"bos": 3, "eos": 1}
    assert plain["special_tokens_masked"] == {"bos": 0, "eos": 1}
    assert [f.name for f in figures.findings("here")] == ["repeated-samples"]


def test_a_first_token_in_the_mask_is_named() -> None:
    figures = TextFigures(vocab=10, special=SpecialIds())
    figures.add(raw([3, 5, 6, 7], [1, 0, 1, 1]))
    assert [f.name for f in figures.findings("here")] == ["mask-covers-first-token"]


def test_special_ids_come_from_every_place_that_names_them() -> None:
    named = special_ids(
        {"text_config": {"bos_token_id": 1, "eos_token_id": 2}, "pad_token_id": None},
        {"eos_token_id": [2, 7]},
    )
    assert (named.bos, named.eos, named.pad) == ({1}, {2, 7}, frozenset())

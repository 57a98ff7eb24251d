"""What a search counts is what scoring each wiring alone counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.connect import target_rope
from eagle3.errors import BadInput
from eagle3.metrics import Count
from eagle3.model import Drafter, DrafterShape
from eagle3.search import batch as batches
from eagle3.search import drafting, outputs, rewired, score
from eagle3.search.axes import axes_of, changed
from eagle3.search.score import Scorer
from eagle3.target import TargetParts
from eagle3.wiring import D2T, DecoderLayer, FcInput, Feedback, Head, HeadInput, Token, Wiring
from tests.eagle3.searchable import (
    CHUNKS,
    FULL,
    PLAIN,
    STATES,
    STEPS,
    TEACHERS,
    checkpoint,
    drafted_texts,
    plain_counts,
    small_texts,
)
from tests.eagle3.wired import target_of

SHAPES = {"plain": PLAIN, "full": FULL, "chunks": CHUNKS}


@pytest.fixture
def target(tmp_path: Path) -> TargetParts:
    return target_of(tmp_path / "target", PLAIN.hidden, rope_theta=77.0)


def single_changes(shape: DrafterShape, target: TargetParts) -> list[Wiring]:
    """The start and every wiring that one change along an axis leads to."""
    form = checkpoint(shape).form
    start = Wiring.of_states(STATES[:3]).resolved(form)
    axes = axes_of(
        form, start, STATES, target_rope=target_rope(target), own_embedding=True, own_head=True
    )
    singles = [changed(start, axis.name, value, form) for axis in axes for value in axis.values]
    assert len(set(singles)) == len(singles) > 35
    # d2t read otherwise leads outside the vocabulary here, which only a search scores.
    return [start, *(w for w in singles if w.d2t is not D2T.offset or w.states() != start.states())]


@pytest.mark.parametrize("name", SHAPES)
def test_every_single_change_is_counted_as_alone(name: str, target: TargetParts) -> None:
    own = checkpoint(SHAPES[name])
    texts = small_texts()
    scorer = Scorer(own, target, texts, steps=STEPS)
    wirings = [w for w in single_changes(SHAPES[name], target) if scorer.wired.outside(w.d2t) == 0]
    everything = range(len(texts))
    first = scorer.first(wirings, everything, TEACHERS)
    for wiring in wirings:
        for teacher in TEACHERS:
            alone = [plain_counts(own, target, text, wiring, teacher) for text in texts]
            assert first[wiring][teacher] == [counts["accuracy"] for counts in alone], wiring
            assert scorer.chains(wiring, everything, teacher) == alone, wiring


def test_random_combinations_are_counted_as_alone(target: TargetParts) -> None:
    own, texts = checkpoint(FULL), small_texts()
    form = own.form
    start = Wiring.of_states(STATES[:3]).resolved(form)
    axes = axes_of(
        form, start, STATES, target_rope=target_rope(target), own_embedding=True, own_head=True
    )
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    wirings = []
    while len(wirings) < 40:
        wiring = start
        for axis in axes:
            if draw(2) and axis.name != "d2t":
                wiring = changed(wiring, axis.name, axis.values[draw(len(axis.values))], form)
        wirings.append(wiring)
    scorer = Scorer(own, target, texts, steps=STEPS)
    first = scorer.first(wirings, [2, 0], ["next_token"])
    for wiring in wirings:
        alone = [plain_counts(own, target, texts[i], wiring, "next_token") for i in (2, 0)]
        assert first[wiring]["next_token"] == [counts["accuracy"] for counts in alone], wiring
        assert scorer.chains(wiring, [2, 0], "next_token") == alone, wiring


@pytest.mark.parametrize(
    ("at_once", "rows", "scores", "kept"),
    [(1, 1, 1, 0), (64, 7, 500, 1 << 20), (4096, 512, 1 << 25, 1 << 30)],
)
def test_how_much_is_run_together_changes_no_count(
    monkeypatch: pytest.MonkeyPatch,
    target: TargetParts,
    at_once: int,
    rows: int,
    scores: int,
    kept: int,
) -> None:
    own, texts = checkpoint(FULL), small_texts((9, 14, 11, 30, 12, 12, 13))
    wirings = [Wiring.of_states(s).resolved(own.form) for s in permutations(STATES, 3)]
    monkeypatch.setitem(score.AT_ONCE, "cpu", at_once)
    for module in (score, rewired, drafting):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(drafting, "SCORES_AT_ONCE", scores)
    monkeypatch.setattr(batches, "KEPT_BYTES", kept)
    scorer = Scorer(own, target, texts, steps=STEPS)
    everything = range(len(texts))
    first = scorer.first(wirings, everything, ["target_argmax"])
    for wiring in wirings[::5]:
        alone = [plain_counts(own, target, text, wiring, "target_argmax") for text in texts]
        assert first[wiring]["target_argmax"] == [counts["accuracy"] for counts in alone]
        assert scorer.chains(wiring, everything, "target_argmax") == alone


def test_states_are_fed_as_stored_and_a_text_is_only_read_once(target: TargetParts) -> None:
    own, texts = checkpoint(PLAIN), small_texts()
    halves = [
        replace(text, states={k: h.to(torch.bfloat16) for k, h in text.states.items()})
        for text in texts
    ]
    scorer = Scorer(own, target, halves, steps=STEPS)
    wiring = Wiring.of_states(STATES[:3]).resolved(own.form)
    before = scorer.first([wiring], [0, 1], ["target_argmax"])[wiring]["target_argmax"]
    assert before == [
        plain_counts(own, target, text, wiring, "target_argmax")["accuracy"] for text in halves[:2]
    ]
    for text in halves[:2]:  # what was counted is not computed again
        text.states[2].fill_(float("nan"))
    again = scorer.first([wiring], [0, 1, 2], ["target_argmax"])[wiring]["target_argmax"]
    assert again[:2] == before
    assert scorer.scored == 1


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [5, 512])
def test_chains_are_followed_as_far_as_they_are_right(
    monkeypatch: pytest.MonkeyPatch, target: TargetParts, name: str, rows: int
) -> None:
    for module in (score, rewired, drafting):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    own = checkpoint(SHAPES[name])
    wiring = Wiring.of_states(STATES[:3]).resolved(own.form)
    texts = drafted_texts(own, target, wiring, (40, 9, 33, 38, 12))
    everything = range(len(texts))
    other = replace(wiring, feedback=Feedback.normed).resolved(own.form)
    scorer = Scorer(own, target, texts, steps=STEPS)
    for wired in (wiring, other):
        alone = [plain_counts(own, target, text, wired, "next_token") for text in texts]
        assert scorer.chains(wired, everything, "next_token") == alone
        reached = [sum(c[f"step_accuracy/cumulative@{s}"].numerator for c in alone) for s in (0, 2)]
        assert reached[0] > 10
        assert reached[1] > 0 or wired is other


def test_cores_that_work_side_by_side_change_no_count(target: TargetParts) -> None:
    own = checkpoint(FULL)
    start = Wiring.of_states(STATES[:3]).resolved(own.form)
    texts = drafted_texts(own, target, start, (40, 9, 33, 38, 12, 30, 44, 20, 31))
    wirings = [Wiring.of_states(s).resolved(own.form) for s in permutations(STATES, 3)]
    everything, threads = range(len(texts)), torch.get_num_threads()
    found = []
    for cores in (1, 3):
        torch.set_num_threads(cores)
        try:
            scorer = Scorer(own, target, texts, steps=STEPS)
            counts = scorer.first(wirings, everything, TEACHERS)
            scorer.draft(wirings[:2], everything[::2])
            chains = [scorer.chains(w, everything, "next_token") for w in wirings[:3]]
            losses, _ = scorer.losses(wirings[:3], everything, "next_token")
            assert torch.get_num_threads() == cores
        finally:
            torch.set_num_threads(threads)
        found.append((counts, chains))
        torch.testing.assert_close(losses, scorer.losses(wirings[:3], everything, "next_token")[0])
    assert found[0] == found[1]


def test_tokens_outside_the_vocabulary_are_wrong_and_no_error(target: TargetParts) -> None:
    own, texts = checkpoint(PLAIN), small_texts()
    own.drafter.d2t.add_(torch.arange(PLAIN.draft_vocab))  # absolute ids
    form = own.form
    offset = Wiring.of_states(STATES[:3]).resolved(form)
    absolute = replace(offset, d2t=D2T.absolute)
    scorer = Scorer(own, target, texts, steps=STEPS)
    assert scorer.wired.outside(D2T.offset) > 0 == scorer.wired.outside(D2T.absolute)
    sound = checkpoint(PLAIN)
    everything = range(len(texts))
    assert scorer.chains(absolute, everything, "next_token") == [
        plain_counts(sound, target, text, offset, "next_token") for text in texts
    ]
    # Read as offsets, ids lead outside or elsewhere: counted, and no better than they are.
    wrong = scorer.first([offset], everything, ["next_token"])[offset]["next_token"]
    assert [c.denominator for c in wrong] == [len(text.rows) for text in texts]
    # Nor is one of them right where the choice is not known.
    unknown = [
        replace(text, truths={"next_token": torch.full_like(text.truths["next_token"], -1)})
        for text in texts
    ]
    blind = Scorer(own, target, unknown, steps=STEPS).first([offset], everything, ["next_token"])
    assert blind[offset]["next_token"] == [Count(0, 0)] * len(texts)


def test_unknown_truths_are_not_counted(target: TargetParts) -> None:
    own, texts = checkpoint(PLAIN), small_texts()
    truth = texts[0].truths["slot3/normed"].clone()
    truth[texts[0].rows[:2] + 2] = -1
    texts[0] = replace(texts[0], truths={**texts[0].truths, "slot3/normed": truth})
    scorer = Scorer(own, target, texts, steps=STEPS)
    wiring = Wiring.of_states(STATES[:3]).resolved(own.form)
    (count,) = scorer.first([wiring], [0], ["slot3/normed"])[wiring]["slot3/normed"]
    assert count.denominator == len(texts[0].rows) - 2
    assert isinstance(count, Count)


def test_losses_are_the_first_steps_cross_entropy_at_the_best_temperature(
    target: TargetParts,
) -> None:
    """Over rows whose token is known and has a draft id; a text without any counts nothing."""
    own, texts = checkpoint(PLAIN), small_texts()
    unknown = torch.full_like(texts[3].ids, -1)
    texts[3] = replace(texts[3], truths={**texts[3].truths, "slot3/normed": unknown})
    wirings = [Wiring.of_states(s).resolved(own.form) for s in permutations(STATES, 3)][:5]
    scorer = Scorer(own, target, texts, steps=STEPS)
    sums, rows = scorer.losses(wirings, [3, 0, 1], "slot3/normed")
    drafter = own.drafter
    ids = (drafter.d2t + torch.arange(len(drafter.d2t))).tolist()
    for wiring, losses in zip(wirings, sums, strict=True):
        by_temperature = []
        for temperature in score.TEMPERATURES:
            found = [0.0]
            for number, text in enumerate(texts[:2], 1):
                length = int(text.rows[-1]) + 1
                aux = torch.cat([text.states[k][:length] for k in wiring.states()], -1)
                embedded = target.embedding[text.ids[1 : length + 1]].float()[None]
                y = drafter.step(embedded, drafter.fuse(aux)[None], torch.arange(length), [])[0]
                logits = drafter.logits(y[text.rows]).double() / temperature
                wanted = text.truths["slot3/normed"][text.rows + 2].tolist()
                known = [(row, ids.index(t)) for row, t in enumerate(wanted) if t in ids]
                assert 0 < len(known) < len(wanted)
                assert rows[number] == len(known)
                found.append(-sum(float(logits.log_softmax(-1)[at]) for at in known))
            by_temperature.append(found)
        assert rows[0] == 0
        assert losses.tolist() == pytest.approx(min(by_temperature, key=sum), rel=1e-4)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each run of the block, by how many texts lay side by side in it."""
    sizes: list[int] = []
    whole = Drafter.step

    def measured(self: Drafter, embedded: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(embedded))
        return whole(self, embedded, *args, **options)

    monkeypatch.setattr(Drafter, "step", measured)
    return sizes


def test_losses_run_the_block_no_more_than_once_and_are_the_same_in_portions(
    monkeypatch: pytest.MonkeyPatch, target: TargetParts, runs: list[int]
) -> None:
    own, texts = checkpoint(FULL), small_texts((12, 9, 12))
    wirings = [Wiring.of_states(s).resolved(own.form) for s in permutations(STATES[:3])]
    scorer = Scorer(own, target, texts, steps=STEPS)
    scorer.first(wirings, [2, 0], TEACHERS)
    before = len(runs)
    sums, rows = scorer.losses(wirings, [0, 2], "next_token")
    assert len(runs) == before
    assert scorer.losses(wirings, range(3), "next_token")[0].shape == (len(wirings), 3)
    assert len(runs) > before
    monkeypatch.setattr(outputs, "MOST", 1)  # one text at a time, nothing kept for the next
    small = Scorer(own, target, texts, steps=STEPS)
    small.first(wirings, [0, 2], TEACHERS)
    assert small._outputs.lacking(wirings[0], [0, 2]) == (0, 2)  # not even kept for a moment
    again, as_many = small.losses(wirings, [0, 2], "next_token")
    torch.testing.assert_close(again, sums, rtol=1e-5, atol=1e-5)
    assert torch.equal(as_many, rows)


def test_what_shares_a_first_step_is_computed_once(target: TargetParts, runs: list[int]) -> None:
    own, texts = checkpoint(FULL), small_texts((12, 12, 12))
    start = Wiring.of_states(STATES[:3]).resolved(own.form)
    alike = [
        changed(start, name, value, own.form)
        for name, value in (
            ("d2t", D2T.identity),
            ("head", Head.target),
            ("head_input", HeadInput.raw),
        )
    ]
    late = [
        changed(start, axis.name, value, own.form)
        for axis in axes_of(
            own.form, start, STATES, target_rope=None, own_embedding=True, own_head=True
        )
        if axis.shows_from
        for value in axis.values
    ]
    scorer = Scorer(own, target, texts, steps=STEPS)
    scorer.first([start, *alike, *late], range(3), TEACHERS)
    assert len(late) == 2
    assert len(runs) == 1
    scorer.first([replace(start, decoder_layer=DecoderLayer.skipped)], range(3), TEACHERS)
    assert len(runs) == 1
    scorer.first([replace(start, token=Token.same)], range(3), TEACHERS)
    assert len(runs) == 2
    # Nor does another call run what only reads the same picks otherwise.
    other = replace(start, token=Token.same, d2t=D2T.identity)
    later = scorer.first([other], range(3), TEACHERS)
    assert len(runs) == 2
    fresh = Scorer(own, target, texts, steps=STEPS).first([other], range(3), TEACHERS)
    assert later == fresh
    assert len(runs) == 3


def test_several_sums_of_states_go_through_the_block_together(
    target: TargetParts, runs: list[int]
) -> None:
    own, texts = checkpoint(PLAIN), small_texts((12, 12))
    wirings = [Wiring.of_states(s).resolved(own.form) for s in permutations(STATES, 3)]
    Scorer(own, target, texts, steps=STEPS).first(wirings, range(2), ["next_token"])
    assert runs == [2 * len(wirings)]  # 48 times 10 rows fit


def test_what_cannot_be_scored_is_said_by_name(target: TargetParts, tmp_path: Path) -> None:
    own, texts = checkpoint(PLAIN), small_texts()
    scorer = Scorer(own, target, texts, steps=STEPS)

    def why(wiring: Wiring) -> str:
        found = scorer.why_not(wiring.resolved(own.form))
        assert found is not None
        return found

    assert "asks for state 3, but the data stores only 0, 2, 5, 7" in why(
        Wiring.of_states((0, 2, 3))
    )
    assert "names 2 states, but the drafter's fc takes 3" in why(Wiring.of_states((0, 2)))
    assert scorer.why_not(Wiring.of_states((7, 0, 5), fc_input=FcInput.whole)) is None
    with pytest.raises(BadInput, match="stores only"):
        scorer.first([Wiring.of_states((0, 2, 3))], [0], ["next_token"])
    with pytest.raises(BadInput, match="no text"):
        Scorer(own, target, [], steps=STEPS)
    narrow = replace(PLAIN, hidden=16, heads=4)
    apart = Scorer(checkpoint(narrow), target, texts, steps=STEPS)
    found = apart.why_not(Wiring.of_states(STATES[:3], head=Head.target))
    assert found is not None
    assert "the target's" in found
    other = target_of(tmp_path / "other", PLAIN.hidden, vocab=40)
    with pytest.raises(BadInput, match="vocabulary"):
        Scorer(own, other, texts, steps=STEPS)

"""What the search's benchmark holds it against must itself be right."""

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.wiring_draws import (
    LAB,
    TRAINED,
    Draw,
    blend,
    enough,
    halve,
    length_of,
    make_pool,
    mixed,
    noisy,
    pooled,
    reordered,
    score_one,
    wirings_of,
)
from bench.wiring_search import answer, score_all, summary
from eagle3.checkpoint import load_drafter
from eagle3.lab.layout import lay_out, load_live
from eagle3.metrics import paired_difference
from eagle3.target import load_target_parts
from eagle3.wiring import D2T, Wiring


@pytest.fixture(scope="module")
def lab():
    return load_drafter(LAB / "drafter")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target_parts(lay_out(LAB / "target", tmp_path_factory.mktemp("lab") / "target"))


@pytest.fixture(scope="module")
def texts():
    lines = (LAB / "prompts.jsonl").read_text().splitlines()[:24]
    return make_pool(load_live(LAB / "target"), lines, [48])


@pytest.fixture(scope="module")
def draw(lab, texts):
    stored = (0, 3, 31, 59)
    return Draw(
        name="far",
        checkpoint=lab,
        texts=[replace(t, states={k: t.states[k] for k in stored}) for t in texts],
        wirings=wirings_of(stored, lab.form),
        true=Wiring.of_states(TRAINED).resolved(lab.form),
    )


def with_drafter(lab, drafter):
    return replace(lab, drafter=drafter)


def test_texts_are_the_targets_own_greedy_words(texts):
    assert len(texts) > 6
    for text in texts:
        (truth,) = text.truths.values()
        assert torch.equal(truth[text.rows + 2], text.ids[text.rows + 2])


def test_there_are_144_wirings_and_no_two_alike(lab):
    assert len(set(wirings_of((0, 3, 31, 59), lab.form))) == 144


def test_exhaustive_counts_are_those_of_scoring_every_wiring_plainly(draw, target):
    counts = score_all(draw, target)
    assert set(counts) == set(draw.wirings)
    for wiring in [*random.Random(0).sample(draw.wirings, 12), draw.true]:
        plainly = score_one(draw.checkpoint, target, draw.texts, wiring)
        assert counts[wiring] == [c["accept_length"] for c in plainly], wiring


@pytest.mark.parametrize("reading", list(D2T))
def test_a_reordered_drafter_is_the_same_one_in_its_own_wiring(lab, target, texts, reading):
    states = (31, 0, 3)
    true = Wiring.of_states(states, d2t=reading)
    whole = length_of(lab, target, texts, Wiring.of_states(TRAINED))
    changed = with_drafter(lab, reordered(copy.deepcopy(lab.drafter), states, reading))
    length = length_of(changed, target, texts, true)
    if reading is D2T.identity:  # which has no ids behind the table's end
        assert 1.5 < length < whole
    else:
        assert length == pytest.approx(whole, abs=0.01)
    for other in (replace(true, layers=TRAINED), *(replace(true, d2t=d) for d in D2T)):
        if other != true:
            assert length_of(changed, target, texts, other) < length - 0.3, other


def test_noise_brings_the_drafter_down_to_the_goal(lab, target, texts):
    def length(drafter):
        return length_of(with_drafter(lab, drafter), target, texts, Wiring.of_states(TRAINED))

    assert length(noisy(lab.drafter, 1, 1.8, length)) == pytest.approx(1.8, abs=0.25)


def test_half_of_each_chunk_leaves_no_order(lab, target, texts):
    changed = with_drafter(lab, mixed(lab.drafter, 1, 2, 0.5))
    lengths = {
        length_of(changed, target, texts, Wiring.of_states(s)) for s in ((0, 3, 31), (0, 31, 3))
    }
    assert max(lengths) - min(lengths) < 0.01


def test_a_blended_state_lies_between_the_two(texts):
    (first, *_), text = blend(texts, 3, 4, 0.25), texts[0]
    expected = 0.75 * text.states[3] + 0.25 * text.states[4]
    assert torch.allclose(first.states[4], expected, atol=1e-5)
    assert torch.equal(first.states[3], text.states[3])


def test_the_share_that_costs_the_goal_is_found():
    assert halve(lambda share: share**2, 0.25) == pytest.approx(0.5, abs=0.02)
    assert halve(lambda share: share, 2.0) == 1.0


def test_a_draw_takes_texts_until_there_are_enough(texts):
    many = [replace(texts[0], path=Path(str(i))) for i in range(200)]
    chosen = enough(many)
    assert len(chosen) >= 64
    assert sum(len(t.rows) for t in chosen) >= 4000
    assert sum(len(t.rows) for t in chosen[:-1]) < 4000 or len(chosen) == 64


@pytest.fixture(scope="module")
def outcome(draw, target):
    return answer(draw, target, 1)


def test_the_search_picks_what_exhaustive_scoring_picks(draw, target, outcome):
    assert outcome.best == draw.true
    assert not outcome.missed
    plainly = score_one(draw.checkpoint, target, draw.texts, draw.true)
    expected = pooled([c["accept_length"] for c in plainly])
    assert outcome.lengths[outcome.best] == pytest.approx(expected)
    assert any("0 missed" in line for line in summary([outcome]))


def test_a_worse_pick_is_a_miss(draw, target, outcome):
    counts = score_all(draw, target)
    worse = next(wiring for wiring in draw.wirings if wiring.states() == (59, 3, 0))
    behind = paired_difference(counts[outcome.best], counts[worse])
    lost = replace(outcome, pick=worse, behind=behind)
    assert lost.missed
    assert any("1 missed" in line for line in summary([lost]))

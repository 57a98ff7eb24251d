"""What is asked is what somebody might ask."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from eagle3.errors import BadInput
from eagle3.samples import Sample
from jobs.engines import prompts
from jobs.engines.records import Prompt

LAB_PROMPTS = Path(__file__).resolve().parents[3] / "lab" / "prompts.jsonl"
VOCAB = 1000


def drawn(count: int, length: int, vocab: int = VOCAB) -> list[Prompt]:
    """Prompts of ids that are drawn evenly."""
    rng = random.Random(0)
    return prompts.from_ids([rng.choices(range(vocab), k=length) for _ in range(count)], 16)


def sample(ids: list[int], written: list[bool]) -> Sample:
    """A text of which some tokens were written by the target."""
    return Sample(
        path=Path("/data/rows_0/data_7.ckpt"),
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(written),
        states={},
        target_argmax=None,
        teacher=torch.zeros(len(ids), 2),
    )


def test_a_prompt_is_what_stands_in_front_of_the_answer() -> None:
    text = sample([5, 6, 7, 8, 9], [False, False, True, True, True])
    assert prompts.from_sample(text, None) == Prompt(
        name="rows_0/data_7.ckpt", ids=(5, 6), new_tokens=3
    )
    assert prompts.from_sample(text, 64).new_tokens == 64


def test_a_text_without_a_prompt_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data_7\.ckpt has no prompt: its first token counts as"):
        prompts.from_sample(sample([5, 6], [True, True]), None)


def test_of_several_turns_the_first_answer_is_asked_for() -> None:
    turns = sample([5, 6, 7, 8, 9], [False, True, False, False, True])
    assert prompts.from_sample(turns, None).ids == (5,)


def test_drawn_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match="look like token ids drawn at random"):
        prompts.check(drawn(16, 64), VOCAB)


def test_the_labs_prompts_are_texts() -> None:
    lines = LAB_PROMPTS.read_text().splitlines()[:16]
    prompts.check(prompts.from_ids([json.loads(line)["input_ids"] for line in lines], 16), 1024)


def test_a_text_has_a_token_that_comes_back() -> None:
    # Every fourth token is the same one, as spaces and articles are; the rest is drawn.
    rng = random.Random(0)
    ids = [[3 if i % 4 == 0 else rng.randrange(VOCAB) for i in range(64)] for _ in range(16)]
    prompts.check(prompts.from_ids(ids, 16), VOCAB)


def test_too_few_tokens_to_tell_are_let_through() -> None:
    few = drawn(2, 64)  # 128 · 127 / 2 / 1000 is 8 pairs by chance, of the 50 that it takes
    assert not prompts.looks_random(few, VOCAB)
    prompts.check(few, VOCAB)


def test_asking_the_same_twice_does_not_make_a_text_of_it() -> None:
    assert prompts.looks_random([*drawn(16, 64), *drawn(16, 64)], VOCAB)


@pytest.mark.parametrize(
    ("ids", "new_tokens", "words"),
    [
        ([[1, 2], []], 16, "prompt 1 holds no tokens"),
        ([[1, VOCAB]], 16, "prompt 0 holds token 1000, but the target's vocabulary has 1000"),
        ([[1, -1]], 16, "prompt 0 holds token -1, but the target's vocabulary has 1000"),
        ([[1, 2]], 1, "prompt 0 asks for 1 token; the first is the prefill's, so that at least 2"),
        ([], 16, "there are no prompts to ask"),
    ],
)
def test_prompts_that_measure_nothing_are_refused(
    ids: list[list[int]], new_tokens: int, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        prompts.check(prompts.from_ids(ids, new_tokens), VOCAB)


def test_prompts_that_come_again_are_told() -> None:
    assert prompts.notes(prompts.from_ids([[1, 2], [3, 4]], 16)) == []
    assert prompts.notes(prompts.from_ids([[1, 2], [3, 4], [1, 2]], 16)) == [
        "1 of 3 prompts repeat earlier ones"
    ]
    assert prompts.notes(prompts.from_ids([[1], [1], [1]], 16)) == [
        "2 of 3 prompts repeat earlier ones"
    ]

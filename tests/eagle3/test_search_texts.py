"""Texts are read once, with every teacher's choices, and with states only where they can be had."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.data import find_data
from eagle3.data.form import DataForm, Slot
from eagle3.errors import BadInput
from eagle3.metrics import scored_rows
from eagle3.samples import LeftOut, Sample
from eagle3.search.judging import (
    agreement,
    choose_teacher,
    constant_right,
    is_alive,
    is_earned,
    teacher_scores,
)
from eagle3.search.teachers import Teacher, teachers_of, without_slots
from eagle3.search.texts import Text, known_states, load_texts, why_no_embedding
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import Token, Wiring
from tests.eagle3.wired import target_of

HIDDEN, VOCAB, LAYERS = 20, 50, 7
STATES = (2, 5, 7)


@pytest.fixture
def target(tmp_path: Path) -> TargetParts:
    return target_of(tmp_path / "target", HIDDEN)


def write(folder: Path, i: int, length: int, **changes: Any) -> None:
    generator = torch.Generator().manual_seed(20 + i)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    slots = [torch.randn(length, HIDDEN, generator=generator).bfloat16() for _ in STATES]
    mask = torch.ones(length, dtype=torch.int64)
    mask[:3] = 0
    sample = {
        "input_ids": ids,
        "loss_mask": mask,
        "hidden_states": slots,
        "target_argmax": torch.randint(VOCAB, (length,), generator=generator),
        **changes,
    }
    torch.save({k: v for k, v in sample.items() if v is not None}, folder / f"data_{i}.pt")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i, length in enumerate((9, 14, 11)):
        write(folder, i, length)
    return folder


def form_of(data: Path, states: Sequence[int] | None = STATES) -> DataForm:
    return find_data(data, states=states, hidden=HIDDEN, num_layers=LAYERS)


def loaded(data: Path, target: TargetParts, **more: Any) -> list[Text]:
    settings: dict[str, Any] = {
        "max_samples": None,
        "damaged": "fail",
        "argmax": None,
        "steps": 2,
        "left_out": LeftOut(),
        **more,
    }
    return load_texts(form_of(data), target, **settings)


def slot(i: int, state: int | None, *, normed: bool = False) -> Slot:
    return Slot(name=f"hidden_states[{i}]", role="aux", state=state, normed=normed, origin="a test")


def test_every_slot_is_a_teacher_behind_the_norm_once_not_and_twice(target: TargetParts) -> None:
    slots = (slot(0, 3), slot(1, None), slot(2, 7, normed=True))
    form = DataForm(layout="pt", why="", folder=Path(), files=(), slots=slots, teacher=2)
    names = [t.name for t in teachers_of(form, target, has_argmax=True)]
    assert names == [
        "target_argmax",
        *(f"slot{i}/{how}" for i in (0, 1) for how in ("raw", "normed", "twice")),
        # What is stored behind the norm cannot be had before it.
        "slot2/normed",
        "slot2/twice",
    ]
    found = {t.name: t for t in teachers_of(form, target, has_argmax=False)}
    assert next(iter(found)) == "next_token"
    assert found["slot2/normed"].in_words == (
        "the data's last slot (hidden_states[2], state 7) behind norm and head"
    )
    assert "of no declared state" in found["slot1/raw"].in_words


def test_without_a_head_there_is_only_the_reference(tmp_path: Path) -> None:
    target = target_of(tmp_path / "t", HIDDEN, logit_scale=2.0)
    form = DataForm(layout="pt", why="", folder=Path(), files=(), slots=(slot(0, 3),), teacher=0)
    assert [t.name for t in teachers_of(form, target, has_argmax=True)] == ["target_argmax"]
    assert "logit_scale" in str(without_slots(target))


def test_choices_stand_where_drafted_tokens_are_held_against_them(
    data: Path, target: TargetParts
) -> None:
    texts = loaded(data, target)
    norm = target.final_norm()
    for text in texts:
        assert text.rows.equal(scored_rows(text.mask))
        h = text.states[5].float()
        for name, seen in (("raw", h), ("normed", norm(h)), ("twice", norm(norm(h)))):
            truth = text.truths[f"slot1/{name}"]
            wanted = target.logits(seen, normed=True).argmax(-1)
            first = text.rows + 2
            assert truth[first].equal(wanted[first - 1])
            # Two steps: the last one may lie behind the text.
            assert truth[int(first[0]) - 1] == -1
        assert text.truths["next_token"].equal(text.ids)
        assert len(text.truths) == 2 + 3 * len(STATES)


def test_states_stay_as_stored_and_the_embedding_is_the_targets(
    data: Path, target: TargetParts
) -> None:
    texts = loaded(data, target)
    assert known_states(texts) == (0, *STATES)
    for text in texts:
        assert text.states[2].dtype is torch.bfloat16
        assert text.computed == {0}
        assert text.states[0].equal(target.embedding[text.ids])


@pytest.mark.parametrize(
    "config", [{"model_type": "gemma2"}, {"embedding_multiplier": 12.0}, {"scale_emb": 2}]
)
def test_an_embedding_that_is_scaled_is_not_made(
    data: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    target = target_of(tmp_path / "scaled", HIDDEN, **config)
    assert known_states(loaded(data, target)) == STATES
    assert "multiplies its embedding" in str(why_no_embedding(target))


def test_states_that_are_made_join_the_stored_ones(data: Path, target: TargetParts) -> None:
    asked: list[int] = []

    def more(texts: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        asked.extend(map(len, texts))
        return [
            {3: torch.ones(len(ids), HIDDEN), 5: torch.zeros(len(ids), HIDDEN)} for ids in texts
        ]

    texts = loaded(data, target, more_states=more)
    assert asked == [9, 14, 11]
    assert known_states(texts) == (0, 2, 3, 5, 7)
    for text in texts:
        assert text.computed == {0, 3}
        assert text.states[5].float().abs().sum() > 0  # what is stored is not replaced


def test_one_text_without_the_targets_choices_takes_them_from_all(
    data: Path, target: TargetParts
) -> None:
    assert all("target_argmax" in text.truths for text in loaded(data, target))
    write(data, 1, 14, target_argmax=None)
    assert not any("target_argmax" in text.truths for text in loaded(data, target))


def test_damaged_files_fail_or_are_counted(data: Path, target: TargetParts) -> None:
    write(data, 1, 14, loss_mask=torch.zeros(14, dtype=torch.int64))
    with pytest.raises(BadInput, match="loss_mask is empty"):
        loaded(data, target)
    left_out, seen = LeftOut(), list[Sample]()
    texts = loaded(data, target, damaged="skip", left_out=left_out, seen=seen.append)
    assert len(texts) == len(seen) == 2
    assert len(left_out.skipped) == 1


def test_as_many_texts_as_asked_for_with_the_teachers_asked_for(
    data: Path, target: TargetParts
) -> None:
    done: list[tuple[int, int]] = []
    few = [t for t in teachers_of(form_of(data), target, True) if t.slot == 2]
    texts = loaded(data, target, max_samples=2, teachers=few, progress=lambda *at: done.append(at))
    assert done == [(1, 2), (2, 2)]
    assert set(texts[0].truths) == {
        "next_token",
        "target_argmax",
        "slot2/raw",
        "slot2/normed",
        "slot2/twice",
    }


class Drafted:
    """A scorer of one drafter whose first tokens are made up, text by text."""

    def __init__(self, truths: dict[str, Tensor], drafted: Tensor, texts: int = 24) -> None:
        rows = drafted.view(texts, -1)
        length = rows.shape[1] + 2
        self.texts = [
            Text(
                path=Path(str(i)),
                ids=torch.zeros(length, dtype=torch.int64),
                mask=torch.ones(length, dtype=torch.bool),
                rows=torch.arange(length - 2),
                states={},
                truths={
                    name: torch.cat([torch.zeros(2, dtype=torch.int64), t.view(texts, -1)[i]])
                    for name, t in truths.items()
                },
            )
            for i in range(texts)
        ]
        self.drafted = rows

    def right(self, i: int, teacher: str) -> int:
        return int((self.texts[i].truths[teacher][2:] == self.drafted[i]).sum())

    def rights(self, _: Sequence[Wiring], chosen: Sequence[int], teacher: str) -> Tensor:
        return torch.tensor([[self.right(i, teacher) for i in chosen]], dtype=torch.float64)

    def positions(self, chosen: Sequence[int], _: str) -> Tensor:
        return torch.full((len(chosen),), float(self.drafted.shape[1]), dtype=torch.float64)

    def first(self, wirings: Sequence[Wiring], chosen: Sequence[int], names: Sequence[str]) -> Any:
        from eagle3.metrics import Count

        rows = self.drafted.shape[1]
        return {wirings[0]: {n: [Count(self.right(i, n), rows) for i in chosen] for n in names}}


def teacher(name: str, slot: int | None = 0) -> Teacher:
    return Teacher(name=name, slot=slot, norms=1, in_words=name)


TEACHERS = (teacher("target_argmax", None), teacher("near"), teacher("far"))
WIRING = Wiring.of_states((0, 1, 2))


def made_up(drafts: str) -> Drafted:
    """`near` is the target but for a few near ties, `far` a third of the time."""
    generator = torch.Generator().manual_seed(0)

    def mixed(base: Tensor, share: float) -> Tensor:
        other = torch.randint(1000, base.shape, generator=generator)
        return torch.where(torch.rand(base.shape, generator=generator) < share, base, other)

    argmax = torch.randint(1000, (24 * 50,), generator=generator)
    argmax[::12] = 7  # the most frequent one
    truths = {"target_argmax": argmax, "near": mixed(argmax, 0.98), "far": mixed(argmax, 0.33)}
    if drafts == "constant":
        return Drafted(truths, torch.full_like(argmax, 7))
    return Drafted(truths, mixed(truths[drafts], 0.7))


@pytest.mark.parametrize(
    ("drafts", "wanted", "clear"),
    [
        ("target_argmax", "target_argmax", True),
        ("far", "far", True),
        # As good as the same teacher: the reference, and no doubt about it.
        ("near", "target_argmax", True),
        ("constant", "target_argmax", False),
    ],
)
def test_a_drafters_teacher_is_the_reference_unless_another_is_clearly_closer(
    drafts: str, wanted: str, clear: bool
) -> None:
    found, is_clear = choose_teacher(made_up(drafts), WIRING, TEACHERS, range(24))  # type: ignore[arg-type]
    assert found.name == wanted
    if drafts != "constant":
        assert is_clear is clear


def test_teachers_are_listed_by_how_much_they_explain() -> None:
    scorer: Any = made_up("far")
    counts = scorer.first([WIRING], range(24), ["target_argmax"])[WIRING]["target_argmax"]
    best: Any = SimpleNamespace(wiring=WIRING, counts=[{"accuracy": count} for count in counts])
    scores = teacher_scores(scorer, best, TEACHERS, seed=0)
    assert scores[0].teacher.name == "far"
    assert {s.teacher.name: s.agreement is None for s in scores} == {
        "far": False,
        "near": False,
        "target_argmax": True,
    }
    assert scores[0].accuracy.truth == "far"
    assert scores[0].agreement is not None
    assert scores[0].agreement.truth == "target_argmax"
    assert agreement(scorer, TEACHERS[0], TEACHERS[2], range(24)) == pytest.approx(0.33, abs=0.05)


def test_alive_is_more_than_the_most_frequent_token() -> None:
    """A wiring that always says it is right now and then, and still dead."""
    constant: Any = made_up("constant")
    assert constant_right(constant, "target_argmax", range(24)).equal(
        constant.rights([WIRING], range(24), "target_argmax")[0]
    )
    assert not is_alive(constant, WIRING, "target_argmax", range(24))
    alive: Any = made_up("target_argmax")
    assert is_alive(alive, WIRING, "target_argmax", range(24))


@pytest.mark.parametrize(("repeated", "earned"), [(0.93, False), (0.995, True)])
def test_repeating_the_answer_speaks_for_no_wiring_but_where_it_is_all_that_is_done(
    repeated: float, earned: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randint(1000, (24 * 50,), generator=generator)
    has_id = torch.rand(1000, generator=generator) < 0.8
    says = has_id[truth] & (torch.rand(truth.shape, generator=generator) < repeated)
    scorer: Any = Drafted({"target_argmax": truth}, torch.where(says, truth, -2))
    scorer.wired = SimpleNamespace(to_target=lambda _: torch.arange(1000))
    scorer.checkpoint = SimpleNamespace(vocabulary=lambda _: has_id)
    shown = replace(WIRING, token=Token.after_next)
    assert is_earned(scorer, shown, "target_argmax", range(24)) is earned
    assert is_earned(scorer, WIRING, "target_argmax", range(24))


def test_a_slot_behind_the_norm_is_normed_one_time_less(tmp_path: Path) -> None:
    """speculators' old layout stores the end behind the norm."""
    target = target_of(tmp_path / "target", HIDDEN)
    form = form_of_normed()
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(8, HIDDEN, generator=generator)
    sample = Sample(
        path=Path("a"),
        input_ids=torch.randint(VOCAB, (8,), generator=generator),
        loss_mask=torch.ones(8, dtype=torch.bool),
        states={},
        target_argmax=None,
        teacher=h,
        teacher_normed=True,
        stored=(h,),
    )
    from eagle3.search.texts import text_of

    text = text_of(sample, form, target, teachers_of(form, target, False), 1, embed=False)
    assert text.truths["slot0/normed"][3] == target.logits(h[2], normed=True).argmax()
    twice = target.logits(target.final_norm()(h[2]), normed=True).argmax()
    assert text.truths["slot0/twice"][3] == twice
    assert text.states == {}


def form_of_normed() -> DataForm:
    slots = (replace(slot(0, LAYERS), normed=True, role="last"),)
    return DataForm(layout="pt", why="", folder=Path(), files=(), slots=slots, teacher=0)


def test_a_target_without_final_norm_is_no_error_here(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    target_of(folder, HIDDEN)
    config = json.loads((folder / "config.json").read_text())
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "rms_norm_eps" in str(without_slots(load_target_parts(folder)))

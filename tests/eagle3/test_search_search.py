"""The search finds what was planted in the bytes of the lab's drafters, and repairs nothing sound.

Faults are edits of a checkpoint's file; no switch of ours has a part in them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3.checkpoint import DrafterCheckpoint, load_drafter
from eagle3.data.form import DataForm, Slot
from eagle3.errors import BadInput
from eagle3.lab.layout import lay_out, load_live
from eagle3.metrics import Count, scored_rows
from eagle3.repetition import cut
from eagle3.samples import Sample
from eagle3.search.axes import axes_of
from eagle3.search.halving import rank
from eagle3.search.results import Ranked
from eagle3.search.score import Scorer
from eagle3.search.search import Searched, search
from eagle3.search.teachers import Teacher, teachers_of
from eagle3.search.texts import Text, text_of, with_states
from eagle3.search.walk import Change, Walk, first_of_each
from eagle3.target import TargetParts, load_target_parts
from eagle3.wiring import D2T, SWITCHES, Feedback, Wiring
from orchestrator.paths import CLONE
from tests.eagle3.searchable import PLAIN, STATES, STEPS, checkpoint, small_texts
from tests.eagle3.small import write_tensors
from tests.eagle3.wired import target_of

LAB = CLONE / "lab"
STORED = (0, 3, 31, 59)
TEXTS, PROMPT, NEW = 64, 48, 64
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class World:
    """The lab's target with texts that it wrote, and everything a search takes of them."""

    target: TargetParts
    texts: list[Text]
    teachers: tuple[Teacher, ...]
    folder: Path

    def searched(
        self,
        drafter: str = "drafter",
        start: Wiring | None = None,
        *,
        plant: Callable[[Tensors], None] | None = None,
        config: Callable[[dict], None] | None = None,
        more: tuple[Wiring, ...] = (),
        count: int = TEXTS,
        **cut_axes: object,
    ) -> Searched:
        """What a search of a drafter of the lab finds, with its file edited."""
        own = self.edited(drafter, plant, config)
        scorer = Scorer(own, self.target, self.texts[:count], steps=STEPS)
        begun = (start or Wiring.of_states(STORED[:3])).resolved(own.form)
        axes = axes_of(
            own.form,
            begun,
            scorer.known,
            target_rope=None,
            own_embedding=own.embedding is not None,
            own_head=own.drafter.shape.own_head,
            **cut_axes,  # type: ignore[arg-type]
        )
        return search(
            scorer,
            [begun, *more],
            axes,
            self.teachers,
            form=own.form,
            steps=STEPS,
            seed=0,
            finalists=2,
        )

    def edited(
        self,
        drafter: str,
        plant: Callable[[Tensors], None] | None,
        config: Callable[[dict], None] | None,
    ) -> DrafterCheckpoint:
        folder = self.folder / f"{drafter}-{len(list(self.folder.iterdir()))}"
        shutil.copytree(LAB / drafter, folder)
        if plant is not None:
            tensors = load_file(folder / "model.safetensors")
            plant(tensors)
            kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_tensors(folder / "model.safetensors", kept)
        if config is not None:
            raw = json.loads((folder / "config.json").read_text())
            config(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        return load_drafter(folder)


def row_of(found: Searched, wiring: Wiring) -> Ranked:
    (row,) = [r for r in found.ranked if r.wiring == wiring]
    return row


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("search")
    target = load_target_parts(lay_out(LAB / "target", folder / "target"))
    live = load_live(LAB / "target")
    lines = (LAB / "prompts.jsonl").read_text().splitlines()
    prompts = torch.tensor([json.loads(line)["input_ids"][:PROMPT] for line in lines])
    slots = tuple(
        Slot(name=f"hidden_states[{i}]", role="aux", state=k, normed=False, origin="a test")
        for i, k in enumerate(STORED)
    )
    form = DataForm(
        layout="pt", why="a test", folder=folder, files=(), slots=slots, teacher=len(STORED) - 1
    )
    teachers = teachers_of(form, target, has_argmax=True)
    texts: list[Text] = []
    with torch.no_grad():
        for number, ids in enumerate(live.generate(prompts[:160], NEW)):
            stop = cut(ids.tolist(), PROMPT, {live.shape.vocab - 1}, 24)
            if stop - PROMPT < 24 or len(texts) == TEXTS:
                continue
            logits, states = live(ids[None, :stop], STORED)
            mask = torch.zeros(stop, dtype=torch.bool)
            mask[PROMPT:] = True
            assert len(scored_rows(mask))
            sample = Sample(
                path=Path(f"lab/{number}"),
                input_ids=ids[:stop],
                loss_mask=mask,
                states={k: states[k][0] for k in STORED},
                target_argmax=logits[0].argmax(-1),
                teacher=states[STORED[-1]][0],
                stored=tuple(states[k][0] for k in STORED),
            )
            texts.append(text_of(sample, form, target, teachers, STEPS, embed=True))
    assert len(texts) == TEXTS
    (folder / "drafters").mkdir()
    return World(target=target, texts=texts, teachers=teachers, folder=folder / "drafters")


@pytest.fixture(scope="module")
def sound(world: World) -> Searched:
    return world.searched()


def permuted(order: tuple[int, ...]) -> Callable[[Tensors], None]:
    """fc's chunks, and its norm's, in another order."""

    def plant(tensors: Tensors) -> None:
        for name in ("fc.weight", "input_norm.weight"):
            if name in tensors:
                chunks = tensors[name].chunk(len(order), -1)
                tensors[name] = torch.cat([chunks[i] for i in order], -1)

    return plant


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def halves(tensors: Tensors) -> None:
    """The first layer takes the hidden state first."""
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name] = tensor.roll(tensor.shape[1] // 2, 1)


def swapped(tensors: Tensors) -> None:
    """The first layer's two norms under each other's name."""
    (one,) = [n for n in tensors if n.endswith("input_layernorm.weight")]
    (other,) = [n for n in tensors if n.endswith("hidden_norm.weight")]
    tensors[one], tensors[other] = tensors[other], tensors[one]


def together(*plants: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def plant(tensors: Tensors) -> None:
        for one in plants:
            one(tensors)

    return plant


@pytest.mark.parametrize(
    ("plant", "wanted"),
    [
        (permuted((2, 0, 1)), {"states=31,0,3"}),
        (absolute, {"d2t=absolute"}),
        (halves, {"concat=hidden_first"}),
        (swapped, {"input_norms=swapped"}),
        (together(permuted((1, 0, 2)), absolute), {"states=3,0,31", "d2t=absolute"}),
        (together(halves, swapped), {"concat=hidden_first", "input_norms=swapped"}),
        (
            together(permuted((2, 0, 1)), absolute, halves),
            {"states=31,0,3", "d2t=absolute", "concat=hidden_first"},
        ),
    ],
)
def test_planted_faults_are_found_and_nothing_else(
    world: World, sound: Searched, plant: Callable[[Tensors], None], wanted: set[str]
) -> None:
    found = world.searched(plant=plant)
    assert set(found.best.changed) == wanted
    assert found.best.accept_length == sound.best.accept_length
    assert row_of(found, found.start).accept_length.high < found.best.accept_length.low
    assert found.teacher.name == "target_argmax"


def test_a_sound_drafter_is_left_as_it_is(sound: Searched) -> None:
    found = sound
    assert found.best.changed == ()
    assert found.best.wiring == found.start
    assert found.teacher.name == "target_argmax"
    assert found.teacher_clear
    assert found.best.behind is None
    assert not found.best.tied
    assert all("none is clearly better" in said for said in found.rounds)
    dropped = {d.changed for d in found.dropped}
    assert ("d2t=absolute",) in dropped
    assert ("decoder_layer=skipped",) in dropped
    for row in found.dropped:
        if row.behind is not None and row.behind.low > 0:
            assert f"clearly behind the leader's on {row.texts} texts" in row.why
    values = [d.behind.value for d in found.dropped if d.behind is not None]
    assert values == sorted(values)
    # Everybody is in one of the tables, and nobody in both.
    listed = [*found.ranked, *(d for d in found.dropped if d.behind is not None)]
    assert len(listed) == len({row.wiring for row in listed}) == found.scored
    assert not {r.wiring for r in found.ranked} & {d.wiring for d in found.dropped}


def test_wrong_states_are_found_from_the_served_ones(world: World) -> None:
    served = Wiring.of_states((3, 31, 59))
    found = world.searched(start=served)
    assert found.best.changed == ("states=0,3,31",)
    assert found.start.states() == (3, 31, 59)
    behind = row_of(found, found.start).behind
    assert behind is not None
    assert behind.low > 1.0
    assert any("took states=0,3,31" in said for said in found.rounds)


@pytest.mark.runs
def test_a_state_that_was_made_gives_way_to_a_stored_one_that_is_as_good(world: World) -> None:
    """A trainer fed what its dump holds, whatever a config declares."""
    texts = [with_states(text, {4: text.states[3]}) for text in world.texts]
    beside = replace(world, texts=texts)
    served = Wiring.of_states((31, 4, 0))
    assert beside.searched(start=served).best.wiring.states() == (0, 3, 31)
    # Also where nothing else is wrong.
    assert beside.searched(start=Wiring.of_states((0, 4, 31))).best.wiring.states() == (0, 3, 31)


@pytest.mark.runs
def test_of_states_that_are_right_equally_often_the_likelier_is_taken(world: World) -> None:
    """A state with a little noise costs hardly a token, but probability."""
    generator = torch.Generator().manual_seed(0)

    def noisy(state: Tensor) -> Tensor:
        noise = torch.randn(state.shape, generator=generator)
        return state + 0.1 * noise * state.pow(2).mean().sqrt()

    texts = [replace(t, states={**t.states, 2: noisy(t.states[3])}) for t in world.texts]
    found = replace(world, texts=texts).searched(start=Wiring.of_states((31, 2, 0)), count=24)
    assert found.best.wiring.states() == (0, 3, 31)
    assert "states" in found.unclear


def test_states_and_table_wrong_at_once_where_either_repair_alone_gives_nothing(
    world: World,
) -> None:
    found = world.searched(start=Wiring.of_states((3, 31, 59), d2t=D2T.absolute))
    assert set(found.best.changed) == {"states=0,3,31", "d2t=offset"}


def test_no_pairs_are_tried_where_one_change_makes_a_drafter_that_works(world: World) -> None:
    one = world.searched(start=Wiring.of_states(STORED[:3], d2t=D2T.absolute))
    two = world.searched(start=Wiring.of_states((3, 31, 59), d2t=D2T.absolute))
    assert one.best.changed == ("d2t=offset",)
    assert one.scored < 150 < 400 < two.scored


def test_feedback_shows_behind_the_first_step_only(world: World) -> None:
    """SpecForge trains on the state before the norm, whatever a server's flag says."""
    found = world.searched(start=Wiring.of_states(STORED[:3], feedback=Feedback.normed))
    assert found.best.changed == ("feedback=raw",)
    assert any("by accept length" in said and "took feedback" in said for said in found.rounds)
    assert found.best.accuracy == row_of(found, found.start).accuracy


def test_the_teacher_that_the_data_really_has_is_named(world: World) -> None:
    found = world.searched("drafter_speculators")
    assert found.best.changed == ()
    assert found.teacher.slot == 3
    assert found.teacher.name == "slot3/normed"
    first, *others = found.teachers
    assert first.teacher == found.teacher
    assert first.accuracy.truth == "slot3/normed"
    assert first.agreement is not None
    assert first.agreement.value < 0.6
    assert all(score.accuracy.value < first.accuracy.value for score in others)
    # What serving accepts is held against the target itself, whoever the teacher was.
    assert found.best.accept_length.truth == found.best.accuracy.truth == "target_argmax"
    assert found.best.accuracy.value < first.accuracy.value - 0.2


@pytest.mark.runs
def test_several_faults_in_the_second_drafter(world: World) -> None:
    def config(raw: dict) -> None:
        raw["norm_before_residual"] = False

    found = world.searched("drafter_speculators", plant=permuted((1, 2, 0)), config=config)
    assert {"states=3,31,0", "residual=normed"} <= set(found.best.changed)
    assert found.teacher.name == "slot3/normed"


@pytest.mark.runs
def test_what_counts_cannot_tell_the_probability_of_the_teachers_choices_does(world: World) -> None:
    """A scaling that an export wrote costs this drafter hardly a token on 48 texts."""

    def config(raw: dict) -> None:
        raw["transformer_layer_config"]["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
        }

    found = world.searched("drafter_speculators", config=config, count=48)
    assert found.best.changed == ("rope=unscaled",)
    assert any("took rope=unscaled, cross-entropy" in said for said in found.rounds)


@pytest.mark.runs
def test_a_fixed_axis_is_left_alone_and_a_cut_one_tries_what_is_named(world: World) -> None:
    served = Wiring.of_states((3, 31, 59))
    fixed = world.searched(start=served, fixed=["states"])
    assert fixed.best.wiring.states() == (3, 31, 59)
    cut_ = world.searched(start=served, only={"states": [(0, 31, 3), (31, 3, 0)]})
    assert cut_.best.wiring.states() in {(3, 31, 59), (0, 31, 3)}


def test_what_was_not_searched_and_what_is_not_clear_is_said(world: World, sound: Searched) -> None:
    assert sound.axes is not None
    assert {"states", "d2t", "feedback", "residual"} <= set(sound.axes)
    assert set(sound.unclear) < set(sound.axes)
    assert not {"states", "d2t", "decoder_layer", "feedback"} & set(sound.unclear)
    served = Wiring.of_states((3, 31, 59))
    fixed = world.searched(start=served, fixed=["states", "residual"], count=8)
    assert fixed.axes is not None
    assert not {"states", "residual"} & set(fixed.axes)


@pytest.mark.runs
def test_one_text_takes_nothing_lists_everybody_and_leaves_all_unclear(world: World) -> None:
    found = world.searched(start=Wiring.of_states((3, 31, 59)), count=1)
    assert found.best.changed == ()
    listed = [*found.ranked, *(d for d in found.dropped if d.behind is not None)]
    assert len({row.wiring for row in listed}) == len(listed) == found.scored > 60
    assert {"states", "d2t", "feedback"} <= set(found.unclear)
    assert not found.teacher_clear
    assert all(r.tied for r in found.ranked[1:])
    assert all("not clearly" in d.why for d in found.dropped if d.behind is not None)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ((0, 3, 99), r"state 99, but the target has states 0 to 61"),
        ((0, 3, 5), r"state 5, but the texts hold only 0, 3, 31, 59"),
    ],
)
def test_named_states_that_cannot_be_fed_are_refused(
    world: World, states: tuple[int, ...], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        world.searched(only={"states": [(0, 31, 3), states]}, count=2)


def test_finalists_whose_rounds_cannot_be_counted_do_not_end_the_search(world: World) -> None:
    scorer = Scorer(
        world.edited("drafter_speculators", None, None), world.target, world.texts, steps=STEPS
    )
    best, other = (
        Wiring.of_states(s).resolved(scorer.checkpoint.form) for s in ((0, 3, 31), (3, 31, 59))
    )
    counted = scorer.chains

    def chains(wiring: Wiring, *more: object) -> list[dict[str, Count]]:
        found = counted(wiring, *more)  # type: ignore[arg-type]
        nothing = {"accept_length": Count(0, 0)} if wiring == other else {}
        return [{**text, **nothing} for text in found]

    scorer.chains = chains  # type: ignore[method-assign]
    ranked = rank(
        scorer,
        [best, other],
        teacher="target_argmax",
        truth="target_argmax",
        seed=0,
        start=best,
        comparisons=1,
    )
    assert ranked[1].accept_length.denominator == 0
    assert (ranked[1].accept_length.low, ranked[1].accept_length.high) == (1.0, STEPS + 1.0)
    assert ranked[1].tied
    with pytest.raises(BadInput, match=r"use fewer job\.steps"):
        rank(
            scorer,
            [other],
            teacher="target_argmax",
            truth="target_argmax",
            seed=0,
            start=best,
            comparisons=1,
        )


@pytest.mark.runs
def test_noise_is_not_repaired(world: World) -> None:
    """A drafter that learned nothing is not made to look alive by any of some hundred wirings."""

    def noise(tensors: Tensors) -> None:
        torch.manual_seed(2)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                tensors[name] = torch.randn_like(tensor.float()).to(tensor.dtype) * 0.05

    found = world.searched(plant=noise, count=32)
    assert found.best.changed == ()
    assert found.best.accept_length.value < 1.1


def test_a_second_start_leads_on_where_the_first_does_not(world: World) -> None:
    own = world.edited("drafter", None, None)
    other = Wiring.of_states((0, 3, 31)).resolved(own.form)
    found = world.searched(start=Wiring.of_states((3, 31, 59)), fixed=["states"], more=(other,))
    assert found.best.wiring == other
    assert found.start.states() == (3, 31, 59)


@pytest.fixture
def small(tmp_path: Path) -> Scorer:
    target = target_of(tmp_path / "target", PLAIN.hidden)
    return Scorer(checkpoint(PLAIN), target, small_texts((20, 24, 28)), steps=STEPS)


REFERENCE = Teacher(name="target_argmax", slot=None, norms=0, in_words="the target's own choice")


def tried(
    scorer: Scorer, *starts: Wiring, teachers: tuple[Teacher, ...] = (REFERENCE,)
) -> Searched:
    form = scorer.checkpoint.form
    axes = axes_of(
        form,
        Wiring.of_states(STATES[:3]),
        scorer.known,
        target_rope=None,
        own_embedding=True,
        own_head=True,
    )
    return search(scorer, starts, axes, teachers, form=form, steps=STEPS, seed=0)


@pytest.mark.runs
def test_a_start_that_cannot_be_scored_is_left_out_and_said(small: Scorer) -> None:
    found = tried(small, Wiring.of_states((0, 2, 6)), Wiring.of_states((0, 2, 5)))
    assert found.start.states() == (0, 2, 5)
    (note,) = [note for note in found.notes if "left out" in note]
    assert "state 6" in note
    with pytest.raises(BadInput, match=r"no start of the search can be scored.*state 6"):
        tried(small, Wiring.of_states((0, 2, 6)))


def test_a_teacher_whose_choices_nobody_made_is_refused(small: Scorer) -> None:
    lacking = Teacher(name="slot0/raw", slot=0, norms=0, in_words="")
    with pytest.raises(BadInput, match="no choices of slot0/raw"):
        tried(small, Wiring.of_states((0, 2, 5)), teachers=(REFERENCE, lacking))


@pytest.mark.runs
def test_random_weights_are_left_as_declared(small: Scorer) -> None:
    """Three texts of noise, some dozens of wirings: nothing is clear."""
    found = tried(small, Wiring.of_states((0, 2, 5)))
    assert found.best.changed == ()
    assert found.scored > 40


def test_few_wirings_are_all_raced_at_once(world: World) -> None:
    """States, readings of d2t, the layer in or out: the product, in which no step has to lead on."""
    fixed = [name for name in SWITCHES if name not in ("d2t", "decoder_layer")]
    start = Wiring.of_states((3, 31, 59), d2t=D2T.absolute)
    found = world.searched(start=start, fixed=fixed)
    assert found.scored == 24 * 3 * 2
    assert (found.best.wiring.states(), found.best.wiring.d2t) == ((0, 3, 31), D2T.offset)
    assert found.best.changed == ("states=0,3,31", "d2t=offset")
    assert row_of(found, found.start).behind is not None
    everybody = [*(r.wiring for r in found.ranked), *(d.wiring for d in found.dropped)]
    assert len(everybody) == len(set(everybody)) == found.scored
    assert len(found.ranked) == 2
    assert found.teacher.name == "target_argmax"
    assert {s.teacher for s in found.teachers} == set(world.teachers)
    # What shows behind the first step is climbed to, however little else is asked.
    late = world.searched(start=start, fixed=[n for n in fixed if n != "feedback"])
    assert late.scored < 24 * 3 * 2 * 2


@pytest.mark.runs
@pytest.mark.parametrize("works", [True, False])
def test_pairs_are_asked_around_a_second_start_where_the_first_led_to_nothing_that_works(
    small: Scorer, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    first, second = (
        Wiring.of_states(s).resolved(small.checkpoint.form) for s in ((0, 2, 5), (2, 5, 7))
    )
    asked: list[Wiring] = []
    pairs = Walk.pairs

    def listed(walk: Walk, here: Wiring, suspects: Iterable[Change]) -> object:
        asked.append(here)
        return pairs(walk, here, suspects)

    monkeypatch.setattr(Walk, "works", lambda *_: works)
    monkeypatch.setattr(Walk, "pairs", listed)
    tried(small, first, second)
    assert first in asked
    assert (second in asked) is not works


def test_the_first_few_changes_of_each_part_are_kept_in_order() -> None:
    made = [Change(name, value) for name, value in zip("aabab", range(5), strict=True)]
    assert first_of_each(made, 2) == [made[0], made[1], made[2], made[4]]
    assert first_of_each([*made[2:], made[0]], 1) == [made[2], made[3]]

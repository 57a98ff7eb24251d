"""The fault bench: what is planted is planted, what is to change nothing does not, scores are exact."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.diagnosis import Bench
from bench.planted import cases as bench_cases
from bench.planted import lab, score
from bench.planted.block import KINDS as BLOCK
from bench.planted.captures import KINDS as CAPTURES
from bench.planted.captures import quantised
from bench.planted.cases import ALIKE, KINDS, OUTSIDE_KINDS, Case, Maker
from bench.planted.conversions import KINDS as CONVERSIONS
from bench.planted.deployments import KINDS as DEPLOYMENTS
from bench.planted.draft import SGLANG, Draft, write_checkpoint
from bench.planted.drafters import DRAFTERS, EARLY_DRAFTER, LAYOUTS, sound
from bench.planted.exports import KINDS as EXPORTS
from bench.planted.handovers import KINDS as HANDOVERS
from bench.planted.kinds import BRINGS, HELD_OUT, TUNING, Alike, Kind
from bench.planted.recordings import KINDS as RECORDINGS
from bench.planted.ruin import KINDS as RUIN
from bench.planted.unserved import KINDS as UNSERVED
from bench.planted.vocabularies import KINDS as VOCABULARIES
from bench.planted.wreckage import KINDS as WRECKAGE
from eagle3.checkpoint import load_drafter
from eagle3.data import find_data
from eagle3.diagnosis.kinds import KINDS as CAUSES
from eagle3.doctor.subject import EngineAsked, read_drafter
from eagle3.samples import read_samples
from eagle3.served import served_wiring
from jobs import drafter_test
from jobs.events import Events
from tests.orchestrator.test_plan import request

PLANTED = Path(lab.__file__).parent
SHIPPED = [d for d in DRAFTERS.values() if (lab.LAB / d.folder).is_dir()]
TEXTS = tuple(range(4))
Score = Callable[..., dict[str, Any]]


def places(kind: Kind | Alike) -> Iterator[tuple[str, str]]:
    """Where a kind can be planted, of the drafters that are shipped."""
    for drafter in SHIPPED:
        if (drafter is EARLY_DRAFTER) != kind.name.startswith("under-trained"):
            continue
        for layout in LAYOUTS:
            if kind.why_not(draft(drafter.name, layout)) is None:
                yield drafter.name, layout


def draft(drafter: str, layout: str, dump: str = "pt_shards") -> Draft:
    return sound(DRAFTERS[drafter], layout, dump, TEXTS)


def every(kinds: dict[str, Any], most: int = 6) -> list[Any]:
    return [
        pytest.param(kind, *place, id="-".join([name, *place]))
        for name, kind in kinds.items()
        for place in list(places(kind))[:most]
    ]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> lab.Laboratory:
    torch.set_num_threads(1)
    return lab.Laboratory(tmp_path_factory.mktemp("bench"), prompts=20)


@pytest.fixture(scope="module")
def counted(laboratory: lab.Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Score:
    """Raw counts of a draft's chains, connected in the usual way."""

    def score_of(made: Draft, **switches: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("case")
        own = "embed_tokens.weight" in made.tensors
        wiring = {
            "layers": list(made.dump.declared[:-1]),
            "convention": "input",
            "d2t": "offset",
            "decoder_layer": "included",
            "embedding": "own" if own else "target",
            **({} if "lm_head.weight" in made.tensors else {"head": "target"}),
            **switches,
        }
        request = {
            "device": "cpu",
            "steps": 4,
            "truth": "target_argmax" if made.dump.argmax else "next_token",
            "seed": 0,
            "max_samples": None,
            "inputs": made.write(folder, laboratory),
        }
        with Events(folder / "events.jsonl") as events:
            job = drafter_test.open_job(request, events)
            return job.run_case({"case_id": "case", "wiring": wiring})

    return score_of


def accept_length(result: dict[str, Any]) -> float:
    return float(result["metrics"]["accept_length"]["value"])


def test_nothing_is_planted_through_the_switches_that_are_searched() -> None:
    closed = ("wiring", "connect", "model", "chain", "search", "diagnosis", "served")
    for path in PLANTED.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top, _, rest = name.partition(".")
                assert not (top == "eagle3" and rest.partition(".")[0] in closed), (path, name)
                assert top != "jobs", (path, name)


def test_each_kind_says_what_is_right_and_whether_it_was_tuned_on() -> None:
    for name, kind in {**KINDS, **OUTSIDE_KINDS}.items():
        assert name == kind.name
        assert kind.how
        assert kind.accepted
        assert set(kind.accepted) <= set(CAUSES), name
        assert kind.use in (TUNING, HELD_OUT)
        assert list(places(kind)) or not all(
            (lab.LAB / d.folder).is_dir() for d in DRAFTERS.values()
        )
    for kinds, least in ((KINDS, 12), (OUTSIDE_KINDS, 8), (ALIKE, 3)):
        uses = [each.use for each in kinds.values()]
        assert uses.count(HELD_OUT) >= least
        assert uses.count(TUNING) >= 10
    uncovered = set(CAUSES) - {cause for kind in KINDS.values() for cause in kind.accepted}
    # Positions are a matter of an engine's or a trainer's code, and nobody trains without a layer: no
    # file carries either.
    assert uncovered == {"positions", "decoder-layer", "unknown"}


@pytest.mark.parametrize(("kind", "drafter", "layout"), every({**KINDS, **OUTSIDE_KINDS}, 2))
def test_a_kind_changes_what_it_says_and_nothing_else(
    kind: Kind, drafter: str, layout: str
) -> None:
    before, after = draft(drafter, layout), draft(drafter, layout)
    kind.plant(after, random.Random(3))
    tensors = {
        name
        for name in before.tensors.keys() | after.tensors.keys()
        if name not in before.tensors
        or name not in after.tensors
        or not torch.equal(before.tensors[name], after.tensors[name])
    }
    in_bytes = kind in (*BLOCK, *EXPORTS, *VOCABULARIES, *CONVERSIONS) or kind.outside
    in_bytes = in_bytes or kind.cause in ("coverage", "deeper-norm")
    in_bytes = in_bytes or kind.name == "not-served/old_names"
    assert bool(tensors) == (in_bytes), tensors
    assert before.tensors.keys() - tensors
    changed = {
        "bytes": bool(tensors),
        "config": before.config != after.config,
        "dump": before.dump != after.dump,
        "target": before.target != after.target,
        "engine": (after.engine, after.engine_ids) != (None, None),
        "figure": after.measured is not None,
        "drafter": kind.cause == "under-trained",
    }
    assert any(changed.values())
    assert kind.shows != BRINGS or changed["engine"]
    assert not changed["dump"] or kind.cause in ("slots", "token", "teacher")
    again = draft(drafter, layout)
    kind.plant(again, random.Random(3))
    assert all(torch.equal(t, again.tensors[n]) for n, t in after.tensors.items())
    assert again.config == after.config


@pytest.mark.runs
@pytest.mark.parametrize(("each", "drafter", "layout"), every(ALIKE, 3)[::2])
def test_what_is_to_leave_outputs_alone_does(
    each: Alike, drafter: str, layout: str, counted: Score, tmp_path: Path
) -> None:
    before, after = draft(drafter, layout), draft(drafter, layout)
    each.plant(after, random.Random(3))
    assert file_bytes(before, tmp_path / "before") != file_bytes(after, tmp_path / "after")
    one, other = counted(before)["samples"], counted(after)["samples"]
    for step in range(4):
        name = f"step_accuracy/marginal@{step}"
        pairs = [(a[name], b[name]) for a, b in zip(one, other, strict=True)]
        assert [a[1] for a, _ in pairs] == [b[1] for _, b in pairs]
        flipped = sum(abs(a[0] - b[0]) for a, b in pairs)  # near ties, by the order of sums
        assert flipped <= 0.01 * sum(a[1] for a, _ in pairs), name


def file_bytes(made: Draft, folder: Path) -> list[bytes]:
    write_checkpoint(made, folder)
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def both(kind: Kind, drafter: str, layout: str, counted: Score, seed: int) -> tuple[float, float]:
    """The accept length with the fault planted, and that of the sound drafter."""
    broken = draft(drafter, layout)
    kind.plant(broken, random.Random(seed))
    return accept_length(counted(broken)), accept_length(counted(draft(drafter, layout)))


@pytest.mark.runs
@pytest.mark.parametrize(("kind", "drafter", "layout"), every(OUTSIDE_KINDS, 1))
def test_damage_outside_what_is_known_is_damage(
    kind: Kind, drafter: str, layout: str, counted: Score
) -> None:
    so, sound = both(kind, drafter, layout, counted, 3)
    assert so < sound - 0.3


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "drafter", "layout"), every({kind.name: kind for kind in (*WRECKAGE, *RUIN)})[::2]
)
def test_wreckage_costs_every_drafter_a_share(
    kind: Kind, drafter: str, layout: str, counted: Score
) -> None:
    so, sound = both(kind, drafter, layout, counted, 7)
    assert so < 0.8 * sound


# They show in what config.json and the files say by themselves, without an engine.
PLAIN = {
    kind.name: kind
    for kind in (*EXPORTS, *HANDOVERS, *VOCABULARIES, *CONVERSIONS, *DEPLOYMENTS)
    if kind.shows != BRINGS and kind.cause not in ("states", "under-trained")
}


@pytest.mark.runs
@pytest.mark.parametrize(("kind", "drafter", "layout"), every(PLAIN, 1))
def test_a_fault_costs_something(kind: Kind, drafter: str, layout: str, counted: Score) -> None:
    so, sound = both(kind, drafter, layout, counted, 3)
    assert so < sound - 0.1


CAPTURED = {kind.name: kind for kind in (*CAPTURES, *RECORDINGS) if kind.shows != BRINGS}
OTHER_TARGET = {name for name, kind in CAPTURED.items() if kind.cause == "teacher"}
BEHIND, BEFORE = slice(1, None), slice(None, -1)
OTHER_IDS = {"token/first_twice": (BEHIND, BEFORE), "token/ids_ahead": (BEFORE, BEHIND)}


@pytest.mark.runs
@pytest.mark.parametrize(("kind", "drafter", "layout"), every(CAPTURED)[::2])
def test_a_dump_that_is_wrong_costs_every_drafter_something(
    kind: Kind, drafter: str, layout: str, counted: Score
) -> None:
    so, sound = both(kind, drafter, layout, counted, 3)
    assert so < sound - 0.1


BROUGHT = {
    kind.name: kind
    for kind in (*EXPORTS, *HANDOVERS, *CAPTURES, *CONVERSIONS, *DEPLOYMENTS, *UNSERVED)
    if kind.shows == BRINGS
}


@pytest.mark.parametrize(("kind", "drafter", "layout"), every(BROUGHT))
def test_an_engine_that_is_brought_runs_what_the_kind_says(
    kind: Kind, drafter: str, layout: str, tmp_path: Path
) -> None:
    broken = draft(drafter, layout)
    kind.plant(broken, random.Random(3))
    write_checkpoint(broken, tmp_path)
    engine = broken.engine
    assert engine is not None
    asked = EngineAsked(
        name=engine.name,
        version=engine.version,
        engine_class=engine.engine_class,
        flags=broken.engine_flags,
    )
    served = served_wiring(
        load_drafter(tmp_path).form,
        broken.config,
        asked,
        num_layers=61,
        ids=broken.engine_ids,
        drafter=read_drafter(tmp_path)[0],
    )
    if kind.cause == "not-served":
        # Of a config that is not loaded it says what a flat copy would do.
        assert served.stops or any("does not load" in problem for problem in served.problems)
        return
    assert not served.stops
    other_states = kind.cause in ("states", "order")
    assert (served.states != broken.states) == other_states
    assert (sorted(served.states or ()) != sorted(broken.states)) == (kind.cause == "states")
    switches = {"residual": {"residual"}, "deeper-norm": {"deeper_norm"}}.get(kind.cause, set())
    assert set(served.because) - {"states"} == switches


def test_what_was_learnt_is_said_behind_the_norm_twice(laboratory: lab.Laboratory) -> None:
    trained, target = lab.live_target("whole"), lab.live_target("normed_twice")
    ends = [text.states[61] for text in laboratory.texts("normed_twice")]
    learnt = torch.cat([trained.lm_head(trained.norm(h)).argmax(-1) for h in ends])
    once = torch.cat([target.lm_head(target.norm(h)).argmax(-1) for h in ends])
    twice = torch.cat([target.lm_head(target.norm(target.norm(h))).argmax(-1) for h in ends])
    assert (twice == learnt).float().mean() > 0.99
    assert (once == learnt).float().mean() < 0.8


def test_what_was_learnt_is_said_without_the_norms_weights(laboratory: lab.Laboratory) -> None:
    trained, target = lab.live_target("ends_at_59"), lab.live_target("own_norm_at_59")
    ends = [text.states[61] for text in laboratory.texts("own_norm_at_59")]
    learnt = torch.cat([trained.lm_head(trained.norm(h)).argmax(-1) for h in ends])
    behind = torch.cat([target.lm_head(target.norm(h)).argmax(-1) for h in ends])
    bare = torch.cat([target.lm_head(h).argmax(-1) for h in ends])  # a row's size decides nothing
    assert (bare == learnt).float().mean() > 0.99
    assert (behind == learnt).float().mean() < 0.8


def test_another_build_of_the_target_chooses_otherwise(laboratory: lab.Laboratory) -> None:
    """So what its last slot says contradicts the texts, and the dump shows it by itself."""
    for name in ("whole", "ends_at_59"):
        for text in laboratory.texts(name):
            said = quantised(name)(text.ids[None])[0][0].argmax(-1)
            assert (said == text.argmax).float().mean() < 0.5


@pytest.mark.parametrize("layout", ["pt_shards", "speculators", "specforge"])
@pytest.mark.parametrize("kind", [*CAPTURED.values()], ids=[*CAPTURED])
def test_a_wrong_dump_is_written_in_every_layout(
    kind: Kind, layout: str, laboratory: lab.Laboratory, tmp_path: Path
) -> None:
    broken = draft(next(iter(places(kind)))[0], "specforge", layout)
    kind.plant(broken, random.Random(3))
    data = broken.write(tmp_path, laboratory)["data"]
    stored = laboratory.texts(broken.dump.texts)
    count = lab.num_layers(broken.target)
    form = find_data(Path(data["path"]), layout=None, states=None, hidden=128, num_layers=count)
    samples = list(read_samples(form, vocab=1024, hidden=128))
    assert len(samples) == len(TEXTS)
    for sample, number in zip(samples, TEXTS, strict=True):
        text = stored[number]
        same = [torch.equal(sample.states[k], text.states[k]) for k in broken.states]
        moved = not torch.equal(sample.input_ids, text.ids)
        assert moved == (kind.name in OTHER_IDS)
        assert all(same) == (kind.name in OTHER_IDS.keys() | OTHER_TARGET)
        if moved:
            assert sample.target_argmax is None
            assert data["target_argmax"] is None
            held, own = OTHER_IDS[kind.name]
            assert torch.equal(sample.input_ids[held], text.ids[own])


def test_a_last_norm_that_is_even_may_be_left_out(counted: Score) -> None:
    """The same key costs the drafters something whose last norm is as they were trained."""
    each = ALIKE["even_norm_off"]
    assert list(places(each)) == [("first", "specforge"), ("third", "specforge")]
    plain, uneven = draft("first", "specforge"), draft("first", "specforge")
    even = draft("first", "specforge")
    each.plant(even, random.Random(3))
    uneven.config["norm_output"] = False
    assert even.config == uneven.config
    raw = {"head_input": "raw"}
    assert accept_length(counted(even, **raw)) == accept_length(counted(plain))
    assert accept_length(counted(uneven, **raw)) < accept_length(counted(plain)) - 0.3


# What makes up for a kind of fault, and so shows that it is the one that was planted.
MENDS: dict[str, dict[str, Any]] = {
    "d2t/absolute": {"d2t": "absolute"},
    "concat/halves": {"concat": "hidden_first"},
    "input-norms/exchanged": {"input_norms": "swapped"},
    "input-norms/double": {"input_norms": "double"},
    "rotation/pairs": {"rotation": "interleaved"},
    "biases/of_another": {"biases": "dropped"},
    "embedding/random": {"embedding": "target"},
    "embedding/replaced": {"embedding": "own"},
    "head/random": {"head": "target"},
    "fc-input/input_norm": {"fc_input": "raw"},
    "fc-input/fc_norm": {"fc_input": "raw"},
    "qk-norm/not_trained": {"qk_norm": "dropped"},
    "residual/flipped": {"residual": "raw"},
    "rope/theta_small": {"rope": "base_10000"},
    "window/declared": {"window": "none"},
    "order/descending": {"layers": [31, 3, 0]},
    "head/by_frequency": {"head": "target"},
    "head/tied": {"head": "target"},
    "fc-input/folded": {"fc_input": "chunks"},
    "embedding/rows_moved": {"embedding": "target"},
    "embedding/shard_twice": {"embedding": "target"},
    "feedback/post_norm": {"feedback": "raw"},
    "rope/linear": {"rope": "unscaled"},
    "rope/llama3": {"rope": "base_10000"},
    "window/second_layer": {"window": "none"},
    "order/deepest_first": {"layers": [31, 0, 3]},
    "head/by_offsets": {"head": "target"},
    "head/rows_moved": {"head": "target"},
    "head/shard_twice": {"head": "target"},
    "embedding/of_head": {"embedding": "target"},
    "embedding/draft_order": {"embedding": "target"},
    "embedding/resized": {"embedding": "target"},
    "fc-input/folded_in_one": {"fc_input": "chunks"},
    "qk-norm/of_template": {"qk_norm": "dropped"},
    "biases/of_output": {"biases": "dropped"},
    "residual/null": {"residual": "normed"},
    "rope/in_thousands": {"rope": "base_10000"},
    "rope/inverse_factor": {"rope": "unscaled"},
    "rope/attention_factor": {"rope": "unscaled"},
    "window/first_layer": {"window": "none"},
    "window/in_blocks": {"window": "none"},
    "slots/descending": {"layers": [31, 3, 0]},
}


@pytest.mark.parametrize("name", [*MENDS])
def test_what_is_planted_is_made_up_for_by_its_switch(name: str, counted: Score) -> None:
    kind = KINDS[name]
    drafter, layout = next(iter(places(kind)))
    planted = draft(drafter, layout)
    kind.plant(planted, random.Random(3))
    mend = dict(MENDS[name])
    sound_length = accept_length(counted(draft(drafter, layout)))
    mended = accept_length(counted(planted, **mend))
    # The second norm divides by the size of what the first puts out, which varies from row to row.
    near = 0.3 if name == "input-norms/double" else 0.1
    assert mended == pytest.approx(sound_length, abs=near)


def made(group: str, kinds: tuple[str, ...]) -> Case:
    return Case(
        name="a",
        group=group,
        kinds=kinds,
        drafter="first",
        layout="specforge",
        dump="pt_shards",
        texts=4,
        argmax=True,
        logged=False,
        seed=1,
        held_out=False,
    )


def told(group: str, kinds: tuple[str, ...], verdict: str, *causes: str) -> score.Answer:
    case = made(group, kinds)
    return score.Answer(case=case, verdict=verdict, causes=causes, said="", seconds=1.0, worked=1.0)


@pytest.mark.parametrize(
    ("answer", "right", "found"),
    [
        (told("single", ("d2t/absolute",), "cause", "d2t", "rope"), True, True),
        (told("single", ("d2t/absolute",), "cause", "rope", "d2t"), False, True),
        (told("single", ("d2t/absolute",), "unknown", "d2t"), False, True),
        (told("single", ("token/rolled",), "cause", "slots"), True, True),
        (told("pair", ("d2t/absolute", "rope/theta"), "cause", "rope", "d2t"), True, True),
        (told("pair", ("d2t/absolute", "rope/theta"), "cause", "rope"), False, False),
        (told("pair", ("d2t/absolute", "rope/theta"), "cause", "d2t", "head", "rope"), False, True),
        (told("sound", (), "sound"), True, True),
        (told("sound", (), "unknown"), False, False),
        (told("outside", ("outside/sign",), "unknown"), True, True),
        (told("outside", ("outside/sign",), "unknown", "head"), False, False),
        (told("outside", ("outside/sign",), "cause", "head"), False, False),
    ],
)
def test_answers_are_judged(answer: score.Answer, right: bool, found: bool) -> None:
    assert (answer.right, answer.found) == (right, found)


def test_bounds_are_exact() -> None:
    assert score.upper(0, 150) == pytest.approx(1 - 0.025 ** (1 / 150), abs=1e-9)
    assert score.upper(1, 150) == pytest.approx(0.0366, abs=1e-4)
    assert score.lower(95, 100) == pytest.approx(0.8872, abs=1e-4)
    assert score.upper(100, 100) == 1
    assert not score.too_low(11, 12, "single")
    assert score.too_low(7, 12, "single")
    assert not score.too_low(11, 12, "sound")
    assert score.too_low(10, 12, "sound")


def test_the_set_has_all_that_it_must() -> None:
    everything = bench_cases.all_cases(0, held_out=False)
    groups = {group: [c for c in everything if c.group == group] for group in bench_cases.GROUPS}
    assert len(groups["pair"]) == 30
    assert len(groups["sound"]) == 150
    assert len(groups["outside"]) * 5 >= len(everything)
    assert len({case.name for case in everything}) == len(everything)
    assert {c.layout for c in groups["sound"]} == set(LAYOUTS)
    assert len({c.dump for c in groups["sound"]}) == 3
    assert {c.argmax for c in groups["sound"]} == {True, False}
    assert len({c.texts for c in groups["sound"]}) >= 4
    assert everything == bench_cases.all_cases(0, held_out=False)
    drawn = bench_cases.sample(everything, 40, 7)
    assert drawn == bench_cases.sample(everything, 40, 7) != bench_cases.sample(everything, 40, 8)
    assert 38 <= len(drawn) <= 40
    assert {case.group for case in drawn} == set(bench_cases.GROUPS)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_kind_that_a_set_can_have_occurs_in_it(held_out: bool) -> None:
    maker = Maker(0, held_out=held_out)
    everything = bench_cases.all_cases(0, held_out=held_out)
    for group, kinds in (("single", KINDS), ("outside", OUTSIDE_KINDS), ("sound", ALIKE)):
        counts = {name: 0 for name, kind in kinds.items() if list(maker.places(kind))}
        for case in everything:
            if case.group == group and case.kinds:
                counts[case.kinds[0]] += 1
        assert all(counts.values()), (group, [name for name, n in counts.items() if not n])
        homeless = {
            name
            for name, kind in kinds.items()
            if kind.use == (HELD_OUT if held_out else TUNING) and name not in counts
        }
        # Kinds for tuning that fit the third drafter alone, on which they are reported.
        reported = list(map(Maker(0, held_out=True).places, (kinds[n] for n in homeless)))
        assert not (held_out and homeless)
        assert all(list(found) for found in reported), homeless


@pytest.mark.parametrize("held_out", [False, True])
def test_damage_goes_round_by_kind(held_out: bool) -> None:
    maker = Maker(0, held_out=held_out)
    few = list(maker.damaged(20))
    assert len(few) == 5 == len({case.kinds for case in few})
    many = list(maker.damaged(600))
    assert many[: len(few)] == few
    assert len({case.name for case in many}) == len(many) == 150
    could = {kind: list(maker.places(kind)) for kind in OUTSIDE_KINDS.values()}
    fresh = [case.kinds[0] for case in many if case.name.endswith("-0")]
    assert len(fresh) == sum(map(len, could.values()))  # every place, before any comes again
    most = {kind.name: len(found) for kind, found in could.items() if found}
    for count in range(1, len(fresh) + 1):
        seen = {name: fresh[:count].count(name) for name in most}
        assert all(n >= min(max(seen.values()) - 1, most[name]) for name, n in seen.items())
    other = [case.drafter + case.layout for case in Maker(1, held_out=held_out).damaged(600)]
    assert other != [case.drafter + case.layout for case in many]


def test_no_case_of_one_set_is_in_the_other() -> None:
    """Sound controls neither: those that are plain differ in their drafter."""
    sets = [
        {
            (case.group, case.kinds, case.drafter, case.layout)
            for case in bench_cases.all_cases(0, held_out=held_out)
        }
        for held_out in (False, True)
    ]
    assert all(sets)
    assert not sets[0] & sets[1]


def test_what_is_tuned_on_is_not_what_is_reported() -> None:
    known = {**KINDS, **OUTSIDE_KINDS}
    for case in bench_cases.all_cases(0, held_out=False):
        early = case.kinds[:1] != () and case.kinds[0].startswith("under-trained")  # of one drafter
        assert case.drafter in (("early",) if early else ("first", "second"))
        assert all((ALIKE | known)[name].use == TUNING for name in case.kinds)
    for kind in known.values():
        for drafter, _ in Maker(0, held_out=True).places(kind):
            assert kind.use == HELD_OUT or drafter == "third"


def test_cases_are_asked_as_the_command_asks(tmp_path: Path) -> None:
    """What a person's command sends to a host holds the same settings, and the same values of them."""
    engine = ("engine=sglang", "engine.version=0.5.12", "engine.engine_class=kimi_k25")
    asked = request("job=diagnose", *engine)
    served = draft("first", "specforge")
    served.engine = SGLANG
    ours = Bench(tmp_path).request(served, {})
    assert asked.keys() - ours.keys() <= {"timeout_s", "gpus", "checkouts"}  # the machine's
    assert ours.keys() <= asked.keys()
    assert ours["axes"] == asked["axes"]
    assert ours["engine"].keys() == asked["engine"].keys()
    for name in ("steps", "max_samples", "seed", "finalists", "start", "device"):
        assert ours[name] == asked[name], name

"""A wiring's switches: written, read, and the same exactly where they compute the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3.connect import connect
from eagle3.diagnosis.words import VALUES
from eagle3.errors import BadInput
from eagle3.form import Rope
from eagle3.layers import LayerConvention
from eagle3.model import DrafterShape
from eagle3.wiring import (
    D2T,
    SWITCHES,
    USUAL,
    DecoderLayer,
    Embedding,
    RopeChoice,
    Wiring,
    chosen_rope,
    needs_target,
)
from orchestrator.schema import WiringConfig
from orchestrator.show import RARE, wiring_in_short, wiring_in_words
from tests.eagle3.small import SHAPE, random_drafter
from tests.eagle3.wired import checkpoint_of, form_of, target_of

BASE = Wiring.of_states((0, 3, 5))
OLD = {
    "layers": [0, 3, 5],
    "convention": "input",
    "d2t": "offset",
    "decoder_layer": "included",
    "embedding": "target",
}


def singles(base: Wiring) -> Iterator[Wiring]:
    """Every wiring that differs from `base` in one switch."""
    for name, kind in SWITCHES.items():
        for value in kind:
            if value is not getattr(base, name):
                yield replace(base, **{name: value})


def test_every_switch_is_written_and_read_back() -> None:
    assert set(SWITCHES) == {f.name for f in fields(Wiring)} - {"layers", "convention"}
    for wiring in (BASE, *singles(BASE)):
        assert Wiring.parse(wiring.plain()) == wiring
        assert all(type(value) in (str, list) for value in wiring.plain().values())


def test_requests_of_old_mean_the_defaults() -> None:
    assert Wiring.parse(OLD) == BASE
    with pytest.raises(BadInput, match="no switch named concatenation"):
        Wiring.parse({**OLD, "concatenation": "hidden_first"})
    with pytest.raises(BadInput, match="'sideways' is not a valid Rotation"):
        Wiring.parse({**OLD, "rotation": "sideways"})
    with pytest.raises(BadInput, match=r"wiring\.d2t is missing"):
        Wiring.parse({key: value for key, value in OLD.items() if key != "d2t"})


def test_the_config_has_the_same_switches_with_the_same_defaults() -> None:
    config = {f.name: f.default for f in fields(WiringConfig)}
    ours = {f.name: f.default for f in fields(Wiring) if f.default is not MISSING}
    assert list(config) == [f.name for f in fields(Wiring)]
    assert {name: config[name] for name in ours} == ours
    types = {f.name: f.type for f in fields(WiringConfig) if f.name in SWITCHES}
    assert types == {name: kind.__name__ for name, kind in SWITCHES.items()}


def test_a_person_reads_of_every_switch_that_is_not_as_usual() -> None:
    named = {"d2t", "decoder_layer", "embedding"}  # always named
    assert {name: value.value for name, value in USUAL.items() if name not in named} == RARE
    assert wiring_in_short(BASE.plain()) == "[0, 3, 5] = states 0, 3, 5"
    for wiring in singles(BASE):
        (name,) = wiring.differing(BASE)
        says = f"{name} {getattr(wiring, name).value}".replace("_", " ")
        for words in (wiring_in_short(wiring.plain()), wiring_in_words(wiring.plain())):
            assert says in words.replace("_", " ")


def test_trainers_have_every_switch_but_the_embedding_as_it_was() -> None:
    assert BASE.untrained() == replace(BASE, embedding=Embedding.own).untrained() == []
    for wiring in singles(BASE):
        (name,) = wiring.differing(BASE)
        said = [f"wiring.{name}={getattr(wiring, name).value}"]
        assert wiring.untrained() == ([] if name == "embedding" else said)


def test_differences_are_named_by_states_and_switches() -> None:
    other = replace(BASE, layers=(3, 0, 5), d2t=D2T.absolute)
    assert other.differing(BASE) == BASE.differing(other) == ("states", "d2t")
    assert Wiring(layers=(-1, 2, 4), convention=LayerConvention.output).differing(BASE) == ()


YARN = {"factor": 8.0, "original_max_position_embeddings": 16}
SCALED = {"rope_type": "linear", "factor": 3.0}


def rope(kind: str, theta: float = 500.0, **scaling: Any) -> Rope:
    return Rope(theta=theta, kind=kind, scaling=tuple(sorted(scaling.items())))


def test_what_each_choice_of_a_rope_means() -> None:
    own = rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=8.0)
    theirs = Rope(theta=700.0)
    assert chosen_rope(RopeChoice.declared, own) is own
    assert chosen_rope(RopeChoice.unscaled, own) == Rope(theta=500.0)
    assert chosen_rope(RopeChoice.base_10000, own) == Rope(theta=10_000.0)
    assert chosen_rope(RopeChoice.target, own, theirs) is theirs
    assert chosen_rope(RopeChoice.no_mscale, own) == rope("yarn", **YARN, beta_fast=8.0)
    linear = rope("linear", factor=2.0)
    assert chosen_rope(RopeChoice.no_mscale, linear) is linear
    for choice in (RopeChoice.target, RopeChoice.target_base, RopeChoice.target_scaling):
        with pytest.raises(
            BadInput, match=rf"wiring\.rope={choice.value}: the target's rope was not"
        ):
            chosen_rope(choice, own)


def test_a_base_goes_with_anybodys_scaling() -> None:
    own, theirs = rope("yarn", 500.0, **YARN), rope("linear", 700.0, factor=3.0)
    thetas = {"own": 500.0, "plain": 10_000.0, "target": 700.0}
    scalings = {"own": own, "plain": Rope(theta=10_000.0), "target": theirs}
    wanted = {
        (base, scaling): replace(scalings[scaling], theta=thetas[base])
        for base in thetas
        for scaling in scalings
    }
    meant = {
        RopeChoice.base_10000_scaled: ("plain", "own"),
        RopeChoice.base_10000_target_scaling: ("plain", "target"),
        RopeChoice.target_base: ("target", "own"),
        RopeChoice.target_unscaled: ("target", "plain"),
        RopeChoice.target_scaling: ("own", "target"),
    }
    for choice, parts in meant.items():
        assert chosen_rope(choice, own, theirs) == wanted[parts]
    every = {chosen_rope(c, own, theirs) for c in RopeChoice if c is not RopeChoice.no_mscale}
    assert every == set(wanted.values())


@pytest.mark.parametrize("choice", [c for c in RopeChoice if needs_target(c)])
def test_a_wiring_is_run_with_the_targets_base_or_scaling(
    choice: RopeChoice, tmp_path: Path
) -> None:
    theirs, own = rope("linear", 700.0, factor=3.0), rope("yarn", 500.0, **YARN)
    checkpoint = checkpoint_of(random_drafter(0, replace(FIRST, rope=own)))
    target = target_of(tmp_path / "target", FIRST.hidden, rope_theta=700.0, rope_scaling=SCALED)
    tied = connect(checkpoint, target, replace(BASE, rope=choice))
    assert tied.drafter.shape.rope == chosen_rope(choice, own, theirs)
    mixed = target_of(tmp_path / "mixed", FIRST.hidden, rope_theta=1e6, rope_local_base_freq=1e4)
    with pytest.raises(BadInput, match=rf"wiring\.rope={choice.value}, but .*rope_local_base_freq"):
        connect(checkpoint, mixed, replace(BASE, rope=choice))


def test_scaling_on_a_base_that_it_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(random_drafter(0, replace(FIRST, rope=rope("yarn", 500.0, **YARN))))
    target = target_of(tmp_path / "target", FIRST.hidden, rope_theta=1.0)
    with pytest.raises(
        BadInput, match=r"wiring\.rope=target_base puts yarn scaling on base 1, but"
    ):
        connect(checkpoint, target, replace(BASE, rope=RopeChoice.target_base))


def test_every_rope_is_said_in_words_of_its_own() -> None:
    assert list(VALUES["rope"]) == [choice.value for choice in RopeChoice]
    assert len(set(VALUES["rope"].values())) == len(RopeChoice)


# Drafters as wide as their target, so that either's tables can be read.
FIRST = replace(SHAPE, target_hidden=SHAPE.hidden)
SECOND = replace(FIRST, norm_before_residual=True, norm_before_fc=True, feedback_normed=True)
SHAPES = {
    "first": FIRST,
    "second": SECOND,
    "two-layers": replace(
        FIRST,
        num_layers=2,
        windows=(3, None),
        fc_norm=True,
        attention_bias=True,
        qk_norm=True,
        rope=rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "no-head-norm": replace(FIRST, head_norm=False, rope=Rope(theta=10_000.0)),
    "yarn-10000": replace(FIRST, rope=rope("yarn", 10_000.0, **YARN, mscale=0.7)),
    "yarn-given": replace(FIRST, rope=rope("yarn", **YARN, attention_factor=1.25)),
    "linear": replace(FIRST, rope=rope("linear", factor=2.0)),
    "one-chunk": replace(FIRST, num_aux=1),
    "one-chunk-normed": replace(FIRST, num_aux=1, fc_norm=True),
}


class Bench:
    """What a wiring computes on one text: all its logits, and the tokens that it drafts."""

    def __init__(self, folder: Path, shape: DrafterShape) -> None:
        scaled = {"rope_theta": 700.0, "rope_scaling": SCALED}
        self.target = target_of(folder / "target", shape.hidden, **scaled)
        generator = torch.Generator().manual_seed(9)
        table = torch.randn(shape.vocab, shape.hidden, generator=generator)
        self.checkpoint = checkpoint_of(random_drafter(1, shape), table)
        self.ids = torch.randint(shape.vocab, (14,), generator=generator)
        width = shape.num_aux * shape.target_hidden
        self.aux = torch.randn(14, width, generator=generator) * 3 + 0.5

    def outcome(self, wiring: Wiring) -> tuple[Tensor, Tensor]:
        tied = connect(self.checkpoint, self.target, wiring)
        seen: list[Tensor] = []
        logits = tied.drafter.rewired()  # a module of its own to listen to
        heard = logits.logits

        def listen(y: Tensor, head: Tensor | None = None) -> Tensor:
            seen.append(heard(y, head))
            return seen[-1]

        logits.logits = listen  # type: ignore[method-assign]
        rows = torch.arange(3, 12)
        drafted = replace(tied, drafter=logits).chains(self.ids, self.aux, rows, steps=3)
        if wiring.decoder_layer is DecoderLayer.skipped:
            seen = seen * 3
        return torch.stack(seen), drafted


@pytest.mark.parametrize("name", SHAPES)
def test_two_wirings_are_the_same_resolved_exactly_where_they_compute_the_same(
    name: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    bench, form = Bench(tmp_path, shape), form_of(shape)
    base = replace(BASE, layers=BASE.layers[: shape.num_aux])
    skipped = replace(base, decoder_layer=DecoderLayer.skipped)
    wirings = [base, *singles(base), *singles(skipped)]
    pick = random.Random(name)
    for _ in range(20):
        changes = {n: pick.choice(list(SWITCHES[n])) for n in pick.sample(list(SWITCHES), 2)}
        wirings.append(replace(base, **changes))
    outcomes = [bench.outcome(wiring) for wiring in wirings]
    for wiring in wirings:
        own = wiring.resolved(form)
        assert own.resolved(form) == own
        declared = [n for n in SWITCHES if getattr(own, n).value == "declared"]
        assert set(declared) <= {"window", "rope", "deeper_norm", "biases", "qk_norm"}
    same = 0
    for (a, x), (b, y) in combinations(zip(wirings, outcomes, strict=True), 2):
        alike = torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])
        assert alike == (a.resolved(form) == b.resolved(form)), (a, b)
        if not alike and torch.equal(x[1], y[1]):
            # One norm of ones over all chunks is taken back by the next norm, but for its eps.
            names = a.resolved(form).differing(b.resolved(form))
            assert names == ("fc_input",) or (x[0] - y[0]).abs().max() > 1e-4, (a, b)
        same += alike
    assert same > len(SWITCHES)  # of what the drafter is without anyway


def test_what_stands_beside_the_switches_is_resolved_too() -> None:
    form = form_of(SHAPE)
    ids = Wiring(layers=(-1, 2, 4), convention=LayerConvention.output)
    assert ids.resolved(form) == BASE.resolved(form)
    assert ids.resolved(form).layers == (0, 3, 5)
    values: list[Enum] = [getattr(BASE.resolved(form), n) for n in ("residual", "fc_input")]
    assert [value.value for value in values] == ["raw", "raw"]

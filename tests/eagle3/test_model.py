"""Properties of the drafter that its cache's users build on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3 import model
from eagle3.errors import BadInput
from eagle3.model import Cache, Drafter, DrafterShape, KeysValues
from eagle3.rope import cos_sin
from eagle3.trainer_metrics.rollout import forced_rollout
from eagle3.wiring import InputNorms
from tests.eagle3.small import SHAPE, random_drafter

LENGTH = 9
SHAPES = {
    "reference": SHAPE,
    "two-layers": replace(SHAPE, num_layers=2, qk_norm=True, attention_bias=True),
    "window": replace(SHAPE, num_layers=2, windows=(3, None)),
    "feedback": replace(SHAPE, feedback_normed=True, norm_before_residual=True),
    "standing": replace(SHAPE, standing=True, interleaved=True),
    "double": replace(SHAPE, input_norms=InputNorms.double, hidden_first=True),
}


def inputs(steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What each step embeds [steps, 1, T, H_d], and the aux states [T, A·H]."""
    generator = torch.Generator().manual_seed(seed)
    embedded = torch.randn(steps, 1, LENGTH, SHAPE.hidden, generator=generator)
    return embedded, torch.randn(LENGTH, 3 * SHAPE.target_hidden, generator=generator)


def run(drafter: Drafter, embedded: Tensor, aux: Tensor, cache: Cache) -> list[Tensor]:
    """y of every step, all rows fed."""
    g = drafter.fuse(aux)[None]
    out = []
    for step in embedded:
        out.append(drafter.step(step, g, torch.arange(LENGTH), cache))
        g = drafter.feedback(out[-1])
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_deeper_steps_of_gathered_rows_are_those_of_all_rows(shape: DrafterShape) -> None:
    drafter = random_drafter(1, shape)
    embedded, aux = inputs(4)
    all_rows = run(drafter, embedded, aux, [])
    rows = torch.tensor([1, 4, 4, 7])  # a row may stand twice, as a tree's beams do
    cache: Cache = []
    first = run(drafter, embedded[:1], aux, cache)[0]
    y = first[:, rows]
    for step in range(1, 4):
        y = drafter.step(embedded[step][:, rows], drafter.feedback(y), rows, cache)
        torch.testing.assert_close(y, all_rows[step][:, rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_entries_of_deeper_steps_may_be_gathered_with_their_rows(shape: DrafterShape) -> None:
    drafter = random_drafter(2, shape)
    embedded, aux = inputs(3)
    want = run(drafter, embedded, aux, [])[2]
    cache: Cache = []
    fed = drafter.feedback(run(drafter, embedded[:2], aux, cache)[1])
    assert [len(step) for step in cache] == [shape.num_layers] * 2
    kept = torch.tensor([6, 2])
    beams = [cache[0], [(k[:, :, kept], v[:, :, kept]) for k, v in cache[1]]]
    y = drafter.step(embedded[2][:, kept], fed[:, kept], kept, beams)
    torch.testing.assert_close(y, want[:, kept], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_rows_asked_for_are_those_of_all_rows(
    shape: DrafterShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(4, shape)
    generator = torch.Generator().manual_seed(5)
    embedded, g = torch.randn(2, 3, LENGTH, shape.hidden, generator=generator)
    every: Cache = []
    some: Cache = []
    y = drafter.step(embedded, g, torch.arange(LENGTH), every)
    asked = torch.tensor([[0, 8], [3, 4], [7, 0]])  # each text its own, in any order
    got = drafter.step(embedded, g, torch.arange(LENGTH), some, asked=asked)
    want = torch.stack([y[b, rows] for b, rows in enumerate(asked)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(model, "MASK_AT_ONCE", 1)  # too long a text
    whole = drafter.step(embedded, g, torch.arange(LENGTH), [], asked=asked)
    torch.testing.assert_close(whole, want)
    for (k, v), (other_k, other_v) in zip(every[0], some[0], strict=True):
        torch.testing.assert_close(k, other_k)  # deeper steps see the keys of all rows
        torch.testing.assert_close(v, other_v)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_sees_nothing_behind_itself(shape: DrafterShape) -> None:
    drafter = random_drafter(3, shape)
    embedded, aux = inputs(3)
    before = run(drafter, embedded, aux, [])
    embedded[:, :, 5:], aux[5:] = 7.0, -7.0
    after = run(drafter, embedded, aux, [])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, :5], b[:, :5])
        assert not torch.equal(a[:, 5:], b[:, 5:])


def test_a_window_ends_what_a_row_sees() -> None:
    drafter = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(2)
    before = run(drafter, embedded, aux, [])
    embedded[0, :, :4], aux[:4] = 7.0, -7.0
    after = run(drafter, embedded, aux, [])
    assert torch.equal(before[0][:, 6:], after[0][:, 6:])  # rows 6.. see 4.. at most
    assert torch.equal(before[1][:, 6:], after[1][:, 6:])
    assert not torch.equal(before[0][:, 5], after[0][:, 5])


@pytest.mark.parametrize("from_row", [False, True])
def test_a_window_moves_with_the_position_or_stays_at_the_row(from_row: bool) -> None:
    """Row 6 with a window of 3 sees keys 4, 5, 6; a step on it sees 5, 6 and its own, or all four."""
    drafter = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(2)
    row, y = torch.tensor([6]), torch.ones(1, 1, SHAPE.hidden)

    def deeper(keys_values: KeysValues) -> Tensor:
        fed, cache = embedded[1][:, row], [[keys_values]]
        return drafter.step(fed, y, row, cache, window_from_row=from_row)

    cache: Cache = []
    run(drafter, embedded[:1], aux, cache)
    before = deeper(cache[0][0])
    for column in range(LENGTH):
        keys, values = (x.clone() for x in cache[0][0])
        keys[:, :, column], values[:, :, column] = 5.0, -5.0
        sees = not torch.equal(deeper((keys, values)), before)
        assert sees == ((4 if from_row else 5) <= column <= 6), column


def test_a_rollout_keeps_the_trainers_window() -> None:
    """The parity with the trainers' logits is of such steps; a chain's are an engine's."""
    shape = replace(SHAPE, windows=(2,))
    for_trainers = []
    for seed in range(4):
        drafter = random_drafter(seed, shape)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(SHAPE.vocab, (LENGTH + 1,), generator=generator)
        table = torch.randn(SHAPE.vocab, SHAPE.hidden, generator=generator)
        aux = torch.randn(LENGTH + 1, 3 * SHAPE.target_hidden, generator=generator)
        rows = torch.arange(LENGTH)
        teacher = torch.zeros(LENGTH + 1, SHAPE.vocab)
        rolled = forced_rollout(
            drafter, table, ids, aux, rows, steps=2, teacher=teacher.__getitem__
        )
        chosen = {}
        for from_row in (True, False):
            cache: Cache = []
            y = drafter.step(table[ids[1:]][None], drafter.fuse(aux[:LENGTH])[None], rows, cache)
            fed = table[ids[2:]][None]
            y = drafter.step(fed, y[:, :-1], rows[:-1], cache, window_from_row=from_row)
            chosen[from_row] = drafter.logits(y[0]).argmax(-1)
        assert torch.equal(rolled.drafted[:-1, 1], chosen[True])
        for_trainers.append(not torch.equal(chosen[True], chosen[False]))
    assert any(for_trainers)


def test_a_window_that_is_taken_away_is_none() -> None:
    whole = random_drafter(4)
    other = random_drafter(4, replace(SHAPE, windows=(3,)))
    embedded, aux = inputs(3)
    wanted = run(whole, embedded, aux, [])
    assert not torch.equal(run(other, embedded, aux, [])[0], wanted[0])
    for a, b in zip(run(other.rewired(windows=()), embedded, aux, []), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "switches", [{"norm_before_fc": True}, {"fc_norm": True}, {"fc_bias": True}]
)
def test_what_stands_before_fc(switches: dict[str, Any]) -> None:
    shape = replace(SHAPE, **switches)
    drafter = random_drafter(5, shape)
    _, aux = inputs(1)
    w = drafter.state_dict()

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * w[f"{name}.weight"]

    bias: Tensor | float = 0.0
    if shape.norm_before_fc:
        aux_in = rms(aux, "input_norm")
    elif shape.fc_norm:
        chunks = aux.chunk(3, -1)
        aux_in = torch.cat([rms(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], -1)
    else:
        aux_in, bias = aux, w["fc.bias"]
    torch.testing.assert_close(drafter.fuse(aux), aux_in @ w["fc.weight"].T + bias)


def test_rewiring_shares_the_weights_and_leaves_the_drafter_as_it_is() -> None:
    drafter = random_drafter(6)
    other = drafter.rewired(norm_before_residual=True)
    assert other.shape == replace(SHAPE, norm_before_residual=True)
    assert drafter.shape == SHAPE
    assert other.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    embedded, aux = inputs(1)
    y, z = (run(d, embedded, aux, [])[0] for d in (drafter, other))
    assert not torch.equal(y, z)
    g = drafter.fuse(aux)[None]
    normed = drafter.midlayer.hidden_norm(g)
    assert not torch.equal(g, normed)


def changed(drafter: Drafter, change: Callable[[str, Tensor], Tensor]) -> Drafter:
    """A copy with every weight replaced by change(name, weight)."""
    other = random_drafter(0, drafter.shape)
    other.load_state_dict({name: change(name, w) for name, w in drafter.state_dict().items()})
    return other


def assert_same(drafter: Drafter, other: Drafter, **tolerance: float) -> None:
    """Two drafters give the same y on every step."""
    embedded, aux = inputs(3)
    for a, b in zip(run(drafter, embedded, aux, []), run(other, embedded, aux, []), strict=True):
        torch.testing.assert_close(a, b, **({"rtol": 0, "atol": 0} | tolerance))


def assert_other(drafter: Drafter, other: Drafter, first_step: int = 0) -> None:
    """Two drafters give the same y before a step and another one from it on."""
    embedded, aux = inputs(3)
    pairs = zip(run(drafter, embedded, aux, []), run(other, embedded, aux, []), strict=True)
    assert [torch.allclose(a, b) for a, b in pairs] == [s < first_step for s in range(3)]


def test_hidden_first_is_the_columns_the_other_way_round() -> None:
    drafter = random_drafter(7)

    def swap(name: str, weight: Tensor) -> Tensor:
        wide = re.fullmatch(r"midlayer\.self_attn\.[qkv]_proj\.weight", name)
        return torch.cat(weight.chunk(2, 1)[::-1], 1) if wide else weight

    other = changed(drafter, swap).rewired(hidden_first=True)
    assert_same(drafter, other, rtol=1e-4, atol=1e-4)
    assert_other(drafter, drafter.rewired(hidden_first=True))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_swapped_norms_are_the_tensors_the_other_way_round(norm_before_residual: bool) -> None:
    drafter = random_drafter(8, replace(SHAPE, norm_before_residual=norm_before_residual))
    w = drafter.state_dict()
    names = {
        "midlayer.hidden_norm.weight": "midlayer.input_layernorm.weight",
        "midlayer.input_layernorm.weight": "midlayer.hidden_norm.weight",
    }
    other = changed(drafter, lambda name, _: w[names.get(name, name)])
    swapped = drafter.rewired(input_norms=InputNorms.swapped)
    assert_same(swapped, other)
    assert_other(drafter, swapped)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_double_norm_by_its_formula(norm_before_residual: bool) -> None:
    """ModelOpt 0.47: the attention sees hidden_norm(input_layernorm(g)), and g is added as it is."""
    shape = replace(SHAPE, norm_before_residual=norm_before_residual)
    drafter = random_drafter(9, shape).rewired(input_norms=InputNorms.double)
    embedded, aux = inputs(1)
    layer, w = drafter.midlayer, drafter.state_dict()
    seen: list[Tensor] = []
    layer.self_attn.q_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer.self_attn.o_proj.register_forward_hook(lambda _, __, out: seen.append(out))
    (y,) = run(drafter, embedded, aux, [])
    z, attended = seen

    def rms(x: Tensor, name: str) -> Tensor:
        over = (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt()
        return x / over * w[f"midlayer.{name}.weight"]

    g = drafter.fuse(aux)[None]
    hidden = rms(rms(g, "input_layernorm"), "hidden_norm")
    torch.testing.assert_close(z, torch.cat([rms(embedded[0], "input_layernorm"), hidden], -1))
    r = (rms(g, "hidden_norm") if norm_before_residual else g) + attended
    torch.testing.assert_close(y, r + layer.mlp(rms(r, "post_attention_layernorm")))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_interleaved_is_half_split_with_the_rows_of_q_and_k_permuted(qk_norm: bool) -> None:
    shape = replace(SHAPE, num_layers=2, qk_norm=qk_norm)
    drafter = random_drafter(10, shape)
    order = torch.cat([torch.arange(0, SHAPE.head_dim, 2), torch.arange(1, SHAPE.head_dim, 2)])

    def permute(name: str, weight: Tensor) -> Tensor:
        if re.search(r"self_attn\.[qk]_norm", name):
            return weight[order]
        if re.search(r"self_attn\.[qk]_proj", name):
            return weight.view(-1, SHAPE.head_dim, weight.shape[1])[:, order].flatten(0, 1)
        return weight

    interleaved = drafter.rewired(interleaved=True)
    assert_same(interleaved, changed(drafter, permute), rtol=1e-4, atol=1e-4)
    embedded, aux = inputs(1)
    (a,), (b,) = (run(d, embedded, aux, []) for d in (drafter, interleaved))
    torch.testing.assert_close(a[:, 0], b[:, 0])  # a row that sees only itself does not turn
    assert not torch.allclose(a[:, 1:], b[:, 1:])


def test_a_standing_chain_spares_the_first_step() -> None:
    """Its second step is one that stands where the first did, on the same keys."""
    drafter = random_drafter(11)
    standing = drafter.rewired(standing=True)
    assert_other(drafter, standing, first_step=1)
    embedded, aux = inputs(2)
    cache: Cache = []
    (y,) = run(drafter, embedded[:1], aux, cache)
    rows = torch.arange(LENGTH)
    got = standing.step(embedded[1], y, rows, list(cache))
    layer, (keys, values) = drafter.midlayer, cache[0][0]
    residual, z = layer.first_inputs(embedded[1], y)
    turn = cos_sin(SHAPE.rope, rows, SHAPE.head_dim, z.dtype)
    q, k, v = layer.self_attn.project(z, *turn)
    for t in range(LENGTH):
        sees_k, sees_v = (
            torch.cat([native[:, :, : t + 1], own[:, :, t : t + 1]], 2)
            for native, own in ((keys, k), (values, v))
        )
        a = F.scaled_dot_product_attention(q[:, :, t : t + 1], sees_k, sees_v, enable_gqa=True)
        r = residual[:, t] + layer.self_attn.o_proj(a.transpose(1, 2).flatten(2))[:, 0]
        want = r + layer.mlp(layer.post_attention_layernorm(r))
        torch.testing.assert_close(got[:, t], want, rtol=1e-4, atol=1e-4)


FULL = replace(SHAPE, num_layers=2, qk_norm=True, attention_bias=True, norm_before_fc=True)


@pytest.mark.parametrize(
    ("switch", "pattern", "stand_in"),
    [
        ("deeper_norm", r"layers\.1\.input_layernorm\.weight", 1.0),
        ("attention_bias", r".*\.self_attn\.[qkvo]_proj\.bias", 0.0),
        ("first_qkv_bias", r"midlayer\.self_attn\.[qkv]_proj\.bias", 0.0),
    ],
)
def test_what_is_dropped_weighs_nothing(switch: str, pattern: str, stand_in: float) -> None:
    drafter = random_drafter(12, FULL)
    dropped = drafter.rewired(**{switch: False})
    without = [name for name in drafter.state_dict() if name not in dropped.state_dict()]
    assert without == [name for name in drafter.state_dict() if re.fullmatch(pattern, name)] != []
    plain = changed(drafter, lambda name, w: torch.full_like(w, stand_in) if name in without else w)
    assert_same(dropped, plain)
    assert_other(drafter, dropped)


def test_dropped_norms_of_q_and_k_do_not_norm() -> None:
    drafter = random_drafter(13, FULL)
    bare = random_drafter(0, replace(FULL, qk_norm=False))
    bare.load_state_dict({name: drafter.state_dict()[name] for name in bare.state_dict()})
    assert_same(drafter.rewired(qk_norm=False), bare)
    assert_other(drafter, bare)


@pytest.mark.parametrize("asked", ["norm_before_fc", "fc_norm", "qk_norm"])
def test_norms_that_the_drafter_lacks_are_of_ones(asked: str) -> None:
    drafter = random_drafter(14, replace(SHAPE, num_layers=2))
    other = drafter.rewired(**{asked: True})
    new = {name: w for name, w in other.state_dict().items() if name not in drafter.state_dict()}
    assert new
    assert all("norm" in name and bool((w == 1).all()) for name, w in new.items())
    assert_other(drafter, other)
    assert_same(drafter, other.rewired(**{asked: False}))


def test_every_rewiring_shares_the_weights() -> None:
    drafter = random_drafter(15, FULL)
    places = {w.data_ptr() for w in drafter.state_dict().values()}
    other = drafter.rewired(
        hidden_first=True,
        attention_bias=False,
        deeper_norm=False,
        norm_before_fc=False,
        fc_norm=True,
    )
    new = {n: w for n, w in other.state_dict().items() if w.data_ptr() not in places}
    assert set(new) == {f"fc_norm.{i}.weight" for i in range(3)}
    assert not any(p.requires_grad for p in other.parameters())
    assert not other.training


def test_nothing_stands_in_for_other_weights(drafter: Drafter) -> None:
    with pytest.raises(BadInput, match=r"the drafter has no fc\.bias"):
        drafter.rewired(fc_bias=True)

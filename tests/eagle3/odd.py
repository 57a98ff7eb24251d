"""Tensors of every kind that torch can save, and whatever else may stand in a sample's place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

# Kinds whose numbers do not lie there row by row, each by the word that it is named with.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: silently(lambda: (t if t.dim() > 1 else t[None]).to_sparse_csr()),
    "quantised": lambda t: silently(
        lambda: torch.quantize_per_tensor(t.float(), 0.5, 0, torch.qint8)
    ),
    "nested": lambda t: silently(lambda: torch.nested.nested_tensor([t, t])),
    "jagged": lambda t: silently(lambda: torch.nested.nested_tensor([t, t], layout=torch.jagged)),
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: torch.complex(t.float(), t.float()),
}
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (1,), (5,), (6,), (1, 6), (6, 0), (6, 1), (6, 4)),
    *((1, 6, 12), (9, 4, 4), (9, 1, 1), (9, 4, 1)),
]


def silently(make: Callable[[], Tensor]) -> Tensor:
    """A tensor of a kind that torch warns of when one is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@st.composite
def tensors(draw: st.DrawFn, plain: bool = False) -> Tensor:
    """A tensor of any type and, unless it is to be plain, kind; often shaped as a sample's may be."""
    shape = draw(st.sampled_from(SHAPES) | st.lists(st.integers(0, 6), max_size=4))
    fill = draw(st.sampled_from([0, 1, 2, -1, 49, 50, 1e5, 1e300, float("nan"), float("inf")]))
    dtype = draw(st.sampled_from(DTYPES))
    if not (dtype.is_floating_point or dtype.is_complex):
        fill = int(fill) if abs(fill) < 100 else 100
    tensor = torch.full(tuple(shape), fill, dtype=torch.float64).to(dtype)
    if plain:
        return tensor
    kind = draw(st.sampled_from([None, None, None, *KINDS]))
    if kind and tensor.dim() and tensor.numel():
        return KINDS[kind](tensor if dtype is torch.int64 else tensor.real.float())
    if tensor.dtype in (torch.float32, torch.bfloat16):
        return tensor.requires_grad_(draw(st.booleans()))
    return tensor


def odd_values() -> st.SearchStrategy[Any]:
    """Whatever torch saves without code: tensors above all."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    return tensors() | st.recursive(
        plain | tensors(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    )

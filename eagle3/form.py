"""One internal form for drafter checkpoints of every layout: each switch, and where its value is from.

No torch here: the checks that run before anything is loaded read it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

T = TypeVar("T", covariant=True)
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and who says so: a config key, a tensor of the file, or `default of` an ecosystem."""

    value: T
    origin: str


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary embedding: its base, and its scaling as the config spells it (empty: none)."""

    theta: float
    kind: str = "default"  # default, linear, dynamic, llama3, yarn
    scaling: tuple[tuple[str, Any], ...] = ()  # the block's other keys, sorted

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"theta": self.theta, "kind": self.kind, **dict(self.scaling)}


@dataclass(frozen=True, kw_only=True)
class DrafterForm:
    """A drafter checkpoint's sizes and wiring switches. H_d its width, H the target's."""

    layout: Setting[str]  # specforge, speculators; its origin is what gave it away
    hidden: Setting[int]  # H_d
    heads: Setting[int]
    kv_heads: Setting[int]
    head_dim: Setting[int]
    intermediate: Setting[int]
    num_layers: Setting[int]
    vocab: Setting[int]  # V
    draft_vocab: Setting[int]  # V_d
    target_hidden: Setting[int]  # H
    num_aux: Setting[int]  # A; fc takes A·H
    windows: Setting[tuple[int | None, ...]]  # sliding attention window a layer; None: whole text
    norm_eps: Setting[float]
    rope: Setting[Rope]
    max_positions: Setting[int | None]
    norm_before_residual: Setting[bool]  # the residual is hidden_norm(g), not g
    norm_before_fc: Setting[bool]  # one RMSNorm over the whole concatenation: input_norm [A·H]
    fc_norm: Setting[bool]  # one RMSNorm a chunk: fc_norm.i [H]
    feedback_normed: Setting[bool]  # the next step takes norm(y), not y
    head_norm: Setting[bool]  # norm(y) goes into the head, not y
    attention_bias: Setting[bool]
    mlp_bias: Setting[bool]
    fc_bias: Setting[bool]
    qk_norm: Setting[bool]  # Qwen3's norms on q and k, a head
    embedding: Setting[str | None]  # own: in the file; target: absent from it; None: not examined
    head: Setting[str | None]  # likewise
    layer_ids: Setting[tuple[int, ...] | None]
    layer_convention: Setting[str | None]  # what the trainer's ids mean; None: not known
    target_name: Setting[str | None]  # the target's name or folder, where the config states it

    def settings(self) -> Iterator[tuple[str, Setting[Any]]]:
        """Every switch by name."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    def plain(self) -> dict[str, dict[str, Any]]:
        """As plain data: {name: {value, origin}}."""
        return {
            name: {"value": plain_value(setting.value), "origin": setting.origin}
            for name, setting in self.settings()
        }

    def lines(self) -> list[str]:
        """One printable line a switch: name, value, origin."""
        rows = [(name, str(plain_value(s.value)), s.origin) for name, s in self.settings()]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return [f"{name:<{wide[0]}}  {value:<{wide[1]}}  {origin}" for name, value, origin in rows]


def plain_value(value: Any) -> Any:
    """A setting's value as plain data."""
    if isinstance(value, Rope):
        return value.plain()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value

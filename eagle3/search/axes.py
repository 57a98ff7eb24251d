"""What a search may change: one axis for the states that are fed, and one a switch of the wiring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations, permutations
from math import perm
from typing import Any

from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.layers import LayerConvention
from eagle3.wiring import (
    SWITCHES,
    DecoderLayer,
    Embedding,
    Head,
    RopeChoice,
    Wiring,
    chosen_rope,
    heeded,
)

STATES = "states"
MOST_STATES = 250  # ordered choices of states that are all tried
DECLARED = ("window", "deeper_norm", "biases", "qk_norm")  # have no other name for what is declared
LATE = ("feedback", "positions")  # leave the first draft step as it is

WHY = {
    "states": "which of the known states are fed, and in which order",
    "d2t": "how the table d2t is read",
    "decoder_layer": "whether the decoder layers run at all",
    "embedding": "whose token embedding is read",
    "head": "whose output head scores",
    "residual": "what the first attention's output is added to",
    "window": "whether the attention's window is heeded",
    "concat": "what stands first in the first layer's input",
    "input_norms": "which of the first layer's two norms goes where",
    "fc_input": "which norm the states pass before fc",
    "head_input": "whether the final norm stands before the head",
    "feedback": "whether the next step is fed the state before or behind the final norm",
    "rope": "base and scaling of the rotary embedding",
    "rotation": "which numbers of a head turn in pairs",
    "token": "which token stands beside the target's states",
    "positions": "whether deeper steps stand one further each",
    "deeper_norm": "whether layers behind the first read the norm before their attention",
    "biases": "whether the biases of q, k and v are read",
    "qk_norm": "whether the norms on q and k are read",
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values that one part of the wiring may take instead of the start's own."""

    name: str  # "states", or a name of eagle3.wiring.SWITCHES
    values: tuple[Any, ...]  # tuples of canonical states, or the switch's values
    shows_from: int  # the first draft step at which it can show: 0, or 1
    why: str  # what this axis asks
    named: bool = False  # a person says which values


def axes_of(
    form: DrafterForm,
    start: Wiring,
    known: Sequence[int],
    *,
    target_rope: Rope | None,
    own_embedding: bool,
    own_head: bool,
    stored: Sequence[int] = (),
    fixed: Sequence[str] = (),
    only: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Axis, ...]:
    """Every axis that can make a difference to this drafter.

    `known` are the states that the texts hold, `stored` those of them that were not made from the
    target: these are tried in every order, however many the others are. `target_rope` None leaves the
    target's rope out; `own_embedding` and `own_head` say whether the checkpoint has them. `fixed`
    names are left out, `only` says which values to try of an axis, whatever the others are: states
    that are not known are refused by the search, which has the texts. Raises BadInput for a name or a
    value that there is not.
    """
    only = dict(only or {})
    for name in (*fixed, *only):
        if name not in WHY:
            raise BadInput(f"there is no axis '{name}'; there are {', '.join(WHY)}")
    if both := sorted(set(fixed) & set(only)):
        raise BadInput(f"axis '{both[0]}' is fixed and its values are named; say one of the two")
    found = []
    offered: tuple[Any, ...]
    # Without the layer nothing in it matters, but the search may put it back.
    base = replace(start, decoder_layer=DecoderLayer.included).resolved(form)
    for name in WHY:
        if name in fixed:
            continue
        why = WHY[name]
        if name == STATES:
            offered, said = state_choices(base.states(), known, stored)
            why += said
        else:
            offered = tuple(
                switch_choices(
                    name,
                    form,
                    target_rope=target_rope,
                    own_embedding=own_embedding,
                    own_head=own_head,
                )
            )
        if name in only:
            offered, why = asked_values(name, only[name], form.num_aux.value), WHY[name]
        values = different(name, offered, start if name == "decoder_layer" else base, form)
        if values:
            found.append(
                Axis(
                    name=name,
                    values=values,
                    shows_from=int(name in LATE),
                    why=why,
                    named=name in only,
                )
            )
    return tuple(found)


def changed(wiring: Wiring, name: str, value: Any, form: DrafterForm) -> Wiring:
    """The wiring with one part set to a value of its axis, resolved."""
    if name == STATES:
        other = replace(wiring, layers=tuple(value), convention=LayerConvention.input)
    else:
        other = replace(wiring, **{name: value})
    return other.resolved(form)


def value_of(wiring: Wiring, name: str) -> Any:
    """What a wiring has on an axis."""
    return wiring.states() if name == STATES else getattr(wiring, name)


def in_words(name: str, value: Any) -> str:
    """A value of an axis, as results name it: states=0,3,31 or d2t=absolute."""
    said = ",".join(map(str, value)) if name == STATES else str(value.value)
    return f"{name}={said}"


def changes(start: Wiring, wiring: Wiring) -> tuple[str, ...]:
    """What a wiring has otherwise than the start, both resolved: states=0,3,31, d2t=absolute."""
    return tuple(in_words(name, value_of(wiring, name)) for name in start.differing(wiring))


def different(name: str, values: Iterable[Any], base: Wiring, form: DrafterForm) -> tuple[Any, ...]:
    """Those values that make another wiring than the base's own and than each other."""
    seen = {base.resolved(form)}
    kept = []
    for value in values:
        other = changed(base, name, value, form)
        if other not in seen:
            seen.add(other)
            kept.append(value)
    return tuple(kept)


def state_choices(
    start: Sequence[int], known: Sequence[int], stored: Sequence[int] = ()
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Ordered choices of as many states as the start has, and what is left out, in words."""
    count, states = len(start), sorted(set(known))
    if perm(len(states), count) <= MOST_STATES:
        return tuple(permutations(states, count)), ""
    first: dict[tuple[int, ...], None] = {}
    if perm(len(set(stored)), count) <= MOST_STATES:
        first = dict.fromkeys(permutations(sorted(set(stored)), count))
    chosen = first | dict.fromkeys(combinations(states, count))
    chosen |= dict.fromkeys(permutations(start))
    for place in range(count):
        for k in states:
            if k not in start:
                one_other = (*start[:place], k, *start[place + 1 :])
                chosen[one_other] = None
    kept = tuple(list(chosen)[:MOST_STATES])
    in_data = "those of the data's own states in every order, then " if first else ""
    return kept, (
        f" ({len(kept)} of {perm(len(states), count)} ordered choices of {len(states)} states: first "
        f"{in_data}those in ascending order, then the start's in every order, then the start with one "
        "other)"
    )


def switch_choices(
    name: str,
    form: DrafterForm,
    *,
    target_rope: Rope | None,
    own_embedding: bool,
    own_head: bool,
) -> Iterator[Enum]:
    """The values of a switch that this drafter and target can be run with."""
    as_wide = form.target_hidden.value == form.hidden.value
    own = form.rope.value
    ropes: list[Rope] = []
    for value in SWITCHES[name]:
        if isinstance(value, (Embedding, Head)):
            there = own_embedding if isinstance(value, Embedding) else own_head
            possible = there if value.value == "own" else as_wide
        elif isinstance(value, RopeChoice):
            possible = value is not RopeChoice.target or target_rope is not None
            if possible:
                turned = heeded(chosen_rope(value, own, target_rope))
                possible = turned not in ropes
                ropes.append(turned)
        else:
            possible = value.value != "declared" or name in DECLARED
        if possible:
            yield value


def asked_values(name: str, values: Sequence[Any], num_aux: int) -> tuple[Any, ...]:
    """The values that a person names, typed."""
    if not values:
        raise BadInput(
            f"axis '{name}' is cut to no value at all; to leave it as it is, name it as fixed"
        )
    if name == STATES:
        wrong = [list(states) for states in values if len(states) != num_aux]
        if wrong:
            raise BadInput(
                f"axis 'states' names {wrong[0]}, but the drafter takes {num_aux} states"
            )
        return tuple(tuple(int(k) for k in states) for states in values)
    kind = SWITCHES[name]
    try:
        return tuple(kind(value) for value in values)
    except ValueError as error:
        named = ", ".join(str(value.value) for value in kind)
        raise BadInput(f"axis '{name}': {error}; there are {named}") from error

"""What a search may change: one axis for the states that are fed, and one a switch of the wiring."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import nsmallest
from itertools import chain, combinations, islice, permutations
from math import comb, factorial, perm
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
    needs_target,
)

STATES = "states"
MOST_STATES = 720  # ordered choices of states that are tried: all of 3 out of 10
DECLARED = ("window", "deeper_norm", "biases", "qk_norm")  # have no other name for what is declared
LATE = ("feedback", "positions")  # leave the first draft step as it is

AXES = (STATES, *SWITCHES)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Values that one part of the wiring may take instead of the start's own."""

    name: str  # "states", or a name of eagle3.wiring.SWITCHES
    values: tuple[Any, ...]  # tuples of canonical states, or the switch's values
    shows_from: int  # the first draft step at which it can show: 0, or 1
    named: bool = False  # a person says which values
    cut: str = ""  # how many of how many values there are, and which; empty: all of them
    among: tuple[int, ...] = ()  # the states whose choices are values, where not all of these are

    def beside(self, wiring: Wiring) -> Iterator[tuple[int, ...]]:
        """Of an axis that is cut: what is one step from a wiring's own value, listed or not.

        Its states in every order, and with one replaced; so that a search that has moved on from the
        start can reach every ordered choice there is. Of an axis that is not cut there is none.
        """
        if self.among:
            yield from islice(permutations(wiring.states()), MOST_STATES)
            yield from one_other(wiring.states(), self.among)


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
    more_states: Sequence[Sequence[int]] = (),
) -> tuple[Axis, ...]:
    """Every axis that can make a difference to this drafter.

    `known` are the states that the texts hold, `stored` those of them that were not made from the
    target: up to MOST_STATES choices of these are tried in every order, however many the others are.
    `target_rope` None leaves the target's rope out; `own_embedding` and `own_head` say whether the
    checkpoint has them. `fixed` names are left out, `only` says which values to try of an axis, whatever
    the others are, and `more_states` are tried in front of all other states: which ones can be fed is
    left to the search, which has the texts. Raises BadInput for a name or a value that there is not.
    """
    only = dict(only or {})
    for name in (*fixed, *only):
        if name not in AXES:
            raise BadInput(f"there is no axis '{name}'; there are {', '.join(AXES)}")
    if both := sorted(set(fixed) & set(only)):
        raise BadInput(f"axis '{both[0]}' is fixed and its values are named; say one of the two")
    if more_states and STATES in (*fixed, *only):
        so = "fixed" if STATES in fixed else "cut to what job.axes.states names"
        raise BadInput(
            f"axis 'states' is {so}, so job.axes.more_states adds nothing; say one of the two"
        )
    more = asked_values(STATES, more_states, form.num_aux.value) if more_states else ()
    found = []
    offered: tuple[Any, ...]
    # Without the layer nothing in it matters, but the search may put it back.
    base = replace(start, decoder_layer=DecoderLayer.included).resolved(form)
    for name in AXES:
        if name in fixed:
            continue
        cut = ""
        if name == STATES:
            offered, cut = state_choices(base.states(), known, stored, more)
        else:
            offered = tuple(
                switch_choices(
                    name,
                    form,
                    base.rope,
                    target_rope=target_rope,
                    own_embedding=own_embedding,
                    own_head=own_head,
                )
            )
        if name in only:
            offered, cut = asked_values(name, only[name], form.num_aux.value), ""
        values = different(name, offered, start if name == "decoder_layer" else base, form)
        if values:
            found.append(
                Axis(
                    name=name,
                    values=values,
                    shows_from=int(name in LATE),
                    named=name in only,
                    cut=cut,
                    among=tuple(sorted(set(known))) if cut else (),
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
    start: Sequence[int],
    known: Sequence[int],
    stored: Sequence[int] = (),
    more: Sequence[tuple[int, ...]] = (),
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Ordered choices of as many states as the start has, and what is left out, in words.

    All that there are of the known ones, or MOST_STATES of them by their closeness to the start; `more`
    stand before these.
    """
    count, states = len(start), sorted(set(known))
    total = perm(len(states), count)
    if total <= MOST_STATES:
        return (*more, *permutations(states, count)), ""
    held = set(states)
    ordered = by_closeness(start, states, sorted(held.intersection(stored)))
    kept = tuple(islice(each_once(c for c in ordered if held.issuperset(c)), MOST_STATES))
    tried = {chosen for chosen in (*kept, *more) if held.issuperset(chosen)}
    return (*more, *kept), what_is_cut(tried, start, states, stored)


def by_closeness(
    start: Sequence[int], states: Sequence[int], stored: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Ordered choices of states, the closest to the start first, some of them more than once.

    The start's own in every order and the start with one other come first, the fewer of them in front;
    then the data's own states in every order, where these are few enough to be tried whole; then
    ascending choices, which is how nearly everybody feeds them; then all other orders.
    """
    count = len(start)
    others = list(one_other(start, states))
    orders = list(islice(permutations(start), MOST_STATES))
    yield from chain(*sorted((orders, others), key=len))
    if perm(len(stored), count) <= MOST_STATES:
        yield from every_order(start, stored)
    yield from nearest(start, states)
    yield from every_order(start, stored)
    yield from every_order(start, states)


def one_other(start: Sequence[int], states: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The start with one of its states replaced, states one off those that they replace first."""
    places = [(place, k) for place in range(len(start)) for k in states if k not in start]
    for place, k in sorted(places, key=lambda item: abs(item[1] - start[item[0]])):
        yield (*start[:place], k, *start[place + 1 :])


def nearest(start: Sequence[int], states: Sequence[int]) -> list[tuple[int, ...]]:
    """Ascending choices of states, by how far all of them lie from the start's; the first of many."""
    ascending = sorted(start)
    return nsmallest(
        2 * MOST_STATES,  # as many as may be taken, behind as many as may have been taken before
        combinations(states, len(start)),
        key=lambda chosen: sum(abs(a - b) for a, b in zip(chosen, ascending, strict=True)),
    )


def every_order(start: Sequence[int], states: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ordered choices of states, by how far they lie from the start's."""
    for chosen in nearest(start, states):
        yield from permutations(chosen)


def each_once(choices: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """What comes again left out."""
    seen = set()
    for chosen in choices:
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def what_is_cut(
    tried: Collection[tuple[int, ...]],
    start: Sequence[int],
    states: Sequence[int],
    stored: Collection[int],
) -> str:
    """How many ordered choices of these states are tried, of how many, and of which kinds."""
    count, own = len(start), set(states).intersection(stored)
    others = {c for c in one_other(start, states) if set(states).issuperset(c)}
    kinds = [
        (
            "of the start's in every order",
            {c for c in tried if set(c) == set(start)},
            factorial(count),
        ),
        ("of the start with one state replaced", others.intersection(tried), len(others)),
        ("of the data's own", {c for c in tried if own.issuperset(c)}, perm(len(own), count)),
        ("ascending", {c for c in tried if list(c) == sorted(c)}, comb(len(states), count)),
    ]
    return (
        f"{len(tried)} of {perm(len(states), count)} ordered choices of {len(states)} states are tried, "
        f"the closest to {', '.join(map(str, start))}: "
        + ", ".join(f"{len(some)} of {total} {what}" for what, some, total in kinds if total)
        + "; job.axes.more_states=[[…]] adds others"
    )


def switch_choices(
    name: str,
    form: DrafterForm,
    rope: RopeChoice,
    *,
    target_rope: Rope | None,
    own_embedding: bool,
    own_head: bool,
) -> Iterator[Enum]:
    """The values of a switch that this drafter and target can be run with, and turn unlike `rope`."""
    as_wide = form.target_hidden.value == form.hidden.value
    own = form.rope.value
    ropes: list[Rope] = []
    if target_rope is not None or not needs_target(rope):
        ropes.append(heeded(chosen_rope(rope, own, target_rope)))
    for value in SWITCHES[name]:
        if isinstance(value, (Embedding, Head)):
            there = own_embedding if isinstance(value, Embedding) else own_head
            possible = there if value.value == "own" else as_wide
        elif isinstance(value, RopeChoice):
            possible = target_rope is not None or not needs_target(value)
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

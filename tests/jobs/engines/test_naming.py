"""Which states a server returns, where only first layers were run, or it was told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.conventions import KEY
from eagle3.errors import BadInput
from jobs.engines.naming import Told, name_states, told
from jobs.engines.probing import FED, NONE, UNDECIDED, Chunk
from jobs.engines.records import Facts

LAYERS, COMPUTED = 61, 33
SAID = "ids [-1, 2, 58]"


def chunk(verdict: str, *states: int, best: int | None = None) -> Chunk:
    nearest = states[0] if best is None else best
    return Chunk(
        index=0,
        verdict=verdict,
        states=states,
        best=nearest,
        error=0.01,
        runner_up=None,
        second=None,
        noise=0.0,
        shift=0,
    )


def named(k: int | None, found: Chunk, *doubts: str) -> tuple[int, str]:
    """A single chunk's state and how it is known, of which it was told that it is k."""
    said = Told(states=None if k is None else (k,), said=SAID, doubts=doubts)
    result = name_states(said, [found], 1, COMPUTED, LAYERS, "they fit")
    return result.states[0], result.known_by[0]


@pytest.mark.parametrize(
    ("k", "found", "answer"),
    [
        (3, chunk(FED, 3), (3, "measured")),
        (None, chunk(FED, 3), (3, "measured")),
        (59, chunk(FED, 3), (3, "measured")),
        (4, chunk(FED, 3, 4), (4, "measured")),  # which are equal here
        # Behind the last computed state nothing was measured.
        (59, chunk(NONE, best=20), (59, "declared")),
        (34, chunk(UNDECIDED, 32, 33, best=33), (34, "declared")),
        (34, chunk(FED, 33), (34, "declared")),
        (33, chunk(FED, 33), (33, "measured")),
        (3, chunk(UNDECIDED, 2, 3), (3, "declared")),
    ],
)
def test_a_chunk_is_what_was_measured_else_what_was_told(
    k: int | None, found: Chunk, answer: tuple[int, str]
) -> None:
    assert named(k, found) == answer


@pytest.mark.parametrize(
    ("k", "found", "doubts"),
    [
        (3, chunk(NONE, best=20), ()),
        (3, chunk(UNDECIDED, 7, 8), ()),
        (3, chunk(FED, 33), ()),  # or a higher one
        (None, chunk(UNDECIDED, 2, 3), ()),
        (None, chunk(NONE, best=20), ()),
        (None, chunk(FED, 33), ()),
        (59, chunk(NONE, best=20), ("id -1 needs a patch",)),
    ],
)
def test_where_neither_settles_it_both_are_named(
    k: int | None, found: Chunk, doubts: tuple[str, ...]
) -> None:
    with pytest.raises(BadInput, match=r"the server's chunk 0 is .*: ids \[-1, 2, 58\]"):
        named(k, found, *doubts)


def test_what_needs_a_patch_is_not_taken_at_its_word() -> None:
    said = Told(states=(0,), said=SAID, doubts=("id -1 is the embedding, which needs a patch",))
    with pytest.raises(
        BadInput, match=r"is not known \(ids .* needs a patch\), and not measured: no"
    ):
        name_states(said, [], 1, 0, LAYERS, "no layer fits")
    result = name_states(said, [chunk(FED, 0)], 1, COMPUTED, LAYERS, "they fit")
    assert (result.states, result.known_by) == ((0,), ("measured",))


def facts(drafter: Path | None, **flags: Any) -> Facts:
    named = None if drafter is None else str(drafter)
    return Facts(engine="sglang", version="0.5.23", model=None, drafter=named, flags=flags)


@pytest.mark.parametrize(
    ("config", "states", "words"),
    [
        ({"eagle_config": {KEY: [2, 30, 58]}}, (3, 31, 59), "ids [2, 30, 58]"),
        # SGLang looks in eagle_config alone, and takes its defaults where it finds none.
        ({KEY: [3, 31, 59]}, (2, 30, 58), "no ids"),
        ({"eagle_config": {KEY: "all"}}, None, "is 'all', not a list of layer ids"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "use_aux_hidden_state off"),
    ],
)
def test_what_a_server_was_told_is_its_drafters_own_ids(
    tmp_path: Path, config: dict[str, Any], states: tuple[int, ...] | None, words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = told(facts(tmp_path), "0.5.23", "llama", LAYERS)
    assert found.states == states
    assert words in found.said


def test_what_is_numbered_in_another_way_or_not_there_is_not_known() -> None:
    assert told(facts(None), "0.5.23", "llama", LAYERS).states is None
    other = facts(None, aux_hidden_state_capture="dflash", return_aux_hidden_state_layer_ids=[2])
    assert told(other, "0.5.23", "llama", LAYERS).states is None
    own = facts(None, aux_hidden_state_capture="eagle3", return_aux_hidden_state_layer_ids=None)
    assert told(own, "0.5.23", "llama", LAYERS).states == (2, 30, 58)
    # DeepSeek's ids are inputs of layers there.
    own = facts(None, aux_hidden_state_capture="eagle3", return_aux_hidden_state_layer_ids=[3, 31])
    assert told(own, "0.5.23", "deepseek_v2", LAYERS).states == (3, 31)

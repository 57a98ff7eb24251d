"""Layer ids of engines and trainers: the table's conversions, its edges, and checkouts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3 import checkouts
from eagle3.checkouts import TABLE, add_release, capture_hash, find_package, known_checkout
from eagle3.conventions import ENGINES, READ, RULES, RUN, TRAINERS, Evidence, Meaning, Reach, Rule
from eagle3.engines import (
    default_states,
    id_states,
    ids_to_write,
    looked_up,
    rule_for,
    served_states,
)
from eagle3.errors import BadInput
from eagle3.releases import holds, parse_version
from eagle3.serving import SERVING, SWITCHES, Switch, serving_for
from tests.engines.setup_engines import RELEASES

KIMI = 61  # layers
PATCH = "the embedding capture patch"
COPY = "the embedding copy patch"


def kimi(version: str) -> Rule:
    return rule_for("sglang", version, "kimi_k25")


# The story, and the conversions for a target of 61 layers of DeepSeek's kind.


@pytest.mark.parametrize(
    ("ecosystem", "version", "name", "ids", "states"),
    [
        ("sglang", "0.5.6", "kimi_k2", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.11", "glm4_moe_lite", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.11", "Glm4MoeLiteForCausalLM", [1, 29, 57], (2, 30, 58)),
        ("sglang", "0.5.22", "Qwen3_5MoeForConditionalGeneration", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.16", "gemma3_causal", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.22", "gemma4_causal", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.12", "kimi_k25", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.12.post1", "DeepseekV3ForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.13", "kimi_k25", [2, 30, 58], (2, 30, 58)),
        ("sglang", "0.5.23", "kimi-k25", [2, 30, 58], (2, 30, 58)),
        ("sglang", "0.5.13", "kimi_k25", [1, 29, 57], (2, 30, 58)),  # the heuristic
        ("sglang", "0.5.12", "kimi_k25", [1, 29, 57], (2, 30, 58)),
        ("sglang", "0.5.13", "llama", [2, 30, 58], (3, 31, 59)),
        ("sglang", "0.5.23", "Qwen3ForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("vllm", "0.33.0", "kimi_k25", [2, 30, 58], (2, 30, 58)),
        ("vllm", "0.33.0", "llama", [58, 2, 30], (2, 30, 58)),
        ("tensorrt_llm", None, None, [2, 30, 58], (3, 31, 59)),
        ("specforge", None, None, [2, 30, 58], (3, 31, 59)),
        ("modelopt", None, None, [2, 30, 58], (3, 31, 59)),
        ("torchspec", None, None, [2, 30, 58], (3, 31, 59)),
        ("speculators", "0.4.0", None, [2, 30, 58, 60], (3, 31, 59, 61)),
        ("speculators", "0.9.0", None, [2, 30, 58], (2, 30, 58)),
        ("llama_cpp", None, None, [3, 31, 59], (2, 30, 58)),
        ("eagle", None, None, [3, 31, 59], (2, 30, 58)),
    ],
)
def test_ids_bring_these_states_of_61_layers(
    ecosystem: str,
    version: str | None,
    name: str | None,
    ids: list[int],
    states: tuple[int, ...],
) -> None:
    served = served_states(rule_for(ecosystem, version, name), ids, KIMI)
    assert (served.states, served.problems) == (states, ())


@pytest.mark.parametrize(
    ("ecosystem", "version", "name", "wanted", "ids", "needs"),
    [
        ("sglang", "0.5.12", "kimi_k25", [2, 30, 58], (1, 29, 57), None),
        ("sglang", "0.5.12", "kimi_k25", [3, 31, 59], (2, 30, 58), None),
        ("sglang", "0.5.12", "kimi_k25", [0, 3, 31], (-1, 2, 30), PATCH),
        ("sglang", "0.5.12", "kimi_k25", [1, 30, 58], (0, 29, 57), None),
        ("sglang", "0.5.13", "kimi_k25", [2, 30, 58], (1, 29, 57), None),
        ("sglang", "0.5.13", "kimi_k25", [3, 31, 59], (3, 31, 59), None),
        ("sglang", "0.5.13", "kimi_k25", [0, 3, 31], (0, 3, 31), PATCH),
        ("sglang", "0.5.14", "kimi_k25", [0, 3, 31], (0, 3, 31), None),
        ("sglang", "0.5.23", "llama", [0, 3, 31], (-1, 2, 30), None),
        ("sglang", "0.5.21", "llama", [0, 3, 31], (-1, 2, 30), PATCH),
        ("sglang", "0.5.9", "qwen3", [0, 3, 31], (-1, 2, 30), COPY),
        ("sglang", "0.5.21", "qwen3", [0, 3, 31], (-1, 2, 30), None),
        ("sglang", "0.5.4", "qwen3_moe", [0, 3, 31], (-1, 2, 30), COPY),
        ("sglang", "0.5.5", "qwen3_moe", [0, 3, 31], (-1, 2, 30), None),
        ("vllm", "0.33.0", "kimi_k25", [2, 30, 58], (2, 30, 58), None),
        ("vllm", "0.33.0", "kimi_k25", [0, 3, 31], (0, 3, 31), PATCH),
        ("vllm", "0.33.0", "kimi_k25", [1, 30, 61], (1, 30, 61), None),
        ("vllm", "0.33.0", "llama", [0, 3, 31], (0, 3, 31), None),
        ("tensorrt_llm", None, None, [3, 31, 59], (2, 30, 58), None),
        ("tensorrt_llm", None, None, [1, 30, 61], (0, 29, 60), None),
        ("specforge", None, None, [2, 30, 58], (1, 29, 57), None),
        ("speculators", "0.9.0", None, [0, 3, 31], (0, 3, 31), None),
        ("speculators", "0.9.0", None, [3, 31, 59], (3, 31, 59), None),
    ],
)
def test_states_are_written_so(
    ecosystem: str,
    version: str | None,
    name: str | None,
    wanted: list[int],
    ids: tuple[int, ...],
    needs: str | None,
) -> None:
    written = ids_to_write(rule_for(ecosystem, version, name), wanted, KIMI)
    assert written.possible
    assert written.ids == ids
    assert (written.needs or "").startswith(needs or "")
    assert bool(written.needs) is bool(needs)


@pytest.mark.parametrize(
    ("ecosystem", "wanted", "why"),
    [
        ("tensorrt_llm", [0, 3, 31], "embedding"),
        ("modelopt", [0, 3, 31], "embedding"),
        ("specforge", [0, 3, 31], "embedding"),
        ("specforge", [3, 31], "exactly 3"),
        ("llama_cpp", [3, 31, 59], "always feeds [2, 30, 58]"),
        ("eagle", [3, 31, 59], "always feeds [2, 30, 58]"),
        ("tensorrt_llm", [31, 3, 59], "ascending"),
        ("tensorrt_llm", [3, 3, 59], "twice"),
    ],
)
def test_what_cannot_be_written_is_said(ecosystem: str, wanted: list[int], why: str) -> None:
    written = ids_to_write(rule_for(ecosystem, None, None), wanted, KIMI)
    assert (written.possible, written.ids) == (False, None)
    assert why in written.why


def test_ids_that_are_not_read_need_no_writing_where_the_states_are_the_default() -> None:
    written = ids_to_write(rule_for("llama_cpp", None, None), [2, 30, 58], KIMI)
    assert (written.possible, written.ids) == (True, None)


def test_a_state_1_in_front_needs_a_list_that_does_not_start_with_it() -> None:
    rule = kimi("0.5.13")
    assert id_states(rule, [1, 30, 58], KIMI) == (2, 31, 59)
    written = ids_to_write(rule, [1, 30, 58], KIMI)
    assert written.ids == (30, 1, 58)
    assert any("start with 1" in note for note in written.notes)
    assert not ids_to_write(rule, [1], KIMI).possible


def test_the_patched_config_of_0_5_12_fails_after_an_upgrade() -> None:
    assert served_states(kimi("0.5.12"), [-1, 2, 30], KIMI).states == (0, 3, 31)
    lost = served_states(kimi("0.5.13"), [-1, 2, 30], KIMI)
    assert lost.states == (2, 30)
    assert any("id -1 names no state" in problem for problem in lost.problems)
    assert served_states(kimi("0.5.23"), [-1, 2, 30], KIMI).states is None


# The edges.


def test_gpt_oss_reads_inputs_once_the_highest_id_is_the_number_of_layers() -> None:
    before = served_states(rule_for("sglang", "0.5.16", "gpt_oss"), [24, 30, 36], 36)
    assert before.states == (25, 31)  # the crash of 5760 against 8640 columns
    assert any("2 states come out for 3 ids" in problem for problem in before.problems)
    after = rule_for("sglang", "0.5.17", "gpt_oss")
    assert served_states(after, [24, 30, 36], 36).states == (24, 30, 36)
    assert served_states(after, [24, 30, 35], 36).states == (25, 31, 36)
    with pytest.raises(BadInput, match="num_layers=N"):
        served_states(after, [24, 30, 36], None)


@pytest.mark.parametrize(
    ("version", "name", "ids", "states", "problem"),
    [
        ("0.5.12", "kimi_k25", [2, 2, 30], (3, 31), "named twice is captured once"),
        ("0.5.23", "kimi_k25", [2, 2, 30], None, "named twice is an error"),
        ("0.5.12", "llama", [2, 30, 60], (3, 31), "never reaches"),
        ("0.5.12", "llama", [2, 30, 61], (3, 31), "state 62, of 61 layers"),
        ("0.5.12", "gemma3", [2, 30, 60], (3, 31, 61), None),
        ("0.5.12", "llama", [-1, 2], (0, 3), "embedding output, which needs"),
        ("0.5.12", "llama", [-3, 2], (3,), "id -3 names no state"),
        ("0.5.23", "qwen3_moe", [2, 30, -3], (3, 31, 59), "from the end"),
        ("0.5.23", "qwen3_moe", [2, 30, 60], None, "never reaches"),
        ("0.5.12", "llama", [], (), "empty"),
    ],
)
def test_ids_that_sglang_loses_are_named(
    version: str, name: str, ids: list[int], states: tuple[int, ...] | None, problem: str | None
) -> None:
    served = served_states(rule_for("sglang", version, name), ids, KIMI)
    assert served.states == states
    if problem is None:
        assert served.problems == ()
    else:
        assert any(problem in said for said in served.problems)


@pytest.mark.parametrize(
    ("version", "name", "reason"),
    [
        ("0.5.17", "gemma3", "apart from the residual"),
        ("0.5.23", "Gemma3ForConditionalGeneration", "apart from the residual"),
        ("0.5.12", "gemma4_causal", "writes over it"),
        ("0.5.21", "Gemma4UnifiedForConditionalGeneration", "writes over it"),
    ],
)
@pytest.mark.parametrize("ids", [None, [], [-1], [2, 30, 58]])
def test_what_gemma_hands_out_is_no_state_in_some_releases(
    version: str, name: str, reason: str, ids: list[int] | None
) -> None:
    rule = rule_for("sglang", version, name)
    served = served_states(rule, ids, KIMI)
    assert served.states is None
    assert any(reason in problem and "needs a patch" in problem for problem in served.problems)
    written = ids_to_write(rule, [2, 30, 58], KIMI)
    assert (written.possible, written.ids) == (False, None)
    assert reason in written.why


def test_tensorrt_llm_leaves_a_chunk_unset_for_an_id_of_no_layer() -> None:
    served = served_states(rule_for("tensorrt_llm", None, None), [2, 30, 61], KIMI)
    assert served.states is None
    assert any("unset" in problem for problem in served.problems)


def test_the_order_of_a_list_is_not_kept_and_that_is_said() -> None:
    served = served_states(kimi("0.5.12"), [58, 2, 30], KIMI)
    assert served.states == (3, 31, 59)
    assert any("ascending" in note for note in served.notes)


@pytest.mark.parametrize("rule", [row for row in RULES if row.default_shift == 0])
def test_defaults_are_the_reference_s_states(rule: Rule) -> None:
    assert default_states(rule, KIMI) == (2, 30, 58)
    assert default_states(rule, 36) == (2, 18, 33)
    assert served_states(rule, None, KIMI).states == (None if rule.fault else (2, 30, 58))


def test_defaults_that_differ() -> None:
    assert default_states(rule_for("speculators", "0.4.0", None), KIMI) == (3, 31, 59)
    assert default_states(rule_for("sglang", "0.5.20", "minimax_m3_vl"), KIMI) == (3, 31, 59)


def test_a_shallow_target_has_fewer_default_states() -> None:
    served = served_states(rule_for("vllm", "0.33.0", "llama"), None, 5)
    assert served.states == (2,)
    assert any("only 1 different default state" in problem for problem in served.problems)


def test_an_empty_list_counts_as_none_in_vllm_only() -> None:
    assert served_states(rule_for("vllm", "0.33.0", "llama"), [], KIMI).states == (2, 30, 58)
    assert served_states(kimi("0.5.12"), [], KIMI).states == ()


def test_ids_are_integers() -> None:
    with pytest.raises(BadInput, match="integers"):
        served_states(kimi("0.5.12"), [True, 2], KIMI)


# Every row.


def rows_and_states() -> st.SearchStrategy[tuple[Rule, tuple[int, ...], int]]:
    def of(n: int) -> st.SearchStrategy[tuple[Rule, tuple[int, ...], int]]:
        states = st.lists(st.integers(0, n), min_size=1, max_size=5, unique=True)
        some = st.one_of(states, states.map(sorted), st.just([2, n // 2, n - 3]))
        return st.tuples(st.sampled_from(RULES), some.map(tuple), st.just(n))

    return st.integers(7, 80).flatmap(of)


@given(rows_and_states())
def test_what_is_written_brings_the_wanted_states(
    case: tuple[Rule, tuple[int, ...], int],
) -> None:
    rule, states, n = case
    written = ids_to_write(rule, states, n)
    if written.ids is not None:
        served = served_states(rule, written.ids, n)
        assert served.states == states
        assert bool(served.problems) is bool(written.needs)
    elif written.possible:
        assert served_states(rule, None, n).states == states


@given(rows_and_states())
def test_only_ascending_states_can_be_written(case: tuple[Rule, tuple[int, ...], int]) -> None:
    rule, states, n = case
    if states != tuple(sorted(states)):
        assert not ids_to_write(rule, states, n).possible


def families() -> Iterator[tuple[str, list[Rule]]]:
    for ecosystem in (*ENGINES, *TRAINERS):
        rows = [row for row in RULES if row.ecosystem == ecosystem]
        for name in sorted({name for row in rows for name in row.classes}):
            yield f"{ecosystem} {name}", [row for row in rows if name in row.classes]


@pytest.mark.parametrize(("name", "rows"), list(families()))
def test_the_rows_of_a_class_leave_no_gap_and_do_not_overlap(name: str, rows: list[Rule]) -> None:
    assert rows[-1].until is None
    for before, after in pairwise(rows):
        assert before.until == after.since
        assert parse_version(before.until or "") > parse_version(before.since or "0")


@pytest.mark.parametrize("row", RULES)
def test_rows_are_whole(row: Rule) -> None:
    assert row.source
    assert (row.embedding is Reach.patch) is (row.patch is not None)
    if row.fault:
        assert (row.embedding, row.last) == (Reach.no, Reach.no)
    if row.ecosystem == "vllm" or (row.ecosystem == "sglang" and row.classes != ("*",)):
        assert row.evidence is Evidence.read
        assert row.places
    assert bool(row.other_runner) is bool(row.other_places)
    if row.meaning is not Meaning.derived:
        assert bool(row.places) is not bool(row.setting)


# Which row holds.


def test_a_slip_in_the_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'sglang'"):
        rule_for("sglnag", "0.5.12", "llama")


@pytest.mark.parametrize(
    ("ecosystem", "version", "name", "message"),
    [
        ("sglang", None, "kimi_k25", "changed what layer ids mean .at 0.5.13."),
        ("sglang", None, "gpt_oss", "changed what layer ids mean .at 0.5.17."),
        ("speculators", None, None, "changed what layer ids mean .at 0.5.0."),
        ("sglang", "0.5.13", None, "engine_class=NAME"),
        ("sglang", None, None, "engine_class=NAME"),
        ("sglang", "0.5.13rc1", "kimi_k25", "before the release in which this changed"),
        ("sglang", "newest", "kimi_k25", "is no version"),
        ("vllm", "0.17.0", "kimi_k25", "it does from 0.18.0 on"),
        ("sglang", "0.5.4", "deepseek_v2", "it does from 0.5.5 on"),
        ("sglang", "0.5.4", "glm4_moe", "it does from 0.5.5 on"),
        ("sglang", "0.5.5", "minimax_m2", "it does from 0.5.6 on"),
        ("sglang", "0.5.5", "longcat_flash", "it does from 0.5.6 on"),
        ("sglang", "0.5.6", "mistral_large_3", "it does from 0.5.7 on"),
        ("sglang", "0.5.6", "Ministral3ForCausalLM", "it does from 0.5.7 on"),
        ("sglang", "0.5.7", "glm4_moe_lite", "it does from 0.5.8 on"),
        ("sglang", "0.5.8.post1", "bailing_moe", "it does from 0.5.9 on"),
        ("sglang", "0.5.8.post1", "exaone_moe", "it does from 0.5.9 on"),
        ("sglang", "0.5.8.post1", "GlmMoeDsaForCausalLM", "it does from 0.5.9 on"),
        ("sglang", "0.5.8.post1", "qwen3_next", "it does from 0.5.9 on"),
        ("sglang", "0.5.6", "kimi_k25", "it does from 0.5.10 on"),
        ("sglang", "0.5.10.post1", "qwen3_vl", "it does from 0.5.11 on"),
        ("sglang", "0.5.10.post1", "qwen3_vl_moe", "it does from 0.5.11 on"),
        ("sglang", "0.5.12.post1", "gemma4_unified", "it does from 0.5.13 on"),
        ("sglang", "0.5.15.post1", "MellumForCausalLM", "it does from 0.5.16 on"),
        ("sglang", "0.5.21", "Qwen3_5ForConditionalGeneration", "it does from 0.5.22 on"),
    ],
)
def test_what_is_missing_to_tell_the_meaning_is_asked_for(
    ecosystem: str, version: str | None, name: str | None, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        rule_for(ecosystem, version, name)


def test_before_the_meaning_depended_on_the_class_none_is_needed() -> None:
    rule = rule_for("sglang", "0.5.12", None)
    assert served_states(rule, [2, 30, 58], KIMI).states == (3, 31, 59)
    assert any("no class was given" in note for note in rule.notes)


@pytest.mark.parametrize("name", ["other", "qwen4", "mamba"])
def test_an_unknown_class_gets_the_general_rule_and_is_told_so(name: str) -> None:
    rule = rule_for("sglang", "0.5.13", name)
    assert rule.meaning is Meaning.output
    assert rule.evidence is Evidence.inferred
    assert any("no row of its own" in note for note in rule.notes)


@pytest.mark.parametrize("name", ["kimi_k52", "deepseek_v4"])
def test_a_slip_for_a_class_that_is_read_otherwise_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"did you mean .*engine_class=other"):
        rule_for("sglang", "0.5.13", name)


@pytest.mark.parametrize("name", ["Kimi-K2.5", "kimi_k2.5", "KimiK25", "KIMI_K25"])
def test_a_class_may_be_spelt_as_people_do(name: str) -> None:
    assert rule_for("sglang", "0.5.13", name).meaning is kimi("0.5.13").meaning


def test_releases_that_nobody_read_are_inferred() -> None:
    assert kimi("0.5.23").evidence is Evidence.read
    assert kimi("0.5.23.post1").evidence is Evidence.read
    newer = kimi("0.6.0")
    assert newer.evidence is Evidence.inferred
    assert any("0.6.0 was not read" in note for note in newer.notes)
    assert rule_for("sglang", "0.4.9", "llama").evidence is Evidence.inferred


def test_what_was_run_is_what_the_tests_of_engines_run() -> None:
    assert dict(RUN.keys()) == RELEASES
    for (engine, version), classes in RUN.items():
        for name in classes:
            rows = [
                row
                for row in RULES
                if row.ecosystem == engine and holds(row.since, row.until, parse_version(version))
            ]
            general = [row for row in rows if row.classes == ("*",)]
            (row,) = [row for row in rows if name in row.classes] or general
            ran = rule_for(engine, version, name)
            assert row.evidence is Evidence.read
            assert ran.source == f"recorded at the drafter's fc; {row.source}"
            assert replace(ran, evidence=row.evidence, source=row.source, notes=row.notes) == row
            assert ran.evidence is Evidence.run
        assert rule_for(engine, version, "kimi_k25").evidence is Evidence.read


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("0.5.9", "0.5.12"),
        ("0.5.12", "0.5.12.post1"),
        ("0.5.12.post1", "0.5.13rc0"),
        ("0.5.13rc0", "0.5.13"),
        ("0.5.13.dev7+gabc", "0.5.13"),
        ("0.5.12", "0.5.12+cpu"),
    ],
)
def test_versions_sort_as_releases_do(lower: str, higher: str) -> None:
    assert parse_version(lower) < parse_version(higher)


def test_trailing_zeros_do_not_count() -> None:
    assert parse_version("0.5.0") == parse_version("v0.5")


# Where ids are read.

FLAT = {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
DEEP = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
TOP, INSIDE = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ecosystem", "version", "name", "config", "place", "ignored"),
    [
        ("sglang", "0.5.12", "llama", FLAT, None, (TOP,)),
        ("sglang", "0.5.12", "llama", DEEP, INSIDE, ()),
        ("sglang", "0.5.23", "llama", {**FLAT, **DEEP}, INSIDE, (TOP,)),
        ("sglang", "0.5.23", "llama", {"eagle_config": {TOP: None}}, None, ()),
        ("sglang", "0.5.23", "llama", {"eagle_config": "none"}, None, ()),
        ("vllm", "0.21.0", "llama", DEEP, None, (INSIDE,)),
        ("vllm", "0.23.0", "llama", DEEP, INSIDE, ()),
        ("vllm", "0.33.0", "llama", DEEP, None, (INSIDE,)),
        ("vllm", "0.33.0", "llama", {**FLAT, **DEEP}, TOP, (INSIDE,)),
        ("specforge", None, None, DEEP, INSIDE, ()),
        ("speculators", "0.9.0", None, FLAT, TOP, ()),
        ("tensorrt_llm", None, None, {**FLAT, **DEEP}, None, (TOP, INSIDE)),
        ("llama_cpp", None, None, FLAT, None, (TOP,)),
    ],
)
def test_ids_are_looked_up_there_only(
    ecosystem: str,
    version: str | None,
    name: str | None,
    config: dict[str, Any],
    place: str | None,
    ignored: tuple[str, ...],
) -> None:
    found = looked_up(rule_for(ecosystem, version, name), config)
    assert found.place == place
    assert (found.ids is None) is (place is None)
    assert tuple(path for path, _ in found.ignored) == ignored


def test_the_other_model_runner_looks_elsewhere() -> None:
    rule = rule_for("vllm", "0.33.0", "llama")
    assert looked_up(rule, DEEP).ids is None
    assert looked_up(rule, DEEP, other_runner=True).ids == (1, 17, 32)
    plain = {"eagle_config": {"layer_ids": [3, 4, 5]}}
    assert looked_up(rule, plain).ids == (3, 4, 5)
    assert looked_up(rule, plain, other_runner=True).ids is None


def test_dflash_ids_count_one_less() -> None:
    rule = rule_for("vllm", "0.33.0", "llama")
    assert looked_up(rule, {"dflash_config": {"target_layer_ids": [1, 17]}}).ids == (2, 18)


def test_a_place_without_a_list_is_an_error() -> None:
    with pytest.raises(BadInput, match="not a list of layer ids"):
        looked_up(kimi("0.5.12"), {"eagle_config": {TOP: "2,18,33"}})


# What becomes of the rest of a drafter.


def test_sglang_has_no_norm_before_residual_and_vllm_has() -> None:
    config = {"norm_before_residual": True}
    assert not serving_for("sglang", "0.5.23", None).norm_before_residual.value(config)
    assert serving_for("vllm", "0.33.0", None).norm_before_residual.value(config)


def test_switches_came_with_releases() -> None:
    old, new = serving_for("sglang", "0.5.11", None), serving_for("sglang", "0.5.17", None)
    assert (old.norm_before_fc.honoured, new.norm_before_fc.honoured) == (False, True)
    assert (old.fc_norm.honoured, new.fc_norm.honoured) == (False, True)
    assert (old.blocks, new.blocks) == (("midlayer.",), ("midlayer.", "layers.0."))
    assert not serving_for("sglang", "0.5.15", None).yarn_mscale
    assert serving_for("sglang", "0.5.16", None).yarn_mscale
    for architecture in (None, "Eagle3Qwen3ForCausalLM"):
        assert not serving_for("vllm", "0.29.0", architecture).yarn_mscale
        assert serving_for("vllm", "0.30.0", architecture).yarn_mscale


def test_the_nested_switch_counts_before_the_one_at_the_top() -> None:
    switch = serving_for("sglang", "0.5.23", None).norm_before_fc
    assert switch.value({"norm_before_fc": True})
    assert not switch.value({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}})


def test_an_architecture_has_a_row_of_its_own() -> None:
    assert serving_for("sglang", "0.5.23", "Eagle3DeepseekV2ForCausalLM").interleaved_rope
    assert serving_for("vllm", "0.33.0", "Eagle3Qwen3ForCausalLM").qk_norm.default
    with pytest.raises(BadInput, match=r"from 0\.5\.12 on"):
        serving_for("sglang", "0.5.11", "Eagle3DeepseekV2ForCausalLM")
    with pytest.raises(BadInput, match="there is no engine"):
        serving_for("specforge", None, None)


@pytest.mark.parametrize("row", SERVING)
def test_serving_rows_are_whole(row: Any) -> None:
    assert all(isinstance(getattr(row, name), Switch) for name in SWITCHES)
    same = [r for r in SERVING if (r.ecosystem, r.drafters) == (row.ecosystem, row.drafters)]
    assert all(a.until == b.since for a, b in pairwise(same))
    assert same[-1].until is None


# Checkouts.

MODEL = '''
class LlamaDecoderLayer:
    def __init__(self):
        self.mlp = None

    def forward(self, x, residual):
        x = self.rest(x, residual)
        return x + 0, residual

    def rest(self, x, residual):
        return self.mlp(x)


class LlamaModel:
    def forward(self, x, residual):
        """Walk the layers."""
        aux = []
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux.append(x + residual)  # in front of layer i
            x, residual = self.layers[i](x, residual)
        return self.norm(x), aux


class LlamaForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if layer_ids is None:
            self.model.layers_to_capture = [2, self.n // 2, self.n - 3]
        else:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]

    def load(self, path):
        return open(path)
'''


def changed(old: str, new: str) -> str:
    assert old in MODEL
    return MODEL.replace(old, new)


@pytest.mark.parametrize(
    "source",
    [
        changed("  # in front of layer i", ""),
        changed("aux = []", "aux = []\n\n        # the captured ones\n"),
        changed('"""Walk the layers."""', '"""Another docstring, on layers_to_capture."""'),
        changed("(self, layer_ids=None)", "(\n        self, layer_ids: list | None = None\n    )"),
        changed("return open(path)", "return open(path, 'rb')"),
        changed("self.mlp = None", "self.mlp = object()"),
    ],
)
def test_what_does_not_decide_keeps_the_hash(source: str) -> None:
    assert capture_hash(source) == capture_hash(MODEL)


@pytest.mark.parametrize(
    "source",
    [
        changed("val + 1", "val"),
        changed("val + 1", "val + 2"),
        changed("self.n - 3", "self.n - 2"),
        changed("if i in self", "if i + 1 in self"),
        changed("aux.append(x + residual)", "aux.append(x)"),
        changed("range(self.start_layer,", "range(self.start_layer + 1,"),
        changed("= self.layers[i](x, residual)", "= self.layers[i](x), residual"),
        changed("aux = []", "aux = [residual]"),
        changed("self.norm(x), aux", "self.norm(x), aux[::-1]"),
        changed("return x + 0, residual", "return x + residual, None"),
        changed("self.mlp(x)", "self.mlp(x + residual)"),
    ],
)
def test_what_decides_changes_the_hash(source: str) -> None:
    assert capture_hash(source) != capture_hash(MODEL)


def test_code_that_captures_nothing_has_no_hash() -> None:
    assert capture_hash("def forward(self, x):\n    return x\n") is None


def fake(root: Path, source: str = MODEL, inside: str = "python/sglang") -> Path:
    package = root / inside
    for name, text in {"llama": source, "qwen2": MODEL.replace("Llama", "Qwen2")}.items():
        file = package / "srt" / "models" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (package / "version.py").write_text('__version__ = "9.9.1"\n')
    return root


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Three releases, the second like the first, in a table of their own."""
    sources = {"9.8": changed("val + 1", "val"), "9.9.0": MODEL, "9.9.1": MODEL}
    folders = {v: fake(tmp_path / v, source) for v, source in sources.items()}
    table: dict[str, Any] = {}
    for version, folder in folders.items():
        table = add_release(table, "sglang", version, folder)
    (tmp_path / "table.json").write_text(json.dumps(table))
    monkeypatch.setattr(checkouts, "TABLE", tmp_path / "table.json")
    return folders


def test_a_clone_and_an_installation_are_recognised(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    for folder in (
        releases["9.9.0"],
        releases["9.9.0"] / "python" / "sglang",
        fake(tmp_path / "site-packages", inside="sglang"),
    ):
        found = known_checkout(folder)
        assert (found.known, found.releases) == (True, ("9.9.0", "9.9.1"))
        assert "9.9.0 to 9.9.1" in found.answer
        assert found.version == "9.9.1"
    assert known_checkout(releases["9.8"]).releases == ("9.8",)


def test_another_capture_is_unknown_and_names_the_file(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    patched = changed(
        "aux.append(x + residual)", "aux.append(x if residual is None else x + residual)"
    )
    found = known_checkout(fake(tmp_path / "patched", patched))
    assert not found.known
    assert found.differs == ("srt/models/llama.py",)
    assert found.nearest == "9.9.1"
    assert "unknown: probe it" in found.answer
    assert "srt/models/llama.py" in found.answer


def test_a_model_that_no_release_has_differs(releases: dict[str, Path]) -> None:
    model = releases["9.9.1"] / "python/sglang/srt/models/deep/new.py"
    model.parent.mkdir()
    model.write_text("class Model:\n    def forward(self, x):\n        return x\n")
    assert known_checkout(releases["9.9.1"]).known
    model.write_text(MODEL)
    assert known_checkout(releases["9.9.1"]).differs == ("srt/models/deep/new.py",)


def test_only_some_of_many_files_that_differ_are_named(
    releases: dict[str, Path], tmp_path: Path
) -> None:
    folder = fake(tmp_path / "many")
    for i in range(8):
        (folder / f"python/sglang/srt/models/new{i}.py").write_text(MODEL)
    found = known_checkout(folder)
    assert len(found.differs) == 8
    assert "new3.py and 4 more" in found.answer
    assert "new4.py" not in found.answer


def test_of_a_model_runner_only_the_statements_count_that_decide() -> None:
    runner = """
class Runner:
    def load(self):
        self.memory = 1
        if self.drafts:
            ids = config["eagle_aux_hidden_state_layer_ids"]
"""
    other = runner.replace("memory = 1", "memory = 2")
    assert capture_hash(runner, whole=False) == capture_hash(other, whole=False)
    assert capture_hash(runner) != capture_hash(other)
    other = runner.replace("self.drafts", "self.trains")
    assert capture_hash(runner, whole=False) != capture_hash(other, whole=False)


def test_where_a_folder_lies_does_not_matter(tmp_path: Path) -> None:
    runner = "srt/model_executor/model_runner.py"
    source = "def load(self):\n    x = 1\n    self.eagle_aux_hidden_state_layer_ids = x\n"
    hashes = []
    for root in (tmp_path / "a", tmp_path / "models"):
        file = fake(root) / "python" / "sglang" / runner
        file.parent.mkdir(parents=True)
        file.write_text(source)
        hashes.append(checkouts.capture_hashes(root / "python" / "sglang", "sglang"))
    assert hashes[0] == hashes[1]
    assert runner in hashes[0]


def test_a_missing_and_an_unreadable_file_differ(releases: dict[str, Path]) -> None:
    llama = releases["9.9.1"] / "python/sglang/srt/models/llama.py"
    llama.write_text("def set_eagle3_layers_to_capture(:\n")
    assert known_checkout(releases["9.9.1"]).differs == ("srt/models/llama.py",)
    llama.unlink()
    assert known_checkout(releases["9.9.1"]).differs == ("srt/models/llama.py",)


def test_a_folder_without_an_engine_or_with_two_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither sglang nor vllm"):
        known_checkout(tmp_path)
    fake(tmp_path, inside="sglang")
    (tmp_path / "vllm" / "model_executor").mkdir(parents=True)
    with pytest.raises(BadInput, match="more than one engine"):
        known_checkout(tmp_path)
    assert find_package(tmp_path / "vllm")[0] == "vllm"


def test_a_release_is_entered_once(releases: dict[str, Path]) -> None:
    table = json.loads(checkouts.TABLE.read_text())
    assert table["sglang"]["files"]["srt/models/llama.py"].keys() == {"9.8", "9.9.0"}
    with pytest.raises(BadInput, match="in the table already"):
        add_release(table, "sglang", "9.8", releases["9.8"])
    with pytest.raises(BadInput, match="holds sglang, not vllm"):
        add_release(table, "vllm", "9.8", releases["9.8"])


def test_the_table_of_hashes_fits_the_rules() -> None:
    table = json.loads(TABLE.read_text())
    assert TABLE.stat().st_size < 20_000
    for ecosystem, entry in table.items():
        keys = [parse_version(release) for release in entry["releases"]]
        assert keys == sorted(keys)
        assert (entry["releases"][0], entry["releases"][-1]) == READ[ecosystem]
        for changes in entry["files"].values():
            assert set(changes) <= set(entry["releases"])


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = (
        "import eagle3.engines, eagle3.serving, sys; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# The file with the layer loop of each class of SGLang, where it is not named as the class.
LOOPS = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "kimi_k2", "mistral_large_3", "glm_moe_dsa"), "deepseek_v2"
    ),
    **dict.fromkeys(("mistral", "phi3", "internlm3", "ministral3"), "llama"),
    **dict.fromkeys(("gemma3",), "gemma3_causal"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), "gemma4_causal"),
    "mellum": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5",
}


@pytest.mark.parametrize(
    "row", [row for row in RULES if row.ecosystem == "sglang" and row.evidence is Evidence.read]
)
def test_what_was_read_has_capture_code_in_every_release(row: Rule) -> None:
    table = json.loads(TABLE.read_text())["sglang"]
    releases = [v for v in table["releases"] if holds(row.since, row.until, parse_version(v))]
    assert releases
    names = [name for name in row.classes if name.islower()]
    assert names
    for name in names:
        changes = table["files"][f"srt/models/{LOOPS.get(name, name)}.py"]
        digest = None
        for release in table["releases"]:
            digest = changes.get(release, digest)
            assert digest or release not in releases, (name, release)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v2", "gpt_oss", "llama", "llama4", "qwen2", "gemma3_causal", "gemma4_causal"),
        *("qwen2_moe", "minimax_m2", "minimax_m3", "minimax_m3_vl"),
    ],
)
def test_where_a_rule_changed_so_did_the_hash(name: str) -> None:
    changes = json.loads(TABLE.read_text())["sglang"]["files"][f"srt/models/{name}.py"]
    rows = [row for row in RULES if row.ecosystem == "sglang" and name in row.classes]
    assert {row.since for row in rows[1:]} <= set(changes)


@pytest.mark.parametrize(
    ("module", "architecture"),
    [
        ("kimi_k25", "KimiK25ForConditionalGeneration"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        ("gemma3_causal", "Gemma3ForCausalLM"),
        ("gemma4_mm", "Gemma4ForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("bailing_moe", "BailingMoeV2ForCausalLM"),
        ("exaone_moe", "ExaoneMoEForCausalLM"),
    ],
)
def test_a_module_and_its_architecture_have_the_same_row(module: str, architecture: str) -> None:
    for ecosystem, version in (("sglang", "0.5.23"), ("vllm", "0.33.0")):
        ours, theirs = (
            rule_for(ecosystem, version, name) for name in (module, architecture.upper())
        )
        assert ours.source == theirs.source
        assert (ours.meaning, ours.evidence) == (theirs.meaning, theirs.evidence)

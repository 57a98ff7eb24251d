"""Where a patch of an engine is needed, it is said whether it is shipped, and what needs none."""

from __future__ import annotations

import pytest

from eagle3.engine_patches import unpatched, way
from eagle3.engines import rule_for

KIMI = 61


@pytest.mark.parametrize(
    ("engine", "version", "name", "said"),
    [
        ("sglang", "0.5.12", "kimi_k25", "engine.patch=embedding_capture"),
        ("sglang", "0.5.12", "Kimi-K2.5", "engine.patch=embedding_capture"),
        ("sglang", "0.5.12+cpu", "llama", "engine.patch=embedding_capture"),
        ("sglang", "0.5.12", "MistralForCausalLM", "engine.patch=embedding_capture"),
        ("sglang", "0.5.12.post1", "llama", "not shipped for 0.5.12.post1"),
        ("sglang", "0.5.13", "kimi_k25", "not shipped for 0.5.13"),
        ("sglang", "0.5.12", "gpt_oss", "not shipped for class gpt_oss"),
        ("sglang", "0.5.12", None, "not shipped for class unknown"),
        ("vllm", "0.32.0", "deepseek_v3", "engine.patch=embedding_capture"),
        ("vllm", None, "deepseek_v3", "engine.patch=embedding_capture for 0.32.0"),
        ("vllm", "0.33.0", "deepseek_v3", "not shipped for 0.33.0"),
    ],
)
def test_how_a_patch_is_had(engine: str, version: str | None, name: str | None, said: str) -> None:
    assert way(rule_for(engine, version, name), version, name) == said


@pytest.mark.parametrize(
    ("engine", "version", "name", "found"),
    [
        ("sglang", "0.5.12", "kimi_k25", ("0.5.14", (0, 3, 31))),
        ("sglang", "0.5.21", "llama", ("0.5.22", (-1, 2, 30))),
        ("vllm", "0.17.0", "llama", ("0.18.0", (0, 3, 31))),
        ("vllm", "0.32.0", "kimi_k25", None),
    ],
)
def test_the_first_release_that_needs_none(
    engine: str, version: str, name: str, found: tuple[str, tuple[int, ...]] | None
) -> None:
    assert unpatched(rule_for(engine, version, name), name, [0, 3, 31], KIMI) == found

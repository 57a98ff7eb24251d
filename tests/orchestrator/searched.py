"""Results of a search and of a diagnosis, made by hand in the shape that the jobs give them."""

from __future__ import annotations

from typing import Any

from eagle3.wiring import SWITCHES, Wiring

T0 = 1_790_000_000.0


def rate(value: float, count: int, of: int = 1000) -> dict[str, Any]:
    """A rate with its interval, counts and truth."""
    bounds = {"low": round(value - 0.02, 6), "high": round(value + 0.02, 6)}
    counts = {"numerator": count, "denominator": of, "truth": "target_argmax"}
    return {"value": value, **bounds, **counts}


def curve(first: float) -> list[dict[str, Any]]:
    """Four draft steps."""
    return [{"step": step, **rate(round(first - step / 10, 6), 500)} for step in range(4)]


def ranked_row(
    number: int, changed: list[str], states: tuple[int, ...], length: float, *, tied: bool = False
) -> dict[str, Any]:
    """One ranked wiring."""
    behind = {"value": 2.994 - length, "low": 2.9 - length, "high": 3.1 - length}
    return {
        "name": "; ".join(changed) or "as declared",
        "changed": changed,
        "wiring": Wiring.of_states(states).plain(),
        "states": list(states),
        "teacher": "target_argmax",
        "metrics": {"accuracy": rate(length / 4, 700), "accept_length": rate(length, 3000)},
        "curves": {
            "step_accuracy/marginal": curve(length / 4),
            "step_accuracy/conditional": curve(length / 4),
        },
        "behind": None if number == 1 else behind,
        "tied": tied,
    }


def dropped_row(changed: list[str], behind: float, texts: int = 8) -> dict[str, Any]:
    """One wiring that was left behind."""
    return {
        "changed": changed,
        "texts": texts,
        "positions": 50 * texts,
        "accuracy": 0.04,
        "behind": {"value": behind, "low": behind - 0.1, "high": behind + 0.1},
        "why": f"{behind:.2f} behind the leader, which its bound excludes",
    }


def search_result(**changes: Any) -> dict[str, Any]:
    """A search's result.json, of a search that began at the wrong states."""
    return {
        "case_id": "case",
        "status": "ok",
        "error": None,
        "started": T0 + 2,
        "ended": T0 + 8.25,
        "metrics": {"accuracy": rate(0.752, 752), "accept_length": rate(2.994, 2994)},
        "curves": {"step_accuracy/marginal": curve(0.752)},
        "findings": [],
        "wiring": {**Wiring.of_states((0, 3, 31)).plain(), "states": [0, 3, 31]},
        "fingerprints": {"drafter": "sha256:d", "target": "sha256:t", "data": "sha256:x"},
        "notes": [],
        "ranked": [
            ranked_row(1, ["states=0,3,31"], (0, 3, 31), 2.994),
            ranked_row(2, ["states=0,3,31", "rope=base_10000"], (0, 3, 31), 2.99, tied=True),
            ranked_row(3, [], (3, 31, 59), 1.05),
        ],
        "dropped": [
            dropped_row(["states=3,0,31"], 1.5),
            dropped_row(["states=3,31,0"], 1.25, texts=32),
            dropped_row(["states=31,0,3"], 1.75),
            dropped_row(["d2t=absolute"], 2.0),
        ],
        "teachers": [
            {
                "teacher": "target_argmax",
                "in_words": "the target's own choice",
                "accuracy": rate(0.752, 752),
                "agreement": rate(0.98, 980),
            }
        ],
        "rounds": ["round 1 tried 144 wirings and took states=0,3,31"],
        **changes,
    }


FIRST_LINES = [
    "cause    states: trained on states 0, 3 and 31; SGLang 0.5.12 (kimi_k25) feeds 3, 31 and 59",
    "cost     accept length 2.994 [2.974, 3.014] as trained, 1.050 [1.030, 1.070] as served",
    'fix      "eagle_aux_hidden_state_layer_ids": [-1, 2, 30]',
    "expected accept length 2.994 [2.974, 3.014] of 5",
    "sure     certain",
]


def diagnosis(**changes: Any) -> dict[str, Any]:
    """A diagnosis as plain data."""
    fix = {
        "engine": "SGLang 0.5.12, class kimi_k25",
        "possible": True,
        "lines": ['"eagle_aux_hidden_state_layer_ids": [-1, 2, 30]'],
        "config": None,
        "needs": "the embedding capture, as a patch",
        "left": None,
        "evidence": "read",
    }
    cause = {
        "kind": "states",
        "what": "trained on states 0, 3 and 31; served 3, 31 and 59",
        "trained": "0, 3, 31",
        "served": "3, 31, 59",
        "cost": {
            "accuracy_as_trained": rate(0.752, 752),
            "accuracy_so": rate(0.048, 48),
            "accept_length_as_trained": rate(2.994, 2994),
            "accept_length_so": rate(1.05, 1050),
            "difference": {"value": 1.944, "low": 1.8, "high": 2.1},
        },
        "fixes": [fix],
        "confidence": "certain",
        "evidence": "measured",
    }
    return {
        "verdict": "cause",
        "headline": "other states are fed than in training",
        "causes": [cause],
        "trained": {**Wiring.of_states((0, 3, 31)).plain(), "states": [0, 3, 31]},
        "teacher": "the target's own choice",
        "served": None,
        "slots": ["slot 0: state 0, verified"],
        "accept_length_served": rate(1.05, 1050),
        "accept_length_repaired": rate(2.994, 2994),
        "ladder": [{"mended": "states", "accept_length": rate(2.994, 2994)}],
        "signature": "low, then recovering",
        "confidence": "certain",
        "undecided": ["rope scaling: no text is longer than 512 tokens"],
        "elsewhere": [{**fix, "engine": "vLLM", "lines": ["[0, 3, 31]"], "needs": None}],
        "findings": [
            {
                "name": "ids-mean-other-states",
                "severity": "error",
                "where": "/models/my-eagle3/config.json",
                "what": "the ids mean other states there",
                "effect": "acceptance falls to nothing",
                "fix": ["[-1, 2, 30]"],
                "evidence": "read",
            }
        ],
        "notes": ["96 texts"],
        "config": {"model_type": "llama", "eagle_config": {"ids": [-1, 2, 30]}},
        "first_lines": list(FIRST_LINES),
        "markdown": "\n".join([*FIRST_LINES, "", "and the rest", ""]),
        **changes,
    }


def diagnose_result(**changes: Any) -> dict[str, Any]:
    """A diagnosis' result.json."""
    return search_result(diagnosis=diagnosis(), **changes)


assert set(Wiring.of_states((0,)).plain()) == {"layers", "convention", *SWITCHES}

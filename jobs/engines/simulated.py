"""The variables by which SGLang makes up what it accepts: refused in a measurement, set in a control.

With SGLANG_SIMULATE_ACC_LEN above 0 every round drafts and verifies as ever, and then takes as many
tokens as the variable says (read in 0.5.23: speculative/spec_utils.py; earlier releases look for
SIMULATE_ACC_LEN). Its relatives say how that number is drawn, which tokens are put there, and which
experts are taken. vLLM's speculative_config does the like by the words of CONFIG_WORDS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIXES = ("SGLANG_SIMULATE_", "SIMULATE_ACC_")
CONFIG_WORDS = ("rejection_sample_method", "synthetic_acceptance")
WHY = "accept lengths would be simulated, whatever the drafter does, and nothing measured"


def simulating(names: Iterable[str]) -> list[str]:
    """Which of these variables make the engine simulate."""
    return sorted(name for name in names if name.startswith(PREFIXES))


def variables(accept_length: int, *, tree: bool) -> Mapping[str, str]:
    """What has every round take exactly so many tokens.

    In a chain the drafted tokens are put there, so that experts are chosen as by any text; of a tree
    SGLang can only put one fixed token everywhere.
    """
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(accept_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed" if tree else "real-draft-token",
    }

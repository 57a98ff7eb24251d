"""The variables by which SGLang makes up what it accepts: refused in a measurement, set in a control.

With SGLANG_SIMULATE_ACC_LEN above 0 every round drafts and verifies as ever, and then takes as many
tokens as the variable says (read in 0.5.23: speculative/spec_utils.py; earlier releases look for
SIMULATE_ACC_LEN). Its relatives say how that number is drawn, which tokens are put there, and which
experts are taken.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIXES = ("SGLANG_SIMULATE_", "SIMULATE_ACC_")
LENGTH = "SGLANG_SIMULATE_ACC_LEN"
WHY = "accept lengths would be simulated, whatever the drafter does, and nothing measured"


def simulating(names: Iterable[str]) -> list[str]:
    """Which of these variables make the engine simulate."""
    return sorted(name for name in names if name.startswith(PREFIXES))

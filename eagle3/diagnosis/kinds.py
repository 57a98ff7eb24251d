"""The kinds of cause that a diagnosis can name. No torch."""

from __future__ import annotations

from eagle3.wiring import SWITCHES

STATES, ORDER = "states", "order"
NOT_SERVED = "not-served"

# A wiring cause is named as its switch; `states` splits into which states and which order.
WIRING: dict[str, str] = {
    STATES: "other aux states are fed than the drafter was trained on",
    ORDER: "the right aux states are fed in another order",
    "d2t": "draft ids are turned into target ids in another way",
    "decoder-layer": "the drafter's decoder layer is left out",
    "concat": "embedding and hidden state stand side by side in another order",
    "input-norms": "the first layer's norms are swapped or applied twice",
    "residual": "the attention's output is added to another residual (norm before residual)",
    "fc-input": "fc sees the aux states behind another norm, or none",
    "head-input": "the head sees the drafter's state before or behind the norm",
    "feedback": "the next draft step is fed the state before or behind the norm",
    "rope": "the rotary embedding has another base or scaling",
    "rotation": "other numbers of a head turn in pairs (half-split, interleaved)",
    "embedding": "another token embedding is read",
    "head": "another output head is used",
    "token": "another token's embedding stands beside the target's states",
    "positions": "the deeper draft steps stand at other positions",
    "window": "the attention reaches back another distance",
    "deeper-norm": "the norm in front of the deeper layers' attention is lost",
    "biases": "biases of the attention are lost, or were not trained",
    "qk-norm": "the norms on q and k are lost",
}
OTHERS: dict[str, str] = {
    NOT_SERVED: "the engine does not start with this drafter, or does not load what the file holds",
    "teacher": "the drafter was trained on another teacher than the target",
    "slots": "the data's slots do not hold what is declared",
    "coverage": "the draft vocabulary lacks many of the target's tokens",
    "under-trained": "the wiring is right, and the drafter is as good as it was trained",
    "engine-state": "the engine loses acceptance that its wiring does not explain",
    "measurement": "the figure behind the engine is of another definition",
    "unknown": "not among the causes that are known here",
}
KINDS: dict[str, str] = {**WIRING, **OTHERS}


def kind_of(switch: str) -> str:
    """The kind that a differing switch of the wiring is; 'states' stays 'states'."""
    return switch.replace("_", "-")


def switch_of(kind: str) -> str | None:
    """The switch behind a wiring kind ('states' for both states and order), or None."""
    if kind in (STATES, ORDER):
        return STATES
    name = kind.replace("-", "_")
    return name if name in SWITCHES else None

"""What a layer id means: the three conventions, translated to canonical states.

Canonical state k is the residual stream after k decoder layers: k = 0 is the embedding output,
k = n the last one, before the final norm. Everything else in the code speaks k.

    convention   id i stands for              canonical k
    output       the output of layer i        i + 1   (so -1 is the embedding output)
    input        the input of layer i         i       (so n is the last state)
    hf           hidden_states[i]             i       (but hidden_states[n] is behind the final norm)

No torch here: the command line checks layer ids before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from eagle3.errors import BadInput


class LayerConvention(str, Enum):
    """How the integers of a config name hidden states."""

    output = "output"
    input = "input"
    hf = "hf"


def canonical_state(
    layer_id: int, convention: LayerConvention, num_layers: int | None = None
) -> int:
    """The canonical state that a layer id names.

    `num_layers` is the target's number of decoder layers; without it the upper end goes unchecked.
    Raises BadInput for an id that names no state before the final norm.
    """
    if convention is LayerConvention.hf:
        if layer_id < 0:
            raise BadInput(
                f"layer id {layer_id} in the convention 'hf' counts from the end of hidden_states; "
                "write the index from the start (0 is the embedding output)"
            )
        if num_layers is not None and layer_id == num_layers:
            raise BadInput(
                f"layer id {layer_id} in the convention 'hf' is hidden_states[{layer_id}], which lies "
                "behind the final norm and is no aux state; for the state before that norm write "
                f"{num_layers - 1} in the convention 'output'"
            )
    k = layer_id + 1 if convention is LayerConvention.output else layer_id
    if k < 0:
        raise BadInput(
            f"layer id {layer_id} in the convention '{convention.value}' names no state: "
            f"the lowest id is {-1 if convention is LayerConvention.output else 0}, the embedding output"
        )
    if num_layers is not None and k > num_layers:
        raise BadInput(
            f"layer id {layer_id} in the convention '{convention.value}' is canonical state {k}, but "
            f"the target has {num_layers} decoder layers, so its states are 0 to {num_layers}"
        )
    return k


def canonical_states(
    layer_ids: Sequence[int], convention: LayerConvention, num_layers: int | None = None
) -> tuple[int, ...]:
    """Canonical states of a list of layer ids, in the list's own order."""
    return tuple(canonical_state(i, convention, num_layers) for i in layer_ids)

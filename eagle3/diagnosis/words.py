"""How wirings, costs and fixes are said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3.diagnosis.kinds import STATES
from eagle3.doctor.findings import in_words
from eagle3.metrics import Difference, Rate
from eagle3.wiring import SWITCHES, Wiring

VALUES: dict[str, dict[str, str]] = {
    "d2t": {
        "offset": "d2t holds offsets",
        "absolute": "d2t holds target ids",
        "identity": "draft ids are target ids",
    },
    "decoder_layer": {"included": "with its decoder layer", "skipped": "without its decoder layer"},
    "embedding": {"own": "its own token embedding", "target": "the target's token embedding"},
    "head": {"own": "its own head", "target": "the target's head"},
    "residual": {
        "raw": "the residual is fc's output, un-normed",
        "normed": "the residual is behind hidden_norm",
    },
    "window": {
        "declared": "attention with the window of config.json",
        "none": "attention over the whole text",
    },
    "concat": {
        "embedding_first": "embedding in front of the hidden state",
        "hidden_first": "hidden state in front of the embedding",
    },
    "input_norms": {
        "own": "input_layernorm on the embedding, hidden_norm on the hidden state",
        "swapped": "hidden_norm on the embedding, input_layernorm on the hidden state",
        "double": "the hidden state behind both input_layernorm and hidden_norm",
    },
    "fc_input": {
        "raw": "fc on the states as captured",
        "whole": "fc behind one norm over all states (norm_before_fc)",
        "chunks": "fc behind a norm a state (fc_norm)",
    },
    "head_input": {"normed": "the head behind the norm", "raw": "the head without the norm"},
    "feedback": {
        "raw": "the next step is fed the state before the norm",
        "normed": "the next step is fed the state behind the norm (norm_output)",
    },
    "rope": {
        "declared": "the rotary embedding of config.json",
        "unscaled": "config.json's rope base without its scaling",
        "no_mscale": "config.json's YaRN without mscale",
        "base_10000": "rope base 10000, unscaled",
        "target": "the target's rotary embedding",
        "base_10000_scaled": "rope base 10000 with config.json's scaling",
        "target_unscaled": "the target's rope base without its scaling",
        "target_base": "the target's rope base with config.json's scaling",
        "target_scaling": "config.json's rope base with the target's scaling",
        "base_10000_target_scaling": "rope base 10000 with the target's scaling",
    },
    "rotation": {
        "half_split": "half-split rotation (i with i + d/2)",
        "interleaved": "interleaved rotation (2i with 2i + 1)",
    },
    "token": {
        "same": "the token of the state's own position beside it",
        "next": "the next token beside the state",
        "after_next": "the token after the next beside the state",
    },
    "positions": {
        "advancing": "each draft step one position further",
        "standing": "all draft steps at one position",
    },
    "deeper_norm": {
        "declared": "with the norm in front of the deeper layers' attention",
        "dropped": "without the norm in front of the deeper layers' attention",
    },
    "biases": {
        "declared": "with the attention's biases",
        "first_dropped": "without those of the first layer's q, k and v",
        "dropped": "without any",
    },
    "qk_norm": {"declared": "with the norms on q and k", "dropped": "without them"},
}
# What a drafted token is compared with, by the name of the truth.
TRUTHS = {
    "target_argmax": "the target's own choice",
    "stored_teacher": "the target's own choice (made of its last state in the data)",
    "next_token": "the text's next token",
}


def truth_words(truth: str) -> str:
    """What serving goes by, as the figures have it."""
    return TRUTHS.get(truth, truth)


def value_words(wiring: Wiring, name: str) -> str:
    """What a wiring does at one switch, or which states it feeds."""
    if name == STATES:
        return in_words(wiring.states())
    value = getattr(wiring, name).value
    return VALUES.get(name, {}).get(value, f"{name}={value}")


def wiring_lines(wiring: Wiring) -> list[str]:
    """A line a switch: 'states: states 0, 3 and 31'."""
    return [f"{name}: {value_words(wiring, name)}" for name in (STATES, *SWITCHES)]


def rate_words(rate: Rate, digits: int = 2) -> str:
    """'2.93 [2.71, 3.15]'."""
    return f"{rate.value:.{digits}f} [{rate.low:.{digits}f}, {rate.high:.{digits}f}]"


def difference_words(difference: Difference, digits: int = 2) -> str:
    """The same of a paired difference."""
    return (
        f"{difference.value:.{digits}f} [{difference.low:.{digits}f}, {difference.high:.{digits}f}]"
    )


def short(text: str, width: int = 120) -> str:
    """At most `width` columns, cut at a word."""
    indent = text[: len(text) - len(text.lstrip())]
    text = indent + " ".join(text.split())
    if len(text) <= width:
        return text
    return text[: width - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def joined(parts: Sequence[Any], last: str = "and") -> str:
    """'a, b and c'."""
    texts = [str(part) for part in parts]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"

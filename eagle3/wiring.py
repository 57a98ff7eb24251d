"""The wiring: everything that ties a drafter to its target, as explicit switches.

No torch here: the command line validates a wiring before anything heavy is imported. What a switch
does to the numbers is in `eagle3.model`; which values stand for a checkpoint's own is asked of
`Wiring.resolved`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.layers import LayerConvention, canonical_states


class D2T(str, Enum):
    """How the table d2t turns a draft id i into a target id."""

    offset = "offset"  # i + d2t[i]: what every Hugging Face-format ecosystem stores
    absolute = "absolute"  # d2t[i]
    identity = "identity"  # i, the table is not read


class DecoderLayer(str, Enum):
    """Whether the drafter's decoder layers run between fc and the head."""

    included = "included"
    skipped = "skipped"


class Embedding(str, Enum):
    """Whose token embedding the drafter reads."""

    own = "own"
    target = "target"


class Head(str, Enum):
    """Whose output head scores the drafter's states."""

    own = "own"
    target = "target"  # its rows for the draft vocabulary


class Residual(str, Enum):
    """What the first layer's attention output is added to."""

    declared = "declared"  # what the checkpoint says it was trained with
    raw = "raw"  # fc's output, whatever the checkpoint says: what SGLang does
    normed = "normed"  # hidden_norm of it


class Window(str, Enum):
    """How far back the drafter's attention reaches."""

    declared = "declared"  # what the checkpoint says it was trained with
    none = "none"  # over the whole text, whatever the checkpoint says: what SGLang does unasked


class Concat(str, Enum):
    """What the first layer's attention sees side by side."""

    embedding_first = "embedding_first"  # cat(embedding, hidden): what every ecosystem does
    hidden_first = "hidden_first"


class InputNorms(str, Enum):
    """The first layer's norms: input_layernorm and hidden_norm."""

    own = "own"  # input_layernorm on the embedding, hidden_norm on the hidden state
    swapped = "swapped"  # the other way round
    double = "double"  # the hidden state goes through both, input_layernorm first: ModelOpt 0.47


class FcInput(str, Enum):
    """What fc sees of the aux states."""

    declared = "declared"
    raw = "raw"  # as captured
    whole = "whole"  # behind one norm over the concatenation: input_norm, norm_before_fc
    chunks = "chunks"  # behind one norm a state: fc_norm


class HeadInput(str, Enum):
    """What the head sees of the last layer's output y."""

    declared = "declared"
    normed = "normed"  # norm(y): what every engine does
    raw = "raw"


class Feedback(str, Enum):
    """What the next draft step takes in the place of fc's output."""

    declared = "declared"
    raw = "raw"  # y
    normed = "normed"  # norm(y): norm_output in engines


class RopeChoice(str, Enum):
    """Whose rotary embedding turns q and k: each of three bases with each of three scalings."""

    declared = "declared"  # the checkpoint's
    unscaled = "unscaled"  # its base, without its scaling
    no_mscale = "no_mscale"  # its YaRN scaling by the factor alone: SGLang up to 0.5.15
    # Base 10000, unscaled: EAGLE's trainer, and engines where the config is not read.
    base_10000 = "base_10000"
    target = "target"  # the target's base and scaling
    base_10000_scaled = "base_10000_scaled"  # the checkpoint's scaling on base 10000
    target_unscaled = "target_unscaled"  # the target's base, without its scaling
    target_base = "target_base"  # the target's base with the checkpoint's scaling
    target_scaling = "target_scaling"  # the checkpoint's base with the target's scaling
    base_10000_target_scaling = "base_10000_target_scaling"  # the target's scaling on base 10000


class Rotation(str, Enum):
    """Which numbers of a head turn in pairs."""

    half_split = "half_split"  # i with i + d/2: Llama's
    interleaved = "interleaved"  # 2i with 2i + 1: DeepSeek's, GGUF's


class Token(str, Enum):
    """Which token's embedding stands beside the target's states at position t in the first step.

    What is drafted is held against x[t+2] whichever it is; see `eagle3.chain`.
    """

    same = "same"  # x[t]
    next = "next"  # x[t+1]: what every ecosystem does
    after_next = "after_next"  # x[t+2]


class Positions(str, Enum):
    """Where the deeper steps of a chain stand."""

    advancing = "advancing"  # one further with each step
    standing = "standing"  # all where the first did


class Parts(str, Enum):
    """Whether parts of the block that an engine may have no place for are run."""

    declared = "declared"
    dropped = "dropped"


class Biases(str, Enum):
    """Which biases of the attention's projections are run."""

    declared = "declared"
    first_dropped = "first_dropped"  # without the first layer's of q, k and v, o's stay: SGLang
    dropped = "dropped"  # without any, as attention_bias=false says


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """One way to connect a drafter; `layers` means nothing without `convention`."""

    layers: tuple[int, ...]
    convention: LayerConvention
    d2t: D2T = D2T.offset
    decoder_layer: DecoderLayer = DecoderLayer.included
    embedding: Embedding = Embedding.target
    head: Head = Head.own
    residual: Residual = Residual.declared
    window: Window = Window.declared
    concat: Concat = Concat.embedding_first
    input_norms: InputNorms = InputNorms.own
    fc_input: FcInput = FcInput.declared
    head_input: HeadInput = HeadInput.declared
    feedback: Feedback = Feedback.declared
    rope: RopeChoice = RopeChoice.declared
    rotation: Rotation = Rotation.half_split
    token: Token = Token.next
    positions: Positions = Positions.advancing
    deeper_norm: Parts = Parts.declared  # the norm in front of the attention of layers >= 1
    biases: Biases = Biases.declared
    qk_norm: Parts = Parts.declared

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Wiring:
        """A wiring from plain data; unknown keys and unknown values are errors.

        Requests that were written before a switch was do not name it, and mean its default.
        """
        unknown = sorted(set(raw) - {field.name for field in fields(cls)})
        if unknown:
            raise BadInput(f"wiring has no switch named {', '.join(unknown)}")
        for name in ("layers", "convention", "d2t", "decoder_layer", "embedding"):
            if name not in raw:
                raise BadInput(f"wiring.{name} is missing")
        try:
            return cls(
                layers=tuple(int(i) for i in raw["layers"]),
                convention=LayerConvention(raw["convention"]),
                **{name: kind(raw[name]) for name, kind in SWITCHES.items() if name in raw},  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise BadInput(f"wiring: {error}") from error

    @classmethod
    def of_states(cls, states: tuple[int, ...], **switches: Any) -> Wiring:
        """A wiring by canonical states."""
        return cls(layers=states, convention=LayerConvention.input, **switches)

    def states(self, num_layers: int | None = None) -> tuple[int, ...]:
        """The canonical states that are concatenated, in order."""
        return canonical_states(self.layers, self.convention, num_layers)

    def plain(self) -> dict[str, Any]:
        """As plain data; parse(plain()) gives the same wiring."""
        switches = {name: getattr(self, name).value for name in SWITCHES}
        return {"layers": list(self.layers), "convention": self.convention.value, **switches}

    def resolved(self, form: DrafterForm) -> Wiring:
        """The same wiring in canonical states and with no switch left at 'declared' that has a name.

        Two wirings that compute the same are then equal, as far as the checkpoint's form tells: it
        knows neither the numbers (a table of the drafter's own may be the target's) nor the target.
        """
        fc_input = FcInput.raw
        if form.norm_before_fc.value:
            fc_input = FcInput.whole
        elif form.fc_norm.value:
            fc_input = FcInput.chunks
        own: dict[str, Enum] = {
            "residual": Residual.normed if form.norm_before_residual.value else Residual.raw,
            "fc_input": fc_input,
            "head_input": HeadInput.normed if form.head_norm.value else HeadInput.raw,
            "feedback": Feedback.normed if form.feedback_normed.value else Feedback.raw,
        }
        named: dict[str, Any] = {
            n: v for n, v in own.items() if getattr(self, n).value == "declared"
        }
        named["rope"] = first_alike(self.rope, form.rope.value)
        if form.num_aux.value == 1 and fc_input is FcInput.raw and self.fc_input is FcInput.chunks:
            named["fc_input"] = FcInput.whole  # one norm of ones, of the same width
        # Switches of parts that this drafter does not have.
        idle: list[str] = []
        if not any(form.windows.value):
            idle.append("window")
        if form.num_layers.value == 1:
            idle.append("deeper_norm")
        if not form.attention_bias.value:
            idle.append("biases")
        if not form.qk_norm.value:
            idle.append("qk_norm")
        if self.decoder_layer is DecoderLayer.skipped:
            # No token enters then, and every step repeats the first.
            idle += [n for n in SWITCHES if n not in OUTSIDE_LAYER]
            own["embedding"] = Embedding.own if form.embedding.value == "own" else Embedding.target
        named |= {name: own.get(name, USUAL[name]) for name in idle}
        return replace(self, layers=self.states(), convention=LayerConvention.input, **named)

    def differing(self, other: Wiring) -> tuple[str, ...]:
        """The names of what differs, 'states' among them; both resolved by the same form."""
        names = ("states",) if self.states() != other.states() else ()
        return (*names, *(n for n in SWITCHES if getattr(self, n) is not getattr(other, n)))

    def untrained(self) -> list[str]:
        """The switches that no trainer has so, as they would be written."""
        usual = {name: USUAL[name] for name in SWITCHES if name not in ("embedding",)}
        set_so = {name: getattr(self, name) for name in usual}
        return [
            f"wiring.{name}={value.value}"
            for name, value in set_so.items()
            if value is not usual[name]
        ]


# Every switch with its values, in the order in which they are written.
SWITCHES: dict[str, type[Enum]] = {
    "d2t": D2T,
    "decoder_layer": DecoderLayer,
    "embedding": Embedding,
    "head": Head,
    "residual": Residual,
    "window": Window,
    "concat": Concat,
    "input_norms": InputNorms,
    "fc_input": FcInput,
    "head_input": HeadInput,
    "feedback": Feedback,
    "rope": RopeChoice,
    "rotation": Rotation,
    "token": Token,
    "positions": Positions,
    "deeper_norm": Parts,
    "biases": Biases,
    "qk_norm": Parts,
}
USUAL: dict[str, Enum] = {
    field.name: field.default for field in fields(Wiring) if field.name in SWITCHES
}
# What is run without the decoder layers, too.
OUTSIDE_LAYER = ("d2t", "decoder_layer", "head", "fc_input", "head_input")


def needs_target(choice: RopeChoice) -> bool:
    """Whether a choice takes the base or the scaling from the target."""
    return "target" in ROPE_PARTS[choice]


def chosen_rope(choice: RopeChoice, own: Rope, theirs: Rope | None = None) -> Rope:
    """The rotary embedding that a choice means for a drafter with its `own` and a target with `theirs`.

    Without `theirs` there is no choice of the target's: BadInput.
    """
    if theirs is None and needs_target(choice):
        raise BadInput(f"wiring.rope={choice.value}: the target's rope was not read")
    parts = {"own": own, "plain": PLAIN_ROPE, "target": theirs or PLAIN_ROPE}
    base, scaling = ROPE_PARTS[choice]
    rope = parts[scaling] if base == scaling else replace(parts[scaling], theta=parts[base].theta)
    if choice is RopeChoice.no_mscale and rope.kind == "yarn":
        kept = tuple((key, value) for key, value in rope.scaling if key not in YARN_FACTORS)
        return replace(rope, scaling=kept)
    return rope


def first_alike(choice: RopeChoice, own: Rope) -> RopeChoice:
    """The first choice that turns as this one does, whatever the target's rope is."""
    turned = heeded(chosen_rope(choice, own, ANY_ROPE))
    return next(c for c in RopeChoice if heeded(chosen_rope(c, own, ANY_ROPE)) == turned)


def heeded(rope: Rope) -> Rope:
    """Without keys of its scaling that change nothing."""
    scaling = dict(rope.scaling)
    factors = [key for key in YARN_FACTORS if scaling.get(key)]
    if rope.kind != "yarn":
        return rope
    if "attention_factor" in factors:
        factors = ["attention_factor"]
    elif len(factors) < 2:
        factors = []  # one of mscale and mscale_all_dim alone is not read
    kept = [(k, v) for k, v in rope.scaling if k not in YARN_FACTORS or k in factors]
    return replace(rope, scaling=tuple(kept))


# What yarn's factor on cos and sin is read from; without them it is 0.1 · ln(factor) + 1.
YARN_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
PLAIN_ROPE = Rope(theta=10_000.0)
ANY_ROPE = Rope(theta=math.inf, kind="the target's")  # unlike every drafter's, in both parts
# Whose base and whose scaling each choice takes.
ROPE_PARTS: dict[RopeChoice, tuple[str, str]] = {
    RopeChoice.declared: ("own", "own"),
    RopeChoice.unscaled: ("own", "plain"),
    RopeChoice.no_mscale: ("own", "own"),
    RopeChoice.base_10000: ("plain", "plain"),
    RopeChoice.target: ("target", "target"),
    RopeChoice.base_10000_scaled: ("plain", "own"),
    RopeChoice.target_unscaled: ("target", "plain"),
    RopeChoice.target_base: ("target", "own"),
    RopeChoice.target_scaling: ("own", "target"),
    RopeChoice.base_10000_target_scaling: ("plain", "target"),
}

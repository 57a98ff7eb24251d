"""The wiring: everything that ties a drafter to its target, as explicit switches.

No torch here: the command line validates a wiring before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from eagle3.errors import BadInput
from eagle3.layers import LayerConvention, canonical_states


class D2T(str, Enum):
    """How the table d2t turns a draft id i into a target id."""

    offset = "offset"  # i + d2t[i]: what every Hugging Face-format ecosystem stores
    absolute = "absolute"  # d2t[i]
    identity = "identity"  # i, the table is not read


class DecoderLayer(str, Enum):
    """Whether the drafter's decoder layer runs between fc and the head."""

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
    """What the attention's output is added to."""

    declared = "declared"  # what the checkpoint says it was trained with
    raw = "raw"  # fc's output, whatever the checkpoint says: what SGLang does
    normed = "normed"  # hidden_norm of it


class Window(str, Enum):
    """How far back the drafter's attention reaches."""

    declared = "declared"  # what the checkpoint says it was trained with
    none = "none"  # over the whole text, whatever the checkpoint says: what SGLang does unasked


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

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Wiring:
        """A wiring from plain data; unknown keys and unknown values are errors."""
        unknown = sorted(set(raw) - {field.name for field in fields(cls)})
        if unknown:
            raise BadInput(f"wiring has no switch named {', '.join(unknown)}")
        try:
            return cls(
                layers=tuple(int(i) for i in raw["layers"]),
                convention=LayerConvention(raw["convention"]),
                d2t=D2T(raw["d2t"]),
                decoder_layer=DecoderLayer(raw["decoder_layer"]),
                embedding=Embedding(raw["embedding"]),
                # Requests that were written before these switches were do not name them.
                head=Head(raw.get("head", Head.own.value)),
                residual=Residual(raw.get("residual", Residual.declared.value)),
                window=Window(raw.get("window", Window.declared.value)),
            )
        except KeyError as error:
            raise BadInput(f"wiring.{error.args[0]} is missing") from error
        except ValueError as error:
            raise BadInput(f"wiring: {error}") from error

    def states(self, num_layers: int | None = None) -> tuple[int, ...]:
        """The canonical states that are concatenated, in order."""
        return canonical_states(self.layers, self.convention, num_layers)

    def plain(self) -> dict[str, Any]:
        """As plain data; parse(plain()) gives the same wiring."""
        return {
            "layers": list(self.layers),
            "convention": self.convention.value,
            "d2t": self.d2t.value,
            "decoder_layer": self.decoder_layer.value,
            "embedding": self.embedding.value,
            "head": self.head.value,
            "residual": self.residual.value,
            "window": self.window.value,
        }

    def untrained(self) -> list[str]:
        """The switches that no trainer has so, as they would be written."""
        usual = {
            "d2t": D2T.offset,
            "decoder_layer": DecoderLayer.included,
            "head": Head.own,
            "residual": Residual.declared,
            "window": Window.declared,
        }
        set_so = {name: getattr(self, name) for name in usual}
        return [
            f"wiring.{name}={value.value}"
            for name, value in set_so.items()
            if value is not usual[name]
        ]

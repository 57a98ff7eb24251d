"""What is examined: the files of a drafter, a target and data, an engine, a trainer, read once.

Only headers, configs and small tensors are read. What is damaged becomes a finding of its own, so that
everything else can still be said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import checkpoints
from eagle3.checkouts import Checkout
from eagle3.checkpoints.agree import own_name
from eagle3.checkpoints.reading import listed_names
from eagle3.checkpoints.refused import other_kinds, unknown_switches
from eagle3.conventions import Rule
from eagle3.doctor.findings import MEASURED, Finding
from eagle3.errors import BadInput
from eagle3.form import DrafterForm
from eagle3.headers import TensorInfo, Weights, find_tensors, find_weights, read_values
from eagle3.serving import Serving

LAYER = "transformer_layer_config"
LAB_SHAPE, LAB_WEIGHTS = "shape.json", "live.safetensors"
LAB_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
PARTS = {
    "embedding": "embed_tokens.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
}


@dataclass(frozen=True, kw_only=True)
class EngineAsked:
    """An engine as it was named: `checkout` is a folder with its source, `flags` its server's."""

    name: str
    version: str | None = None
    engine_class: str | None = None
    checkout: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine with the row of the table that holds for it."""

    asked: EngineAsked
    rule: Rule
    serving: Serving | None  # None: no drafter to serve, or it has no place for one of this kind
    checkout: Checkout | None

    @property
    def name(self) -> str:
        """'sglang'."""
        return self.asked.name

    @property
    def words(self) -> str:
        """'sglang 0.5.12, class kimi_k25'."""
        named = " ".join(filter(None, (self.asked.name, self.asked.version)))
        klass = self.asked.engine_class
        return f"{named}, class {klass}" if klass else named

    @property
    def evidence(self) -> str:
        """How its layer ids are known."""
        return f"{self.rule.evidence.value}: {self.rule.source}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a drafter's config says of its sizes, as far as it can be read; None: it does not say."""

    hidden: int | None
    vocab: int | None
    draft_vocab: int | None
    target_hidden: int | None
    num_aux: int | None


@dataclass(frozen=True)
class Drafter:
    """A drafter's folder, or a draft model's config of a run to come (`weights` None)."""

    config_path: Path
    config: Mapping[str, Any]
    weights: Weights | None
    form: DrafterForm | None
    faults: tuple[str, ...]  # where config and file contradict each other
    foreign: tuple[str, ...]  # why this project's own drafter cannot run it

    @property
    def where(self) -> str:
        """The folder or the config's path."""
        return str(self.config_path if self.weights is None else self.config_path.parent)

    @property
    def nested(self) -> bool:
        """Whether it is in speculators' layout."""
        return LAYER in self.config or "speculators_model_type" in self.config

    @property
    def flat(self) -> dict[str, Any]:
        """Its config as engines that take both layouts see it: the layer's keys at the top level."""
        inner = self.config.get(LAYER)
        return {**(inner if isinstance(inner, Mapping) else {}), **self.config}

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else None

    @property
    def block(self) -> Mapping[str, Any]:
        """The object that holds the decoder layer's sizes."""
        inner = self.config.get(LAYER)
        return inner if isinstance(inner, Mapping) else self.config

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The file's tensors by the drafter's own names (`midlayer.*` for the first layer)."""
        held = (self.weights.tensors if self.weights else None) or {}
        return {own_name(name): info for name, info in held.items()}

    @property
    def examined(self) -> bool:
        """Whether the names of its tensors are known."""
        return self.weights is not None and self.weights.tensors is not None

    @cached_property
    def sizes(self) -> Sizes:
        """Its sizes, from the form where there is one."""
        form = self.form
        if form is not None:
            return Sizes(
                hidden=form.hidden.value,
                vocab=form.vocab.value,
                draft_vocab=form.draft_vocab.value,
                target_hidden=form.target_hidden.value,
                num_aux=form.num_aux.value,
            )
        hidden, vocab = whole(self.block, "hidden_size"), whole(self.block, "vocab_size")
        return Sizes(
            hidden=hidden,
            vocab=vocab,
            draft_vocab=whole(self.config, "draft_vocab_size") or vocab,
            target_hidden=whole(self.config, "target_hidden_size") or hidden,
            num_aux=None,
        )

    def values(self, name: str) -> np.ndarray[Any, Any] | None:
        """The values of a small tensor; None where the file has none of that name."""
        info = self.tensors.get(name)
        return None if info is None else read_values(info)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a drafter takes from its target: sizes, and where its embedding, norm and head lie."""

    folder: Path
    config: Mapping[str, Any]  # of the language model alone
    kinds: tuple[str, ...]  # model types and architectures, as the whole config names them
    tensors: dict[str, TensorInfo]  # by the keys of PARTS; empty where none was found
    examined: bool  # whether its weights could be looked for

    def size(self, key: str) -> int | None:
        """A size from its config.json."""
        return whole(self.config, key)

    @property
    def num_layers(self) -> int | None:
        """n."""
        return self.size("num_hidden_layers")

    @property
    def hidden(self) -> int | None:
        """H."""
        return self.size("hidden_size")

    @property
    def vocab(self) -> int | None:
        """V: the embedding's rows where they could be read."""
        table = self.tensors.get("embedding")
        return table.shape[0] if table is not None else self.size("vocab_size")


@dataclass(frozen=True, kw_only=True)
class DataSlot:
    """One stored state of a sample: its name in the file, its width and number type."""

    name: str
    width: int
    dtype: str
    state: int | None  # canonical k as declared
    teacher: bool  # what a trainer of this layout takes for the target's end


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a folder of captured samples holds, by the names and headers of its files."""

    folder: Path
    layout: str | None
    files: int
    slots: tuple[DataSlot, ...] | None  # None: not examined
    states: tuple[int, ...] | None  # canonical states of the slots, as declared, in their order
    origin: str  # who declares them
    target_layers: int | None  # n, where capture.json knows the target

    @property
    def aux(self) -> tuple[int, ...] | None:
        """The canonical states that a trainer feeds to the drafter, as declared."""
        if self.states is None:
            return None
        if self.slots is None:
            return self.states[:-1] if self.layout in LAST_IS_TEACHER else self.states
        known = [slot.state for slot in self.slots if not slot.teacher]
        return tuple(k for k in known if k is not None) if None not in known else None

    @property
    def teacher(self) -> DataSlot | None:
        """The slot that a trainer takes for the target's last state."""
        return next((slot for slot in self.slots or () if slot.teacher), None)


LAST_IS_TEACHER = ("pt_shards", "speculators")


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """An ecosystem that a drafter was or is to be trained by."""

    name: str
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Subject:
    """All that was named; what was not is None."""

    drafter: Drafter | None
    target: Target | None
    data: Data | None
    engine: Engine | None
    trainer: Trainer | None
    states: tuple[int, ...] | None = None  # trained on, as declared where no data is named

    @property
    def to_come(self) -> bool:
        """Whether the drafter is still to be trained."""
        return self.drafter is None or self.drafter.weights is None

    @property
    def num_layers(self) -> int | None:
        """n, from the target or from what the data's capture says of it."""
        if self.target is not None and self.target.num_layers is not None:
            return self.target.num_layers
        return self.data.target_layers if self.data is not None else None

    @property
    def target_hidden(self) -> int | None:
        """H, from the target, else as the drafter states it."""
        if self.target is not None and self.target.hidden is not None:
            return self.target.hidden
        return self.drafter.sizes.target_hidden if self.drafter is not None else None


def whole(block: Mapping[str, Any], key: str) -> int | None:
    """A positive integer of a config, or None."""
    value = block.get(key)
    return value if type(value) is int and value > 0 else None


def on_host(path: str) -> Path:
    """A path on this machine, `~` expanded. Raises BadInput for a home that is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{path}: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object. Raises BadInput."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds no JSON object")
    return value


def unreadable(role: str, error: BadInput) -> Finding:
    """A file that is damaged or lacking."""
    return Finding(
        name=f"{role}-unreadable",
        severity="error",
        where=role,
        what=str(error),
        effect="nothing loads it, or what loads it fills what is lacking with random numbers",
        fix=("copy the file again, and compare its sha256 with the source's",),
        evidence=MEASURED,
    )


def read_drafter(folder: Path) -> tuple[Drafter, list[Finding]]:
    """A drafter's folder. Raises BadInput where it has no readable config.json."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise BadInput(f"drafter: {folder} is no folder on this host")
    config = read_config(path)
    try:
        weights = find_weights(folder)
    except BadInput as error:
        bare = Weights(folder=folder, kind="unreadable", files=(), tensors=None)
        return drafter_of(path, config, bare), [unreadable("drafter", error)]
    return drafter_of(path, config, weights), []


def drafter_of(path: Path, config: Mapping[str, Any], weights: Weights | None) -> Drafter:
    """The form of a config and its weights, with every contradiction."""
    tensors = weights.tensors if weights is not None else None
    shapes = None if tensors is None else {name: info.shape for name, info in tensors.items()}
    # Another kind of drafter has switches of its own, which are nothing to be told one by one.
    foreign = tuple(other_kinds(config, shapes) or unknown_switches(config))
    try:
        form, faults = checkpoints.examine(config, shapes, path)
    except BadInput as error:  # it looks like no layout at all
        form, faults = None, (str(error),)
    faults = tuple(fault for fault in faults if fault not in foreign)
    return Drafter(path, config, weights, form, faults, foreign)


def read_target(folder: Path) -> tuple[Target, list[Finding]]:
    """A target's folder: a Hugging Face checkpoint, its config alone, or the lab's trained layers."""
    if not folder.is_dir():
        raise BadInput(f"target: {folder} is no folder on this host")
    if (folder / LAB_SHAPE).is_file() and not (folder / "config.json").is_file():
        shape = read_config(folder / LAB_SHAPE)
        config = {new: shape[old] for old, new in LAB_KEYS.items() if old in shape}
        whole_config: dict[str, Any] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
    else:
        whole_config = read_config(folder / "config.json")
        inner = whole_config.get("text_config")
        config = dict(inner) if isinstance(inner, Mapping) else whole_config
    kinds = [
        str(kind)
        for block in (whole_config, config)
        for kind in (block.get("model_type"), *listed_names(block.get("architectures")))
        if kind
    ]
    findings: list[Finding] = []
    tensors: dict[str, TensorInfo] = {}
    has_weights = any(folder.glob("*.safetensors"))
    if has_weights:
        try:
            found = find_tensors(folder, PARTS.values())
            tensors = {part: found[name] for part, name in PARTS.items() if name in found}
        except BadInput as error:
            findings.append(unreadable("target", error))
            has_weights = False
    target = Target(
        folder=folder,
        config=config,
        kinds=tuple(dict.fromkeys(kinds)),
        tensors=tensors,
        examined=has_weights,
    )
    return target, findings


def states_declared(
    asked: Sequence[int] | None, captured: Mapping[str, Any] | None, path: Path
) -> tuple[tuple[int, ...] | None, str, list[Finding]]:
    """The canonical states of a dump's slots: asked for, as captured, or both where they agree."""
    listed = None if captured is None else captured.get("states")
    sound = isinstance(listed, list) and all(type(k) is int for k in listed)
    written = tuple(listed) if sound and listed else None
    given = None if asked is None else tuple(asked)
    if given is not None and written is not None and given != written:
        finding = Finding(
            name="data-states-disagree",
            severity="error",
            where=str(path),
            what=f"states={list(given)} was given, but capture.json says {list(written)}",
            effect="every aux state would be taken for another one",
            fix=(f"states=[{','.join(map(str, written))}]",),
            evidence=MEASURED,
        )
        return written, "capture.json", [finding]
    if given is not None:
        return given, "states=", []
    return written, "capture.json" if written else "nobody", []

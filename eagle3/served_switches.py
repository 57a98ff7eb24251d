"""What an engine does with each switch of a drafter, by its row of the table and by its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3.diagnosis.rewrites import program_lines
from eagle3.doctor.rope import ATTN_FACTOR, attention_factor, written_factor
from eagle3.doctor.server import flags_of
from eagle3.doctor.subject import LAYER, Drafter, EngineAsked
from eagle3.doctor.switches import line, removal
from eagle3.form import DrafterForm
from eagle3.serving import Serving, Unknown
from eagle3.wiring import (
    D2T,
    Biases,
    Embedding,
    FcInput,
    Feedback,
    Head,
    HeadInput,
    Parts,
    Residual,
    RopeChoice,
    Rotation,
    Window,
)

ENGINE_NAMES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "tensorrt_llm": "TensorRT-LLM",
    "llama_cpp": "llama.cpp",
}
KNOWS_NESTED = ("vllm",)  # speculators' layout
CLOSE = 1e-3  # relative; two factors on cos and sin that are one
INPUT_NORM = "input_layernorm"


@dataclass(frozen=True)
class ConfigLine:
    """A line of config.json: the value at a dotted path, or that the path is to be taken out."""

    path: str
    value: Any = None
    removed: bool = False

    @property
    def words(self) -> str:
        """'"model_type": "llama"'."""
        return removal(self.path) if self.removed else line(self.path, self.value)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One reason for which an engine does not start, or runs noise, and what mends it.

    What mends a switch, or the states, is asked of the fixes of that kind; everything else has lines of
    config.json or a program here, or says what is left.
    """

    why: str
    switch: str | None = None  # 'states', or the switch whose part it refuses
    config: tuple[ConfigLine, ...] = ()
    program: str | None = None  # over the checkpoint's tensors
    left: str | None = None  # where nothing that can be written mends it

    @property
    def lines(self) -> tuple[str, ...]:
        """What to write, a program whole."""
        return (*(one.words for one in self.config), *program_lines(self.program))


@dataclass(kw_only=True)
class Seen:
    """What is gathered: switches that are set, why, what stops the engine, what else is wrong."""

    switches: dict[str, Any] = field(default_factory=dict)
    because: dict[str, str] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def stop(self, why: str, **how: Any) -> None:
        """A reason for which the engine does not start; `how` as in `Stop`."""
        self.stops.append(Stop(why=why, **how))

    def put(self, name: str, value: Any, why: str) -> None:
        """A switch and why the engine runs it so."""
        self.switches[name] = value
        self.because[name] = why


def is_nested(config: Mapping[str, Any]) -> bool:
    """Whether a config is in speculators' layout."""
    return LAYER in config or "speculators_model_type" in config


def plain_drafter(config: Mapping[str, Any], form: DrafterForm | None) -> Drafter:
    """A config as the doctor's checks take it, without its weights."""
    return Drafter(Path("config.json"), config, None, form, (), ())


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What the switches follow from."""

    form: DrafterForm
    config: Mapping[str, Any]  # flat, as the engine sees it
    whole: Mapping[str, Any]  # as it stands in the file
    asked: EngineAsked
    serving: Serving
    engine: str
    drafter: Drafter | None

    @property
    def known(self) -> str:
        """How it is known what the engine does."""
        return f"({self.serving.evidence.value}: {self.serving.source})"

    @property
    def refuses(self) -> bool:
        """Whether a tensor that it has no place for stops it."""
        return self.serving.unknown is Unknown.refused


def switches(seen: Seen, of: Looked) -> None:
    """All of them, each by what the engine does."""
    residual(seen, of)
    fc_input(seen, of)
    feedback(seen, of)
    parts(seen, of)
    embedding(seen, of)
    head(seen, of)
    d2t(seen, of)
    deeper_norm(seen, of)
    rope(seen, of)
    window(seen, of)
    seen.put(
        "head_input", HeadInput.normed, f"{of.engine} always norms in front of the head {of.known}"
    )
    if of.serving.interleaved_rope:
        seen.put(
            "rotation",
            Rotation.interleaved,
            f"{of.engine} turns neighbouring numbers of a head together {of.known}",
        )


def residual(seen: Seen, of: Looked) -> None:
    """norm_before_residual, with the default that depends on the layout."""
    switch, default = of.serving.norm_before_residual, of.serving.speculators_residual_default
    stated = "norm_before_residual" in of.config
    on = switch.value(of.config)
    if is_nested(of.whole) and of.asked.name in KNOWS_NESTED and default is not None and not stated:
        why = (
            f"config.json does not state norm_before_residual, which {of.engine} then takes for "
            f"{str(default).lower()} in speculators' layout; its trainer's default is true, its config "
            "class's false"
        )
        if default != of.form.norm_before_residual.value:
            seen.problems.append(f"{why} {of.known}")
        on = default
    elif not switch.honoured:
        why = f"{of.engine} has no norm_before_residual: the residual is fc's output as it is"
    else:
        why = f"{of.engine} reads norm_before_residual={str(on).lower()}"
    seen.put("residual", Residual.normed if on else Residual.raw, f"{why} {of.known}")


def fc_input(seen: Seen, of: Looked) -> None:
    """The norms in front of fc; the file's tensors of a norm that is not run may stop the engine."""
    form, serving = of.form, of.serving
    whole, chunks = serving.norm_before_fc.value(of.config), serving.fc_norm.value(of.config)
    value = FcInput.whole if whole else FcInput.chunks if chunks else FcInput.raw
    if whole and chunks:
        seen.stop(
            f"{of.engine} is told to norm both the whole and each chunk in front of fc",
            switch="fc_input",
        )
    for name, has, on, switch in (
        ("norm_before_fc", form.norm_before_fc.value, whole, serving.norm_before_fc),
        ("fc_norm", form.fc_norm.value, chunks, serving.fc_norm),
    ):
        if has and not on:
            why = (
                "has no"
                if not switch.honoured
                else f"does not find {' or '.join(switch.places)} for"
            )
            seen.because["fc_input"] = (
                f"{of.engine} {why} {name} and leaves the norm out {of.known}"
            )
            # vLLM passes input_norm over once it knows the switch; every other stranger stops it.
            if of.refuses and not (name == "norm_before_fc" and switch.honoured):
                seen.stop(
                    f"{of.engine} has no place for the file's tensors of {name} {of.known}",
                    switch="fc_input",
                )
    why = f"{of.engine} norms {'the concatenation' if whole else 'each chunk'} in front of fc {of.known}"
    seen.put("fc_input", value, seen.because.get("fc_input", why))


def feedback(seen: Seen, of: Looked) -> None:
    """What the next step is fed; the key that says so means something else to SpecForge."""
    switch = of.serving.feedback_normed
    on = switch.value(of.config)
    if on:
        trap = "norm_output" in of.config and not of.form.feedback_normed.value
        why = f"{of.engine} reads norm_output as 'feed norm(y) to the next step'"
        why += ", which SpecForge writes for the norm in front of the head" if trap else ""
    elif switch.honoured:
        why = f"{of.engine} finds none of {', '.join(switch.places)} set"
    else:
        why = f"{of.engine} always feeds the state in front of the norm to the next step"
    seen.put("feedback", Feedback.normed if on else Feedback.raw, f"{why} {of.known}")


def parts(seen: Seen, of: Looked) -> None:
    """Biases and norms on q and k that the engine has no place for."""
    for name, switch in (
        ("attention_bias", "biases"),
        ("qk_norm", "qk_norm"),
        ("mlp_bias", None),
        ("fc_bias", None),
    ):
        if not getattr(of.form, name).value or getattr(of.serving, name).value(of.config):
            continue
        lost = f"{of.engine} has no place for the drafter's {name}"
        if of.refuses:
            other = f"serve it with an engine that has one, or train without {name}"
            seen.stop(
                f"{lost} and refuses its tensors {of.known}",
                switch=switch,
                left=None if switch else other,
            )
        elif switch is None:
            seen.problems.append(
                f"{lost}, drops it, and no switch of a wiring stands for that {of.known}"
            )
        else:
            dropped = Biases.first_dropped if switch == "biases" else Parts.dropped
            seen.put(switch, dropped, f"{lost} and drops it {of.known}")


def embedding(seen: Seen, of: Looked) -> None:
    """Whose table is read."""
    form, kept = of.form, of.serving.own_embedding_kept
    own, same_width = form.embedding.value == "own", form.hidden.value == form.target_hidden.value
    if form.embedding.value is None:
        seen.notes.append("whether the file has an embedding of its own was not examined")
    if not own and not same_width:
        seen.stop(
            f"the drafter is {form.hidden.value} wide and has no embedding; the target's, "
            f"{form.target_hidden.value} wide, does not fit, so the table stays random",
            left="put the embedding that it was trained with into the file (embed_tokens.weight)",
        )
    if own and (kept or not same_width):
        seen.switches["embedding"] = Embedding.own
        if same_width:
            seen.notes.append(f"embedding behind {of.engine}: {of.serving.embedding}")
    else:
        why = f"{of.engine} replaces the file's embedding by the target's {of.known}"
        seen.put("embedding", Embedding.target, why)


def head(seen: Seen, of: Looked) -> None:
    """Whose head is used, and whether its rows are draft tokens."""
    form, own = of.form, of.form.head.value != "target"
    reduced = form.draft_vocab.value != form.vocab.value
    if form.head.value is None:
        seen.notes.append("whether the file has a head of its own was not examined")
    if of.asked.name == "sglang":
        declared = of.config.get("draft_vocab_size")
        if declared is None:
            why = f"draft_vocab_size is null, so {of.engine} takes the target's head {of.known}"
            seen.put("head", Head.target, why)
            return
        if not own:
            seen.stop(
                f"the file has no lm_head.weight and config.json declares draft_vocab_size={declared}: "
                f"{of.engine} leaves the head random and says nothing {of.known}",
                switch="head",
            )
    elif not own and reduced:
        seen.stop(
            f"the file has no lm_head.weight: {of.engine} takes the target's head, whose rows are "
            f"target tokens, not draft tokens {of.known}",
            switch="head",
        )
    seen.switches["head"] = Head.own if own else Head.target


def d2t(seen: Seen, of: Looked) -> None:
    """Offsets everywhere; nothing where the file has no table."""
    reduced = of.form.draft_vocab.value != of.form.vocab.value
    drafter = of.drafter
    if drafter is None or not drafter.examined:
        return
    if "d2t" not in drafter.tensors:
        if reduced:
            why = f"the file has no d2t: {of.serving.d2t_missing}"
            seen.put("d2t", D2T.identity, f"{why} {of.known}")
            seen.problems.append(f"{why} {of.known}")
        return
    if of.asked.name == "vllm" and not reduced:
        values = drafter.values("d2t")
        if values is not None and values.any():
            why = f"{of.engine} reads no d2t where the draft vocabulary is the target's"
            seen.put("d2t", D2T.identity, f"{why} (read: llama_eagle3.py::compute_logits)")


def deeper_norm(seen: Seen, of: Looked) -> None:
    """The name under which the norm of the layers behind the first is looked for."""
    count, wanted = of.form.num_layers.value, of.serving.deeper_norm
    if count == 1 or wanted is None:
        return
    there = of.drafter.tensors if of.drafter is not None and of.drafter.examined else None
    names = [f"layers.{i}.{wanted}.weight" for i in range(1, count)]
    # Everybody writes input_layernorm; only a file that was looked into can be told otherwise.
    lacking = [n for n in names if (n not in there if there is not None else wanted != INPUT_NORM)]
    if lacking:
        seen.put(
            "deeper_norm",
            Parts.dropped,
            f"{of.engine} looks for {', '.join(lacking)}, which the file does not have, and norms by "
            f"ones there {of.known}",
        )


def rope(seen: Seen, of: Looked) -> None:
    """What becomes of yarn's factor on cos and sin."""
    own = of.form.rope.value
    if own.kind == "dynamic":
        seen.notes.append(
            "dynamic rope scaling is another table in every engine; up to the trained length it is "
            "taken for unscaled here"
        )
    if own.kind != "yarn":
        return
    scaling = dict(own.scaling)
    factor = float(scaling.get("factor", 1))
    plain = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    trained, run = attention_factor(own), plain
    sglang = of.asked.name == "sglang"
    if of.serving.yarn_mscale:
        # SGLang reads attn_factor, and no attention_factor.
        kept = tuple((k, v) for k, v in own.scaling if not (sglang and k == "attention_factor"))
        run = attention_factor(replace(own, scaling=kept))
    if sglang or not of.serving.yarn_mscale:  # newer releases of vLLM do not read attn_factor
        run *= written_factor(plain_drafter(of.config, None))
    if math.isclose(run, trained, rel_tol=CLOSE):
        return
    why = (
        f"{of.engine} scales yarn's cos and sin by {run:.3f}, training by {trained:.3f}: "
        + (
            f"it does not read {'attention_factor' if 'attention_factor' in scaling else 'mscale'}"
            if math.isclose(run, plain, rel_tol=CLOSE)
            else f"it multiplies by {ATTN_FACTOR}"
        )
        + f" {of.known}"
    )
    if math.isclose(run, plain, rel_tol=CLOSE):
        seen.put("rope", RopeChoice.no_mscale, why)
    else:
        seen.problems.append(f"{why}; no switch of a wiring stands for that")


def window(seen: Seen, of: Looked) -> None:
    """A sliding window that is taken from a flag, from the config, or by nobody."""
    widths = sorted({w for w in of.form.windows.value if w is not None})
    given = flags_of(of.asked.flags).get("speculative_draft_window_size")
    if of.asked.name == "sglang":
        known = "(read: models/llama_eagle3.py)"
        if given is None and widths:
            why = f"{of.engine} takes a drafter's window from --speculative-draft-window-size alone"
            seen.put("window", Window.none, f"{why} {known}")
        elif given is not None and (len(widths) != 1 or None in of.form.windows.value):
            seen.problems.append(
                f"{of.engine} is told to give every layer a window of {given}, which no switch of a "
                f"wiring stands for {known}"
            )
        elif given is not None and given not in (widths[0], widths[0] - 1):
            seen.problems.append(
                f"{of.engine} is told a window of {given}, the drafter was trained with "
                f"{widths[0]} {known}"
            )
    elif widths and of.asked.name != "vllm":
        seen.notes.append(f"whether {of.engine} reads the drafter's sliding window is not known")

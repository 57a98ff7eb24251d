"""What keeps an engine from starting with a drafter: its config, its layers, its names, fc's width.

A part that the engine refuses to load stops it too: see `eagle3.served_switches`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from eagle3.diagnosis.rewrites import renamed_block
from eagle3.doctor.findings import Finding
from eagle3.doctor.server import engine_aux, llama_cpp_config, sglang_config
from eagle3.doctor.subject import LAYER
from eagle3.served_switches import (
    KNOWS_NESTED,
    ConfigLine,
    Looked,
    Seen,
    Stop,
    is_nested,
    plain_drafter,
)

LLAMA = ConfigLine("architectures", ["LlamaForCausalLMEagle3"])
WIDTH, ROWS = "target_hidden_size", "draft_vocab_size"


def start_up(seen: Seen, of: Looked) -> Looked:
    """All of it. What comes back has the lines written that mend the config: so the switches that are
    asked of it are those that the engine runs once it starts.
    """
    of = refused_config(seen, of)
    layers(seen, of)
    blocks(seen, of)
    width(seen, of)
    return of


def refused_config(seen: Seen, of: Looked) -> Looked:
    """What the engine's start-up refuses in a config; one line may uncover the next that it lacks."""
    told: set[str] = set()
    while new := [stop for stop in config_stops(of) if stop.why not in told]:
        seen.stops += new
        told |= {stop.why for stop in new}
        lines = [line for stop in new for line in stop.config]
        of = replace(of, config=written(of.config, lines))
    return of


def written(config: Mapping[str, Any], lines: Iterable[ConfigLine]) -> dict[str, Any]:
    """A config as the engine sees it, in which the layer's own block is laid open."""
    now = dict(config)
    for line in lines:
        key = line.path.rpartition(".")[2]
        if line.removed:
            now.pop(key, None)
        else:
            now[key] = line.value
    return now


def config_stops(of: Looked) -> Iterator[Stop]:
    """What it refuses of a config as it stands."""
    named = of.asked.name
    for finding in found_by_doctor(of):
        lines = lines_for(finding, of)
        left = None if lines else "; ".join(finding.fix)
        yield Stop(why=finding.what, config=lines, left=left)
    nested = is_nested(of.whole)
    if named == "vllm" and not nested and plain_drafter(of.config, of.form).architecture is None:
        yield Stop(
            why="config.json names no architectures, by which vLLM picks the class", config=(LLAMA,)
        )
    plain = named in ("sglang", "vllm") and of.serving.drafters == ("*",)
    if plain and of.config.get(WIDTH, 0) is None:
        yield Stop(
            why=f"config.json has target_hidden_size null: {of.engine} multiplies it by the number of "
            "aux states and stops (read: models/llama_eagle3.py)",
            config=(target_width(of),),
        )


def found_by_doctor(of: Looked) -> Iterator[Finding]:
    """Errors of a config, as doctor finds them."""
    drafter = plain_drafter(of.config, of.form)
    found: Iterator[Finding] = iter(())
    if of.asked.name == "sglang":
        found = sglang_config(drafter, of.serving, "config.json")
    elif of.asked.name == "llama_cpp" and of.form.num_layers.value == 1:  # else `layers` says it
        found = llama_cpp_config(drafter, "config.json")
    return (finding for finding in found if finding.severity == "error")


def lines_for(finding: Finding, of: Looked) -> tuple[ConfigLine, ...]:
    """The lines that mend what doctor found, with this drafter's own numbers."""
    form = of.form
    rows = ConfigLine(ROWS, form.draft_vocab.value)
    # Null stands for the target's head.
    stated = ConfigLine(ROWS, None) if form.head.value == "target" else rows
    recognised = [rows] if ROWS not in of.config else []
    if of.config.get("num_hidden_layers") != form.num_layers.value:
        recognised.append(ConfigLine("num_hidden_layers", form.num_layers.value))
    return {
        "architecture-unknown": (LLAMA,),
        "model-type-missing": (ConfigLine("model_type", "llama"),),
        "head-tied": (ConfigLine("tie_word_embeddings", False),),
        "draft-vocab-not-stated": (stated,),
        "not-recognised": tuple(recognised),
    }.get(finding.name, ())


def target_width(of: Looked) -> ConfigLine:
    """The target's width, which is the drafter's own where nothing states it."""
    theirs = of.form.target_hidden.value
    if theirs != of.form.hidden.value:
        return ConfigLine(WIDTH, theirs)
    return ConfigLine(f"{inner(of)}{WIDTH}", removed=True)


def inner(of: Looked) -> str:
    """The prefix of the decoder layer's keys in the file, which holds null widths and fc's count."""
    return f"{LAYER}." if is_nested(of.whole) and of.asked.name in KNOWS_NESTED else ""


def layers(seen: Seen, of: Looked) -> None:
    """More layers than it runs."""
    most, count = of.serving.max_layers, of.form.num_layers.value
    if most is not None and count > most:
        seen.stop(
            f"the drafter has {count} layers, {of.engine} runs {most} {of.known}",
            left="serve it with SGLang 0.5.12 or newer, or vLLM",
        )


def blocks(seen: Seen, of: Looked) -> None:
    """How the first layer's tensors are called, which some releases do not know."""
    names = of.drafter.weights.tensors if of.drafter and of.drafter.weights else None
    if names is None:
        names = {"layers.0.": None} if of.form.layout.value == "speculators" else None  # type: ignore[dict-item]
    if names is None or any(name.startswith(of.serving.blocks) for name in names):
        return
    have = [b for b in ("midlayer.", "layers.0.") if any(name.startswith(b) for name in names)]
    seen.stop(
        f"the first layer's tensors are called {' and '.join(f'{b}*' for b in have) or 'otherwise'}; "
        f"{of.engine} knows only {' and '.join(f'{b}*' for b in of.serving.blocks)} and leaves the "
        f"layer at random values {of.known}",
        program=renamed_block(of.serving.blocks[0]),
    )


def width(seen: Seen, of: Looked) -> None:
    """How many chunks the engine's fc takes, and whether it applies fc at all."""
    takes, serving = of.form.num_aux.value, of.serving
    if of.asked.name in ("sglang", "vllm"):
        there, place = engine_aux(of.config, serving.num_aux)
        if there != takes:
            seen.stop(
                f"fc takes {takes} aux states, {of.engine} builds it for {there} ({place}): it stops "
                f"at a shape error {of.known}",
                **stated_count(of, place),
            )
    fed = takes * of.form.target_hidden.value
    if serving.fc_by_width and fed == of.form.hidden.value:
        seen.stop(
            f"fc takes {fed} numbers and gives as many: {of.engine} applies it only where the two "
            f"differ, so the drafter is fed the target's state without fc {of.known}",
            left="serve it with vLLM, which always applies fc; or train on more than one aux state",
        )


def stated_count(of: Looked, place: str) -> dict[str, Any]:
    """What tells the engine how many chunks fc takes: the ids that it counted, a line, or nothing."""
    places = of.serving.num_aux
    counts = [path for path in places if not path.endswith("_ids")]
    if counts and not place.endswith("_ids"):
        return {"config": (ConfigLine(inner(of) + counts[0], of.form.num_aux.value),)}
    if places:
        return {"switch": "states"}
    return {"left": "serve it with a newer release: that one takes three aux states only"}

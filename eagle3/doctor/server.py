"""The drafter's config and the server's flags as the engine's start-up takes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from eagle3.doctor.findings import MEASURED, Finding
from eagle3.doctor.flat import flattened
from eagle3.doctor.subject import LAYER, Drafter, Engine, Subject
from eagle3.doctor.switches import at, line
from eagle3.serving import Serving

SGLANG_READ = "read: SGLang 0.5.23"
HOOK = "read: srt/arg_groups/speculative_hook.py of 0.5.23"
SHORT = {
    "num_steps": "speculative_num_steps",
    "steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "eagle_topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
    "draft_tokens": "speculative_num_draft_tokens",
    "algorithm": "speculative_algorithm",
}
# What is checked here of each server's flags; a name near one of them is taken for a slip.
CHECKED = {
    "sglang": (
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_algorithm",
        "speculative_draft_window_size",
        "speculative_token_map",
        "speculative_use_rejection_sampling",
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
    ),
    "vllm": ("method", "num_speculative_tokens", "speculative_config"),
    "tensorrt_llm": ("eagle3_layers_to_capture",),
    "llama_cpp": (),
}
NEAR = 0.8  # of difflib's ratio: num_stps and topkk are within it, tp_size and dtype are not
NUMBERS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "num_speculative_tokens",
)


def check(subject: Subject) -> Iterator[Finding]:
    """All of it."""
    engine = subject.engine
    if engine is None:
        return
    yield from checkout(engine)
    if subject.drafter is not None:
        yield from layout(subject, subject.drafter, engine)
        yield from fc(subject.drafter, engine)
    flags = flags_of(engine.asked.flags)
    yield from slips(engine)
    yield from not_numbers(flags, engine)
    if engine.name == "sglang":
        yield from sglang_flags(flags, subject.drafter)
    if engine.name == "vllm":
        yield from vllm_flags(flags)


def checkout(engine: Engine) -> Iterator[Finding]:
    """A checkout whose capture code is no release's, or another release's than was named."""
    found, version = engine.checkout, engine.asked.version
    if found is None:
        return
    if found.ecosystem != engine.name:
        yield Finding(
            name="checkout-of-another-engine",
            severity="error",
            where=str(found.package),
            what=f"engine={engine.name}, but the checkout is {found.ecosystem}'s",
            effect="everything that is said of layer ids would be of the wrong engine",
            fix=(f"engine={found.ecosystem}",),
            evidence=MEASURED,
        )
    elif not found.known:
        yield Finding(
            name="checkout-unknown",
            severity="warning",
            where=str(found.package),
            what=found.answer,
            effect="what its layer ids mean cannot be told from a release; an acceptance that changes "
            "with this code may come from here",
            fix=("probe it: capture the states that it feeds, and compare them with the target's",),
            evidence=MEASURED,
        )
    elif version is not None and version not in found.releases:
        yield Finding(
            name="checkout-of-another-release",
            severity="warning",
            where=str(found.package),
            what=f"engine_version={version}, but {found.answer}",
            effect="layer ids may mean something else there than in the release that was named",
            fix=(f"engine_version={found.releases[-1]}",),
            evidence=MEASURED,
        )


def layout(subject: Subject, drafter: Drafter, engine: Engine) -> Iterator[Finding]:
    """A config that the engine cannot make a drafter of."""
    where = str(drafter.config_path)
    if drafter.nested and engine.name in ("sglang", "tensorrt_llm", "llama_cpp"):
        read = engine.name == "sglang"
        yield Finding(
            name="config-nested",
            severity="error",
            where=where,
            what=f"config.json is in speculators' layout; {engine.name} knows neither {LAYER} nor "
            f"architectures={drafter.config.get('architectures')}",
            effect="it does not load as it stands; a flattened copy is needed",
            fix=flattened(subject, drafter, engine),
            evidence=f"{SGLANG_READ}, which has no speculators_* key" if read else "inferred",
        )
        return
    if drafter.nested:
        return
    if engine.name == "sglang":
        if engine.serving is not None:
            yield from sglang_config(drafter, engine.serving, where)
    elif engine.name == "vllm" and drafter.architecture is None:
        yield Finding(
            name="architecture-missing",
            severity="error",
            where=where,
            what="config.json names no architectures, by which vLLM picks the drafter's class",
            effect="the server does not start",
            fix=('"architectures": ["LlamaForCausalLMEagle3"]',),
            evidence="inferred",
        )
    if engine.name == "llama_cpp":
        yield from llama_cpp_config(drafter, where)


def sglang_config(drafter: Drafter, serving: Serving, where: str) -> Iterator[Finding]:
    """What SGLang's start-up asks of a flat config."""
    config, known = drafter.config, serving.architectures
    if drafter.architecture not in known:
        yield Finding(
            name="architecture-unknown",
            severity="error",
            where=where,
            what=f"architectures is {config.get('architectures')}; SGLang's EAGLE-3 drafters are "
            f"{' and '.join(known)}",
            effect="it does not load, or loads as another model",
            fix=('"architectures": ["LlamaForCausalLMEagle3"]',),
            evidence=f"{SGLANG_READ}, EntryClass of models/*eagle3.py",
        )
    if not config.get("model_type"):
        yield Finding(
            name="model-type-missing",
            severity="error",
            where=where,
            what="config.json has no model_type, so transformers cannot tell its class",
            effect="the server does not start",
            fix=('"model_type": "llama"',),
            evidence="inferred",
        )
    tied = config.get("tie_word_embeddings") is True
    if tied:
        yield Finding(
            name="head-tied",
            severity="error",
            where=f"{where}: tie_word_embeddings",
            what="tie_word_embeddings is true: SGLang takes the embedding for the head, not "
            "lm_head.weight",
            effect="logits are of the wrong words, or of the wrong number of them: acceptance about 0",
            fix=('"tie_word_embeddings": false',),
            evidence=f"{SGLANG_READ}, models/llama_eagle3.py",
        )
    plain = drafter.architecture in known and serving.drafters == ("*",)
    if "draft_vocab_size" not in config and not tied and plain:
        yield Finding(
            name="draft-vocab-not-stated",
            severity="error",
            where=where,
            what="config.json has no draft_vocab_size; SGLang reads it without a default",
            effect="the server stops with an AttributeError",
            fix=('"draft_vocab_size": null', "or the number of lm_head's rows"),
            evidence=f"{SGLANG_READ}, models/llama_eagle3.py",
        )


def llama_cpp_config(drafter: Drafter, where: str) -> Iterator[Finding]:
    """llama.cpp tells an EAGLE-3 drafter by two keys."""
    if "draft_vocab_size" not in drafter.config or drafter.config.get("num_hidden_layers") != 1:
        yield Finding(
            name="not-recognised",
            severity="error",
            where=where,
            what="llama.cpp's converter takes a checkpoint for an EAGLE-3 drafter where config.json has "
            "draft_vocab_size and num_hidden_layers is 1",
            effect="it is converted as an ordinary model",
            fix=('"draft_vocab_size": …', '"num_hidden_layers": 1'),
            evidence="read: conversion/llama.py",
        )


def fc(drafter: Drafter, engine: Engine) -> Iterator[Finding]:
    """How many aux states the engine's fc takes, against the file's, and whether fc is applied."""
    serving, sizes = engine.serving, drafter.sizes
    width, hidden, takes = sizes.target_hidden, sizes.hidden, sizes.num_aux
    if serving is None or width is None or takes is None:
        return
    evidence = f"{serving.evidence.value}: {serving.source}"
    if engine.name != "llama_cpp" and not (serving.num_aux == () and takes == 3):
        there, place = engine_aux(drafter.flat, serving.num_aux)
        if there != takes and engine.name in ("sglang", "vllm"):
            yield Finding(
                name="fc-width-not-stated",
                severity="error",
                where=str(drafter.config_path),
                what=f"fc takes {takes} aux states, {engine.words} builds it for {there} ({place})",
                effect="the server stops at a shape error",
                fix=(
                    line(serving.num_aux[0], takes)
                    if serving.num_aux and not serving.num_aux[0].endswith("_ids")
                    else f"write {takes} layer ids where it looks for them",
                )
                if serving.num_aux
                else (f"that release takes three aux states only, not {takes}",),
                evidence=evidence,
            )
    if serving.fc_by_width and takes * width == hidden:
        yield Finding(
            name="fc-skipped",
            severity="error",
            where=drafter.where,
            what=f"fc takes {takes * width} numbers and gives {hidden}: {engine.words} applies it only "
            "where the two differ",
            effect="the target's state goes into the drafter without fc: acceptance about 0",
            fix=("train on more than one aux state", "or serve with vLLM, which always applies fc"),
            evidence=evidence,
        )


def engine_aux(config: Mapping[str, Any], places: tuple[str, ...]) -> tuple[int, str]:
    """The number of aux states that an engine takes from a config, and from where."""
    for path in places:
        value = at(dict(config), path)
        if type(value) is int and value > 0:
            return value, path
        if isinstance(value, list) and value:
            return len(value), path
    return 3, "its default"


def flags_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by their full names with underscores; vLLM's speculative_config is laid open."""
    flags: dict[str, Any] = {}
    for key, value in given.items():
        name = key.strip().lstrip("-").replace("-", "_")
        if name == "speculative_config" and isinstance(value, Mapping):
            flags.update(value)
        else:
            flags[SHORT.get(name, name)] = value
    return flags


def slips(engine: Engine) -> Iterator[Finding]:
    """Flags whose names are near one that is checked, and are none."""
    for name, near in unknown_flags(engine):
        if near is not None:
            yield Finding(
                name="flag-unknown",
                severity="warning",
                where=f"engine_flags: {name}",
                what=f"there is no flag {name} among those that are checked; {near} is near it",
                effect="nothing was checked for it, and the server may refuse it",
                fix=(f"{near}={engine.asked.flags[name]}",),
                evidence=MEASURED,
            )


def not_known(engine: Engine) -> Iterator[str]:
    """Flags of which nothing is known here."""
    for name, near in unknown_flags(engine):
        if near is None:
            yield f"the flag {name}: nothing is known of it here"


def unknown_flags(engine: Engine) -> Iterator[tuple[str, str | None]]:
    """Flags as they were given that are not checked, with the nearest name of one that is."""
    checked = CHECKED[engine.name]
    known = {full: full for full in checked}
    known |= {short: full for short, full in SHORT.items() if full in checked}
    for name in engine.asked.flags:
        plain = name.strip().lstrip("-").replace("-", "_")
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=1, cutoff=NEAR)
            yield name, near[0] if near else None


def not_numbers(flags: dict[str, Any], engine: Engine) -> Iterator[Finding]:
    """Flags that must be positive whole numbers; those that are not are taken out."""
    for name in NUMBERS:
        value = flags.get(name)
        if value is not None and (type(value) is not int or value < 1):
            del flags[name]
            yield Finding(
                name="flag-no-number",
                severity="error",
                where=f"engine_flags: {name}",
                what=f"{name} is {value!r}, expected a positive whole number",
                effect=f"{engine.name} does not start",
                fix=(f"{name}=3",),
                evidence=MEASURED,
            )


def sglang_flags(flags: Mapping[str, Any], drafter: Drafter | None) -> Iterator[Finding]:
    """What SGLang's start-up does with steps, topk and draft tokens."""
    algorithm = flags.get("speculative_algorithm")
    if algorithm is not None and algorithm != "EAGLE3":
        yield flag(
            "speculative_algorithm",
            "error",
            f"the algorithm is {algorithm}, the drafter is EAGLE-3's",
            "aux states are captured for EAGLE3 only: fc meets one state in place of its own, and the "
            "server stops, or drafts noise",
            ("--speculative-algorithm EAGLE3",),
            "inferred",
        )
    steps, topk = flags.get("speculative_num_steps"), flags.get("speculative_eagle_topk")
    tokens = flags.get("speculative_num_draft_tokens")
    if steps is None:
        if topk is not None or tokens is not None:
            yield flag(
                "speculative_num_steps",
                "error",
                "topk or draft tokens are set without steps",
                "the server stops at an assertion; without all three it chooses them itself",
                (
                    "--speculative-num-steps 3 --speculative-eagle-topk 1 "
                    "--speculative-num-draft-tokens 4",
                ),
            )
    elif topk == 1 and tokens is not None and tokens != steps + 1:
        yield flag(
            "speculative_num_draft_tokens",
            "warning",
            f"with topk=1 it is a chain of {steps + 1} tokens, not {tokens}; SGLang sets it to "
            f"{steps + 1} with a line in its log",
            f"at most {steps + 1} tokens are accepted; 'of {tokens}' is not what ran",
            (f"--speculative-num-draft-tokens {steps + 1}",),
        )
    elif topk is not None and topk > 1 and tokens is not None:
        yield from tree_flags(steps, topk, tokens)
    yield from sampling_flags(flags, topk, drafter)


def tree_flags(steps: int, topk: int, tokens: int) -> Iterator[Finding]:
    """A tree has topk tokens at its first step and topk² at each further one."""
    most = 1 + topk + (steps - 1) * topk * topk
    if tokens > most:
        yield flag(
            "speculative_num_draft_tokens",
            "error",
            f"{tokens} draft tokens are asked for, a tree of {steps} steps and topk {topk} has {most}",
            "the server stops while it builds the first tree",
            (f"--speculative-num-draft-tokens {most}",),
            "read: srt/speculative/eagle_utils.py::organize_draft_results of 0.5.23",
        )
    elif tokens < steps + 1:
        yield flag(
            "speculative_num_draft_tokens",
            "warning",
            f"{tokens} draft tokens hold no chain of {steps} steps",
            f"at most {tokens} tokens are accepted, so the last steps are drafted in vain",
            (
                f"--speculative-num-steps {tokens - 1}",
                f"or --speculative-num-draft-tokens {steps + 1}",
            ),
            "read: srt/speculative/eagle_utils.py::organize_draft_results of 0.5.23",
        )


def sampling_flags(
    flags: Mapping[str, Any], topk: int | None, drafter: Drafter | None
) -> Iterator[Finding]:
    """Flags that are ignored or that need what this drafter does not have."""
    window = flags.get("speculative_draft_window_size")
    form = drafter.form if drafter is not None else None
    if window and form is not None and not any(form.windows.value):
        yield flag(
            "speculative_draft_window_size",
            "warning",
            f"a window of {window} is set, and the drafter was trained without one",
            f"as trained up to {window} tokens of context, falling behind it",
            ("leave --speculative-draft-window-size out",),
            "inferred",
        )
    if flags.get("speculative_token_map"):
        yield flag(
            "speculative_token_map",
            "warning",
            "a token map is given, but EAGLE3 drafters have their own d2t: it is ignored",
            "none; the map that counts is the file's d2t",
            ("leave --speculative-token-map out",),
            "read: srt/speculative/eagle_worker_v2.py::init_token_map of 0.5.23",
        )
    if flags.get("speculative_use_rejection_sampling"):
        if topk is not None and topk != 1:
            yield flag(
                "speculative_use_rejection_sampling",
                "error",
                f"rejection sampling needs topk=1, not {topk}",
                "the server does not start",
                ("--speculative-eagle-topk 1",),
            )
        sizes = drafter.sizes if drafter is not None else None
        if sizes is not None and sizes.draft_vocab != sizes.vocab:
            yield flag(
                "speculative_use_rejection_sampling",
                "error",
                f"rejection sampling needs one vocabulary, the drafter has {sizes.draft_vocab} of "
                f"{sizes.vocab} tokens",
                "the server does not start",
                ("leave --speculative-use-rejection-sampling out",),
                "read: srt/speculative/eagle_worker_v2.py of 0.5.23",
            )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = flags.get(name)
        if isinstance(value, int | float) and value < 1:
            yield flag(
                name,
                "warning",
                f"{name} is {value}: tokens are accepted that the target would not have chosen",
                "accept length is higher than the drafter's own, and the text is another one",
                (f"--{name.replace('_', '-')} 1.0",),
                "inferred",
            )


def vllm_flags(flags: Mapping[str, Any]) -> Iterator[Finding]:
    """vLLM's speculative_config."""
    method = flags.get("method")
    if method is not None and method != "eagle3":
        yield flag(
            "method",
            "error",
            f"the method is {method}, the drafter is EAGLE-3's",
            "aux states are captured for eagle3 only; it stops, or drafts noise",
            ('"method": "eagle3"',),
            "inferred",
        )


def flag(
    name: str,
    severity: str,
    what: str,
    effect: str,
    fix: tuple[str, ...],
    evidence: str = HOOK,
) -> Finding:
    """A finding on one of the server's flags."""
    return Finding(
        name="flag-" + name.removeprefix("speculative_").replace("_", "-"),
        severity=severity,
        where=f"engine_flags: {name}",
        what=what,
        effect=effect,
        fix=fix,
        evidence=evidence,
    )

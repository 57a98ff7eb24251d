"""The exact lines that mend a cause, kind by kind, for the engine that is asked about.

A fix is lines of config.json with the whole config that they lead to, a flag, or a program over the
checkpoint's tensors (`eagle3.diagnosis.rewrites`); where an engine cannot express what was trained, it
says what is left. The same states in other engines are in `eagle3.diagnosis.elsewhere`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from eagle3.conventions import Rule
from eagle3.diagnosis import config_fixes, rewrites, tensor_fixes
from eagle3.diagnosis.elsewhere import elsewhere
from eagle3.diagnosis.fix import CODE, Case, Fix, needed
from eagle3.diagnosis.kinds import NOT_SERVED
from eagle3.diagnosis.patched_config import write_ids
from eagle3.doctor.findings import in_words, listed
from eagle3.doctor.subject import EngineAsked
from eagle3.engine_patches import unpatched, way
from eagle3.engines import ids_to_write
from eagle3.errors import BadInput
from eagle3.form import DrafterForm, Rope
from eagle3.served import ServedWiring, dated
from eagle3.served_switches import ENGINE_NAMES, KNOWS_NESTED, is_nested
from eagle3.wiring import Token, Wiring

__all__ = ["MAKERS", "Fix", "elsewhere", "fixes_for", "flat_copy", "patched_config"]


def fixes_for(
    kind: str,
    trained: Wiring,
    served: ServedWiring | None,
    *,
    form: DrafterForm,
    config: Mapping[str, Any],
    asked: EngineAsked | None,
    num_layers: int,
    stored: Sequence[int],
    target_rope: Rope | None = None,
) -> tuple[Fix, ...]:
    """What to write for the engine asked about, so that it runs what was trained.

    `trained` is resolved by the form; `stored` are the canonical states that the data holds. Without an
    engine only what holds for every one is said. A config that is to be mended in several ways is
    handed from one kind's fix to the next. Raises BadInput for what is neither a kind of wiring nor an
    engine that does not start (what to do about the others is said where they are found, in
    `eagle3.diagnosis.beyond`), and as `eagle3.served.served_wiring` does.
    """
    if kind not in MAKERS:
        raise BadInput(f"no line mends the kind '{kind}'; known are {', '.join(MAKERS)}")
    case = Case(
        trained=trained,
        served=served,
        form=form,
        config=config,
        asked=None if asked is None else dated(asked),
        num_layers=num_layers,
        stored=tuple(stored),
        target_rope=target_rope,
    )
    return MAKERS[kind](case)


def patched_config(
    kinds: Sequence[str],
    trained: Wiring,
    served: ServedWiring | None,
    *,
    config: Mapping[str, Any],
    **asked: Any,
) -> Mapping[str, Any] | None:
    """The config.json to write, whole: with the first possible fix of each kind, in one layout.

    What makes the engine start comes first. In a layout that the engine does not load it is that of the
    flat copy (`flat_copy`). None where nothing changes it.
    """
    copied = flat_copy(config, form=asked["form"], asked=asked["asked"])
    now = config if copied is None or copied.config is None else copied.config
    for kind in sorted(kinds, key=lambda kind: kind != NOT_SERVED):
        fixes = fixes_for(kind, trained, served, config=now, **asked)
        now = next((fix.config for fix in fixes if fix.possible and fix.config is not None), now)
    return None if now is config else now


def flat_copy(
    config: Mapping[str, Any], *, form: DrafterForm, asked: EngineAsked | None
) -> Fix | None:
    """The step that comes before all others where the engine does not load this layout, else None.

    The other fixes then are changes of that copy, and `patched_config` is it with all of them.
    """
    if asked is None or not is_nested(config) or asked.name in KNOWS_NESTED:
        return None
    case = Case(
        trained=Wiring.of_states(()),
        served=None,
        form=form,
        config=config,
        asked=dated(asked),
        num_layers=0,
        stored=(),
        target_rope=None,
    )
    return case.fix(
        "copy the drafter, with patched/config.json of the run's folder: the flat layout",
        config=case.edit().config,
        note="; ".join(copy_notes(asked.name, form)),
    )


def copy_notes(engine: str, form: DrafterForm) -> list[str]:
    """Why there has to be a flat copy, and what of a drafter it does not hold."""
    notes = [f"{ENGINE_NAMES[engine]} does not load speculators' layout"]
    widths = sorted({width for width in form.windows.value if width is not None})
    if widths and engine == "sglang":
        notes.append(f"its window is a flag: --speculative-draft-window-size {widths[0]}")
    elif widths:
        notes.append("the flat layout has no sliding window, which this drafter was trained with")
    return notes


# What makes an engine start.


def of_stops(case: Case) -> tuple[Fix, ...]:
    """Lines and programs that make it start, or what is left; states and switches have their own."""
    stops = case.served.stops if case.served is not None else ()
    others = [stop for stop in stops if stop.switch is None]
    left = [stop.left or CODE for stop in others if not stop.lines]
    if left:
        return (case.fix(possible=False, left="; ".join(dict.fromkeys(left))),)
    if not others:
        return ()
    edit = case.edit()
    for one in (one for stop in others for one in stop.config):
        if one.removed:
            edit.remove(one.path)
        else:
            edit.put(one.path, one.value)
    programs = list(dict.fromkeys(stop.program for stop in others if stop.program))
    lines = [line for program in programs[:-1] for line in rewrites.program_lines(program)]
    return (case.edited(edit, *lines, snippet=programs[-1] if programs else None),)


# The states and their order.


def of_states(case: Case) -> tuple[Fix, ...]:
    """The ids of the trained states, where this engine looks for them."""
    rule, wanted = case.rule, case.trained.states()
    if rule is None:
        return ()
    known: dict[str, Any] = {"evidence": rule.evidence.value, "source": rule.source}
    chunks = rewrites.ascending_chunks(wanted) if list(wanted) != sorted(wanted) else None
    written = ids_to_write(rule, sorted(wanted), case.num_layers)
    if not written.possible:
        patch = needed(rule.patch)
        ways = [f"the state can be had there with {patch['needs']}"] if rule.patch else []
        return (
            case.fix(
                possible=False,
                left=f"{in_words(sorted(wanted))} cannot be fed there: {written.why}; "
                + "; or ".join([*ways, "serve it with another engine", trained_again(case, rule)]),
                note=patch["note"],
                **known,
            ),
        )
    assert case.asked is not None
    had = way(rule, case.asked.version, case.asked.engine_class)
    more = {**needed(written.needs, had), "snippet": chunks, **known}
    if written.ids is None:
        return (case.fix(f"nothing: {written.why}", **more),)
    if rule.setting is not None:
        return (case.fix(f"{rule.setting.split()[0]}: {list(written.ids)}", **more),)
    edit = case.edit()
    counts = case.serving.num_aux if case.serving is not None else ()
    write_ids(edit, rule.places[0].path, written.ids, counts)
    fix = case.edited(edit, **more)
    newer = unpatched(rule, case.asked.engine_class, sorted(wanted), case.num_layers)
    if written.needs and newer is not None:
        other = f"or, with no patch, {newer[0]} or newer: {listed(newer[1])}"
        fix = replace(fix, lines=(*fix.lines, other))
    return (fix,)


def of_order(case: Case) -> tuple[Fix, ...]:
    """fc's chunks in the order in which engines feed them, and the ids if they are others."""
    wanted = case.trained.states()
    if list(wanted) != sorted(wanted):
        chunks = rewrites.ascending_chunks(wanted)
        fed = case.served.states if case.served is not None else None
        if case.rule is None or fed == tuple(sorted(wanted)):
            known = (
                {"evidence": case.rule.evidence.value, "source": case.rule.source}
                if case.rule
                else {}
            )
            return (case.fix(snippet=chunks, **known),)
    return of_states(case)


def trained_again(case: Case, rule: Rule) -> str:
    """Which of the stored states the drafter could be trained on again, with their ids there."""
    count, wanted = len(case.trained.states()), set(case.trained.states())
    best: tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]] | None = None
    for states in combinations(sorted(set(case.stored)), count):
        written = ids_to_write(rule, states, case.num_layers)
        if not written.possible or written.needs:
            continue
        rank = (-len(wanted & set(states)), case.num_layers in states, states)
        if best is None or rank < best[0]:
            best = rank, states, written.ids or ()
    if best is None:
        return (
            f"train again on states that it captures; of what the data holds ({in_words(case.stored)}) "
            f"no {count} can be had there, so they have to be captured first"
        )
    named = f", with the ids {listed(best[2])}" if best[2] else ""
    return f"train again on {in_words(best[1])} of the stored ones{named}"


# What no file of the drafter says.


def of_token(case: Case) -> tuple[Fix, ...]:
    """The pairing of states and tokens is engine code."""
    shift = {Token.same: "x[t]", Token.next: "x[t+1]", Token.after_next: "x[t+2]"}
    return (
        case.none(
            f"train again with h[t] beside x[t+1] (it was trained with {shift[case.trained.token]}): "
            "every engine pairs them so, in its code",
        ),
    )


def of_positions(case: Case) -> tuple[Fix, ...]:
    """Where deeper steps stand is engine code."""
    return (
        case.none(
            "train again with positions that advance by one with each step, as in every engine's code"
        ),
    )


MAKERS: dict[str, Callable[[Case], tuple[Fix, ...]]] = {
    NOT_SERVED: of_stops,
    "states": of_states,
    "order": of_order,
    "d2t": tensor_fixes.of_d2t,
    "decoder-layer": tensor_fixes.of_decoder_layer,
    "concat": tensor_fixes.of_concat,
    "input-norms": tensor_fixes.of_input_norms,
    "residual": config_fixes.of_residual,
    "fc-input": config_fixes.of_fc_input,
    "head-input": tensor_fixes.of_head_input,
    "feedback": config_fixes.of_feedback,
    "rope": config_fixes.of_rope,
    "rotation": tensor_fixes.of_rotation,
    "embedding": tensor_fixes.of_embedding,
    "head": tensor_fixes.of_head,
    "token": of_token,
    "positions": of_positions,
    "window": config_fixes.of_window,
    "deeper-norm": tensor_fixes.of_deeper_norm,
    "biases": config_fixes.of_biases,
    "qk-norm": config_fixes.of_qk_norm,
}

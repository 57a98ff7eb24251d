"""What to write so that other engines, releases and classes of targets feed the same states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3.conventions import KEY, RULES, Rule
from eagle3.diagnosis.fix import Fix, needed
from eagle3.doctor.findings import in_words
from eagle3.doctor.switches import line
from eagle3.engine_patches import way_within
from eagle3.engines import Written, ids_to_write, plain_class, rows_of
from eagle3.served_switches import ENGINE_NAMES

# The two kinds of classes whose ids SGLang reads in two ways; a target's own come in front of them.
DEEPSEEK, LLAMA = "kimi_k25", "llama"
CHUNKS = "and fc's chunks put in ascending order, as every engine feeds them"
NEW_RUNNER = (
    "at the top level, where both of its model runners look; the new one reads no nested ids"
)


def elsewhere(
    states: Sequence[int], *, num_layers: int, target_classes: Sequence[str]
) -> tuple[Fix, ...]:
    """The ids for these canonical states in every engine, by releases and classes.

    `target_classes` are names of the target's class, as the table has them or as its config.json names
    it; releases that answer alike are one entry. Raises BadInput for states that the target does not
    have.
    """
    known = {plain_class(c): c for row in RULES if row.ecosystem == "sglang" for c in row.classes}
    own = [known[plain_class(c)] for c in target_classes if plain_class(c) in known]
    fixes: list[Fix] = []
    for engine, classes in (
        ("sglang", [*own, DEEPSEEK, LLAMA]),
        ("vllm", [*own, DEEPSEEK, LLAMA]),
        ("tensorrt_llm", [None]),
        ("llama_cpp", [None]),
    ):
        told: list[tuple[Rule, ...]] = []
        for name in classes:
            rows = rows_of(engine, name)
            if rows in told:
                continue  # two names of one class
            told.append(rows)
            fixes += of_rows(engine, name, rows, states, num_layers)
    return tuple(dict.fromkeys(fixes))


def of_rows(
    engine: str,
    engine_class: str | None,
    rows: Sequence[Rule],
    states: Sequence[int],
    num_layers: int,
) -> Iterator[Fix]:
    """A fix for each range of releases that give one answer."""
    wanted = sorted(states)
    answered: list[tuple[Written, Rule, Rule]] = []  # the answer, the first row, the last row
    for row in rows:
        written = ids_to_write(row, wanted, num_layers)
        last = answered[-1] if answered else None
        # A patch is of the file that a row was read in.
        alike = last is not None and (not written.needs or last[1].source == row.source)
        if last and alike and same(last[0], written) and last[1].evidence is row.evidence:
            answered[-1] = (last[0], last[1], row)
        else:
            answered.append((written, row, row))
    for written, first, last_row in answered:
        yield fix_of(
            named(engine, engine_class, first.since, last_row.until),
            written,
            last_row,
            states,
            way_within(last_row, first.since, last_row.until),
        )


def same(one: Written, other: Written) -> bool:
    """Whether two releases are told the same."""
    told = ("possible", "ids", "needs")
    return all(getattr(one, name) == getattr(other, name) for name in told)


def named(engine: str, engine_class: str | None, since: str | None, until: str | None) -> str:
    """'SGLang 0.5.10 to before 0.5.13, class kimi_k25'."""
    words = ENGINE_NAMES[engine]
    if since and until:
        words += f" {since} to before {until}"
    elif since or until:
        words += f" from {since} on" if since else f" before {until}"
    return f"{words}, class {engine_class}" if engine_class else words


def fix_of(words: str, written: Written, rule: Rule, states: Sequence[int], way: str) -> Fix:
    """What to write there, or why it cannot be written; `way` is how a patch is had that it needs."""
    evidence, source = rule.evidence.value, rule.source
    if not written.possible:
        told = needed(rule.patch)
        patch = f"{told['needs']}, " if rule.patch else ""
        left = (
            f"{in_words(sorted(states))}: {written.why}; {patch}another engine, or training again"
        )
        return Fix(
            engine=words,
            possible=False,
            left=left,
            note=told["note"],
            evidence=evidence,
            source=source,
        )
    order = (CHUNKS,) if list(states) != sorted(states) else ()
    told = needed(written.needs, way)
    if written.ids is None:
        lines: tuple[str, ...] = (f"nothing: {written.why}",)
    elif rule.setting is not None:
        lines = (f"{rule.setting.split()[0]}: {list(written.ids)}",)
    else:
        place = rule.places[0].path
        lines = (line(place, list(written.ids)),)
        if place == KEY and rule.other_runner is not None:
            told["note"] = "; ".join(filter(None, (NEW_RUNNER, told["note"])))
    return Fix(
        engine=words,
        possible=True,
        lines=(*lines, *order),
        needs=told["needs"],
        patched=told["patched"],
        note=told["note"],
        evidence=evidence,
        source=source,
    )

"""A diagnosis as text: the lines that count first, everything else below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eagle3.diagnosis.kinds import KINDS
from eagle3.diagnosis.words import difference_words, rate_words, short, wiring_lines

if TYPE_CHECKING:
    from eagle3.diagnosis.answer import Cause, Diagnosis
    from eagle3.diagnosis.fixes import Fix

LINES, WIDTH = 12, 120
SHOWN = 3  # causes among the first lines


def first_lines(d: Diagnosis) -> list[str]:
    """At most LINES lines of at most WIDTH columns: cause, fix, expected accept length, confidence."""
    if not d.causes:
        head = wrapped(d.headline, lines=2)
        signature = wrapped(f"signature: {d.signature}", lines=2)
        return [*head, expected(d), *signature, short(f"confidence: {d.confidence}", WIDTH)]
    tail = [expected(d), *wrapped(f"confidence: {d.confidence}", lines=2)]
    room = LINES - len(tail)
    lines: list[str] = []
    for number, cause in enumerate(d.causes[:SHOWN]):
        block = cause_lines(cause, number, len(d.causes))
        left = len(d.causes) - number - 1
        if len(lines) + len(block) + (1 if left else 0) > room:
            block = block[: room - len(lines) - (1 if left else 0)]
        if not block:
            break
        lines += block
    shown = sum(line[0].isdigit() for line in lines)
    if shown < len(d.causes):
        rest = ", ".join(c.kind for c in d.causes[shown:])
        lines.append(short(f"and {len(d.causes) - shown} more below: {rest}", WIDTH))
    return [*lines, *tail]


def cause_lines(cause: Cause, number: int, causes: int) -> list[str]:
    """One cause: what, what it costs, what to do."""
    lines = wrapped(f"{number + 1}. {cause.kind}: {cause.what}", lines=2 if causes < 3 else 1)
    if cause.cost is not None:
        cost = cause.cost
        lines.append(
            short(
                f"   costs {difference_words(cost.difference)} accept length, alone: "
                f"{cost.accept_length_as_trained.value:.2f} to {cost.accept_length_so.value:.2f}; "
                f"accuracy {cost.accuracy_as_trained.value:.3f} to {cost.accuracy_so.value:.3f} "
                f"({cause.confidence})",
                WIDTH,
            )
        )
    fix = next(iter(cause.fixes), None)
    if fix is not None:
        lines += wrapped(f"fix: {fix_words(fix)}", lines=2 if causes < 3 else 1, indent="   ")
    return lines


def fix_words(fix: Fix) -> str:
    """A fix in one line: what to write, or that it cannot be written and what is left."""
    where = f"{fix.engine}: " if fix.engine else ""
    if not fix.possible:
        said = fix.left or "; ".join(fix.lines)
        return f"{where}not expressible there; {said}" if fix.engine else "; ".join(fix.lines)
    needs = f" (needs {fix.needs})" if fix.needs else ""
    return f"{where}{'; '.join(fix.lines)}{needs} [{fix.evidence}]"


def expected(d: Diagnosis) -> str:
    """Accept length as served, behind each fix, and with all of them."""
    served = d.accept_length_served
    how = "as declared" if d.served is None else "as served"
    parts = [f"not measurable {how}" if served is None else f"{served.value:.2f} {how}"]
    for place, (kind, rate) in enumerate(d.ladder):
        last = place == len(d.ladder) - 1
        behind = f"with {kind} mended" if place == 0 else f"{kind} too"
        parts.append(f"{rate_words(rate) if last else f'{rate.value:.2f}'} {behind}")
    if not d.ladder:
        parts.append(f"{rate_words(d.accept_length_repaired)} as trained")
    return short(f"expected accept length: {', then '.join(parts)}", WIDTH)


def wrapped(text: str, *, lines: int, indent: str = "") -> list[str]:
    """At most so many lines of a sentence."""
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "   ",
        max_lines=lines,
        placeholder=" …",
        break_long_words=True,
        break_on_hyphens=False,
    )


def markdown(d: Diagnosis) -> str:
    """The whole answer."""
    return "\n".join([*first_lines(d), "", *below(d)]) + "\n"


def below(d: Diagnosis) -> Iterator[str]:
    """Everything behind the first lines."""
    yield f"# {d.headline}"
    yield ""
    for number, cause in enumerate(d.causes, 1):
        yield from whole_cause(cause, number)
    yield "## Accept length"
    yield ""
    if d.accept_length_served is not None:
        how = "declared" if d.served is None else "served"
        yield f"- as {how}: {rate_words(d.accept_length_served)}"
    for place, (kind, rate) in enumerate(d.ladder):
        yield f"- with {kind} mended{' too' if place else ''}: {rate_words(rate)}"
    yield f"- as trained: {rate_words(d.accept_length_repaired)}"
    yield f"- by step: {d.signature}"
    yield ""
    yield "## As trained and as served"
    yield ""
    yield f"Teacher: {d.teacher}."
    yield ""
    yield from table(d)
    for title, lines in (
        ("Slots of the data", d.slots),
        ("What cannot be decided", d.undecided),
        ("Notes", d.notes),
    ):
        if lines:
            yield f"## {title}"
            yield ""
            yield from (f"- {line}" for line in lines)
            yield ""
    if d.elsewhere:
        yield "## These states in other engines"
        yield ""
        yield from (line for fix in d.elsewhere for line in whole_fix(fix))
        yield ""
    if d.findings:
        yield "## Findings in the files"
        yield ""
        for finding in d.findings:
            yield f"- {finding.severity} `{finding.name}`: {finding.what}; {finding.effect}"
            yield from (f"  - `{line}`" for line in finding.fix)
        yield ""
    yield f"Confidence: {d.confidence}."


def whole_cause(cause: Cause, number: int) -> Iterator[str]:
    """A cause with all that is known of it."""
    yield f"## {number}. {cause.kind}: {KINDS[cause.kind]}"
    yield ""
    yield f"- {cause.what}"
    if cause.cost is not None:
        cost = cause.cost
        yield (
            f"- alone it costs {difference_words(cost.difference)} accept length "
            f"({rate_words(cost.accept_length_as_trained)} to {rate_words(cost.accept_length_so)}) and "
            f"takes accuracy from {rate_words(cost.accuracy_as_trained, 3)} to "
            f"{rate_words(cost.accuracy_so, 3)}"
        )
    yield f"- {cause.confidence}; {cause.evidence}"
    for fix in cause.fixes:
        yield from whole_fix(fix)
    yield ""


def whole_fix(fix: Fix) -> Iterator[str]:
    """A fix with all its lines."""
    yield f"- {fix.engine or 'to do'} [{fix.evidence}]{'' if fix.possible else ': not expressible'}"
    for line in fix.lines:
        inner = line.splitlines()
        if len(inner) > 1:
            yield from ("", "  ```", *(f"  {part}" for part in inner), "  ```", "")
        else:
            yield f"  - `{line}`" if fix.engine else f"  - {line}"
    if fix.needs:
        yield f"  - needs {fix.needs}"
    if fix.left:
        yield f"  - {fix.left}"


def table(d: Diagnosis) -> Iterator[str]:
    """Trained and served side by side, a row a switch."""
    trained = wiring_lines(d.trained)
    wiring = d.served.wiring if d.served is not None else None
    served = wiring_lines(wiring) if wiring is not None else None
    yield "| switch | trained | served |" if served else "| switch | trained |"
    yield "|---|---|---|" if served else "|---|---|"
    for place, line in enumerate(trained):
        name, _, words = line.partition(": ")
        if served is None:
            yield f"| {name} | {words} |"
            continue
        other = served[place].partition(": ")[2]
        yield f"| {name} | {words} | {'the same' if other == words else f'**{other}**'} |"
    yield ""
    if d.served is not None:
        yield from (f"- {name}: {why}" for name, why in d.served.because.items())
        yield from (f"- {problem}" for problem in d.served.problems)
        yield ""

"""A diagnosis as text: the lines that count first, everything else below."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.conventions import EMBEDDING_PATCH
from eagle3.diagnosis.fix import Mended, mended
from eagle3.diagnosis.kinds import KINDS
from eagle3.diagnosis.words import difference_words, joined, rate_words, short, wiring_lines
from eagle3.engine_patches import SETTING

if TYPE_CHECKING:
    from eagle3.diagnosis.answer import Cause, Diagnosis
    from eagle3.diagnosis.fixes import Fix
    from eagle3.metrics import Rate

LINES, WIDTH = 12, 120


@dataclass(frozen=True, kw_only=True)
class Room:
    """How many lines the parts of the first lines may take."""

    what: int
    fix: int
    ladder: int
    sure: int
    causes: int = 3


# From generous to narrow: what a cause is gives way first, its fix and the figures last.
ROOMS = (
    Room(what=2, fix=2, ladder=2, sure=2),
    Room(what=2, fix=2, ladder=1, sure=1),
    Room(what=1, fix=2, ladder=1, sure=2),
    Room(what=1, fix=2, ladder=1, sure=1),
    Room(what=1, fix=1, ladder=2, sure=1),
    Room(what=1, fix=1, ladder=1, sure=1),
    Room(what=1, fix=1, ladder=0, sure=1),
    Room(what=1, fix=1, ladder=0, sure=1, causes=2),
)


def first_lines(d: Diagnosis) -> list[str]:
    """At most LINES lines of at most WIDTH columns: cause, fix, expected accept length, confidence."""
    if not d.causes:
        head = wrapped(d.headline, lines=3)
        signature = wrapped(f"signature: {d.signature}", lines=2)
        sure = short(f"confidence: {d.confidence}", WIDTH)
        return [
            *head,
            *before_all(d),
            expected(d),
            *of_server(d, lines=2),
            *own_figure(d, lines=2),
            *signature,
            sure,
        ]
    lines: list[str] = []
    for room in ROOMS:
        lines = within(d, room)
        if len(lines) <= LINES:
            break
    place = next(i for i, line in enumerate(lines) if line.startswith("expected"))
    if d.doubts and len(lines) < LINES:
        lines.insert(place, short(f"open: {d.doubts[0]}", WIDTH))
        place += 1
    lines[place + 1 : place + 1] = own_figure(d, lines=LINES - len(lines))
    return lines


def before_all(d: Diagnosis) -> list[str]:
    """What has to be done before any other fix is written, and what has to be there besides."""
    lines = []
    if d.before is not None:
        why = f" ({d.before.note})" if d.before.note else ""
        lines.append(short(f"before all fixes: {d.before.lines[0]}{why}", WIDTH))
    if d.provided is not None:
        lines.append(short(d.provided, WIDTH))
    return lines


def of_server(d: Diagnosis, *, lines: int) -> list[str]:
    """Where the fault lies, by what a running server returned."""
    return [] if d.joined is None else wrapped(d.joined.said, lines=lines)


def own_figure(d: Diagnosis, *, lines: int) -> list[str]:
    """What the engine measured itself, where it is not compared; as far as there is room."""
    if d.engine_figure is None or lines < 1:
        return []
    return wrapped(d.engine_figure, lines=min(lines, 2), indent="   ")


def within(d: Diagnosis, room: Room) -> list[str]:
    """The first lines, with so much room for each part."""
    lines: list[str] = []
    for number, cause in enumerate(d.causes[: room.causes]):
        lines += cause_lines(cause, number, room)
    if left := d.causes[room.causes :]:
        rest = ", ".join(cause.kind for cause in left)
        lines.append(short(f"and {len(left)} more below: {rest}", WIDTH))
    lines += [*before_all(d), expected(d), *of_server(d, lines=room.sure)]
    if room.ladder:
        lines += [
            line for text in steps(d) for line in wrapped(text, lines=room.ladder, indent="   ")
        ]
    return [*lines, *wrapped(f"confidence: {d.confidence}", lines=room.sure)]


def cause_lines(cause: Cause, number: int, room: Room) -> list[str]:
    """One cause: what, what it costs, what to do."""
    lines = wrapped(f"{number + 1}. {cause.kind}: {cause.what}", lines=room.what)
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
        lines += wrapped(f"fix: {fix_words(fix)}", lines=room.fix, indent="   ")
    return lines


def fix_words(fix: Fix) -> str:
    """A fix in one line, the exact line first: what to write, or that it cannot be and what is left.

    What the line needs stands right behind it: without that it mends nothing.
    """
    if not fix.possible:
        said = fix.left or "; ".join(fix.lines)
        return f"no line there; {said} ({fix.engine})" if fix.engine else "; ".join(fix.lines)
    whole = [line for line in fix.lines if "\n" not in line]
    if not fix.engine:
        return f"{'; '.join(whole)} [{fix.evidence}]"
    first, rest = (whole[0], whole[1:]) if whole else ("run the program below", [])
    if len(whole) < len(fix.lines):
        first += " (a program in patched/)"
    # A patch that is shipped goes by its setting: there is little room.
    needs = (fix.needs or "").replace(f"{EMBEDDING_PATCH.partition(':')[0]} ({SETTING})", SETTING)
    more = f"; needs {needs}" if needs else ""
    return "; ".join([f"{first}{more} [{fix.evidence}] for {fix.engine}", *rest])


def never_starts(d: Diagnosis) -> bool:
    """Whether nothing that is known here makes the engine start."""
    return any(c.stops and mended(c.fixes) is Mended.not_there for c in d.causes)


def behind_fixes(d: Diagnosis, said: Callable[[Rate], str]) -> Iterator[str]:
    """Accept length behind what can be written alone, with patches of the engine too, with all mended.

    Only steps from the ladder's first on count: what stands behind one that stays is not reached.
    """
    ways = {cause.kind: mended(cause.fixes) for cause in d.causes}
    asked = [ways.get(kind, Mended.not_there) for kind, _ in d.ladder]
    lines, patches = (reached(asked, most) for most in (Mended.by_lines, Mended.by_patch))
    whole = len(asked)
    starts = all(mended(c.fixes) is Mended.by_lines for c in d.causes if c.stops)
    last = said(d.ladder[-1][1])
    if 0 < lines < whole and starts:
        yield f"{d.ladder[lines - 1][1].value:.2f} by lines alone"
    if patches == whole:
        yield f"{last} after all fixes{'' if lines == whole else ' (with a patch)'}"
        return
    if patches > lines and not never_starts(d):
        yield f"{d.ladder[patches - 1][1].value:.2f} with a patch"
    left = [kind for kind, _ in d.ladder if ways.get(kind, Mended.not_there) is Mended.not_there]
    yield f"not by lines: {last} with {joined(left)} {'too' if len(left) < whole else 'mended'}"


def reached(asked: Sequence[Mended], most: Mended) -> int:
    """How many steps, from the first on, ask for no more than this."""
    return next((place for place, way in enumerate(asked) if way > most), len(asked))


def expected(d: Diagnosis) -> str:
    """Accept length as served, behind all fixes that can be written, and with everything mended.

    Where the line is full the interval, which stands below, gives way.
    """
    start = "expected accept length: "
    ways = [start + " → ".join(lengths(d, said)) for said in (rate_words, value_alone)]
    return short(next((line for line in ways if len(line) <= WIDTH), ways[-1]), WIDTH)


def value_alone(rate: Rate) -> str:
    """'2.93'."""
    return f"{rate.value:.2f}"


def lengths(d: Diagnosis, said: Callable[[Rate], str]) -> list[str]:
    """The parts of that line, the last accept length as `said` says it."""
    served = d.accept_length_served
    how = "as declared" if d.served is None else "as served"
    parts = [f"{served.value:.2f} {how}" if served is not None else f"not measurable {how}"]
    if d.served is not None and d.served.wiring is None:
        parts = [f"it does not start{', whatever is written' if never_starts(d) else ''}"]
        if d.engine_figure is not None:
            parts = ["it does not start by what is known of it"]
    if d.repaired != "as trained":
        parts = ["nothing serves it as it is"] if d.served is None else parts
        parts.append(f"{said(d.accept_length_repaired)} {d.repaired}")
    elif d.causes and d.ladder:
        parts += behind_fixes(d, said)
    elif d.accept_length_served is None and d.served is not None:
        # What an engine that does not run it gives once it does is not known.
        parts.append(f"{said(d.accept_length_repaired)} if it ran it as trained")
    else:
        ways = {"undecided": "as the search ended", "unknown": "as best it can be wired"}
        ended = ways.get(d.verdict, d.repaired)
        parts.append(f"{said(d.accept_length_repaired)} {ended}")
    return parts


def steps(d: Diagnosis) -> list[str]:
    """The ladder, where it has more than one step, and that mending the states alone leaves it slow."""
    said = [slow(d)] if slow(d) else []
    rungs = [
        f"{rate.value:.2f} with {kind}{' too' if place else ''}"
        for place, (kind, rate) in enumerate(d.ladder)
    ]
    if len(rungs) > 1:
        said.append(f"step by step: {', '.join(rungs)}")
    return ["; ".join(said)] if said else []


def slow(d: Diagnosis) -> str:
    """That serving stays slow behind the fix that everybody looks for; '' where it does not."""
    if d.states_alone is None:
        return ""
    kind, alone = d.states_alone
    return f"with {kind} alone mended {alone.value:.2f}: serving stays slow [inferred]"


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
    if d.before is not None:
        yield "## Before all other fixes"
        yield ""
        yield from whole_fix(d.before)
        yield ""
    for number, cause in enumerate(d.causes, 1):
        yield from whole_cause(cause, number)
    if d.joined is not None:
        yield "## The running server"
        yield ""
        yield f"- {d.joined.said}"
        if d.joined.heard.why_not is not None:
            yield f"- its states were not measured: {d.joined.heard.why_not}"
        if d.joined.counted is not None:
            counted = d.joined.counted
            yield (
                f"- on the prompts of {counted.texts} texts it accepts {rate_words(counted.served)}, "
                f"the drafter alone, so wired, {rate_words(counted.alone)}: lost "
                f"{difference_words(counted.lost)}"
            )
        yield ""
    yield "## Accept length"
    yield ""
    if d.accept_length_served is not None:
        how = "declared" if d.served is None else "served"
        yield f"- as {how}: {rate_words(d.accept_length_served)}"
    for place, (kind, rate) in enumerate(d.ladder):
        yield f"- with {kind} mended{' too' if place else ''}: {rate_words(rate)}"
    yield f"- {d.repaired}: {rate_words(d.accept_length_repaired)}"
    if slow(d):
        yield f"- {slow(d)}"
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
    can = "" if fix.possible or not fix.engine else ": not expressible"
    yield f"- {fix.engine or 'to do'} [{fix.evidence}]{can}"
    for line in fix.lines:
        inner = line.splitlines()
        if len(inner) > 1:
            yield from ("", "```python", *inner, "```", "")
        else:
            yield f"  - `{line}`" if fix.engine else f"  - {line}"
    if fix.needs:
        yield f"  - needs {fix.needs}"
    if fix.note:
        yield f"  - {fix.note}"
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
        yield from (f"- {note}" for note in d.served.notes if note not in d.notes)
        yield ""

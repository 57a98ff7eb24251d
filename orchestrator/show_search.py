"""What a search and a diagnosis found, below their first lines: tables, curves, what was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.show import Show

CURVES = ("step_accuracy/conditional", "step_accuracy/cumulative")
MOST_GROUPS = 8  # of dropped wirings; the others are counted
MOST_OF_A_GROUP = 2
MOST_TEACHERS = 4


def show_search(show: Show, result: Mapping[str, Any]) -> None:
    """The ranked table, the curves, the teachers, and what was dropped, grouped."""
    ranked = result["ranked"]
    show.line(f"\nranked: {counted(ranked, result.get('dropped') or [])}", style="bold")
    table = Table(
        "", "wiring", "accuracy (step 0)", "accept length", "behind the best", pad_edge=False
    )
    table.box = None
    for number, row in enumerate(ranked, start=1):
        metrics = row["metrics"]
        cells = (
            in_words(row),
            rate(metrics["accuracy"]),
            rate(metrics["accept_length"]),
            behind(row),
        )
        table.add_row(str(number), *map(escape, cells))
    show.put(table)
    for line in curve_lines(ranked):
        show.line(line)
    teachers = result.get("teachers") or []
    if teachers:
        show.line("\nteachers: what the drafter agrees with, wired as it was trained", style="bold")
        columns = ("", "the drafter agrees", "the teacher with the target", "")
        table = Table(*columns, pad_edge=False, box=None)
        for row in teachers[:MOST_TEACHERS]:
            agreement = rate(row["agreement"]) if row.get("agreement") else ""
            name, words = teacher_in_words(row)
            table.add_row(*map(escape, (name, rate(row["accuracy"]), agreement, words)))
        show.put(table)
        if len(teachers) > MOST_TEACHERS:
            show.line(f"and {len(teachers) - MOST_TEACHERS} more, further from it", style="dim")
    for said in result.get("rounds") or []:
        show.line(f"round    {said}", style="dim")
    for line in dropped_lines(result.get("dropped") or []):
        show.line(line, style="dim")


def show_diagnosis(show: Show, diagnosis: Mapping[str, Any]) -> None:
    """What the first lines have no room for: every cause and fix, slots, what stays open."""
    if before := diagnosis.get("before"):
        show.line("\nbefore all fixes", style="bold")
        fix_lines(show, before)
    for number, cause in enumerate(diagnosis["causes"], start=1):
        show.line(f"\ncause {number}  {cause['kind']}: {cause['what']}", style="bold")
        for line in cause_lines(cause, "served" if diagnosis.get("served") else "declared"):
            show.line(f"  {line}")
        for fix in cause["fixes"]:
            fix_lines(show, fix, program=f"patched/{cause['kind']}.py")
    ladder = diagnosis.get("ladder") or []
    if ladder:
        show.line("\naccept length as one after the other is mended", style="bold")
        for step in ladder:
            show.line(f"  {step['mended']}: {rate(step['accept_length'])}")
    if diagnosis.get("elsewhere"):
        show.line("\nthe same states elsewhere", style="bold")
        for fix in diagnosis["elsewhere"]:
            fix_lines(show, fix)
    if server := diagnosis.get("server"):
        show.line(f"\nserver   {server['said']}", style="bold")
    for slot in diagnosis.get("slots") or []:
        show.line(slot)
    if diagnosis.get("signature"):
        show.line(f"signature  {diagnosis['signature']}")
    for open_question in diagnosis.get("undecided") or []:
        show.line(f"undecided  {open_question}", style="yellow")
    for note in diagnosis.get("notes") or []:
        show.line(f"note     {note}", style="dim")


def cause_lines(cause: Mapping[str, Any], otherwise: str) -> Iterator[str]:
    """Trained, served (or declared), cost and how sure it is."""
    yield f"trained: {cause['trained']}"
    yield f"{otherwise}: {cause['served']}"
    if cost := cause.get("cost"):
        accuracy, length = cost["accuracy_as_trained"], cost["accept_length_as_trained"]
        yield (
            f"cost:    accuracy {accuracy['value']:.3f} → {rate(cost['accuracy_so'])}, accept length "
            f"{length['value']:.3f} → {rate(cost['accept_length_so'])}"
        )
        yield f"         {interval(cost['difference'])} of accept length, paired"
    yield f"{cause['confidence']}; known by: {cause['evidence']}"


def fix_lines(show: Show, fix: Mapping[str, Any], program: str = "") -> None:
    """A fix as exact lines, or what is left where an engine cannot express it.

    A program is shown by the name that it has in the run's folder.
    """
    can = "" if fix["possible"] or not fix["engine"] else ": cannot be expressed there"
    show.line(f"  {fix['engine'] or 'to do'}{can} ({fix['evidence']})")
    for line in fix["lines"]:
        if line.count("\n") > 1:
            show.line(f"    by the program {program} of the run's folder", style="green")
        else:
            show.line(f"    {line}", style="green")
    for word in ("needs", "note", "left"):
        if fix.get(word):
            show.line(f"    {word}: {fix[word]}")


def counted(ranked: Sequence[Any], dropped: Sequence[Any]) -> str:
    """'8 wirings on all samples, 136 dropped on the way; behind: corrected for all 144'."""
    finalists = f"{len(ranked)} wiring{'s' if len(ranked) != 1 else ''} on all samples"
    if not dropped:
        return finalists
    both = len(ranked) + len(dropped)
    return f"{finalists}, {len(dropped)} dropped on the way; behind: corrected for all {both}"


def in_words(row: Mapping[str, Any]) -> str:
    """What a ranked or dropped wiring changes of the start."""
    return "; ".join(row["changed"]) or "as the search started"


def rate(figure: Mapping[str, Any]) -> str:
    """'0.752 [0.726, 0.776]'."""
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def interval(difference: Mapping[str, Any]) -> str:
    """A difference with its sign and interval."""
    return f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"


def behind(row: Mapping[str, Any]) -> str:
    """How far a ranked wiring is behind the best; a tie is said to be one."""
    if row["behind"] is None:
        return "the best"
    return f"{rate(row['behind'])}{', a tie' if row['tied'] else ''}"


def curve_lines(ranked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Per-step curves, a line a finalist."""
    for name in CURVES:
        rows = [(n, row["curves"].get(name)) for n, row in enumerate(ranked, start=1)]
        rows = [(n, points) for n, points in rows if points]
        if rows:
            yield f"\n{name}, from step {rows[0][1][0]['step']} on"
        for number, points in rows:
            yield f"{number:>3}  " + "  ".join(f"{point['value']:.3f}" for point in points)


def teacher_in_words(row: Mapping[str, Any]) -> tuple[str, str]:
    """A teacher's name, and what it is."""
    teacher = row["teacher"]
    if isinstance(teacher, Mapping):
        return str(teacher["name"]), str(teacher.get("in_words") or "")
    return str(teacher), str(row.get("in_words") or "")


def axes_of(row: Mapping[str, Any]) -> str:
    """'states and d2t': which axes a wiring differs in."""
    return " and ".join(str(change).partition("=")[0] for change in row["changed"]) or "the start"


def dropped_lines(dropped: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What was dropped, by the axes that it changes: how many, and the nearest with why."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in dropped:
        groups.setdefault(axes_of(row), []).append(row)
    if groups:
        yield "\ndropped, by what they change (all of them stand under 'dropped' in result.json)"
    for name, rows in [*groups.items()][:MOST_GROUPS]:
        texts = sorted({row["texts"] for row in rows})
        after = f"{texts[0]}" if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        yield f"  {name}: {len(rows)}, after {after} texts"
        nearest = sorted(rows, key=lambda row: float(row["behind"]["value"]))
        for row in nearest[:MOST_OF_A_GROUP]:
            yield f"    {in_words(row)}: accuracy {row['accuracy']:.3f}; {row['why']}"
    if len(groups) > MOST_GROUPS:
        rest = [*groups.values()][MOST_GROUPS:]
        yield f"  and {sum(map(len, rest))} more that change {len(rest)} other things"

"""The table of docs/faults.md, made from the rows; `python -m tests.faults.page` writes it there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from orchestrator.paths import CLONE
from tests.faults.form import By, Planted, Row
from tests.faults.table import ROWS

PAGE = CLONE / "docs" / "faults.md"
MARKED = re.compile(r"(<!-- faults -->\n).*(\n<!-- /faults -->)", re.DOTALL)
NAMES = {
    "specforge": "SpecForge's layout",
    "speculators": "speculators' layout",
    "pt_shards": "`.pt` shards",
}


def table() -> list[str]:
    """The lines of the table, and what no file shows."""
    traceless = [str(row.number) for row in ROWS if not row.planted]
    return [
        f"No file shows {', '.join(traceless[:-1])} and {traceless[-1]}.",
        "",
        "| # | fault | what you see in service | how it is planted, and what names it |",
        "|---|---|---|---|",
        *(
            f"| {row.number} | {plain(row.fault)} | {plain(row.serving)} | {'<br>'.join(told(row))} |"
            for row in ROWS
        ),
    ]


def told(row: Row) -> Iterator[str]:
    """What is reported of each planted fault, and what files do not show."""
    yield from (line(planted) for planted in row.planted)
    if row.cannot:
        always = "Files cannot show it" if not row.planted else "Files cannot always show it"
        yield f"**{always}.** {plain(row.cannot)} What would: {plain(row.instead)}."
    if row.unseen:
        yield f"Planted, and passed in silence: {'; '.join(plain(p.how) for p in row.unseen)}."


def line(planted: Planted) -> str:
    """One planted fault."""
    where = f" ({only(planted)})" if planted.only else ""
    if planted.by is By.loader:
        says = "`drafter_test` refuses it"
    elif planted.by is By.samples:
        says = "`drafter_test` and `inspect_data` refuse it"
    elif planted.by is By.layers:
        says = "`layers`"
    else:
        says = f"`{planted.by.value}`: **{planted.name}**"
        says += " (`drafter_test` refuses it too)" if isinstance(planted.refused, str) else ""
    return f"{upper(plain(planted.how))}{where} → {says}, “{plain(planted.reads)}”"


def only(planted: Planted) -> str:
    """In which layouts not, and why."""
    left = [NAMES[name] for name in planted.left_out]
    return planted.only if not planted.layouts else f"not in {' and '.join(left)}: {planted.only}"


def upper(text: str) -> str:
    """A sentence's first letter as one, unless it begins with a name."""
    first = text.split()[0].rstrip(":,")
    name = "." in first or "_" in first or first in ("d2t", "t2d", "float16")
    return text if name else text[0].upper() + text[1:]


def plain(text: str) -> str:
    """Text whose characters mean nothing to Markdown."""
    return text.replace("*", r"\*").replace("|", r"\|").replace("<", "&lt;")


def filled(page: str) -> str:
    """A page with the table in its place."""
    lines = "\n".join(table())
    return MARKED.sub(lambda found: found[1] + lines + found[2], page)


if __name__ == "__main__":
    Path(PAGE).write_text(filled(PAGE.read_text()))

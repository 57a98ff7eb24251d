"""The page for people holds the table as it is, and leads to every row of it."""

from __future__ import annotations

import re

from tests.faults.page import MARKED, PAGE, filled
from tests.faults.table import ROWS


def test_the_page_holds_the_table_as_it_is() -> None:
    page = PAGE.read_text()
    assert MARKED.search(page)
    assert page == filled(page), "write it anew: python -m tests.faults.page"


def test_every_fault_is_found_from_what_one_sees() -> None:
    index = PAGE.read_text().split("## The table")[0]
    named: set[int] = set()
    for numbers in re.findall(r"^\| [^|]+ \| ([\d, to]+) \|$", index, re.MULTILINE):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
            named |= set(range(int(first), int(last or first) + 1))
    assert named == {row.number for row in ROWS}

"""The 43 ways in which a drafter is wired wrongly: how each is planted, and what names it.

A row is data. The tests plant every row, and docs/faults.md is rendered from here.
"""

from __future__ import annotations

from tests.faults import block_rows, layer_rows, serving_rows, vocabulary_rows
from tests.faults.form import Planted, Row

ROWS: tuple[Row, ...] = (
    *layer_rows.ROWS,
    *block_rows.ROWS,
    *vocabulary_rows.ROWS,
    *serving_rows.ROWS,
)
PLANTED: tuple[Planted, ...] = tuple(planted for row in ROWS for planted in row.planted)
UNSEEN: tuple[Planted, ...] = tuple(planted for row in ROWS for planted in row.unseen)

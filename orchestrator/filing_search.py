"""What MLflow is to hold of a search or a diagnosis beside its figures: tables, texts, tags, finalists.

Made from a result alone. Imports no mlflow.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.spelling import flatten

FIGURES = ("accuracy", "accept_length")
PARTS = ("value", "low", "high", "numerator", "denominator")


def texts_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Artifacts by file name."""
    texts: dict[str, str] = {}
    if ranked := result.get("ranked"):
        texts["ranked.csv"] = as_csv(ranked)
        texts["ranked.md"] = as_markdown(ranked)
    if diagnosis := result.get("diagnosis"):
        apart = ("markdown", "config")  # files of their own
        plain = {key: value for key, value in diagnosis.items() if key not in apart}
        texts["diagnosis.json"] = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
        texts["diagnosis.md"] = diagnosis["markdown"]
        if diagnosis.get("config") is not None:
            texts["config.json"] = (
                json.dumps(diagnosis["config"], indent=2, ensure_ascii=False) + "\n"
            )
    return texts


def tags_of(result: Mapping[str, Any]) -> dict[str, str]:
    """The diagnosis in a line, and its causes by kind."""
    diagnosis = result.get("diagnosis")
    if not diagnosis:
        return {}
    return {
        "diagnosis": f"{diagnosis['verdict']}: {diagnosis['headline']}",
        "diagnosis.causes": ", ".join(cause["kind"] for cause in diagnosis["causes"]) or "none",
    }


def row_of(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """One ranked wiring as the columns of a table."""
    behind = row["behind"] or {}
    columns: dict[str, Any] = {
        "rank": number,
        "name": row["name"],
        "changed": "; ".join(row["changed"]),
        "states": json.dumps(row["states"]),
        "teacher": row["teacher"],
    }
    for name in FIGURES:
        for part in PARTS:
            key = name if part == "value" else f"{name}/{part}"
            columns[key] = row["metrics"][name][part]
    for part in PARTS[:3]:
        columns["behind" if part == "value" else f"behind/{part}"] = behind.get(part)
    switches = dict(flatten("wiring", row["wiring"]))
    return {**columns, "tied": row["tied"], **switches}


def as_csv(ranked: Sequence[Mapping[str, Any]]) -> str:
    """The ranked table with every figure, bound, count and switch."""
    rows = [row_of(number, row) for number, row in enumerate(ranked, start=1)]
    out = io.StringIO()
    writer = csv.DictWriter(out, [*rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_markdown(ranked: Sequence[Mapping[str, Any]]) -> str:
    """The ranked table as a person reads it."""
    from orchestrator.show_search import behind, in_words, rate

    head = (
        "",
        "wiring",
        "states",
        "teacher",
        "accuracy (step 0)",
        "accept length",
        "behind the best",
    )
    lines = [line_of(head), line_of(["---"] * len(head))]
    for number, row in enumerate(ranked, start=1):
        states = ", ".join(map(str, row["states"]))
        figures = [rate(row["metrics"][name]) for name in FIGURES]
        lines.append(
            line_of((str(number), in_words(row), states, row["teacher"], *figures, behind(row)))
        )
    return "\n".join(lines) + "\n"


def line_of(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def finalist_result(row: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """A ranked wiring as a result of its own: what a drafter test of it would have left."""
    metrics = dict(row["metrics"])
    if row["behind"] is not None:
        metrics["behind"] = row["behind"]
    times = {key: result.get(key) for key in ("started", "ended")}
    return {"metrics": metrics, "curves": row["curves"], **times}

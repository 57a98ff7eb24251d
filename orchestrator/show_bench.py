"""What a benchmark of an engine measured, below its main figures: by concurrency, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.show import Show

MS = 1000.0


def show_bench(show: Show, bench: Mapping[str, Any]) -> None:
    """The table by concurrency, what limits at each, how the texts agree, and the servers."""
    ids = "its own states" if bench["ids"] is None else f"ids {bench['ids']}"
    states = ", ".join(map(str, bench["states"]))
    shape = "no drafter in either" if bench.get("control") else f"{bench['steps']} steps"
    if bench["topk"] > 1:
        shape += f", topk {bench['topk']}, {bench['draft_tokens']} draft tokens"
    show.line(
        f"\n{bench['engine']} {bench['version']}, class {bench['class']}: {ids} = states {states}; "
        f"{shape}; {bench['prompts']} prompts",
        style="bold",
    )
    if (patch := bench.get("patch")) is not None:
        files = ", ".join(patch["files"])
        show.line(escape(f"patched  {patch['name']} ({patch['sha256'][:12]}) over {files}"))
    columns = (
        "at once",
        "tok/s without",
        "tok/s with",
        "speedup",
        "accept length",
        "break-even",
        "first token (ms)",
    )
    table = Table(*columns, box=None, pad_edge=False)
    for level in bench["levels"]:
        table.add_row(*map(escape, row(level)))
    show.put(table)
    for level in bench["levels"]:
        said = (
            level.get(key, ()) for key in ("limit_in_words", "parts_in_words", "beside_in_words")
        )
        for line in chain.from_iterable(said):
            show.line(f"at {level['concurrency']} at once: {line}")
        if level["between_starts"] is not None:
            show.line(
                f"at {level['concurrency']} at once: two starts of the baseline differ by "
                f"{level['between_starts']:.1%}"
            )
    for arm, found in bench["agreement"].items():
        other = "baseline again" if arm == "baseline" else arm
        show.line(f"texts    {other}: {found['same']} of {found['prompts']} as the baseline's")
    for server in bench["servers"]:
        facts = server["facts"]
        show.line(
            f"server   {server['label']}: {facts['engine']} {facts['version']}, ready after "
            f"{server['ready_s']:.0f} s",
            style="dim",
        )


def row(level: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one concurrency."""
    limits, length = level["limits"], level["accept_length"]
    return (
        str(level["concurrency"]),
        "" if level["tok_s_baseline"] is None else f"{level['tok_s_baseline']['value']:.1f}",
        f"{level['tok_s']['value']:.1f}",
        "" if level["speedup"] is None else interval(level["speedup"]),
        "not counted"
        if length is None
        else f"{interval(length)} {length['numerator']}/{length['denominator']}",
        "" if limits is None else f"{limits['break_even']:.2f}",
        f"{level['first_token_s']['median'] * MS:.0f} (95 %: {level['first_token_s']['p95'] * MS:.0f})",
    )


def interval(figure: Mapping[str, Any]) -> str:
    """'2.34 [2.31, 2.37]', or the value alone."""
    if "low" not in figure:
        return f"{figure['value']:.2f}"
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"

"""What a person sees: what is tested and where, progress, a short table, where it is filed.

Answers go to stdout, errors to stderr. Without a terminal there are plain lines and no progress bar.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.follow import OnEvent, OnInterrupt

STAGES = {
    "score": "scoring samples",
    "continue": "continuing the prompts, token by token",
    "capture": "capturing the target's states",
    "inspect": "looking at the samples",
    "choose": "asking the target for its own choices",
    "read": "reading the samples",
    "search": "searching wirings",
    "probe": "asking the engine for states",
    "asked": "asking the running server",
    "ask": "asking the engine for its texts",
}
COLOURS = {
    "supported": "green",
    "refuted": "red",
    "inconclusive": "yellow",
    "measured": "cyan",
    "not_answered": "red",
    "started": "cyan",
}
SEVERITY_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
VERDICT_COLOURS = {"verified": "green", "contradicted": "red"}
LABELS = {
    "accuracy": "accuracy (step 0)",
    "accept_length": "accept length",
    "accept_length_uniform": "accept length, every position",
    "accept_length_tree": "accept length, tree",
    "accept_length_tree_uniform": "accept length, tree, every position",
    "accept_length_standalone": "accept length, the drafter alone",
    "accept_length_fed": "accept length, alone on what was fed",
    "accept_length_known_good": "accept length, known good",
    "tok_s": "tok/s with the drafter",
    "tok_s_baseline": "tok/s without it",
    "tok_s_known_good": "tok/s, known good",
    "speedup": "speedup",
    "break_even": "break-even accept length",
    "accuracy_served": "accuracy (step 0), as served",
    "accept_length_served": "accept length, as served",
    "coverage": "coverage",
    "accuracy/target_argmax": "accuracy (step 0)",
    "accuracy/next_token": "accuracy (step 0)",
    "accuracy/stored_teacher": "accuracy (step 0)",
    "teacher_agreement": "the stored teacher itself",
    "teacher_next_token": "the stored teacher itself",
}
ORDER = tuple(LABELS)
# Switches of a wiring that are named only where they are not so.
RARE = {
    "head": "own",
    "residual": "declared",
    "window": "declared",
    "concat": "embedding_first",
    "input_norms": "own",
    "fc_input": "declared",
    "head_input": "declared",
    "feedback": "declared",
    "rope": "declared",
    "rotation": "half_split",
    "token": "next",
    "positions": "advancing",
    "deeper_norm": "declared",
    "biases": "declared",
    "qk_norm": "declared",
}
TRAINERS = ("specforge/", "speculators/")  # curves that a training log prints, step by step
MOST_CHANGES = 6  # another interpreter differs in hundreds of packages
MOST_ALIKE = 3  # findings of one name; the others are counted
PLAIN_WIDTH = 120  # where there is no terminal to ask


class LastingConsole(Console):
    """A console that goes on in silence when its reader has gone (`… | head`); the run matters more."""

    def on_broken_pipe(self) -> None:
        """Send everything to nowhere from here on, instead of leaving the process as rich would."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Show:
    """The terminal, or plain lines where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or LastingConsole(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self.held: list[tuple[Any, str | None]] | None = None  # None: nothing is held back

    def line(self, text: str, style: str | None = None) -> None:
        """One line of plain text."""
        self.put(escape(printable(text)), style)

    def put(self, what: Any, style: str | None = None) -> None:
        """Anything that the console prints; later, where an answer is to come before it."""
        if self.held is None:
            self.console.print(what, style=style)
        else:
            self.held.append((what, style))

    def trouble(self, text: str) -> None:
        """What holds a run up, said at once; on stderr where nothing may come before the answer."""
        if self.held is None:
            self.line(text, style="yellow")
        else:
            error_console().print(escape(printable(text)), style="yellow")

    @contextmanager
    def until_answered(self) -> Iterator[None]:
        """Behind this block nothing is held back, whether there was an answer or not."""
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Print what was held back, and hold nothing from here on."""
        held, self.held = self.held or [], None
        for what, style in held:
            self.console.print(what, style=style)

    def heading(self, config: Mapping[str, Any], experiment: str | None, run_id: str) -> None:
        """What is being tested, on which host. Of a diagnosis the answer comes first, this behind it."""
        if config["job"]["name"] == "diagnose":
            self.held = []
        title = f"[bold]{escape(experiment or config['job']['name'])}"
        self.put(Rule(title, align="left", style="rule.line"))
        if config.get("claim"):
            self.line(f"claim    {config['claim']}")
        if config.get("predict"):
            self.line(f"predict  {config['predict']}")
        if "wiring" in config:
            self.line(f"wiring   {wiring_in_words(config['wiring'])}")
        parts = [
            f"{role} {config[role]['name']}"
            for role in ("target", "drafter", "data")
            if role in config
        ]
        if "path" in config["job"]:
            parts = [" ".join([config["job"]["path"], *config["job"]["args"]])]
        device = config["job"]["device"]
        self.line(f"on       host {config['host']['name']}, device {device}: {', '.join(parts)}")
        self.line(f"run      {run_id}", style="dim")

    def host(
        self, environment: Mapping[str, Any], changes: Sequence[str], last: str | None
    ) -> None:
        """What the job will run in, and what of that is not as it was in the last run there."""
        self.line(f"where    {environment_in_words(environment)}", style="dim")
        for change in changes[:MOST_CHANGES]:
            self.line(f"changed  {change} (since {last})", style="yellow")
        if len(changes) > MOST_CHANGES:
            more = len(changes) - MOST_CHANGES
            self.line(f"changed  and {more} more, in the run's preflight.json", style="yellow")

    def meanwhile(self, run_id: str, verdict: Mapping[str, Any]) -> None:
        """What became of a run that nobody followed to its end."""
        word = verdict["verdict"]
        said = (
            f"[{COLOURS[word]}]{word.replace('_', ' ')}[/]  {escape(printable(verdict['reason']))}"
        )
        self.put(f"meanwhile  {escape(run_id)} has ended: {said}")

    def ask_interrupt(self) -> str:
        """What Ctrl-C is to do: 'detach' or 'cancel'. A second one detaches.

        Where there is no terminal nobody can be asked, and it cancels.
        """
        if not (self.console.is_terminal and sys.stdin.isatty()):
            return "cancel"
        with second_interrupt() as came:
            while True:
                self.console.print(
                    "\nDetach and leave the run going, or cancel it? \\[d/c] ", end=""
                )
                ready, _, _ = select.select([sys.stdin, came], [], [])
                word = sys.stdin.readline().lower() if came not in ready else ""
                if not word or "detach".startswith(word.strip() or "?"):
                    return "detach"
                if "cancel".startswith(word.strip() or "?"):
                    return "cancel"

    @contextmanager
    def progress(self) -> Iterator[tuple[OnEvent, OnInterrupt]]:
        """Within the block, events draw progress bars (or one line a finished stage) and notes."""
        if not self.console.is_terminal:
            yield self.plain_event, self.ask_interrupt
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bars:
            tasks: dict[str, Any] = {}
            starting = bars.add_task("the job starts", total=None)

            def on_event(event: dict[str, Any]) -> None:
                if event["type"] == "progress":
                    bars.update(starting, visible=False)
                    what = event["what"]
                    if what not in tasks:
                        tasks[what] = bars.add_task(STAGES.get(what, what), total=event["total"])
                    bars.update(tasks[what], completed=event["done"], total=event["total"])
                elif event["type"] == "note":
                    self.line(f"note     {event['text']}", style="dim")

            def on_interrupt() -> str:
                bars.stop()  # the question must not be drawn over
                said = self.ask_interrupt()
                bars.start()
                return said

            yield on_event, on_interrupt

    def plain_event(self, event: dict[str, Any]) -> None:
        """An event without a terminal: notes, and the end of a stage."""
        if event["type"] == "note":
            self.line(f"note     {event['text']}")
        elif event["type"] == "progress" and event["done"] == event["total"]:
            self.line(
                f"{STAGES.get(event['what'], event['what'])}: {event['done']} of {event['total']}"
            )

    def answer(self, result: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
        """The table of figures and the verdict; of a diagnosis first what counts most."""
        diagnosis = result.get("diagnosis") or {}
        for number, text in enumerate(diagnosis.get("first_lines") or []):
            self.console.print(escape(printable(text)), style=None if number else "bold")
        self.release()
        metrics = result.get("metrics") or {}
        self.slots(result.get("slots") or [])
        if metrics:
            truths = any(m.get("truth") for m in metrics.values())
            columns = ("", "value", "95 % interval", "counts", *(["truth"] if truths else []))
            table = Table(*columns, box=None, pad_edge=False)
            main = f"accuracy/{metrics.get('accuracy', {}).get('truth')}"  # the first row again
            for name in sorted(metrics, key=lambda n: ORDER.index(n) if n in ORDER else 99):
                if name == main:
                    continue
                m = metrics[name]
                # A script's own figures may come without an interval or counts.
                interval = f"{figure(m, 'low')} to {figure(m, 'high')}" if "low" in m else ""
                counts = f"{m['numerator']}/{m['denominator']}" if "numerator" in m else ""
                cells = (figure(m, "value"), interval, counts, m.get("truth") or "")
                label = LABELS.get(name, name)
                if diagnosis and diagnosis.get("served") is None:
                    label = label.replace("as served", "as declared")  # no engine was named
                table.add_row(escape(label), *cells[: len(columns) - 1])
            self.console.print(table)
            for name, points in (result.get("curves") or {}).items():
                if name.startswith(TRAINERS):
                    steps = "  ".join(f"{point['value']:.3f}" for point in points)
                    self.line(f"{name}, from step {points[0]['step']} on: {steps}")
        if result.get("ranked"):
            from orchestrator.show_search import show_diagnosis, show_search

            if diagnosis:
                show_diagnosis(self, diagnosis)
            show_search(self, result)
        if probe := result.get("probe"):
            named = probe["where"]
            fault = (
                "no fault"
                if named == "none"
                else named
                if named == "undecided"
                else f"fault: {named}"
            )
            self.line(f"{fault}; {probe['why']}", style="bold")
        if result.get("bench"):
            from orchestrator.show_bench import show_bench

            show_bench(self, result["bench"])
        self.findings(diagnosis.get("findings") or result.get("findings") or [])
        word = verdict["verdict"]
        self.console.print(
            f"[bold {COLOURS[word]}]{word.replace('_', ' ')}[/]  {escape(printable(verdict['reason']))}"
        )

    def slots(self, slots: Sequence[Mapping[str, Any]]) -> None:
        """What each slot of a dump is, and how that is known."""
        for slot in slots:
            colour = VERDICT_COLOURS.get(slot["verdict"], "yellow")
            self.line(f"slot {slot['index']}   {slot['what']}", style=colour)

    def findings(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """What is wrong, in the order of its gravity: what it does to acceptance, and what to write."""
        shown: Counter[str] = Counter()
        counts = Counter(finding["name"] for finding in findings)
        for finding in findings:
            shown[finding["name"]] += 1
            if shown[finding["name"]] > MOST_ALIKE:
                if shown[finding["name"]] == counts[finding["name"]]:
                    more = counts[finding["name"]] - MOST_ALIKE
                    self.line(f"\n         and {more} more {finding['name']}", style="dim")
                continue
            colour = SEVERITY_COLOURS[finding["severity"]]
            head = f"\n[{colour}]{finding['severity']:<8}[/] [bold]{escape(finding['name'])}[/]"
            self.console.print(f"{head}  {escape(printable(finding['where']))}")
            self.line(f"  {finding['what']}")
            self.line(f"  acceptance: {finding['effect']}")
            for number, line in enumerate(finding["fix"]):
                self.line(f"  {'     ' if number else 'fix: '}{line}", style="green")
            self.line(f"  known by: {finding['evidence']}", style="dim")

    def not_answered(self, reason: str, folder: Path) -> None:
        """A run that gave no answer: why, and where its log is."""
        self.release()
        self.console.print(f"[bold red]not answered[/]  {escape(printable(reason))}")
        self.line(f"log      {folder / 'log'}", style="dim")

    def filed(self, where: str) -> None:
        """Where the run is filed and how to look at it."""
        self.line(f"filed    {where}", style="dim")

    def runs(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line a run: when, where, what became of it."""
        if not rows:
            self.line("there are no runs yet")
            return
        table = Table("run", "host", "state", "", box=None, pad_edge=False)
        for row in rows:
            cells = (row["run_id"], row["host"], row["state"], row["said"])
            table.add_row(*map(escape, cells))
        self.console.print(table)

    def sweep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One line a run of a sweep."""
        counts = Counter(row["verdict"] for row in rows)
        missing, started = counts["not_answered"], counts["started"]
        title = f"[bold]{len(rows) - missing - started} answered, {missing} not answered"
        self.console.rule(title + (f", {started} started" if started else ""), align="left")
        columns = ("experiment", "wiring", "accuracy", "accept length", "verdict")
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            names = (escape(row["experiment"]), escape(row["wiring"]))
            cells = (*names, row["accuracy"], row["accept_length"])
            table.add_row(
                *cells, f"[{COLOURS[row['verdict']]}]{row['verdict'].replace('_', ' ')}[/]"
            )
        self.console.print(table)


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or colour it: some of it comes from hosts."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def figure(metric: Mapping[str, Any], part: str) -> str:
    """A rate with three digits; a script's own figure, which may be of any size, with six."""
    return f"{metric[part]:.3f}" if "numerator" in metric else f"{metric[part]:.6g}"


def environment_in_words(environment: Mapping[str, Any]) -> str:
    """'gpu8: Python 3.11.7, torch 2.13.0 (CUDA 13.0), 2 x RTX 6000 Ada, Linux 6.1.0'."""
    torch = environment["torch"]
    parts = [f"Python {environment['python']}"]
    if torch:
        built = f"CUDA {torch['cuda']}" if torch.get("cuda") else "no CUDA"
        parts.append(f"torch {torch['version']} ({built})")
    names = environment["gpus"]
    parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    parts.append(f"Linux {environment['kernel']}")
    return f"{environment['hostname']}: {', '.join(parts)}"


@contextmanager
def second_interrupt() -> Iterator[int]:
    """Within the block Ctrl-C raises nothing, but makes this file descriptor readable."""
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    # By Python's handler it would not be readable where the signal comes just before select.
    wakened = signal.set_wakeup_fd(comes)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakened)
        os.close(comes)
        os.close(came)


def wiring_in_words(wiring: Mapping[str, Any]) -> str:
    """'layers [-1, 2, 30] (output) = states 0, 3, 31; d2t offset; decoder layer included'."""
    from eagle3.wiring import Wiring

    states = ", ".join(str(k) for k in Wiring.parse(wiring).states())
    words = (
        f"layers {wiring['layers']} ({wiring['convention']}) = states {states}; d2t {wiring['d2t']}; "
        f"decoder layer {wiring['decoder_layer']}; embedding {wiring['embedding']}"
    )
    return "; ".join([words, *unusual(wiring, RARE)])


def wiring_in_short(wiring: Mapping[str, Any]) -> str:
    """'[-1, 2, 30] = states 0, 3, 31', and the switches that are not at their usual place."""
    from eagle3.wiring import Wiring

    states = ", ".join(str(k) for k in Wiring.parse(wiring).states())
    usual = {"d2t": "offset", "decoder_layer": "included", "embedding": "target"}
    return "; ".join([f"{wiring['layers']} = states {states}", *unusual(wiring, usual | RARE)])


def unusual(wiring: Mapping[str, Any], usual: Mapping[str, str]) -> list[str]:
    """The switches that are not at their usual place; runs of old do not have all of them."""
    return [
        f"{name} {wiring[name]}" for name in usual if wiring.get(name, usual[name]) != usual[name]
    ]


def error_line(message: str) -> None:
    """One sentence on stderr."""
    error_console().print(f"[bold red]error:[/] {escape(printable(message))}")


def error_console() -> Console:
    """The console on stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=True)

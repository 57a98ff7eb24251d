"""Run a person's own Python script: one case a list of arguments.

What it prints goes to the run's log. Lines there, and a JSON file, become metrics:

    metric NAME=VALUE [step=N] [low=X high=Y]
    {"NAME": number, "NAME": {"value": …, "low": …, "high": …}, "NAME": [{"step": …, "value": …}]}

The figure of a name is its last value without a step, or else the last one of its highest step. The
script runs in the run's folder `work/`, with the snapshot on its import path, RUN_DIR, and in
ORCHESTRATOR_METRICS the name of the file to write.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs.events import Events
from jobs.supervisor import PR_SET_PDEATHSIG, SUPERVISOR, prctl

LONG_LINE = 64 << 10  # bytes; a longer line is no metric
CHUNK = 1 << 20
MANY_POINTS = 100_000  # a case; more are measured too often to be looked at
MANY_NOTES = 20
LARGE_FILE = 64 << 20
LONG_NAME = 250
PAUSES_S = (0.01, 0.2)
LINE = re.compile(rb"metric [^\n]*")  # a fixed beginning, which is found fast
METRIC = re.compile(r"metric\s+([^\s=]+)=(\S+)((?:\s+(?:step|low|high)=\S+)*)\s*")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|infinity)", re.I)
NEWLINE = ord("\n")
STEP = re.compile(r"[-+]?\d{1,18}")

Figure = dict[str, Any]  # value, and low and high where there is an interval


class ScriptFailed(Exception):
    """The script ended badly; `trace` holds the last lines it wrote."""

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence)
        self.trace = trace


def open_job(request: Mapping[str, Any], events: Events) -> Script:
    """Find the script and take its fingerprint."""
    path = Path(request["inputs"]["script"]["path"]).expanduser()
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(
            f"the script {path} cannot be read on the host: {error.strerror}; job.path must name it"
        ) from error
    return Script(path, f"sha256:{digest}", events)


class Script:
    """Answers cases `{"case_id": …, "args": […], "metrics_file": path or null}`."""

    def __init__(self, path: Path, fingerprint: str, events: Events) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.events = events
        self.run_dir = events.path.absolute().parent

    def run_case(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Run the script with the case's arguments to its end."""
        work = self.run_dir / "work"
        work.mkdir(exist_ok=True)
        named = case.get("metrics_file")
        try:
            metrics_file = work / Path(named or "metrics.json").expanduser()
        except RuntimeError as error:
            raise BadInput(f"metrics_file {named}: {error}") from error
        before = stamp(metrics_file)
        figures = Figures(case["case_id"], self.events)
        tail = Tail(self.run_dir / "log")
        process = self.start(case["args"], work, metrics_file)
        with ending_together(process):
            code = watch(process, tail, figures)
        self.check_end(code, tail)
        after = stamp(metrics_file)
        if after is not None and after != before:
            figures.take_file(metrics_file)
        elif named:
            raise BadInput(f"{self.path.name} ended without writing its metrics_file {named}")
        return {
            **figures.plain(),
            "wiring": {},
            "fingerprints": {"script": self.fingerprint},
            "notes": figures.notes,
        }

    def start(self, args: Sequence[str], work: Path, metrics_file: Path) -> subprocess.Popen[bytes]:
        """The script as a process, its output on this process's own, which is the run's log."""
        snapshot = str(Path(__file__).absolute().parents[1])
        imports = os.pathsep.join([snapshot, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {name: value for name, value in os.environ.items() if name != SUPERVISOR}
        env |= {
            "PYTHONPATH": imports,
            "PYTHONUNBUFFERED": "1",
            "RUN_DIR": str(self.run_dir),
            "ORCHESTRATOR_METRICS": str(metrics_file),
        }
        worker = os.getpid()

        def die_with_worker() -> None:  # which has one thread: forking is safe
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != worker:
                os._exit(1)

        try:
            # Bytes, since str would be encoded by the locale of whoever started all this.
            plain = [arg.encode("utf-8", "surrogateescape") for arg in args]
            return subprocess.Popen(
                [os.fsencode(sys.executable), os.fsencode(self.path), *plain],
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_worker,
            )
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{self.path.name} cannot be started with these args: {error}"
            ) from error

    def check_end(self, code: int, tail: Tail) -> None:
        """Raises ScriptFailed where the script ended otherwise than with 0."""
        if code == 0:
            return
        trace = tail.last_bytes().decode("utf-8", "replace")
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            raise ScriptFailed(f"{self.path.name} was killed by {name}", trace)
        lines = [line.strip() for line in trace.splitlines() if line.strip()]
        last = f"its last line: {lines[-1][:300]}" if lines else "it wrote nothing"
        raise ScriptFailed(f"{self.path.name} ended with exit code {code}; {last}", trace)


@contextmanager
def ending_together(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within the block, SIGTERM ends this process only once the script has ended.

    The supervisor sends it to both and waits before it kills: that time is the script's to use.
    """
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, before)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What tells a file that was written again; None where there is no regular file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if path.is_file() else None


def watch(process: subprocess.Popen[bytes], tail: Tail, figures: Figures) -> int:
    """Follows the log until the script has ended; its exit code, negative for a signal."""
    pause = PAUSES_S[0]
    while True:
        code = process.poll()
        # What a child that outlives the script writes from here on is not waited for.
        for line in tail.new_lines(tail.size()):
            figures.take_line(line)
            pause = PAUSES_S[0]
        if code is not None:
            if rest := tail.rest():
                figures.take_line(rest)
            return code
        time.sleep(pause)
        pause = min(pause * 1.5, PAUSES_S[1])


class Tail:
    """The lines of a growing log that begin with 'metric ', from its present end on.

    Holds at most one chunk and one line of LONG_LINE bytes, whatever is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = self.size()
        self._offset = self.begin
        self._held = b""
        self._skipping = False  # inside a line that is too long

    def size(self) -> int:
        """The log's size now."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def new_lines(self, end: int) -> Iterator[bytes]:
        """The complete metric lines up to the offset `end`."""
        if self._offset >= end:
            return
        with self.path.open("rb") as log:
            log.seek(self._offset)
            while self._offset < end and (data := log.read(min(CHUNK, end - self._offset))):
                self._offset += len(data)
                yield from self._feed(data)

    def _feed(self, data: bytes) -> Iterator[bytes]:
        # A progress bar goes back to the line's start with a \r, so that ends a line, too.
        data = self._held + data.replace(b"\r", b"\n")
        begin, end = 0, data.rfind(b"\n") + 1
        if self._skipping and end:
            begin, self._skipping = data.index(b"\n"), False
        for match in LINE.finditer(data, begin, end):
            if match.start() == 0 or data[match.start() - 1] == NEWLINE:
                yield match.group()[:LONG_LINE]
        self._held = data[end:]
        if self._skipping or len(self._held) > LONG_LINE:
            if not self._skipping and self._held.startswith(b"metric "):
                yield self._held[:LONG_LINE]
            self._held, self._skipping = b"", True

    def rest(self) -> bytes:
        """A last metric line that has no end."""
        return self._held if self._held.startswith(b"metric ") else b""

    def last_bytes(self, limit: int = 4096) -> bytes:
        """The end of what was written since the beginning."""
        try:
            with self.path.open("rb") as log:
                log.seek(max(self.begin, self.size() - limit))
                return log.read(limit)
        except FileNotFoundError:
            return b""


@dataclass
class Series:
    """All values of one name: those with a step, and the last one without."""

    plain: Figure | None = None
    steps: dict[int, Figure] = field(default_factory=dict)

    def figure(self) -> Figure:
        """The one that stands for the name."""
        return self.plain or self.steps[max(self.steps)]


class Figures:
    """What a script has measured; odd values become notes and never fail it."""

    def __init__(self, case_id: str, events: Events) -> None:
        self.case_id = case_id
        self.events = events
        self.series: dict[str, Series] = {}
        self.notes: list[str] = []
        self._noted: set[str] = set()
        self._points = 0

    def note(self, key: str, text: str) -> None:
        """Says something once for each `key`."""
        if key in self._noted or len(self._noted) >= MANY_NOTES:
            return
        self._noted.add(key)
        self.notes.append(text)
        self.events.note(text)

    def take_line(self, line: bytes) -> None:
        """A line of the log that begins with 'metric '."""
        text = line.decode("utf-8", "replace")
        match = METRIC.fullmatch(text)
        words = match.group(3).split() if match else []
        parts = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
        more = dict(parts)
        whole = STEP.fullmatch(more.get("step", "0"))
        numbers = [match.group(2) if match else "", *(more[k] for k in more if k != "step")]
        if not match or len(more) < len(parts) or not whole or not all(map(is_number, numbers)):
            self.note(
                "line",
                f"this line is no metric NAME=VALUE [step=N] [low=X high=Y]: {text[:120]!r}; others "
                "like it are passed over without a word",
            )
            return
        bounds = {name: float(more[name]) for name in ("low", "high") if name in more}
        step = int(more["step"]) if "step" in more else None
        name = match.group(1)
        figure = self.figure(name, {"value": float(match.group(2)), **bounds})
        if figure is None or not self.keep(self.series, name, step, figure):
            return
        self.events.metric(self.case_id, name, figure["value"], step)

    def figure(self, name: str, given: object) -> Figure | None:
        """A finite figure of a legal name; None, and a note, where it is not one."""
        found = as_figure(given)
        if not 1 <= len(name) <= LONG_NAME:
            fault = f"has a name of {len(name)} characters, not of 1 to {LONG_NAME}"
        elif found is None:
            fault = f"is {repr(given)[:200]}, not a number or a value with both low and high"
        elif not all(map(math.isfinite, found.values())):
            fault = f"is {' '.join(f'{key} {found[key]}' for key in found)}, which is not finite"
        elif "low" in found and not found["low"] <= found["value"] <= found["high"]:
            fault = f"is {found['value']}, outside {found['low']} to {found['high']}"
        else:
            return found
        self.note(f"figure {name}", f"metric {name[:60]!r} {fault}; it is left out")
        return None

    def keep(self, series: dict[str, Series], name: str, step: int | None, figure: Figure) -> bool:
        """Adds one point, unless there are too many."""
        self._points += 1
        if self._points > MANY_POINTS:
            self.note("many", f"more than {MANY_POINTS} metric values; the others are left out")
            return False
        kept = series.setdefault(name, Series())
        if step is None:
            kept.plain = figure
        else:
            kept.steps[step] = figure
        return True

    def take_file(self, path: Path) -> None:
        """What the script wrote into its JSON file; it wins over what it printed."""
        try:
            if path.stat().st_size > LARGE_FILE:
                raise BadInput(f"the metrics file {path} is larger than {LARGE_FILE >> 20} MiB")
            data = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"the metrics file {path} cannot be read as JSON: {error}") from error
        if not isinstance(data, dict):
            raise BadInput(f"the metrics file {path} holds no JSON object of metrics")
        filed: dict[str, Series] = {}
        for name, given in data.items():
            for step, value in points_of(given):
                if figure := self.figure(name, value):
                    self.keep(filed, name, step, figure)
        for name, series in filed.items():
            printed = self.series.get(name)
            if printed and printed.figure()["value"] != series.figure()["value"]:
                self.note(
                    f"both {name}",
                    f"metric {name!r} was printed as {printed.figure()['value']} and written to "
                    f"{path.name} as {series.figure()['value']}; the file's counts",
                )
        self.series.update(filed)

    def plain(self) -> dict[str, Any]:
        """The metrics and curves of a result."""
        curves = {
            name: [{"step": step, **series.steps[step]} for step in sorted(series.steps)]
            for name, series in self.series.items()
            if series.steps
        }
        return {
            "metrics": {name: series.figure() for name, series in self.series.items()},
            "curves": curves,
        }


def is_number(word: str) -> bool:
    """Whether float() may read it; that alone would take '1_0' as well."""
    return NUMBER.fullmatch(word) is not None


def as_figure(given: object) -> Figure | None:
    """A number, or an object with a value and both bounds or none, with floats; else None."""
    parts = dict(given) if isinstance(given, dict) else {"value": given}
    parts.pop("step", None)
    if parts.keys() not in ({"value"}, {"value", "low", "high"}):
        return None
    found = {}
    for name, number in parts.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        try:
            found[name] = float(number)
        except OverflowError:
            found[name] = math.inf if number > 0 else -math.inf
    return found


def points_of(given: object) -> Iterator[tuple[int | None, object]]:
    """(step, figure) of one name's entry in the file; a wrong entry comes as it is."""
    if isinstance(given, dict) and "step" in given:
        given = [given]
    if not isinstance(given, list) or not given:
        yield None, given
        return
    for point in given:
        step = point.get("step") if isinstance(point, dict) else None
        if isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 10**18:
            yield None, [point]  # a list is no figure: it is told and left out
        else:
            yield step, point

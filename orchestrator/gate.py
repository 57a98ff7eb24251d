"""Verb `gate`: accept lengths held against those stored of other engine versions, for CI.

A hypothesis is run by the same way as every other, or a run that is there is taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from orchestrator.errors import InputError
from orchestrator.gate_check import Held, hold
from orchestrator.gate_figure import JOB, LEAST_PROMPTS, Figure, Gated, gated, stated
from orchestrator.gate_file import (
    alone,
    check_patch,
    no_entry,
    read_golden,
    stored,
    with_figure,
    write_golden,
)
from orchestrator.paths import RunPaths
from orchestrator.runs import exit_code, find_run, results_of
from orchestrator.show import Show, error_line, printable

USAGE = (
    "python -m orchestrator gate golden=FILE [store=true] "
    "(+experiment=NAME … | run=RUN [results=FOLDER])"
)
ABOUT = """Hold the accept length of a benchmark (job=engine_bench) against those that FILE keeps by
engine version, as after an upgrade of the engine.

  golden   a JSON file, to be committed; an entry for each engine, drafter, target, prompts, wiring,
           draft, answer length, concurrency and flags
  run      a run that has ended: its id, a part of it, its folder, or `last`; left out: the
           hypothesis that is named, in the words of the plain command, is run first
  store    true keeps the figure in FILE under its engine version, unless it is clearly lower than any
           or lower than that version's own

Exit code 0: as stored, or not clearly lower than any stored version; 3: clearly lower; 2: nothing
to hold it against, or no figure to hold; 1: the run was not answered."""
OWN = ("golden", "run", "store")
LOWER = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of the verb."""

    golden: Path
    store: bool
    run: str | None
    results: str | None  # for `run` alone
    overrides: tuple[str, ...]
    config_dir: Path | None


def run(arguments: list[str]) -> int:
    """Run a hypothesis or take a run, and hold its accept length; the exit code. Raises InputError."""
    show = Show()
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        show.line(f"{USAGE}\n{ABOUT}")
        return 0
    asked = parse(arguments)
    if asked.run is not None:
        return check(show, asked, find_run(asked.run, results_of(asked.results)))
    from orchestrator.compose import composed

    resolved = composed(asked.overrides, asked.config_dir)
    check_before(asked, resolved.config)
    from orchestrator.loop import run as run_loop
    from orchestrator.session import Session

    with Session(show) as session:
        folder = run_loop(session, resolved)
    code = exit_code(session.folders, failed=session.failed)
    if not answered(folder):
        error_line("the gate was not checked, since the run gave no answer")
        return code or 1
    held = check(show, asked, folder)
    return code if code in (1, 2) else held or code


def parse(arguments: Sequence[str]) -> Asked:
    """The arguments by name; what is not the gate's own is the hypothesis's. Raises InputError."""
    own: dict[str, str] = {}
    overrides: list[str] = []
    config_dir: str | None = None
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        key, is_setting, value = argument.partition("=")
        if key == "--config-dir":
            config_dir = value if is_setting else (rest.pop(0) if rest else "")
        elif argument.startswith("-") or not (is_setting or argument.startswith("~")):
            raise InputError(f"gate takes no {argument!r}; usage: {USAGE}")
        elif key not in OWN:
            overrides.append(argument)
        elif key in own:
            raise InputError(f"{key} is given twice, as {own[key]} and {value}")
        elif not value:
            raise InputError(f"{key}= is empty; leave it out or give it a value")
        else:
            own[key] = value
    if "golden" not in own:
        raise InputError(f"gate needs golden=FILE; usage: {USAGE}")
    if own.get("store", "false") not in ("true", "false"):
        raise InputError(f"store={own['store']}: write store=true or leave it out")
    results = None
    if "run" in own:
        others = [o for o in overrides if not o.startswith("results=")]
        if others or config_dir is not None or len(overrides) > 1:
            found = others[0] if others else "--config-dir" if config_dir else overrides[-1]
            raise InputError(f"run={own['run']} is checked as it is; leave {found} out")
        results = overrides[0].removeprefix("results=") if overrides else None
    if config_dir is not None and not Path(config_dir).is_dir():
        raise InputError(f"--config-dir {config_dir} is no folder")
    return Asked(
        golden=golden_path(own["golden"]),
        store=own.get("store") == "true",
        run=own.get("run"),
        results=results,
        overrides=tuple(overrides),
        config_dir=None if config_dir is None else Path(config_dir),
    )


def golden_path(given: str) -> Path:
    """Where the golden file lies, or will lie. Raises InputError where there is no such folder."""
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        raise InputError(f"golden={given}: {error}") from error
    if not path.parent.is_dir():
        raise InputError(f"golden={given}: there is no folder {path.parent}; make it first")
    return path


def check_before(asked: Asked, config: dict[str, Any]) -> None:
    """Raises InputError, before anything is started, for what could not be held afterwards."""
    job = config["job"]
    if job["name"] != JOB:
        raise InputError(f"the gate checks runs of job={JOB}, not job={job['name']}")
    if job["control"]:
        raise InputError("job.control=true has no drafter in it; the gate has nothing to hold")
    if job["max_prompts"] < LEAST_PROMPTS:
        raise InputError(
            f"job.max_prompts={job['max_prompts']} is too few for the gate, since even a halving could "
            f"be chance; ask at least {LEAST_PROMPTS}"
        )
    if config["detach"]:
        raise InputError(
            "the gate waits for the answer; leave detach=true out, or check the run later: run=RUN"
        )
    data = read_golden(asked.golden)
    if asked.store:
        return
    told = stated(config)
    entries = (data or {"entries": []})["entries"]
    known = [{p: entry["key"][p] for p in told if p in entry["key"]} for entry in entries]
    if told not in known:
        near = [{**entry, "key": key} for entry, key in zip(entries, known, strict=True)]
        raise InputError(no_entry(asked.golden, {"entries": near}, told))


def answered(folder: Path) -> bool:
    """Whether a run was followed to an answer."""
    verdict = RunPaths(folder).verdict
    if not verdict.is_file():
        return False
    return bool(json.loads(verdict.read_bytes())["verdict"] != "not_answered")


def check(show: Show, asked: Asked, folder: Path) -> int:
    """Hold a run's figure, show what came of it, store it where that is asked for; the exit code."""
    run = gated(RunPaths(folder))
    if not asked.store:
        return check_run(show, asked, run)
    with alone(asked.golden):
        return check_run(show, asked, run)


def check_run(show: Show, asked: Asked, run: Gated) -> int:
    """The same, once nobody else changes the golden file."""
    data = read_golden(asked.golden)
    versions = stored(data, run.key)
    check_patch(asked.golden, versions, run)
    if not versions and not asked.store:
        raise InputError(no_entry(asked.golden, data, run.key))
    held = hold(run.figure, versions, most=run.key["steps"])
    show_held(show, asked.golden, run, held)
    lower = [one for one in held if one.lower]
    if lower:
        show.line(failed(run, lower, asked), style="red")
        return LOWER
    if held:
        show.line(passed(run, held, asked), style="green")
    if asked.store:
        store(show, asked.golden, data, run, held)
    return 0


def store(
    show: Show, golden: Path, data: dict[str, Any] | None, run: Gated, held: Sequence[Held]
) -> None:
    """Keep a run's figure, unless the same version's stored one is equal or higher.

    An equal one of an older file, which does not say its patch, is replaced by one that does.
    """
    for one in held:
        unsaid = one.figure.patch is None and run.figure.patch is not None
        if one.version == run.version and one.equal and not unsaid:
            return
        if one.version == run.version and one.value < 0:
            show.line(
                f"kept     the stored figure of {run.version}, since this one is {-one.value:.3f} "
                f"lower; to accept that, take {run.version} out of {golden} and store again"
            )
            return
    write_golden(golden, with_figure(data, run))
    show.line(f"stored   {run.key['engine']} {run.version} in {golden}")


def show_held(show: Show, golden: Path, run: Gated, held: Sequence[Held]) -> None:
    """The run, and a row for each stored version."""
    key, now = run.key, run.figure
    show.line(
        f"\ngate     {golden}: {key['engine']} {run.version}, accept length {in_words(now)} of "
        f"{key['number_of_prompts']} prompts (run {now.run})",
        style="bold",
    )
    if not held:
        return
    table = Table("version", "stored", "now", "difference", "", box=None, pad_edge=False)
    for one in held:
        apart = "0" if one.equal else f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
        cells = (one.version, in_words(one.figure), in_words(now), apart, one.word)
        table.add_row(*(escape(printable(cell)) for cell in cells))
    show.put(table)


def in_words(figure: Figure) -> str:
    """'2.500 [2.400, 2.600] 120/48'."""
    bounds = f"[{figure.low:.3f}, {figure.high:.3f}]"
    return f"{figure.value:.3f} {bounds} {figure.numerator}/{figure.denominator}"


def failed(run: Gated, lower: Sequence[Held], asked: Asked) -> str:
    """Why the gate is closed, and how a person opens it."""
    names = " and ".join(one.version for one in lower)
    kept = "; nothing was stored" if asked.store else ""
    return (
        f"failed   {run.key['engine']} {run.version} accepts clearly less than {names} did of the same "
        f"prompts{kept}; to accept that, take {names} out of {asked.golden}"
    )


def passed(run: Gated, held: Sequence[Held], asked: Asked) -> str:
    """What came of it, and whether it is worth keeping."""
    if all(one.equal for one in held):
        said = "every prompt is accepted as stored"
    elif any(one.higher for one in held):
        names = " and ".join(one.version for one in held if one.higher)
        said = f"more is accepted than {names} did"
    else:
        fall = -min(one.low for one in held if not one.equal)
        said = (
            "it differs, but is not clearly lower: the interval of the difference holds 0, and with it "
            f"a fall of up to {fall:.3f}"
        )
    better = all(one.higher for one in held if one.version == run.version)  # or it is new
    hint = "; store=true would keep it" if better and not asked.store else ""
    return f"passed   {said}{hint}"

"""Verb `doctor`: read a drafter's files where they are, and say what will not fit together."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.asked import ENGINE, SHIPPED, Asked, flags_of, host_of, placed, read, states_of
from orchestrator.errors import HostError, InputError, OrchestratorError
from orchestrator.paths import CLONE

if TYPE_CHECKING:
    from orchestrator.channel import Channel, Request
    from orchestrator.push import Load
    from orchestrator.show import Show

USAGE = (
    "python -m orchestrator doctor [host=NAME] drafter=PATH [target=PATH] [data=PATH] [states=[…]] "
    "[trainer=NAME|PATH] [engine=NAME engine_version=X.Y.Z engine_class=NAME engine_checkout=PATH "
    "engine_flags=…] [json=true] [verbose=true]"
)
ABOUT = """Read headers and configs where the files are, and say what will not fit together.

  host              a config of conf/host, or any host that ssh reaches; left out: this machine
  drafter, target   checkpoint folders on that host; `lab` is the one that is shipped, and
                    `lab_speculators` a second drafter
  data              a folder of captured samples; states=[0,3,31,59] says which canonical states its
                    slots hold, in their order (without data: what the drafter was trained on)
  trainer           specforge, speculators, eagle, modelopt or torchspec, or the JSON of a draft model:
                    checks a run to come, with or without a drafter
  engine            sglang, vllm, tensorrt_llm or llama_cpp, with engine_version; engine_class is the
                    target's class there, such as kimi_k25; engine_checkout a folder with its source;
                    engine_flags the server's flags, as JSON or as 'num_steps=3,topk=1'

Exit codes: 0 nothing found, 3 a warning or an error, 1 the host did not answer or a check broke down,
2 bad input."""
PATHS = ("drafter", "target", "data")
KEYS = (*PATHS, "states", "trainer", "engine", *ENGINE, "host", "json", "verbose", "results")
SEVERITIES = ("error", "warning", "note")
FOUND, BROKEN = 3, 1


def run(arguments: list[str]) -> int:
    """Ask the host and show what it found; 3 where that is a warning or an error."""
    from orchestrator.show import Show

    show = Show()
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        show.line(f"{USAGE}\n{ABOUT}")
        return 0
    asked = parse(arguments)
    verbose = asked.switch("verbose")
    as_json = asked.switch("json")
    report = ask(asked)
    if as_json:
        show.console.out(json.dumps(report, indent=1, ensure_ascii=False), highlight=False)
    else:
        render(show, report, verbose=verbose)
    return exit_code(report)


def exit_code(report: Mapping[str, Any]) -> int:
    """0 where nothing is wrong; notes are nothing wrong; 1 where a part was not examined for a bug."""
    if report["failed"]:
        return BROKEN
    graves = [f for f in report["findings"] if f["severity"] in ("error", "warning")]
    return FOUND if graves else 0


def parse(arguments: Sequence[str]) -> Asked:
    """The arguments by name. Raises InputError for what is unknown or will not do."""
    asked = read(arguments, verb="doctor", keys=KEYS, sections=("host",), usage=USAGE)
    if not asked.settings.keys() & {"drafter", "data", "trainer"}:
        raise InputError(
            "doctor examines a drafter (drafter=PATH) or a run to come (data=PATH trainer=NAME); "
            f"usage: {USAGE}"
        )
    return asked


def question(asked: Asked, *, remote: bool) -> dict[str, Any]:
    """What the host is asked, with its paths; those that are sent along are put in later."""
    settings = asked.settings
    question: dict[str, Any] = {
        role: placed(role, settings[role], remote=remote) for role in PATHS if role in settings
    }
    question["trainer"] = settings.get("trainer")
    trainer = settings.get("trainer", "")
    if trainer.endswith(".json") or "/" in trainer:
        question["trainer"] = placed("trainer", trainer, remote=remote)
    question["states"] = states_of(settings["states"]) if "states" in settings else None
    if "engine" in settings:
        checkout = settings.get("engine_checkout")
        question["engine"] = {
            "name": settings["engine"],
            "version": settings.get("engine_version"),
            "engine_class": settings.get("engine_class"),
            "checkout": checkout and placed("engine_checkout", checkout, remote=remote),
            "flags": flags_of(settings.get("engine_flags", "")),
        }
    return question


def ask(asked: Asked) -> dict[str, Any]:
    """The report of the host. Raises InputError for what it cannot read, HostError for the rest."""
    from orchestrator.session import open_channel

    host = host_of(asked)
    asking = question(asked, remote=host["alias"] is not None)
    with open_channel(host) as channel:
        root = channel.hello()["root"]
        loads, trees = lab_loads(asking, remote=host["alias"] is not None)
        loads = [snapshot_load(), *loads]
        for role, load in trees.items():
            asking[role] = f"{root}/{load.folder}"
        argument = json.dumps({**asking, "snapshot": f"{root}/{loads[0].folder}"})
        report = answer(channel, host, loads, argument)
    report["host"] = host["name"]
    return report


def snapshot_load() -> Load:
    """The code that answers there: the snapshot, as runs have it."""
    from orchestrator.push import Load
    from orchestrator.snapshot import take_snapshot

    return Load(kind="snapshots", tree=take_snapshot(CLONE).tree)


def lab_loads(asking: dict[str, Any], *, remote: bool) -> tuple[list[Load], dict[str, Load]]:
    """The shipped lab's folders where they are named: read in place, or sent along."""
    from orchestrator.plan import local_tree
    from orchestrator.push import Load

    trees = {}
    for role in ("drafter", "target"):
        if (role, asking.get(role)) not in SHIPPED:
            continue
        folder = CLONE / "lab" / SHIPPED[role, asking[role]]
        if remote:
            trees[role] = Load(kind="inputs", tree=local_tree(role, str(folder)))
        else:
            asking[role] = str(folder)
    return list(trees.values()), trees


def answer(
    channel: Channel, host: Mapping[str, Any], loads: Sequence[Load], argument: str
) -> dict[str, Any]:
    """Lays out what is missing there and asks; the report."""
    from orchestrator.push import deliver, lay_out

    probe = probe_request(host, argument)
    laid_out = channel.pipeline([lay_out(load) for load in loads], check=False)
    reply = deliver(channel, loads, laid_out, [probe])[0]
    lines = reply.payload.decode("utf-8", "replace").strip().splitlines()
    try:
        told = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = lines[-1][:120] if lines else ""
        raise HostError(f"{channel.name}: the answer is no JSON; its last line: {last}") from None
    if "error" in told:
        kind, said = told["error"]["kind"], told["error"]["message"]
        raise (
            InputError(said) if kind == "input" else OrchestratorError(f"{channel.name}: {said}")
        )
    return dict(told["report"])


def probe_request(host: Mapping[str, Any], argument: str) -> Request:
    """The question as the host's program takes it."""
    from jobs.doctor import PROGRAM
    from orchestrator.channel import Request

    fields = {"python": host["python"], "env": host["env"], "argument": argument}
    return Request(op="probe", fields=fields, payload=zlib.compress(PROGRAM))


def render(show: Show, report: Mapping[str, Any], *, verbose: bool) -> None:
    """What was examined, what was found in the order of its gravity, and one closing line."""
    for name, said in report["subject"].items():
        show.line(f"{name:<9}{said}", style="dim")
    if verbose:
        detail(show, report)
    for fact in report["facts"]:
        show.line(f"fact     {fact}")
    for left in report["not_examined"]:
        show.line(f"not examined: {left}", style="dim")
    show.findings(report["findings"])
    for said in report["failed"]:
        show.line(f"doctor failed: {said}", style="bold red")
    if report["findings"] or not report["failed"]:
        show.line(closing(report["findings"], len(report["not_examined"])))


def detail(show: Show, report: Mapping[str, Any]) -> None:
    """The drafter's switches with their origins, and its tensors."""
    form = report["form"] or {}
    wide = max((len(name) for name in form), default=0)
    for name, setting in form.items():
        show.line(f"form     {name:<{wide}}  {setting['value']}  ({setting['origin']})")
    for kind, names in report["inventory"].items():
        if names:
            show.line(f"{kind:<9}{', '.join(names)}")


def closing(findings: Sequence[Mapping[str, Any]], left: int) -> str:
    """'2 errors and 1 warning', or that nothing was found among what was examined."""
    parts = []
    for severity in SEVERITIES:
        count = sum(finding["severity"] == severity for finding in findings)
        if count:
            parts.append(f"{count} {severity}{'s' if count > 1 else ''}")
    if not parts and left:
        were = "1 thing above was" if left == 1 else f"{left} things above were"
        return f"nothing found that would not fit, but {were} not examined"
    if not parts:
        return "nothing found that would not fit"
    return "\n" + (parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}")

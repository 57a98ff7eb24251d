"""The verbs: what is asked of the orchestrator beside running a hypothesis."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from orchestrator.errors import InputError

Verb = Callable[[list[str]], int]


def run_ui(arguments: list[str]) -> int:
    """ui: open MLflow's pages on what was filed."""
    from orchestrator import ui

    return ui.run(arguments)


def run_record(arguments: list[str]) -> int:
    """record RUN …|all: file runs again from their folders."""
    from orchestrator import refile

    return refile.run(arguments)


def run_hosts(arguments: list[str]) -> int:
    """hosts trust NAME: pin a host's key."""
    from orchestrator import hosts

    return hosts.run(arguments)


def run_doctor(arguments: list[str]) -> int:
    """doctor drafter=…: contradictions between files, engine and trainer."""
    from orchestrator import doctor

    return doctor.run(arguments)


def run_diagnose(arguments: list[str]) -> int:
    """diagnose drafter=… data=…: the cause, what it costs, and the lines to change."""
    from orchestrator import diagnose

    return diagnose.run(arguments)


def run_gate(arguments: list[str]) -> int:
    """gate golden=FILE …: accept lengths held against those of other engine versions."""
    from orchestrator import gate

    return gate.run(arguments)


def run_layers(arguments: list[str]) -> int:
    """layers '[2,30,58]' engine=…: what layer ids mean, and what to write elsewhere."""
    from orchestrator import layer_ids

    return layer_ids.run(arguments)


def managing(verb: str) -> Verb:
    """A verb over runs that were started before."""

    def run_it(arguments: list[str]) -> int:
        from orchestrator import manage

        return manage.run(verb, arguments)

    return run_it


VERBS: dict[str, Verb] = {
    **{verb: managing(verb) for verb in ("runs", "attach", "logs", "cancel", "collect")},
    "diagnose": run_diagnose,
    "doctor": run_doctor,
    "gate": run_gate,
    "layers": run_layers,
    "record": run_record,
    "hosts": run_hosts,
    "ui": run_ui,
}


def run_verb(name: str, arguments: list[str]) -> int:
    """Run a verb; raises InputError with the nearest one where there is no such verb."""
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"the verbs are {', '.join(VERBS)}"
        raise InputError(
            f"there is no verb '{name}'; {hint} (a hypothesis is run with +experiment=NAME)"
        )
    return VERBS[name](arguments)

"""python -m orchestrator: a verb with its own arguments, or a hypothesis in Hydra's grammar."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InputError, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.loop import Session

VERB = re.compile(r"^[a-z][a-z-]*$")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit code: 0 answered, 1 not answered, 2 bad input, 3 refuted with strict."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    asked_for_trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        if argv and VERB.match(argv[0]):
            from orchestrator.verbs import run_verb

            return run_verb(argv[0], argv[1:])
        return run_hydra(argv)
    except OrchestratorError as error:
        if asked_for_trace:
            traceback.print_exc()
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return 1


def run_hydra(argv: list[str]) -> int:
    """Compose, validate and run; one config, or all the points of a multirun."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from orchestrator.paths import CLONE, CONF
    from orchestrator.schema import register

    register()
    OmegaConf.register_new_resolver("clone", lambda path: str(CLONE / path), replace=True)
    OmegaConf.register_new_resolver("python", lambda _="": sys.executable, replace=True)
    done: list[Session] = []
    refused: list[OrchestratorError] = []

    def task(composed: DictConfig | list[DictConfig]) -> None:
        try:
            answer(composed)
        except OrchestratorError as error:  # Hydra would print a line of its own about it
            refused.append(error)
        except OmegaConfBaseException as error:
            refused.append(InputError(in_one_sentence(error)))

    def answer(composed: DictConfig | list[DictConfig]) -> None:
        from hydra.core.hydra_config import HydraConfig

        from orchestrator.config import resolve

        if isinstance(composed, list):
            points = [resolve(point, point.hydra) for point in composed]
        else:
            points = [resolve(composed, HydraConfig.get())]
        from orchestrator.loop import Session, run
        from orchestrator.show import Show
        from orchestrator.sweep import run_sweep

        with Session(Show()) as session:
            done.append(session)
            if isinstance(composed, list):
                run_sweep(session, points)
            else:
                run(session, points[0])

    # Hydra prints its own errors and exits with 1; told to raise them, they become one sentence here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    saved, sys.argv = sys.argv, ["orchestrator", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(in_one_sentence(error)) from error
    finally:
        sys.argv = saved
    if refused:
        raise refused[0]
    if not done:  # --help, --cfg and their like
        return 0
    from orchestrator.loop import exit_code

    return exit_code(done[0].folders, failed=done[0].failed)


def in_one_sentence(error: BaseException) -> str:
    """Hydra's error on one line, with what to do where it comes from a forgotten package header."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    noise = ("Config search path", "provider=", "object_type", "reference_type", "See https:")
    text = " ".join(line for line in lines if not line.startswith(noise))
    misplaced = re.search(r"In '(experiment/[^']+)': .*Key 'experiment' not in 'Config'", text)
    if misplaced:
        return (
            f"{misplaced.group(1)}.yaml does not open with '# @package _global_', so its values land "
            "under 'experiment' and would change nothing; add that line"
        )
    return text


def complain(message: str) -> None:
    """One line on stderr, without importing anything for it."""
    sys.stderr.write(f"error: {message}\n")


def entry() -> Any:
    """The process's exit."""
    sys.exit(main())


if __name__ == "__main__":
    entry()

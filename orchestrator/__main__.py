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
    from orchestrator.session import Session

VERB = re.compile(r"^[a-z][a-z-]*$")
OURS = ("orchestrator", "jobs", "eagle3", "hydra_plugins")


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
    except ModuleNotFoundError as error:
        if error.name in OURS or not error.name:
            raise
        complain(
            f"{error.name} is not installed for {sys.executable}; run `make setup`, then "
            ".venv/bin/python -m orchestrator"
        )
        return 2
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 1


def run_hydra(argv: list[str]) -> int:
    """Compose, validate and run; one config, or all the points of a multirun."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from orchestrator.explain import explain, explain_null
    from orchestrator.paths import CONF
    from orchestrator.schema import register

    register()
    done: list[Session] = []
    refused: list[OrchestratorError] = []

    def task(composed: DictConfig | list[DictConfig]) -> None:
        try:
            answer(composed)
        except OrchestratorError as error:  # Hydra would print a line of its own about it
            refused.append(error)
        except OmegaConfBaseException as error:
            refused.append(InputError(explain(error)))

    def answer(composed: DictConfig | list[DictConfig]) -> None:
        from hydra.core.hydra_config import HydraConfig

        from orchestrator.config import resolve

        if isinstance(composed, list):
            points = [resolve(point, point.hydra) for point in composed]
        else:
            points = [resolve(composed, HydraConfig.get())]
        from orchestrator.loop import run
        from orchestrator.session import Session
        from orchestrator.show import Show
        from orchestrator.sweep import run_sweep

        with Session(Show()) as session:
            done.append(session)
            if isinstance(composed, list):
                run_sweep(session, points)
            else:
                run(session, points[0])

    # Hydra prints its own errors and exits with 1; told to raise them, they become one sentence here.
    saved_argv, saved_setting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["orchestrator", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise InputError(explain(error)) from error
    except OSError as error:
        raise InputError(
            f"{error.filename} cannot be used ({error.strerror}); set results=FOLDER to a place that "
            "can be written"
        ) from error
    except AttributeError as error:
        if (said := explain_null(error)) is None:
            raise
        raise InputError(said) from error
    finally:
        sys.argv = saved_argv
        if saved_setting is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_setting
    if refused:
        raise refused[0]
    if not done:  # --help, --cfg and their like
        return 0
    from orchestrator.runs import exit_code

    return exit_code(done[0].folders, failed=done[0].failed)


def complain(message: str) -> None:
    """One line on stderr, without importing anything for it."""
    sys.stderr.write(f"error: {message}\n")


def entry() -> Any:
    """The process's exit."""
    sys.exit(main())


if __name__ == "__main__":
    entry()

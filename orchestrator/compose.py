"""A hypothesis resolved from overrides, as the plain command does, for verbs that run one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import InputError
from orchestrator.paths import CONF

if TYPE_CHECKING:
    from orchestrator.config import Resolved


def composed(overrides: Sequence[str], folder: Path | None = None) -> Resolved:
    """The resolved config; `folder` holds configs of a person's own. Raises InputError."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from orchestrator.asked import quoted
    from orchestrator.config import resolve
    from orchestrator.explain import explain, explain_null
    from orchestrator.schema import register

    register()
    given = list(overrides)
    if folder is not None:
        given.append(f"hydra.searchpath=[{quoted(f'file://{folder.absolute()}')}]")
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            config = compose("config", given, return_hydra_config=True)
        task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return resolve(task, config.hydra)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise InputError(explain(error)) from error
    except AttributeError as error:
        if (said := explain_null(error)) is None:
            raise
        raise InputError(said) from error

"""Hydra's way into a multirun: every point is validated, then `orchestrator.sweep` runs them.

Hydra imports this module at every start, so nothing heavy is imported at its top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

# A plain node: Hydra executes this file without entering it in sys.modules, and dataclasses need that.
ConfigStore.instance().store(
    group="hydra/launcher",
    name="orchestrator",
    node={"_target_": "hydra_plugins.orchestrator_launcher.launcher.OrchestratorLauncher"},
)


class OrchestratorLauncher(Launcher):
    """Hands the sweep's points to the orchestrator in one piece."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra says; the task function takes a list of points as well as one."""
        self.hydra_context = hydra_context
        self.task_function: Any = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose all points before the first one starts, then run them."""
        points = []
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            point = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(point):
                point.hydra.job.num = number
                point.hydra.job.id = str(number)
            points.append(point)
        self.task_function(points)
        # What became of each run is in its folder; Hydra only needs to hear that the launch is over.
        returns = []
        for point, overrides in zip(points, job_overrides, strict=True):
            done = JobReturn(overrides=list(overrides), cfg=point, status=JobStatus.COMPLETED)
            done.return_value = None
            returns.append(done)
        return returns

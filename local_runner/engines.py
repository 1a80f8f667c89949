"""The check of the engines' parallel sizes before a run starts."""

from __future__ import annotations

from pathlib import Path

from local_runner.environment import Run, gpus_of
from local_runner.variables import load_settings
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.rollout_server.settings import EngineKind, RolloutSettings


def check(run: Run) -> None:
    """Check that the engines' given sizes fit a node's GPUs, and a model whose configuration is on this machine.

    Where this machine has no GPUs, those that the job group asks for count, because the same settings go to a cluster.

    Raises:
        ConfigurationError: a size does not divide the GPUs of a node or the attention heads of the model.
    """
    for task in run.group.tasks:
        if task.name != Task.ROLLOUT_SERVER or not task.gpus_per_node:
            continue
        settings = load_settings(run, task, RolloutSettings)
        if settings.rollout_engine is EngineKind.EMBEDDED:
            continue
        # Only now: most runs on one machine have no such engine, and begin the sooner without these imports.
        from services.rollout_server.model_files import read_config
        from services.rollout_server.placement import check_given_sizes

        config = read_config(settings.model_name) if Path(settings.model_name).is_dir() else None
        try:
            check_given_sizes(settings, len(gpus_of(run, task, 0)) or task.gpus_per_node, config)
        except ConfigurationError as error:
            raise ConfigurationError(f"{task.name}: {error}") from error

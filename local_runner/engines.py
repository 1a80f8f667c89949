"""The checks of the engines' number and parallel sizes before a run starts."""

from __future__ import annotations

import math
from pathlib import Path

from local_runner.environment import Run, gpus_of
from local_runner.spec import TaskSpec
from local_runner.variables import all_settings, load_settings
from services.core.endpoints import Task
from services.core.errors import ConfigurationError
from services.core.files import check_model_directory
from services.rollout_server.settings import EngineKind, RolloutSettings


def check(run: Run) -> None:
    """Check that there are MIN_WORKERS engines, whose given sizes fit a node's GPUs and a model on this machine.

    Where this machine has no GPUs, those that the job group asks for count, because the same settings go to a cluster.

    Raises:
        ConfigurationError: there are fewer engines than MIN_WORKERS, or a size does not divide the GPUs of a node or
            the attention heads of the model.
    """
    for task in run.group.tasks:
        if task.name != Task.ROLLOUT_SERVER:
            continue
        settings = load_settings(run, task, RolloutSettings)
        n_gpus = len(gpus_of(run, task, 0)) or task.gpus_per_node
        if settings.rollout_engine is EngineKind.EMBEDDED or not n_gpus:
            _check_number(run, task, 1)
            continue
        _check_number(run, task, max(1, n_gpus // (settings.sglang_tp_size or 1)))
        # Only now: most runs on one machine have no such engine, and begin the sooner without these imports.
        from services.rollout_server.placement import check_given_sizes, read_config

        try:
            check_model_directory(settings.model_name)
            config = read_config(settings.model_name) if Path(settings.model_name).is_dir() else None
            check_given_sizes(settings, n_gpus, config)
        except ConfigurationError as error:
            raise ConfigurationError(f"{task.name}: {error}") from error


def _check_number(run: Run, task: TaskSpec, each: int) -> None:
    """Check that nodes of ``each`` engines at most are enough for MIN_WORKERS."""
    engines, nodes = task.num_nodes * each, f"{task.num_nodes} node{'s'[: task.num_nodes > 1]}"
    wanted = max(getattr(settings, "min_workers", 1) for _, _, settings in all_settings(run))
    if wanted > engines:
        raise ConfigurationError(
            f"MIN_WORKERS is {wanted}, but {task.name} has {nodes} for {engines} engine{'s'[: engines > 1]} here; give "
            f"--env MIN_WORKERS={engines}, or --num-nodes {task.name}={math.ceil(wanted / each)}"
        )

"""``python -m trainer``: one rank of the trainer, or torchrun over this node's ranks where the job has several.

SkyPilot runs the same command on every node of the task. With one rank in all, training happens in this process;
otherwise torch's launcher starts one process a GPU (one a node without GPUs) with the same command.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from services.endpoints import TRAINER_RENDEZVOUS_PORT, Task, endpoint, node_addresses, node_rank, num_nodes
from services.errors import EXIT_CONFIGURATION, EXIT_RECOVERABLE, ConfigurationError
from services.scaffold import exit_code_of
from trainer.config import TrainerSettings

RENDEZVOUS_DEADLINE = timedelta(minutes=15)
EXIT_FAILED = 1


def main() -> int:
    """Runs this node's part of the trainer; returns its exit code."""
    if "RANK" in os.environ or num_nodes() * ranks_per_node() == 1:
        from trainer.run import run_rank

        return run_rank()
    # Settings are checked before any process is started: a mistake costs one line, not a traceback a rank.
    return exit_code_of(check_settings) or launch_ranks()


def check_settings() -> None:
    """Reads the settings; ConfigurationError for a value that is not allowed."""
    TrainerSettings.load()


def ranks_per_node() -> int:
    """One rank a GPU; one on a node without GPUs."""
    text = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    if not text.isdecimal():
        raise ConfigurationError(f"SKYPILOT_NUM_GPUS_PER_NODE is {text!r}; allowed is a whole number")
    import torch

    return max(min(int(text), torch.cuda.device_count()), 1) if torch.cuda.is_available() else 1


def launch_ranks() -> int:
    """Runs torch's launcher for this node's ranks; its exit code is the worst of theirs that says something."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rendezvous = endpoint(Task.TRAINER, TRAINER_RENDEZVOUS_PORT)
    host = rendezvous.host if "JOBGROUP_ENDPOINTS" in os.environ else node_addresses()[0]
    config = LaunchConfig(
        min_nodes=num_nodes(),
        max_nodes=num_nodes(),
        nproc_per_node=ranks_per_node(),
        run_id=os.environ.get("SKYPILOT_TASK_ID", "trainer"),
        rdzv_backend="static",
        rdzv_endpoint=f"{host}:{rendezvous.port}",
        rdzv_configs={"rank": node_rank(), "timeout": int(RENDEZVOUS_DEADLINE.total_seconds())},
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer")
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return next(
            (code for code in (EXIT_CONFIGURATION, EXIT_RECOVERABLE) if code in codes), max(*codes, EXIT_FAILED)
        )
    except SignalException as signal_error:
        return 128 + signal_error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m trainer``: one rank of the trainer, or torchrun over this node's ranks where the job has several.

SkyPilot runs the same command on every node of the task. With one rank in all, training happens in this process;
otherwise torch's launcher starts one process a GPU (one a node without GPUs) with the same command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection
from datetime import timedelta
from typing import NoReturn

from services.core.endpoints import TRAINER_RENDEZVOUS_PORT, Task, endpoint, node_addresses, node_rank, num_nodes
from services.core.errors import EXIT_CONFIGURATION, EXIT_PEER_LOST, EXIT_RECOVERABLE, ConfigurationError, exit_code_of
from trainer.config import TrainerSettings

RENDEZVOUS_DEADLINE = timedelta(minutes=15)
PEER_LOST_SECONDS = 15.0
"""A rank that lost its peers ends that much later: whoever failed by itself, here or on another node, is to end first,
since launcher and SkyPilot kill the others then and the first one's code decides what happens next."""


def main() -> int:
    """Runs this node's part of the trainer; returns its exit code."""
    if "RANK" in os.environ or num_nodes() * ranks_per_node() == 1:
        from trainer.run import run_rank

        code = run_rank()
        if code == EXIT_PEER_LOST:
            time.sleep(PEER_LOST_SECONDS)
        return code
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
    """Runs torch's launcher for this node's ranks; returns what ``node_code`` makes of their exit codes."""
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
        return node_code({failure.exitcode for failure in error.failures.values()})
    except SignalException as signal_error:
        return 128 + signal_error.sigval
    return 0


def node_code(rank_codes: Collection[int]) -> int:
    """The exit code of a node whose ranks failed with ``rank_codes``, as Popen has them: -n for signal n.

    SkyPilot restarts without end on EXIT_RECOVERABLE, so a rank that failed by itself wins over those to which a
    service was lost, and all of them win over those that lost their peers.
    """
    if EXIT_CONFIGURATION in rank_codes:
        return EXIT_CONFIGURATION
    own = [128 - code if code < 0 else code for code in rank_codes if code not in (EXIT_RECOVERABLE, EXIT_PEER_LOST)]
    if own:
        return max(own)
    return EXIT_RECOVERABLE if EXIT_RECOVERABLE in rank_codes else EXIT_PEER_LOST


def leave(code: int) -> NoReturn:
    """Ends this process at once, all being written.

    Threads of gloo have no order in which they end: now and then one aborts a process that Python takes apart, and the
    finished run would count as failed.
    """
    # Logs on a full disk must not change the exit code.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

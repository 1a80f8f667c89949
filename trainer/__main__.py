"""``python -m trainer``: one rank of the trainer, or the launcher of this node's ranks when the job has several.

SkyPilot runs the same command on every node of the task. If the job has one rank, this process trains. Otherwise
torch's launcher starts one process a GPU (one process on a node without GPUs) with the same command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection
from typing import NoReturn

from services.core import gpus
from services.core.endpoints import TRAINER_RENDEZVOUS_PORT, Task, endpoint, node_addresses, node_rank, num_nodes
from services.core.errors import EXIT_CONFIGURATION, EXIT_PEER_LOST, EXIT_RECOVERABLE, exit_code_of
from trainer.config import TrainerSettings

RENDEZVOUS_SECONDS = 900
PEER_LOST_SECONDS = 15.0
"""Delay before a rank that lost its peers ends, so that the rank that failed by itself ends first. The launcher and
SkyPilot then kill the others and act on the first rank's exit code."""


def main() -> int:
    """Run this node's part of the trainer and return its exit code."""
    set_allocator()
    n_ranks = 1

    def count_ranks() -> None:
        nonlocal n_ranks
        n_ranks = num_nodes() * ranks_per_node()

    if "RANK" not in os.environ:
        if code := exit_code_of(count_ranks):
            return code
        if n_ranks > 1:
            # Check the settings before any process starts, so that a mistake gives one line and not a traceback a rank.
            return exit_code_of(TrainerSettings.load) or launch_ranks()
    from trainer.run import run_rank

    code = run_rank()
    if code == EXIT_PEER_LOST:
        time.sleep(PEER_LOST_SECONDS)
    return code


def set_allocator() -> None:
    """Have torch grow blocks of GPU memory in place, unless the user chose; micro-batches of many sizes leave holes.

    torch reads the variable when it initialises CUDA.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def ranks_per_node() -> int:
    """Return the number of GPUs of this node; 1 without GPUs.

    Raises:
        ConfigurationError: torch sees fewer GPUs than the node has.
    """
    import torch

    wanted, found = gpus.promised() or 0, torch.cuda.device_count()
    gpus.check_cuda(found, torch.version.cuda)
    return max(wanted, 1)


def launch_ranks() -> int:
    """Run torch's launcher for this node's ranks and return the node's exit code; see ``node_code``."""
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
        rdzv_configs={"rank": node_rank(), "timeout": RENDEZVOUS_SECONDS},
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
    """Return the exit code of a node whose ranks failed with ``rank_codes``, in Popen's convention: -n for signal n.

    SkyPilot restarts without limit on EXIT_RECOVERABLE. So the code of a rank that failed by itself comes first, then
    that of a rank that lost a service, and that of a rank that lost its peers last.
    """
    if EXIT_CONFIGURATION in rank_codes:
        return EXIT_CONFIGURATION
    own = [128 - code if code < 0 else code for code in rank_codes if code not in (EXIT_RECOVERABLE, EXIT_PEER_LOST)]
    if own:
        return max(own)
    return EXIT_RECOVERABLE if EXIT_RECOVERABLE in rank_codes else EXIT_PEER_LOST


def leave(code: int) -> NoReturn:
    """Flush the logs and end this process at once, without Python's own shutdown.

    Threads of gloo end in no fixed order. Sometimes one aborts the process during Python's shutdown, and a finished run
    would count as failed.
    """
    # A full disk below the logs must not change the exit code.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

"""``python -m trainer``: one rank of the trainer, or the launcher of this node's ranks when the job has several.

SkyPilot runs the same command on every node of the task. If the job has one rank, this process trains. Otherwise it
starts one process a GPU (one process on a node without GPUs) with the same command, as torchrun would. With COLOCATE it
also starts the node's engines, and always a process for the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import NoReturn

from services.core import endpoints, machine
from services.core.endpoints import Task
from services.core.errors import (
    EXIT_CONFIGURATION,
    EXIT_PEER_LOST,
    EXIT_RECOVERABLE,
    ConfigurationError,
    exit_code_of,
    say_error,
)
from services.core.imports import pause_collection
from services.core.processes import Command, end_all, kill_stale_processes, shell_code, stop_signals
from services.core.toolchain import check_tools
from trainer.config import TrainerSettings

ENGINES = Command("engines", sys.executable, "services.rollout_server", ())
"""The engines of a node of a colocated job group, and on the first node their router."""
POLL_SECONDS = 0.2
"""Time between two looks at the ranks."""
STOP_SECONDS = 600.0
"""Time between SIGTERM and SIGKILL of a rank that writes a checkpoint because the run was asked to stop. Whoever asked
has a limit of its own: the local runner 60 s, the hook in jobgroup.yaml as long as this."""
FAILED_SECONDS = 30.0
"""The same time after another rank has failed, when there is no checkpoint to wait for."""
PEER_LOST_SECONDS = 15.0
"""Delay before a rank that lost its peers ends, so that the rank that failed by itself ends first. The launcher and
SkyPilot then kill the others and act on the first rank's exit code."""


def main() -> int:
    """Run this node's part of the trainer and return its exit code."""
    machine.use_mounted_driver()
    set_compiler()
    if "RANK" not in os.environ:
        try:
            kill_stale_processes()
            endpoints.ask_directly()
            n_ranks = endpoints.num_nodes() * ranks_per_node()
        except ConfigurationError as error:
            say_error(error)
            return EXIT_CONFIGURATION
        engines = [ENGINES] if endpoints.hosting_task(Task.ROLLOUT_SERVER) is Task.TRAINER else []
        if n_ranks > 1 or engines:
            # Check the settings before any process starts, so that a mistake gives one line and not a traceback a rank.
            return exit_code_of(TrainerSettings.load) or launch_ranks(n_ranks // endpoints.num_nodes(), beside=engines)
    set_allocator()  # of a rank alone: engines that sleep cannot have it
    with pause_collection():
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


def set_compiler() -> None:
    """Have torch's compiler share the node's cores among the ranks, unless the user chose.

    torch itself starts up to 32 compiling processes a rank by the machine's cores, of which a pod may have few.
    It reads the variable when it is imported.
    """
    processes = machine.promised_gpus() or 1
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(machine.threads(processes=processes)))


def ranks_per_node() -> int:
    """Return the number of GPUs of this node; 1 without GPUs.

    Raises:
        ConfigurationError: torch sees fewer GPUs than the node has, or the node cannot compile kernels.
    """
    gpus = machine.promised_gpus()
    if not gpus:
        return 1
    import torch

    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    check_tools()
    return gpus


def launch_ranks(
    count: int, command: Sequence[str] = (sys.executable, "-m", "trainer"), beside: Sequence[Command] = ()
) -> int:
    """Run a process for each of ``count`` ranks, with torchrun's variables, and return the node's exit code.

    The first rank that fails ends the others, and so does a signal: with SIGTERM, and with SIGKILL after
    FAILED_SECONDS, or STOP_SECONDS for a signal. torchrun itself would import torch, for seconds, before any rank could
    begin to.

    Args:
        count: ranks of this node.
        command: the command of a rank.
        beside: commands that run as long as the ranks do; the end of one counts as a rank's failure.
    """
    meeting = endpoints.endpoint(Task.TRAINER, endpoints.TRAINER_RENDEZVOUS_PORT)
    environment = os.environ | {
        "MASTER_ADDR": meeting.host if "JOBGROUP_ENDPOINTS" in os.environ else endpoints.node_addresses()[0],
        "MASTER_PORT": str(meeting.port),
        "WORLD_SIZE": str(endpoints.num_nodes() * count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    received: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _frame: received.append(number))
    ranks = []
    for local in range(count):
        numbers = {"RANK": str(endpoints.node_rank() * count + local), "LOCAL_RANK": str(local)}
        # In a session of its own, so that a signal reaches a rank once: from here.
        ranks.append(subprocess.Popen(command, env=environment | numbers, start_new_session=True))
    others = [
        subprocess.Popen(one.line, env=one.variables(), stdin=subprocess.DEVNULL, start_new_session=True)
        for one in beside
    ]
    codes = [rank.poll() for rank in ranks]
    ended: list[int] = []
    while None in codes and not received and not any(codes) and not ended:
        time.sleep(POLL_SECONDS)
        codes = [rank.poll() for rank in ranks]
        ended = [code or EXIT_RECOVERABLE for other in others if (code := other.poll()) is not None]
    end_all([*ranks, *others], STOP_SECONDS if received else FAILED_SECONDS)
    if received:
        return 128 + received[0]
    failed = {code for code in (*codes, *ended) if code}
    return node_code(failed) if failed else 0


def node_code(rank_codes: Collection[int]) -> int:
    """Return the exit code of a node whose ranks failed with ``rank_codes``, in Popen's convention: -n for signal n.

    SkyPilot restarts without limit on EXIT_RECOVERABLE. So the code of a rank that failed by itself comes first, then
    that of a rank that lost a service, and that of a rank that lost its peers last.
    """
    if EXIT_CONFIGURATION in rank_codes:
        return EXIT_CONFIGURATION
    codes = [shell_code(code) for code in rank_codes if code not in (EXIT_RECOVERABLE, EXIT_PEER_LOST)]
    if codes:
        return max(codes)
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

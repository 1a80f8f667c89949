"""Slurm: rollout nodes as the tasks of a batch job, which this process submits, watches and ends.

Queue, account and time limit are sbatch's own variables, such as SBATCH_PARTITION. sbatch passes this process's
environment on, with its secrets. The machines share a file system.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from evaluation import node
from evaluation.allocation import Allocation
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger

log = get_logger(__name__)

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 5.0
UNKNOWN_SECONDS = 60.0
"""Time for which squeue may fail, as it does while Slurm's controller is busy or restarts."""
COMMAND_SECONDS = 120.0
"""Longest time that one of Slurm's commands may take."""
LOG = "slurm.log"
LOG_LINES = 5

WAITING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED")
"""States of a job that may still serve. squeue no longer knows an old job, and answers nothing."""

Watch = Callable[[], Awaitable[None]]


def script(name: str, allocation: Allocation, variables: Mapping[str, str], directory: Path) -> str:
    """Return the batch file of the nodes; ``directory`` gets their log and their addresses."""
    is_on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --ntasks={allocation.data}",
        *([f"#SBATCH --gpus-per-task={allocation.gpus}"] if is_on_gpus else []),
        # Quoted as sbatch reads it, which replaces %.
        f"#SBATCH --output={shlex.quote(str(directory / LOG).replace('%', '%%'))}",
        "set -euo pipefail",
        f"cd {shlex.quote(str(ROOT))}",
        *(f"export {key}={shlex.quote(value)}" for key, value in sorted(variables.items())),
        # A node that ends does not end the others.
        f"exec srun --kill-on-bad-exit=0 {shlex.join([sys.executable, '-m', node.MODULE, str(directory)])}",
    ]
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def running(text: str, directory: Path) -> AsyncIterator[Watch]:
    """Submit a batch file and yield what raises an error once the job has ended; cancel the job on exit.

    Raises:
        ConfigurationError: there is no Slurm here, or it refuses the file.
    """
    path = directory / "job.sbatch"
    await asyncio.to_thread(path.write_text, text)
    submission = asyncio.ensure_future(_submit(path))
    try:
        yield partial(_watch, await asyncio.shield(submission), directory / LOG)
    finally:
        # Ctrl-C during the submission waits for it, because its job would stay in the queue.
        job = await submission
        try:
            await _run("scancel", job)
        # The error that ended the evaluation, if there is one, says more.
        except ConfigurationError as error:
            log.warning("the job may still be there; cancel it by hand", job=job, error=str(error))


async def _submit(path: Path) -> str:
    """Submit a batch file and return its job's number.

    Raises:
        ConfigurationError: there is no Slurm here, or it refuses the file.
    """
    told = await _run("sbatch", "--parsable", str(path))
    found = re.match(r"\d+", told)
    if found is None:
        raise ConfigurationError(f"sbatch answered {told[:200]!r}, which has no job's number")
    return found[0]


async def _watch(job: str, output: Path) -> None:
    """Wait until the job has left the queue; ``output`` is its log.

    Raises:
        DependencyLostError: it has; the message has the end of its log.
        ConfigurationError: squeue has failed for UNKNOWN_SECONDS.
    """
    answered = time.monotonic()
    while True:
        try:
            state = await _run("squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job}")
        except ConfigurationError as error:
            if time.monotonic() - answered > UNKNOWN_SECONDS:
                raise
            log.warning("the state of Slurm's job is not known", job=job, error=str(error))
        else:
            answered = time.monotonic()
            if state.strip() not in WAITING:
                break
        await asyncio.sleep(POLL_SECONDS)
    lines = await asyncio.to_thread(lambda: output.read_text().splitlines() if output.exists() else [])
    raise DependencyLostError(f"Slurm's job {job} has ended: {' | '.join(lines[-LOG_LINES:])}; see {output}")


async def _run(*command: str) -> str:
    """Run one of Slurm's commands and return its output.

    The command ends by itself whatever happens to this process: in a thread, which Python waits for at its exit, and in
    a session of its own, which the terminal's Ctrl-C does not reach.

    Raises:
        ConfigurationError: it does not exist, fails, or takes longer than COMMAND_SECONDS.
    """

    def call() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command, capture_output=True, timeout=COMMAND_SECONDS, start_new_session=True, check=False
        )

    try:
        done = await asyncio.to_thread(call)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--scheduler slurm: there is no {command[0]} in PATH; run this on a node of the Slurm cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"{shlex.join(command)} took longer than {error.timeout:g} s") from error
    if done.returncode:
        raise ConfigurationError(f"{shlex.join(command)} failed: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout.decode(errors="replace")

"""Rollout nodes on a cluster: as the tasks of a Slurm job, or as actors of Ray.

``on_slurm`` and ``on_ray`` start the nodes and end them on exit. They yield a function that finds the nodes' URLs and a
function that raises an error once all nodes have ended.

Slurm: queue, account and time limit are sbatch's own variables, such as SBATCH_PARTITION. sbatch passes this process's
environment on, with its secrets. The machines share a file system.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from evaluation import node
from evaluation.node import Allocation
from evaluation.pool import Discover
from services.core.errors import ConfigurationError, DependencyLostError, first_line
from services.core.logs import get_logger
from services.core.processes import end_all

log = get_logger(__name__)

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 5.0
STOP_SECONDS = 30.0
"""The time that Ray's nodes have to end."""
UNKNOWN_SECONDS = 60.0
"""Time for which squeue may fail, as it does while Slurm's controller is busy or restarts."""
COMMAND_SECONDS = 120.0
"""Longest time that one of Slurm's commands may take."""
LOG = "slurm.log"
LOG_LINES = 5

WAITING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED")
"""States of a job that may still serve. squeue forgets an old job, and prints nothing for it."""

Watch = Callable[[], Awaitable[None]]


def slurm_script(name: str, allocation: Allocation, variables: Mapping[str, str], directory: Path) -> str:
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
async def on_slurm(script: str, directory: Path) -> AsyncIterator[tuple[Discover, Watch]]:
    """Submit the batch file ``script``, which has its log and addresses in ``directory``; cancel the job on exit.

    Raises:
        ConfigurationError: there is no Slurm here, or it refuses the file.
    """
    path = directory / "job.sbatch"
    await asyncio.to_thread(path.write_text, script)
    submission = asyncio.ensure_future(_submit(path))
    try:
        job = await asyncio.shield(submission)
        yield partial(asyncio.to_thread, node.registered, directory), partial(_watch_job, job, directory / LOG)
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
    output = await _run("sbatch", "--parsable", str(path))
    number = re.match(r"\d+", output)
    if number is None:
        raise ConfigurationError(f"sbatch answered {output[:200]!r}, which has no job's number")
    return number[0]


async def _watch_job(job: str, output: Path) -> None:
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
    lines = await asyncio.to_thread(lambda: output.read_text(encoding="utf-8").splitlines() if output.exists() else [])
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


class RayNode:
    """A rollout node on the machine on which Ray puts the actor."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start the node's process with further variables."""
        import ray

        placed, self._url = node.placed(ray.util.get_node_ip_address())
        self._process = subprocess.Popen(node.COMMAND, env={**os.environ, **variables, **placed})

    def url(self) -> str:
        """Return the router's URL."""
        return self._url

    def exit_code(self) -> int | None:
        """Return the process's exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process and its child processes."""
        # Its children notice if it is killed, and end.
        end_all([self._process], STOP_SECONDS)


@asynccontextmanager
async def on_ray(allocation: Allocation, variables: Mapping[str, str]) -> AsyncIterator[tuple[Discover, Watch]]:
    """Start the nodes as actors of Ray, each once the cluster has room for it.

    A machine that is lost is the end of its node alone. A cluster is found as ``ray.init`` finds it, by RAY_ADDRESS or
    on this machine; without one Ray starts its own.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "--scheduler ray: Ray is not installed here; install it with pip install ray"
        ) from error
    try:
        await asyncio.to_thread(ray.init, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--scheduler ray: {first_line(error)}; RAY_ADDRESS names another cluster") from error
    is_on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    actor: Any = ray.remote(num_cpus=1, num_gpus=allocation.gpus if is_on_gpus else 0)(RayNode)
    nodes = [actor.remote(dict(variables)) for _ in range(allocation.data)]
    urls = {one.url.remote(): one for one in nodes}

    def started() -> list[Any]:
        """Return the references of ``urls`` to which Ray has an answer: of nodes that have started, or are lost."""
        done, _ = ray.wait(list(urls), num_returns=len(urls), timeout=0)
        return list(done)

    async def discover() -> list[str]:
        answers = await asyncio.gather(*started(), return_exceptions=True)
        return [url for url in answers if isinstance(url, str)]

    async def watch() -> None:
        while True:
            codes = await asyncio.gather(*(one.exit_code.remote() for one in nodes), return_exceptions=True)
            if None not in codes:
                ends = ", ".join(first_line(code) if isinstance(code, BaseException) else str(code) for code in codes)
                raise DependencyLostError(f"all nodes on Ray have ended, with {ends}; see Ray's logs of the workers")
            await asyncio.sleep(POLL_SECONDS)

    try:
        yield discover, watch
    finally:
        # A node that waits for room would not answer; Ray forgets it.
        await asyncio.gather(*(urls[one].stop.remote() for one in started()), return_exceptions=True)
        await asyncio.to_thread(ray.shutdown)

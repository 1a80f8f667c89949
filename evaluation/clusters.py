"""Rollout nodes on a cluster: as the tasks of a Slurm job, or as actors of Ray.

``on_slurm`` and ``on_ray`` start the nodes and end them on exit. They yield the URL of the router, which is on the
first node, and a function that raises an error once it has ended. The other nodes register their engines there.

``python -m evaluation.clusters DIRECTORY`` becomes the node of its rank where Slurm starts it. Queue, account and time
limit are sbatch's own variables, such as SBATCH_PARTITION. sbatch passes this process's environment on, with its
secrets. The machines share a file system, by which the nodes find the first one's router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, ROUTER_PORT, Endpoint, Task
from services.core.errors import ConfigurationError, DependencyLostError, first_line
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.core.processes import end_all

log = get_logger(__name__)

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "services.rollout_server"]
ADDRESS = "router"
"""The file with the ``host:port`` of the first node's router."""
LOG = "slurm.log"
LOG_LINES = 5
POLL_SECONDS = 5.0
STOP_SECONDS = 30.0
"""The time that Ray's nodes have to end."""
UNKNOWN_SECONDS = 60.0
"""Time for which squeue may fail, as it does while Slurm's controller is busy or restarts."""
COMMAND_SECONDS = 120.0
"""Longest time that one of Slurm's commands may take."""
WAITING = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED")
"""States of a job that may still serve. squeue forgets an old job, and prints nothing for it."""

Watch = Callable[[], Awaitable[None]]


def placed(host: str, rank: int, router: str = "") -> tuple[dict[str, str], str]:
    """Return the variables by which a rollout node listens on free ports of ``host``, and its router's ``host:port``.

    The first node, of rank 0, has the router; the others get its address.
    """
    with ExitStack() as stack:
        ports = {}
        for port in PORTS[Task.ROLLOUT_SERVER]:
            # All stay bound until the last is found, so that no two are the same.
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            probe.bind((host, 0))
            ports[port] = probe.getsockname()[1]
    router = router or Endpoint(host, ports[ROUTER_PORT]).url.removeprefix("http://")
    task = Task.ROLLOUT_SERVER.value
    addresses = {f"{task}-0:{port}": router for port in ports}
    addresses |= {f"{task}-{rank}:{port}": f"{host}:{free}" for port, free in ports.items()}
    variables = {
        ENDPOINTS_VARIABLE: json.dumps(addresses),
        "SKYPILOT_JOBGROUP_NAME": "evaluation",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": host,
    }
    return variables, router


def slurm_script(number: int, gpus: int, variables: Mapping[str, str], directory: Path) -> str:
    """Return the batch file of ``number`` nodes with ``gpus`` each; ``directory`` gets their log and their address."""
    is_on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=evaluate",
        f"#SBATCH --ntasks={number}",
        *([f"#SBATCH --gpus-per-task={gpus}"] if is_on_gpus else []),
        # Quoted as sbatch reads it, which replaces %.
        f"#SBATCH --output={shlex.quote(str(directory / LOG).replace('%', '%%'))}",
        "set -euo pipefail",
        f"cd {shlex.quote(str(ROOT))}",
        *(f"export {key}={shlex.quote(value)}" for key, value in sorted(variables.items())),
        # A node that ends does not end the others.
        f"exec srun --kill-on-bad-exit=0 {shlex.join([sys.executable, '-m', 'evaluation.clusters', str(directory)])}",
    ]
    return "\n".join(lines) + "\n"


def become_node(directory: Path, environment: Mapping[str, str]) -> None:
    """Become the rollout node of the rank that Slurm gives, once the first node's router is known."""
    rank, file = int(environment["SLURM_PROCID"]), directory / ADDRESS
    while rank and not file.exists():
        time.sleep(1.0)
    variables, router = placed(_own_address(), rank, file.read_text("utf-8") if rank else "")
    if not rank:
        atomic_write(file, router)
    os.execve(COMMAND[0], COMMAND, {**environment, **variables})


def _own_address() -> str:
    """Return the address of this machine on its network; 127.0.0.1 without one."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing, but chooses the interface of the default route.
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


@asynccontextmanager
async def on_slurm(script: str, directory: Path) -> AsyncIterator[tuple[str, Watch]]:
    """Submit the batch file ``script`` and wait for its first node, which may be in the queue; cancel the job on exit.

    Raises:
        ConfigurationError: there is no Slurm here, or it refuses the file.
        DependencyLostError: the job ended before its first node began.
    """
    path = directory / "job.sbatch"
    await asyncio.to_thread(path.write_text, script)
    submission = asyncio.ensure_future(_run("sbatch", "--parsable", str(path)))
    try:
        job = _number(await asyncio.shield(submission))
        watch = partial(_watch_job, job, directory / LOG)
        watching = asyncio.ensure_future(watch())
        try:
            while not await asyncio.to_thread((directory / ADDRESS).exists):
                await asyncio.wait([watching], timeout=POLL_SECONDS)
                if watching.done():
                    await watching
        finally:
            watching.cancel()
        yield f"http://{(directory / ADDRESS).read_text('utf-8')}", watch
    finally:
        # Ctrl-C during the submission waits for it, because its job would stay in the queue.
        job = _number(await submission)
        try:
            await _run("scancel", job)
        # The error that ended the evaluation, if there is one, says more.
        except ConfigurationError as error:
            log.warning("the job may still be there; cancel it by hand", job=job, error=str(error))


def _number(output: str) -> str:
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

    def call() -> str:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS, start_new_session=True, check=True)
        return done.stdout.decode(errors="replace")

    try:
        return await asyncio.to_thread(call)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"--scheduler slurm: there is no {command[0]} in PATH; run this on a node of the Slurm cluster"
        ) from error
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()[:300]
        raise ConfigurationError(f"{shlex.join(command)} failed: {said or error}") from error


class RayNode:
    """A rollout node on the machine on which Ray puts the actor."""

    def __init__(self, variables: Mapping[str, str], rank: int, router: str) -> None:
        """Start the node's process with further variables."""
        import ray

        own, self._router = placed(ray.util.get_node_ip_address(), rank, router)
        self._process = subprocess.Popen(COMMAND, env={**os.environ, **variables, **own})

    def router(self) -> str:
        """Return the router's ``host:port``."""
        return self._router

    def exit_code(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        return self._process.wait()

    def stop(self) -> None:
        """End the process and its child processes."""
        # Its children notice if it is killed, and end.
        end_all([self._process], STOP_SECONDS)


@asynccontextmanager
async def on_ray(number: int, gpus: int, variables: Mapping[str, str]) -> AsyncIterator[tuple[str, Watch]]:
    """Start ``number`` nodes as actors of Ray, each once the cluster has room for it, and wait for the first one.

    A machine that is lost is the end of its node alone. A cluster is found as ``ray.init`` finds it, by RAY_ADDRESS or
    on this machine; without one Ray starts its own.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster does not answer.
        DependencyLostError: the first node could not be started.
    """
    try:
        import ray

        await asyncio.to_thread(ray.init, log_to_driver=False, configure_logging=False)
    except ImportError as error:
        raise ConfigurationError("--scheduler ray: Ray is not installed here; run pip install ray") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--scheduler ray: {first_line(error)}; RAY_ADDRESS names another cluster") from error
    is_on_gpus = variables.get("ROLLOUT_ENGINE") != "embedded"
    options = {"num_cpus": 1, "num_gpus": gpus if is_on_gpus else 0, "max_concurrency": 2}
    actor: Any = ray.remote(**options)(RayNode)
    first = actor.remote(dict(variables), 0, "")
    others: list[Any] = []

    async def watch() -> None:
        try:
            end = f"exit code {await first.exit_code.remote()}"
        except Exception as error:  # noqa: BLE001  # Ray has a dozen for an actor or a machine that was lost
            end = first_line(error)
        raise DependencyLostError(f"the node with the router on Ray has ended, with {end}; see Ray's logs of workers")

    try:
        try:
            router = await first.router.remote()
        except Exception as error:
            raise DependencyLostError(f"Ray could not start the first node: {first_line(error)}") from error
        others += [actor.remote(dict(variables), rank, router) for rank in range(1, number)]
        yield f"http://{router}", watch
    finally:
        # A node that waits for room would not answer; Ray forgets it.
        stopping = asyncio.gather(*(one.stop.remote() for one in (first, *others)), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping, STOP_SECONDS)
        await asyncio.to_thread(ray.shutdown)


if __name__ == "__main__":
    become_node(Path(sys.argv[1]), os.environ)

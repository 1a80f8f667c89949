"""Rollout nodes on a cluster, started by a program of this machine: srun, or this module, which asks Ray.

The first node has the router, whose address it writes into a file; the others register their engines there. The
machines of Slurm share a file system, by which they find that file. Queue, account and time limit are srun's own
variables, such as SLURM_PARTITION.

``python -m evaluation.clusters node DIRECTORY`` becomes the node of its rank where srun starts it.
``python -m evaluation.clusters ray DIRECTORY NUMBER GPUS NAMES`` starts nodes as actors of Ray, with the variables of
these names, and ends with the first one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, ROUTER_PORT, Endpoint, Task
from services.core.errors import ConfigurationError, exit_code_of, first_line
from services.core.files import atomic_write
from services.core.machine import CORES_VARIABLE, PROMISED_GPUS_VARIABLE
from services.core.processes import end_all

COMMAND = [sys.executable, "-m", "services.rollout_server"]
ADDRESS = "router"
"""The file with the ``host:port`` of the first node's router."""
POLL_SECONDS = 1.0
STOP_SECONDS = 30.0
"""The time that Ray's nodes have to end."""
OF_THIS_MACHINE = (PROMISED_GPUS_VARIABLE, CORES_VARIABLE, "GLOO_SOCKET_IFNAME")
"""Variables of the local runner that say nothing about another machine."""


def slurm_command(number: int, gpus: int, directory: Path) -> str:
    """Return the command of ``number`` nodes with ``gpus`` each; a node that ends does not end the others."""
    node = [sys.executable, "-m", "evaluation.clusters", "node", str(directory)]
    share = [f"--gpus-per-task={gpus}"] if gpus else []
    return shlex.join(["srun", "--job-name=evaluate", f"--ntasks={number}", *share, "--kill-on-bad-exit=0", *node])


def ray_command(number: int, gpus: int, directory: Path, names: Sequence[str]) -> str:
    """Return the command of ``number`` nodes with ``gpus`` each, and with the variables of these names."""
    words = ["ray", str(directory), str(number), str(gpus), ",".join(names)]
    return shlex.join([sys.executable, "-m", "evaluation.clusters", *words])


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


def become_node(directory: Path, environment: Mapping[str, str]) -> None:
    """Become the rollout node of the rank that Slurm gives, once the first node's router is known."""
    rank, file = int(environment["SLURM_PROCID"]), directory / ADDRESS
    while rank and not file.exists():
        time.sleep(POLL_SECONDS)
    variables, router = placed(_own_address(), rank, file.read_text("utf-8") if rank else "")
    if not rank:
        atomic_write(file, router)
    inherited = {name: value for name, value in environment.items() if name not in OF_THIS_MACHINE}
    os.execve(COMMAND[0], COMMAND, {**inherited, **variables})


def _own_address() -> str:
    """Return the address of this machine on its network; 127.0.0.1 without one."""
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing, but chooses the interface of the default route.
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


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


def run_on_ray(directory: Path, number: int, gpus: int, variables: Mapping[str, str]) -> int:
    """Run ``number`` nodes as actors, each once the cluster has room for it, and return the first one's exit code.

    A cluster is found as ``ray.init`` finds it, by RAY_ADDRESS or on this machine; without one Ray starts its own.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster does not answer.
    """
    try:
        import ray

        ray.init(log_to_driver=False, configure_logging=False)
    except ImportError as error:
        raise ConfigurationError("--scheduler ray: Ray is not installed here; run pip install ray") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--scheduler ray: {first_line(error)}; RAY_ADDRESS names another cluster") from error
    # Two calls at once, so that a node can be stopped while somebody waits for its end.
    actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_concurrency=2)(RayNode)
    nodes = [actor.remote(variables, 0, "")]
    try:
        router = ray.get(nodes[0].router.remote())
        nodes += [actor.remote(variables, rank, router) for rank in range(1, number)]
        atomic_write(directory / ADDRESS, router)
        code: int = ray.get(nodes[0].exit_code.remote())
        return code
    finally:
        # A node that waits for room does not answer; Ray forgets it.
        ray.wait([node.stop.remote() for node in nodes], num_returns=len(nodes), timeout=STOP_SECONDS)
        ray.shutdown()


def main() -> None:
    """Become a node of Slurm, or run nodes on Ray, and exit as the first of them does."""
    kind, directory, *others = sys.argv[1:]
    if kind == "node":
        become_node(Path(directory), os.environ)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    number, gpus, names = others
    variables = {name: os.environ[name] for name in names.split(",")}
    sys.exit(run_on_ray(Path(directory), int(number), int(gpus), variables))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))

"""Start one rollout node where a scheduler puts it: ``python -m evaluation.node DIRECTORY``.

The node is a job group of its own, with a router and an engine on free ports of its machine, and writes the router's
URL into a file of DIRECTORY, which every machine sees.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from services.core.endpoints import ENDPOINTS_VARIABLE, PORTS, ROUTER_PORT, Task
from services.core.files import atomic_write

MODULE = "evaluation.node"
COMMAND = [sys.executable, "-m", "services.rollout_server"]
SUFFIX = ".url"


def placed(host: str) -> tuple[dict[str, str], str]:
    """Return the variables by which a rollout node listens on free ports of ``host``, and its router's URL."""
    with ExitStack() as stack:
        ports = {}
        for port in PORTS[Task.ROLLOUT_SERVER]:
            # All stay bound until the last is found, so that no two are the same.
            probe = stack.enter_context(socket.socket())
            probe.bind((host, 0))
            ports[port] = probe.getsockname()[1]
    name = f"{Task.ROLLOUT_SERVER.value}-0"
    endpoints = {f"{name}:{port}": f"{host}:{free}" for port, free in ports.items()}
    variables = {
        ENDPOINTS_VARIABLE: json.dumps(endpoints),
        "SKYPILOT_JOBGROUP_NAME": "evaluation",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": host,
    }
    return variables, f"http://{host}:{ports[ROUTER_PORT]}"


def own_address() -> str:
    """Return the address of this machine on its network; 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing, but chooses the interface of the default route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def registered(directory: Path) -> Sequence[str]:
    """Return the URLs of the nodes that have been started with ``directory``."""
    return [path.read_text() for path in sorted(directory.glob(f"*{SUFFIX}"))]


def main(directory: Path, environment: Mapping[str, str]) -> None:
    """Become a rollout node."""
    address = own_address()
    variables, url = placed(address)
    atomic_write(directory / f"{address}-{os.getpid()}{SUFFIX}", url)
    os.execve(COMMAND[0], COMMAND, {**environment, **variables})


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ)

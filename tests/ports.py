"""Ports for processes that tests start, which may take minutes before they listen."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket

# Below the ports that systems give to outgoing connections and to sockets that are bound to port 0. Tests that run
# beside these have others.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
PORTS = range(12_000 + 5_000 * _WORKER, 17_000 + 5_000 * _WORKER)
_turns = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, none of which is returned again for the next thousands of calls."""
    ports: list[int] = []
    while len(ports) < count:
        port = PORTS[next(_turns) % len(PORTS)]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]

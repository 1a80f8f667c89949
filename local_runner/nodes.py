"""Gives every node of a job group an address of its own on this machine.

Linux answers on all of 127.0.0.0/8, so there a node is 127.x.y.k and listens on its usual ports, or a free one where
something of this machine has a usual one on all addresses. Elsewhere only 127.0.0.1 answers; nodes then share it, and
each of their ports is mapped to a free one.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from local_runner.spec import JobGroup
from services.core.endpoints import PORTS, Task
from services.core.errors import ConfigurationError

BLOCK_TRIES = 64
# Held by a run for as long as its addresses are its own; no component listens there.
GUARD_PORT = 30999


@dataclass(frozen=True)
class Addresses:
    """Where the nodes are: ``hosts[task][rank]``, and ``endpoints`` as JOBGROUP_ENDPOINTS has it."""

    hosts: dict[str, list[str]]
    endpoints: dict[str, str]

    @property
    def variable(self) -> str:
        """The value of JOBGROUP_ENDPOINTS."""
        return json.dumps(self.endpoints)

    def find(self, task: str, rank: int, port: int) -> str:
        """``host:port`` of what node ``rank`` of ``task`` calls ``port``."""
        return self.endpoints[f"{task}-{rank}:{port}"]


@contextlib.contextmanager
def allocate(group: JobGroup, *, own_hosts: bool | None = None) -> Iterator[Addresses]:
    """Addresses for every node of ``group`` that no other run gets meanwhile.

    ``own_hosts`` says whether each node has a host of its own; by default, wherever the machine allows it.

    Raises:
        ConfigurationError: no free block of addresses was found.
    """
    if own_hosts is None:
        own_hosts = _can_listen("127.77.77.77", 0)
    count = sum(task.num_nodes for task in group.tasks)
    if not own_hosts:
        yield _addresses(group, ["127.0.0.1"] * count, keep_ports=False)
        return
    with contextlib.ExitStack() as stack:
        for _ in range(BLOCK_TRIES):
            block = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
            guard = stack.enter_context(socket.socket())
            try:
                guard.bind((f"{block}.1", GUARD_PORT))
            except OSError:  # another run has the block
                continue
            yield _addresses(group, [f"{block}.{number + 2}" for number in range(count)], keep_ports=True)
            return
        raise ConfigurationError(
            f"no free block of loopback addresses in {BLOCK_TRIES} tries; something has port {GUARD_PORT} of all: "
            "end it, or give --shared-host"
        )


def _nodes(group: JobGroup) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Task, rank and ports of every node."""
    for task in group.tasks:
        ports = PORTS[Task(task.name)] if task.name in set(Task) else ()
        for rank in range(task.num_nodes):
            yield task.name, rank, ports


def _addresses(group: JobGroup, node_hosts: Sequence[str], *, keep_ports: bool) -> Addresses:
    """Addresses of all nodes, which are at ``node_hosts`` in the order of the file."""
    hosts: dict[str, list[str]] = {}
    endpoints = {}
    with contextlib.ExitStack() as stack:
        for host, (task, rank, ports) in zip(node_hosts, _nodes(group), strict=True):
            hosts.setdefault(task, []).append(host)
            for port in ports:
                # All stay bound until the last is found, so no two get the same.
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port if keep_ports and _can_listen(host, port) else 0))
                endpoints[f"{task}-{rank}:{port}"] = f"{host}:{probe.getsockname()[1]}"
    return Addresses(hosts, endpoints)


def _can_listen(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

"""The addresses of a job group's nodes on this machine.

Linux answers on all of 127.0.0.0/8. There each node has an address 127.x.y.k of its own and listens on its usual ports;
a free port replaces a usual one that another program has on all addresses. Elsewhere only 127.0.0.1 answers: nodes
share it, and each of their ports is mapped to a free one.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from local_runner.spec import JobGroup
from services.core.endpoints import ENGINE_PORT, PORTS, Task
from services.core.errors import ConfigurationError

BLOCK_TRIES = 64
GUARD_PORT = 30999
"""A run binds this port of its block of addresses to reserve the block; no component listens there."""


@dataclass(frozen=True)
class Addresses:
    """The addresses of a run's nodes."""

    hosts: dict[str, list[str]]
    """Host by task and rank."""
    endpoints: dict[str, str]
    """``host:port`` by ``{task}-{rank}:{port}``, as JOBGROUP_ENDPOINTS has it."""

    @property
    def variable(self) -> str:
        """The value of JOBGROUP_ENDPOINTS."""
        return json.dumps(self.endpoints)

    def find(self, task: str, rank: int, port: int) -> str:
        """Return the ``host:port`` that stands for ``port`` of node ``rank`` of ``task``."""
        return self.endpoints[f"{task}-{rank}:{port}"]


@contextlib.contextmanager
def allocate(group: JobGroup, *, own_hosts: bool | None = None) -> Iterator[Addresses]:
    """Yield addresses for every node of ``group``, which no other run gets within the context.

    ``own_hosts`` says whether each node has a host of its own; None: wherever the machine allows it.

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
            f"no free block of loopback addresses in {BLOCK_TRIES} tries; another program has port {GUARD_PORT} on all "
            "of them: end it, or give --shared-host"
        )


def health_address(addresses: Mapping[str, str], node: str) -> str | None:
    """Return the ``host:port`` at which a node, such as ``reward-server-0``, answers /health; None if at none.

    Args:
        addresses: ``host:port`` by ``node:port``, as JOBGROUP_ENDPOINTS has it.
        node: task and rank.
    """
    task, _, rank = node.rpartition("-")
    # Of the trainer only the first rank listens.
    if task not in set(Task) or not PORTS[Task(task)] or (task == Task.TRAINER and rank != "0"):
        return None
    # The first rollout node is up once its router is.
    port = ENGINE_PORT if task == Task.ROLLOUT_SERVER and rank != "0" else PORTS[Task(task)][0]
    return addresses.get(f"{node}:{port}")


def trainer_address(addresses: Mapping[str, str]) -> str | None:
    """Return the ``host:port`` of the trainer's status page; None in a run without a trainer."""
    return health_address(addresses, f"{Task.TRAINER.value}-0")


def _addresses(group: JobGroup, node_hosts: Sequence[str], *, keep_ports: bool) -> Addresses:
    """Return the addresses of all nodes, whose hosts are ``node_hosts`` in the order of the file."""
    hosts: dict[str, list[str]] = {}
    endpoints = {}
    with contextlib.ExitStack() as stack:
        ranks = [(task.name, rank) for task in group.tasks for rank in range(task.num_nodes)]
        for host, (task, rank) in zip(node_hosts, ranks, strict=True):
            hosts.setdefault(task, []).append(host)
            for port in PORTS.get(Task(task), ()) if task in set(Task) else ():
                # All ports stay bound until the last is found, so that no two nodes get the same.
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
